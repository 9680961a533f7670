//! Taking commands from work queues: bounded, alive as long as the process, and honest about what
//! cannot be read.

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

/// How long handing back may take once a consumer is told to stop. What is not handed back by then
/// is delivered again after the acknowledgement wait.
const HAND_BACK: Duration = Duration::from_secs(1);

/// What a reconciler takes from a partition.
#[derive(Debug, Clone, PartialEq)]
pub enum TaskMessage {
    /// Look at the task again.
    Wake(mesh::TaskWake),
    /// What became of a step of the task.
    Result(Box<mesh::StepResult>),
}

/// How a consumer takes its messages.
#[derive(Debug, Clone)]
pub struct ConsumeOptions {
    max_in_flight: usize,
    stop: CancellationToken,
}

impl ConsumeOptions {
    /// At most `max_in_flight` receipts exist at a time; further messages wait at the server, where
    /// other workers can take them. After `stop` nothing more is taken.
    pub fn new(max_in_flight: usize, stop: CancellationToken) -> Self {
        Self { max_in_flight: max_in_flight.max(1), stop }
    }
}

/// A consumer of the table, pulled by a background task that outlives restarts of NATS.
#[derive(Debug)]
pub struct Consumer<T> {
    deliveries: mpsc::Receiver<Delivery<T>>,
    stop: CancellationToken,
    puller: JoinHandle<()>,
}

/// One message, to be settled through its receipt.
#[derive(Debug)]
pub struct Delivery<T> {
    /// The message; its ids agree with its subject.
    pub message: T,
    /// The task it is about; the nil one when it is about none.
    pub task: TaskId,
    /// Which delivery of this message it is, from 1.
    pub delivery: u32,
    /// The message's sequence in its stream.
    pub sequence: u64,
    /// Settles the message. Dropped unsettled, the message is delivered again after
    /// [`topology::ACK_WAIT`].
    pub receipt: Receipt,
}

/// The right, and the duty, to settle one delivered message.
#[derive(Debug)]
pub struct Receipt {
    pub(crate) acker: Acker,
    origin: Origin,
    parent: opentelemetry::Context,
    came: Instant,
    _slot: Slot,
}

/// Where a delivered message stands.
#[derive(Debug, Clone, Copy)]
struct Origin {
    stream: Stream,
    sequence: u64,
    deliveries: u32,
}

/// Tells the server every [`KEEP_ALIVE`] that the work goes on, until dropped.
#[derive(Debug)]
#[must_use = "the message is delivered again when nobody keeps it alive"]
pub struct KeepAlive(JoinHandle<()>);

/// Where acknowledgements of one message go.
#[derive(Debug, Clone)]
pub(crate) struct Acker {
    client: Client,
    reply: Subject,
}

impl Bus {
    /// Takes a partition's wakes and results.
    pub fn consume_tasks(&self, partition: u16, options: ConsumeOptions) -> Consumer<TaskMessage> {
        self.consume(topology::task_consumer(partition), options)
    }

    /// Takes a pool's model calls.
    pub fn consume_model(
        &self,
        pool: &Pool,
        options: ConsumeOptions,
    ) -> Consumer<mesh::ModelInvoke> {
        self.consume(topology::model_consumer(pool), options)
    }

    /// Takes a pool's scripts.
    pub fn consume_code(
        &self,
        pool: &Pool,
        options: ConsumeOptions,
    ) -> Consumer<mesh::CodeExecute> {
        self.consume(topology::code_consumer(pool), options)
    }

    /// Takes what calls outside a turn have used.
    pub fn consume_spending(&self, options: ConsumeOptions) -> Consumer<mesh::SpendingReport> {
        self.consume(topology::spending_consumer(), options)
    }

    /// Takes what happened in Slack.
    pub fn consume_slack(&self, options: ConsumeOptions) -> Consumer<mesh::SlackDelivery> {
        self.consume(topology::slack_consumer(), options)
    }

    /// Takes scans to go on with.
    pub fn consume_scans(&self, options: ConsumeOptions) -> Consumer<mesh::ScanRun> {
        self.consume(topology::scan_consumer(), options)
    }

    fn consume<T: Inbound>(&self, row: ConsumerRow, options: ConsumeOptions) -> Consumer<T> {
        let ConsumeOptions { max_in_flight, stop } = options;
        // As many places as slots, so that handing over never waits.
        let (sender, deliveries) = mpsc::channel(max_in_flight);
        let puller =
            Puller::new(self.clone(), row, Slots::new(max_in_flight), stop.clone(), sender);
        Consumer { deliveries, stop, puller: tokio::spawn(puller.run()) }
    }
}

impl<T> Consumer<T> {
    /// The next message. `None` after `stop`: what was taken but not yet given out has then been
    /// handed back. Safe to cancel.
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
                "not everything could be handed back in time; it is delivered again later"
            );
        }
        None
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        // After `stop` the puller ends by itself, having handed back what was on its way.
        if !self.stop.is_cancelled() {
            self.puller.abort();
        }
    }
}

impl Receipt {
    /// Settles the message: it is done, and its outcome durable. Not confirmed by the server: if
    /// the word is lost, the message is delivered again, which everything here must bear anyway.
    pub async fn ack(self) {
        self.acker.send(AckKind::Ack).await;
    }

    /// Gives the message back, to be delivered again (perhaps to another worker) after `delay`.
    pub async fn nak(self, delay: Duration) {
        self.acker.send(AckKind::Nak((!delay.is_zero()).then_some(delay))).await;
    }

    /// Says regularly that the work goes on, from [`KEEP_ALIVE`] after the message came, until the
    /// guard is dropped: the acknowledgement wait begins anew.
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

    /// How often the message was delivered, this time included.
    pub const fn deliveries(&self) -> u32 {
        self.origin.deliveries
    }

    /// The publisher's trace context; empty when it had none.
    pub const fn parent(&self) -> &opentelemetry::Context {
        &self.parent
    }

    /// Makes `span` a child of the publisher's, and says which stream and consumer its message came
    /// from, in the words of OpenTelemetry's conventions for messaging. Call it before the span is
    /// entered.
    pub fn continue_trace(&self, span: &Span) {
        if let Some((stream, consumer)) = self.acker.origin() {
            span.set_attribute("messaging.system", "nats");
            span.set_attribute("messaging.operation.type", "process");
            span.set_attribute("messaging.destination.name", stream.to_owned());
            span.set_attribute("messaging.consumer.group.name", consumer.to_owned());
        }
        // Fails when the span is disabled or already started its own trace; then there is nothing
        // to continue.
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
    /// The stream and the consumer that a message came from: the server's subject for
    /// acknowledgements names them.
    fn origin(&self) -> Option<(&str, &str)> {
        let mut parts = self.reply.strip_prefix("$JS.ACK.")?.split('.');
        // A server of a cluster with domains puts two more before them.
        let more = parts.clone().count().saturating_sub(7);
        let mut parts = parts.by_ref().skip(if more >= 2 { 2 } else { 0 });
        Some((parts.next()?, parts.next()?))
    }

    pub(crate) async fn send(&self, kind: AckKind) {
        // Fails only when the client is closed, which ends with the process.
        if let Err(error) = self.client.publish(self.reply.clone(), kind.into()).await {
            tracing::debug!(%error, "an acknowledgement could not be sent");
        }
    }
}

/// Shared by the parts: everything needed to settle a message before it becomes a [`Delivery`].
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
