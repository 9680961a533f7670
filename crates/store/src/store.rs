//! The connection pool, and bringing the schema up to date.

use std::{str::FromStr, time::Duration};

use sqlx::{
    ConnectOptions, Connection, PgConnection,
    migrate::{MigrateError, Migrator},
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::{
    Error,
    pool::{Pool, TRUSTED_IDLE},
};

pub(crate) static MIGRATOR: Migrator = sqlx::migrate!();

/// How long one statement of a migration may take.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(300);

/// How long a migration waits for a lock. Everybody else who wants the table waits behind it for as
/// long: less than one of their statements may take.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// How often it is tried, other services' turn included: five minutes in all.
const LOCK_ATTEMPTS: u32 = 100;

/// The pause before it is tried again.
const LOCK_RETRY_DELAY: Duration = Duration::from_secs(1);

/// How long one statement may take, unless [`PoolOptions`] say otherwise: whatever was sent to the
/// server has ended after it, one way or the other.
pub const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// How the pool behaves.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// What the server's own lists of connections call this process.
    pub application_name: String,
    /// Connections at most. Who needs one more waits for [`PoolOptions::acquire_timeout`].
    pub max_connections: u32,
    /// How long to wait for a connection before [`Error::Unavailable`].
    pub acquire_timeout: Duration,
    /// How long one statement may take, locks included, before the server gives it up with
    /// [`Error::Unavailable`].
    pub statement_timeout: Duration,
    /// Whether a statement is planned once per connection instead of by what it is given each time.
    /// For a process that repeats a few statements which find rows by their keys, planning takes
    /// longer than doing; lists with optional filters want it otherwise.
    pub generic_plans: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            application_name: "construct".to_owned(),
            max_connections: 20,
            acquire_timeout: Duration::from_secs(5),
            statement_timeout: STATEMENT_TIMEOUT,
            generic_plans: false,
        }
    }
}

/// The database. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    pub(crate) pool: Pool,
}

impl Store {
    /// Opens the pool and one connection of it.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the server cannot be reached, [`Error::Internal`] when the
    /// address makes no sense or the server refuses the user.
    pub async fn connect(url: &str, options: PoolOptions) -> Result<Self, Error> {
        // A transaction that is left open holds its locks against everybody: the server ends it
        // after this.
        let idle = options.statement_timeout * 2;
        let connection =
            connect_options(url)?.application_name(&options.application_name).options([
                ("statement_timeout", millis(options.statement_timeout)),
                ("idle_in_transaction_session_timeout", millis(idle)),
                (
                    "plan_cache_mode",
                    (if options.generic_plans { "force_generic_plan" } else { "auto" }).to_owned(),
                ),
            ]);
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout)
            // sqlx asks the server before every use whether it is still there: a round trip that a
            // busy pool can save.
            .test_before_acquire(false)
            .before_acquire(|connection, meta| {
                Box::pin(async move {
                    if meta.idle_for > TRUSTED_IDLE {
                        connection.ping().await?;
                    }
                    Ok(true)
                })
            })
            .connect_with(connection)
            .await?;
        Ok(Self { pool: Pool::new(pool) })
    }

    /// Brings the schema up to date. Several processes may call it at once: one does it, the others
    /// wait. What a newer version has added to it stays, and is no reason not to start: it leaves
    /// what the version before it needs, as `tests/migrations.rs` checks.
    ///
    /// Whoever wants a lock on a table has all others wait behind it. So a migration gives up soon
    /// when it does not get one, and is tried again after those who waited had their turn.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the server cannot be reached or a table is in use all the time,
    /// [`Error::Internal`] when a migration fails, or is not the one that was applied under its
    /// number.
    pub async fn migrate(&self) -> Result<(), Error> {
        self.migrate_with(&MIGRATOR).await
    }

    pub(crate) async fn migrate_with(&self, migrator: &Migrator) -> Result<(), Error> {
        for _ in 1..LOCK_ATTEMPTS {
            match self.migrate_once(migrator).await {
                Err(error) if is_lock_timeout(&error) => {
                    tracing::info!(
                        "the schema cannot be changed, or is changed by another process; it is tried again"
                    );
                    tokio::time::sleep(LOCK_RETRY_DELAY).await;
                }
                done => return Ok(done?),
            }
        }
        Ok(self.migrate_once(migrator).await?)
    }

    async fn migrate_once(&self, migrator: &Migrator) -> Result<(), MigrateError> {
        // Not one of the pool's connections: their statement timeout would end both a long
        // migration and the wait for another process's.
        let options = self.pool.connect_options().as_ref().clone();
        let limits = [
            ("statement_timeout", millis(MIGRATION_TIMEOUT)),
            ("lock_timeout", millis(LOCK_TIMEOUT)),
        ];
        let mut connection = options.options(limits).connect().await?;
        match apply_migrations(migrator, &mut connection).await {
            // The first that is not known: what a newer version adds comes after everything that
            // is.
            Err(MigrateError::VersionMissing(applied))
                if migrator.iter().all(|known| known.version < applied) =>
            {
                tracing::warn!(
                    applied,
                    "a newer version has migrated the database; this one goes on with what it knows"
                );
                let mut known = Migrator::with_migrations(migrator.iter().cloned().collect());
                known.set_ignore_missing(true);
                apply_migrations(&known, &mut connection).await?;
            }
            done => done?,
        }
        connection.close().await?;
        Ok(())
    }

    /// Asks the server for nothing, to see that it answers.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when it does not.
    pub async fn ping(&self) -> Result<(), Error> {
        sqlx::query("SELECT 1").execute(&self.pool).await?;
        Ok(())
    }

    /// The server's clock, which is the mesh's.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when it does not answer.
    pub async fn clock(&self) -> Result<jiff::Timestamp, Error> {
        let now: jiff_sqlx::Timestamp =
            sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&self.pool).await?;
        Ok(now.into())
    }

    /// Closes the pool once the statements that run have ended.
    pub async fn close(&self) {
        self.pool.close().await;
    }
}

/// Applies what is missing.
async fn apply_migrations(migrator: &Migrator, connection: &mut PgConnection) -> Result<(), MigrateError> {
    for alone in migrator.iter().filter(|migration| migration.no_tx) {
        migrator.run_direct(Some(alone.version - 1), connection, false).await?;
        // An index that is made concurrently keeps nobody waiting while it waits, and would be left
        // invalid.
        sqlx::query("SET lock_timeout = 0").execute(&mut *connection).await?;
        migrator.run_direct(Some(alone.version), connection, false).await?;
        sqlx::query("RESET lock_timeout").execute(&mut *connection).await?;
    }
    migrator.run_direct(None, connection, false).await
}

/// Whether somebody else had what a migration wanted to lock.
fn is_lock_timeout(error: &MigrateError) -> bool {
    let (MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _)) = error else {
        return false;
    };
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55P03")
}

/// Reads an address. Its text, which may hold a password, is not in the error. sqlx itself takes
/// any scheme.
pub(crate) fn connect_options(url: &str) -> Result<PgConnectOptions, Error> {
    let scheme = url.split_once("://").map(|(scheme, _)| scheme);
    let options = if matches!(scheme, Some("postgres" | "postgresql")) {
        PgConnectOptions::from_str(url).ok()
    } else {
        None
    };
    options.ok_or_else(|| Error::internal("the database's address is not a valid postgres:// URL"))
}

/// As PostgreSQL's settings want it.
fn millis(duration: Duration) -> String {
    format!("{}ms", duration.as_millis())
}
