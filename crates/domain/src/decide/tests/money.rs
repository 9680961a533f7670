//! Turns for which there is no money.

use super::*;

#[test]
fn a_message_there_is_no_money_for_is_taken_and_its_turn_fails_with_the_reason() {
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
    let error = ended.error.expect("people are told");
    assert_eq!((error.code.as_str(), error.message.as_str()), (BUDGET_EXHAUSTED, "no money"));
    assert_eq!((world.task.phase, world.task.next_wake), (Phase::AwaitInput, None));
    assert!(world.commanded.is_empty());
}

#[test]
fn a_turn_that_runs_out_of_money_keeps_what_its_scripts_gave_and_goes_on_with_the_next_message() {
    let mut world = World::asking();
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
fn a_call_that_was_to_be_tried_again_is_not_when_the_money_is_gone() {
    let mut world = World::asking();
    world.result(failed(FailureClass::Overloaded));
    assert!(matches!(
        world.task.step.as_ref().map(|step| &step.state),
        Some(StepState::Backoff { .. })
    ));
    world.broke = true;
    world.elapse(600);
    let ended = world.decide(Event::Wake);
    assert_eq!(ended.error.expect("people are told").code, BUDGET_EXHAUSTED);
    assert_eq!(world.task.step, None);
}

#[test]
fn a_title_there_is_no_money_for_is_left_out_and_is_no_error() {
    let mut world = World::new();
    world.task.titled = false;
    world.send();
    world.decide(Event::Wake);
    world.broke = true;
    let ended = world.result(text("done"));
    assert_eq!(ended.ended.expect("the turn ends").outcome, TurnOutcome::Completed);
    assert_eq!((world.task.title_step, ended.error), (None, None));
}
