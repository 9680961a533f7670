//! What all watches have in common: what they tell is read from rows, and the mesh only says when
//! to look.

use std::{fmt::Display, future::Future, sync::Arc};

use futures::{StreamExt as _, stream, stream::BoxStream};
use tokio::sync::mpsc;
use tonic::{Response, Status};

use crate::{
    api::{Api, Backend, CallerContext},
    status, subscribe,
};

/// What one client is told.
pub(crate) type Events<E> = BoxStream<'static, Result<E, Status>>;

/// A client that is told something.
pub(crate) type Client<E> = mpsc::Sender<Result<E, Status>>;

/// Begins a watch of this name, which takes a place of the organization's subscriptions. `listen`
/// hears when to look, `follow` looks and tells the client, of whom `buffer` events are on their
/// way, until the client is gone or there is nothing more to tell.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` when the organization has no place left.
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
    // Listening begins before the first read, so that nothing is waited for that has happened.
    let news = match listen.await {
        Ok(news) => news,
        Err(error) => {
            tracing::debug!(%error, name, "something is watched without the mesh");
            stream::pending().boxed()
        }
    };
    let (sender, receiver) = mpsc::channel(buffer);
    let (caller, draining, store) =
        (context.caller().clone(), api.lifecycle().draining(), backend.store.clone());
    let following = follow(backend, news, sender.clone());
    api.lifecycle().spawn_job(name, async move {
        let _permit = permit;
        tokio::select! {
            () = draining.cancelled() => {
                let message = "the gateway is stopping: connect again with the cursor of the last event";
                _ = sender.send(Err(status::unavailable(message))).await;
            }
            // Who connects again is judged again.
            () = subscribe::until_it_ends(&store, &caller) => {}
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
