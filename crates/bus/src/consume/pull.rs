//! The background task of a consumer.
//!
//! It keeps as many messages requested as there are free slots, on one inbox while there are no
//! errors. The server sends heartbeats while a request waits, so silence means that the request is
//! lost. Then, and after every reconnect, refusal or idle expiry, it ensures the consumer again and
//! requests messages on a new inbox. A request that expires while messages are pending is a known
//! stall (nats-server#4736). It is counted and logged, and the consumer is recreated when none of
//! its messages is in progress.

use std::time::Duration;

use async_nats::{
    StatusCode, Subscriber,
    jetstream::{
        Message,
        consumer::{
            Consumer,
            pull::{BatchConfig, Config},
        },
    },
};
use futures::StreamExt as _;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    Acker, Delivery, Handle, Inbound, Origin, Output, SharedSlots, dead_letter, slots::NoSlot,
};
use crate::{
    Bus, Connection, User, envelope, metrics,
    publish::connection_changed,
    topology::{self, ConsumerRow, ensure_consumer, find_consumer},
};

/// How long a request waits at the server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// How often the server confirms that a request still waits.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

/// A request without a heartbeat for this long counts as lost: two heartbeats and a margin.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(12);

/// The delay after the first failure. It doubles with each further one.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(50);

/// The longest delay.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);

/// After so many expired requests in a row with messages pending, the consumer is recreated.
const MAX_STALLS: u32 = 2;

pub(super) struct Puller<T> {
    bus: Bus,
    row: ConsumerRow,
    slots: SharedSlots,
    stop: CancellationToken,
    output: Output<T>,
    stalls: u32,
}

/// Why a session ended.
enum End {
    /// Stopped, or the consumer was dropped.
    Stop,
    /// No message arrived until the last request expired.
    Idle,
    /// The connection has changed, which is not a fault of the consumer.
    Reconnected,
    /// An error, as text.
    Failed(String),
}

impl<T> Drop for Puller<T> {
    fn drop(&mut self) {
        // The consumer's next owner reports what is pending from now on.
        metrics::pending(&self.row, 0);
    }
}

impl<T: Inbound> Puller<T> {
    pub(super) const fn new(
        bus: Bus,
        row: ConsumerRow,
        slots: SharedSlots,
        stop: CancellationToken,
        output: Output<T>,
    ) -> Self {
        Self { bus, row, slots, stop, output, stalls: 0 }
    }

    pub(super) async fn run(mut self) {
        metrics::consuming(&self.row);
        let mut failures = 0_u32;
        loop {
            let began = Instant::now();
            match self.session(&mut failures).await {
                End::Stop => return,
                End::Idle | End::Reconnected => continue,
                End::Failed(reason) => {
                    // A failure after a long session is a new problem, not part of the last one.
                    if began.elapsed() > MAX_RETRY_DELAY {
                        failures = 0;
                    }
                    failures += 1;
                    let consumer = &self.row.durable;
                    if failures == 1 {
                        tracing::warn!(consumer, reason, "consuming failed; retrying");
                    } else {
                        tracing::debug!(consumer, reason, failures, "consuming still fails");
                    }
                    let delay =
                        MIN_RETRY_DELAY.saturating_mul(1 << failures.min(10)).min(MAX_RETRY_DELAY);
                    tokio::select! {
                        () = self.stop.cancelled() => return,
                        () = self.output.closed() => return,
                        () = tokio::time::sleep(delay) => {}
                    }
                }
            }
        }
    }

