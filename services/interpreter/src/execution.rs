//! One command: the scripts of one assistant message, run in order, journaled, and reported.

use std::{
    pin::pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use construct_bus::{Bus, Delivery, files, journal, subject};
use construct_domain::{StepId, TaskId};
use construct_proto::mesh::v1::{
    Cancelled, CodeCompleted, CodeExecute, Failure, FailureClass, JournalOpened, Parked, StepRef,
    StepResult, step_result,
};
use construct_proto::v1::{CodeInterpreterCall, CodeInterpreterResult};
use construct_runtime::{MasterKeys, clock};
use futures::{
    FutureExt as _,
    future::{Either, ready, select},
};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::{
    host::{Broken, Kept, ScriptHost, Shared, past_calls},
    journal::{Journal, NotWritten, Taken, Taker},
    metrics,
    policy::Policies,
    report,
    running::Running,
    sandbox::{Engine, Limit, Status, ToolTable},
    tiers::Tiers,
    tools::{Attachments, Models, Secrets, Subtasks, Toolbox},
    workspaces::Workspaces,
};

/// Why the scripts after one that cannot be continued are not run.
const STUCK: &str = "a script before it could not be continued";

/// What is known of a script that waits for people or subtasks, should it never be gone on with.
const WAITED: &str = "cancelled while waiting for an approval";
const AWAITED: &str = "cancelled while waiting for subtasks";

/// Why scripts are not continued that may have run.
const GONE: &str = "NATS has lost the record of its calls";

/// Why scripts are not continued that have used files which are not here.
const ELSEWHERE: &str = "they were interrupted and cannot be continued, because the files that they had lie on another storage than that of the machine \
                         which went on; look at what files there are before you do anything again";

/// A note of a script whose last writes take too long.
const STILL_WRITING: &str = "a call that had not ended when the script ended was still writing to the workspace; look at what it wrote before it is used";

/// How long scripts that were told to stop wait for their last entry.
const LAST_WORD: Duration = Duration::from_millis(100);

/// Pause before the mesh is tried again.
const PAUSE: Duration = Duration::from_millis(500);

/// What executions work with.
#[derive(Debug)]
pub(crate) struct Executor {
    pub(crate) bus: Bus,
    pub(crate) engine: Arc<Engine>,
    pub(crate) table: ToolTable,
    pub(crate) workspaces: Workspaces,
    pub(crate) tiers: Tiers,
    /// Open the secrets that commands carry.
    pub(crate) secrets_keys: Option<MasterKeys>,
    /// Where models are reached, and the client for it; none: nowhere.
    pub(crate) llm: Option<(String, reqwest::Client)>,
    /// What people have uploaded.
    pub(crate) files: files::Store,
    pub(crate) running: Running,
    /// Cancelled when the service is to stop.
    pub(crate) draining: CancellationToken,
    /// What still runs so long after that is handed back: another process continues it from the
    /// journal.
    pub(crate) patience: Duration,
}

/// What became of a command.
enum End {
    /// To be reported.
    Outcome(step_result::Outcome),
    /// The mesh is away, or the service stops: nothing is said, and the command is delivered again.
    HandBack(String),
    /// Another process is at it. Nothing is said or settled: that would be said in its name.
    Fenced,
    /// It is over already.
    Over,
}

/// The scripts of one command, taken over.
struct Run<'a> {
    command: &'a CodeExecute,
    step: &'a StepRef,
    delivery: u32,
    toolbox: &'a Toolbox,
    journal: &'a Journal,
    running: &'a crate::running::Entry<'a>,
}

impl Executor {
    /// Carries a command out, reports, and only then acknowledges.
    pub(crate) async fn execute(&self, delivery: Delivery<CodeExecute>) {
        let span = tracing::info_span!(
            "interpreter.step.execute",
            otel.kind = "consumer",
            construct.task = %delivery.task,
            construct.step = delivery.message.step.as_ref().map(|step| step.step_id.as_str()),
            construct.delivery = delivery.delivery,
        );
        delivery.receipt.continue_trace(&span);
        self.carry_out(delivery).instrument(span).await;
    }

