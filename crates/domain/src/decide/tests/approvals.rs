//! Scripts that wait for approvals.

use super::*;

#[test]
fn approved_script_resumes_as_the_same_step() {
    let mut world = World::suspended(&[2, 5]);
    let step = world.task.step.clone().expect("it waits");
    assert_eq!(world.task.phase, Phase::AwaitApproval);
    assert_eq!(world.task.next_wake, Some(step.approvals_expire_at()));
    world.elapse(3 * 24 * 3600);
    assert!(world.decide(Event::Wake).effects.is_empty(), "nothing runs while it waits");
    world.decide_approval(ApprovalState::Approved);
    let decision = world.decide(Event::Wake);
    let [Effect::ExecuteCode(again)] = decision.effects.as_slice() else { panic!("{decision:?}") };
    assert_eq!((again.id, again.round, world.task.phase), (step.id, 1, Phase::ExecuteTools));
    assert_eq!(again.state, StepState::InFlight { deadline: world.now + CODE_TIMEOUT });
    // The other call still waits, and is not requested twice.
    let decision = world.result(suspend_for_approvals(&[5]));
    assert_eq!((decision.approval_requests.len(), world.task.phase), (0, Phase::AwaitApproval));
    world.decide_approval(ApprovalState::Rejected);
    world.decide(Event::Wake);
    let decision = world.result(results(&["a"]));
    assert!(decision.effects.contains(&Effect::EndCode(step.id)));
    assert_eq!(world.states(), [ApprovalState::Approved, ApprovalState::Rejected]);
    assert_eq!(world.code_steps.len(), 1);
}

#[test]
fn decision_made_while_script_runs_resumes_it_at_once() {
    let mut world = World::suspended(&[2, 5]);
    world.decide_approval(ApprovalState::Approved);
    world.decide(Event::Wake);
    world.decide_approval(ApprovalState::Approved);
    assert!(world.decide(Event::Wake).effects.is_empty(), "it runs");
    let decision = world.result(suspend_for_approvals(&[5]));
    assert!(
        matches!(decision.effects.as_slice(), [Effect::ExecuteCode(step)] if step.round == 2),
        "{decision:?}"
    );
}

#[test]
fn stale_results_of_earlier_rounds_change_nothing() {
    let mut world = World::suspended(&[2]);
    world.decide(Event::Wake);
    let step = world.task.step.as_ref().expect("it waits").id;
    let stale = |outcome| Event::Result(StepResult { step, round: 0, outcome });
    for late in [
        suspend_for_approvals(&[2]),
        suspend_for_approvals(&[3]),
        Outcome::Cancelled(Vec::new()),
        failed(FailureClass::Internal),
        results(&["a"]),
    ] {
        let before = world.task.clone();
        let decision = world.decide(stale(late));
        assert!(!decision.changes(&before), "{decision:?}");
    }
    world.decide_approval(ApprovalState::Approved);
    world.decide(Event::Wake);
    let before = world.task.clone();
    let decision = world.decide(stale(suspend_for_approvals(&[2])));
    assert!(!decision.changes(&before), "{decision:?}");
}

#[test]
fn undecided_approval_expires_and_resumes_the_script() {
    let mut world = World::suspended(&[2]);
    world.elapse(22 * 24 * 3600);
    let decision = world.decide(Event::Wake);
    assert!(
        matches!(decision.effects.as_slice(), [Effect::ExecuteCode(step)] if step.round == 1),
        "{decision:?}"
    );
    assert_eq!(decision.closed_approvals[0].reason, "not decided within 21 days");
    assert_eq!(world.states(), [ApprovalState::Expired]);
    // It requests another approval, but no time is left.
    world.result(suspend_for_approvals(&[3]));
    assert_eq!(world.task.phase, Phase::InvokeModel);
    assert_eq!(world.states(), [ApprovalState::Expired]);
}

#[test]
fn cancelled_suspended_script_reports_known_results() {
    let mut world = World::suspended(&[2]);
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
fn suspended_task_keeps_script_and_its_decisions() {
    let mut world = World::suspended(&[2]);
    world.task.suspend = true;
    let decision = world.decide(Event::Wake);
    assert_eq!((world.task.phase, decision.effects.len()), (Phase::Suspended, 0));
    world.task.suspend = false;
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::AwaitApproval);
    world.task.suspend = true;
    world.decide(Event::Wake);
    world.decide_approval(ApprovalState::Approved);
    assert!(world.decide(Event::Wake).effects.is_empty(), "a suspended task starts nothing");
    world.task.suspend = false;
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::ExecuteCode(_)]), "{decision:?}");
}

#[test]
fn suspended_script_ends_before_its_journal_expires() {
    let mut world = World::suspended(&[2]);
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
fn script_suspending_while_stopping_is_ended() {
    let mut world = World::with_model_call();
    world.result(calls(&["a"]));
    world.task.suspend = true;
    world.decide(Event::Wake);
    let decision = world.result(suspend_for_approvals(&[2]));
    assert!(decision.approval_requests.is_empty());
    assert_eq!((world.task.phase, world.task.step.is_none()), (Phase::Suspended, true));
    assert!(!world.open_calls());
}

#[test]
fn script_suspending_after_cancel_requests_no_approval() {
    let mut world = World::with_model_call();
    world.result(calls(&["a"]));
    // The result is absorbed before the cancel.
    world.cancel();
    let decision = world.result(suspend_for_approvals(&[2]));
    assert!(decision.approval_requests.is_empty(), "{decision:?}");
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Cancelled));
    assert!(world.states().is_empty() && !world.open_calls());
}
