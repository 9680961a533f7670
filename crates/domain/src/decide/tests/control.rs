use super::*;

fn stopped(text: &str) -> Outcome {
    Outcome::Stopped(vec![Block::Text(text.to_owned())])
}

fn text_of(message: &(Source, Vec<Block>)) -> &str {
    match message.1.as_slice() {
        [Block::Text(text)] => text,
        other => panic!("not one text: {other:?}"),
    }
}

#[test]
fn a_cancelled_turn_says_why_where_people_look() {
    let mut world = World::asking();
    world.send();
    world.cancel();
    let decision = world.decide(Event::Wake);
    assert_eq!(
        (decision.drop_queued, decision.ended),
        (None, None),
        "its call is told to stop first"
    );
    let decision = world.stopped();
    assert_eq!(decision.drop_queued.as_deref(), Some("cancelled: enough"));
    let error =
        world.task.last_error.as_ref().map(|error| (error.code.as_str(), error.message.as_str()));
    assert_eq!(error, Some((CANCELLED, "cancelled: enough")));
    assert_eq!(decision.error, None, "it is no error that would have to be told");
    world.send();
    world.decide(Event::Wake);
    assert_eq!(world.task.last_error, None);
}

#[test]
fn an_interrupting_message_is_answered_next_and_what_was_said_so_far_is_kept_and_marked() {
    let mut world = World::asking();
    let waits = world.send();
    let urgent = world.send_as(true);
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::CancelModel(..)]), "{decision:?}");
    assert_eq!(world.task.phase, Phase::InvokeModel);
    world.result(stopped("Once upon"));
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
    let [.., said, mark] = world.transcript.as_slice() else { panic!("{:?}", world.transcript) };
    assert_eq!((said.0, text_of(said)), (Source::Assistant, "Once upon"));
    assert_eq!((mark.0, text_of(mark)), (Source::System, BROKEN_OFF));
    let decision = world.decide(Event::Wake);
    assert_eq!(decision.admitted.map(|(message, _)| message), Some(urgent));
    world.result(text("at once"));
    let decision = world.decide(Event::Wake);
    assert_eq!(decision.admitted.map(|(message, _)| message), Some(waits));
}

#[test]
fn an_interrupted_model_call_that_says_nothing_more_is_waited_for_briefly() {
    let mut world = World::asking();
    world.send_as(true);
    world.decide(Event::Wake);
    let told_again = {
        world.elapse(1);
        world.decide(Event::Wake)
    };
    assert!(matches!(told_again.effects.as_slice(), [Effect::CancelModel(..)]));
    world.elapse(1);
    world.decide(Event::Wake);
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
    assert_eq!(world.transcript.len(), 1, "nothing is known of what it had said");
}

/// Whoever asks for what, a call that is at work is told until it has stopped, or is given up.
#[test]
fn a_model_call_that_nobody_wants_is_told_so_each_second_until_it_has_stopped() {
    let suspend: fn(&mut World) = |world| world.task.suspend = true;
    let rewind: fn(&mut World) = |world| assert!(world.rewind(1));
    for ask in [World::cancel, suspend, rewind] {
        for stops in [true, false] {
            let mut world = World::new();
            world.send();
            world.decide(Event::Wake);
            ask(&mut world);
            let told = |decision: &Decision| {
                matches!(decision.effects.as_slice(), [Effect::CancelModel(..)])
            };
            assert!(told(&world.decide(Event::Wake)));
            world.elapse(1);
            assert!(told(&world.decide(Event::Wake)), "who died before it was told told nobody");
            if stops {
                world.stopped();
            } else {
                world.elapse(1);
                assert!(told(&world.decide(Event::Wake)), "for the last time");
            }
            assert_eq!((world.task.step.as_ref(), world.task.next_wake), (None, None));
        }
    }
}

