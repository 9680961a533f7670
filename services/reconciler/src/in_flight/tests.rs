use construct_domain::{
    AgentId, MessageId, context,
    task::{Phase, Step, Turn},
};
use uuid::Uuid;

use super::*;

/// Far in the future: no deadline has passed unless a test says so.
const NOW: Timestamp = Timestamp::constant(4_000_000_000, 0);
const LATER: Timestamp = Timestamp::constant(4_000_000_600, 0);
const NONE: [u128; 0] = [];

fn organization(n: u128) -> OrganizationId {
    OrganizationId::from_uuid(Uuid::from_u128(n))
}

fn task(n: u128) -> TaskId {
    TaskId::from_uuid(Uuid::from_u128(n))
}

fn command(step: u128) -> CommandRef {
    CommandRef { step: StepId::from_uuid(Uuid::from_u128(step)), round: 0, until: LATER }
}

fn pool() -> Pool {
    Pool::code_default()
}

fn limiter(slots: usize) -> (InFlightLimiter, watch::Sender<PartitionAssignment>) {
    let (assignments, assignment) = watch::channel(PartitionAssignment::all());
    (
        InFlightLimiter::new(InFlightLimits { model_calls: slots, scripts: slots }, assignment),
        assignments,
    )
}

/// Acquires a slot for a task's step of the same number, as a committed decision does.
fn acquire(limiter: &InFlightLimiter, owner: u128, n: u128) -> bool {
    acquire_for(limiter, owner, n, command(n), NOW)
}

fn acquire_for(
    limiter: &InFlightLimiter,
    owner: u128,
    n: u128,
    command: CommandRef,
    now: Timestamp,
) -> bool {
    let permit = limiter.acquire(organization(owner), Queue::Model, task(n), command, now);
    let granted = permit.is_granted();
    permit.commit();
    granted
}

fn send(limiter: &InFlightLimiter, owner: u128, n: u128) {
    limiter.mark_sent(organization(owner), &Queue::Model, task(n), command(n).step);
}

/// The tasks that got a slot after waiting, since the last call.
fn take_ready(limiter: &InFlightLimiter) -> Vec<u128> {
    let ready = std::mem::take(&mut limiter.state().ready);
    ready.into_iter().map(|ready| ready.task.uuid().as_u128()).collect()
}

/// A task whose model call is the step of this number.
fn row(owner: u128, n: u128, step: u128, state: StepState) -> Task {
    let command = command(step);
    Task {
        id: task(n),
        organization: organization(owner),
        agent: AgentId::from_uuid(Uuid::nil()),
        suspend: false,
        cancel: None,
        rewind: None,
        retry: None,
        max_turns: 50,
        titled: true,
        phase: Phase::InvokeModel,
        turn: Some(Turn::new(MessageId::from_uuid(Uuid::nil()), Stage::Model)),
        step: Some(Step {
            id: command.step,
            number: 1,
            attempt: 1,
            since: NOW,
            round: 0,
            resumed: None,
            state,
        }),
        title_step: None,
        steps: 1,
        last_position: 1,
        next_wake: None,
        last_outcome: None,
        last_error: None,
        approvals: Vec::new(),
        subtasks: None,
        context: context::Context::default(),
    }
}

const IN_FLIGHT: StepState = StepState::InFlight { deadline: LATER };

/// A task with nothing to do.
fn idle(owner: u128, n: u128) -> Task {
    Task { step: None, turn: None, phase: Phase::AwaitInput, ..row(owner, n, n, IN_FLIGHT) }
}

fn release_unneeded(limiter: &InFlightLimiter, task: &Task) {
    limiter.release_unneeded(task, &pool(), NOW);
}

#[test]
fn flood_fills_only_the_organizations_own_slots() {
    let (limiter, _assignments) = limiter(2);
    assert_eq!([1, 2, 3, 4].map(|n| acquire(&limiter, 1, n)), [true, true, false, false]);
    assert_eq!([11, 12, 13].map(|n| acquire(&limiter, 2, n)), [true, true, false]);
    // Each queue has its own slots.
    let code = limiter.acquire(organization(1), Queue::Code(pool()), task(3), command(5), NOW);
    let large = limiter.acquire(
        organization(1),
        Queue::Code(Pool::new("large").unwrap()),
        task(4),
        command(6),
        NOW,
    );
    assert!(code.is_granted() && large.is_granted());
    assert_eq!(take_ready(&limiter), NONE);
}

