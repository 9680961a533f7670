use super::*;

fn stopped(text: &str) -> Outcome {
    Outcome::Interrupted(vec![Block::Text(text.to_owned())])
}

fn text_of(message: &(Source, Vec<Block>)) -> &str {
    match message.1.as_slice() {
        [Block::Text(text)] => text,
        other => panic!("not one text: {other:?}"),
    }
}

#[test]
fn cancelled_turn_keeps_reason_as_last_error() {
    let mut world = World::with_model_call();
    world.send();
    world.cancel();
    let decision = world.decide(Event::Wake);
    assert_eq!((decision.drop_queued, decision.ended), (None, None), "its call is stopped first");
    let decision = world.report_stopped();
    assert_eq!(decision.drop_queued.as_deref(), Some("cancelled: enough"));
    let error =
        world.task.last_error.as_ref().map(|error| (error.code.as_str(), error.message.as_str()));
    assert_eq!(error, Some((CANCELLED, "cancelled: enough")));
    assert_eq!(decision.error, None, "it is not reported as an error");
    world.send();
    world.decide(Event::Wake);
    assert_eq!(world.task.last_error, None);
}

#[test]
fn interrupting_message_is_next_and_partial_answer_is_kept() {
    let mut world = World::with_model_call();
    let waits = world.send();
    let urgent = world.send_message(true);
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::CancelModel(..)]), "{decision:?}");
    assert_eq!(world.task.phase, Phase::InvokeModel);
    world.result(stopped("Once upon"));
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
    let [.., partial, mark] = world.transcript.as_slice() else { panic!("{:?}", world.transcript) };
    assert_eq!((partial.0, text_of(partial)), (Source::Assistant, "Once upon"));
    assert_eq!((mark.0, text_of(mark)), (Source::System, INTERRUPTED_NOTICE));
    let decision = world.decide(Event::Wake);
    assert_eq!(decision.admitted.map(|(message, _)| message), Some(urgent));
    world.result(text("at once"));
    let decision = world.decide(Event::Wake);
    assert_eq!(decision.admitted.map(|(message, _)| message), Some(waits));
}

#[test]
fn interrupted_call_without_result_is_abandoned_after_grace() {
    let mut world = World::with_model_call();
    world.send_message(true);
    world.decide(Event::Wake);
    let cancelled_again = {
        world.elapse(1);
        world.decide(Event::Wake)
    };
    assert!(matches!(cancelled_again.effects.as_slice(), [Effect::CancelModel(..)]));
    world.elapse(1);
    world.decide(Event::Wake);
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
    assert_eq!(world.transcript.len(), 1, "its partial answer is unknown");
}

/// A running call is told to stop until it has stopped or is given up, whatever the reason.
#[test]
fn unwanted_model_call_is_cancelled_every_second() {
    let suspend: fn(&mut World) = |world| world.task.suspend = true;
    let rewind: fn(&mut World) = |world| assert!(world.rewind(1));
    for ask in [World::cancel, suspend, rewind] {
        for stops in [true, false] {
            let mut world = World::new();
            world.send();
            world.decide(Event::Wake);
            ask(&mut world);
            let cancels = |decision: &Decision| {
                matches!(decision.effects.as_slice(), [Effect::CancelModel(..)])
            };
            assert!(cancels(&world.decide(Event::Wake)));
            world.elapse(1);
            assert!(cancels(&world.decide(Event::Wake)), "the first request may have been lost");
            if stops {
                world.report_stopped();
            } else {
                world.elapse(1);
                assert!(cancels(&world.decide(Event::Wake)), "for the last time");
            }
            assert_eq!((world.task.step.as_ref(), world.task.next_wake), (None, None));
        }
    }
}

#[test]
fn complete_answer_before_cancel_counts_without_its_scripts() {
    let mut world = World::with_model_call();
    world.cancel();
    world.decide(Event::Wake);
    world.result(text("whole"));
    assert_eq!((outcome(&world), world.transcript.len()), (Some(TurnOutcome::Completed), 2));
    world.send();
    world.decide(Event::Wake);
    world.cancel();
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    assert_eq!(
        (outcome(&world), world.task.phase),
        (Some(TurnOutcome::Cancelled), Phase::AwaitInput)
    );
    assert!(world.code_steps.is_empty());
}

#[test]
fn call_failing_while_stopping_is_repeated_after_resume() {
    let mut world = World::new();
    world.task.max_turns = 1;
    world.send();
    world.decide(Event::Wake);
    world.task.suspend = true;
    world.decide(Event::Wake);
    world.result(failed(FailureClass::Overloaded));
    assert_eq!((world.task.phase, world.task.next_wake), (Phase::Suspended, None));
    world.task.suspend = false;
    world.decide(Event::Wake);
    world.result(text("at last"));
    assert_eq!(outcome(&world), Some(TurnOutcome::Completed));
}

#[test]
fn complete_answer_before_interruption_counts() {
    let mut world = World::with_model_call();
    world.send_message(true);
    world.decide(Event::Wake);
    world.result(text("whole"));
    assert_eq!(outcome(&world), Some(TurnOutcome::Completed));
}

