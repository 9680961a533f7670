//! Consumes work queues: with bounded concurrency, for as long as the process runs. Messages that
//! cannot be decoded become dead letters.

mod dead_letter;
mod inbound;
mod pull;
mod slots;

use std::{sync::Arc, time::Duration};

use async_nats::{Client, Subject, jetstream::AckKind};
use construct_domain::TaskId;
use construct_proto::mesh::v1 as mesh;
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, MissedTickBehavior},
};
use tokio_util::sync::CancellationToken;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::{
    Bus, Pool,
    topology::{self, ConsumerRow, KEEP_ALIVE, Stream},
};
use inbound::Inbound;
use pull::Puller;
use slots::{Slot, Slots};

/// Time to hand messages back after a consumer was stopped. The rest is redelivered after the
/// acknowledgement wait.
const HAND_BACK: Duration = Duration::from_secs(1);

/// A message of a partition.
#[derive(Debug, Clone, PartialEq)]
pub enum TaskMessage {
    /// Reconcile the task.
    Wake(mesh::TaskWake),
    /// The result of a step of the task.
    Result(Box<mesh::StepResult>),
}

/// Options of a consumer.
#[derive(Debug, Clone)]
pub struct ConsumeOptions {
    max_in_flight: usize,
    stop: CancellationToken,
}

impl ConsumeOptions {
    /// At most `max_in_flight` receipts exist at a time. Further messages wait at the server, where
    /// other workers can take them. After `stop`, no more messages are taken.
    pub fn new(max_in_flight: usize, stop: CancellationToken) -> Self {
        Self { max_in_flight: max_in_flight.max(1), stop }
    }
}

/// A consumer of the topology table. A background task pulls its messages and survives restarts of
/// NATS.
#[derive(Debug)]
pub struct Consumer<T> {
    deliveries: mpsc::Receiver<Delivery<T>>,
    stop: CancellationToken,
    puller: JoinHandle<()>,
}

/// One message, which its receipt settles.
#[derive(Debug)]
pub struct Delivery<T> {
    /// The message. Its ids agree with its subject.
    pub message: T,
    /// The task of the message; the nil id when there is none.
    pub task: TaskId,
    /// How often this message has been delivered, from 1.
    pub delivery: u32,
    /// The message's sequence in its stream.
    pub sequence: u64,
    /// Settles the message. A message whose receipt is dropped is redelivered after
    /// [`topology::ACK_WAIT`].
    pub receipt: Receipt,
}

/// The right and the duty to settle one delivered message.
#[derive(Debug)]
pub struct Receipt {
    pub(crate) acker: Acker,
    origin: Origin,
    parent: opentelemetry::Context,
    came: Instant,
    _slot: Slot,
}

/// Where a delivered message came from.
#[derive(Debug, Clone, Copy)]
struct Origin {
    stream: Stream,
    sequence: u64,
    deliveries: u32,
}

/// Reports progress to the server every [`KEEP_ALIVE`] until dropped.
#[derive(Debug)]
#[must_use = "the message is redelivered when this is dropped"]
pub struct KeepAlive(JoinHandle<()>);

/// The reply subject for acknowledgements of one message.
#[derive(Debug, Clone)]
pub(crate) struct Acker {
    client: Client,
    reply: Subject,
}

impl Bus {
    /// Consumes a partition's wakes and results.
    pub fn consume_tasks(&self, partition: u16, options: ConsumeOptions) -> Consumer<TaskMessage> {
        self.consume(topology::task_consumer(partition), options)
    }

    /// Consumes a pool's model calls.
    pub fn consume_model(
        &self,
        pool: &Pool,
        options: ConsumeOptions,
    ) -> Consumer<mesh::ModelInvoke> {
        self.consume(topology::model_consumer(pool), options)
    }

    /// Consumes a pool's scripts.
    pub fn consume_code(
        &self,
        pool: &Pool,
        options: ConsumeOptions,
    ) -> Consumer<mesh::CodeExecute> {
        self.consume(topology::code_consumer(pool), options)
    }

    /// Consumes reports of model calls outside a turn.
    pub fn consume_spending(&self, options: ConsumeOptions) -> Consumer<mesh::SpendingReport> {
        self.consume(topology::spending_consumer(), options)
    }

    /// Consumes deliveries from Slack.
    pub fn consume_slack(&self, options: ConsumeOptions) -> Consumer<mesh::SlackDelivery> {
        self.consume(topology::slack_consumer(), options)
    }

    /// Consumes scans to continue.
    pub fn consume_scans(&self, options: ConsumeOptions) -> Consumer<mesh::ScanRun> {
        self.consume(topology::scan_consumer(), options)
    }

