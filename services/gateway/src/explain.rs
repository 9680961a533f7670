//! Why a task doesn't go on: in words, since when, until when, and who can change that. There is an
//! answer for every state a task can be in.

use std::time::Duration;

use construct_domain::{
    backoff,
    task::{
        BUDGET_EXHAUSTED, CANCELLED, CONTEXT_TOO_LONG, Phase, QUARANTINED, RECONCILE_FAILED, STUCK,
        Stage, Step, StepState, TaskError, Turn, TurnOutcome,
    },
};
use construct_proto::{
    mesh::v1::FailedLooks,
    v1::{TaskExplanation, TaskPhase},
};
use construct_store::{Quarantine, StoredApproval, StoredTask};
use jiff::Timestamp;

use crate::{
    convert,
    whereabouts::{Found, Whereabouts},
};

/// When the reconciler's sweep has found an intent whose wake was lost, at the latest: it passes
/// over what is younger than half a second, and looks every two seconds unless the operator says
/// otherwise.
const SWEEP: Duration = Duration::from_millis(2_500);

#[cfg(test)]
mod tests;

/// Approvals that an explanation names at most.
pub(crate) const APPROVALS: u32 = 10;
/// Subtasks that one names at most.
const SUBTASKS: usize = 10;

/// What is being waited for.
struct Wait {
    words: String,
    since: Timestamp,
    deadline: Option<Timestamp>,
    next: Option<Timestamp>,
    released_by: String,
}

/// How the mesh stands at the moment, as far as that can be found out.
#[derive(Debug, Clone, Default)]
pub(crate) struct Mesh {
    /// Since when no interpreter serves the task's pool.
    pub(crate) no_interpreter: Option<Timestamp>,
    /// Since when no process of the providers service is there.
    pub(crate) no_providers: Option<Timestamp>,
    /// What the reconciler that looks after the task says.
    pub(crate) found: Found,
}

/// Explains a task. `model` is the name of the model its agent uses, `asked` what people have not
/// decided about, `mesh` what is known of those it may wait for.
pub(crate) fn explain(
    task: &StoredTask,
    model: Option<&str>,
    asked: &[StoredApproval],
    mesh: Option<&Mesh>,
) -> TaskExplanation {
    let Mesh { no_interpreter, no_providers, found: Found { command, failed } } =
        mesh.cloned().unwrap_or_default();
    let no_interpreter = no_interpreter.filter(|_| needs_interpreter(task));
    let no_providers = no_providers.filter(|_| needs_providers(task));
    // Whoever had taken it is gone.
    let gone = no_interpreter.is_some() || no_providers.is_some();
    let mut wait = wait(
        task,
        model,
        asked,
        command.filter(|command| !(gone && *command == Whereabouts::Taken)),
    );
    let whole = |since: Timestamp| Timestamp::from_second(since.as_second()).unwrap_or(since);
    if let Some(since) = no_interpreter.map(whole) {
        let pool = &task.compute;
        wait.words.push_str(&format!("; no interpreter serves the pool `{pool}` since {since}"));
        wait.released_by = format!(
            "the operator, by starting an interpreter that serves `{pool}`; else {}",
            wait.released_by
        );
    }
    if let Some(since) = no_providers.map(whole) {
        wait.words
            .push_str(&format!("; no process of the providers service is there since {since}"));
        wait.released_by =
            format!("the operator, by starting the providers service; else {}", wait.released_by);
    }
    let mut error = task.state.last_error.as_ref().map(convert::error);
    if let Some(failed) = failed {
        error = Some(convert::error(&fails(&mut wait, failed)));
    }
    if let Some(parent) = task.ancestors.last() {
        wait.words.push_str(&format!(" (it is a subtask of {parent})"));
    }
    let state = &task.state;
    let step = state.step.as_ref();
    TaskExplanation {
        task_id: state.id.to_string(),
        phase: task.phase().map_or(TaskPhase::Unspecified, convert::phase).into(),
        waiting_for: wait.words,
        since: Some(convert::time(wait.since)),
        deadline: wait.deadline.map(convert::time),
        next_wake: wait.next.map(convert::time),
        released_by: wait.released_by,
        last_error: error,
        step_id: step.map(|step| step.id.to_string()).unwrap_or_default(),
        attempt: step.map_or(0, |step| step.attempt),
        trace_id: task.trace_id.clone().unwrap_or_default(),
        approvals: asked.iter().map(|approval| approval.id.to_string()).collect(),
    }
}