#[test]
fn waiting_commands_are_granted_in_order() {
    let (limiter, _assignments) = limiter(1);
    for n in 1..=4 {
        acquire(&limiter, 1, n);
    }
    // Asking again does not change the order.
    assert!(!acquire(&limiter, 1, 4) && !acquire(&limiter, 1, 2));
    for n in 1..=3 {
        release_unneeded(&limiter, &idle(1, n));
        assert_eq!(take_ready(&limiter), [n + 1]);
        assert!(acquire(&limiter, 1, n + 1), "a granted slot is kept");
    }
}

#[test]
fn command_state_reports_occupied_slots_and_position() {
    let (limiter, assignments) = limiter(2);
    for n in 1..=4 {
        acquire(&limiter, 1, n);
    }
    let state_of = |n: u128, step: u128| {
        limiter.command_state(organization(1), &Queue::Model, task(n), command(step).step)
    };
    assert_eq!(state_of(1, 1), Some(CommandState::MayBeSent));
    assert_eq!(state_of(3, 3), Some(CommandState::Queued { in_flight: 2, ahead: 0 }));
    assert_eq!(state_of(4, 4), Some(CommandState::Queued { in_flight: 2, ahead: 1 }));
    assert_eq!(state_of(4, 7), Some(CommandState::MayBeSent), "another step does not wait");
    assert_eq!(
        limiter.command_state(organization(2), &Queue::Model, task(4), command(4).step),
        Some(CommandState::MayBeSent)
    );
    release_unneeded(&limiter, &idle(1, 1));
    assert_eq!(
        (state_of(3, 3), state_of(4, 4)),
        (Some(CommandState::MayBeSent), Some(CommandState::Queued { in_flight: 2, ahead: 0 }))
    );
    assignments.send_replace(PartitionAssignment::EMPTY);
    assert_eq!(state_of(4, 4), None, "another process owns it");
}

#[test]
fn every_end_of_a_step_releases_its_slot() {
    let suspended =
        StepState::Suspended { waits: Vec::new(), awaits: Vec::new(), results: Vec::new() };
    let mut resumed = row(1, 1, 1, IN_FLIGHT);
    resumed.step.as_mut().unwrap().round = 1;
    let no_step = Task { step: None, ..row(1, 1, 1, IN_FLIGHT) };
    let ends = [
        idle(1, 1),
        no_step,
        row(1, 1, 1, StepState::Backoff { until: LATER }),
        row(1, 1, 1, suspended),
        // Another round, and another step, acquire for themselves.
        resumed,
        row(1, 1, 7, IN_FLIGHT),
    ];
    for end in ends {
        let (limiter, _assignments) = limiter(1);
        assert!(acquire(&limiter, 1, 1) && !acquire(&limiter, 1, 2));
        send(&limiter, 1, 1);
        release_unneeded(&limiter, &row(1, 1, 1, IN_FLIGHT));
        release_unneeded(&limiter, &row(1, 1, 1, StepState::Cancelling { deadline: LATER }));
        assert_eq!(take_ready(&limiter), NONE, "its worker is running");
        release_unneeded(&limiter, &end);
        assert_eq!(take_ready(&limiter), [2], "{end:?}");
    }
}

#[test]
fn ended_step_is_skipped_when_its_turn_comes() {
    let (limiter, _assignments) = limiter(1);
    for n in 1..=4 {
        acquire(&limiter, 1, n);
    }
    release_unneeded(&limiter, &idle(1, 2));
    release_unneeded(&limiter, &row(1, 3, 3, StepState::Cancelling { deadline: LATER }));
    release_unneeded(&limiter, &idle(1, 1));
    assert_eq!(take_ready(&limiter), [4]);
    // The same for one that has its slot and was not sent.
    acquire(&limiter, 1, 5);
    release_unneeded(&limiter, &row(1, 4, 4, StepState::Cancelling { deadline: LATER }));
    assert_eq!(take_ready(&limiter), [5]);
}

#[test]
fn later_step_of_task_takes_over_its_slot() {
    let (limiter, _assignments) = limiter(1);
    assert!(acquire(&limiter, 1, 1) && !acquire(&limiter, 1, 2));
    // A title has the slot when the next answer is requested.
    release_unneeded(&limiter, &Task { title_step: Some(command(1).step), ..idle(1, 1) });
    assert_eq!(take_ready(&limiter), NONE);
    assert!(acquire_for(&limiter, 1, 1, command(7), NOW));
    release_unneeded(&limiter, &row(1, 1, 7, IN_FLIGHT));
    assert_eq!(take_ready(&limiter), NONE);
    // A waiting task keeps its turn.
    acquire(&limiter, 1, 3);
    assert!(!acquire_for(&limiter, 1, 2, command(8), NOW));
    release_unneeded(&limiter, &idle(1, 1));
    assert_eq!(take_ready(&limiter), [2]);
}

