use std::collections::BTreeMap;

use construct_domain::{
    AgentId, ApprovalId, MessageId, OrganizationId, StepId, TaskId,
    approval::{ApprovalCall, ApprovalState},
    money::Usage,
    subtask::AwaitedCall,
    task::{Step, Task, TaskError, Turn, UNREADABLE},
};
use uuid::Uuid;

use super::*;

const NOW: Timestamp = Timestamp::constant(1_700_000_000, 123_456_000);

fn stored_task() -> StoredTask {
    StoredTask {
        state: Task {
            id: TaskId::from_uuid(Uuid::from_u128(1)),
            organization: OrganizationId::LOCAL,
            agent: AgentId::from_uuid(Uuid::from_u128(2)),
            suspend: false,
            cancel: None,
            rewind: None,
            retry: None,
            max_turns: 50,
            titled: false,
            phase: Phase::AwaitInput,
            turn: None,
            step: None,
            title_step: None,
            steps: 0,
            last_position: 0,
            next_wake: None,
            last_outcome: None,
            last_error: None,
            approvals: Vec::new(),
            subtasks: None,
            context: construct_domain::context::Context::default(),
        },
        agent_name: "ada".into(),
        workspace: "/w".into(),
        title: "A title".into(),
        max_turns_override: 7,
        policy: Vec::new(),
        pinned: Vec::new(),
        compute: "cpu-4".into(),
        phase_since: NOW,
        usage: Usage::default(),
        tool_uses: BTreeMap::new(),
        queued_count: 0,
        event_sequence: 9,
        trace_id: None,
        forked_from: None,
        ancestors: Vec::new(),
        subtasks: Vec::new(),
        revision: 3,
        created_at: NOW,
        updated_at: NOW,
        unreadable: Vec::new(),
    }
}

fn turn(stage: Stage) -> Turn {
    Turn { calls: 4, ..Turn::new(MessageId::from_uuid(Uuid::from_u128(3)), stage) }
}

fn step(state: StepState) -> Step {
    Step {
        id: StepId::from_uuid(Uuid::from_u128(4)),
        number: 5,
        attempt: 2,
        since: NOW,
        round: 0,
        resumed: None,
        state,
    }
}

const LATER: Timestamp = Timestamp::constant(1_700_000_600, 0);

fn code(calls: usize) -> Stage {
    Stage::Code { calls: vec!["call".into(); calls] }
}

