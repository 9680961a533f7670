//! Takes model commands from the mesh, and reports exactly one result for each.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use construct_bus::{Bus, ConsumeOptions, Consumer, Delivery, Receipt, publish, subject};
use construct_domain::{TaskId, money::Usage};
use construct_proto::{
    mesh::v1::{
        self as mesh, Cancelled, FailureClass, ModelCompleted, ModelInvoke, StepRef, StepResult,
        model_invoke::Purpose, step_result,
    },
    v1::{self, Event},
};
use construct_runtime::{Context, Lifecycle, clock};
use futures::StreamExt as _;
use jiff::Timestamp;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::Instrument as _;
use uuid::Uuid;

use crate::{
    attachments::Attachments,
    call::{self, Outcome},
    cancels::CancelRegistry,
    delta::{Deltas, Progress, StepContext},
    failure::Failure,
    router::{CallEnd, Interrupts, RoutedCall, Router, Target, ordered_targets},
    vendor::Request,
};

/// Deliveries of one command at most: a command that crashed five workers is not given to a sixth.
/// The server also counts deliveries that were handed back or not acknowledged in time. So the last
/// allowed delivery is not handed back: its step fails as if this worker had made no call, and the
/// next one has all deliveries before it.
const MAX_DELIVERIES: u32 = 5;
/// The fraction of the shutdown grace period in which calls may still finish; the rest is for
/// handing calls back.
const FINISH_FRACTION: f64 = 0.7;
/// Delay before NATS is tried again.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// What calls need; one per process.
#[derive(Clone)]
pub(crate) struct Worker {
    pub(crate) bus: Bus,
    pub(crate) router: Router,
    pub(crate) attachments: Attachments,
    /// Upper bound of a call's duration, whatever its command says.
    pub(crate) call_timeout: Duration,
    pub(crate) cancels: CancelRegistry,
    /// Canceled when calls in flight are to be handed back.
    pub(crate) hand_back: CancellationToken,
}

impl Worker {
    /// Takes commands and cancels until the service drains. At most `concurrency` commands are in
    /// flight; the others wait in the stream.
    pub(crate) async fn start(
        self,
        concurrency: usize,
        context: &Context,
    ) -> Result<(), construct_bus::subscribe::Error> {
        let lifecycle = context.lifecycle();
        // Before the first command, so that no cancel is missed.
        let cancels = self.bus.subscribe_cancel(subject::Service::Providers).await?;
        lifecycle.spawn("cancels", self.clone().receive_cancels(cancels, lifecycle.draining()));

        let options = ConsumeOptions::new(concurrency, lifecycle.draining());
        let consumer = self.bus.consume_model(&subject::Pool::model_default(), options);
        let finish_within = context.common().shutdown_grace.mul_f64(FINISH_FRACTION);
        lifecycle.spawn("model-calls", self.consume(consumer, lifecycle.clone(), finish_within));
        Ok(())
    }

    async fn consume(
        self,
        mut consumer: Consumer<ModelInvoke>,
        lifecycle: Lifecycle,
        finish_within: Duration,
    ) -> anyhow::Result<()> {
        let calls = TaskTracker::new();
        while let Some(delivery) = consumer.next().await {
            lifecycle.spawn_job("model-call", calls.track_future(self.clone().process(delivery)));
        }
        // A call that finishes in this time is cheaper than the same call started again elsewhere.
        calls.close();
        if timeout(finish_within, calls.wait()).await.is_err() {
            self.hand_back.cancel();
        }
        Ok(())
    }

    async fn receive_cancels(
        self,
        mut cancels: futures::stream::BoxStream<'static, mesh::CancelStep>,
        draining: CancellationToken,
    ) -> anyhow::Result<()> {
        loop {
            let cancel = tokio::select! {
                () = draining.cancelled() => return Ok(()),
                cancel = cancels.next() => cancel,
            };
            match cancel {
                Some(cancel) => self.cancels.cancel(&cancel),
                None => {
                    sleep(RETRY_DELAY).await;
                    if let Ok(again) = self.bus.subscribe_cancel(subject::Service::Providers).await
                    {
                        cancels = again;
                    }
                }
            }
        }
    }

    async fn process(self, delivery: Delivery<ModelInvoke>) {
        let Delivery { message: command, task, delivery, receipt, .. } = delivery;
        let span = tracing::info_span!(
            "providers.model.invoke",
            otel.kind = "consumer",
            construct.task = %task,
            construct.step = command.step.as_ref().map(|step| step.step_id.as_str()),
            construct.delivery = delivery,
        );
        receipt.continue_trace(&span);
        let keep_alive = receipt.keep_alive();
        // Boxed: the future of a call is large, and it has its own task anyway.
        let (result, progress) =
            Box::pin(self.execute(&command, delivery)).instrument(span.clone()).await;
        // A NATS server delivers the messages of one connection in their order, and a commit lies
        // between the result and its consequences. So no subscriber sees the end of a step before
        // its progress, although nothing here waits until the stream has stored the progress.
        let (settled, ()) = tokio::join!(
            async {
                match result {
                    Some(result) => self.publish(task, result).instrument(span).await,
                    None => false,
                }
            },
            finish_progress(progress)
        );
        drop(keep_alive);
        ack_or_nak(receipt, settled).await;
    }

