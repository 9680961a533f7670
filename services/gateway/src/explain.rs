//! Explains why a task doesn't continue: the reason, since when, until when, and who can change it.
//! Every state of a task has an explanation.

use std::time::Duration;

use construct_domain::{
    backoff,
    task::{
        BUDGET_EXHAUSTED, CANCELLED, CONTEXT_TOO_LONG, Phase, QUARANTINED, RECONCILE_FAILED, STUCK,
        Stage, Step, StepState, TaskError, Turn, TurnOutcome,
    },
};
use construct_proto::{
    mesh::v1::ReconcileFailures,
    v1::{TaskExplanation, TaskPhase},
};
use construct_store::{Quarantine, StoredApproval, StoredTask};
use jiff::Timestamp;

use crate::{
    convert,
    location::{ReconcilerReport, StepLocation},
};

/// The latest time at which the reconciler's sweep finds an intent whose wake was lost: it skips
/// intents younger than half a second, and runs every two seconds by default.
const SWEEP_DELAY: Duration = Duration::from_millis(2_500);

#[cfg(test)]
mod tests;

/// Maximum number of approvals in an explanation.
pub(crate) const MAX_APPROVALS: u32 = 10;
/// Maximum number of subtasks in an explanation.
const MAX_SUBTASKS: usize = 10;

/// What a task waits for.
struct WaitInfo {
    text: String,
    since: Timestamp,
    deadline: Option<Timestamp>,
    next: Option<Timestamp>,
    released_by: String,
}

/// The current status of the mesh, as far as it is known.
#[derive(Debug, Clone, Default)]
pub(crate) struct MeshStatus {
    /// Since when no interpreter serves the task's pool.
    pub(crate) no_interpreter: Option<Timestamp>,
    /// Since when no process of the providers service is there.
    pub(crate) no_providers: Option<Timestamp>,
    /// The report of the task's reconciler.
    pub(crate) report: ReconcilerReport,
}

/// Explains a task. `model` is the name of its agent's model, `approvals` are the undecided
/// approvals, and `mesh` is the status of the services it may wait for.
pub(crate) fn explain(
    task: &StoredTask,
    model: Option<&str>,
    approvals: &[StoredApproval],
    mesh: Option<&MeshStatus>,
) -> TaskExplanation {
    let MeshStatus {
        no_interpreter,
        no_providers,
        report: ReconcilerReport { location, failures },
    } = mesh.cloned().unwrap_or_default();
    let no_interpreter = no_interpreter.filter(|_| needs_interpreter(task));
    let no_providers = no_providers.filter(|_| needs_providers(task));
    // The worker that had the command is gone.
    let worker_is_gone = no_interpreter.is_some() || no_providers.is_some();
    let mut wait = wait(
        task,
        model,
        approvals,
        location.filter(|location| !(worker_is_gone && *location == StepLocation::WithWorker)),
    );
    let to_seconds = |since: Timestamp| Timestamp::from_second(since.as_second()).unwrap_or(since);
    if let Some(since) = no_interpreter.map(to_seconds) {
        let pool = &task.compute;
        wait.text.push_str(&format!("; no interpreter serves the pool `{pool}` since {since}"));
        wait.released_by = format!(
            "the operator, by starting an interpreter that serves `{pool}`; else {}",
            wait.released_by
        );
    }
    if let Some(since) = no_providers.map(to_seconds) {
        wait.text
            .push_str(&format!("; no process of the providers service is there since {since}"));
        wait.released_by =
            format!("the operator, by starting the providers service; else {}", wait.released_by);
    }
    let mut error = task.state.last_error.as_ref().map(convert::error);
    if let Some(failures) = failures {
        error = Some(convert::error(&add_reconcile_failures(&mut wait, failures)));
    }
    if let Some(parent) = task.ancestors.last() {
        wait.text.push_str(&format!(" (it is a subtask of {parent})"));
    }
    let state = &task.state;
    let step = state.step.as_ref();
    TaskExplanation {
        task_id: state.id.to_string(),
        phase: task.phase().map_or(TaskPhase::Unspecified, convert::phase).into(),
        waiting_for: wait.text,
        since: Some(convert::time(wait.since)),
        deadline: wait.deadline.map(convert::time),
        next_wake: wait.next.map(convert::time),
        released_by: wait.released_by,
        last_error: error,
        step_id: step.map(|step| step.id.to_string()).unwrap_or_default(),
        attempt: step.map_or(0, |step| step.attempt),
        trace_id: task.trace_id.clone().unwrap_or_default(),
        approvals: approvals.iter().map(|approval| approval.id.to_string()).collect(),
    }
}