#[test]
fn uncommitted_permit_releases_its_slot() {
    let (limiter, _assignments) = limiter(1);
    drop(limiter.acquire(organization(1), Queue::Model, task(1), command(1), NOW));
    let first = limiter.acquire(organization(1), Queue::Model, task(2), command(2), NOW);
    assert!(first.is_granted());
    drop(limiter.acquire(organization(1), Queue::Model, task(3), command(3), NOW));
    assert!(!acquire(&limiter, 1, 4));
    drop(first);
    assert_eq!(take_ready(&limiter), [4], "and a dropped permit is not granted");
    // Acquiring again for a committed command does not risk its slot.
    drop(limiter.acquire(organization(1), Queue::Model, task(4), command(4), NOW));
    assert!(!acquire(&limiter, 1, 5));
}

#[test]
fn command_is_unsent_from_its_turn_until_sent() {
    let (limiter, _assignments) = limiter(1);
    let unsent_step = |n| {
        limiter.unsent(organization(1), &Queue::Model, task(n)).map(|unsent_step| unsent_step.step)
    };
    acquire(&limiter, 1, 1);
    send(&limiter, 1, 1);
    acquire(&limiter, 1, 2);
    assert_eq!([unsent_step(1), unsent_step(2)], [None, None]);
    release_unneeded(&limiter, &idle(1, 1));
    assert_eq!(unsent_step(2), Some(command(2).step));
    send(&limiter, 1, 2);
    assert_eq!(unsent_step(2), None);
}

#[test]
fn forgotten_or_released_task_frees_its_slot() {
    let (limiter, _assignments) = limiter(1);
    for n in 1..=4 {
        acquire(&limiter, 1, n);
    }
    limiter.forget(task(1));
    assert_eq!(take_ready(&limiter), [2]);
    limiter.forget(task(3));
    limiter.release(organization(1), &Queue::Model, task(2), command(9).step);
    assert_eq!(take_ready(&limiter), NONE, "another step does not release it");
    limiter.release(organization(1), &Queue::Model, task(2), command(2).step);
    assert_eq!(take_ready(&limiter), [4]);
    limiter.forget(task(4));
    assert!(limiter.state().slots.is_empty());
}

#[test]
fn tasks_of_reassigned_partitions_have_no_slots() {
    let (limiter, assignments) = limiter(1);
    let foreign = (1..).find(|&n| !same_partition(n, 100)).unwrap();
    assert!(acquire(&limiter, 1, foreign) && !acquire(&limiter, 1, 100));
    assignments
        .send_replace([construct_domain::partition::for_task(task(100))].into_iter().collect());
    limiter.retain_assigned();
    assert_eq!(take_ready(&limiter), [100]);
    // Commands of an actor that finishes its work are neither counted nor delayed.
    assert!(acquire(&limiter, 1, foreign));
    limiter.record_queued(organization(1), Queue::Model, task(foreign), command(foreign));
    assert!(!limiter.is_unknown(organization(1), &Queue::Model, task(foreign), &command(foreign)));
    release_unneeded(&limiter, &idle(1, 100));
    assert!(limiter.state().slots.is_empty());
}

fn same_partition(one: u128, other: u128) -> bool {
    construct_domain::partition::for_task(task(one))
        == construct_domain::partition::for_task(task(other))
}

#[test]
fn commands_of_another_process_count_beyond_the_limit() {
    let (limiter, _assignments) = limiter(2);
    for n in 1..=4 {
        assert!(limiter.is_unknown(organization(1), &Queue::Model, task(n), &command(n)));
        limiter.record_queued(organization(1), Queue::Model, task(n), command(n));
        assert!(!limiter.is_unknown(organization(1), &Queue::Model, task(n), &command(n)));
    }
    assert!(acquire(&limiter, 1, 4) && !acquire(&limiter, 1, 5));
    assert!(!limiter.is_unknown(organization(1), &Queue::Model, task(5), &command(5)));
    for n in 1..=2 {
        release_unneeded(&limiter, &idle(1, n));
        assert_eq!(take_ready(&limiter), NONE);
    }
    release_unneeded(&limiter, &idle(1, 3));
    assert_eq!(take_ready(&limiter), [5]);
    // A command that waited here and turns out to be queued waits no more.
    acquire(&limiter, 1, 6);
    limiter.record_queued(organization(1), Queue::Model, task(6), command(6));
    release_unneeded(&limiter, &idle(1, 4));
    release_unneeded(&limiter, &idle(1, 5));
    assert_eq!(take_ready(&limiter), NONE);
}

