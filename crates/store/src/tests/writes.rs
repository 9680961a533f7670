//! Idempotency, and starting up.

use futures::future::join_all;

use super::*;
use crate::{PoolOptions, Stream};

#[tokio::test]
async fn repeated_request_returns_the_first_response() {
    let f = Fixture::new().await;
    let write = write_with_key("key", 1);
    let first = applied(
        f.store
            .task_create(&write, new_task(f.agent), rendered("task.created"))
            .await
            .expect("created"),
    );
    let again = f
        .store
        .task_create(&write, new_task(f.agent), rendered("task.created"))
        .await
        .expect("repeated");
    let WriteOutcome::Repeated { response } = again else { panic!("it was carried out twice") };
    assert_eq!(response, format!("{first:?}").into_bytes());
    let other = f
        .store
        .task_create(&write_with_key("key", 2), new_task(f.agent), rendered("task.created"))
        .await;
    assert!(matches!(other, Err(Error::IdempotencyMismatch)), "{other:?}");
    let mut method = write_with_key("key", 1);
    method.idempotency.as_mut().expect("it has one").method = "Other";
    let other = f.store.task_create(&method, new_task(f.agent), rendered("task.created")).await;
    assert!(matches!(other, Err(Error::IdempotencyMismatch)), "{other:?}");
}

#[tokio::test]
async fn concurrent_requests_with_one_key_execute_once() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let results = join_all((0..15).map(|_| {
        let store = f.store.clone();
        async move {
            let new =
                NewUserMessage { id: message_id(), task, content: text("x"), interrupts: false };
            store
                .message_create(&write_with_key("key", 1), new, rendered("message.created"))
                .await
                .expect("answered")
        }
    }))
    .await;
    let mut carried_out = Vec::new();
    let mut answers = Vec::new();
    for result in results {
        match result {
            // The arrival is unknown when a message is rendered.
            WriteOutcome::Applied { entity, .. } => {
                assert!(entity.arrival > 0);
                carried_out
                    .push(format!("{:?}", StoredMessage { arrival: 0, ..entity }).into_bytes());
            }
            WriteOutcome::Repeated { response } => answers.push(response),
        }
    }
    assert_eq!((carried_out.len(), answers.len()), (1, 14));
    assert!(answers.iter().all(|answer| *answer == carried_out[0]));
    assert_eq!(f.store.task_get(ORG, task).await.expect("got").queued_count, 1);
}

#[tokio::test]
async fn failed_request_releases_its_idempotency_key() {
    let f = Fixture::new().await;
    let write = write_with_key("key", 1);
    let taken =
        f.store.agent_create(&write, new_agent(f.model, "a"), rendered("agent.created")).await;
    assert!(matches!(taken, Err(Error::AlreadyExists { .. })), "{taken:?}");
    applied(
        f.store
            .agent_create(&write, new_agent(f.model, "b"), rendered("agent.created"))
            .await
            .expect("created"),
    );
}

#[tokio::test]
async fn expired_idempotency_key_is_reusable() {
    let f = Fixture::new().await;
    let write = write_with_key("key", 1);
    applied(
        f.store
            .task_create(&write, new_task(f.agent), rendered("task.created"))
            .await
            .expect("created"),
    );
    assert_eq!(f.store.idempotency_expire(write.now).await.expect("expired"), 0);
    assert_eq!(
        f.store
            .idempotency_expire(now() + std::time::Duration::from_secs(1))
            .await
            .expect("expired"),
        1
    );
    applied(
        f.store
            .task_create(&write, new_task(f.agent), rendered("task.created"))
            .await
            .expect("created"),
    );
}

#[tokio::test]
async fn idempotency_keys_are_scoped_to_the_organization() {
    let f = Fixture::new().await;
    let other = other_organization(&f.store).await;
    let mine = write_with_key("key", 1);
    let theirs = Write { organization: other, ..write_with_key("key", 2) };
    applied(
        f.store
            .model_provider_create(&mine, new_provider("q"), rendered("provider.created"))
            .await
            .expect("created"),
    );
    applied(
        f.store
            .model_provider_create(&theirs, new_provider("q"), rendered("provider.created"))
            .await
            .expect("created"),
    );
    assert_eq!(f.store.event_head(Stream::organization(other)).await.expect("read"), 1);
}

#[tokio::test]
async fn concurrent_migrations_succeed() {
    let database = Database::new().await;
    sqlx::query("DROP SCHEMA public CASCADE")
        .execute(&database.store().pool)
        .await
        .expect("dropped");
    sqlx::query("CREATE SCHEMA public").execute(&database.store().pool).await.expect("created");
    let results = join_all((0..4).map(|_| async {
        let store = database.connect(PoolOptions::default()).await;
        store.migrate().await
    }))
    .await;
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    database.store().ping().await.expect("it answers");
}

#[tokio::test]
async fn statement_timeout_is_a_retryable_error() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let options = PoolOptions {
        statement_timeout: std::time::Duration::from_millis(50),
        ..PoolOptions::default()
    };
    let hasty = f.database.connect(options).await;
    let mut blocker = f.store.pool.begin().await.expect("begun");
    sqlx::query("SELECT 1 FROM tasks WHERE id = $1 FOR UPDATE")
        .bind(task.uuid())
        .execute(&mut *blocker)
        .await
        .expect("locked");
    let result = hasty.task_suspend(&write(), task, rendered("task.updated")).await;
    assert!(matches!(&result, Err(error) if error.is_retryable()), "{result:?}");
    blocker.rollback().await.expect("unlocked");
    applied(hasty.task_suspend(&write(), task, rendered("task.updated")).await.expect("suspended"));
}

#[tokio::test]
async fn unreachable_server_error_is_retryable_without_password() {
    let options = PoolOptions {
        acquire_timeout: std::time::Duration::from_millis(200),
        ..PoolOptions::default()
    };
    let error = Store::connect("postgres://user:hunter2@127.0.0.1:1/x", options)
        .await
        .expect_err("nobody listens there");
    assert!(error.is_retryable());
    assert!(!format!("{error:?}").contains("hunter2"));
    let error =
        Store::connect("hunter2://", PoolOptions::default()).await.expect_err("that is no address");
    assert!(!error.is_retryable());
    assert!(!format!("{error:?}").contains("hunter2"));
}