    async fn carry_out(&self, delivery: Delivery<CodeExecute>) {
        let Delivery { message: command, task, delivery, receipt, .. } = delivery;
        let keep_alive = receipt.keep_alive();
        let end = self.run(&command, delivery).await;
        let outcome = match end {
            End::Outcome(outcome) => outcome,
            End::HandBack(reason) => {
                tracing::warn!(reason, "the execution is handed back");
                drop(keep_alive);
                return receipt.nak(Duration::from_secs(1)).await;
            }
            End::Fenced => {
                tracing::warn!("another process has taken the execution over");
                return;
            }
            End::Over => {
                tracing::info!("nobody waits for these scripts any more; their command is dropped");
                return receipt.ack().await;
            }
        };
        let result = StepResult {
            step: command.step,
            delivery,
            outcome: Some(outcome),
            ..StepResult::default()
        };
        if self.publish(task, result).await {
            receipt.ack().await;
        } else {
            // The journal answers every call when the command comes again.
            drop(keep_alive);
            receipt.nak(Duration::from_secs(1)).await;
        }
    }

    /// Publishes the result, for as long as it takes: nobody else has it. False when the service
    /// stops before.
    async fn publish(&self, task: TaskId, mut result: StepResult) -> bool {
        let address = subject::TaskResult::new(task);
        loop {
            let error = match self.bus.publish(&address, &result).await {
                Ok(_) => return true,
                Err(error) => error,
            };
            if error.is_retryable() {
                tracing::warn!(%error, "the result cannot be published yet");
                tokio::select! {
                    () = self.out_of_patience() => return false,
                    () = tokio::time::sleep(PAUSE) => {}
                }
            } else if matches!(result.outcome, Some(step_result::Outcome::Failed(_))) {
                // Not even that the step failed can be told. Its deadline will end it.
                tracing::error!(%error, "the result cannot be published");
                return true;
            } else {
                let message = format!("what became of the scripts cannot be passed on: {error}");
                let failure =
                    Failure { class: FailureClass::Internal.into(), message, ..Failure::default() };
                result.outcome = Some(step_result::Outcome::Failed(failure));
            }
        }
    }

    /// Waits until the service has been told to stop and given its scripts their time.
    async fn out_of_patience(&self) {
        self.draining.cancelled().await;
        tokio::time::sleep(self.patience).await;
    }