    /// The result of the command, none when it is handed back; and the live text that is on its
    /// way.
    async fn execute(
        &self,
        command: &ModelInvoke,
        delivery: u32,
    ) -> (Option<StepResult>, MeshProgress) {
        let step = command.step.clone().unwrap_or_default();
        let mut live = MeshProgress(self.bus.progress());
        let lost = calls_of_lost_workers(delivery);
        let counted = |failure: Failure| {
            Failure { attempts: failure.attempts.saturating_add(lost), ..failure }.into_proto()
        };
        let (outcome, usage, model_id) = match self.prepare(command, &step, delivery) {
            Ok(prepared) => self.invoke(prepared, &step, delivery, &mut live).await,
            Err(failure) => {
                let model = command.model.as_ref().map(|model| model.id.clone());
                (Outcome::Failed(failure), Usage::default(), model.unwrap_or_default())
            }
        };
        let outcome = match outcome {
            // Another delivery would exceed the limit, although this worker does not crash.
            Outcome::HandedBack
                if delivery >= MAX_DELIVERIES
                    || lost + 1 >= self.router.max_calls(command.max_attempts) =>
            {
                let failure = Failure::transient("the service stopped before the call had ended");
                step_result::Outcome::Failed(counted(failure))
            }
            Outcome::HandedBack => {
                tracing::info!("the service stops: the model call is handed back");
                return (None, live);
            }
            Outcome::Completed(completed) => step_result::Outcome::ModelCompleted(ModelCompleted {
                blocks: completed.blocks,
                stop_reason: completed.stop_reason.into(),
                input_tokens: completed.input_tokens,
            }),
            Outcome::Failed(failure) => {
                tracing::warn!(
                    class = failure.class.as_str_name(),
                    http.status = failure.http_status,
                    "the model call failed: {failure}"
                );
                step_result::Outcome::Failed(counted(failure))
            }
            Outcome::Cancelled { reason, partial } => step_result::Outcome::Cancelled(Cancelled {
                reason,
                partial_answer: partial,
                results: Vec::new(),
            }),
        };
        let (outcome, usage) = (Some(outcome), Some(usage_to_proto(usage)));
        let call_id = Uuid::now_v7().to_string();
        (Some(StepResult { step: Some(step), delivery, outcome, usage, model_id, call_id }), live)
    }

    fn prepare(
        &self,
        command: &ModelInvoke,
        step: &StepRef,
        delivery: u32,
    ) -> Result<PreparedCall, Failure> {
        if delivery > MAX_DELIVERIES {
            return Err(Failure::internal(format!(
                "the model call was given up: {MAX_DELIVERIES} workers were lost, or not heard of, while they worked on it"
            )));
        }
        let (allowed, lost) =
            (self.router.max_calls(command.max_attempts), calls_of_lost_workers(delivery));
        let attempts = allowed.checked_sub(lost).filter(|left| *left > 0).ok_or_else(|| {
            Failure::transient(format!(
                "the model call was given up: of the {allowed} calls left for the answer, each was lost with its worker, or the worker was not heard of"
            ))
        })?;
        let deadline = call_deadline(step, clock::now(), self.call_timeout).ok_or_else(|| {
            Failure::new(
                FailureClass::DeadlineExceeded,
                "the step's deadline passed before a worker was free",
            )
        })?;
        let request = Request::from_command(command)?;
        let first = Target {
            provider: command.provider.clone().unwrap_or_default(),
            model: command.model.clone().unwrap_or_default(),
        };
        let targets = ordered_targets(first, &command.fallbacks, fastrand::f64);
        let hedge_after = command.hedge_after.and_then(|after| Duration::try_from(after).ok());
        let hedge_after = hedge_after.filter(|after| !after.is_zero());
        Ok(PreparedCall { request, targets, hedge_after, deadline, attempts, lost_calls: lost })
    }

