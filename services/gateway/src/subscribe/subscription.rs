//! One client's subscription: performs the actions of the merge, and sends what it emits.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use construct_bus::Position;
use construct_domain::access::Scope;
use construct_proto::v1::Event;
use construct_store::Error;
use tokio::sync::{broadcast::error::RecvError, mpsc};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use super::{
    WatchedEvents,
    cursor::Cursor,
    glob::Globs,
    hub::FeedSubscription,
    merge::{Action, CursorBeyondHead, LiveItem, Merge},
    replay_start::ReplayStart,
};
use crate::{
    api::Backend,
    events,
    limit::{Holder, Limit, Permit},
    metrics::ActiveSubscription,
    status,
};

/// The most records of a page, and the size after which no further one is read. Each can hold a
/// message of a megabyte.
const PAGE_RECORDS: u32 = 32;
const PAGE_BYTES: u64 = 128 * 1024;
/// Bytes that are reserved before a page is read; what the page does not use is released.
const PAGE_RESERVATION_BYTES: usize = 1280 * 1024;
/// How long a reservation may take: other clients of the organization have to read, or lose their
/// connections.
const RESERVATION_TIMEOUT: Duration = Duration::from_secs(30);
/// How long PostgreSQL may be unavailable before the client is told to reconnect.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(30);
/// The delay between two attempts to read.
const READ_RETRY_DELAY: Duration = Duration::from_millis(500);
/// How long reading retained progress may take.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(5);

/// What goes to the client.
pub(super) enum Item {
    /// With the cursor after it. Copied only for its client: other subscribers may share it.
    Event(Arc<Event>, Cursor),
    /// The stream is complete.
    End,
    Failed(Status),
}

pub(super) struct Subscription {
    pub(super) backend: Arc<Backend>,
    pub(super) watched: WatchedEvents,
    pub(super) merge: Merge,
    pub(super) feed: FeedSubscription,
    pub(super) types: Globs,
    /// Where reads of progress begin.
    pub(super) replay_start: ReplayStart,
    /// The organization's limit of unread answers.
    pub(super) answers: Limit,
    /// Charged for progress that is not sent yet.
    pub(super) progress: Option<Permit>,
    /// Charged for records that are not sent yet.
    pub(super) records: Option<Permit>,
    /// The scopes of the caller.
    pub(super) scopes: Arc<[Scope]>,
    /// The task is deleted already: no further events will follow.
    pub(super) deleted: bool,
    pub(super) out: mpsc::Sender<Item>,
}

/// The client has disconnected.
struct Disconnected;

impl Subscription {
    pub(super) async fn run(mut self) {
        let out = self.out.clone();
        let _watching = ActiveSubscription::begin();
        tokio::select! {
            // Also while there is nothing to send.
            () = out.closed() => {}
            end = self.pump() => {
                if let Ok(item) = end {
                    // Fails when the client has disconnected.
                    _ = out.send(item).await;
                }
            }
        }
    }