/// Adds that reconciling the task fails, and returns the error. Meanwhile the task does not
/// continue, whatever it waits for.
fn add_reconcile_failures(wait: &mut WaitInfo, failures: ReconcileFailures) -> TaskError {
    let ReconcileFailures { since, count, error, next } = failures;
    let since = since.and_then(convert::to_time).unwrap_or(wait.since);
    let times = if count == 1 { "once".to_owned() } else { format!("{count} times in a row") };
    wait.text
        .push_str(&format!("; reconciling the task has failed {times} since {since:.0}: {error}"));
    wait.next = next.and_then(convert::to_time).or(wait.next);
    wait.released_by = format!(
        "the reconciler service, which retries until it succeeds; the operator, if the cause persists; then {}",
        wait.released_by
    );
    TaskError { code: RECONCILE_FAILED.to_owned(), message: error, time: since }
}

/// Explains a quarantined task, even if its row cannot be read completely: that is why tasks are
/// quarantined.
pub(crate) fn quarantined(task: &StoredTask, quarantine: Quarantine) -> TaskExplanation {
    let Quarantine { since, reason } = quarantine;
    let error = TaskError { code: QUARANTINED.to_owned(), message: reason.clone(), time: since };
    TaskExplanation {
        waiting_for: format!(
            "a person: reconciling it failed repeatedly, and it was quarantined ({reason})"
        ),
        since: Some(convert::time(since)),
        deadline: None,
        next_wake: None,
        released_by: "a person, by retrying it (`construct task retry`), or by any other request"
            .to_owned(),
        last_error: Some(convert::error(&error)),
        ..explain(task, None, &[], None)
    }
}

/// Whether there is nothing to do for the task, and so no service to ask about it.
pub(crate) fn is_idle(task: &StoredTask) -> bool {
    let state = &task.state;
    let has_intents = state.cancel.is_some() || state.rewind.is_some() || state.retry.is_some();
    let suspended = state.phase == Phase::Suspended;
    state.turn.is_none()
        && !has_intents
        && state.suspend == suspended
        && (suspended || task.queued_count == 0)
        && task.unreadable.is_empty()
}

/// Whether the task needs an interpreter to continue: to run a script, or to tell the model the
/// available tools. While a model answers, it does not.
fn needs_interpreter(task: &StoredTask) -> bool {
    match (&task.state.turn, &task.state.step) {
        (Some(turn), Some(step)) => match step.state {
            StepState::InFlight { .. } => matches!(turn.stage, Stage::Code { .. }),
            StepState::Backoff { .. } | StepState::Cancelling { .. } => true,
            StepState::Suspended { .. } => false,
        },
        _ => false,
    }
}

/// Whether the task needs the providers service to continue: a model is called, or will be called
/// again.
fn needs_providers(task: &StoredTask) -> bool {
    match (&task.state.turn, &task.state.step) {
        (Some(turn), Some(step)) => match step.state {
            StepState::InFlight { .. } | StepState::Cancelling { .. } => {
                !matches!(turn.stage, Stage::Code { .. })
            }
            StepState::Backoff { .. } => true,
            StepState::Suspended { .. } => false,
        },
        _ => false,
    }
}