/// Every state of a task, with text that its explanation must have.
fn states() -> Vec<(StoredTask, &'static str)> {
    let with = |change: &dyn Fn(&mut StoredTask)| {
        let mut task = stored_task();
        change(&mut task);
        task
    };
    let running = |stage: Stage, state: StepState| {
        with(&move |task| {
            task.state.phase = if matches!(stage, Stage::Code { .. }) {
                Phase::ExecuteTools
            } else {
                Phase::InvokeModel
            };
            task.state.turn = Some(turn(stage.clone()));
            task.state.step = Some(step(state.clone()));
            task.state.next_wake = Some(LATER);
        })
    };
    let (in_flight, stopping) =
        (StepState::InFlight { deadline: LATER }, StepState::Cancelling { deadline: LATER });
    let mut failed = running(Stage::Model, StepState::Backoff { until: LATER });
    let error =
        TaskError { code: "OVERLOADED".into(), message: "the vendor is busy".into(), time: LATER };
    failed.state.last_error = Some(error);
    let mut stuck = stored_task();
    stuck.state.last_error =
        Some(TaskError { code: STUCK.into(), message: "it ran in circles".into(), time: LATER });
    let mut unreadable = stored_task();
    unreadable.unreadable = vec!["turn"];
    unreadable.state.last_error = Some(TaskError {
        code: UNREADABLE.into(),
        message: "turn: missing field".into(),
        time: LATER,
    });
    let mut stopped = running(code(1), stopping.clone());
    stopped.state.cancel = Some("wrong way".into());
    let mut suspending = running(Stage::Model, in_flight.clone());
    suspending.state.suspend = true;
    let mut suspended = running(
        code(1),
        StepState::Suspended { waits: Vec::new(), awaits: Vec::new(), results: Vec::new() },
    );
    suspended.state.phase = Phase::AwaitApproval;
    let subtask = TaskId::from_uuid(Uuid::from_u128(6));
    let awaits = vec![AwaitedCall { script: 0, number: 1, tasks: vec![subtask], until: LATER }];
    let mut awaiting =
        running(code(1), StepState::Suspended { waits: Vec::new(), awaits, results: Vec::new() });
    awaiting.state.phase = Phase::AwaitSubtasks;
    vec![
        (stored_task(), "a message from a user"),
        (with(&|task| task.queued_count = 1), "take the queued message"),
        (with(&|task| task.queued_count = 3), "take the next of 3 queued messages"),
        (
            running(Stage::Model, in_flight.clone()),
            "the answer of the model `m` for the agent `ada`, attempt 2",
        ),
        (
            running(Stage::Compact { through: 7, kept: vec![1], replaced: 9 }, in_flight.clone()),
            "a summary of the conversation up to message 7",
        ),
        (stuck, "the last turn was ended: it ran in circles (STUCK)"),
        (unreadable, "a person to repair it: turn: missing field"),
        (running(code(1), in_flight.clone()), "the script of the model"),
        (running(code(2), in_flight), "the 2 scripts of the model"),
        (failed, "failed: the vendor is busy (OVERLOADED)"),
        (stopped, "the final result of a canceled script"),
        (running(code(1), stopping), "the final result of a canceled script"),
        (suspending, "a person suspended the task"),
        (with(&|task| task.state.cancel = Some("wrong way".into())), "cancelled it (wrong way)"),
        (with(&|task| task.state.cancel = Some(String::new())), "a person cancelled it"),
        (
            with(&|task| {
                task.state.suspend = true;
                task.state.phase = Phase::Suspended;
                task.queued_count = 2;
            }),
            "a person to resume it; 2 messages are queued",
        ),
        (suspended.clone(), "a person has decided about its call"),
        (
            with(&|task| {
                task.state = suspended.state.clone();
                task.state.suspend = true;
                task.state.phase = Phase::Suspended;
            }),
            "a person to resume it; its script stays suspended until then",
        ),
        (
            with(&|task| {
                task.state.last_outcome = Some(TurnOutcome::Failed);
                task.state.retry = Some(MessageId::from_uuid(Uuid::from_u128(8)));
            }),
            "to retry the failed turn",
        ),
        (with(&|task| task.state.phase = Phase::Suspended), "a person resumed the task"),
        (with(&|task| task.state.turn = Some(turn(Stage::Model))), "to call the model"),
        (with(&|task| task.state.turn = Some(turn(code(1)))), "to run the script"),
        (awaiting, "subtasks of its script to end: task_00000000-0000-0000-0000-000000000006"),
        (
            with(&|task| task.ancestors = vec![TaskId::from_uuid(Uuid::from_u128(6))]),
            "(it is a subtask of task_00000000-0000-0000-0000-000000000006)",
        ),
    ]
}

#[test]
fn every_state_has_an_explanation() {
    for (task, expected) in states() {
        let explanation = explain(&task, Some("m"), &[], None);
        assert!(
            explanation.waiting_for.contains(expected),
            "`{}` should say `{expected}`",
            explanation.waiting_for
        );
        assert!(
            !explanation.waiting_for.to_lowercase().contains("unknown"),
            "{}",
            explanation.waiting_for
        );
        assert!(
            !explanation.released_by.is_empty() && explanation.since.is_some(),
            "{explanation:?}"
        );
    }
}

#[test]
fn quarantined_task_explains_reason_time_and_remedy() {
    for (task, _) in states() {
        let suspended = Quarantine { since: LATER, reason: "turn: missing field".to_owned() };
        let explanation = quarantined(&task, suspended);
        assert!(
            explanation.waiting_for.contains("quarantined (turn: missing field)"),
            "{explanation:?}"
        );
        assert!(explanation.released_by.contains("construct task retry"), "{explanation:?}");
        assert_eq!(explanation.since, Some(convert::time(LATER)));
        assert_eq!((explanation.deadline, explanation.next_wake), (None, None));
        let error = explanation.last_error.expect("the reason");
        assert_eq!(
            (error.code.as_str(), error.message.as_str()),
            (QUARANTINED, "turn: missing field")
        );
        assert_eq!(error.time, Some(convert::time(LATER)));
    }
}

#[test]
fn unknown_phase_is_reported_as_unspecified() {
    let mut task = stored_task();
    task.unreadable = vec!["phase"];
    assert_eq!(explain(&task, None, &[], None).phase(), TaskPhase::Unspecified);
}

#[test]
fn only_waits_for_people_have_no_deadline() {
    for (task, _) in states() {
        let explanation = explain(&task, None, &[], None);
        let person = explanation.released_by.starts_with("a person")
            || explanation.released_by.starts_with("a user");
        // The approvals of a suspended script expire.
        let step = task
            .state
            .step
            .as_ref()
            .filter(|step| matches!(step.state, StepState::Suspended { .. }));
        let until = step
            .filter(|_| task.state.phase == Phase::Suspended)
            .map(|step| convert::time(step.approvals_expire_at()));
        assert_eq!(explanation.next_wake.is_none(), person && until.is_none(), "{explanation:?}");
        assert!(until.is_none() || explanation.deadline == until, "{explanation:?}");
    }
}

