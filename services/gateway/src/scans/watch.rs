//! Streams the events of a scan. They are read from the database; the bus only signals changes.

use std::{sync::Arc, time::Duration};

use construct_bus::{Address as _, RawMessage, subject};
use construct_domain::{OrganizationId, ScanId};
use construct_proto::v1::{ScanEvent, WatchScanRequest};
use construct_wire::scan as show;
use futures::{StreamExt as _, stream::BoxStream};
use tonic::{Request, Response, Status};

use super::find_scan;
use crate::{
    api::{Api, Backend},
    status,
    validate::requests,
    watch_stream::{self, Client, Events},
};

/// Buffered events of one client.
const BUFFER: usize = 8;
/// Events read at once.
const EVENTS: i64 = 100;
/// How often a scan is read without a signal, as when NATS is unavailable.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

pub(super) async fn begin(
    api: &Api,
    request: Request<WatchScanRequest>,
) -> Result<Response<Events<ScanEvent>>, Status> {
    let (context, request) = api.begin_unchecked_request(request)?;
    let (scan, after) = requests::watch_scan(&request)?;
    find_scan(&context, &request.scan, scan).await?;
    let organization = context.organization();
    let subject = subject::ScanUpdate { organization, scan }.subject();
    let listen = context.backend.publisher.bus().tap(&subject);
    let follow = move |backend, changes, client| {
        follow(backend, (organization, scan), after, changes, client)
    };
    watch_stream::begin((api, &context), ("watch of a scan", BUFFER), listen, follow).await
}

async fn follow(
    backend: Arc<Backend>,
    (organization, id): (OrganizationId, ScanId),
    mut after: i64,
    mut changes: BoxStream<'static, RawMessage>,
    client: Client<ScanEvent>,
) -> Result<(), Status> {
    loop {
        // In this order: a scan that is over has all its events.
        let scan = backend.store.scan_get(organization, id).await.map_err(status::from_store)?;
        let events = backend
            .store
            .scan_events(organization, id, after, EVENTS)
            .await
            .map_err(status::from_store)?;
        let found = !events.is_empty();
        for event in &events {
            after = event.sequence;
            if client.send(Ok(show::event(organization, id, event))).await.is_err() {
                return Ok(());
            }
        }
        if scan.phase.is_over() && after >= scan.event_sequence {
            return Ok(());
        }
        if !found {
            tokio::select! {
                Some(_) = changes.next() => {}
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }
}