    async fn run(&self, command: &CodeExecute, delivery: u32) -> End {
        let failed = |class: FailureClass, message: String| {
            End::Outcome(step_result::Outcome::Failed(Failure {
                class: class.into(),
                message,
                ..Failure::default()
            }))
        };
        let Some((step, id)) = command
            .step
            .as_ref()
            .and_then(|step| Some((step, step.step_id.parse::<StepId>().ok()?)))
        else {
            return failed(FailureClass::Internal, "the command names no step".to_owned());
        };
        let running = self.running.enter(id);
        let cancel = running.token().child_token();
        // First of all: whatever is said below, it is said with what an earlier process has done.
        let fresh = opened(delivery, step.round, self.workspaces.storage(&command.workspace));
        let taker = Taker { fresh, again: command.again || delivery > 1, stop: cancel.clone() };
        let tier = self.tiers.of(&command.compute);
        // Beside it: whosever the scripts turn out to be, to open their workspace changes nothing
        // that is in it. It is waited for only to run them.
        let workspace =
            pin!(self.workspaces.open(&command.workspace, &step.task_id, &tier.commands));
        let (journal, workspace) =
            match select(pin!(Journal::open(&self.bus, id, taker)), workspace).await {
                Either::Left((journal, workspace)) => (journal, workspace.left_future()),
                Either::Right((workspace, journal)) => {
                    (journal.await, ready(workspace).right_future())
                }
            };
        let journal = match journal {
            Ok(Taken::Over(journal)) => journal,
            Ok(Taken::Closed | Taken::Superseded) => return End::Over,
            Ok(Taken::Gone) => {
                tracing::error!("a journal is gone; its scripts are not run again");
                let results = command
                    .calls
                    .iter()
                    .map(|call| report::unreadable(&call.id, GONE, &[]))
                    .collect();
                return End::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted {
                    results,
                }));
            }
            Err(journal::Error::Conflict) => return End::Fenced,
            Err(error) => return End::HandBack(format!("the journal cannot be opened: {error}")),
        };
        let late = step.deadline.and_then(time).is_some_and(|deadline| deadline <= clock::now());
        let refused = if let Some(reason) = &journal.stopped {
            Some(reason.clone())
        } else if let Some(reason) = running.reason() {
            if last_word(&journal, &reason).await.is_err()
                && matches!(journal.failure(), Some(journal::Error::Conflict))
            {
                return End::Fenced;
            }
            Some(reason)
        } else if late {
            Some("its deadline has passed".to_owned())
        } else {
            journal.deaths.too_many()
        };
        if let Some(reason) = refused {
            let results = left(command, &journal, &reason);
            return End::Outcome(step_result::Outcome::Cancelled(Cancelled {
                reason,
                results,
                ..Cancelled::default()
            }));
        }
        if let Some(error) = &journal.unreadable {
            tracing::error!(
                error = causes(error),
                "a journal cannot be read; its scripts are not continued"
            );
            let results = left(command, &journal, "");
            return End::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted { results }));
        }
        if journal.files_elsewhere {
            tracing::error!(
                "scripts are not continued, because their files are on another storage"
            );
            let results = left(command, &journal, ELSEWHERE);
            return End::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted { results }));
        }
        match workspace.await {
            Ok(toolbox) => {
                let secrets = Secrets::open(
                    &command.secrets,
                    self.secrets_keys.as_ref(),
                    &journal.opened.seed,
                );
                let toolbox = toolbox.with_secrets(secrets).with_models(self.models(command));
                let toolbox = toolbox.with_subtasks(Subtasks::new(self.bus.clone(), step));
                let toolbox = toolbox.with_attachments(self.attachments(command, step));
                let toolbox = toolbox.with_result_bytes(tier.script.call_bytes);
                let run = Run {
                    command,
                    step,
                    delivery,
                    toolbox: &toolbox,
                    journal: &journal,
                    running: &running,
                };
                self.run_scripts(run, cancel).await
            }
            Err(error) => {
                let results = left(command, &journal, &error.to_string());
                End::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted { results }))
            }
        }
    }

    /// What a command lets its scripts ask.
    fn models(&self, command: &CodeExecute) -> Models {
        match &self.llm {
            Some((url, client)) if !command.model_token.is_empty() => {
                Models::new(client.clone(), url, &command.model_token, &command.script_models)
            }
            _ => Models::default(),
        }
    }

    /// What a command lets its scripts save: files of the task's organization and of no other.
    fn attachments(&self, command: &CodeExecute, step: &StepRef) -> Attachments {
        match step.organization_id.parse() {
            Ok(organization) => Attachments::new(self.files.clone(), organization, &command.files),
            Err(_) => Attachments::default(),
        }
    }

    async fn run_scripts(&self, run: Run<'_>, cancel: CancellationToken) -> End {
        let Run { command, step, delivery, toolbox, journal, running } = run;
        let shared = Shared {
            toolbox,
            table: &self.table,
            journal,
            kept: Kept::new(self.tiers.of(&command.compute).journal_bytes, journal.result_bytes()),
            progress: tokio::sync::Mutex::new(self.bus.progress()),
            step,
            policies: Arc::new(Policies::of(command)),
            decisions: command
                .decisions
                .iter()
                .map(|said| ((said.script, said.number), said))
                .collect(),
            parked: AtomicBool::new(false),
            handed_off: AtomicBool::new(false),
            run: (step.round << 16) | delivery.min(u32::from(u16::MAX)),
            index: AtomicU64::new(0),
            clock: AtomicI64::new(journal.opened.clock_micros),
            cancel,
            broken: OnceLock::new(),
        };
        let (stop, draining, patience) =
            (shared.cancel.clone(), self.draining.clone(), self.patience);
        let hand_back = tokio::spawn(async move {
            draining.cancelled().await;
            tokio::time::sleep(patience).await;
            stop.cancel();
        });
        let mut results = Vec::with_capacity(command.calls.len());
        let (mut asked, mut awaits) = (Vec::new(), Vec::new());
        let mut out_of_time = false;
        for (number, call) in (0..).zip(&command.calls) {
            if let Some((result, clock)) = journal.ended_script(number, call) {
                shared.clock.fetch_max(clock, Relaxed);
                // What it had set for commands holds for the scripts after it.
                for completed in journal.succeeded(number) {
                    if let Ok(result) = serde_json::from_str(&completed.result) {
                        toolbox.replay(&completed.name, &result);
                    }
                }
                results.push(result);
                continue;
            }
            if let Some(reason) = running.reason() {
                results.push(report::left(&call.id, &reason, &past_calls(journal, number)));
                continue;
            }
            let host = ScriptHost::new(&shared, number, &call.id);
            let limits = &self.tiers.of(&command.compute).script;
            let began = std::time::Instant::now();
            let mut outcome =
                self.engine.run(&call.code, &host, limits, shared.cancel.clone()).await;
            outcome.notes.extend(host.notes());
            metrics::ran(&outcome, began.elapsed());
            // Calls that were given up may be writing. Whatever is said of the script, and whoever
            // goes on, is to find the workspace as it stays.
            if !toolbox.writes_end(&shared.cancel).await {
                tracing::warn!(
                    script = number,
                    "a script has ended, and what it was writing is not waited for any longer"
                );
                outcome.notes.push(STILL_WRITING.to_owned());
            }
            if matches!(outcome.status, Status::Completed { .. } | Status::Threw { .. })
                && let Some(early) = host.ended_early(outcome.host_calls)
            {
                // Where something else broke before, that is told.
                let _ = shared.broken.set(early);
            }
            out_of_time |=
                matches!(outcome.status, Status::LimitExceeded { limit: Limit::Wall, .. });
            if journal.failure().is_some() {
                let _ = shared.broken.set(Broken::Journal);
            }
            match shared.broken.get() {
                Some(Broken::Journal)
                    if matches!(journal.failure(), Some(journal::Error::Lost)) =>
                {
                    tracing::error!(script = number, "a journal is gone while its script runs");
                    results.push(report::unreadable(&call.id, GONE, &host.calls()));
                    let rest = &command.calls[results.len()..];
                    results.extend(rest.iter().map(|call| report::not_run(&call.id, STUCK)));
                    break;
                }
                Some(Broken::Journal) => {
                    hand_back.abort();
                    return cannot_write(command, journal);
                }
                Some(diverged @ Broken::Diverged { .. }) => {
                    tracing::error!(%diverged, script = number, "a script does something else when it is run again");
                    results.push(report::diverged(
                        &call.id,
                        &outcome,
                        &host.calls(),
                        &diverged.to_string(),
                    ));
                    for (number, call) in (0..).zip(&command.calls).skip(results.len()) {
                        results.push(report::left(&call.id, STUCK, &past_calls(journal, number)));
                    }
                    break;
                }
                None if outcome.status == Status::Cancelled
                    && shared.parked.load(Relaxed)
                    && running.reason().is_none() =>
                {
                    if journal.release().await.is_err() {
                        hand_back.abort();
                        return cannot_write(command, journal);
                    }
                    (asked, awaits) = (host.asked(), host.awaited());
                    let words = if asked.is_empty() { AWAITED } else { WAITED };
                    results.push(report::result(&call.id, &outcome, &host.calls(), words));
                    let rest = &command.calls[results.len()..];
                    results.extend(rest.iter().map(|call| report::not_run(&call.id, words)));
                    break;
                }
                None if outcome.status == Status::Cancelled && running.reason().is_none() => {
                    hand_back.abort();
                    if journal.release().await.is_err() {
                        tracing::warn!("it could not be written that the execution is handed back");
                    }
                    return End::HandBack("the service stops".to_owned());
                }
                None => {
                    let stopped = running.reason().unwrap_or_default();
                    let result = report::result(&call.id, &outcome, &host.calls(), &stopped);
                    results.push(result.clone());
                    // What was told to stop is not made to wait for NATS.
                    if running.reason().is_none()
                        && results.len() < command.calls.len()
                        && journal
                            .script_ended(number, &call.code, &result, shared.clock.load(Relaxed))
                            .await
                            .is_err()
                    {
                        hand_back.abort();
                        return cannot_write(command, journal);
                    }
                }
            }
        }
        // Before anything is said it is learned whether it is still this process's to say. Where
        // the scripts had to stop, or where their time is over by the clock of this process alone,
        // another one may have gone on: an entry shows it.
        let progress = shared.progress.into_inner().finish();
        let stopped = running.reason();
        let written = async {
            if let Some(reason) = &stopped {
                last_word(journal, reason).await
            } else if out_of_time {
                journal.release().await
            } else {
                journal.flush().await
            }
        };
        let (written, _) = tokio::join!(written, progress);
        hand_back.abort();
        if written.is_err() {
            match journal.failure() {
                Some(journal::Error::Lost) => {}
                Some(journal::Error::Conflict) => return End::Fenced,
                // What was told to stop is not begun again because that could not be written.
                _ if stopped.is_some() => {}
                _ => return cannot_write(command, journal),
            }
        }
        if !asked.is_empty() || !awaits.is_empty() {
            let (people, subtasks) = (asked.len(), awaits.len());
            tracing::info!(
                people,
                subtasks,
                "the scripts are put away until what they wait for has come"
            );
            return End::Outcome(step_result::Outcome::Parked(Parked {
                calls: asked,
                results,
                awaits,
            }));
        }
        End::Outcome(match stopped {
            Some(reason) => step_result::Outcome::Cancelled(Cancelled {
                reason,
                results,
                ..Cancelled::default()
            }),
            None => step_result::Outcome::CodeCompleted(CodeCompleted { results }),
        })
    }
}