/// Adds that the reconciler cannot look at the task just now, and returns the error. Whatever is
/// waited for, it is not taken up meanwhile.
fn fails(wait: &mut Wait, failed: FailedLooks) -> TaskError {
    let FailedLooks { since, count, error, next } = failed;
    let since = since.and_then(convert::to_time).unwrap_or(wait.since);
    let times = if count == 1 { "once".to_owned() } else { format!("{count} times in a row") };
    wait.words.push_str(&format!(
        "; the reconciler cannot look at the task, and has tried {times} since {since:.0}: {error}"
    ));
    wait.next = next.and_then(convert::to_time).or(wait.next);
    wait.released_by = format!(
        "the reconciler service, which tries again until it can; the operator, if what it fails for does not pass; then {}",
        wait.released_by
    );
    TaskError { code: RECONCILE_FAILED.to_owned(), message: error, time: since }
}

/// Explains a task that was put aside, also one of which not everything can be read: that is what
/// they are put aside for.
pub(crate) fn put_aside(task: &StoredTask, parked: Quarantine) -> TaskExplanation {
    let Quarantine { since, reason } = parked;
    let error = TaskError { code: QUARANTINED.to_owned(), message: reason.clone(), time: since };
    TaskExplanation {
        waiting_for: format!(
            "a person: looking at it failed each time, and it was put aside ({reason})"
        ),
        since: Some(convert::time(since)),
        deadline: None,
        next_wake: None,
        released_by:
            "a person, by asking for another try (`construct task retry`), or for anything else"
                .to_owned(),
        last_error: Some(convert::error(&error)),
        ..explain(task, None, &[], None)
    }
}

/// Whether nothing is to be done for the task: there is nobody to ask how that goes.
pub(crate) fn at_rest(task: &StoredTask) -> bool {
    let state = &task.state;
    let wishes = state.cancel.is_some() || state.rewind.is_some() || state.retry.is_some();
    let suspended = state.phase == Phase::Suspended;
    state.turn.is_none()
        && !wishes
        && state.suspend == suspended
        && (suspended || task.queued_count == 0)
        && task.unreadable.is_empty()
}

/// Whether the task does not go on without an interpreter: a script is to be run, or the model to
/// be told which tools there are. While a model answers, it does.
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