fn wait(
    task: &StoredTask,
    model: Option<&str>,
    approvals: &[StoredApproval],
    location: Option<StepLocation>,
) -> WaitInfo {
    let state = &task.state;
    if !task.unreadable.is_empty() {
        return unreadable(task);
    }
    // A step that is being canceled delays everything that was requested meanwhile.
    if let (Some(step @ Step { state: StepState::Cancelling { .. }, .. }), Some(turn)) =
        (&state.step, &state.turn)
    {
        return step_wait(task, step, turn, model, location);
    }
    if let Some(reason) = &state.cancel {
        let reason_text = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
        return pending_intent(
            task,
            format!("the reconciler, to end the running turn: a person cancelled it{reason_text}"),
        );
    }
    if state.rewind.is_some() {
        let text = "the reconciler, to rewind the conversation, as a person requested";
        return pending_intent(task, text.to_owned());
    }
    match (state.suspend, state.phase) {
        (true, Phase::Suspended) => return suspended(task),
        (true, _) => {
            return pending_intent(
                task,
                "the reconciler, to stop the running step: a person suspended the task".to_owned(),
            );
        }
        (false, Phase::Suspended) => {
            return pending_intent(
                task,
                "the reconciler, to continue: a person resumed the task".to_owned(),
            );
        }
        (false, _) => {}
    }
    match (&state.turn, &state.step) {
        (Some(_), Some(step @ Step { state: StepState::Suspended { .. }, .. })) => suspended_script(task, step, approvals),
        (Some(turn), Some(step)) => step_wait(task, step, turn, model, location),
        (Some(turn), None) => {
            let action = match turn.stage {
                Stage::Model => "call the model",
                Stage::Compact { .. } => "summarize the conversation",
                Stage::Code { .. } => "run the script",
            };
            pending_intent(task, format!("the reconciler, to {action}"))
        }
        (None, _) if state.retry.is_some() => {
            let text = "the reconciler, to retry the failed turn: a person asked for it";
            pending_intent(task, text.to_owned())
        }
        (None, _) if task.queued_count > 0 => {
            let count = task.queued_count;
            let messages = if count == 1 {
                "the queued message".to_owned()
            } else {
                format!("the next of {count} queued messages")
            };
            pending_intent(task, format!("the reconciler, to take {messages}"))
        }
        (None, _) if let Some(error) = state.last_error.as_ref().filter(|error| error.code == BUDGET_EXHAUSTED) => {
            WaitInfo {
                text: format!("a message from a user, and room in a budget: {}", error.message),
                since: task.phase_since,
                deadline: None,
                next: None,
                released_by: "a person, by raising the budget (`construct budget update`) and then retrying (`construct \
                              task retry`) or sending a message"
                    .to_owned(),
            }
        }
        (None, _) if let Some(error) = state.last_error.as_ref().filter(|error| error.code == CANCELLED) => WaitInfo {
            text: format!("a message from a user; the last turn was {}", error.message),
            since: task.phase_since,
            deadline: None,
            next: None,
            released_by: "a user, by sending a message".to_owned(),
        },
        (None, _)
            if let Some(error) =
                state.last_error.as_ref().filter(|error| [STUCK, CONTEXT_TOO_LONG].contains(&error.code.as_str())) =>
        {
            WaitInfo {
                text: format!("a message from a user; the last turn was ended: {} ({})", error.message, error.code),
                since: task.phase_since,
                deadline: None,
                next: None,
                released_by: "a user, by sending a message that says how to continue".to_owned(),
            }
        }
        (None, _) if matches!(state.last_outcome, Some(TurnOutcome::Failed | TurnOutcome::MaxTurns)) => WaitInfo {
            text: "a message from a user; the last turn has failed".to_owned(),
            since: task.phase_since,
            deadline: None,
            next: None,
            released_by: "a user, by sending a message, or by retrying (`construct task retry`)".to_owned(),
        },
        (None, _) => WaitInfo {
            text: "a message from a user".to_owned(),
            since: task.phase_since,
            deadline: None,
            next: None,
            released_by: "a user, by sending a message".to_owned(),
        },
    }
}

/// A task that cannot be read, and is not quarantined: it was just retried, or was not reconciled
/// yet.
fn unreadable(task: &StoredTask) -> WaitInfo {
    let reason_text = task
        .state
        .last_error
        .as_ref()
        .map(|error| format!(": {}", error.message))
        .unwrap_or_default();
    WaitInfo {
        text: format!("a person to repair it{reason_text}"),
        since: task.updated_at,
        deadline: None,
        next: task.state.next_wake,
        released_by: "a person, by repairing the task's row in the database, or by going back to the version that wrote it; the reconciler \
                      service retries some times and then quarantines the task"
            .to_owned(),
    }
}

fn suspended(task: &StoredTask) -> WaitInfo {
    let queued = match task.queued_count {
        0 => String::new(),
        1 => "; 1 message is queued".to_owned(),
        count => format!("; {count} messages are queued"),
    };
    // The calls that its script waits for expire then.
    let suspended_script =
        task.state.step.as_ref().filter(|step| matches!(step.state, StepState::Suspended { .. }));
    let expires_at = suspended_script.map(Step::approvals_expire_at);
    let script = if expires_at.is_some() {
        "; its script stays suspended until then, and ends at the deadline"
    } else {
        ""
    };
    WaitInfo {
        text: format!("a person to resume it{queued}{script}"),
        since: task.phase_since,
        deadline: expires_at,
        next: expires_at.map(|expires_at| task.state.next_wake.unwrap_or(expires_at)),
        released_by: "a person, by resuming the task".to_owned(),
    }
}

