//! The actor of one task. It reconciles the task on every message, and on its own timer.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use construct_bus::Receipt;
use construct_domain::{OrganizationId, TaskId};
use construct_proto::mesh::v1::StepResult;
use construct_runtime::{clock, telemetry::Chain};
use opentelemetry::Context;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::{sync::watch, task::AbortHandle};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::{
    assignment::PartitionAssignment,
    failures::ReconcileFailures,
    metrics,
    reconcile::{NextAction, Reconciler, TaskCache},
    slots::Slots,
    supervisor,
};

/// How long an idle actor lives, in case its task continues at once.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before a failed reconcile is retried. It doubles with each consecutive failure.
const INITIAL_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Longest delay after a failure.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Longest delay after a transient failure, such as an unavailable database: messages of people
/// must not wait once it is back.
const MAX_TRANSIENT_RETRY_DELAY: Duration = Duration::from_secs(5);
/// Number of consecutive failures that count as persistent.
///
/// A task whose failures are not transient is then quarantined until the next intent. For other
/// tasks, wakes are ignored until the delay is over: otherwise the sweep, which finds the task due
/// each time, would undo the delay.
pub(crate) const FAILURE_THRESHOLD: u32 = 4;
/// Longest timer of an actor in memory. Later wakes are left to the sweep.
pub(crate) const MAX_TIMER_DELAY: Duration = Duration::from_secs(60);

/// Messages to a task's actor.
#[derive(Debug)]
pub(crate) enum Msg {
    /// The task was woken.
    Reconcile {
        /// The trace of the wake.
        trace: Context,
    },
    /// A worker has reported a result.
    Report {
        /// What it says.
        result: Box<StepResult>,
        /// Acknowledged when the outcome is durable.
        receipt: Box<Receipt>,
    },
    /// The task's timer has expired.
    Timer,
    /// The actor was idle for a while, or another replica owns the task now.
    Expire,
}

/// The arguments of an actor.
#[derive(Debug)]
pub(crate) struct Args {
    pub(crate) task: TaskId,
    pub(crate) organization: OrganizationId,
    pub(crate) reconciler: Arc<Reconciler>,
    /// Limits the reconciles of the process. An actor waits for its turn here.
    pub(crate) slots: Slots,
    /// The partitions of the process. The actor of a task in another partition only finishes what
    /// it has.
    pub(crate) assignment: watch::Receiver<PartitionAssignment>,
    pub(crate) supervisor: ActorRef<supervisor::Msg>,
}

#[derive(Debug)]
pub(crate) struct State {
    args: Args,
    /// Number of messages received from the supervisor, which detects with it whether one is still
    /// on its way.
    taken: u64,
    timer: Option<AbortHandle>,
    /// Consecutive failed reconciles.
    failures: u32,
    /// The failures as reported for diagnosis.
    reconcile_failures: ReconcileFailures,
    /// The intents before the last failed reconcile. It may not have seen later ones.
    intents_before_failure: Option<i64>,
    cache: TaskCache,
}

pub(crate) struct TaskActor;

impl Actor for TaskActor {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, _: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        let reconcile_failures = args.reconciler.failing_tasks.for_task(args.task);
        Ok(State {
            args,
            taken: 0,
            timer: None,
            failures: 0,
            reconcile_failures,
            intents_before_failure: None,
            cache: TaskCache::default(),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<Msg>,
        message: Msg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let (task, organization) = (state.args.task, state.args.organization);
        let woken = matches!(message, Msg::Reconcile { .. });
        state.taken += u64::from(matches!(message, Msg::Reconcile { .. } | Msg::Report { .. }));
        let after = match message {
            Msg::Reconcile { .. } if state.failures >= FAILURE_THRESHOLD => None,
            Msg::Reconcile { trace } => Some(state.reconcile(None, &trace).await),
            Msg::Report { result, receipt } => {
                let trace = receipt.parent().clone();
                Some(state.reconcile(Some((*result, *receipt)), &trace).await)
            }
            Msg::Timer if state.is_assigned() => {
                let trace = state.cache.turn.clone();
                Some(state.reconcile(None, &trace).await)
            }
            Msg::Timer | Msg::Expire => {
                let idle =
                    supervisor::Msg::Idle { task, taken: state.taken, actor: myself.get_id() };
                state.args.supervisor.cast(idle)?;
                None
            }
        };
        if woken {
            state.args.supervisor.cast(supervisor::Msg::Reconciled { task, organization })?;
        }
        let Some(after) = after else { return Ok(()) };
        let (delay, next): (Duration, fn() -> Msg) = match &after {
            // The owner of its partition reconciles it now.
            _ if !state.is_assigned() => (Duration::ZERO, || Msg::Expire),
            Outcome::Idle => (IDLE_TIMEOUT, || Msg::Expire),
            Outcome::Timer(delay) if *delay > MAX_TIMER_DELAY => (IDLE_TIMEOUT, || Msg::Expire),
            Outcome::Timer(delay) => (*delay, || Msg::Timer),
            Outcome::Failed { transient, .. } => {
                (retry_delay(state.failures, *transient), || Msg::Timer)
            }
        };
        state.failures = match after {
            Outcome::Failed { reason, .. } => {
                let (failures, now) = (state.failures.saturating_add(1), clock::now());
                state.reconcile_failures.record(failures, reason, now, now + delay);
                failures
            }
            Outcome::Idle | Outcome::Timer(_) => {
                state.reconcile_failures.clear();
                0
            }
        };
        state.timer = Some(myself.send_after(delay, next).abort_handle());
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<Msg>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        if let Some(timer) = state.timer.take() {
            timer.abort();
        }
        Ok(())
    }
}

enum Outcome {
    Idle,
    Timer(Duration),
    Failed {
        /// Whether the failure passes by itself.
        transient: bool,
        /// The error, with its causes.
        reason: String,
    },
}

/// The delay after a failure that followed `before` others.
fn retry_delay(before: u32, transient: bool) -> Duration {
    let longest = if transient { MAX_TRANSIENT_RETRY_DELAY } else { MAX_RETRY_DELAY };
    INITIAL_RETRY_DELAY.saturating_mul(2_u32.saturating_pow(before.min(16))).min(longest)
}

impl State {
    /// Whether the process owns the task's partition.
    fn is_assigned(&self) -> bool {
        self.args.assignment.borrow().contains_task(self.args.task)
    }

