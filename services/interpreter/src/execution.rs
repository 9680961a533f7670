//! Executes one command: runs the scripts of one assistant message in order, journals their calls,
//! and publishes the result.

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
    Cancelled, CodeCompleted, CodeExecute, Failure, FailureClass, JournalOpened, StepRef,
    StepResult, Suspended, step_result,
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
    host::{FatalError, ResultQuota, ScriptHost, Shared, recorded_calls},
    journal::{Journal, NotWritten, Takeover, TakeoverRequest},
    metrics,
    policy::Policies,
    report,
    running::Running,
    sandbox::{Engine, Limit, Status, ToolTable},
    tiers::Tiers,
    tools::{Attachments, Models, Secrets, Subtasks, Toolbox},
    workspaces::Workspaces,
};

/// Why the scripts after one that cannot continue are not run.
const PREVIOUS_NOT_CONTINUED: &str = "a script before it could not be continued";

/// Reports of a script that waits for people or subtasks, in case it is never resumed.
const CANCELED_AWAITING_APPROVAL: &str = "canceled while waiting for an approval";
const CANCELED_AWAITING_SUBTASKS: &str = "canceled while waiting for subtasks";

/// Why scripts that may have run are not continued.
const JOURNAL_LOST: &str = "NATS has lost the record of its calls";

/// Why scripts that used files of another storage are not continued.
const FILES_ELSEWHERE: &str = "they were interrupted and cannot be continued, because their files are on another storage than that of the \
                               machine that took over; check which files exist before you repeat anything";

/// A note for a script whose last writes take too long.
const STILL_WRITING: &str = "a call that had not ended when the script ended was still writing to the workspace; check what it wrote before you use it";

/// How long canceled scripts wait for their last journal entry.
const STOP_ENTRY_TIMEOUT: Duration = Duration::from_millis(100);

/// Delay before a result is published again.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// The shared resources of all executions.
#[derive(Debug)]
pub(crate) struct Executor {
    pub(crate) bus: Bus,
    pub(crate) engine: Arc<Engine>,
    pub(crate) table: ToolTable,
    pub(crate) workspaces: Workspaces,
    pub(crate) tiers: Tiers,
    /// Keys that open the secrets in commands.
    pub(crate) secrets_keys: Option<MasterKeys>,
    /// URL and client of the model proxy, if there is one.
    pub(crate) llm: Option<(String, reqwest::Client)>,
    /// Files that users uploaded.
    pub(crate) files: files::Store,
    pub(crate) running: Running,
    /// Canceled when the service drains.
    pub(crate) draining: CancellationToken,
    /// Executions that still run this long after draining began are handed back; another process
    /// continues them from the journal.
    pub(crate) drain_timeout: Duration,
}

/// How an execution ended.
enum ExecutionEnd {
    /// Publish this outcome.
    Outcome(step_result::Outcome),
    /// The mesh is unavailable or the service stops. Publish nothing, so that the command is
    /// delivered again.
    HandBack(String),
    /// Another process runs the execution. Publish and settle nothing: that would be in the other
    /// process's name.
    Fenced,
    /// The execution is already over.
    Obsolete,
}

/// The scripts of one command, after takeover.
struct Run<'a> {
    command: &'a CodeExecute,
    step: &'a StepRef,
    delivery: u32,
    toolbox: &'a Toolbox,
    journal: &'a Journal,
    running: &'a crate::running::RunningStep<'a>,
}

impl Executor {
    /// Executes a command, publishes its result, and only then acknowledges.
    pub(crate) async fn execute(&self, delivery: Delivery<CodeExecute>) {
        let span = tracing::info_span!(
            "interpreter.step.execute",
            otel.kind = "consumer",
            construct.task = %delivery.task,
            construct.step = delivery.message.step.as_ref().map(|step| step.step_id.as_str()),
            construct.delivery = delivery.delivery,
        );
        delivery.receipt.continue_trace(&span);
        self.execute_in_span(delivery).instrument(span).await;
    }

