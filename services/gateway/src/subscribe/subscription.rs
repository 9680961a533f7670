//! One client's subscription: does what the merge wants, and sends what it emits.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use construct_bus::Position;
use construct_domain::access::Scope;
use construct_proto::v1::Event;
use construct_store::Error;
use tokio::sync::{OwnedSemaphorePermit, broadcast::error::RecvError, mpsc};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use super::{
    Watched,
    cursor::Cursor,
    glob::Globs,
    hub::Joined,
    marks::Marks,
    merge::{Ahead, Live, Merge, Want},
};
use crate::{api::Backend, events, metrics::Watching, status};

/// Records read at once. Each can hold a message of a megabyte, so this bounds a catching-up
/// client's memory.
const PAGE: u32 = 32;
/// How long PostgreSQL may be away before the client is told to come back.
const PATIENCE: Duration = Duration::from_secs(30);
/// The pause between two attempts to read.
const PAUSE: Duration = Duration::from_millis(500);
/// How long reading retained progress may take.
const PROGRESS_PATIENCE: Duration = Duration::from_secs(5);

/// What goes to the client.
pub(super) enum Item {
    /// With the place behind it. Copied only for its client: others may watch it as well.
    Event(Arc<Event>, Cursor),
    /// There will be no more.
    End,
    Failed(Status),
}

pub(super) struct Subscription {
    pub(super) backend: Arc<Backend>,
    pub(super) watched: Watched,
    pub(super) merge: Merge,
    pub(super) joined: Joined,
    pub(super) types: Globs,
    /// From where the progress is read.
    pub(super) marks: Marks,
    /// Of the progress that is still to be sent.
    pub(super) place: Option<OwnedSemaphorePermit>,
    /// What the caller may read.
    pub(super) scopes: Arc<[Scope]>,
    /// The task is deleted already: what there is, is all.
    pub(super) deleted: bool,
    pub(super) out: mpsc::Sender<Item>,
}

/// The client is gone.
struct Gone;

impl Subscription {
    pub(super) async fn run(mut self) {
        let out = self.out.clone();
        let _watching = Watching::begin();
        tokio::select! {
            // Also while nothing happens that could be sent.
            () = out.closed() => {}
            end = self.pump() => {
                if let Ok(item) = end {
                    // The client may be gone by now; then nobody is interested.
                    _ = out.send(item).await;
                }
            }
        }
    }

    async fn pump(&mut self) -> Result<Item, Gone> {
        loop {
            match self.turn().await {
                Ok(Some((event, cursor))) => {
                    let last = self.watched.task.is_some() && event.r#type == "task.deleted";
                    // What happens in a task is the task's.
                    let theirs = self.watched.task.is_some()
                        || needed(&event.r#type).is_within(&self.scopes);
                    if theirs && self.types.want(&event.r#type) {
                        self.out.send(Item::Event(event, cursor)).await.map_err(|_| Gone)?;
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

    /// Does the next thing.
    async fn turn(&mut self) -> Result<Option<(Arc<Event>, Cursor)>, Status> {
        let store = &self.backend.store;
        let stream = self.watched.stored();
        match self.merge.want() {
            Want::Emit(event, cursor) => return Ok(Some((event, cursor))),
            Want::ReadHead => {
                let head = read(|| store.event_head(stream)).await?;
                self.merge.on_head(head).map_err(|Ahead| {
                    let words = "lies behind the end of this stream: it belongs to another one";
                    let details = ErrorDetails::with_bad_request_violation("cursor", words);
                    Status::with_error_details(
                        Code::InvalidArgument,
                        format!("cursor: {words}"),
                        details,
                    )
                })?;
            }
            Want::ReadProgress(after) => {
                let progress = self.progress(after).await;
                self.merge.on_progress(progress);
            }
            Want::ReadRecords(after) => {
                let stored = read(|| store.events_after(stream, after, PAGE)).await?;
                let records: Result<Vec<Event>, _> = stored.iter().map(events::read).collect();
                self.merge.on_records(
                    records.map_err(|error| {
                        status::internal("a stored event cannot be read", &error)
                    })?,
                );
            }
            Want::Live => {
                self.place = None;
                self.marks.live(self.merge.cursor(), self.joined.past());
                match self.joined.live.recv().await {
                    Ok(live) => self.merge.on_live(live),
                    // Too slow for the feed's buffer: what was missed is read again from where this
                    // client stands.
                    Err(RecvError::Lagged(_)) => self.merge.on_live(Live::Lost),
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

    /// The retained progress. While NATS is away there is none to be had: records go on without it,
    /// because they tell everything that lasts, and what was said meanwhile is lost to this client.
    async fn progress(&mut self, after: Option<Position>) -> Vec<Event> {
        let Some(task) = self.watched.task else { return Vec::new() };
        let hub = &self.backend.hub;
        if !hub.bus().is_connected() {
            return Vec::new();
        }
        // What was to be sent of an earlier one is given up for this one.
        self.place = None;
        let replay =
            hub.replays.read(hub.bus(), self.watched.organization, task, after, self.marks.start());
        match tokio::time::timeout(PROGRESS_PATIENCE, replay).await {
            Ok(Ok((replay, place))) => {
                self.place = place;
                self.marks.read(replay.until);
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

/// What one needs to be told of an event of the organization: the same as to read what it is about.
fn needed(kind: &str) -> Scope {
    match kind.split('.').next().unwrap_or_default() {
        "agent" => Scope::AgentsRead,
        "model" | "provider" => Scope::ModelsRead,
        "budget" => Scope::BudgetsRead,
        "secret" => Scope::SecretsRead,
        "task" | "schedule" | "message" | "approval" => Scope::TasksRead,
        // Of a kind that is not known here nobody else is told.
        _ => Scope::Admin,
    }
}

/// Reads from the store, patiently: a restart of PostgreSQL should not end every subscription.
async fn read<T, F: Future<Output = Result<T, Error>>>(
    attempt: impl Fn() -> F,
) -> Result<T, Status> {
    let begun = Instant::now();
    loop {
        match attempt().await {
            Ok(value) => return Ok(value),
            Err(error) if error.is_retryable() && begun.elapsed() < PATIENCE => {
                tokio::time::sleep(PAUSE).await
            }
            Err(error) => return Err(status::of_store(error)),
        }
    }
}
