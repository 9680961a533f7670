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

fn work(step: u128) -> CommandRef {
    CommandRef { step: StepId::from_uuid(Uuid::from_u128(step)), round: 0, until: LATER }
}

fn pool() -> Pool {
    Pool::code_default()
}

fn window(places: usize) -> (InFlightLimiter, watch::Sender<PartitionAssignment>) {
    let (sharing, share) = watch::channel(PartitionAssignment::all());
    (InFlightLimiter::new(InFlightLimits { model_calls: places, scripts: places }, share), sharing)
}

/// Acquires a slot for a task's step of the same number, as a committed decision does.
fn ask(window: &InFlightLimiter, of: u128, n: u128) -> bool {
    ask_for(window, of, n, work(n), NOW)
}

fn ask_for(window: &InFlightLimiter, of: u128, n: u128, work: CommandRef, now: Timestamp) -> bool {
    let ticket = window.acquire(organization(of), Queue::Model, task(n), work, now);
    let goes = ticket.is_granted();
    ticket.commit();
    goes
}

fn send(window: &InFlightLimiter, of: u128, n: u128) {
    window.mark_sent(organization(of), &Queue::Model, task(n), work(n).step);
}

/// The tasks that got a slot after waiting, since the last call.
fn called(window: &InFlightLimiter) -> Vec<u128> {
    let called = std::mem::take(&mut window.state().ready);
    called.into_iter().map(|called| called.task.uuid().as_u128()).collect()
}

