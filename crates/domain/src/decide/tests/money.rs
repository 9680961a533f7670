//! Turns without budget.

use super::*;

#[test]
fn message_without_budget_is_admitted_and_its_turn_fails() {
    let mut world = World::new();
    world.broke = true;
    world.task.titled = false;
    world.send();
    let taken = world.decide(Event::Wake);
    assert!(
        taken.admitted.is_some() && taken.ended.is_none() && taken.error.is_none(),
        "{taken:?}"
    );
    assert_eq!((world.task.phase, world.task.next_wake), (Phase::InvokeModel, Some(world.now)));
    let ended = world.decide(Event::Wake);
    assert_eq!(ended.ended.expect("the turn ends").outcome, TurnOutcome::Failed);
    let error = ended.error.expect("the error is reported");
    assert_eq!((error.code.as_str(), error.message.as_str()), (BUDGET_EXHAUSTED, "no money"));
    assert_eq!((world.task.phase, world.task.next_wake), (Phase::AwaitInput, None));
    assert!(world.commands_sent.is_empty());
}

#[test]
fn exhausted_turn_keeps_results_and_next_message_continues() {
    let mut world = World::with_model_call();
    world.result(calls(&["a"]));
    world.broke = true;
    let ended = world.result(results(&["a"]));
    assert_eq!(ended.ended.expect("the turn ends").outcome, TurnOutcome::Failed);
    assert_eq!(world.transcript.len(), 3, "the result of the script is there");
    world.broke = false;
    world.send();
    world.decide(Event::Wake);
    let answered = world.result(text("I went on."));
    assert_eq!(answered.ended.expect("the turn ends").outcome, TurnOutcome::Completed);
    assert_eq!(world.task.last_error, None);
}

#[test]
fn retry_is_dropped_when_budget_is_exhausted() {
    let mut world = World::with_model_call();
    world.result(failed(FailureClass::Overloaded));
    assert!(matches!(
        world.task.step.as_ref().map(|step| &step.state),
        Some(StepState::Backoff { .. })
    ));
    world.broke = true;
    world.elapse(600);
    let ended = world.decide(Event::Wake);
    assert_eq!(ended.error.expect("the error is reported").code, BUDGET_EXHAUSTED);
    assert_eq!(world.task.step, None);
}

#[test]
fn title_without_budget_is_skipped_without_error() {
    let mut world = World::new();
    world.task.titled = false;
    world.send();
    world.decide(Event::Wake);
    world.broke = true;
    let ended = world.result(text("done"));
    assert_eq!(ended.ended.expect("the turn ends").outcome, TurnOutcome::Completed);
    assert_eq!((world.task.title_step, ended.error), (None, None));
}