    async fn session(&mut self, failures: &mut u32) -> End {
        let mut connection = self.bus.connection();
        let generation = loop {
            if let Connection::Up { generation } = *connection.borrow_and_update() {
                break generation;
            }
            tokio::select! {
                () = self.stop.cancelled() => return End::Stop,
                () = self.output.closed() => return End::Stop,
                changed = connection.changed() => if changed.is_err() { return End::Stop },
            }
        };
        let jetstream = &self.bus.inner.jetstream;
        let found = match self.may_create() {
            true => ensure_consumer(jetstream, &self.row).await,
            false => find_consumer(jetstream, &self.row).await,
        };
        let consumer = match found {
            Ok(consumer) => consumer,
            Err(
                topology::Error::Consumer { source, .. } | topology::Error::Stream { source, .. },
            ) => {
                return End::Failed(source.to_string());
            }
        };
        if let Some(end) = self.check_stall(&consumer).await {
            return end;
        }
        let inbox = self.bus.inner.client.new_inbox();
        let mut messages = match self.bus.inner.client.subscribe(inbox.clone()).await {
            Ok(messages) => messages,
            Err(error) => return End::Failed(error.to_string()),
        };
        let (stop, output, slots) =
            (self.stop.clone(), self.output.clone(), SharedSlots::clone(&self.slots));
        let mut requested = 0_usize;
        let mut silence = Instant::now() + SILENCE_TIMEOUT;
        loop {
            let wanted = slots.free().saturating_sub(requested);
            // Requesting for every single slot would double the traffic of a busy consumer.
            if wanted > 0 && (requested == 0 || wanted * 2 >= slots.total) {
                let batch = BatchConfig {
                    batch: wanted,
                    expires: Some(REQUEST_TIMEOUT),
                    idle_heartbeat: HEARTBEAT_INTERVAL,
                    ..Default::default()
                };
                if let Err(error) = consumer.request_batch(batch, inbox.as_str().into()).await {
                    return End::Failed(error.to_string());
                }
                requested += wanted;
                silence = Instant::now() + SILENCE_TIMEOUT;
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => {
                    self.hand_back(messages).await;
                    return End::Stop;
                }
                () = output.closed() => return End::Stop,
                message = messages.next() => {
                    let Some(message) = message else { return End::Failed("the subscription ended".to_owned()) };
                    silence = Instant::now() + SILENCE_TIMEOUT;
                    match message.status {
                        None | Some(StatusCode::OK) => {
                            requested = requested.saturating_sub(1);
                            self.stalls = 0;
                            if std::mem::take(failures) > 0 {
                                tracing::info!(consumer = self.row.durable, "consuming again");
                            }
                            self.take(message).await;
                        }
                        Some(StatusCode::IDLE_HEARTBEAT) => {
                            if std::mem::take(failures) > 0 {
                                tracing::info!(consumer = self.row.durable, "consuming again");
                            }
                        }
                        Some(StatusCode::TIMEOUT) => {
                            let left = message.headers.as_ref().and_then(|headers| headers.get("Nats-Pending-Messages"));
                            let left = left.and_then(|left| left.as_str().parse::<usize>().ok()).unwrap_or(requested);
                            requested = requested.saturating_sub(left);
                            // No more messages can arrive at this inbox, so leaving it loses
                            // nothing.
                            if requested == 0 {
                                return End::Idle;
                            }
                        }
                        Some(status) => {
                            let description = message.description.unwrap_or_default();
                            return End::Failed(format!("{status} {description}"));
                        }
                    }
                }
                () = connection_changed(&mut connection, generation) => return End::Reconnected,
                () = slots.freed() => {}
                () = tokio::time::sleep_until(silence), if requested > 0 => {
                    return End::Failed("the server stopped sending heartbeats".to_owned());
                }
            }
        }
    }

