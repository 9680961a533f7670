//! Streams changes of documents. They are read from the database; the bus only signals changes.

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

/// Buffered events of one client.
const BUFFER: usize = 1;
/// How often the documents are read without a signal, as when NATS is unavailable.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// The version of each watched document that the client has; 0 means none.
type DeliveredVersions = BTreeMap<&'static str, i64>;

pub(super) async fn begin(
    api: &Api,
    request: Request<WatchStatesRequest>,
) -> Result<Response<Events<StateEvent>>, Status> {
    let (context, request) = api.begin_unchecked_request(request)?;
    let delivered = requests::watch_states(&request)?;
    let organization = context.organization();
    let watched = WatchedDocuments { organization, owner: owner(&context, request.shared) };
    let (bus, address) = (context.backend.publisher.bus(), subject::StateUpdate { organization });
    let follow = |backend, changes, client| async move {
        watched.follow(&backend, delivered, changes, &client).await
    };
    watch_stream::begin(
        (api, &context),
        ("watch of documents", BUFFER),
        bus.subscribe_states(&address),
        follow,
    )
    .await
}

/// The watched set of documents.
struct WatchedDocuments {
    organization: OrganizationId,
    /// The user who owns them; `None`: shared in the organization.
    owner: Option<UserId>,
}

impl WatchedDocuments {
    async fn follow(
        &self,
        backend: &Arc<Backend>,
        mut delivered: DeliveredVersions,
        mut changes: BoxStream<'static, StateChanged>,
        client: &Client<StateEvent>,
    ) -> Result<(), Status> {
        loop {
            let versions: Vec<_> =
                delivered.iter().map(|(name, version)| (*name, *version)).collect();
            let changed =
                backend.store.state_changes(self.organization, self.owner, &versions).await;
            for state in changed.map_err(status::from_store)? {
                if let Some(version) = delivered.get_mut(state.name.as_str()) {
                    *version = state.version;
                }
                let event = StateEvent { cursor: cursor(&delivered), state: Some(show(&state)) };
                if client.send(Ok(event)).await.is_err() {
                    return Ok(());
                }
            }
            let poll = tokio::time::sleep(POLL_INTERVAL);
            tokio::pin!(poll);
            loop {
                tokio::select! {
                    Some(changed) = changes.next() => if self.is_affected_by(&changed) { break },
                    () = &mut poll => break,
                }
            }
        }
    }

    fn is_affected_by(&self, changed: &StateChanged) -> bool {
        self.owner.map(|owner| owner.to_string()).unwrap_or_default() == changed.user_id
    }
}

/// The cursor of what the client has, e.g. `pinned@2,settings@7`.
fn cursor(delivered: &DeliveredVersions) -> String {
    let names = delivered.iter().filter(|(_, version)| **version > 0);
    names.map(|(name, version)| id(name, *version)).collect::<Vec<_>>().join(",")
}