/// A task whose model call is the step of this number.
fn row(of: u128, n: u128, step: u128, state: StepState) -> Task {
    let work = work(step);
    Task {
        id: task(n),
        organization: organization(of),
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
            id: work.step,
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
fn idle(of: u128, n: u128) -> Task {
    Task { step: None, turn: None, phase: Phase::AwaitInput, ..row(of, n, n, IN_FLIGHT) }
}

fn settle(window: &InFlightLimiter, task: &Task) {
    window.release_unneeded(task, &pool(), NOW);
}

#[test]
fn flood_fills_only_the_organizations_own_slots() {
    let (window, _sharing) = window(2);
    assert_eq!([1, 2, 3, 4].map(|n| ask(&window, 1, n)), [true, true, false, false]);
    assert_eq!([11, 12, 13].map(|n| ask(&window, 2, n)), [true, true, false]);
    // Each queue has its own slots.
    let code = window.acquire(organization(1), Queue::Code(pool()), task(3), work(5), NOW);
    let large = window.acquire(
        organization(1),
        Queue::Code(Pool::new("large").unwrap()),
        task(4),
        work(6),
        NOW,
    );
    assert!(code.is_granted() && large.is_granted());
    assert_eq!(called(&window), NONE);
}

#[test]
fn waiting_commands_are_granted_in_order() {
    let (window, _sharing) = window(1);
    for n in 1..=4 {
        ask(&window, 1, n);
    }
    // Asking again does not change the order.
    assert!(!ask(&window, 1, 4) && !ask(&window, 1, 2));
    for n in 1..=3 {
        settle(&window, &idle(1, n));
        assert_eq!(called(&window), [n + 1]);
        assert!(ask(&window, 1, n + 1), "a granted slot is kept");
    }
}

#[test]
fn command_state_reports_occupied_slots_and_position() {
    let (window, sharing) = window(2);
    for n in 1..=4 {
        ask(&window, 1, n);
    }
    let find = |n: u128, step: u128| {
        window.command_state(organization(1), &Queue::Model, task(n), work(step).step)
    };
    assert_eq!(find(1, 1), Some(CommandState::MayBeSent));
    assert_eq!(find(3, 3), Some(CommandState::Queued { in_flight: 2, ahead: 0 }));
    assert_eq!(find(4, 4), Some(CommandState::Queued { in_flight: 2, ahead: 1 }));
    assert_eq!(find(4, 7), Some(CommandState::MayBeSent), "another step does not wait");
    assert_eq!(
        window.command_state(organization(2), &Queue::Model, task(4), work(4).step),
        Some(CommandState::MayBeSent)
    );
    settle(&window, &idle(1, 1));
    assert_eq!(
        (find(3, 3), find(4, 4)),
        (Some(CommandState::MayBeSent), Some(CommandState::Queued { in_flight: 2, ahead: 0 }))
    );
    sharing.send_replace(PartitionAssignment::EMPTY);
    assert_eq!(find(4, 4), None, "another process owns it");
}

#[test]
fn every_end_of_a_step_releases_its_slot() {
    let parked =
        StepState::Suspended { waits: Vec::new(), awaits: Vec::new(), results: Vec::new() };
    let mut resumed = row(1, 1, 1, IN_FLIGHT);
    resumed.step.as_mut().unwrap().round = 1;
    let no_step = Task { step: None, ..row(1, 1, 1, IN_FLIGHT) };
    let ends = [
        idle(1, 1),
        no_step,
        row(1, 1, 1, StepState::Backoff { until: LATER }),
        row(1, 1, 1, parked),
        // Another round, and another step, acquire for themselves.
        resumed,
        row(1, 1, 7, IN_FLIGHT),
    ];
    for end in ends {
        let (window, _sharing) = window(1);
        assert!(ask(&window, 1, 1) && !ask(&window, 1, 2));
        send(&window, 1, 1);
        settle(&window, &row(1, 1, 1, IN_FLIGHT));
        settle(&window, &row(1, 1, 1, StepState::Cancelling { deadline: LATER }));
        assert_eq!(called(&window), NONE, "its worker is running");
        settle(&window, &end);
        assert_eq!(called(&window), [2], "{end:?}");
    }
}

#[test]
fn ended_step_is_skipped_when_its_turn_comes() {
    let (window, _sharing) = window(1);
    for n in 1..=4 {
        ask(&window, 1, n);
    }
    settle(&window, &idle(1, 2));
    settle(&window, &row(1, 3, 3, StepState::Cancelling { deadline: LATER }));
    settle(&window, &idle(1, 1));
    assert_eq!(called(&window), [4]);
    // The same for one that has its slot and was not sent.
    ask(&window, 1, 5);
    settle(&window, &row(1, 4, 4, StepState::Cancelling { deadline: LATER }));
    assert_eq!(called(&window), [5]);
}

#[test]
fn later_step_of_task_takes_over_its_slot() {
    let (window, _sharing) = window(1);
    assert!(ask(&window, 1, 1) && !ask(&window, 1, 2));
    // A title has the slot when the next answer is requested.
    settle(&window, &Task { title_step: Some(work(1).step), ..idle(1, 1) });
    assert_eq!(called(&window), NONE);
    assert!(ask_for(&window, 1, 1, work(7), NOW));
    settle(&window, &row(1, 1, 7, IN_FLIGHT));
    assert_eq!(called(&window), NONE);
    // A waiting task keeps its turn.
    ask(&window, 1, 3);
    assert!(!ask_for(&window, 1, 2, work(8), NOW));
    settle(&window, &idle(1, 1));
    assert_eq!(called(&window), [2]);
}

#[test]
fn uncommitted_permit_releases_its_slot() {
    let (window, _sharing) = window(1);
    drop(window.acquire(organization(1), Queue::Model, task(1), work(1), NOW));
    let first = window.acquire(organization(1), Queue::Model, task(2), work(2), NOW);
    assert!(first.is_granted());
    drop(window.acquire(organization(1), Queue::Model, task(3), work(3), NOW));
    assert!(!ask(&window, 1, 4));
    drop(first);
    assert_eq!(called(&window), [4], "and a dropped permit is not granted");
    // Acquiring again for a committed command does not risk its slot.
    drop(window.acquire(organization(1), Queue::Model, task(4), work(4), NOW));
    assert!(!ask(&window, 1, 5));
}

#[test]
fn command_is_unsent_from_its_turn_until_sent() {
    let (window, _sharing) = window(1);
    let due = |n| window.unsent(organization(1), &Queue::Model, task(n)).map(|due| due.step);
    ask(&window, 1, 1);
    send(&window, 1, 1);
    ask(&window, 1, 2);
    assert_eq!([due(1), due(2)], [None, None]);
    settle(&window, &idle(1, 1));
    assert_eq!(due(2), Some(work(2).step));
    send(&window, 1, 2);
    assert_eq!(due(2), None);
}

#[test]
fn forgotten_or_released_task_frees_its_slot() {
    let (window, _sharing) = window(1);
    for n in 1..=4 {
        ask(&window, 1, n);
    }
    window.forget(task(1));
    assert_eq!(called(&window), [2]);
    window.forget(task(3));
    window.release(organization(1), &Queue::Model, task(2), work(9).step);
    assert_eq!(called(&window), NONE, "another step does not release it");
    window.release(organization(1), &Queue::Model, task(2), work(2).step);
    assert_eq!(called(&window), [4]);
    window.forget(task(4));
    assert!(window.state().slots.is_empty());
}

#[test]
fn tasks_of_reassigned_partitions_have_no_slots() {
    let (window, sharing) = window(1);
    let foreign = (1..).find(|&n| !same_partition(n, 100)).unwrap();
    assert!(ask(&window, 1, foreign) && !ask(&window, 1, 100));
    sharing.send_replace([construct_domain::partition::for_task(task(100))].into_iter().collect());
    window.retain_assigned();
    assert_eq!(called(&window), [100]);
    // Commands of an actor that finishes its work are neither counted nor delayed.
    assert!(ask(&window, 1, foreign));
    window.record_queued(organization(1), Queue::Model, task(foreign), work(foreign));
    assert!(!window.is_unknown(organization(1), &Queue::Model, task(foreign), &work(foreign)));
    settle(&window, &idle(1, 100));
    assert!(window.state().slots.is_empty());
}

fn same_partition(one: u128, other: u128) -> bool {
    construct_domain::partition::for_task(task(one))
        == construct_domain::partition::for_task(task(other))
}

#[test]
fn commands_of_another_process_count_beyond_the_limit() {
    let (window, _sharing) = window(2);
    for n in 1..=4 {
        assert!(window.is_unknown(organization(1), &Queue::Model, task(n), &work(n)));
        window.record_queued(organization(1), Queue::Model, task(n), work(n));
        assert!(!window.is_unknown(organization(1), &Queue::Model, task(n), &work(n)));
    }
    assert!(ask(&window, 1, 4) && !ask(&window, 1, 5));
    assert!(!window.is_unknown(organization(1), &Queue::Model, task(5), &work(5)));
    for n in 1..=2 {
        settle(&window, &idle(1, n));
        assert_eq!(called(&window), NONE);
    }
    settle(&window, &idle(1, 3));
    assert_eq!(called(&window), [5]);
    // A command that waited here and turns out to be queued waits no more.
    ask(&window, 1, 6);
    window.record_queued(organization(1), Queue::Model, task(6), work(6));
    settle(&window, &idle(1, 4));
    settle(&window, &idle(1, 5));
    assert_eq!(called(&window), NONE);
}

#[test]
fn leaked_slot_is_reused_after_its_deadline() {
    let (window, _sharing) = window(1);
    assert!(ask(&window, 1, 1));
    let later = |seconds| LATER + SignedDuration::from_secs(seconds);
    let patient = |n| CommandRef { until: later(1_000), ..work(n) };
    assert!(!ask_for(&window, 1, 2, patient(2), later(59)));
    // The next reconcile of its task acquires again.
    assert!(!ask_for(&window, 1, 3, patient(3), later(60)));
    assert_eq!(called(&window), [2]);
    // No command waits behind one whose own deadline has passed.
    let hasty = CommandRef { until: later(100), ..work(4) };
    ask_for(&window, 1, 4, hasty, later(60));
    ask_for(&window, 1, 5, patient(5), later(60));
    window.forget(task(2));
    assert_eq!(called(&window), [3]);
    window.release_unneeded(&idle(1, 3), &pool(), later(101));
    assert_eq!(called(&window), [5]);
}

#[test]
fn unlimited_queue_counts_nothing() {
    let (window, _sharing) = window(0);
    assert!((1..=1_000).all(|n| ask(&window, 1, n)));
    assert!(!window.is_unknown(organization(1), &Queue::Model, task(5), &work(6)));
    assert!(window.state().slots.is_empty());
}

#[test]
fn waiting_commands_of_an_organization_are_bounded() {
    let (window, _sharing) = window(1);
    // Inserted directly, without acquiring each of them.
    ask(&window, 1, 1);
    {
        let mut state = window.state();
        let lane = state.slots.get_mut(&(organization(1), Queue::Model)).unwrap();
        for turn in 0..MAX_WAITING as u128 / 2 {
            let id = turn + 1_000;
            lane.order.insert(turn as u64, task(id));
            lane.waiting.insert(
                task(id),
                WaitingCommand { work: work(id), turn: turn as u64, trace: Context::new() },
            );
        }
    }
    assert!(!ask(&window, 1, 2));
    assert!(
        window.is_unknown(organization(1), &Queue::Model, task(2), &work(2)),
        "it is not recorded"
    );
    assert!(ask(&window, 2, 3) && !ask(&window, 2, 4));
    assert!(!window.is_unknown(organization(2), &Queue::Model, task(4), &work(4)));
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
        let (window, sharing) = window(3);
        let all = PartitionAssignment::all();
        let half: PartitionAssignment =
            all.partitions().filter(|partition| partition % 2 == 0).collect();
        for _ in 0..400 {
            let (n, of) = (1 + u128::from(random(12)), 1 + u128::from(random(2)));
            let (n, step) = (n + 100 * of, u128::from(random(4)));
            match random(9) {
                0..=3 => _ = ask_for(&window, of, n, work(step), NOW),
                4 => drop(window.acquire(organization(of), Queue::Model, task(n), work(step), NOW)),
                5 => settle(&window, &row(of, n, step, IN_FLIGHT)),
                6 => settle(&window, &idle(of, n)),
                7 => window.forget(task(n)),
                _ => {
                    sharing.send_replace(if random(2) == 0 { all } else { half });
                    window.retain_assigned();
                }
            }
            for lane in window.state().slots.values() {
                assert!(lane.held.len() <= 3, "seed {seed}: {lane:?}");
                assert!(lane.held.len() == 3 || lane.waiting.is_empty(), "seed {seed}: {lane:?}");
                assert_eq!(lane.waiting.len(), lane.order.len(), "seed {seed}: {lane:?}");
                assert!(
                    !lane.held.keys().any(|task| lane.waiting.contains_key(task)),
                    "seed {seed}: {lane:?}"
                );
            }
        }
        for of in 1..=2 {
            for n in 1..=12 {
                settle(&window, &idle(of, n + 100 * of));
            }
        }
        assert!(window.state().slots.is_empty(), "seed {seed}: {:?}", window.state().slots);
    }
}
