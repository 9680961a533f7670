//! The commands of a task's steps: where they are, and how unwanted steps are stopped.

use std::time::{Duration, Instant};

use construct_bus::{subject, topology};
use construct_domain::{
    StepId, TaskId,
    decide::{self, Effect},
    message::CodeResult,
    task::{Failure, FailureClass, Outcome, Stage, Step, StepResult, StepState, Task},
};
use construct_proto::mesh::v1 as mesh;
use construct_runtime::{clock, telemetry::Chain};
use construct_store::LoadedTask;

use super::Reconciler;
use crate::{
    command,
    in_flight::{CommandRef, CommandState, Queue},
};

/// A command younger than this has not been sent before.
const MIN_RESEND_AGE: jiff::SignedDuration = jiff::SignedDuration::from_secs(1);
/// How long a result that is found in its queue prevents a model call, or scripts, from starting
/// again. A result that was stuck and released (ADR 42) arrives before the first timeout.
const MODEL_RESULT_TIMEOUT: Duration = Duration::from_secs(90);
const CODE_RESULT_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of NATS queries about a queued command. Without an answer the task is reconciled all the
/// same.
const QUEUE_QUERY_TIMEOUT: Duration = Duration::from_secs(1);
/// Delay before the end of a step is retried after a failure.
const CLOSE_RETRY_DELAY: Duration = Duration::from_secs(2);

impl Reconciler {
    /// Counts the command of a task that another process has queued. It is unknown after its
    /// partition moved here, so it is looked up when its task is first reconciled.
    pub(super) async fn refresh_in_flight(&self, loaded: &LoadedTask) {
        let (organization, task) = (loaded.task.organization, loaded.task.id);
        let Some((queue, work)) = CommandRef::for_task(&loaded.task, &command::pool(loaded)) else {
            return;
        };
        if !self.limiter.is_unknown(organization, &queue, task, &work) {
            return;
        }
        let is_queued = async {
            match &queue {
                Queue::Model => {
                    let model = subject::ModelInvoke::new(subject::Pool::model_default(), task);
                    self.bus.is_queued(&model, work.step, work.round).await
                }
                Queue::Code(pool) => {
                    let code = subject::CodeExecute::new(pool.clone(), task);
                    self.bus.is_queued(&code, work.step, work.round).await
                }
            }
        };
        // A command that is not queued acquires a slot when it is sent. If NATS does not answer,
        // the next reconcile asks again.
        if let Ok(Ok(true)) = tokio::time::timeout(QUEUE_QUERY_TIMEOUT, is_queued).await {
            self.limiter.record_queued(organization, queue, task, work);
        }
    }

    /// The result of a model call whose deadline has passed and that certainly no worker has had: a
    /// failure that counts as no attempt, because no vendor was called.
    pub(super) async fn expire_untaken_call(&self, loaded: &LoadedTask) -> Option<StepResult> {
        let task = &loaded.task;
        let (queue, work) = CommandRef::for_task(task, &command::pool(loaded))?;
        let in_flight = matches!(task.step.as_ref()?.state, StepState::InFlight { .. });
        if queue != Queue::Model
            || !in_flight
            || clock::now() < work.until
            || !self.withdraw_undelivered(task, work.step).await
        {
            return None;
        }
        let message = format!(
            "no worker has taken the model call within {} s",
            decide::MODEL_TIMEOUT.as_secs()
        );
        let failure =
            Failure { class: FailureClass::DeadlineExceeded, message, retry_at: None, attempts: 0 };
        Some(StepResult { step: work.step, round: work.round, outcome: Outcome::Failed(failure) })
    }

    /// The result of a stopping model call that no worker has started. No worker will start it, so
    /// there is nothing to wait for.
    pub(super) async fn cancel_untaken_call(
        &self,
        task: &Task,
        step: StepId,
    ) -> Option<StepResult> {
        let stopping =
            |now: &&Step| now.id == step && matches!(now.state, StepState::Cancelling { .. });
        let round = task.step.as_ref().filter(stopping)?.round;
        let outcome = Outcome::Cancelled(Vec::new());
        self.withdraw_undelivered(task, step).await.then_some(StepResult { step, round, outcome })
    }

