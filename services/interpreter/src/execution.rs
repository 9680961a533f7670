//! One command: the scripts of one assistant message, run in order, journaled, and reported.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicI64, AtomicU64},
    },
    time::Duration,
};

use construct_bus::{Bus, Delivery, subject};
use construct_domain::StepId;
use construct_proto::mesh::v1::{
    Cancelled, CodeCompleted, CodeExecute, Failure, FailureClass, JournalOpened, StepResult, step_result,
};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::{
    host::{Broken, ScriptHost, Shared},
    journal::Journal,
    report,
    running::Running,
    sandbox::{Engine, Limits, Status, ToolTable},
    tools::Toolbox,
    workspaces::Workspaces,
};

/// A command that was delivered more often than this took its process down each time, and would again.
const MAX_DELIVERIES: u32 = 5;

/// What executions work with.
#[derive(Debug)]
pub(crate) struct Executor {
    pub(crate) bus: Bus,
    pub(crate) engine: Engine,
    pub(crate) table: ToolTable,
    pub(crate) workspaces: Workspaces,
    pub(crate) limits: Limits,
    pub(crate) running: Running,
    /// Cancelled when the service is to stop.
    pub(crate) draining: CancellationToken,
    /// What still runs so long after that is handed back: another process continues it from the journal.
    pub(crate) patience: Duration,
}

/// What became of a command.
enum End {
    /// To be reported.
    Outcome(step_result::Outcome),
    /// Somebody else is at it, or the mesh is away: nothing is said, and the command is delivered again.
    HandBack(String),
}

impl Executor {
    /// Carries a command out, reports, and only then acknowledges.
    #[tracing::instrument(name = "interpreter.step.execute", skip_all, fields(task = %delivery.task, delivery = delivery.delivery))]
    pub(crate) async fn execute(&self, delivery: Delivery<CodeExecute>) {
        let Delivery { message: command, task, delivery, receipt, .. } = delivery;
        receipt.continue_trace(&tracing::Span::current());
        let keep_alive = receipt.keep_alive();
        let end = self.run(&command, delivery).await;
        let outcome = match end {
            End::Outcome(outcome) => outcome,
            End::HandBack(reason) => {
                tracing::warn!(reason, "the execution is handed back");
                drop(keep_alive);
                return receipt.nak(Duration::from_secs(1)).await;
            }
        };
        let result = StepResult { step: command.step, delivery, outcome: Some(outcome), ..StepResult::default() };
        match self.bus.publish(&subject::TaskResult::new(task), &result).await {
            Ok(_) => receipt.ack().await,
            Err(error) => {
                // The journal answers every call when the command comes again.
                tracing::warn!(%error, "the result could not be published; the command comes again");
                receipt.nak(Duration::from_secs(1)).await;
            }
        }
    }

    async fn run(&self, command: &CodeExecute, delivery: u32) -> End {
        let failed = |class: FailureClass, message: String| {
            End::Outcome(step_result::Outcome::Failed(Failure { class: class.into(), message, ..Failure::default() }))
        };
        let Some((step, id)) =
            command.step.as_ref().and_then(|step| Some((step, step.step_id.parse::<StepId>().ok()?)))
        else {
            return failed(FailureClass::Internal, "the command names no step".to_owned());
        };
        if delivery > MAX_DELIVERIES {
            let message = format!("the script ended the interpreter's process {MAX_DELIVERIES} times and is given up");
            return failed(FailureClass::Internal, message);
        }
        let running = self.running.enter(id);
        if let Some(reason) = running.reason() {
            let results = command.calls.iter().map(|call| report::not_run(&call.id, &reason)).collect();
            return End::Outcome(step_result::Outcome::Cancelled(Cancelled { reason, results }));
        }
        let toolbox = match self.workspaces.open(&command.workspace, &step.task_id).await {
            Ok(toolbox) => toolbox,
            Err(error) => {
                let results = command.calls.iter().map(|call| report::not_run(&call.id, &error.to_string())).collect();
                return End::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted { results }));
            }
        };
        let journal = match Journal::open(&self.bus, id, opened(delivery)).await {
            Ok(journal) => journal,
            Err(error) => return End::HandBack(format!("the journal cannot be opened: {error}")),
        };
        self.run_scripts(command, step, delivery, &toolbox, &journal, &running).await
    }

    async fn run_scripts(
        &self,
        command: &CodeExecute,
        step: &construct_proto::mesh::v1::StepRef,
        delivery: u32,
        toolbox: &Toolbox,
        journal: &Journal,
        running: &crate::running::Entry<'_>,
    ) -> End {
        let shared = Shared {
            toolbox,
            table: &self.table,
            journal,
            progress: tokio::sync::Mutex::new(self.bus.progress()),
            step,
            delivery,
            index: AtomicU64::new(0),
            clock: AtomicI64::new(journal.opened.clock_micros),
            cancel: running.token().child_token(),
            broken: OnceLock::new(),
        };
        let (stop, draining, patience) = (shared.cancel.clone(), self.draining.clone(), self.patience);
        let hand_back = tokio::spawn(async move {
            draining.cancelled().await;
            tokio::time::sleep(patience).await;
            stop.cancel();
        });
        let mut results = Vec::with_capacity(command.calls.len());
        for (number, call) in (0..).zip(&command.calls) {
            if let Some(reason) = running.reason() {
                results.push(report::not_run(&call.id, &reason));
                continue;
            }
            let host = ScriptHost::new(&shared, number);
            let outcome = self.engine.run(&call.code, &host, &self.limits, shared.cancel.clone()).await;
            match shared.broken.get() {
                Some(Broken::Journal(error)) => {
                    hand_back.abort();
                    return End::HandBack(format!("the journal cannot be written: {error}"));
                }
                Some(diverged @ Broken::Diverged { .. }) => {
                    let stopped = format!("the script was interrupted and could not be continued: {diverged}");
                    results.push(report::result(&call.id, &outcome, &host.calls(), &stopped));
                    break;
                }
                None if outcome.status == Status::Cancelled && running.reason().is_none() => {
                    hand_back.abort();
                    return End::HandBack("the service stops".to_owned());
                }
                None => {
                    let stopped = running.reason().unwrap_or_default();
                    results.push(report::result(&call.id, &outcome, &host.calls(), &stopped));
                }
            }
        }
        hand_back.abort();
        shared.progress.into_inner().finish().await;
        End::Outcome(match running.reason() {
            Some(reason) => step_result::Outcome::Cancelled(Cancelled { reason, results }),
            None => step_result::Outcome::CodeCompleted(CodeCompleted { results }),
        })
    }
}

fn opened(delivery: u32) -> JournalOpened {
    let seed = [uuid::Uuid::now_v7(), uuid::Uuid::now_v7()].iter().flat_map(|uuid| *uuid.as_bytes()).collect();
    JournalOpened { delivery, seed, clock_micros: Timestamp::now().as_microsecond() }
}
