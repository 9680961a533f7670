//! The connection pool, with a cache of recently used connections.
//!
//! sqlx pings the server whenever a connection returns to its pool, and hands out the one that was
//! idle longest. A task would need as many pings as statements, and would go through the caches of
//! every connection. So a connection that has just executed a statement goes to the next statement
//! instead, the most recent one first.
//!
//! sqlx does everything else: the number and age of connections, and the handling of connections
//! whose statement failed or was canceled.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{
    StreamExt as _, TryStreamExt as _,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use sqlx::{
    Describe, Either, Execute, Executor, PgPool, Postgres, SqlStr, Transaction,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgQueryResult, PgRow, PgStatement, PgTypeInfo},
};

/// How long a connection may be idle before it is pinged again. If the server disappears within
/// this time, the statement fails with [`Error::Unavailable`](crate::Error::Unavailable), as it
/// does when the server disappears a moment later.
pub(crate) const TRUSTED_IDLE: Duration = Duration::from_millis(500);

/// How long a connection may stay in the cache. Then it returns to sqlx, which replaces old ones.
const MAX_CACHED_AGE: Duration = Duration::from_secs(60);

/// The pool. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    inner: PgPool,
    cache: Arc<ConnectionCache>,
}

#[derive(Debug)]
struct ConnectionCache {
    /// The most recently used one is the last.
    connections: Mutex<Vec<CachedConnection>>,
    /// Connections at most. The others are for transactions, which take theirs from sqlx.
    limit: usize,
    /// Callers that wait for a connection from sqlx. While there are any, no connection is cached.
    waiting: AtomicUsize,
}

#[derive(Debug)]
struct CachedConnection {
    connection: PoolConnection<Postgres>,
    acquired_at: Instant,
    used_at: Instant,
}

impl Pool {
    pub(crate) fn new(inner: PgPool) -> Self {
        let limit = inner.options().get_max_connections() as usize / 2;
        Self {
            inner,
            cache: Arc::new(ConnectionCache {
                connections: Mutex::default(),
                limit,
                waiting: AtomicUsize::new(0),
            }),
        }
    }

    /// A connection from sqlx.
    pub(crate) async fn acquire(&self) -> Result<PoolConnection<Postgres>, sqlx::Error> {
        let _waiting = self.cache.register_waiter();
        self.inner.acquire().await
    }

    /// A transaction on a connection from sqlx.
    pub(crate) async fn begin(&self) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
        let _waiting = self.cache.register_waiter();
        self.inner.begin().await
    }

    pub(crate) fn connect_options(&self) -> Arc<PgConnectOptions> {
        self.inner.connect_options()
    }

    /// Returns when all connections are closed. Later statements fail.
    pub(crate) async fn close(&self) {
        let closing = self.inner.close();
        self.cache.lock().clear();
        closing.await;
    }

    /// A connection for one statement.
    async fn checkout(&self) -> Result<CachedConnection, sqlx::Error> {
        if let Some(cached) = self.cache.pop()
            && cached.used_at.elapsed() < TRUSTED_IDLE
        {
            return Ok(cached);
        }
        let connection = self.acquire().await?;
        let now = Instant::now();
        Ok(CachedConnection { connection, acquired_at: now, used_at: now })
    }

    /// Returns a connection after a successful statement.
    fn checkin(&self, mut cached: CachedConnection) {
        cached.used_at = Instant::now();
        if cached.used_at.duration_since(cached.acquired_at) < MAX_CACHED_AGE
            && !self.inner.is_closed()
        {
            self.cache.push(cached);
        }
    }
}

impl ConnectionCache {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<CachedConnection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pop(&self) -> Option<CachedConnection> {
        self.lock().pop()
    }

    /// Call before acquiring a connection from sqlx. Returns a cached connection to sqlx, and stops
    /// caching while the caller waits. Caching checks for waiters under the same lock, so that it
    /// never takes a connection that a waiter needs.
    fn register_waiter(&self) -> Waiter<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        drop(self.pop());
        Waiter(self)
    }

    fn push(&self, connection: CachedConnection) {
        let mut connections = self.lock();
        if connections.len() < self.limit && self.waiting.load(Ordering::Relaxed) == 0 {
            connections.push(connection);
        }
    }
}

/// A caller that waits; counted until dropped, also when it is canceled.
struct Waiter<'a>(&'a ConnectionCache);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Each statement runs on its own connection. A connection whose statement failed or was canceled
/// returns to sqlx.
impl<'p> Executor<'p> for &'_ Pool {
    type Database = Postgres;

    /// All rows are read before the first one is returned, which frees the connection.
    fn fetch_many<'e, 'q: 'e, E>(
        self,
        query: E,
    ) -> BoxStream<'e, Result<Either<PgQueryResult, PgRow>, sqlx::Error>>
    where
        E: 'q + Execute<'q, Postgres>,
    {
        let pool = self.clone();
        let read = async move {
            let mut cached = pool.checkout().await?;
            let rows: Vec<_> = cached.connection.fetch_many(query).try_collect().await?;
            pool.checkin(cached);
            Ok::<_, sqlx::Error>(stream::iter(rows.into_iter().map(Ok)))
        };
        stream::once(read).try_flatten().boxed()
    }

    fn fetch_optional<'e, 'q: 'e, E>(
        self,
        query: E,
    ) -> BoxFuture<'e, Result<Option<PgRow>, sqlx::Error>>
    where
        E: 'q + Execute<'q, Postgres>,
    {
        let pool = self.clone();
        Box::pin(async move {
            let mut cached = pool.checkout().await?;
            let row = cached.connection.fetch_optional(query).await?;
            pool.checkin(cached);
            Ok(row)
        })
    }

    fn prepare_with<'e>(
        self,
        sql: SqlStr,
        parameters: &'e [PgTypeInfo],
    ) -> BoxFuture<'e, Result<PgStatement, sqlx::Error>>
    where
        'p: 'e,
    {
        let pool = self.clone();
        Box::pin(async move { pool.acquire().await?.prepare_with(sql, parameters).await })
    }

    /// For the checked macros, at compile time.
    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, Result<Describe<Postgres>, sqlx::Error>>
    where
        'p: 'e,
    {
        let pool = self.clone();
        Box::pin(async move { pool.acquire().await?.describe(sql).await })
    }
}
