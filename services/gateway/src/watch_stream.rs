//! Shared by all watches: events come from rows; the mesh only signals when to read.

use std::{fmt::Display, future::Future, sync::Arc};

use futures::{StreamExt as _, stream, stream::BoxStream};
use tokio::sync::mpsc;
use tonic::{Response, Status};

use crate::{
    api::{Api, Backend, CallerContext},
    status, subscribe,
};

/// The events for one client.
pub(crate) type Events<E> = BoxStream<'static, Result<E, Status>>;

/// The channel to a client.
pub(crate) type Client<E> = mpsc::Sender<Result<E, Status>>;

/// Begins a watch. It uses a subscription permit of the organization. `listen` subscribes to the
/// signals; `follow` reads rows and sends events to the client, with a buffer of `buffer` events,
/// until the client is gone or nothing will follow.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` when the organization has too many subscriptions.
pub(crate) async fn begin<E, N, X, F>(
    (api, context): (&Api, &CallerContext),
    (name, buffer): (&'static str, usize),
    listen: impl Future<Output = Result<BoxStream<'static, N>, X>>,
    follow: impl FnOnce(Arc<Backend>, BoxStream<'static, N>, Client<E>) -> F,
) -> Result<Response<Events<E>>, Status>
where
    E: Send + 'static,
    N: Send + 'static,
    X: Display,
    F: Future<Output = Result<(), Status>> + Send + 'static,
{
    let permit = api.acquire_subscription_permit(context.organization())?;
    let backend = Arc::clone(&context.backend);
    // Subscribes before the first read, so that no change is missed.
    let changes = match listen.await {
        Ok(changes) => changes,
        Err(error) => {
            tracing::debug!(%error, name, "watching without signals of the mesh");
            stream::pending().boxed()
        }
    };
    let (sender, receiver) = mpsc::channel(buffer);
    let (caller, draining, store) =
        (context.caller().clone(), api.lifecycle().draining(), backend.store.clone());
    let following = follow(backend, changes, sender.clone());
    api.lifecycle().spawn_job(name, async move {
        let _permit = permit;
        tokio::select! {
            () = draining.cancelled() => {
                let message = "the gateway is stopping: connect again with the cursor of the last event";
                _ = sender.send(Err(status::unavailable(message))).await;
            }
            // A client that reconnects is authenticated again.
            () = subscribe::wait_for_revocation(&store, &caller) => {}
            () = sender.closed() => {}
            ended = following => {
                if let Err(status) = ended {
                    _ = sender.send(Err(status)).await;
                }
            }
        }
    });
    let events =
        stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
    Ok(Response::new(events.boxed()))
}
