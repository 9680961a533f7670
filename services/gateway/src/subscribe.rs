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

/// Events on their way to one client. Behind them the client's own flow control holds the
/// subscription back; the feed it reads from doesn't wait for it.
const BUFFER: usize = 8;

/// How often a subscription asks whether its caller still may see what it shows.
const LOOK_AGAIN: Duration = Duration::from_secs(15);

/// A stream of events that can be watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Watched {
    organization: OrganizationId,
    /// None: the organization's entities.
    task: Option<TaskId>,
}

impl Watched {
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
        let wanted = requests::subscribe(request)?;
        let share = self.acquire_subscription_permit(context.organization())?;
        let watched = Watched { organization: context.organization(), task: wanted.task };
        // Listening begins before the first read, so that nothing falls between.
        let feed = context.backend.hub.subscribe(watched).await;
        let (merge, deleted) = begin(&context.backend, watched, wanted.cursor).await?;
        let caller = context.caller().clone();
        let (sender, receiver) = mpsc::channel(BUFFER);
        let draining = self.lifecycle().draining();
        let backend = Arc::clone(&context.backend);
        let store = backend.store.clone();
        let (types, scopes) = (wanted.types, Arc::clone(&caller.scopes));
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
            let _share = share;
            tokio::select! {
                () = draining.cancelled() => {}
                // Who connects again is judged again.
                () = until_it_ends(&store, &caller) => {}
                () = subscription.run() => {}
            }
        });
        Ok(Response::new(events(receiver).boxed()))
    }
}

/// Waits until the caller is not who they were any more: the key was revoked, the member removed,
/// the token's time is over.
pub(crate) async fn until_it_ends(store: &Store, caller: &Caller) {
    loop {
        tokio::time::sleep(LOOK_AGAIN).await;
        // A database that is away says nothing about the caller.
        if let Ok(false) = authenticate::holds(store, caller).await {
            return;
        }
    }
}

/// Where a subscription begins, and whether its task is deleted already. "Now" is fixed here,
/// before the client is answered: what it does next it will hear of.
async fn begin(
    backend: &Backend,
    watched: Watched,
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
        Ok(found) => {
            let state = &found.state;
            // The progress of earlier steps is over, however long it is retained.
            let step = state.step.as_ref().map_or(state.steps + 1, |step| step.number);
            let now = || Merge::from_now(found.event_sequence, step, true);
            let mut merge = cursor.map_or_else(now, |cursor| Merge::resume(cursor, true));
            // A cursor that lies ahead is left to the subscription, which looks again and refuses
            // it. A step is counted before its command is sent: without one no worker has said
            // anything yet, and what the first one says is heard.
            if merge.on_head(found.event_sequence).is_ok() && state.steps == 0 {
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
            // Of a deleted task the record that says so stays, and is told to whoever asks.
            let last = Cursor { sequence: head - 1, ..Cursor::BEGINNING };
            Ok((Merge::resume(cursor.unwrap_or(last), true), true))
        }
        Err(error) => Err(status::from_store(error)),
    }
}

/// What the client receives. A subscription that ends without saying why was cut off, by a drain or
/// a defect: the client is told to connect again.
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
                let words =
                    "the gateway is stopping: connect again with the cursor of the last event";
                Some((Err(status::unavailable(words)), None))
            }
        }
    })
}
