//! The task behind a consumer.
//!
//! It keeps as many messages requested as there are free slots, on one inbox for as long as all is
//! well. The server sends heartbeats while a request waits, so silence means that the request is
//! lost: then, and after every reconnect, refusal or idle expiry, the consumer is ensured anew and
//! requested from on a new inbox. A request that expired while messages were pending is the stall
//! seen in the wild (nats-server#4736); it is counted, said, and ended by making the consumer anew
//! when nobody holds any of its messages.

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
const EXPIRES: Duration = Duration::from_secs(30);

/// How often the server says that a request still waits.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// After this much silence a request counts as lost: two heartbeats and a little.
const SILENCE: Duration = Duration::from_secs(12);

/// The pause after the first failure; it doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// After so many expired requests in a row with messages pending, the consumer is made anew.
const STALLS: u32 = 2;

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
    /// Told to stop, or nobody listens any more.
    Stopped,
    /// Nothing came until the last request expired.
    Idle,
    /// The connection is another one now; not a fault of the consumer.
    Reconnected,
    /// Something is wrong, in words.
    Failed(String),
}

impl<T> Drop for Puller<T> {
    fn drop(&mut self) {
        // Whoever takes the consumer over tells what waits from now on.
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
                End::Stopped => return,
                End::Idle | End::Reconnected => continue,
                End::Failed(reason) => {
                    // A session that lasted is a new trouble, not a part of the last one.
                    if began.elapsed() > PAUSE_MAX {
                        failures = 0;
                    }
                    failures += 1;
                    let consumer = &self.row.durable;
                    if failures == 1 {
                        tracing::warn!(consumer, reason, "taking messages failed; trying again");
                    } else {
                        tracing::debug!(consumer, reason, failures, "taking messages still fails");
                    }
                    let pause = PAUSE_MIN.saturating_mul(1 << failures.min(10)).min(PAUSE_MAX);
                    tokio::select! {
                        () = self.stop.cancelled() => return,
                        () = self.output.closed() => return,
                        () = tokio::time::sleep(pause) => {}
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
                () = self.stop.cancelled() => return End::Stopped,
                () = self.output.closed() => return End::Stopped,
                changed = connection.changed() => if changed.is_err() { return End::Stopped },
            }
        };
        let jetstream = &self.bus.inner.jetstream;
        let found = match self.may_make() {
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
        let mut silence = Instant::now() + SILENCE;
        loop {
            let wanted = slots.free().saturating_sub(requested);
            // Asking again for every single slot would double the traffic of a busy consumer.
            if wanted > 0 && (requested == 0 || wanted * 2 >= slots.total) {
                let batch = BatchConfig {
                    batch: wanted,
                    expires: Some(EXPIRES),
                    idle_heartbeat: HEARTBEAT,
                    ..Default::default()
                };
                if let Err(error) = consumer.request_batch(batch, inbox.as_str().into()).await {
                    return End::Failed(error.to_string());
                }
                requested += wanted;
                silence = Instant::now() + SILENCE;
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => {
                    self.hand_back(messages).await;
                    return End::Stopped;
                }
                () = output.closed() => return End::Stopped,
                message = messages.next() => {
                    let Some(message) = message else { return End::Failed("the subscription ended".to_owned()) };
                    silence = Instant::now() + SILENCE;
                    match message.status {
                        None | Some(StatusCode::OK) => {
                            requested = requested.saturating_sub(1);
                            self.stalls = 0;
                            if std::mem::take(failures) > 0 {
                                tracing::info!(consumer = self.row.durable, "taking messages again");
                            }
                            self.take(message).await;
                        }
                        Some(StatusCode::IDLE_HEARTBEAT) => {
                            if std::mem::take(failures) > 0 {
                                tracing::info!(consumer = self.row.durable, "taking messages again");
                            }
                        }
                        Some(StatusCode::TIMEOUT) => {
                            let left = message.headers.as_ref().and_then(|headers| headers.get("Nats-Pending-Messages"));
                            let left = left.and_then(|left| left.as_str().parse::<usize>().ok()).unwrap_or(requested);
                            requested = requested.saturating_sub(left);
                            // Nothing more can be on its way to this inbox, so leaving it loses
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
                    return End::Failed("the server fell silent".to_owned());
                }
            }
        }
    }

    /// Notices a consumer that has messages but does not deliver them. Looked at only when a
    /// session begins, with what ensuring the consumer told anyway.
    async fn check_stall(&mut self, consumer: &Consumer<Config>) -> Option<End> {
        let info = consumer.cached_info();
        metrics::pending(&self.row, info.num_pending);
        let deliverable =
            info.num_pending > 0 && (info.num_ack_pending as i64) < self.row.max_ack_pending;
        if !deliverable || self.slots.free() == 0 {
            self.stalls = 0;
            return None;
        }
        // The first session after a start or a reconnect finds pending messages as a matter of
        // course; they arrive and reset the count.
        self.stalls += 1;
        if self.stalls <= STALLS {
            return None;
        }
        let consumer = &self.row.durable;
        tracing::warn!(
            consumer,
            pending = info.num_pending,
            "the consumer has messages but does not deliver them"
        );
        if info.num_ack_pending > 0 || !self.may_make() {
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
            Ok(_) => "the consumer stalled and was removed, to be made anew".to_owned(),
            Err(error) => error.to_string(),
        }))
    }

    fn may_make(&self) -> bool {
        self.bus.inner.user.is_none_or(User::makes_consumers)
    }

    /// Turns a message into a delivery, or into a dead letter.
    async fn take(&self, message: async_nats::Message) {
        let Some(reply) = message.reply.clone() else {
            return tracing::debug!(subject = %message.subject, "a message without a way to acknowledge it was ignored");
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
            // More than was asked for: an old request was answered late.
            Err(NoSlot::Full) => {
                return acker.send(async_nats::jetstream::AckKind::Nak(None)).await;
            }
            // Whoever is at it settles it; until then nobody else shall have it.
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
                // There are as many places as slots; an error means that the consumer was dropped.
                if self.output.try_send(delivery).is_err() {
                    tracing::debug!(
                        "a message came after its consumer was dropped; it is delivered again later"
                    );
                }
            }
            Err(error) => {
                let bus = self.bus.clone();
                // In its own task: publishing the letter may take long, and others' messages must
                // not wait for it.
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

    /// Unsubscribes and gives back what was on its way.
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
