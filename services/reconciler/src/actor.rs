//! The actor of one task: looks at it one time after another, and wakes itself when the task says
//! so.

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

/// How long an actor with nothing to do stays, in case its task goes on at once.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// How soon an activation that failed is tried again; doubles with each failure in a row.
const INITIAL_RETRY_DELAY: Duration = Duration::from_secs(1);
/// The longest pause after a failure.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// The longest one after a failure that passes by itself, such as a database that is away: people's
/// messages must not wait once it is back.
const MAX_TRANSIENT_RETRY_DELAY: Duration = Duration::from_secs(5);
/// So many failures in a row are taken for lasting. A task whose failures don't pass by themselves
/// is put aside then, until somebody asks for something; with the others, wakes are not looked into
/// until the pause is over. Otherwise the sweep, which finds the task due each time, would undo the
/// pause.
pub(crate) const FAILURE_THRESHOLD: u32 = 4;
/// An actor does not wait in memory longer than this: the sweep wakes the task.
pub(crate) const MAX_TIMER_DELAY: Duration = Duration::from_secs(60);

/// Why to look.
#[derive(Debug)]
pub(crate) enum Msg {
    /// Somebody woke the task.
    Reconcile {
        /// Whose doing it is.
        trace: Context,
    },
    /// A worker has reported.
    Report {
        /// What it says.
        result: Box<StepResult>,
        /// Acknowledged when the outcome is durable.
        receipt: Box<Receipt>,
    },
    /// The task wanted to be looked at now.
    Timer,
    /// Nothing came for a while, or the task is another replica's now.
    Expire,
}

/// What an actor is started with.
#[derive(Debug)]
pub(crate) struct Args {
    pub(crate) task: TaskId,
    pub(crate) organization: OrganizationId,
    pub(crate) activator: Arc<Reconciler>,
    /// Bounds the activations of the process; an actor waits its turn here.
    pub(crate) slots: Slots,
    /// The partitions of the process. The actor of a task in another one does what it was handed,
    /// and no more.
    pub(crate) assignment: watch::Receiver<PartitionAssignment>,
    pub(crate) supervisor: ActorRef<supervisor::Msg>,
}

#[derive(Debug)]
pub(crate) struct State {
    args: Args,
    /// Messages taken from the supervisor, so that it can tell whether one is still on its way.
    taken: u64,
    timer: Option<AbortHandle>,
    /// Activations in a row that failed.
    failures: u32,
    /// What people are told of them.
    reconcile_failures: ReconcileFailures,
    /// What was asked for before the look that failed last: what came later it may not have seen.
    intents_before_failure: Option<i64>,
    cache: TaskCache,
}

pub(crate) struct TaskActor;

impl Actor for TaskActor {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, _: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        let looks = args.activator.failing_tasks.for_task(args.task);
        Ok(State {
            args,
            taken: 0,
            timer: None,
            failures: 0,
            reconcile_failures: looks,
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
            // Whoever has its partition now looks after it.
            _ if !state.is_assigned() => (Duration::ZERO, || Msg::Expire),
            Outcome::Idle => (IDLE_TIMEOUT, || Msg::Expire),
            Outcome::Timer(delay) if *delay > MAX_TIMER_DELAY => (IDLE_TIMEOUT, || Msg::Expire),
            Outcome::Timer(delay) => (*delay, || Msg::Timer),
            Outcome::Failed { transient: passing, .. } => {
                (retry_delay(state.failures, *passing), || Msg::Timer)
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
        /// Whether it passes without anybody's doing.
        transient: bool,
        /// The error, with its causes.
        reason: String,
    },
}

/// The pause after a failure that followed on `before` others.
fn retry_delay(before: u32, passing: bool) -> Duration {
    let longest = if passing { MAX_TRANSIENT_RETRY_DELAY } else { MAX_RETRY_DELAY };
    INITIAL_RETRY_DELAY.saturating_mul(2_u32.saturating_pow(before.min(16))).min(longest)
}

impl State {
    /// Whether the task's partition is the process's own.
    fn is_assigned(&self) -> bool {
        self.args.assignment.borrow().contains_task(self.args.task)
    }

    /// One activation, and the acknowledgement of what was reported. An error is not the actor's
    /// end: the message comes again, and without one the timer does.
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
            // An actor that fails with it each time never gets to where failures are counted.
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
                // While it waits its turn, what it holds must not be delivered again.
                let _waiting = receipt.as_ref().map(Receipt::keep_alive);
                args.slots.acquire(args.organization).await
            }
        };
        let activation = tracing::Instrument::instrument(
            Box::pin(args.activator.reconcile(args.task, result, &mut self.cache)),
            span,
        );
        let began = Instant::now();
        let looked = activation.await;
        metrics::record_reconcile(began.elapsed(), looked.as_ref().err());
        match looked {
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
                // A race that was lost time and again passes too.
                let passing =
                    error.is_retryable() || matches!(error, construct_store::Error::Conflict);
                let reason = Chain(&error).to_string();
                if !passing && self.quarantine_if_failing(&reason).await {
                    if let Some(receipt) = receipt {
                        self.args.dead_letter(receipt, &reason).await;
                    }
                    return Outcome::Idle;
                }
                let task = self.args.task;
                if passing {
                    tracing::warn!(%task, error = &reason, "the task could not be looked at; it is tried again");
                } else {
                    tracing::error!(%task, error = &reason, "the task could not be looked at; it is tried again");
                }
                if let Some(receipt) = receipt {
                    receipt.nak(retry_delay(self.failures, passing)).await;
                }
                Outcome::Failed { transient: passing, reason }
            }
        }
    }

    /// Whether the task, which could not be looked at for this reason, is put aside: it was
    /// already, or it is now because looks have failed often enough. Until somebody asks for
    /// something, one that was already is not tried again and again because of what comes for it.
    async fn quarantine_if_failing(&mut self, reason: &str) -> bool {
        let args = &self.args;
        if args.quarantine_reason().await.is_some() {
            tracing::warn!(task = %args.task, error = reason, "the task is put aside, and can still not be looked at");
            return true;
        }
        let before = std::mem::replace(
            &mut self.intents_before_failure,
            args.activator.intents(args.task).await,
        );
        match before {
            Some(intents) if self.failures + 1 >= FAILURE_THRESHOLD => {
                args.activator.quarantine(args.task, intents, reason).await
            }
            Some(_) | None => false,
        }
    }
}

impl Args {
    /// Why the task is put aside, if it is.
    async fn quarantine_reason(&self) -> Option<String> {
        self.activator.quarantine_reason(self.organization, self.task).await
    }

    /// A result for a task that is put aside is kept where people find it: delivered again it would
    /// only fail again. If its step is still wanted when the task goes on, the step's command is
    /// sent again, unless the result was published again before.
    async fn dead_letter(&self, receipt: Receipt, reason: &str) {
        self.activator.bus.bury(receipt, &format!("its task is put aside: {reason}")).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_after_failures_double_to_a_minute_or_less_when_they_pass() {
        let pauses = |passing| {
            [0, 1, 2, 5, 6, 7, u32::MAX].map(|before| retry_delay(before, passing).as_secs())
        };
        assert_eq!(pauses(false), [1, 2, 4, 32, 60, 60, 60]);
        assert_eq!(pauses(true), [1, 2, 4, 5, 5, 5, 5]);
    }
}
