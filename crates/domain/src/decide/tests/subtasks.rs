//! Scripts that wait for subtasks.

use super::*;

fn child(n: u128) -> TaskId {
    TaskId::from_uuid(Uuid::from_u128(900 + n))
}

/// A task whose script waits for these subtasks, which are at work.
fn waiting(tasks: &[u128], seconds: i64) -> World {
    let mut world = World::new();
    world.send();
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    world.at_work = tasks.iter().copied().map(child).collect();
    let call = call(&world, 1, tasks, seconds);
    world.result(park_for(&[], vec![call]));
    world.decide(Event::Wake);
    world
}

fn call(world: &World, number: u32, tasks: &[u128], seconds: i64) -> AwaitedCall {
    let until = world.now + jiff::SignedDuration::from_secs(seconds);
    AwaitedCall { script: 0, number, tasks: tasks.iter().copied().map(child).collect(), until }
}

#[test]
fn a_script_that_waits_goes_on_as_the_same_step_when_all_have_ended() {
    let mut world = waiting(&[1, 2], 1000);
    let step = world.task.step.clone().expect("it waits");
    assert_eq!(world.task.phase, Phase::AwaitSubtasks);
    assert_eq!(world.task.next_wake, Some(world.now + jiff::SignedDuration::from_secs(1000)));
    world.at_work.remove(0);
    let before = world.task.clone();
    assert!(
        !world.decide(Event::Wake).changes(&Task { subtasks: Some(vec![child(2)]), ..before }),
        "one is at work"
    );
    world.at_work.clear();
    let decision = world.decide(Event::Wake);
    let [Effect::ExecuteCode(again)] = decision.effects.as_slice() else { panic!("{decision:?}") };
    assert_eq!((again.id, again.round, world.task.phase), (step.id, 1, Phase::ExecuteTools));
}

#[test]
fn a_subtask_that_ended_before_its_parent_was_put_away_is_noticed() {
    let mut world = World::new();
    world.send();
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    let call = call(&world, 1, &[1], 1000);
    // It ends here, and whoever looks finds a script that runs.
    world.decide(Event::Wake);
    world.result(park_for(&[], vec![call]));
    assert_eq!(world.task.next_wake, Some(world.now), "it is looked at again");
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::ExecuteCode(_)]), "{decision:?}");
}

#[test]
fn a_wait_ends_with_its_time() {
    let mut world = waiting(&[1], 10);
    world.elapse(10);
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::ExecuteCode(_)]), "{decision:?}");
}

#[test]
fn a_script_can_wait_for_a_person_and_a_subtask_at_once() {
    let mut world = World::new();
    world.send();
    world.decide(Event::Wake);
    world.result(calls(&["a"]));
    world.at_work = vec![child(1)];
    let call = call(&world, 2, &[1], 1000);
    world.result(park_for(&[1], vec![call.clone()]));
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::AwaitApproval);
    world.say(ApprovalState::Approved);
    let decision = world.decide(Event::Wake);
    assert!(
        matches!(decision.effects.as_slice(), [Effect::ExecuteCode(step)] if step.round == 1),
        "{decision:?}"
    );
    world.result(park_for(&[], vec![call]));
    world.decide(Event::Wake);
    assert_eq!(world.task.phase, Phase::AwaitSubtasks);
    world.at_work.clear();
    let decision = world.decide(Event::Wake);
    assert!(
        matches!(decision.effects.as_slice(), [Effect::ExecuteCode(step)] if step.round == 2),
        "{decision:?}"
    );
}

#[test]
fn a_suspended_task_keeps_the_script_that_waits() {
    let mut world = waiting(&[1], 1000);
    world.task.suspend = true;
    world.decide(Event::Wake);
    world.at_work.clear();
    assert!(world.decide(Event::Wake).effects.is_empty(), "a suspended task starts nothing");
    world.task.suspend = false;
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::ExecuteCode(_)]), "{decision:?}");
}

#[test]
fn cancelling_a_script_that_waits_for_subtasks_ends_it() {
    let mut world = waiting(&[1], 1000);
    let step = world.task.step.as_ref().expect("it waits").id;
    world.cancel();
    let decision = world.decide(Event::Wake);
    assert!(decision.effects.contains(&Effect::EndCode(step)));
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Cancelled));
}