/// A script that is suspended until people decide or subtasks end.
fn suspended_script(task: &StoredTask, step: &Step, approvals: &[StoredApproval]) -> WaitInfo {
    let subtasks = subtasks(step);
    if approvals.is_empty() {
        let Some((text, expires_at)) = subtasks else {
            return pending_intent(
                task,
                "the reconciler, to continue the script: a person has decided about its call"
                    .to_owned(),
            );
        };
        return WaitInfo {
            text,
            since: task.phase_since,
            deadline: Some(expires_at),
            next: Some(task.state.next_wake.unwrap_or(expires_at)),
            released_by: "the subtasks, by ending their turns (`construct explain` says what each waits for); a person, by cancelling; at the \
                          deadline the script continues without them"
                .to_owned(),
        };
    }
    let calls: Vec<String> =
        approvals.iter().map(|approval| format!("{} ({})", approval.tool, approval.id)).collect();
    let also = subtasks.map(|(text, _)| format!("; and {text}")).unwrap_or_default();
    WaitInfo {
        text: format!(
            "a person to approve or reject what the script wants to do: {}{also}",
            calls.join(", ")
        ),
        since: task.phase_since,
        deadline: Some(step.approvals_expire_at()),
        next: Some(task.state.next_wake.unwrap_or(step.approvals_expire_at())),
        released_by:
            "a person, by approving, rejecting or cancelling; at the deadline it counts as rejected"
                .to_owned(),
    }
}

/// The subtasks that a script waits for as text, and the deadline.
fn subtasks(step: &Step) -> Option<(String, Timestamp)> {
    let StepState::Suspended { awaits, .. } = &step.state else { return None };
    let expires_at = awaits.iter().map(|call| call.until).min()?;
    let mut tasks: Vec<String> = awaits
        .iter()
        .flat_map(|call| &call.tasks)
        .take(MAX_SUBTASKS)
        .map(ToString::to_string)
        .collect();
    let all: usize = awaits.iter().map(|call| call.tasks.len()).sum();
    if all > tasks.len() {
        tasks.push(format!("{} more", all - tasks.len()));
    }
    Some((
        format!("subtasks of its script to end: {}", tasks.join(", ")),
        expires_at.min(step.approvals_expire_at()),
    ))
}

/// An intent that the reconciler has not handled yet.
fn pending_intent(task: &StoredTask, text: String) -> WaitInfo {
    WaitInfo {
        text,
        since: task.updated_at,
        deadline: None,
        next: Some(task.state.next_wake.unwrap_or(task.updated_at + SWEEP_DELAY)),
        released_by: "the reconciler service, at once, or with its next sweep when the wake was lost; when it lasts \
                      longer than some seconds, none is running or it cannot reach PostgreSQL; this wait has no deadline: the \
                      sweep repeats until the reconciler has handled it"
            .to_owned(),
    }
}

