//! Turns from a message to their end: model calls, scripts, failures and stops.

use super::*;

#[test]
fn message_is_answered_through_model_scripts_and_model() {
    let mut world = World::new();
    let message = world.send();
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::InvokeModel);
    world.result(calls(&["a", "b"]));
    assert_eq!(world.task.phase, Phase::ExecuteTools);
    world.result(results(&["b", "a"]));
    assert_eq!(world.task.phase, Phase::InvokeModel);
    let last = world.result(text("done"));
    assert_eq!(world.task.phase, Phase::AwaitInput);
    assert_eq!(last.ended, Some(EndedTurn { message, calls: 2, outcome: TurnOutcome::Completed }));
    assert_eq!(world.task.next_wake, None, "an idle task costs nothing");
}

#[test]
fn wake_with_nothing_to_do_changes_nothing() {
    let mut world = World::with_model_call();
    let before = world.task.clone();
    let decision = world.decide(Event::Wake);
    assert!(!decision.changes(&before), "{decision:?}");
    assert!(decision.effects.is_empty());
}

#[test]
fn message_sent_during_turn_is_answered_after_it() {
    let mut world = World::new();
    let first = world.send();
    world.decide(Event::Wake);
    let second = world.send();
    world.decide(Event::Wake);
    world.result(text("first answer"));
    assert_eq!(world.task.next_wake, Some(world.now), "it reconciles again at once");
    world.decide(Event::Wake);
    world.result(text("second answer"));
    let answered: Vec<MessageId> = world.ended.iter().map(|turn| turn.message).collect();
    assert_eq!(answered, [first, second]);
}

#[test]
fn lost_command_is_sent_again_with_same_step() {
    let mut world = World::new();
    world.send();
    let first = world.decide(Event::Wake);
    world.elapse(2);
    let again = world.decide(Event::Wake);
    assert_eq!(first.effects, again.effects);
}

#[test]
fn transient_failure_is_retried_and_reported() {
    let mut world = World::with_model_call();
    let decision = world.result(failed(FailureClass::RateLimited));
    assert_eq!(decision.error.map(|error| error.code), Some("RATE_LIMITED".to_owned()));
    assert!(matches!(
        world.task.step.as_ref().map(|step| &step.state),
        Some(StepState::Backoff { .. })
    ));
    world.elapse(11);
    let decision = world.decide(Event::Wake);
    assert!(
        matches!(decision.effects.as_slice(), [Effect::InvokeModel(step)] if step.attempt == 2)
    );
    world.result(text("there"));
    assert_eq!(world.task.last_error, None);
}

#[test]
fn attempts_of_providers_count_toward_the_limit() {
    let mut world = World::with_model_call();
    world.result(failed_after(FailureClass::Transient, backoff::MAX_ATTEMPTS - 1));
    world.elapse(11);
    let decision = world.decide(Event::Wake);
    let last = backoff::MAX_ATTEMPTS;
    assert!(
        matches!(decision.effects.as_slice(), [Effect::InvokeModel(step)] if step.attempt == last),
        "{decision:?}"
    );
    world.result(failed(FailureClass::Transient));
    assert_eq!(outcome(&world), Some(TurnOutcome::Failed));
}

#[test]
fn own_outage_is_outlasted_and_reported_once() {
    let mut world = World::with_model_call();
    let mut reported = 0;
    for _ in 0..10 * backoff::MAX_ATTEMPTS {
        reported +=
            u32::from(world.result(failed_after(FailureClass::Transient, 0)).error.is_some());
        world.elapse(11);
        let decision = world.decide(Event::Wake);
        assert!(
            matches!(decision.effects.as_slice(), [Effect::InvokeModel(step)] if step.attempt == 1),
            "{decision:?}"
        );
    }
    assert_eq!(reported, 1);
    world.result(text("there"));
    assert_eq!(outcome(&world), Some(TurnOutcome::Completed));
    world.send();
    world.decide(Event::Wake);
    assert!(
        world.result(failed_after(FailureClass::Transient, 0)).error.is_some(),
        "another turn reports it again"
    );
}

#[test]
fn exhausted_retries_end_turn_and_next_message_starts() {
    let mut world = World::with_model_call();
    for _ in 0..backoff::MAX_ATTEMPTS {
        world.result(failed(FailureClass::Transient));
        world.elapse(11);
        world.decide(Event::Wake);
    }
    assert_eq!(outcome(&world), Some(TurnOutcome::Failed));
    assert_eq!(world.task.phase, Phase::AwaitInput);
    world.send();
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::InvokeModel);
}

#[test]
fn rejected_key_fails_turn_at_once() {
    let mut world = World::with_model_call();
    world.result(failed(FailureClass::Authentication));
    assert_eq!(outcome(&world), Some(TurnOutcome::Failed));
}

#[test]
fn turn_ends_at_its_limit_of_model_calls() {
    let mut world = World::with_model_call();
    for _ in 0..3 {
        world.result(calls(&["a"]));
        world.result(results(&["a"]));
    }
    assert_eq!(
        world.ended.last().map(|turn| (turn.calls, turn.outcome)),
        Some((3, TurnOutcome::MaxTurns))
    );
    assert_eq!(world.task.phase, Phase::AwaitInput);
}

