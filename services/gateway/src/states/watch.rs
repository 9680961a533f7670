//! Documents as they change. What is told is read from the rows; other gateways only say when to look.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use construct_bus::subject;
use construct_domain::{OrganizationId, UserId};
use construct_proto::{
    mesh::v1::StateChanged,
    v1::{StateEvent, WatchStatesRequest},
};
use futures::{StreamExt as _, stream, stream::BoxStream};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

use super::{id, owner, show};
use crate::{
    api::{Api, Backend},
    status, subscribe,
    validate::requests,
};

/// Events on their way to one client.
const BUFFER: usize = 1;
/// How soon is looked when the mesh says nothing, as when NATS is away.
const LOOK: Duration = Duration::from_secs(5);

type Events = BoxStream<'static, Result<StateEvent, Status>>;

/// Which version of each document that is watched the client has; 0: none.
type Known = BTreeMap<&'static str, i64>;

pub(super) async fn begin(api: &Api, request: Request<WatchStatesRequest>) -> Result<Response<Events>, Status> {
    let (entry, request) = api.enter(request)?;
    let known = requests::watch_states(&request)?;
    let permit = api.subscription(entry.organization())?;
    let (organization, backend) = (entry.organization(), Arc::clone(&entry.backend));
    let watched = Watched { organization, owner: owner(&entry, request.shared) };
    // Listening begins before the first read, so that nothing is waited for that has happened.
    let news = match backend.publisher.bus().hear_states(&subject::StateNews { organization }).await {
        Ok(news) => news,
        Err(error) => {
            tracing::debug!(%error, "documents are watched without the mesh");
            stream::pending().boxed()
        }
    };
    let (sender, receiver) = mpsc::channel(BUFFER);
    let (caller, draining) = (entry.caller().clone(), api.lifecycle().draining());
    api.lifecycle().spawn_job("watch of documents", async move {
        let _permit = permit;
        let store = backend.store.clone();
        tokio::select! {
            () = draining.cancelled() => {
                let words = "the gateway is stopping: connect again with the cursor of the last event";
                _ = sender.send(Err(status::unavailable(words))).await;
            }
            // Who connects again is judged again.
            () = subscribe::until_it_ends(&store, &caller) => {}
            () = sender.closed() => {}
            Err(status) = watched.follow(&backend, known, news, &sender) => {
                _ = sender.send(Err(status)).await;
            }
        }
    });
    let events = stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
    Ok(Response::new(events.boxed()))
}

/// One set of documents.
struct Watched {
    organization: OrganizationId,
    /// Whose own they are; none: the organisation's.
    owner: Option<UserId>,
}

impl Watched {
    async fn follow(
        &self,
        backend: &Backend,
        mut known: Known,
        mut news: BoxStream<'static, StateChanged>,
        sender: &mpsc::Sender<Result<StateEvent, Status>>,
    ) -> Result<(), Status> {
        loop {
            let versions: Vec<_> = known.iter().map(|(name, version)| (*name, *version)).collect();
            let changed = backend.store.state_changes(self.organization, self.owner, &versions).await;
            for state in changed.map_err(status::of_store)? {
                if let Some(version) = known.get_mut(state.name.as_str()) {
                    *version = state.version;
                }
                let event = StateEvent { cursor: cursor(&known), state: Some(show(&state)) };
                if sender.send(Ok(event)).await.is_err() {
                    return Ok(());
                }
            }
            let look = tokio::time::sleep(LOOK);
            tokio::pin!(look);
            loop {
                tokio::select! {
                    Some(changed) = news.next() => if self.concerns(&changed) { break },
                    () = &mut look => break,
                }
            }
        }
    }

    fn concerns(&self, changed: &StateChanged) -> bool {
        self.owner.map(|owner| owner.to_string()).unwrap_or_default() == changed.user_id
    }
}

/// `pinned@2,settings@7`, of what the client has.
fn cursor(known: &Known) -> String {
    let has = known.iter().filter(|(_, version)| **version > 0);
    has.map(|(name, version)| id(name, *version)).collect::<Vec<_>>().join(",")
}