/// Has it written that the scripts were stopped. Whoever stopped them does not wait for a NATS that
/// is slow.
async fn last_word(journal: &Journal, reason: &str) -> Result<(), NotWritten> {
    tokio::time::timeout(LAST_WORD, journal.stop(reason)).await.unwrap_or(Ok(()))
}

/// What becomes of an execution whose journal cannot be written.
fn cannot_write(command: &CodeExecute, journal: &Journal) -> End {
    match journal.failure() {
        Some(journal::Error::Conflict) => End::Fenced,
        Some(journal::Error::Lost) => {
            tracing::error!("a journal is gone while its scripts run");
            let told = |(number, call): (u32, &CodeInterpreterCall)| {
                report::unreadable(&call.id, GONE, &past_calls(journal, number))
            };
            let results = (0..).zip(&command.calls).map(told).collect();
            End::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted { results }))
        }
        Some(error) => End::HandBack(format!("the journal cannot be written: {}", causes(error))),
        None => End::HandBack("the journal cannot be written".to_owned()),
    }
}

fn time(time: prost_types::Timestamp) -> Option<Timestamp> {
    Timestamp::new(time.seconds, time.nanos).ok()
}

/// What is known of each script of a command that is not run.
fn left(command: &CodeExecute, journal: &Journal, reason: &str) -> Vec<CodeInterpreterResult> {
    let told = |(script, call): (u32, &CodeInterpreterCall)| {
        if let Some((result, _)) = journal.ended_script(script, call) {
            return result;
        }
        let calls = past_calls(journal, script);
        match &journal.unreadable {
            // Also of a script without a known call: it may have made the one that is not known.
            Some(error) => report::unreadable(&call.id, &causes(error), &calls),
            None => report::left(&call.id, reason, &calls),
        }
    };
    (0..).zip(&command.calls).map(told).collect()
}

/// An error with everything that led to it.
fn causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn opened(delivery: u32, round: u32, storage: &str) -> JournalOpened {
    let seed = [uuid::Uuid::now_v7(), uuid::Uuid::now_v7()]
        .iter()
        .flat_map(|uuid| *uuid.as_bytes())
        .collect();
    JournalOpened {
        delivery,
        seed,
        clock_micros: clock::now().as_microsecond(),
        round,
        storage: storage.to_owned(),
    }
}

#[cfg(test)]
mod tests;