#[test]
fn suspend_stops_model_call_and_resume_repeats_it() {
    let mut world = World::with_model_call();
    world.task.suspend = true;
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::CancelModel(..)]));
    assert_eq!(world.task.phase, Phase::Suspended);
    world.report_stopped();
    assert_eq!((world.task.phase, world.task.next_wake), (Phase::Suspended, None));
    assert_eq!(world.transcript.len(), 1, "its partial answer is discarded");
    world.task.suspend = false;
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::InvokeModel(_)]));
}

#[test]
fn suspended_scripts_never_run_again() {
    let mut world = World::with_model_call();
    world.result(calls(&["a"]));
    world.task.suspend = true;
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::Suspended);
    world.result(Outcome::Cancelled(vec![CodeResult {
        id: "a".into(),
        error: "stopped".into(),
        ..CodeResult::default()
    }]));
    assert_eq!(world.task.phase, Phase::Suspended);
    world.task.suspend = false;
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::InvokeModel);
    assert_eq!(world.code_steps.len(), 1);
}

#[test]
fn cancelled_scripts_of_lost_worker_have_unknown_outcome() {
    let mut world = World::with_model_call();
    world.result(calls(&["a"]));
    world.cancel();
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::ExecuteTools);
    world.elapse(11);
    world.decide(Event::Wake);
    assert_eq!(outcome(&world), Some(TurnOutcome::Cancelled));
    let Some((_, blocks)) = world.transcript.last() else { panic!("no result") };
    assert!(
        matches!(&blocks[0], Block::CodeInterpreterResult(result) if result.error.contains("unknown"))
    );
}

#[test]
fn cancel_drops_queued_messages() {
    let mut world = World::with_model_call();
    world.send();
    world.cancel();
    world.decide(Event::Wake);
    assert!(matches!(
        world.task.step.as_ref().map(|step| &step.state),
        Some(StepState::Cancelling { .. })
    ));
    world.report_stopped();
    assert_eq!((world.dropped, world.task.phase), (1, Phase::AwaitInput));
    assert_eq!(world.task.cancel, None);
}

#[test]
fn truncated_answer_is_continued_once_then_fails() {
    let mut world = World::with_model_call();
    let cut = || Outcome::Model(Vec::new(), StopReason::OutputLimit);
    let decision = world.result(cut());
    assert!(matches!(decision.effects.as_slice(), [Effect::InvokeModel(_)]));
    assert!(matches!(world.transcript.last(), Some((Source::System, _))));
    world.result(cut());
    assert_eq!(outcome(&world), Some(TurnOutcome::Failed));
    assert_eq!(
        world.task.last_error.as_ref().map(|error| error.code.as_str()),
        Some("OUTPUT_LIMIT")
    );
}

#[test]
fn refused_answer_fails_turn_and_runs_nothing() {
    let mut world = World::with_model_call();
    let Outcome::Model(blocks, _) = calls(&["a"]) else { unreachable!("it is a model's answer") };
    let decision = world.result(Outcome::Model(blocks, StopReason::Refused));
    assert_eq!(decision.error.map(|error| error.code), Some("CONTENT_REFUSED".to_owned()));
    assert_eq!(world.task.phase, Phase::AwaitInput);
    assert!(world.code_steps.is_empty());
}

#[test]
fn suspended_model_call_does_not_count_toward_limit() {
    let mut world = World::new();
    world.task.max_turns = 1;
    world.send();
    world.decide(Event::Wake);
    world.task.suspend = true;
    world.decide(Event::Wake);
    world.report_stopped();
    world.task.suspend = false;
    world.decide(Event::Wake);
    world.result(text("done"));
    assert_eq!(outcome(&world), Some(TurnOutcome::Completed));
}

#[test]
fn worker_starting_a_stopping_script_is_told_again() {
    let mut world = World::with_model_call();
    world.result(calls(&["a"]));
    world.task.suspend = true;
    world.decide(Event::Wake);
    world.elapse(1);
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::CancelCode(..)]));
}

#[test]
fn ended_script_is_closed() {
    let mut world = World::with_model_call();
    world.result(calls(&["a"]));
    let step = world.task.step.clone().expect("a script runs").id;
    let decision = world.result(results(&["a"]));
    assert!(decision.effects.contains(&Effect::EndCode(step)));
}

#[test]
fn stale_result_changes_nothing() {
    let mut world = World::with_model_call();
    let before = world.task.clone();
    let stale = StepId::from_uuid(Uuid::from_u128(9));
    let decision =
        world.decide(Event::Result(StepResult { step: stale, round: 0, outcome: text("late") }));
    assert!(!decision.changes(&before));
}

#[test]
fn title_is_requested_after_first_completed_turn() {
    let mut world = World::new();
    world.task.titled = false;
    world.send();
    world.decide(Event::Wake);
    let decision = world.result(text("hello"));
    let [Effect::MakeTitle(step)] = decision.effects.as_slice() else { panic!("{decision:?}") };
    world.decide(Event::Result(StepResult { step: *step, round: 0, outcome: text("A greeting") }));
    assert!(world.task.titled);
}
