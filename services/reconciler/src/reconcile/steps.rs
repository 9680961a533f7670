//! What has become of the commands for a task's steps, and how those are stopped that are not
//! wanted any more.

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

/// A command younger than this was not sent before.
const MIN_RESEND_AGE: jiff::SignedDuration = jiff::SignedDuration::from_secs(1);
/// For how long a model call, and scripts, are not begun anew because a result of theirs is seen to
/// stand in its queue. A result that nobody got, and that was released (ADR 42), has come before
/// the first.
const MODEL_RESULT_TIMEOUT: Duration = Duration::from_secs(90);
const CODE_RESULT_TIMEOUT: Duration = Duration::from_secs(20);
/// How long NATS has to say whether a command is queued, before its task is looked at all the same.
const QUEUE_QUERY_TIMEOUT: Duration = Duration::from_secs(1);
/// How soon a step that is over is closed again when that failed.
const CLOSE_RETRY_DELAY: Duration = Duration::from_secs(2);

impl Reconciler {
    /// What another process has in the queues is not known when its partition comes to this one: it
    /// is counted when its task is first looked at.
    pub(super) async fn refresh_in_flight(&self, loaded: &LoadedTask) {
        let (organization, task) = (loaded.task.organization, loaded.task.id);
        let Some((queue, work)) = CommandRef::for_task(&loaded.task, &command::pool(loaded)) else {
            return;
        };
        if !self.limiter.is_unknown(organization, &queue, task, &work) {
            return;
        }
        let stands = async {
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
        // One that is not there asks for a place when it is to be sent; of one that cannot be found
        // out about NATS is asked at the next look.
        if let Ok(Ok(true)) = tokio::time::timeout(QUEUE_QUERY_TIMEOUT, stands).await {
            self.limiter.record_queued(organization, queue, task, work);
        }
    }

    /// What became of a model call whose deadline has passed, when it is certain that no worker has
    /// had it: a failure that counts as no try, because nothing was called.
    pub(super) async fn expire_untaken_call(&self, loaded: &LoadedTask) -> Option<StepResult> {
        let task = &loaded.task;
        let (queue, work) = CommandRef::for_task(task, &command::pool(loaded))?;
        let in_flight = matches!(task.step.as_ref()?.state, StepState::InFlight { .. });
        if queue != Queue::Model
            || !in_flight
            || clock::now() < work.until
            || !self.withdraw_untaken(task, work.step).await
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

    /// The result of a model call that is to stop and that no worker has begun: nobody will begin
    /// it any more, and nobody has to be waited for.
    pub(super) async fn cancel_untaken_call(
        &self,
        task: &Task,
        step: StepId,
    ) -> Option<StepResult> {
        let stopping =
            |now: &&Step| now.id == step && matches!(now.state, StepState::Cancelling { .. });
        let round = task.step.as_ref().filter(stopping)?.round;
        let outcome = Outcome::Cancelled(Vec::new());
        self.withdraw_untaken(task, step).await.then_some(StepResult { step, round, outcome })
    }

    /// Whether no worker has had the command of a model call, which is in no queue any more.
    async fn withdraw_untaken(&self, task: &Task, step: StepId) -> bool {
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
            self.bus.withdraw_untaken(&model, &row, step),
        )
        .await
        {
            Ok(Ok(Some(untaken))) => untaken,
            // It never reached its queue.
            Ok(Ok(None)) => unsent,
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Whether a step that is looked at again has its result on the way: then its worker should not
    /// begin anew. What nobody takes from its queue is not waited for without end. A model that is
    /// called anew costs money; scripts are answered from their journal.
    pub(super) async fn has_pending_result(
        &self,
        effect: &Effect,
        step: &Step,
        task: TaskId,
        standing: &mut PendingResult,
    ) -> bool {
        if !may_have_been_sent(step) {
            return false;
        }
        let has_scripts = matches!(effect, Effect::ExecuteCode(_));
        // Because NATS does not say nobody pays twice.
        if !self.bus.result_waits(task, step.id).await.unwrap_or(!has_scripts) {
            *standing = PendingResult::default();
            return false;
        }
        let patience = if has_scripts { CODE_RESULT_TIMEOUT } else { MODEL_RESULT_TIMEOUT };
        let now = Instant::now();
        now.duration_since(standing.first_seen(step, now)) < patience
    }

    /// Sees to it that nobody runs a step's scripts any more, and drops its journal; the task need
    /// not wait for that. Nothing else would do it later, so it is tried until it is done. The
    /// command is taken back unless its worker has `reported`.
    pub(super) fn end_code(&self, loaded: &LoadedTask, step: StepId, reported: bool) {
        let (bus, draining) = (self.bus.clone(), self.lifecycle.draining());
        let address = subject::CodeExecute::new(command::pool(loaded), loaded.task.id);
        let end = async move {
            let began = Instant::now();
            loop {
                // First the journal: who finds it closed does nothing more, even if the command
                // reaches it again.
                let closed =
                    bus.journal().close(step).await.map_err(|error| Chain(&error).to_string());
                let withdrawn = if reported { Ok(()) } else { bus.withdraw(&address, step).await };
                let withdrawn = withdrawn.map_err(|error| Chain(&error).to_string());
                let Err(error) = closed.and(withdrawn) else { return };
                if began.elapsed() > decide::CODE_TIMEOUT || draining.is_cancelled() {
                    tracing::warn!(%step, error, "a step that is over could not be closed; its journal ages out");
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

    /// The result of scripts that are to stop and that no worker has begun, withheld or queued:
    /// none will begin them any more, and nobody has to be waited for. Of others their worker says
    /// what they have done.
    pub(super) async fn cancel_unstarted_scripts(
        &self,
        task: &Task,
        step: StepId,
        reason: &str,
    ) -> Option<StepResult> {
        let wanted = task.step.as_ref().filter(|now| now.id == step && now.round == 0)?.since;
        let Stage::Code { calls } = &task.turn.as_ref()?.stage else { return None };
        match self.bus.journal().close_unbegun(step, wanted).await {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => {
                tracing::debug!(error = %Chain(&error), "whether scripts have begun cannot be found out; their worker is waited for");
                return None;
            }
        }
        let not_run = |call: &String| CodeResult {
            id: call.clone(),
            error: format!(
                "NotRun: the script was stopped before it began ({reason}). It did nothing."
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
        if let Err(error) = self.bus.broadcast(&subject::Cancel { service }, &cancel).await {
            tracing::warn!(%error, "a worker could not be told to stop");
        }
    }
}

/// Whether the command of a step that is looked at may be on its way already, or have been carried
/// out.
pub(super) fn may_have_been_sent(step: &Step) -> bool {
    clock::now().duration_since(step.requested_at()) >= MIN_RESEND_AGE
}

/// Since when a result of a step is seen to wait in its queue, and of which step and round.
#[derive(Debug, Default)]
pub(super) struct PendingResult(Option<(StepId, u32, Instant)>);

impl PendingResult {
    /// Since when one of this step is seen, which is seen now.
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
    fn a_result_stands_since_it_was_first_seen_for_its_step_and_round() {
        let step = |id: u128, round| Step {
            id: StepId::from_uuid(Uuid::from_u128(id)),
            number: 1,
            attempt: 1,
            since: Timestamp::UNIX_EPOCH,
            round,
            resumed: None,
            state: StepState::InFlight { deadline: Timestamp::MAX },
        };
        let (mut standing, begin) = (PendingResult::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        for (id, round, seen, since) in
            [(1, 0, 0, 0), (1, 0, 30, 0), (1, 1, 60, 60), (1, 1, 90, 60), (2, 0, 91, 91)]
        {
            assert_eq!(
                standing.first_seen(&step(id, round), at(seen)),
                at(since),
                "{id} {round} {seen}"
            );
        }
    }
}