    /// Withdraws the command of a model call. Returns whether certainly no worker has had it.
    async fn withdraw_undelivered(&self, task: &Task, step: StepId) -> bool {
        let (organization, queue) = (task.organization, Queue::Model);
        if matches!(
            self.limiter.command_state(organization, &queue, task.id, step),
            Some(CommandState::Queued { .. })
        ) {
            return true;
        }
        let unsent =
            self.limiter.unsent(organization, &queue, task.id).is_some_and(|due| due.step == step);
        let pool = subject::Pool::model_default();
        let (row, model) =
            (topology::model_consumer(&pool), subject::ModelInvoke::new(pool, task.id));
        match tokio::time::timeout(
            QUEUE_QUERY_TIMEOUT,
            self.bus.withdraw_undelivered(&model, &row, step),
        )
        .await
        {
            Ok(Ok(Some(untaken))) => untaken,
            // It never reached its queue.
            Ok(Ok(None)) => unsent,
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Whether the result of a checked step is waiting in its queue, so that a worker should not
    /// start it again. A result that no reconciler takes is not waited for without end. A repeated
    /// model call costs money; repeated scripts are answered from their journal.
    pub(super) async fn has_pending_result(
        &self,
        effect: &Effect,
        step: &Step,
        task: TaskId,
        pending_result: &mut PendingResult,
    ) -> bool {
        if !may_have_been_sent(step) {
            return false;
        }
        let has_scripts = matches!(effect, Effect::ExecuteCode(_));
        // If NATS does not answer, a model call is not repeated, because that would cost twice.
        if !self.bus.has_queued_result(task, step.id).await.unwrap_or(!has_scripts) {
            *pending_result = PendingResult::default();
            return false;
        }
        let timeout = if has_scripts { CODE_RESULT_TIMEOUT } else { MODEL_RESULT_TIMEOUT };
        let now = Instant::now();
        now.duration_since(pending_result.first_seen(step, now)) < timeout
    }

    /// Ends a step's scripts: no worker may run them any more, and their journal is dropped. The
    /// task does not wait for this. Nothing else would do it later, so it is retried until it
    /// succeeds. The command is withdrawn unless its worker has `reported`.
    pub(super) fn end_code(&self, loaded: &LoadedTask, step: StepId, reported: bool) {
        let (bus, draining) = (self.bus.clone(), self.lifecycle.draining());
        let address = subject::CodeExecute::new(command::pool(loaded), loaded.task.id);
        let end = async move {
            let began = Instant::now();
            loop {
                // The journal first: a worker that finds it closed does nothing more, even if the
                // command is redelivered.
                let closed =
                    bus.journal().close(step).await.map_err(|error| Chain(&error).to_string());
                let withdrawn = if reported { Ok(()) } else { bus.withdraw(&address, step).await };
                let withdrawn = withdrawn.map_err(|error| Chain(&error).to_string());
                let Err(error) = closed.and(withdrawn) else { return };
                if began.elapsed() > decide::CODE_TIMEOUT || draining.is_cancelled() {
                    tracing::warn!(%step, error, "an ended step could not be closed; its journal expires");
                    return;
                }
                tokio::select! {
                    () = draining.cancelled() => {}
                    () = tokio::time::sleep(CLOSE_RETRY_DELAY) => {}
                }
            }
        };
        self.lifecycle.spawn_job("end-of-step", tracing::Instrument::in_current_span(end));
    }

    /// The result of stopping scripts that no worker has started, whether their command was queued
    /// or not. No worker will start them, so there is nothing to wait for. The worker of started
    /// scripts reports what they have done.
    pub(super) async fn cancel_unstarted_scripts(
        &self,
        task: &Task,
        step: StepId,
        reason: &str,
    ) -> Option<StepResult> {
        let requested_at = task.step.as_ref().filter(|now| now.id == step && now.round == 0)?.since;
        let Stage::Code { calls } = &task.turn.as_ref()?.stage else { return None };
        match self.bus.journal().close_unstarted(step, requested_at).await {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => {
                tracing::debug!(error = %Chain(&error), "cannot find out whether scripts have started; waiting for their worker");
                return None;
            }
        }
        let not_run = |call: &String| CodeResult {
            id: call.clone(),
            error: format!(
                "NotRun: the script was stopped before it started ({reason}). It did nothing."
            ),
            ..CodeResult::default()
        };
        let outcome = Outcome::Cancelled(calls.iter().map(not_run).collect());
        Some(StepResult { step, round: 0, outcome })
    }

    pub(super) async fn broadcast_cancel(
        &self,
        service: subject::Service,
        task: TaskId,
        step: StepId,
        reason: &str,
    ) {
        let cancel = mesh::CancelStep {
            task_id: task.to_string(),
            step_id: step.to_string(),
            reason: reason.to_owned(),
        };
        if let Err(error) = self.bus.publish_cancel(&subject::Cancel { service }, &cancel).await {
            tracing::warn!(%error, "a worker could not be told to stop");
        }
    }
}

/// Whether the command of a checked step may be in flight already, or have been executed.
pub(super) fn may_have_been_sent(step: &Step) -> bool {
    clock::now().duration_since(step.requested_at()) >= MIN_RESEND_AGE
}

/// When a result was first found in its queue, and of which step and round.
#[derive(Debug, Default)]
pub(super) struct PendingResult(Option<(StepId, u32, Instant)>);

impl PendingResult {
    /// When a result of this step was first seen; now, if it was not seen before.
    fn first_seen(&mut self, step: &Step, now: Instant) -> Instant {
        match self.0 {
            Some((id, round, since)) if (id, round) == (step.id, step.round) => since,
            Some(_) | None => {
                self.0 = Some((step.id, step.round, now));
                now
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn result_is_pending_since_first_seen_per_step_and_round() {
        let step = |id: u128, round| Step {
            id: StepId::from_uuid(Uuid::from_u128(id)),
            number: 1,
            attempt: 1,
            since: Timestamp::UNIX_EPOCH,
            round,
            resumed: None,
            state: StepState::InFlight { deadline: Timestamp::MAX },
        };
        let (mut pending_result, begin) = (PendingResult::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        for (id, round, seen, since) in
            [(1, 0, 0, 0), (1, 0, 30, 0), (1, 1, 60, 60), (1, 1, 90, 60), (2, 0, 91, 91)]
        {
            assert_eq!(
                pending_result.first_seen(&step(id, round), at(seen)),
                at(since),
                "{id} {round} {seen}"
            );
        }
    }
}