#[test]
fn interrupted_scripts_get_one_result_each() {
    let mut world = World::with_model_call();
    world.result(calls(&["a", "b"]));
    world.send_message(true);
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::CancelCode(..)]));
    let known = CodeResult { id: "a".into(), error: "stopped".into(), ..CodeResult::default() };
    world.result(Outcome::Cancelled(vec![known]));
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
    let Some((_, blocks)) = world.transcript.last() else { panic!("no results") };
    assert_eq!(blocks.len(), 2);
}

#[test]
fn scripts_of_an_answer_during_interruption_do_not_start() {
    let mut world = World::with_model_call();
    world.send_message(true);
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
    assert!(world.code_steps.is_empty());
}

#[test]
fn interruption_ends_script_waiting_for_approval() {
    let mut world = World::suspended(&[1]);
    world.send_message(true);
    world.decide(Event::Wake);
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
    assert_eq!(world.states(), [ApprovalState::Cancelled]);
}

#[test]
fn interruption_does_not_wait_for_retry_delay() {
    let mut world = World::with_model_call();
    world.result(failed(FailureClass::Overloaded));
    world.send_message(true);
    world.decide(Event::Wake);
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
}

#[test]
fn withdrawn_interruption_continues_the_turn() {
    let mut world = World::new();
    world.task.max_turns = 1;
    world.send();
    world.decide(Event::Wake);
    world.send_message(true);
    world.decide(Event::Wake);
    world.queue.clear();
    world.decide(Event::Wake);
    let decision = world.report_stopped();
    assert!(matches!(decision.effects.as_slice(), [Effect::InvokeModel(_)]), "{decision:?}");
    assert_eq!(world.transcript.len(), 1, "a model would find its own words before its answer");
    world.result(text("the whole story"));
    assert_eq!(outcome(&world), Some(TurnOutcome::Completed));
}

#[test]
fn interrupting_message_waits_while_task_is_suspended() {
    let mut world = World::with_model_call();
    world.task.suspend = true;
    world.send_message(true);
    world.decide(Event::Wake);
    assert_eq!((world.task.phase, world.ended.len()), (Phase::Suspended, 0));
    world.task.suspend = false;
    world.decide(Event::Wake);
    world.report_stopped();
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
}

#[test]
fn rewind_stops_step_supersedes_messages_and_awaits_input() {
    let mut world = World::with_model_call();
    world.result(text("first"));
    world.send();
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    world.send();
    assert!(world.rewind(3));
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::CancelCode(..)]));
    assert_eq!(decision.rewound, None, "the script's result is superseded too");
    let decision = world.result(Outcome::Cancelled(Vec::new()));
    assert_eq!(decision.rewound, Some(3));
    assert_eq!((world.task.phase, world.task.rewind, world.dropped), (Phase::AwaitInput, None, 1));
    assert_eq!((world.visible_messages().len(), world.transcript.len()), (2, 5));
}

#[test]
fn message_after_rewind_takes_next_position() {
    let mut world = World::with_model_call();
    world.result(text("first"));
    assert!(world.rewind(1));
    let edited = world.send();
    world.decide(Event::Wake);
    let decision = world.decide(Event::Wake);
    assert_eq!(decision.admitted, Some((edited, 3)));
    world.result(text("second"));
    assert_eq!(world.visible_messages().len(), 2);
}

#[test]
fn retried_turn_continues_where_it_failed() {
    let mut world = World::new();
    let message = world.send();
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    world.result(results(&["a"]));
    world.result(failed(FailureClass::Authentication));
    assert_eq!((outcome(&world), world.transcript.len()), (Some(TurnOutcome::Failed), 3));
    world.task.retry = Some(message);
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::InvokeModel(_)]), "{decision:?}");
    assert_eq!((decision.admitted, world.task.retry, &world.task.last_error), (None, None, &None));
    world.result(text("done"));
    let ended = world.ended.last().map(|turn| (turn.message, turn.outcome));
    assert_eq!((ended, world.transcript.len()), (Some((message, TurnOutcome::Completed)), 4));
    assert_eq!(world.code_steps.len(), 1, "completed scripts are not repeated");
}

#[test]
fn retry_yields_to_new_message_rewind_and_suspend() {
    let failed_turn = || {
        let mut world = World::new();
        let message = world.send();
        world.decide(Event::Wake);
        world.result(failed(FailureClass::Authentication));
        world.task.retry = Some(message);
        world
    };
    let mut world = failed_turn();
    let newer = world.send();
    let decision = world.decide(Event::Wake);
    assert_eq!(
        (decision.admitted.map(|(message, _)| message), world.task.retry),
        (Some(newer), None)
    );
    world.result(text("done"));
    assert_eq!((world.task.phase, world.ended.len()), (Phase::AwaitInput, 2));

    let mut world = failed_turn();
    assert!(world.rewind(1));
    world.decide(Event::Wake);
    assert_eq!((world.task.phase, &world.task.step), (Phase::AwaitInput, &None));

    let mut world = failed_turn();
    world.task.suspend = true;
    world.decide(Event::Wake);
    assert_eq!((world.task.phase, &world.task.step), (Phase::Suspended, &None));
}

#[test]
fn rewind_of_suspended_task_keeps_it_suspended() {
    let mut world = World::with_model_call();
    world.task.suspend = true;
    world.decide(Event::Wake);
    assert!(world.rewind(1));
    let decision = world.report_stopped();
    assert_eq!((decision.rewound, world.task.phase), (Some(1), Phase::Suspended));
    assert_eq!(outcome(&world), Some(TurnOutcome::Cancelled));
}