/// Whether the task does not go on without the providers service: a model is being asked, or to be
/// asked again.
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
    asked: &[StoredApproval],
    command: Option<Whereabouts>,
) -> Wait {
    let state = &task.state;
    if !task.unreadable.is_empty() {
        return unreadable(task);
    }
    // What was told to stop explains the delay of whatever was asked for meanwhile.
    if let (Some(step @ Step { state: StepState::Cancelling { .. }, .. }), Some(turn)) =
        (&state.step, &state.turn)
    {
        return step_wait(task, step, turn, model, command);
    }
    if let Some(reason) = &state.cancel {
        let why = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
        return unseen(
            task,
            format!("the reconciler, to end the running turn: a person cancelled it{why}"),
        );
    }
    if state.rewind.is_some() {
        let words = "the reconciler, to take the conversation back to an earlier message, as a person has asked";
        return unseen(task, words.to_owned());
    }
    match (state.suspend, state.phase) {
        (true, Phase::Suspended) => return suspended(task),
        (true, _) => {
            return unseen(
                task,
                "the reconciler, to stop what runs: a person suspended the task".to_owned(),
            );
        }
        (false, Phase::Suspended) => {
            return unseen(task, "the reconciler, to go on: a person resumed the task".to_owned());
        }
        (false, _) => {}
    }
    match (&state.turn, &state.step) {
        (Some(_), Some(step @ Step { state: StepState::Suspended { .. }, .. })) => parked(task, step, asked),
        (Some(turn), Some(step)) => step_wait(task, step, turn, model, command),
        (Some(turn), None) => {
            let what = match turn.stage {
                Stage::Model => "call the model",
                Stage::Compact { .. } => "have the conversation summed up",
                Stage::Code { .. } => "have the script run",
            };
            unseen(task, format!("the reconciler, to {what}"))
        }
        (None, _) if state.retry.is_some() => {
            let words = "the reconciler, to try once more the turn that has failed: a person asked for it";
            unseen(task, words.to_owned())
        }
        (None, _) if task.queued_count > 0 => {
            let count = task.queued_count;
            let messages = if count == 1 {
                "the message that waits".to_owned()
            } else {
                format!("the next of {count} messages that wait")
            };
            unseen(task, format!("the reconciler, to take {messages}"))
        }
        (None, _) if let Some(error) = state.last_error.as_ref().filter(|error| error.code == BUDGET_EXHAUSTED) => {
            Wait {
                words: format!("a message from a user, and room in a budget: {}", error.message),
                since: task.phase_since,
                deadline: None,
                next: None,
                released_by: "a person, by raising the budget (`construct budget update`) and then asking for another try (`construct \
                              task retry`) or sending a message"
                    .to_owned(),
            }
        }
        (None, _) if let Some(error) = state.last_error.as_ref().filter(|error| error.code == CANCELLED) => Wait {
            words: format!("a message from a user; the last turn was {}", error.message),
            since: task.phase_since,
            deadline: None,
            next: None,
            released_by: "a user, by sending a message".to_owned(),
        },
        (None, _)
            if let Some(error) =
                state.last_error.as_ref().filter(|error| [STUCK, CONTEXT_TOO_LONG].contains(&error.code.as_str())) =>
        {
            Wait {
                words: format!("a message from a user; the last turn was ended: {} ({})", error.message, error.code),
                since: task.phase_since,
                deadline: None,
                next: None,
                released_by: "a user, by sending a message that says how to go on".to_owned(),
            }
        }
        (None, _) if matches!(state.last_outcome, Some(TurnOutcome::Failed | TurnOutcome::MaxTurns)) => Wait {
            words: "a message from a user; the last turn has failed".to_owned(),
            since: task.phase_since,
            deadline: None,
            next: None,
            released_by: "a user, by sending a message, or by asking for another try (`construct task retry`)".to_owned(),
        },
        (None, _) => Wait {
            words: "a message from a user".to_owned(),
            since: task.phase_since,
            deadline: None,
            next: None,
            released_by: "a user, by sending a message".to_owned(),
        },
    }
}

/// A task that nobody can go on with, and that is not put aside: it has just been retried, or
/// nobody had a reason to look at it yet.
fn unreadable(task: &StoredTask) -> Wait {
    let why = task
        .state
        .last_error
        .as_ref()
        .map(|error| format!(": {}", error.message))
        .unwrap_or_default();
    Wait {
        words: format!("a person to repair it{why}"),
        since: task.updated_at,
        deadline: None,
        next: task.state.next_wake,
        released_by: "a person, by repairing the task's row in the database, or by going back to the version that wrote it; the reconciler \
                      service tries some times and then puts the task aside"
            .to_owned(),
    }
}

fn suspended(task: &StoredTask) -> Wait {
    let queued = match task.queued_count {
        0 => String::new(),
        1 => "; 1 message waits meanwhile".to_owned(),
        count => format!("; {count} messages wait meanwhile"),
    };
    // What its script waits for is kept for so long.
    let parked =
        task.state.step.as_ref().filter(|step| matches!(step.state, StepState::Suspended { .. }));
    let until = parked.map(Step::approvals_expire_at);
    let script = if until.is_some() {
        "; its script is put away until then, and ended at the deadline"
    } else {
        ""
    };
    Wait {
        words: format!("a person to resume it{queued}{script}"),
        since: task.phase_since,
        deadline: until,
        next: until.map(|until| task.state.next_wake.unwrap_or(until)),
        released_by: "a person, by resuming the task".to_owned(),
    }
}

