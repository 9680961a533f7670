//! Documents as they change. What is told is read from the rows; other gateways only say when to
//! look.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use construct_bus::subject;
use construct_domain::{OrganizationId, UserId};
use construct_proto::{
    mesh::v1::StateChanged,
    v1::{StateEvent, WatchStatesRequest},
};
use futures::{StreamExt as _, stream::BoxStream};
use tonic::{Request, Response, Status};

use super::{id, owner, show};
use crate::{
    api::{Api, Backend},
    status,
    validate::requests,
    watch_stream::{self, Client, Events},
};

/// Events on their way to one client.
const BUFFER: usize = 1;
/// How soon is looked when the mesh says nothing, as when NATS is away.
const LOOK: Duration = Duration::from_secs(5);

/// Which version of each document that is watched the client has; 0: none.
type Known = BTreeMap<&'static str, i64>;

pub(super) async fn begin(
    api: &Api,
    request: Request<WatchStatesRequest>,
) -> Result<Response<Events<StateEvent>>, Status> {
    let (context, request) = api.begin_unchecked_request(request)?;
    let known = requests::watch_states(&request)?;
    let organization = context.organization();
    let watched = Watched { organization, owner: owner(&context, request.shared) };
    let (bus, address) = (context.backend.publisher.bus(), subject::StateUpdate { organization });
    let follow =
        |backend, news, client| async move { watched.follow(&backend, known, news, &client).await };
    watch_stream::begin(
        (api, &context),
        ("watch of documents", BUFFER),
        bus.subscribe_states(&address),
        follow,
    )
    .await
}

/// One set of documents.
struct Watched {
    organization: OrganizationId,
    /// Whose own they are; none: the organization's.
    owner: Option<UserId>,
}

impl Watched {
    async fn follow(
        &self,
        backend: &Arc<Backend>,
        mut known: Known,
        mut news: BoxStream<'static, StateChanged>,
        client: &Client<StateEvent>,
    ) -> Result<(), Status> {
        loop {
            let versions: Vec<_> = known.iter().map(|(name, version)| (*name, *version)).collect();
            let changed =
                backend.store.state_changes(self.organization, self.owner, &versions).await;
            for state in changed.map_err(status::from_store)? {
                if let Some(version) = known.get_mut(state.name.as_str()) {
                    *version = state.version;
                }
                let event = StateEvent { cursor: cursor(&known), state: Some(show(&state)) };
                if client.send(Ok(event)).await.is_err() {
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
