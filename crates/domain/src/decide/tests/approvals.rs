//! Scripts that wait for people.

use super::*;

#[test]
fn a_script_that_needs_an_approval_waits_and_goes_on_as_the_same_step() {
    let mut world = World::parked(&[2, 5]);
    let step = world.task.step.clone().expect("it waits");
    assert_eq!(world.task.phase, Phase::AwaitApproval);
    assert_eq!(world.task.next_wake, Some(step.approvals_expire()));
    world.elapse(3 * 24 * 3600);
    assert!(world.decide(Event::Wake).effects.is_empty(), "nothing runs while it waits");
    world.say(ApprovalState::Approved);
    let decision = world.decide(Event::Wake);
    let [Effect::ExecuteCode(again)] = decision.effects.as_slice() else { panic!("{decision:?}") };
    assert_eq!((again.id, again.round, world.task.phase), (step.id, 1, Phase::ExecuteTools));
    assert_eq!(again.state, StepState::InFlight { deadline: world.now + CODE_DEADLINE });
    // The other call still waits, and is not asked about twice.
    let decision = world.result(park(&[5]));
    assert_eq!((decision.asked.len(), world.task.phase), (0, Phase::AwaitApproval));
    world.say(ApprovalState::Rejected);
    world.decide(Event::Wake);
    let decision = world.result(results(&["a"]));
    assert!(decision.effects.contains(&Effect::EndCode(step.id)));
    assert_eq!(world.states(), [ApprovalState::Approved, ApprovalState::Rejected]);
    assert_eq!(world.code_steps.len(), 1);
}

#[test]
fn a_decision_that_comes_while_the_script_runs_is_not_waited_for_again() {
    let mut world = World::parked(&[2, 5]);
    world.say(ApprovalState::Approved);
    world.decide(Event::Wake);
    world.say(ApprovalState::Approved);
    assert!(world.decide(Event::Wake).effects.is_empty(), "it runs");
    let decision = world.result(park(&[5]));
    assert!(
        matches!(decision.effects.as_slice(), [Effect::ExecuteCode(step)] if step.round == 2),
        "{decision:?}"
    );
}

#[test]
fn results_of_earlier_rounds_and_of_who_had_let_go_change_nothing() {
    let mut world = World::parked(&[2]);
    world.decide(Event::Wake);
    let step = world.task.step.as_ref().expect("it waits").id;
    let stale = |outcome| Event::Result(StepResult { step, round: 0, outcome });
    for late in [
        park(&[2]),
        park(&[3]),
        Outcome::Cancelled(Vec::new()),
        failed(FailureClass::Internal),
        results(&["a"]),
    ] {
        let before = world.task.clone();
        let decision = world.decide(stale(late));
        assert!(!decision.changes(&before), "{decision:?}");
    }
    world.say(ApprovalState::Approved);
    world.decide(Event::Wake);
    let before = world.task.clone();
    let decision = world.decide(stale(park(&[2])));
    assert!(!decision.changes(&before), "{decision:?}");
}

#[test]
fn what_nobody_decides_about_expires_and_the_script_is_told() {
    let mut world = World::parked(&[2]);
    world.elapse(22 * 24 * 3600);
    let decision = world.decide(Event::Wake);
    assert!(
        matches!(decision.effects.as_slice(), [Effect::ExecuteCode(step)] if step.round == 1),
        "{decision:?}"
    );
    assert_eq!(decision.closed[0].words, "nobody decided within 21 days");
    assert_eq!(world.states(), [ApprovalState::Expired]);
    // It asks for something else: there is no time left for that.
    world.result(park(&[3]));
    assert_eq!(world.task.phase, Phase::InvokeModel);
    assert_eq!(world.states(), [ApprovalState::Expired]);
}

#[test]
fn cancelling_a_script_that_waits_tells_what_is_known_of_it() {
    let mut world = World::parked(&[2]);
    let step = world.task.step.as_ref().expect("it waits").id;
    world.task.cancel = Some("enough".to_owned());
    let decision = world.decide(Event::Wake);
    assert!(decision.effects.contains(&Effect::EndCode(step)));
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Cancelled));
    assert_eq!(world.states(), [ApprovalState::Cancelled]);
    let Some((_, blocks)) = world.transcript.last() else { panic!("no result") };
    assert!(
        matches!(&blocks[0], Block::CodeInterpreterResult(result) if result.error == "it waited"),
        "{blocks:?}"
    );
}

#[test]
fn a_suspended_task_keeps_the_script_that_waits_and_what_was_decided() {
    let mut world = World::parked(&[2]);
    world.task.suspend = true;
    let decision = world.decide(Event::Wake);
    assert_eq!((world.task.phase, decision.effects.len()), (Phase::Suspended, 0));
    world.task.suspend = false;
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::AwaitApproval);
    world.task.suspend = true;
    world.decide(Event::Wake);
    world.say(ApprovalState::Approved);
    assert!(world.decide(Event::Wake).effects.is_empty(), "a suspended task starts nothing");
    world.task.suspend = false;
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::ExecuteCode(_)]), "{decision:?}");
}

#[test]
fn a_suspended_script_does_not_outlive_its_journal() {
    let mut world = World::parked(&[2]);
    world.task.suspend = true;
    world.decide(Event::Wake);
    world.elapse(22 * 24 * 3600);
    world.decide(Event::Wake);
    assert_eq!((world.task.phase, world.task.next_wake), (Phase::Suspended, None));
    assert_eq!(world.states(), [ApprovalState::Expired]);
    world.task.suspend = false;
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::InvokeModel);
}

#[test]
fn a_script_that_comes_to_wait_while_it_is_told_to_stop_is_stopped() {
    let mut world = World::asking();
    world.result(calls(&["a"]));
    world.task.suspend = true;
    world.decide(Event::Wake);
    let decision = world.result(park(&[2]));
    assert!(decision.asked.is_empty());
    assert_eq!((world.task.phase, world.task.step.is_none()), (Phase::Suspended, true));
    assert!(!world.open_calls());
}

#[test]
fn a_script_that_comes_to_wait_when_its_turn_was_cancelled_asks_nobody() {
    let mut world = World::asking();
    world.result(calls(&["a"]));
    // The result is looked at before anybody has looked at the cancel.
    world.cancel();
    let decision = world.result(park(&[2]));
    assert!(decision.asked.is_empty(), "{decision:?}");
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Cancelled));
    assert!(world.states().is_empty() && !world.open_calls());
}