    /// Reconciles the task, and acknowledges the result. An error does not end the actor: the
    /// message is redelivered, or the timer expires.
    async fn reconcile(
        &mut self,
        report: Option<(StepResult, Receipt)>,
        trace: &Context,
    ) -> Outcome {
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        let args = &self.args;
        let span = tracing::info_span!("reconciler.task.look", task = %args.task);
        match &report {
            Some((_, receipt)) => receipt.continue_trace(&span),
            // Fails when the span is disabled; then there is nothing to continue.
            None => _ = span.set_parent(trace.clone()),
        }
        let (result, receipt) = report.unzip();
        let receipt = match receipt {
            // An actor that crashes on this message each time never counts failures.
            Some(receipt) if receipt.deliveries() > FAILURE_THRESHOLD => {
                match args.quarantine_reason().await {
                    Some(reason) => {
                        args.dead_letter(receipt, &reason).await;
                        return Outcome::Idle;
                    }
                    None => Some(receipt),
                }
            }
            receipt => receipt,
        };
        let _slot = match args.slots.try_acquire() {
            Some(slot) => slot,
            None => {
                // While it waits for a slot, its message must not be redelivered.
                let _waiting = receipt.as_ref().map(Receipt::keep_alive);
                args.slots.acquire(args.organization).await
            }
        };
        let reconcile = tracing::Instrument::instrument(
            Box::pin(args.reconciler.reconcile(args.task, result, &mut self.cache)),
            span,
        );
        let began = Instant::now();
        let reconciled = reconcile.await;
        metrics::record_reconcile(began.elapsed(), reconciled.as_ref().err());
        match reconciled {
            Ok(next) => {
                if let Some(receipt) = receipt {
                    receipt.ack().await;
                }
                match next {
                    NextAction::Idle | NextAction::Deleted => Outcome::Idle,
                    NextAction::RequeueAt(time) => {
                        let delay = time.duration_since(clock::now());
                        Outcome::Timer(Duration::try_from(delay).unwrap_or_default())
                    }
                }
            }
            Err(error) => {
                // Repeated conflicts pass as well.
                let transient =
                    error.is_retryable() || matches!(error, construct_store::Error::Conflict);
                let reason = Chain(&error).to_string();
                if !transient && self.quarantine_if_failing(&reason).await {
                    if let Some(receipt) = receipt {
                        self.args.dead_letter(receipt, &reason).await;
                    }
                    return Outcome::Idle;
                }
                let task = self.args.task;
                if transient {
                    tracing::warn!(%task, error = &reason, "the task could not be reconciled; retrying");
                } else {
                    tracing::error!(%task, error = &reason, "the task could not be reconciled; retrying");
                }
                if let Some(receipt) = receipt {
                    receipt.nak(retry_delay(self.failures, transient)).await;
                }
                Outcome::Failed { transient, reason }
            }
        }
    }

    /// Quarantines the task after enough persistent failures. Returns whether it is quarantined,
    /// also if it was before. A quarantined task is not retried for every message, only for a new
    /// intent.
    async fn quarantine_if_failing(&mut self, reason: &str) -> bool {
        let args = &self.args;
        if args.quarantine_reason().await.is_some() {
            tracing::warn!(task = %args.task, error = reason, "the quarantined task still cannot be reconciled");
            return true;
        }
        let before = std::mem::replace(
            &mut self.intents_before_failure,
            args.reconciler.intents(args.task).await,
        );
        match before {
            Some(intents) if self.failures + 1 >= FAILURE_THRESHOLD => {
                args.reconciler.quarantine(args.task, intents, reason).await
            }
            Some(_) | None => false,
        }
    }
}

impl Args {
    /// The reason of the task's quarantine, if it is quarantined.
    async fn quarantine_reason(&self) -> Option<String> {
        self.reconciler.quarantine_reason(self.organization, self.task).await
    }

    /// Dead-letters a result for a quarantined task: redelivery would only fail again. If its step
    /// is still wanted when the task resumes, the step's command is sent again, unless the result
    /// was redriven before.
    async fn dead_letter(&self, receipt: Receipt, reason: &str) {
        self.reconciler
            .bus
            .dead_letter(receipt, &format!("its task is quarantined: {reason}"))
            .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_delays_double_to_maximum_by_failure_kind() {
        let delays = |transient| {
            [0, 1, 2, 5, 6, 7, u32::MAX].map(|before| retry_delay(before, transient).as_secs())
        };
        assert_eq!(delays(false), [1, 2, 4, 32, 60, 60, 60]);
        assert_eq!(delays(true), [1, 2, 4, 5, 5, 5, 5]);
    }
}