/// A script that is put away until people have decided.
fn parked(task: &StoredTask, step: &Step, asked: &[StoredApproval]) -> Wait {
    let subtasks = subtasks(step);
    if asked.is_empty() {
        let Some((words, until)) = subtasks else {
            return unseen(
                task,
                "the reconciler, to go on with the script: a person has decided about its call"
                    .to_owned(),
            );
        };
        return Wait {
            words,
            since: task.phase_since,
            deadline: Some(until),
            next: Some(task.state.next_wake.unwrap_or(until)),
            released_by: "the subtasks, by ending their turns (`construct why` says what each waits for); a person, by cancelling; at the \
                          deadline the script goes on without them"
                .to_owned(),
        };
    }
    let calls: Vec<String> =
        asked.iter().map(|approval| format!("{} ({})", approval.tool, approval.id)).collect();
    let also = subtasks.map(|(words, _)| format!("; and {words}")).unwrap_or_default();
    Wait {
        words: format!("a person to approve or reject what the script wants to do: {}{also}", calls.join(", ")),
        since: task.phase_since,
        deadline: Some(step.approvals_expire_at()),
        next: Some(task.state.next_wake.unwrap_or(step.approvals_expire_at())),
        released_by: "a person, by approving or rejecting, or by cancelling; at the deadline it counts as rejected"
            .to_owned(),
    }
}

/// The subtasks that a script waits for, in words, and until when.
fn subtasks(step: &Step) -> Option<(String, Timestamp)> {
    let StepState::Suspended { awaits, .. } = &step.state else { return None };
    let until = awaits.iter().map(|call| call.until).min()?;
    let mut tasks: Vec<String> = awaits
        .iter()
        .flat_map(|call| &call.tasks)
        .take(SUBTASKS)
        .map(ToString::to_string)
        .collect();
    let all: usize = awaits.iter().map(|call| call.tasks.len()).sum();
    if all > tasks.len() {
        tasks.push(format!("{} more", all - tasks.len()));
    }
    Some((
        format!("subtasks of its script to end: {}", tasks.join(", ")),
        until.min(step.approvals_expire_at()),
    ))
}

/// Something is written down that the reconciler has not taken up.
fn unseen(task: &StoredTask, words: String) -> Wait {
    Wait {
        words,
        since: task.updated_at,
        deadline: None,
        next: Some(task.state.next_wake.unwrap_or(task.updated_at + SWEEP)),
        released_by: "the reconciler service, at once, or with its next sweep when the wake was lost; when it lasts \
                      longer than some seconds, none is running or it cannot reach PostgreSQL; there is no end to this wait, it is \
                      looked for until it is taken up"
            .to_owned(),
    }
}