    fn consume<T: Inbound>(&self, row: ConsumerRow, options: ConsumeOptions) -> Consumer<T> {
        let ConsumeOptions { max_in_flight, stop } = options;
        // The channel has as many slots as there are receipts, so that sending never waits.
        let (sender, deliveries) = mpsc::channel(max_in_flight);
        let puller =
            Puller::new(self.clone(), row, Slots::new(max_in_flight), stop.clone(), sender);
        Consumer { deliveries, stop, puller: tokio::spawn(puller.run()) }
    }
}

impl<T> Consumer<T> {
    /// The next message. `None` after `stop`; messages that were taken and not yet returned have
    /// then been handed back. Cancel-safe.
    pub async fn next(&mut self) -> Option<Delivery<T>> {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => {}
            delivery = self.deliveries.recv() => {
                if delivery.is_some() {
                    return delivery;
                }
            }
        }
        let hand_back = async {
            while let Some(delivery) = self.deliveries.recv().await {
                delivery.receipt.nak(Duration::ZERO).await;
            }
        };
        if tokio::time::timeout(HAND_BACK, hand_back).await.is_err() {
            tracing::debug!(
                "some messages could not be handed back in time; they are redelivered later"
            );
        }
        None
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        // After `stop` the puller ends by itself and hands messages back.
        if !self.stop.is_cancelled() {
            self.puller.abort();
        }
    }
}

impl Receipt {
    /// Settles the message: it is processed, and its outcome is durable. The server does not
    /// confirm this. If the acknowledgement is lost, the message is redelivered, which every
    /// consumer must tolerate anyway.
    pub async fn ack(self) {
        self.acker.send(AckKind::Ack).await;
    }

    /// Returns the message for redelivery, perhaps to another worker, after `delay`.
    pub async fn nak(self, delay: Duration) {
        self.acker.send(AckKind::Nak((!delay.is_zero()).then_some(delay))).await;
    }

    /// Reports progress regularly until the guard is dropped, beginning [`KEEP_ALIVE`] after the
    /// delivery. Each report restarts the acknowledgement wait.
    pub fn keep_alive(&self) -> KeepAlive {
        let (acker, first) = (self.acker.clone(), self.came + KEEP_ALIVE);
        KeepAlive(tokio::spawn(async move {
            let mut ticks = tokio::time::interval_at(first, KEEP_ALIVE);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                acker.send(AckKind::Progress).await;
            }
        }))
    }

    /// How often the message was delivered, including this time.
    pub const fn deliveries(&self) -> u32 {
        self.origin.deliveries
    }

    /// The publisher's trace context; empty when there is none.
    pub const fn parent(&self) -> &opentelemetry::Context {
        &self.parent
    }

    /// Makes `span` a child of the publisher's span, and adds the stream and the consumer as
    /// attributes of OpenTelemetry's messaging conventions. Call it before the span is entered.
    pub fn continue_trace(&self, span: &Span) {
        if let Some((stream, consumer)) = self.acker.origin() {
            span.set_attribute("messaging.system", "nats");
            span.set_attribute("messaging.operation.type", "process");
            span.set_attribute("messaging.destination.name", stream.to_owned());
            span.set_attribute("messaging.consumer.group.name", consumer.to_owned());
        }
        // Fails when the span is disabled or has already started its own trace. Then there is
        // nothing to continue.
        if let Err(error) = span.set_parent(self.parent.clone()) {
            tracing::trace!(%error, "the trace is not continued");
        }
    }
}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Acker {
    /// The stream and the consumer of a message, which the server's acknowledgement subject names.
    fn origin(&self) -> Option<(&str, &str)> {
        let mut parts = self.reply.strip_prefix("$JS.ACK.")?.split('.');
        // A cluster with domains has two more tokens before them.
        let more = parts.clone().count().saturating_sub(7);
        let mut parts = parts.by_ref().skip(if more >= 2 { 2 } else { 0 });
        Some((parts.next()?, parts.next()?))
    }

    pub(crate) async fn send(&self, kind: AckKind) {
        // Fails only when the client is closed, which happens at the end of the process.
        if let Err(error) = self.client.publish(self.reply.clone(), kind.into()).await {
            tracing::debug!(%error, "an acknowledgement could not be sent");
        }
    }
}

/// What is needed to settle a message before it becomes a [`Delivery`].
struct Handle {
    acker: Acker,
    slot: Slot,
}

impl Handle {
    fn into_receipt(self, origin: Origin, parent: opentelemetry::Context) -> Receipt {
        Receipt { acker: self.acker, origin, parent, came: Instant::now(), _slot: self.slot }
    }
}

type Output<T> = mpsc::Sender<Delivery<T>>;
type SharedSlots = Arc<Slots>;
