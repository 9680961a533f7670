//! The pool of connections, with some of them kept in hand between two statements.
//!
//! sqlx asks the server a question whenever a connection goes back to its pool, and hands out the
//! one that has rested longest: a task goes through as many questions as statements, and through
//! every connection's caches. So what has just done its work goes to the next statement instead,
//! the latest first. Everything else is sqlx's business: how many there are, how old they get, and
//! what becomes of one whose statement failed or was given up.

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

/// How long a connection may have rested to be used unasked. When the server went away in this
/// time, the statement fails with [`Error::Unavailable`](crate::Error::Unavailable), as it does
/// when the server goes away a moment later.
pub(crate) const TRUSTED_IDLE: Duration = Duration::from_millis(500);

/// After how long one goes back to sqlx although it is wanted, so that it is replaced when it is
/// old.
const MAX_CACHED_AGE: Duration = Duration::from_secs(60);

/// The pool. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    inner: PgPool,
    cache: Arc<ConnectionCache>,
}

#[derive(Debug)]
struct ConnectionCache {
    /// The latest used is the last.
    kept: Mutex<Vec<CachedConnection>>,
    /// The rest is for transactions, which take theirs from sqlx.
    limit: usize,
    /// Who waits for sqlx to hand one out: nothing is kept meanwhile.
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
            cache: Arc::new(ConnectionCache { kept: Mutex::default(), limit, waiting: AtomicUsize::new(0) }),
        }
    }

    /// A connection of sqlx's.
    pub(crate) async fn acquire(&self) -> Result<PoolConnection<Postgres>, sqlx::Error> {
        let _waiting = self.cache.register_waiter();
        self.inner.acquire().await
    }

    /// A transaction on a connection of sqlx's.
    pub(crate) async fn begin(&self) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
        let _waiting = self.cache.register_waiter();
        self.inner.begin().await
    }

    pub(crate) fn connect_options(&self) -> Arc<PgConnectOptions> {
        self.inner.connect_options()
    }

    /// Ends when all connections are closed. Statements that come later fail.
    pub(crate) async fn close(&self) {
        let closing = self.inner.close();
        self.cache.kept().clear();
        closing.await;
    }

    /// For one statement.
    async fn checkout(&self) -> Result<CachedConnection, sqlx::Error> {
        if let Some(kept) = self.cache.pop()
            && kept.used_at.elapsed() < TRUSTED_IDLE
        {
            return Ok(kept);
        }
        let connection = self.acquire().await?;
        let now = Instant::now();
        Ok(CachedConnection { connection, acquired_at: now, used_at: now })
    }

    /// After a statement that went well.
    fn checkin(&self, mut kept: CachedConnection) {
        kept.used_at = Instant::now();
        if kept.used_at.duration_since(kept.acquired_at) < MAX_CACHED_AGE && !self.inner.is_closed() {
            self.cache.push(kept);
        }
    }
}

impl ConnectionCache {
    fn kept(&self) -> std::sync::MutexGuard<'_, Vec<CachedConnection>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pop(&self) -> Option<CachedConnection> {
        self.kept().pop()
    }

    /// Before one is asked of sqlx: gives back one that is kept, and until then nothing is. Who
    /// keeps one asks under the same lock whether somebody waits, so that none is kept behind the
    /// back of who does.
    fn register_waiter(&self) -> Waiter<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        drop(self.pop());
        Waiter(self)
    }

    fn push(&self, one: CachedConnection) {
        let mut kept = self.kept();
        if kept.len() < self.limit && self.waiting.load(Ordering::Relaxed) == 0 {
            kept.push(one);
        }
    }
}

/// Counts who waits, also when they give up.
struct Waiter<'a>(&'a ConnectionCache);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Each statement on a connection of its own. One whose statement failed, or was given up, goes
/// back to sqlx.
impl<'p> Executor<'p> for &'_ Pool {
    type Database = Postgres;

    /// All rows are read before the first is given out, so that the connection is free again.
    fn fetch_many<'e, 'q: 'e, E>(
        self,
        query: E,
    ) -> BoxStream<'e, Result<Either<PgQueryResult, PgRow>, sqlx::Error>>
    where
        E: 'q + Execute<'q, Postgres>,
    {
        let pool = self.clone();
        let read = async move {
            let mut kept = pool.checkout().await?;
            let rows: Vec<_> = kept.connection.fetch_many(query).try_collect().await?;
            pool.checkin(kept);
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
            let mut kept = pool.checkout().await?;
            let row = kept.connection.fetch_optional(query).await?;
            pool.checkin(kept);
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

    /// For the checked macros, which ask when they are compiled.
    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, Result<Describe<Postgres>, sqlx::Error>>
    where
        'p: 'e,
    {
        let pool = self.clone();
        Box::pin(async move { pool.acquire().await?.describe(sql).await })
    }
}