#[test]
fn step_in_flight_has_id_attempt_and_deadline() {
    let (task, _) = states().swap_remove(3);
    let explanation = explain(&task, None, &[], None);
    assert!(explanation.step_id.starts_with("step_"));
    assert_eq!(explanation.attempt, 2);
    assert_eq!(explanation.deadline, Some(convert::time(LATER)));
}

fn mesh_at(location: StepLocation) -> MeshStatus {
    MeshStatus {
        report: ReconcilerReport { location: Some(location), ..ReconcilerReport::default() },
        ..MeshStatus::default()
    }
}

#[test]
fn reconcile_failure_is_explained_in_every_state() {
    let failures = ReconcileFailures {
        since: Some(convert::time(NOW)),
        count: 3,
        error: "the database is not available: canceling statement due to statement timeout"
            .to_owned(),
        next: Some(convert::time(LATER)),
    };
    let error = failures.error.clone();
    let mesh = MeshStatus {
        report: ReconcilerReport { failures: Some(failures), ..ReconcilerReport::default() },
        ..MeshStatus::default()
    };
    for (task, _) in states() {
        let (plain, explanation) =
            (explain(&task, None, &[], None), explain(&task, None, &[], Some(&mesh)));
        let (words, _) =
            plain.waiting_for.split_once(" (it is a subtask").unwrap_or((&plain.waiting_for, ""));
        assert!(explanation.waiting_for.starts_with(words), "{explanation:?}");
        let expected =
            format!("; reconciling the task has failed 3 times in a row since {NOW:.0}: {error}");
        assert!(explanation.waiting_for.contains(&expected), "{explanation:?}");
        assert!(
            explanation
                .released_by
                .starts_with("the reconciler service, which retries until it succeeds")
        );
        assert!(explanation.released_by.ends_with(&plain.released_by));
        assert_eq!(explanation.next_wake, Some(convert::time(LATER)));
        assert_eq!(
            explanation.last_error.map(|last| (last.code, last.message)),
            Some((RECONCILE_FAILED.to_owned(), error.clone()))
        );
    }
}

#[test]
fn task_at_rest_does_not_wait_for_the_reconciler() {
    let (mut at_rest_count, mut active_count) = (0, 0);
    for (task, _) in states() {
        let words = explain(&task, None, &[], None).released_by;
        if is_idle(&task) {
            at_rest_count += 1;
            assert!(
                !words.contains("the reconciler service") && task.state.turn.is_none(),
                "{words}"
            );
        } else {
            active_count += 1;
        }
    }
    assert!(at_rest_count >= 2 && active_count >= 8, "{at_rest_count} {active_count}");
}

#[test]
fn command_location_is_explained_only_for_steps_in_flight() {
    let waiting = StepLocation::WaitingForSlot { queued: 128, ahead: 40 };
    let places = [
        (waiting, "waits for a slot of its organization in the queue of", "in flight, by ending"),
        (StepLocation::Queued, "no worker has it yet", "when it is its turn"),
        (StepLocation::WithWorker, "is being worked on", "service, with the "),
        (StepLocation::NotQueued, "is about to be put into the queue of", "the reconciler service"),
    ];
    let mut count = 0;
    for (task, _) in states() {
        let in_flight = task.state.turn.is_some()
            && !task.state.suspend
            && task
                .state
                .step
                .as_ref()
                .is_some_and(|step| matches!(step.state, StepState::InFlight { .. }));
        let plain = explain(&task, None, &[], None);
        assert_eq!(
            plain.released_by.contains("(after the organization's earlier ones"),
            in_flight,
            "{plain:?}"
        );
        for (command, words, who) in places {
            let mesh = mesh_at(command);
            let explanation = explain(&task, None, &[], Some(&mesh));
            assert_eq!(explanation.waiting_for.contains(words), in_flight, "{explanation:?}");
            assert!(!in_flight || explanation.released_by.contains(who), "{explanation:?}");
            assert_eq!(
                (&explanation.since, &explanation.deadline),
                (&plain.since, &plain.deadline)
            );
            count += usize::from(in_flight);
        }
    }
    assert_eq!(count, 4 * places.len());
    let (task, _) = states().swap_remove(3);
    let mesh = mesh_at(waiting);
    let words = explain(&task, None, &[], Some(&mesh)).waiting_for;
    assert!(
        words.contains("128 of the organization's") && words.contains("40 more wait before it"),
        "{words}"
    );
}

