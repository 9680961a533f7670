//! Answers which tasks are deleted, for services that keep data of tasks.

use construct_bus::{Bus, subject, subscribe};
use construct_domain::TaskId;
use construct_proto::mesh::v1 as mesh;
use construct_runtime::telemetry::Chain;
use construct_store::Store;
use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

/// Answers until the service drains.
pub(crate) async fn answer(
    store: Store,
    bus: Bus,
    stop: CancellationToken,
) -> Result<(), subscribe::Error> {
    let deleted = move |census| {
        let store = store.clone();
        Box::pin(async move { find_deleted(&store, census).await }) as BoxFuture<'static, _>
    };
    bus.answer(&subject::Census, stop, deleted).await
}

/// Returns no answer when it cannot be found out: then nothing may be removed.
async fn find_deleted(store: &Store, census: mesh::TaskCensus) -> Option<mesh::DeletedTasks> {
    // Ids that are not task ids are ignored.
    let tasks: Vec<TaskId> = census.task_ids.iter().filter_map(|id| id.parse().ok()).collect();
    match store.tasks_purged(&tasks).await {
        Ok(deleted) => {
            Some(mesh::DeletedTasks { task_ids: deleted.iter().map(ToString::to_string).collect() })
        }
        Err(error) => {
            tracing::warn!(error = %Chain(&error), "a question about deleted tasks is not answered");
            None
        }
    }
}