#[test]
fn leaked_slot_is_reused_after_its_deadline() {
    let (limiter, _assignments) = limiter(1);
    assert!(acquire(&limiter, 1, 1));
    let later = |seconds| LATER + SignedDuration::from_secs(seconds);
    let patient = |n| CommandRef { until: later(1_000), ..command(n) };
    assert!(!acquire_for(&limiter, 1, 2, patient(2), later(59)));
    // The next reconcile of its task acquires again.
    assert!(!acquire_for(&limiter, 1, 3, patient(3), later(60)));
    assert_eq!(take_ready(&limiter), [2]);
    // No command waits behind one whose own deadline has passed.
    let hasty = CommandRef { until: later(100), ..command(4) };
    acquire_for(&limiter, 1, 4, hasty, later(60));
    acquire_for(&limiter, 1, 5, patient(5), later(60));
    limiter.forget(task(2));
    assert_eq!(take_ready(&limiter), [3]);
    limiter.release_unneeded(&idle(1, 3), &pool(), later(101));
    assert_eq!(take_ready(&limiter), [5]);
}

#[test]
fn unlimited_queue_counts_nothing() {
    let (limiter, _assignments) = limiter(0);
    assert!((1..=1_000).all(|n| acquire(&limiter, 1, n)));
    assert!(!limiter.is_unknown(organization(1), &Queue::Model, task(5), &command(6)));
    assert!(limiter.state().slots.is_empty());
}

#[test]
fn waiting_commands_of_an_organization_are_bounded() {
    let (limiter, _assignments) = limiter(1);
    // Inserted directly, without acquiring each of them.
    acquire(&limiter, 1, 1);
    {
        let mut state = limiter.state();
        let queue_slots = state.slots.get_mut(&(organization(1), Queue::Model)).unwrap();
        for turn in 0..MAX_WAITING as u128 / 2 {
            let id = turn + 1_000;
            queue_slots.order.insert(turn as u64, task(id));
            queue_slots.waiting.insert(
                task(id),
                WaitingCommand { command: command(id), turn: turn as u64, trace: Context::new() },
            );
        }
    }
    assert!(!acquire(&limiter, 1, 2));
    assert!(
        limiter.is_unknown(organization(1), &Queue::Model, task(2), &command(2)),
        "it is not recorded"
    );
    assert!(acquire(&limiter, 2, 3) && !acquire(&limiter, 2, 4));
    assert!(!limiter.is_unknown(organization(2), &Queue::Model, task(4), &command(4)));
}

/// After any actions in any order, nothing waits while a slot is free, and in the end nothing is
/// left.
#[test]
fn no_history_leaks_a_slot() {
    for seed in 1..=200_u64 {
        let mut state = seed;
        let mut random = move |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let (limiter, assignments) = limiter(3);
        let all = PartitionAssignment::all();
        let half: PartitionAssignment =
            all.partitions().filter(|partition| partition % 2 == 0).collect();
        for _ in 0..400 {
            let (n, owner) = (1 + u128::from(random(12)), 1 + u128::from(random(2)));
            let (n, step) = (n + 100 * owner, u128::from(random(4)));
            match random(9) {
                0..=3 => _ = acquire_for(&limiter, owner, n, command(step), NOW),
                4 => drop(limiter.acquire(
                    organization(owner),
                    Queue::Model,
                    task(n),
                    command(step),
                    NOW,
                )),
                5 => release_unneeded(&limiter, &row(owner, n, step, IN_FLIGHT)),
                6 => release_unneeded(&limiter, &idle(owner, n)),
                7 => limiter.forget(task(n)),
                _ => {
                    assignments.send_replace(if random(2) == 0 { all } else { half });
                    limiter.retain_assigned();
                }
            }
            for queue_slots in limiter.state().slots.values() {
                assert!(queue_slots.occupied.len() <= 3, "seed {seed}: {queue_slots:?}");
                assert!(
                    queue_slots.occupied.len() == 3 || queue_slots.waiting.is_empty(),
                    "seed {seed}: {queue_slots:?}"
                );
                assert_eq!(
                    queue_slots.waiting.len(),
                    queue_slots.order.len(),
                    "seed {seed}: {queue_slots:?}"
                );
                assert!(
                    !queue_slots.occupied.keys().any(|task| queue_slots.waiting.contains_key(task)),
                    "seed {seed}: {queue_slots:?}"
                );
            }
        }
        for owner in 1..=2 {
            for n in 1..=12 {
                release_unneeded(&limiter, &idle(owner, n + 100 * owner));
            }
        }
        assert!(limiter.state().slots.is_empty(), "seed {seed}: {:?}", limiter.state().slots);
    }
}