#[test]
fn an_answer_that_was_whole_before_the_cancel_counts_and_its_scripts_are_not_begun() {
    let mut world = World::asking();
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
fn a_call_that_fails_while_it_is_told_to_stop_is_asked_for_again_after_the_resume() {
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
fn an_answer_that_was_whole_before_the_interruption_counts() {
    let mut world = World::asking();
    world.send_as(true);
    world.decide(Event::Wake);
    world.result(text("whole"));
    assert_eq!(outcome(&world), Some(TurnOutcome::Completed));
}

#[test]
fn scripts_that_are_interrupted_get_one_result_each() {
    let mut world = World::asking();
    world.result(calls(&["a", "b"]));
    world.send_as(true);
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::CancelCode(..)]));
    let known = CodeResult { id: "a".into(), error: "stopped".into(), ..CodeResult::default() };
    world.result(Outcome::Cancelled(vec![known]));
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
    let Some((_, blocks)) = world.transcript.last() else { panic!("no results") };
    assert_eq!(blocks.len(), 2);
}

#[test]
fn scripts_of_an_answer_that_comes_while_it_is_interrupted_are_not_begun() {
    let mut world = World::asking();
    world.send_as(true);
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
    assert!(world.code_steps.is_empty());
}

#[test]
fn a_script_that_waits_for_a_person_is_ended_by_an_interruption() {
    let mut world = World::parked(&[1]);
    world.send_as(true);
    world.decide(Event::Wake);
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
    assert_eq!(world.states(), [ApprovalState::Cancelled]);
}

#[test]
fn the_pause_before_another_try_does_not_hold_up_an_interruption() {
    let mut world = World::asking();
    world.result(failed(FailureClass::Overloaded));
    world.send_as(true);
    world.decide(Event::Wake);
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
}

#[test]
fn an_interruption_that_is_taken_back_lets_the_turn_go_on() {
    let mut world = World::new();
    world.task.max_turns = 1;
    world.send();
    world.decide(Event::Wake);
    world.send_as(true);
    world.decide(Event::Wake);
    world.queue.clear();
    world.decide(Event::Wake);
    let decision = world.stopped();
    assert!(matches!(decision.effects.as_slice(), [Effect::InvokeModel(_)]), "{decision:?}");
    assert_eq!(world.transcript.len(), 1, "a model would find its own words before its answer");
    world.result(text("the whole story"));
    assert_eq!(outcome(&world), Some(TurnOutcome::Completed));
}

#[test]
fn a_suspended_task_is_not_moved_by_an_interrupting_message() {
    let mut world = World::asking();
    world.task.suspend = true;
    world.send_as(true);
    world.decide(Event::Wake);
    assert_eq!((world.task.phase, world.ended.len()), (Phase::Suspended, 0));
    world.task.suspend = false;
    world.decide(Event::Wake);
    world.stopped();
    assert_eq!(outcome(&world), Some(TurnOutcome::Interrupted));
}

#[test]
fn rewinding_puts_aside_stops_what_runs_and_awaits_input() {
    let mut world = World::asking();
    world.result(text("first"));
    world.send();
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    world.send();
    assert!(world.rewind(3));
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::CancelCode(..)]));
    assert_eq!(decision.rewound, None, "the script's last words belong to what is put aside");
    let decision = world.result(Outcome::Cancelled(Vec::new()));
    assert_eq!(decision.rewound, Some(3));
    assert_eq!((world.task.phase, world.task.rewind, world.dropped), (Phase::AwaitInput, None, 1));
    assert_eq!((world.shown().len(), world.transcript.len()), (2, 5));
}

#[test]
fn what_is_sent_after_a_rewind_is_answered_and_takes_the_next_place() {
    let mut world = World::asking();
    world.result(text("first"));
    assert!(world.rewind(1));
    let edited = world.send();
    world.decide(Event::Wake);
    let decision = world.decide(Event::Wake);
    assert_eq!(decision.admitted, Some((edited, 3)));
    world.result(text("second"));
    assert_eq!(world.shown().len(), 2);
}

#[test]
fn a_turn_that_has_failed_goes_on_where_it_was_when_a_person_asks_for_it() {
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
    assert_eq!(world.code_steps.len(), 1, "what was done stays done");
}

#[test]
fn another_try_gives_way_to_what_was_sent_and_to_who_takes_the_turn_back() {
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
fn a_suspended_task_is_rewound_and_stays_suspended() {
    let mut world = World::asking();
    world.task.suspend = true;
    world.decide(Event::Wake);
    assert!(world.rewind(1));
    let decision = world.stopped();
    assert_eq!((decision.rewound, world.task.phase), (Some(1), Phase::Suspended));
    assert_eq!(outcome(&world), Some(TurnOutcome::Cancelled));
}