fn step_wait(
    task: &StoredTask,
    step: &Step,
    turn: &Turn,
    model: Option<&str>,
    command: Option<Whereabouts>,
) -> Wait {
    let attempt =
        if step.attempt > 1 { format!(", attempt {}", step.attempt) } else { String::new() };
    let (words, deadline, released_by) = match (&step.state, &turn.stage) {
        (StepState::InFlight { deadline }, Stage::Model) => {
            let model = model.map(|model| format!(" `{model}`")).unwrap_or_default();
            let words = format!(
                "the answer of the model{model} for the agent `{}`{attempt}",
                task.agent_name
            );
            let (place, released_by) = CALL.place(command, "the answer");
            (words + &place, *deadline, released_by)
        }
        (StepState::InFlight { deadline }, Stage::Compact { through, .. }) => {
            let words = format!(
                "a summary of the conversation up to message {through}, because it no longer fits the model{attempt}"
            );
            let (place, released_by) = CALL.place(command, "the summary");
            (words + &place, *deadline, released_by)
        }
        (StepState::InFlight { deadline }, Stage::Code { calls }) => {
            let what = if calls.len() == 1 {
                "the script".to_owned()
            } else {
                format!("the {} scripts", calls.len())
            };
            let (place, released_by) = SCRIPT.place(command, "the result");
            (format!("{what} of the model to end{place}"), *deadline, released_by)
        }
        (StepState::Backoff { until }, _) => {
            let error = task.state.last_error.as_ref();
            let because = error
                .map(|error| format!(": {} ({})", error.message, error.code))
                .unwrap_or_default();
            let words = format!(
                "the next attempt at {until}, after the one before it failed{because}; {}",
                end_of_tries(step)
            );
            let released_by = "the reconciler service, when the pause is over; a person, by cancelling or suspending";
            (words, *until, released_by.to_owned())
        }
        (StepState::Cancelling { deadline }, Stage::Model | Stage::Compact { .. }) => {
            let words = "the model call that was told to stop, to say that it has".to_owned();
            let released_by =
                "the providers service; at the deadline it is not waited for any longer";
            (words, *deadline, released_by.to_owned())
        }
        (StepState::Cancelling { deadline }, Stage::Code { .. }) => {
            let words =
                "the last words of a script that was told to stop, which say what it has done"
                    .to_owned();
            let released_by =
                "the interpreter service; at the deadline its outcome is recorded as unknown";
            (words, *deadline, released_by.to_owned())
        }
        (StepState::Suspended { .. }, _) => {
            let words = "a person to approve or reject what the script wants to do".to_owned();
            let released_by = "a person, by approving or rejecting, or by cancelling";
            (words, step.approvals_expire_at(), released_by.to_owned())
        }
    };
    let next = match step.state {
        StepState::Backoff { until } => until,
        StepState::InFlight { .. } | StepState::Cancelling { .. } | StepState::Suspended { .. } => {
            task.state.next_wake.unwrap_or(deadline)
        }
    };
    Wait {
        words,
        since: step.requested_at(),
        deadline: Some(deadline),
        next: Some(next),
        released_by,
    }
}

/// How long a call is tried again.
fn end_of_tries(step: &Step) -> String {
    // What never reached the vendor has not counted.
    match step.attempt {
        0 | 1 => "no call of the vendor was made so far, and until one is the tries have no end"
            .to_owned(),
        next => format!(
            "{} of {} calls of the vendor have failed, with the last of which the turn ends; tries that do not reach the vendor don't \
             count, and have no end",
            next - 1,
            backoff::MAX_ATTEMPTS
        ),
    }
}

/// What a worker is commanded to do, in words.
struct Work {
    one: &'static str,
    many: &'static str,
    worker: &'static str,
}

const CALL: Work = Work { one: "the call", many: "model calls", worker: "the providers service" };
const SCRIPT: Work = Work { one: "the script", many: "scripts", worker: "the interpreter service" };

impl Work {
    /// Where its command is, and who ends the wait for it, with what.
    fn place(&self, command: Option<Whereabouts>, with: &str) -> (String, String) {
        let Self { one, many, worker } = self;
        let (place, who) = match command {
            Some(Whereabouts::Withheld { standing, before }) => (
                format!(
                    "; {one} waits for a place of its organization in the queue of {many}, where {standing} of the organization's are, \
                     those that are being worked on included; {before} more wait before it"
                ),
                format!(
                    "the organization's {many} that are under way, by ending; then {worker}, with {with}, which takes {one} when it is \
                     its turn"
                ),
            ),
            Some(Whereabouts::Queued) => (
                format!("; {one} waits in the queue of {many}, no worker has it yet"),
                format!("{worker}, with {with}, which takes {one} when it is its turn"),
            ),
            Some(Whereabouts::Taken) => {
                (format!("; {one} is being worked on"), format!("{worker}, with {with}"))
            }
            Some(Whereabouts::Nowhere) => (
                format!(
                    "; {one} is about to be put into the queue of {many}, or {with} to be taken in"
                ),
                format!("the reconciler service, within seconds; {worker}, with {with}"),
            ),
            None => (
                String::new(),
                format!(
                    "{worker}, with {with}, which takes {one} when it is its turn (behind as many of its organization as may be under way \
                     at a time)"
                ),
            ),
        };
        (place, format!("{who}; a person, by cancelling or suspending"))
    }
}
