//! What happens in a scan, as it happens: read from its events. The mesh only says when to look.

use std::{sync::Arc, time::Duration};

use construct_bus::{Address as _, RawMessage, subject};
use construct_domain::{OrganizationId, ScanId};
use construct_proto::v1::{ScanEvent, WatchScanRequest};
use construct_wire::scan as show;
use futures::{StreamExt as _, stream, stream::BoxStream};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

use super::find;
use crate::{
    api::{Api, Backend},
    status, subscribe,
    validate::requests,
};

/// Events on their way to one client.
const BUFFER: usize = 8;
/// Events read at once.
const EVENTS: i64 = 100;
/// How soon a scan is looked at of which the mesh says nothing, as when NATS is away.
const LOOK: Duration = Duration::from_secs(2);

type Events = BoxStream<'static, Result<ScanEvent, Status>>;

pub(super) async fn begin(api: &Api, request: Request<WatchScanRequest>) -> Result<Response<Events>, Status> {
    let (entry, request) = api.enter(request)?;
    let (scan, after) = requests::watch_scan(&request)?;
    find(&entry, &request.scan, scan).await?;
    let permit = api.subscription(entry.organization())?;
    let (organization, backend) = (entry.organization(), Arc::clone(&entry.backend));
    let address = subject::ScanNews { organization, scan };
    // Listening begins before the first read, so that nothing is waited for that has happened.
    let news = match backend.publisher.bus().tap(&address.subject()).await {
        Ok(news) => news,
        Err(error) => {
            tracing::debug!(%error, "a scan is watched without the mesh");
            stream::pending().boxed()
        }
    };
    let (sender, receiver) = mpsc::channel(BUFFER);
    let (caller, draining) = (entry.caller().clone(), api.lifecycle().draining());
    api.lifecycle().spawn_job("watch of a scan", async move {
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
            ended = follow(&backend, (organization, scan), after, news, &sender) => {
                if let Err(status) = ended {
                    _ = sender.send(Err(status)).await;
                }
            }
        }
    });
    let events = stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
    Ok(Response::new(events.boxed()))
}

async fn follow(
    backend: &Backend,
    (organization, id): (OrganizationId, ScanId),
    mut after: i64,
    mut news: BoxStream<'static, RawMessage>,
    sender: &mpsc::Sender<Result<ScanEvent, Status>>,
) -> Result<(), Status> {
    loop {
        // In this order: of a scan that is over, all events are there.
        let scan = backend.store.scan_get(organization, id).await.map_err(status::of_store)?;
        let events = backend.store.scan_events(organization, id, after, EVENTS).await.map_err(status::of_store)?;
        let found = !events.is_empty();
        for event in &events {
            after = event.sequence;
            if sender.send(Ok(show::event(organization, id, event))).await.is_err() {
                return Ok(());
            }
        }
        if scan.phase.is_over() && after >= scan.event_sequence {
            return Ok(());
        }
        if !found {
            tokio::select! {
                Some(_) = news.next() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }
}