    /// Detects a consumer that has messages but does not deliver them. Checked only at the start of
    /// a session, with the state that ensuring the consumer returned anyway.
    async fn check_stall(&mut self, consumer: &Consumer<Config>) -> Option<End> {
        let info = consumer.cached_info();
        metrics::pending(&self.row, info.num_pending);
        let deliverable =
            info.num_pending > 0 && (info.num_ack_pending as i64) < self.row.max_ack_pending;
        if !deliverable || self.slots.free() == 0 {
            self.stalls = 0;
            return None;
        }
        // The first session after a start or a reconnect normally finds pending messages. They
        // arrive and reset the count.
        self.stalls += 1;
        if self.stalls <= MAX_STALLS {
            return None;
        }
        let consumer = &self.row.durable;
        tracing::warn!(
            consumer,
            pending = info.num_pending,
            "the consumer has messages but does not deliver them"
        );
        if info.num_ack_pending > 0 || !self.may_create() {
            return None;
        }
        self.stalls = 0;
        let deleted = self
            .bus
            .inner
            .jetstream
            .delete_consumer_from_stream(consumer, self.row.stream.name())
            .await;
        Some(End::Failed(match deleted {
            Ok(_) => "the consumer stalled and was deleted; recreating it".to_owned(),
            Err(error) => error.to_string(),
        }))
    }

    fn may_create(&self) -> bool {
        self.bus.inner.user.is_none_or(User::makes_consumers)
    }

    /// Turns a message into a delivery, or into a dead letter.
    async fn take(&self, message: async_nats::Message) {
        let Some(reply) = message.reply.clone() else {
            return tracing::debug!(subject = %message.subject, "a message without a reply subject was ignored");
        };
        let acker = Acker { client: self.bus.inner.client.clone(), reply };
        let message = Message { message, context: self.bus.inner.jetstream.clone() };
        let (delivery, sequence, published) = match message.info() {
            Ok(info) => {
                let delivered = u32::try_from(info.delivered).unwrap_or(u32::MAX);
                let published =
                    i64::try_from(info.published.unix_timestamp_nanos()).unwrap_or_default();
                metrics::pending(&self.row, info.pending);
                (delivered, info.stream_sequence, published)
            }
            Err(error) => {
                return tracing::debug!(%error, "a message without delivery information was ignored");
            }
        };
        let slot = match self.slots.take((sequence, published)) {
            Ok(slot) => slot,
            // More than requested: an old request was answered late.
            Err(NoSlot::Full) => {
                return acker.send(async_nats::jetstream::AckKind::Nak(None)).await;
            }
            // The receipt's owner settles it. Until then no other worker shall get it.
            Err(NoSlot::InProgress) => {
                return acker.send(async_nats::jetstream::AckKind::Progress).await;
            }
        };
        metrics::delivered(&self.row, delivery, published);
        let handle = Handle { acker, slot };
        let message = message.message;
        let headers = message.headers.as_ref();
        match T::open(&self.bus, &message.subject, headers, message.payload.clone()).await {
            Ok((task, opened)) => {
                let origin = Origin { stream: self.row.stream, sequence, deliveries: delivery };
                let receipt = handle.into_receipt(origin, envelope::extract(headers));
                let delivery = Delivery { message: opened, task, delivery, sequence, receipt };
                // The channel has as many slots as receipts; an error means that the consumer was
                // dropped.
                if self.output.try_send(delivery).is_err() {
                    tracing::debug!(
                        "a message arrived after its consumer was dropped; it is redelivered later"
                    );
                }
            }
            Err(error) => {
                let bus = self.bus.clone();
                // In a task of its own: publishing the dead letter may take long and must not delay
                // other messages.
                tokio::spawn(dead_letter::handle_unreadable::<T>(
                    bus,
                    self.row.stream,
                    message,
                    delivery,
                    handle,
                    error,
                ));
            }
        }
    }

    /// Unsubscribes and hands back messages that are on their way.
    async fn hand_back(&self, mut messages: Subscriber) {
        if messages.drain().await.is_err() {
            return;
        }
        while let Some(message) = messages.next().await {
            if let (None | Some(StatusCode::OK), Some(reply)) = (message.status, message.reply) {
                let acker = Acker { client: self.bus.inner.client.clone(), reply };
                acker.send(async_nats::jetstream::AckKind::Nak(None)).await;
            }
        }
    }
}