    async fn execute_in_span(&self, delivery: Delivery<CodeExecute>) {
        let Delivery { message: command, task, delivery, receipt, .. } = delivery;
        let keep_alive = receipt.keep_alive();
        let end = self.run(&command, delivery).await;
        let outcome = match end {
            ExecutionEnd::Outcome(outcome) => outcome,
            ExecutionEnd::HandBack(reason) => {
                tracing::warn!(reason, "handing the execution back");
                drop(keep_alive);
                return receipt.nak(Duration::from_secs(1)).await;
            }
            ExecutionEnd::Fenced => {
                tracing::warn!("another process has taken over the execution");
                return;
            }
            ExecutionEnd::Obsolete => {
                tracing::info!("nothing waits for these scripts any more; dropping their command");
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
            // The journal answers every call when the command is delivered again.
            drop(keep_alive);
            receipt.nak(Duration::from_secs(1)).await;
        }
    }

    /// Publishes the result. Retries without limit, because no other process has it. Returns false
    /// if the service stops first.
    async fn publish(&self, task: TaskId, mut result: StepResult) -> bool {
        let address = subject::TaskResult::new(task);
        loop {
            let error = match self.bus.publish(&address, &result).await {
                Ok(_) => return true,
                Err(error) => error,
            };
            if error.is_retryable() {
                tracing::warn!(%error, "publishing the result failed; retrying");
                tokio::select! {
                    () = self.drain_timed_out() => return false,
                    () = tokio::time::sleep(RETRY_DELAY) => {}
                }
            } else if matches!(result.outcome, Some(step_result::Outcome::Failed(_))) {
                // Even the failure cannot be published. The step's deadline will end it.
                tracing::error!(%error, "publishing the result failed");
                return true;
            } else {
                let message = format!("the result of the scripts cannot be published: {error}");
                let failure =
                    Failure { class: FailureClass::Internal.into(), message, ..Failure::default() };
                result.outcome = Some(step_result::Outcome::Failed(failure));
            }
        }
    }

    /// Waits until the service drains and the drain timeout is over.
    async fn drain_timed_out(&self) {
        self.draining.cancelled().await;
        tokio::time::sleep(self.drain_timeout).await;
    }

    async fn run(&self, command: &CodeExecute, delivery: u32) -> ExecutionEnd {
        let failed = |class: FailureClass, message: String| {
            ExecutionEnd::Outcome(step_result::Outcome::Failed(Failure {
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
            return failed(FailureClass::Internal, "the command has no valid step id".to_owned());
        };
        let running = self.running.register(id);
        let cancel = running.token().child_token();
        // First: every outcome below must include what an earlier process has done.
        let opening =
            new_opening(delivery, step.round, self.workspaces.storage(&command.workspace));
        let request = TakeoverRequest {
            opening,
            may_have_run: command.may_have_been_sent || delivery > 1,
            stop: cancel.clone(),
        };
        let tier = self.tiers.for_pool(&command.compute);
        // The workspace opens concurrently. Opening it changes nothing inside, whichever process
        // gets the execution. Only running the scripts waits for it.
        let workspace =
            pin!(self.workspaces.open(&command.workspace, &step.task_id, &tier.commands));
        let (journal, workspace) =
            match select(pin!(Journal::open(&self.bus, id, request)), workspace).await {
                Either::Left((journal, workspace)) => (journal, workspace.left_future()),
                Either::Right((workspace, journal)) => {
                    (journal.await, ready(workspace).right_future())
                }
            };
        let journal = match journal {
            Ok(Takeover::Acquired(journal)) => journal,
            Ok(Takeover::Closed | Takeover::Superseded) => return ExecutionEnd::Obsolete,
            Ok(Takeover::Lost) => {
                tracing::error!("a journal is lost; its scripts are not run again");
                let results = command
                    .calls
                    .iter()
                    .map(|call| report::unreadable(&call.id, JOURNAL_LOST, &[]))
                    .collect();
                return ExecutionEnd::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted {
                    results,
                }));
            }
            Err(journal::Error::Conflict) => return ExecutionEnd::Fenced,
            Err(error) => {
                return ExecutionEnd::HandBack(format!("opening the journal failed: {error}"));
            }
        };
        let is_late =
            step.deadline.and_then(timestamp).is_some_and(|deadline| deadline <= clock::now());
        let refusal = if let Some(reason) = &journal.stopped {
            Some(reason.clone())
        } else if let Some(reason) = running.reason() {
            if record_stop(&journal, &reason).await.is_err()
                && matches!(journal.failure(), Some(journal::Error::Conflict))
            {
                return ExecutionEnd::Fenced;
            }
            Some(reason)
        } else if is_late {
            Some("its deadline has passed".to_owned())
        } else {
            journal.crashes.give_up_reason()
        };
        if let Some(reason) = refusal {
            let results = results_without_running(command, &journal, &reason);
            return ExecutionEnd::Outcome(step_result::Outcome::Cancelled(Cancelled {
                reason,
                results,
                ..Cancelled::default()
            }));
        }
        if let Some(error) = &journal.unreadable {
            tracing::error!(
                error = error_chain(error),
                "a journal is unreadable; its scripts are not continued"
            );
            let results = results_without_running(command, &journal, "");
            return ExecutionEnd::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted {
                results,
            }));
        }
        if journal.files_elsewhere {
            tracing::error!(
                "scripts are not continued, because their files are on another storage"
            );
            let results = results_without_running(command, &journal, FILES_ELSEWHERE);
            return ExecutionEnd::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted {
                results,
            }));
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
                let results = results_without_running(command, &journal, &error.to_string());
                ExecutionEnd::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted {
                    results,
                }))
            }
        }
    }

    /// The models that the scripts of a command may call.
    fn models(&self, command: &CodeExecute) -> Models {
        match &self.llm {
            Some((url, client)) if !command.model_token.is_empty() => {
                Models::new(client.clone(), url, &command.model_token, &command.script_models)
            }
            _ => Models::default(),
        }
    }

    /// The uploaded files that the scripts of a command may save: those of the task's organization
    /// only.
    fn attachments(&self, command: &CodeExecute, step: &StepRef) -> Attachments {
        match step.organization_id.parse() {
            Ok(organization) => Attachments::new(self.files.clone(), organization, &command.files),
            Err(_) => Attachments::default(),
        }
    }

    async fn run_scripts(&self, run: Run<'_>, cancel: CancellationToken) -> ExecutionEnd {
        let Run { command, step, delivery, toolbox, journal, running } = run;
        let shared = Shared {
            toolbox,
            table: &self.table,
            journal,
            quota: ResultQuota::new(
                self.tiers.for_pool(&command.compute).journal_bytes,
                journal.result_bytes(),
            ),
            progress: tokio::sync::Mutex::new(self.bus.progress()),
            step,
            policies: Arc::new(Policies::from_command(command)),
            decisions: command
                .decisions
                .iter()
                .map(|decision| ((decision.script, decision.number), decision))
                .collect(),
            suspended: AtomicBool::new(false),
            handed_off: AtomicBool::new(false),
            run: (step.round << 16) | delivery.min(u32::from(u16::MAX)),
            index: AtomicU64::new(0),
            clock: AtomicI64::new(journal.opened.clock_micros),
            cancel,
            fatal_error: OnceLock::new(),
        };
        let (stop, draining, drain_timeout) =
            (shared.cancel.clone(), self.draining.clone(), self.drain_timeout);
        let hand_back = tokio::spawn(async move {
            draining.cancelled().await;
            tokio::time::sleep(drain_timeout).await;
            stop.cancel();
        });
        let mut results = Vec::with_capacity(command.calls.len());
        let (mut approvals, mut awaits) = (Vec::new(), Vec::new());
        let mut out_of_time = false;
        for (number, call) in (0..).zip(&command.calls) {
            if let Some((result, clock)) = journal.ended_script(number, call) {
                shared.clock.fetch_max(clock, Relaxed);
                // Environment it set for commands also applies to later scripts.
                for completed in journal.succeeded(number) {
                    if let Ok(result) = serde_json::from_str(&completed.result) {
                        toolbox.replay(&completed.name, &result);
                    }
                }
                results.push(result);
                continue;
            }
            if let Some(reason) = running.reason() {
                results.push(report::not_continued(
                    &call.id,
                    &reason,
                    &recorded_calls(journal, number),
                ));
                continue;
            }
            let host = ScriptHost::new(&shared, number, &call.id);
            let limits = &self.tiers.for_pool(&command.compute).script;
            let began = std::time::Instant::now();
            let mut outcome =
                self.engine.run(&call.code, &host, limits, shared.cancel.clone()).await;
            outcome.notes.extend(host.notes());
            metrics::record_run(&outcome, began.elapsed());
            // Abandoned calls may still be writing. The report and the next process must find the
            // workspace as it stays.
            if !toolbox.wait_for_writes(&shared.cancel).await {
                tracing::warn!(
                    script = number,
                    "a script has ended while its calls were still writing; not waiting any longer"
                );
                outcome.notes.push(STILL_WRITING.to_owned());
            }
            if matches!(outcome.status, Status::Completed { .. } | Status::Threw { .. })
                && let Some(early) = host.ended_early(outcome.host_calls)
            {
                // An earlier failure takes precedence.
                let _ = shared.fatal_error.set(early);
            }
            out_of_time |=
                matches!(outcome.status, Status::LimitExceeded { limit: Limit::Wall, .. });
            if journal.failure().is_some() {
                let _ = shared.fatal_error.set(FatalError::Journal);
            }
            match shared.fatal_error.get() {
                Some(FatalError::Journal)
                    if matches!(journal.failure(), Some(journal::Error::Lost)) =>
                {
                    tracing::error!(
                        script = number,
                        "a journal was lost while its script was running"
                    );
                    results.push(report::unreadable(&call.id, JOURNAL_LOST, &host.calls()));
                    let rest = &command.calls[results.len()..];
                    results.extend(
                        rest.iter().map(|call| report::not_run(&call.id, PREVIOUS_NOT_CONTINUED)),
                    );
                    break;
                }
                Some(FatalError::Journal) => {
                    hand_back.abort();
                    return end_without_journal(command, journal);
                }
                Some(diverged @ FatalError::Diverged { .. }) => {
                    tracing::error!(%diverged, script = number, "a script diverged on replay");
                    results.push(report::diverged(
                        &call.id,
                        &outcome,
                        &host.calls(),
                        &diverged.to_string(),
                    ));
                    for (number, call) in (0..).zip(&command.calls).skip(results.len()) {
                        results.push(report::not_continued(
                            &call.id,
                            PREVIOUS_NOT_CONTINUED,
                            &recorded_calls(journal, number),
                        ));
                    }
                    break;
                }
                None if outcome.status == Status::Cancelled
                    && shared.suspended.load(Relaxed)
                    && running.reason().is_none() =>
                {
                    if journal.release().await.is_err() {
                        hand_back.abort();
                        return end_without_journal(command, journal);
                    }
                    (approvals, awaits) = (host.pending_approvals(), host.pending_waits());
                    let reason = if approvals.is_empty() {
                        CANCELED_AWAITING_SUBTASKS
                    } else {
                        CANCELED_AWAITING_APPROVAL
                    };
                    results.push(report::result(&call.id, &outcome, &host.calls(), reason));
                    let rest = &command.calls[results.len()..];
                    results.extend(rest.iter().map(|call| report::not_run(&call.id, reason)));
                    break;
                }
                None if outcome.status == Status::Cancelled && running.reason().is_none() => {
                    hand_back.abort();
                    if journal.release().await.is_err() {
                        tracing::warn!("the release of the execution could not be journaled");
                    }
                    return ExecutionEnd::HandBack("the service stops".to_owned());
                }
                None => {
                    let stopped = running.reason().unwrap_or_default();
                    let result = report::result(&call.id, &outcome, &host.calls(), &stopped);
                    results.push(result.clone());
                    // A canceled execution does not wait for NATS.
                    if running.reason().is_none()
                        && results.len() < command.calls.len()
                        && journal
                            .record_script_end(
                                number,
                                &call.code,
                                &result,
                                shared.clock.load(Relaxed),
                            )
                            .await
                            .is_err()
                    {
                        hand_back.abort();
                        return end_without_journal(command, journal);
                    }
                }
            }
        }
        // Checks that this process still has the execution before it publishes a result. If the
        // scripts were canceled, or their time is over by this process's clock alone, another
        // process may have continued: a journal entry shows it.
        let progress = shared.progress.into_inner().finish();
        let stopped = running.reason();
        let written = async {
            if let Some(reason) = &stopped {
                record_stop(journal, reason).await
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
                Some(journal::Error::Conflict) => return ExecutionEnd::Fenced,
                // A canceled execution does not start again because its stop could not be written.
                _ if stopped.is_some() => {}
                _ => return end_without_journal(command, journal),
            }
        }
        if !approvals.is_empty() || !awaits.is_empty() {
            let (people, subtasks) = (approvals.len(), awaits.len());
            tracing::info!(
                people,
                subtasks,
                "the scripts are suspended until their approvals and subtasks are done"
            );
            return ExecutionEnd::Outcome(step_result::Outcome::Suspended(Suspended {
                approval_requests: approvals,
                results,
                awaits,
            }));
        }
        ExecutionEnd::Outcome(match stopped {
            Some(reason) => step_result::Outcome::Cancelled(Cancelled {
                reason,
                results,
                ..Cancelled::default()
            }),
            None => step_result::Outcome::CodeCompleted(CodeCompleted { results }),
        })
    }
}