    async fn pump(&mut self) -> Result<Item, Disconnected> {
        loop {
            match self.perform_next().await {
                Ok(Some((event, cursor))) => {
                    let last = self.watched.task.is_some() && event.r#type == "task.deleted";
                    // Events of a task need no further scope.
                    let is_permitted = self.watched.task.is_some()
                        || required_scope(&event.r#type).is_within(&self.scopes);
                    if is_permitted && self.types.include(&event.r#type) {
                        self.out
                            .send(Item::Event(event, cursor))
                            .await
                            .map_err(|_| Disconnected)?;
                    }
                    if last {
                        return Ok(Item::End);
                    }
                }
                Ok(None) if self.deleted && self.merge.is_live() => return Ok(Item::End),
                Ok(None) => {}
                Err(status) => return Ok(Item::Failed(status)),
            }
        }
    }

    /// Performs the next action of the merge; returns the event that it emits.
    async fn perform_next(&mut self) -> Result<Option<(Arc<Event>, Cursor)>, Status> {
        let store = &self.backend.store;
        let stream = self.watched.stored();
        match self.merge.next_action() {
            Action::Emit(event, cursor) => return Ok(Some((event, cursor))),
            Action::ReadHead => {
                let head = read_with_retries(|| store.event_head(stream)).await?;
                self.merge.on_head(head).map_err(|CursorBeyondHead| {
                    let message = "is after the end of this stream: it belongs to another stream";
                    let details = ErrorDetails::with_bad_request_violation("cursor", message);
                    Status::with_error_details(
                        Code::InvalidArgument,
                        format!("cursor: {message}"),
                        details,
                    )
                })?;
            }
            Action::ReadProgress(after) => {
                let progress = self.read_progress(after).await;
                self.merge.on_progress(progress);
            }
            Action::ReadRecords(after) => {
                self.wait_until_sent().await?;
                self.records = None;
                let mut permit = self.reserve_page().await?;
                let store = &self.backend.store;
                let stored = read_with_retries(|| {
                    store.events_after(stream, after, PAGE_RECORDS, PAGE_BYTES)
                })
                .await?;
                let bytes: usize = stored.iter().map(|event| event.payload.len()).sum();
                permit.shrink(PAGE_RESERVATION_BYTES.saturating_sub(bytes));
                self.records = Some(permit);
                let records: Result<Vec<Event>, _> = stored.iter().map(events::read).collect();
                self.merge.on_records(
                    records.map_err(|error| {
                        status::internal("a stored event cannot be read", &error)
                    })?,
                );
            }
            Action::ReceiveLive => {
                self.wait_until_sent().await?;
                (self.records, self.progress) = (None, None);
                self.replay_start.on_live(self.merge.cursor(), self.feed.stream_ends());
                match self.feed.live.recv().await {
                    Ok(live) => self.merge.on_live(live),
                    // Too slow for the feed's buffer: what was missed is read again from the cursor
                    // of this client.
                    Err(RecvError::Lagged(_)) => self.merge.on_live(LiveItem::Lost),
                    Err(RecvError::Closed) => {
                        return Err(status::unavailable(
                            "the gateway is stopping: connect again with the cursor",
                        ));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Waits until the client has received everything so far. Its permits can then be released.
    async fn wait_until_sent(&mut self) -> Result<(), Status> {
        if self.records.is_some() || self.progress.is_some() {
            // Fails when the client has disconnected; then nobody receives the status.
            let reserved = self.out.reserve_many(self.out.max_capacity()).await;
            reserved.map_err(|_| Status::cancelled("the client has disconnected"))?;
        }
        Ok(())
    }

    /// Reserves memory for a page of records.
    async fn reserve_page(&self) -> Result<Permit, Status> {
        let waiting = self.answers.wait(self.holder(), PAGE_RESERVATION_BYTES);
        tokio::time::timeout(RESERVATION_TIMEOUT, waiting).await.map_err(|_| {
            status::exhausted(
                "the organization leaves too many answers unread: connect again with the cursor",
            )
        })
    }

    fn holder(&self) -> Holder {
        Holder::Organization(self.watched.organization)
    }

    /// The retained progress. While NATS is unavailable there is none: records continue without it,
    /// because they have everything that is durable, and this client loses the progress meanwhile.
    async fn read_progress(&mut self, after: Option<Position>) -> Vec<Event> {
        let Some(task) = self.watched.task else { return Vec::new() };
        let hub = &self.backend.hub;
        if !hub.bus().is_connected() {
            return Vec::new();
        }
        // Unsent progress of an earlier read is discarded for this one.
        self.progress = None;
        let (organization, from) = (self.watched.organization, self.replay_start.position());
        let replay = hub.replays.read(hub.bus(), &self.answers, organization, task, after, from);
        match tokio::time::timeout(PROGRESS_TIMEOUT, replay).await {
            Ok(Ok((replay, permit))) => {
                self.progress = permit;
                self.replay_start.on_read(replay.until);
                replay.events
            }
            Ok(Err(error)) => {
                tracing::warn!(%task, error = status::chain(&error), "retained progress cannot be read");
                Vec::new()
            }
            Err(_) => {
                tracing::warn!(%task, "reading retained progress took too long");
                Vec::new()
            }
        }
    }
}

/// The scope that an event of the organization needs: the same as reading its entity.
fn required_scope(kind: &str) -> Scope {
    match kind.split('.').next().unwrap_or_default() {
        "agent" => Scope::AgentsRead,
        "model" | "provider" => Scope::ModelsRead,
        "budget" => Scope::BudgetsRead,
        "secret" => Scope::SecretsRead,
        "task" | "schedule" | "message" | "approval" => Scope::TasksRead,
        // Events of unknown kinds are for administrators only.
        _ => Scope::Admin,
    }
}

/// Reads from the store with retries: a restart of PostgreSQL should not end every subscription.
async fn read_with_retries<T, F: Future<Output = Result<T, Error>>>(
    attempt: impl Fn() -> F,
) -> Result<T, Status> {
    let begun = Instant::now();
    loop {
        match attempt().await {
            Ok(value) => return Ok(value),
            Err(error) if error.is_retryable() && begun.elapsed() < DATABASE_TIMEOUT => {
                tokio::time::sleep(READ_RETRY_DELAY).await
            }
            Err(error) => return Err(status::from_store(error)),
        }
    }
}
