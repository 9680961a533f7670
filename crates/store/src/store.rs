//! The connection pool, and the migrations.

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

/// Statement timeout of a migration.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(300);

/// Lock timeout of a migration. Other statements on the table queue behind it for as long, so it is
/// shorter than their statement timeout.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Attempts to get a lock. With the delays between them: five minutes in all.
const LOCK_ATTEMPTS: u32 = 100;

/// Delay before the next attempt to get a lock.
const LOCK_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Default statement timeout. Whatever was sent to the server has succeeded or failed after it.
pub const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Options of the pool.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// The name of this process in the server's list of connections.
    pub application_name: String,
    /// Maximum number of connections. Callers that need one more wait for up to
    /// [`PoolOptions::acquire_timeout`].
    pub max_connections: u32,
    /// How long to wait for a connection before [`Error::Unavailable`].
    pub acquire_timeout: Duration,
    /// How long one statement may take, locks included, before the server cancels it with
    /// [`Error::Unavailable`].
    pub statement_timeout: Duration,
    /// Whether a statement is planned once per connection (a generic plan) instead of for its
    /// parameters each time. In a process that repeats a few lookups by key, planning takes longer
    /// than execution. Lists with optional filters need plans for their parameters.
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
    /// address is invalid or the server refuses the user.
    pub async fn connect(url: &str, options: PoolOptions) -> Result<Self, Error> {
        // An idle transaction holds its locks against everyone: the server ends it after this.
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
            // sqlx pings the server before every use: a round trip that a busy pool can save.
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

    /// Migrates the schema to the current version. Several processes may call it at once: one
    /// migrates, the others wait. Migrations of a newer version stay and are no error: they keep
    /// what the previous version needs, as `tests/migrations.rs` checks.
    ///
    /// All statements on a table queue behind a statement that waits for a lock on it. So a
    /// migration gives up soon when it does not get its lock, and retries after the queued
    /// statements had their turn.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the server cannot be reached or a table is in use all the time,
    /// [`Error::Internal`] when a migration fails, or differs from the one that was applied under
    /// its number.
    pub async fn migrate(&self) -> Result<(), Error> {
        self.migrate_with(&MIGRATOR).await
    }

    pub(crate) async fn migrate_with(&self, migrator: &Migrator) -> Result<(), Error> {
        for _ in 1..LOCK_ATTEMPTS {
            match self.migrate_once(migrator).await {
                Err(error) if is_lock_timeout(&error) => {
                    tracing::info!("a lock for the migration timed out; retrying");
                    tokio::time::sleep(LOCK_RETRY_DELAY).await;
                }
                done => return Ok(done?),
            }
        }
        Ok(self.migrate_once(migrator).await?)
    }

    async fn migrate_once(&self, migrator: &Migrator) -> Result<(), MigrateError> {
        // A separate connection: the pool's statement timeout would end a long migration, and the
        // wait for the migration of another process.
        let options = self.pool.connect_options().as_ref().clone();
        let limits = [
            ("statement_timeout", millis(MIGRATION_TIMEOUT)),
            ("lock_timeout", millis(LOCK_TIMEOUT)),
        ];
        let mut connection = options.options(limits).connect().await?;
        match apply_migrations(migrator, &mut connection).await {
            // The first unknown migration. Those of a newer version come after all known ones.
            Err(MigrateError::VersionMissing(applied))
                if migrator.iter().all(|migration| migration.version < applied) =>
            {
                tracing::warn!(
                    applied,
                    "the database has migrations of a newer version; continuing"
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

    /// Checks that the server responds.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn ping(&self) -> Result<(), Error> {
        sqlx::query("SELECT 1").execute(&self.pool).await?;
        Ok(())
    }

    /// The server's clock, which is the clock of the mesh.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn clock(&self) -> Result<jiff::Timestamp, Error> {
        let now: jiff_sqlx::Timestamp =
            sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&self.pool).await?;
        Ok(now.into())
    }

    /// Closes the pool once the running statements have ended.
    pub async fn close(&self) {
        self.pool.close().await;
    }
}

/// Applies the missing migrations.
async fn apply_migrations(
    migrator: &Migrator,
    connection: &mut PgConnection,
) -> Result<(), MigrateError> {
    for separate in migrator.iter().filter(|migration| migration.no_tx) {
        migrator.run_direct(Some(separate.version - 1), connection, false).await?;
        // A concurrent index build blocks no statement while it waits, and a timeout would leave
        // the index invalid.
        sqlx::query("SET lock_timeout = 0").execute(&mut *connection).await?;
        migrator.run_direct(Some(separate.version), connection, false).await?;
        sqlx::query("RESET lock_timeout").execute(&mut *connection).await?;
    }
    migrator.run_direct(None, connection, false).await
}

/// Whether a migration timed out waiting for a lock.
fn is_lock_timeout(error: &MigrateError) -> bool {
    let (MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _)) = error else {
        return false;
    };
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55P03")
}

/// Parses the address of a database. The error does not contain the address, which may hold a
/// password. sqlx itself accepts any scheme.
pub(crate) fn connect_options(url: &str) -> Result<PgConnectOptions, Error> {
    let scheme = url.split_once("://").map(|(scheme, _)| scheme);
    let options = if matches!(scheme, Some("postgres" | "postgresql")) {
        PgConnectOptions::from_str(url).ok()
    } else {
        None
    };
    options.ok_or_else(|| Error::internal("the database's address is not a valid postgres:// URL"))
}

/// The format of PostgreSQL's settings.
fn millis(duration: Duration) -> String {
    format!("{}ms", duration.as_millis())
}
