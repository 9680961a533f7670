//! `EventService`: what happens, as it happens, with no gap and no duplicate ([`merge`] says how).

pub(crate) mod cursor;
pub(crate) mod glob;
pub(crate) mod hub;
mod merge;
mod replay_start;
mod replays;
mod subscription;

use std::{sync::Arc, time::Duration};

use construct_bus::Watch;
use construct_domain::{OrganizationId, TaskId};
use construct_proto::v1::{Event, SubscribeRequest, event_service_server::EventService};
use construct_store::{Error, Store, Stream};
use futures::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

use self::{
    cursor::Cursor,
    merge::Merge,
    replay_start::ReplayStart,
    subscription::{Item, Subscription},
};
use crate::{
    api::{Api, Backend},
    caller::Caller,
    identity::authenticate,
    status,
    validate::requests,
};

/// Buffered events of one client. When the buffer is full, the subscription waits for the client;
/// the feed it reads from doesn't.
const BUFFER: usize = 8;

/// How often a subscription checks that its caller still has access.
const ACCESS_CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// The events that a subscription watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct WatchedEvents {
    organization: OrganizationId,
    /// `None`: the organization's entities.
    task: Option<TaskId>,
}

impl WatchedEvents {
    fn stored(self) -> Stream {
        match self.task {
            Some(task) => Stream::task(self.organization, task),
            None => Stream::organization(self.organization),
        }
    }

    fn live(self) -> Watch {
        let organization = self.organization;
        match self.task {
            Some(task) => Watch::Task { organization, task },
            None => Watch::Entities { organization },
        }
    }
}

#[tonic::async_trait]
impl EventService for Api {
    type SubscribeStream = BoxStream<'static, Result<Event, Status>>;

    async fn subscribe(
        &self,
        request: Request<SubscribeRequest>,
    ) -> Result<Response<Self::SubscribeStream>, Status> {
        let (context, request) = self.begin_unchecked_request(request)?;
        let subscription_request = requests::subscribe(request)?;
        let permit = self.acquire_subscription_permit(context.organization())?;
        let watched =
            WatchedEvents { organization: context.organization(), task: subscription_request.task };
        // Subscribes before the first read, so that nothing is missed in between.
        let feed = context.backend.hub.subscribe(watched).await;
        let (merge, deleted) =
            begin(&context.backend, watched, subscription_request.cursor).await?;
        let caller = context.caller().clone();
        let (sender, receiver) = mpsc::channel(BUFFER);
        let draining = self.lifecycle().draining();
        let backend = Arc::clone(&context.backend);
        let store = backend.store.clone();
        let (types, scopes) = (subscription_request.types, Arc::clone(&caller.scopes));
        let (replay_start, answers) = (ReplayStart::default(), self.capacity().answers.clone());
        let subscription = Subscription {
            backend,
            watched,
            merge,
            feed,
            types,
            replay_start,
            answers,
            progress: None,
            records: None,
            scopes,
            deleted,
            out: sender,
        };
        self.lifecycle().spawn_job("subscription", async move {
            let _permit = permit;
            tokio::select! {
                () = draining.cancelled() => {}
                // A client that reconnects is authenticated again.
                () = wait_for_revocation(&store, &caller) => {}
                () = subscription.run() => {}
            }
        });
        Ok(Response::new(events(receiver).boxed()))
    }
}

/// Waits until the caller loses access: the key was revoked, the member removed, or the token
/// expired.
pub(crate) async fn wait_for_revocation(store: &Store, caller: &Caller) {
    loop {
        tokio::time::sleep(ACCESS_CHECK_INTERVAL).await;
        // Without the database, nothing is known about the caller.
        if let Ok(false) = authenticate::is_still_valid(store, caller).await {
            return;
        }
    }
}

/// The begin of a subscription, and whether its task is already deleted. "Now" is fixed here,
/// before the response: the client will receive the events of its next requests.
async fn begin(
    backend: &Backend,
    watched: WatchedEvents,
    cursor: Option<Cursor>,
) -> Result<(Merge, bool), Status> {
    let Some(task) = watched.task else {
        let merge = match cursor {
            Some(cursor) => Merge::resume(cursor, false),
            None => {
                let head =
                    backend.store.event_head(watched.stored()).await.map_err(status::from_store)?;
                Merge::from_now(head, 1, false)
            }
        };
        return Ok((merge, false));
    };
    match backend.store.task_get(watched.organization, task).await {
        Ok(stored) => {
            let state = &stored.state;
            // Progress of earlier steps is never sent, however long it is retained.
            let step = state.step.as_ref().map_or(state.steps + 1, |step| step.number);
            let now = || Merge::from_now(stored.event_sequence, step, true);
            let mut merge = cursor.map_or_else(now, |cursor| Merge::resume(cursor, true));
            // A cursor ahead of the head is left to the subscription, which checks again and
            // refuses it. A step is counted before its command is sent: without a step, no worker
            // has published progress yet, and the first progress will be received.
            if merge.on_head(stored.event_sequence).is_ok() && state.steps == 0 {
                merge.on_progress(Vec::new());
            }
            Ok((merge, false))
        }
        Err(error @ Error::NotFound { .. }) => {
            let head =
                backend.store.event_head(watched.stored()).await.map_err(status::from_store)?;
            if head == 0 {
                return Err(status::for_reference(&task.to_string(), error));
            }
            // The deletion record of a deleted task is kept, and sent to subscribers.
            let last = Cursor { sequence: head - 1, ..Cursor::BEGINNING };
            Ok((Merge::resume(cursor.unwrap_or(last), true), true))
        }
        Err(error) => Err(status::from_store(error)),
    }
}

/// The events for the client. A subscription that ends without a reason was cut off by a drain or a
/// defect: the client is told to reconnect.
fn events(receiver: mpsc::Receiver<Item>) -> impl futures::Stream<Item = Result<Event, Status>> {
    stream::unfold(Some(receiver), async |receiver| {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Some(Item::Event(event, cursor)) => {
                let event = Event { cursor: cursor.to_string(), ..Arc::unwrap_or_clone(event) };
                Some((Ok(event), Some(receiver)))
            }
            Some(Item::End) => None,
            Some(Item::Failed(status)) => Some((Err(status), None)),
            None => {
                let message =
                    "the gateway is stopping: connect again with the cursor of the last event";
                Some((Err(status::unavailable(message)), None))
            }
        }
    })
}