fn step_wait(
    task: &StoredTask,
    step: &Step,
    turn: &Turn,
    model: Option<&str>,
    location: Option<StepLocation>,
) -> WaitInfo {
    let attempt =
        if step.attempt > 1 { format!(", attempt {}", step.attempt) } else { String::new() };
    let (text, deadline, released_by) = match (&step.state, &turn.stage) {
        (StepState::InFlight { deadline }, Stage::Model) => {
            let model = model.map(|model| format!(" `{model}`")).unwrap_or_default();
            let text = format!(
                "the answer of the model{model} for the agent `{}`{attempt}",
                task.agent_name
            );
            let (place, released_by) = CALL.location(location, "the answer");
            (text + &place, *deadline, released_by)
        }
        (StepState::InFlight { deadline }, Stage::Compact { through, .. }) => {
            let text = format!(
                "a summary of the conversation up to message {through}, because it no longer fits the model{attempt}"
            );
            let (place, released_by) = CALL.location(location, "the summary");
            (text + &place, *deadline, released_by)
        }
        (StepState::InFlight { deadline }, Stage::Code { calls }) => {
            let action = if calls.len() == 1 {
                "the script".to_owned()
            } else {
                format!("the {} scripts", calls.len())
            };
            let (place, released_by) = SCRIPT.location(location, "the result");
            (format!("{action} of the model to end{place}"), *deadline, released_by)
        }
        (StepState::Backoff { until }, _) => {
            let error = task.state.last_error.as_ref();
            let because = error
                .map(|error| format!(": {} ({})", error.message, error.code))
                .unwrap_or_default();
            let text = format!(
                "the next attempt at {until}, after the one before it failed{because}; {}",
                retry_limit(step)
            );
            let released_by = "the reconciler service, when the retry delay is over; a person, by cancelling or suspending";
            (text, *until, released_by.to_owned())
        }
        (StepState::Cancelling { deadline }, Stage::Model | Stage::Compact { .. }) => {
            let text = "the canceled model call to end".to_owned();
            let released_by = "the providers service; at the deadline the task stops waiting";
            (text, *deadline, released_by.to_owned())
        }
        (StepState::Cancelling { deadline }, Stage::Code { .. }) => {
            let text = "the final result of a canceled script".to_owned();
            let released_by =
                "the interpreter service; at the deadline its outcome is recorded as unknown";
            (text, *deadline, released_by.to_owned())
        }
        (StepState::Suspended { .. }, _) => {
            let text = "a person to approve or reject what the script wants to do".to_owned();
            let released_by = "a person, by approving, rejecting or cancelling";
            (text, step.approvals_expire_at(), released_by.to_owned())
        }
    };
    let next = match step.state {
        StepState::Backoff { until } => until,
        StepState::InFlight { .. } | StepState::Cancelling { .. } | StepState::Suspended { .. } => {
            task.state.next_wake.unwrap_or(deadline)
        }
    };
    WaitInfo {
        text,
        since: step.requested_at(),
        deadline: Some(deadline),
        next: Some(next),
        released_by,
    }
}

/// How long a call is retried.
fn retry_limit(step: &Step) -> String {
    // Attempts that did not reach the vendor do not count.
    match step.attempt {
        0 | 1 => "no call has reached the vendor so far; until one does, retries are unlimited"
            .to_owned(),
        next => format!(
            "{} of {} calls of the vendor have failed, and the turn ends with the last; attempts that do not reach the vendor don't \
             count, and are unlimited",
            next - 1,
            backoff::MAX_ATTEMPTS
        ),
    }
}

/// A kind of command, with its texts.
struct CommandKind {
    one: &'static str,
    many: &'static str,
    worker: &'static str,
}

const CALL: CommandKind =
    CommandKind { one: "the call", many: "model calls", worker: "the providers service" };
const SCRIPT: CommandKind =
    CommandKind { one: "the script", many: "scripts", worker: "the interpreter service" };

impl CommandKind {
    /// The location of its command as text, and what ends the wait. `with` names the worker's
    /// result.
    fn location(&self, location: Option<StepLocation>, with: &str) -> (String, String) {
        let Self { one, many, worker } = self;
        let (place, released_by) = match location {
            Some(StepLocation::WaitingForSlot { queued, ahead }) => (
                format!(
                    "; {one} waits for a slot of its organization in the queue of {many}, where {queued} of the organization's are, \
                     including those being worked on; {ahead} more wait before it"
                ),
                format!(
                    "the organization's {many} that are in flight, by ending; then {worker}, with {with}, which takes {one} when it is \
                     its turn"
                ),
            ),
            Some(StepLocation::Queued) => (
                format!("; {one} waits in the queue of {many}, no worker has it yet"),
                format!("{worker}, with {with}, which takes {one} when it is its turn"),
            ),
            Some(StepLocation::WithWorker) => {
                (format!("; {one} is being worked on"), format!("{worker}, with {with}"))
            }
            Some(StepLocation::NotQueued) => (
                format!(
                    "; {one} is about to be put into the queue of {many}, or {with} is about to be handled"
                ),
                format!("the reconciler service, within seconds; {worker}, with {with}"),
            ),
            None => (
                String::new(),
                format!(
                    "{worker}, with {with}, which takes {one} when it is its turn (after the organization's earlier ones, up to its \
                     in-flight limit)"
                ),
            ),
        };
        (place, format!("{released_by}; a person, by cancelling or suspending"))
    }
}