    async fn invoke(
        &self,
        prepared: PreparedCall,
        step: &StepRef,
        delivery: u32,
        live: &mut MeshProgress,
    ) -> (Outcome, Usage, String) {
        let guard = self.cancels.begin(&step.task_id, &step.step_id);
        let context = StepContext {
            organization_id: step.organization_id.clone(),
            task_id: step.task_id.clone(),
            step_id: step.step_id.clone(),
            step: step.number,
            delivery,
            live: !matches!(prepared.request.purpose, Purpose::Title | Purpose::Compaction),
        };
        let mut deltas = Deltas::new(context, live);
        if delivery > 1 {
            deltas.restart("the worker that was answering was lost".to_owned()).await;
        }
        let interrupts = Interrupts {
            cancel: &guard.cancel,
            deadline: prepared.deadline,
            hand_back: self.hand_back.clone(),
        };
        let asked = async {
            let mut request = prepared.request;
            let (messages, scripts) =
                (std::mem::take(&mut request.messages), !request.tools.is_empty());
            let shown = self.attachments.resolve(&step.organization_id, messages, scripts).await;
            shown.map(|(messages, permit)| (Arc::new(Request { messages, ..request }), permit))
        };
        let asked = tokio::select! {
            biased;
            ended = interrupts.wait() => Err(ended),
            asked = asked => asked.map_err(CallEnd::Failed),
        };
        let (request, _permit) = match asked {
            Ok(asked) => asked,
            Err(ended) => {
                let model = prepared.targets.first().map(|target| target.model.id.clone());
                return (
                    Outcome::from_call_end(ended),
                    Usage::default(),
                    model.unwrap_or_default(),
                );
            }
        };
        let call = RoutedCall {
            request,
            targets: prepared.targets,
            hedge_after: prepared.hedge_after,
            attempts: prepared.attempts,
            lost_calls: prepared.lost_calls,
            interrupts,
        };
        call::answer(&self.router, call, &mut deltas).await
    }

    /// Publishes the result and retries as long as needed: the answer is paid for. Returns false
    /// when the service stops before.
    async fn publish(&self, task: TaskId, mut result: StepResult) -> bool {
        let address = subject::TaskResult::new(task);
        loop {
            let error: publish::Error = match self.bus.publish(&address, &result).await {
                Ok(_) => return true,
                Err(error) => error,
            };
            if error.is_retryable() {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "the result cannot be published yet"
                );
                tokio::select! {
                    () = self.hand_back.cancelled() => return false,
                    () = sleep(RETRY_DELAY) => {}
                }
            } else if matches!(result.outcome, Some(step_result::Outcome::Failed(_))) {
                // Even the failure cannot be published. The deadline of the step will end it.
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "the result cannot be published"
                );
                return true;
            } else {
                let failure =
                    Failure::internal(format!("the model's answer cannot be passed on: {error}"));
                result.outcome = Some(step_result::Outcome::Failed(failure.into_proto()));
            }
        }
    }
}

struct PreparedCall {
    /// Without the content of attached files.
    request: Request,
    targets: Vec<Arc<Target>>,
    hedge_after: Option<Duration>,
    deadline: Instant,
    /// Vendor calls left for this answer.
    attempts: u32,
    /// Calls that earlier workers are assumed to have made.
    lost_calls: u32,
}

/// The calls that earlier deliveries are assumed to have made: one each. What a lost worker called
/// is unknown, and a command that started anew with each delivery would multiply its attempts (D8
/// in ARCHITECTURE.md). A worker that made no call, or several, counts the same.
const fn calls_of_lost_workers(delivery: u32) -> u32 {
    delivery.saturating_sub(1)
}

/// Progress over the mesh.
struct MeshProgress(construct_bus::Progress);

#[async_trait]
impl Progress for MeshProgress {
    async fn send(&mut self, event: Event) {
        if let Err(error) = self.0.send(&event).await {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "an event of ours is not valid"
            );
        }
    }
}

async fn finish_progress(live: MeshProgress) {
    let written = live.0.finish().await;
    if written.lost > 0 {
        tracing::warn!(
            lost = written.lost,
            "some live text could not be published; the result is whole"
        );
    }
}

async fn ack_or_nak(receipt: Receipt, done: bool) {
    if done {
        receipt.ack().await;
    } else {
        receipt.nak(Duration::ZERO).await;
    }
}

fn call_deadline(step: &StepRef, now: Timestamp, call_timeout: Duration) -> Option<Instant> {
    let left = match &step.deadline {
        None => call_timeout,
        Some(deadline) => {
            let at = Timestamp::new(deadline.seconds, deadline.nanos).ok()?;
            Duration::try_from(at.duration_since(now)).ok()?
        }
    };
    (!left.is_zero()).then(|| Instant::now() + left.min(call_timeout))
}

pub(crate) fn usage_to_proto(usage: Usage) -> v1::Usage {
    v1::Usage {
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        cache_read_tokens: usage.cache_read_tokens,
        cache_write_tokens: usage.cache_write_tokens,
        thinking_tokens: usage.thinking_tokens,
        cost_pico_usd: usage.cost_pico_usd,
    }
}

#[cfg(test)]
mod tests;