/// Records that the scripts were canceled. Does not wait long for a slow NATS.
async fn record_stop(journal: &Journal, reason: &str) -> Result<(), NotWritten> {
    tokio::time::timeout(STOP_ENTRY_TIMEOUT, journal.stop(reason)).await.unwrap_or(Ok(()))
}

/// The end of an execution whose journal cannot be written.
fn end_without_journal(command: &CodeExecute, journal: &Journal) -> ExecutionEnd {
    match journal.failure() {
        Some(journal::Error::Conflict) => ExecutionEnd::Fenced,
        Some(journal::Error::Lost) => {
            tracing::error!("a journal was lost while its scripts were running");
            let report = |(number, call): (u32, &CodeInterpreterCall)| {
                report::unreadable(&call.id, JOURNAL_LOST, &recorded_calls(journal, number))
            };
            let results = (0..).zip(&command.calls).map(report).collect();
            ExecutionEnd::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted { results }))
        }
        Some(error) => {
            ExecutionEnd::HandBack(format!("writing the journal failed: {}", error_chain(error)))
        }
        None => ExecutionEnd::HandBack("writing the journal failed".to_owned()),
    }
}

fn timestamp(time: prost_types::Timestamp) -> Option<Timestamp> {
    Timestamp::new(time.seconds, time.nanos).ok()
}

/// The result of each script of a command that is not run.
fn results_without_running(
    command: &CodeExecute,
    journal: &Journal,
    reason: &str,
) -> Vec<CodeInterpreterResult> {
    let report = |(script, call): (u32, &CodeInterpreterCall)| {
        if let Some((result, _)) = journal.ended_script(script, call) {
            return result;
        }
        let calls = recorded_calls(journal, script);
        match &journal.unreadable {
            // Also for a script without a known call: it may have made the unreadable one.
            Some(error) => report::unreadable(&call.id, &error_chain(error), &calls),
            None => report::not_continued(&call.id, reason, &calls),
        }
    };
    (0..).zip(&command.calls).map(report).collect()
}

/// An error message with all its causes.
fn error_chain(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn new_opening(delivery: u32, round: u32, storage: &str) -> JournalOpened {
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
