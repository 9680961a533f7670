//! The cache of connections.

use std::time::Duration;

use super::*;
use crate::PoolOptions;

async fn pid(store: &Store) -> i32 {
    sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&store.pool).await.expect("a statement")
}

#[tokio::test]
async fn cached_connections_are_available_to_transactions() {
    let f = Fixture::new().await;
    let options = PoolOptions {
        max_connections: 2,
        acquire_timeout: Duration::from_secs(2),
        // A connection whose statement was canceled returns when the server has ended the
        // statement: well before the acquire timeout.
        statement_timeout: Duration::from_millis(500),
        ..PoolOptions::default()
    };
    let store = Store::connect(f.database.url(), options).await.expect("connected");
    for _ in 0..3 {
        // Sequential statements share one connection.
        let used = pid(&store).await;
        for _ in 0..5 {
            assert_eq!(pid(&store).await, used);
        }
        let first = store.pool.begin().await.expect("the other one");
        let second = store.pool.begin().await.expect("the one that was kept");
        assert!(matches!(store.ping().await, Err(Error::Unavailable(_))), "there is no third");
        drop((first, second));
        store.ping().await.expect("they are back");
        // A failed or canceled statement does not affect the next one.
        let failed: Result<i32, _> =
            sqlx::query_scalar("SELECT 1 / 0").fetch_one(&store.pool).await;
        failed.expect_err("it cannot be done");
        let slow = sqlx::query("SELECT pg_sleep(60)").execute(&store.pool);
        tokio::time::timeout(Duration::from_millis(10), slow).await.expect_err("it is slow");
        store.ping().await.expect("another one is free");
    }
    store.close().await;
    store.ping().await.expect_err("it is closed");
}
