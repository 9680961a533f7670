//! Scripts that wait for subtasks.

use super::*;

fn child(n: u128) -> TaskId {
    TaskId::from_uuid(Uuid::from_u128(900 + n))
}

/// A task whose script waits for these running subtasks.
fn waiting(tasks: &[u128], seconds: i64) -> World {
    let mut world = World::new();
    world.send();
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    world.running_subtasks = tasks.iter().copied().map(child).collect();
    let call = call(&world, 1, tasks, seconds);
    world.result(suspend_outcome(&[], vec![call]));
    world.decide(Event::Wake);
    world
}

fn call(world: &World, number: u32, tasks: &[u128], seconds: i64) -> AwaitedCall {
    let until = world.now + jiff::SignedDuration::from_secs(seconds);
    AwaitedCall { script: 0, number, tasks: tasks.iter().copied().map(child).collect(), until }
}

#[test]
fn script_resumes_as_same_step_when_all_subtasks_ended() {
    let mut world = waiting(&[1, 2], 1000);
    let step = world.task.step.clone().expect("it waits");
    assert_eq!(world.task.phase, Phase::AwaitSubtasks);
    assert_eq!(world.task.next_wake, Some(world.now + jiff::SignedDuration::from_secs(1000)));
    world.running_subtasks.remove(0);
    let before = world.task.clone();
    assert!(
        !world.decide(Event::Wake).changes(&Task { subtasks: Some(vec![child(2)]), ..before }),
        "one is at work"
    );
    world.running_subtasks.clear();
    let decision = world.decide(Event::Wake);
    let [Effect::ExecuteCode(again)] = decision.effects.as_slice() else { panic!("{decision:?}") };
    assert_eq!((again.id, again.round, world.task.phase), (step.id, 1, Phase::ExecuteTools));
}

#[test]
fn subtask_ended_before_suspension_is_noticed() {
    let mut world = World::new();
    world.send();
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    let call = call(&world, 1, &[1], 1000);
    // The subtask ends here, and its wake finds a script that still runs.
    world.decide(Event::Wake);
    world.result(suspend_outcome(&[], vec![call]));
    assert_eq!(world.task.next_wake, Some(world.now), "it is reconciled again");
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::ExecuteCode(_)]), "{decision:?}");
}

#[test]
fn wait_ends_at_its_deadline() {
    let mut world = waiting(&[1], 10);
    world.elapse(10);
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::ExecuteCode(_)]), "{decision:?}");
}

#[test]
fn script_waits_for_approval_and_subtask_at_once() {
    let mut world = World::new();
    world.send();
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    world.running_subtasks = vec![child(1)];
    let call = call(&world, 2, &[1], 1000);
    world.result(suspend_outcome(&[1], vec![call.clone()]));
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::AwaitApproval);
    world.decide_approval(ApprovalState::Approved);
    let decision = world.decide(Event::Wake);
    assert!(
        matches!(decision.effects.as_slice(), [Effect::ExecuteCode(step)] if step.round == 1),
        "{decision:?}"
    );
    world.result(suspend_outcome(&[], vec![call]));
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::AwaitSubtasks);
    world.running_subtasks.clear();
    let decision = world.decide(Event::Wake);
    assert!(
        matches!(decision.effects.as_slice(), [Effect::ExecuteCode(step)] if step.round == 2),
        "{decision:?}"
    );
}

#[test]
fn suspended_task_keeps_script_waiting_for_subtask() {
    let mut world = waiting(&[1], 1000);
    world.task.suspend = true;
    world.decide(Event::Wake);
    world.running_subtasks.clear();
    assert!(world.decide(Event::Wake).effects.is_empty(), "a suspended task starts nothing");
    world.task.suspend = false;
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::ExecuteCode(_)]), "{decision:?}");
}

#[test]
fn cancel_ends_script_waiting_for_subtasks() {
    let mut world = waiting(&[1], 1000);
    let step = world.task.step.as_ref().expect("it waits").id;
    world.cancel();
    let decision = world.decide(Event::Wake);
    assert!(decision.effects.contains(&Effect::EndCode(step)));
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Cancelled));
}