#[test]
fn model_call_reports_missing_providers_service() {
    let mesh = MeshStatus { no_providers: Some(NOW), ..mesh_at(StepLocation::WithWorker) };
    let mut count = 0;
    for (task, _) in states() {
        let explanation = explain(&task, None, &[], Some(&mesh));
        let asks = match (&task.state.turn, &task.state.step) {
            (Some(turn), Some(step)) => match step.state {
                StepState::InFlight { .. } | StepState::Cancelling { .. } => {
                    !matches!(turn.stage, Stage::Code { .. })
                }
                StepState::Backoff { .. } => true,
                StepState::Suspended { .. } => false,
            },
            _ => false,
        };
        let expected = "; no process of the providers service is there since 2023-11-14T22:13:20Z";
        assert_eq!(
            explanation.waiting_for.ends_with(expected),
            asks,
            "{}",
            explanation.waiting_for
        );
        assert_eq!(
            explanation.released_by.starts_with("the operator, by starting the providers service"),
            asks
        );
        // The worker that had the command has stopped.
        assert!(
            !asks || !explanation.waiting_for.contains("is being worked on"),
            "{explanation:?}"
        );
        count += usize::from(asks);
    }
    assert!(count >= 3, "{count}");
}

#[test]
fn backoff_reports_next_attempt_and_attempt_limit() {
    let is_backoff = |task: &StoredTask| {
        matches!(task.state.step.as_ref().map(|step| &step.state), Some(StepState::Backoff { .. }))
    };
    let (mut task, _) =
        states().into_iter().find(|(task, _)| is_backoff(task)).expect("it is one of the states");
    let explanation = explain(&task, None, &[], None);
    let until = Some(convert::time(LATER));
    assert_eq!((&explanation.deadline, &explanation.next_wake), (&until, &until));
    assert!(
        explanation.waiting_for.contains(&format!("the next attempt at {LATER}")),
        "{explanation:?}"
    );
    assert!(
        explanation.waiting_for.contains("1 of 5 calls of the vendor have failed"),
        "{explanation:?}"
    );
    // A service was unavailable: the vendor was not called.
    task.state.step.as_mut().expect("it has a step").attempt = 1;
    let explanation = explain(&task, None, &[], None);
    assert!(explanation.waiting_for.ends_with("retries are unlimited"), "{explanation:?}");
}

#[test]
fn pending_approvals_are_named() {
    let approval = StoredApproval {
        id: ApprovalId::from_uuid(Uuid::from_u128(9)),
        organization: OrganizationId::LOCAL,
        task: TaskId::from_uuid(Uuid::from_u128(1)),
        step: StepId::from_uuid(Uuid::from_u128(4)),
        call: ApprovalCall { script: 0, number: 1, hash: String::new() },
        tool: "create_file".into(),
        arguments: "{}".into(),
        arguments_size: 2,
        reason: String::new(),
        state: ApprovalState::Pending,
        decided_by: String::new(),
        comment: String::new(),
        decided_at: None,
        expires_at: LATER,
        revision: 1,
        created_at: NOW,
        updated_at: NOW,
    };
    let mut task = stored_task();
    task.state.phase = Phase::AwaitApproval;
    task.state.turn = Some(turn(code(1)));
    task.state.step = Some(step(StepState::Suspended {
        waits: vec![approval.call.clone()],
        awaits: Vec::new(),
        results: Vec::new(),
    }));
    let explanation = explain(&task, None, std::slice::from_ref(&approval), None);
    assert!(
        explanation.waiting_for.contains(&format!("create_file ({})", approval.id)),
        "{explanation:?}"
    );
    assert_eq!(explanation.approvals, [approval.id.to_string()]);
    let end = NOW + construct_domain::approval::APPROVAL_TIMEOUT;
    assert_eq!(
        (explanation.deadline, explanation.next_wake),
        (Some(convert::time(end)), Some(convert::time(end)))
    );
}

#[test]
fn unserved_pool_is_reported_where_scripts_wait() {
    let expected = "; no interpreter serves the pool `cpu-4` since 2023-11-14T22:13:20Z";
    let mut reported = 0;
    for (task, _) in states() {
        let mesh = MeshStatus { no_interpreter: Some(NOW), ..MeshStatus::default() };
        let explanation = explain(&task, None, &[], Some(&mesh));
        let waits = match (&task.state.turn, &task.state.step) {
            (Some(turn), Some(step)) => match step.state {
                StepState::InFlight { .. } => matches!(turn.stage, Stage::Code { .. }),
                StepState::Backoff { .. } | StepState::Cancelling { .. } => true,
                StepState::Suspended { .. } => false,
            },
            _ => false,
        };
        assert_eq!(
            explanation.waiting_for.ends_with(expected),
            waits,
            "{}",
            explanation.waiting_for
        );
        assert_eq!(
            explanation.released_by.contains("starting an interpreter that serves `cpu-4`"),
            waits
        );
        reported += usize::from(waits);
    }
    assert!(reported >= 4, "{reported}");
}
