//! A separate database for every test, on a real server.
//!
//! The migrations are applied once per version, to a template that is copied for every database.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use construct_domain::{
    OrganizationId, TaskId,
    message::{Block, Content},
};
use sqlx::{ConnectOptions, Connection, Executor, PgConnection, postgres::PgConnectOptions};
use uuid::Uuid;

use crate::{
    Error, PoolOptions, Store,
    store::{MIGRATOR, connect_options},
};

/// The address of the server. Its user may create databases.
const URL: &str = "CONSTRUCT_TEST_DATABASE_URL";
/// Lock that keeps processes from creating the template concurrently. Any unused number.
const TEMPLATE_LOCK: i64 = 0x636F_6E73_7472_7563;
/// How long the server may take to recover from a crash.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(30);

/// Tasks that one statement creates.
const FILL_BATCH: u32 = 5_000;

/// The database of one test. Dropped with this value, whatever is connected to it.
#[derive(Debug)]
pub struct Database {
    admin: PgConnectOptions,
    name: String,
    url: String,
    store: Store,
    /// Whether the test owns the server and may kill its processes.
    owned: bool,
}

/// A locked row.
#[derive(Debug)]
pub struct LockedRow(PgConnection);

impl LockedRow {
    /// Releases the lock.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn release(mut self) {
        sqlx::query("ROLLBACK").execute(&mut self.0).await.expect("the transaction ends");
        self.0.close().await.expect("the connection closes");
    }
}

impl Database {
    /// A fresh, migrated database.
    ///
    /// # Panics
    /// When `CONSTRUCT_TEST_DATABASE_URL` is not set or its server fails.
    pub async fn new() -> Self {
        Self::create(&shared_server_url(), true, false).await
    }

    /// A fresh, migrated database on a server that the test owns.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn new_on(url: &str) -> Self {
        Self::create(url, true, true).await
    }

    /// A fresh database without any schema.
    ///
    /// # Panics
    /// As [`Database::new`].
    pub async fn empty() -> Self {
        Self::create(&shared_server_url(), false, false).await
    }

    async fn create(url: &str, migrated: bool, owned: bool) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let admin = connect_options(url).expect("the test database's address is valid");
        let mut connection =
            admin.clone().connect().await.expect("the test database server answers");
        let template = if migrated {
            ensure_template(&admin, &mut connection).await
        } else {
            "template1".to_owned()
        };
        // The time distinguishes processes with the same id, one of which was killed before it
        // could clean up.
        let time = jiff::Timestamp::now().as_microsecond();
        let name = format!(
            "construct_test_{}_{time}_{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        run_statement(&mut connection, format!("CREATE DATABASE {name} TEMPLATE {template}")).await;
        connection.close().await.expect("the connection closes");
        let url = admin.clone().database(&name).to_url_lossy().to_string();
        let options =
            PoolOptions { application_name: "construct-test".to_owned(), ..PoolOptions::default() };
        let store = Store::connect(&url, options).await.expect("the new database answers");
        Self { admin, name, url, store, owned }
    }

    /// The database's address, password included.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A store on the database. All stores of this method share one pool.
    pub fn store(&self) -> Store {
        self.store.clone()
    }

    /// Every row of every table as text, for tests that search for what must not be stored. Bytes
    /// are in hexadecimal.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn contents(&self) -> String {
        let mut connection = self
            .admin
            .clone()
            .database(&self.name)
            .connect()
            .await
            .expect("the test database server answers");
        let tables: Vec<String> = sqlx::query_scalar(
            "SELECT table_name::text FROM information_schema.tables WHERE table_schema = 'public'",
        )
        .fetch_all(&mut connection)
        .await
        .expect("the list of tables can be read");
        let mut contents = String::new();
        for table in tables {
            let rows = format!("SELECT t::text FROM public.\"{table}\" t");
            let rows: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(rows))
                .fetch_all(&mut connection)
                .await
                .expect("it can be read");
            for row in rows {
                contents.push_str(&format!("{table}: {row}\n"));
            }
        }
        contents
    }

    /// A second organization without members, with the same providers, models and agents under the
    /// same names.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn create_tenant(&self, name: &str) -> OrganizationId {
        let organization = Uuid::now_v7();
        let copy = "
            WITH organization AS (
                INSERT INTO organizations (id, name, slug, created_at, updated_at) VALUES ($1, $2, $1::text, now(), now())
            ), ids AS MATERIALIZED (
                SELECT id AS old, gen_random_uuid() AS new FROM (
                    SELECT id FROM model_providers WHERE organization_id = $3
                    UNION ALL SELECT id FROM models WHERE organization_id = $3
                    UNION ALL SELECT id FROM agents WHERE organization_id = $3) AS every
            ), providers AS (
                INSERT INTO model_providers
                SELECT (jsonb_populate_record(p, jsonb_build_object('id', ids.new, 'organization_id', $1::uuid))).*
                FROM model_providers p JOIN ids ON ids.old = p.id
            ), copied_models AS (
                INSERT INTO models
                SELECT (jsonb_populate_record(m, jsonb_build_object(
                    'id', ids.new, 'organization_id', $1::uuid, 'provider_id', provider.new))).*
                FROM models m JOIN ids ON ids.old = m.id JOIN ids AS provider ON provider.old = m.provider_id
            )
            INSERT INTO agents
            SELECT (jsonb_populate_record(a, jsonb_build_object(
                'id', ids.new, 'organization_id', $1::uuid, 'model_id', model.new))).*
            FROM agents a JOIN ids ON ids.old = a.id JOIN ids AS model ON model.old = a.model_id";
        sqlx::query(copy)
            .bind(organization)
            .bind(name)
            .bind(OrganizationId::LOCAL.uuid())
            .execute(&self.store.pool)
            .await
            .expect("the organization is copied");
        OrganizationId::from_uuid(organization)
    }

    /// Creates many tasks of an agent at once: idle ones, or ones with a queued message and without
    /// a wake.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn fill_tasks(
        &self,
        organization: OrganizationId,
        agent: &str,
        count: u32,
        message: Option<&str>,
    ) {
        let fill = "
            WITH made AS (
                INSERT INTO tasks (id, organization_id, agent_id, workspace, title, titled, max_turns_override, phase_since,
                    intents, intent_at, created_at, updated_at, root_id)
                SELECT ids.id, $1, a.agent, '', 'filled', true, 0, now(), CASE WHEN $4 IS NULL THEN 0 ELSE 1 END,
                    CASE WHEN $4 IS NULL THEN NULL ELSE now() END, now(), now(), ids.id
                FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, $3)) AS ids,
                    (SELECT id FROM agents WHERE organization_id = $1 AND name = $2) AS a (agent)
                RETURNING id
            )
            INSERT INTO messages (id, organization_id, task_id, arrival, source, content, estimated_tokens, created_at, updated_at)
            SELECT gen_random_uuid(), $1, id, 1, 'user', $4::jsonb, 100, now(), now() FROM made WHERE $4 IS NOT NULL";
        let content = message.map(|text| {
            serde_json::to_value(Content { blocks: vec![Block::Text(text.to_owned())] })
                .expect("a text can be written")
        });
        let mut left = count;
        while left > 0 {
            // Each statement must stay below the statement timeout.
            let some = left.min(FILL_BATCH);
            left -= some;
            sqlx::query(fill)
                .bind(organization.uuid())
                .bind(agent)
                .bind(i32::try_from(some).expect("not that many"))
                .bind(&content)
                .execute(&self.store.pool)
                .await
                .expect("the tasks are made");
        }
    }

    /// For each task of an organization that has answered its message, the seconds from the message
    /// to the answer; and the number of tasks that have not answered.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn answer_times(&self, organization: OrganizationId) -> (Vec<f64>, i64) {
        let answered = "SELECT extract(epoch FROM phase_since - intent_at)::float8 FROM tasks
             WHERE organization_id = $1 AND phase = 'await_input' AND last_outcome = 'completed' ORDER BY 1";
        let left = "SELECT count(*) FROM tasks
             WHERE organization_id = $1 AND intents > 0 AND NOT (phase = 'await_input' AND last_outcome IS NOT NULL)";
        let seconds = sqlx::query_scalar(answered)
            .bind(organization.uuid())
            .fetch_all(&self.store.pool)
            .await;
        let left =
            sqlx::query_scalar(left).bind(organization.uuid()).fetch_one(&self.store.pool).await;
        (seconds.expect("the tasks can be read"), left.expect("the tasks can be counted"))
    }

    /// Makes the audit trail refuse every entry, or accept them again.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn refuse_audit(&self, refuse: bool) {
        let statement = if refuse {
            "ALTER TABLE audit_entries ADD CONSTRAINT audit_entries_refused CHECK (false) NOT VALID"
        } else {
            "ALTER TABLE audit_entries DROP CONSTRAINT audit_entries_refused"
        };
        sqlx::query(statement).execute(&self.store.pool).await.expect("the table can be altered");
    }

    /// Locks the row of a task. Writers wait until the result is released.
    ///
    /// # Panics
    /// When the server fails or the task does not exist.
    pub async fn lock_task(&self, task: TaskId) -> LockedRow {
        let mut connection = self
            .admin
            .clone()
            .database(&self.name)
            .connect()
            .await
            .expect("the test database server answers");
        sqlx::query("BEGIN").execute(&mut connection).await.expect("a transaction begins");
        sqlx::query("SELECT id FROM tasks WHERE id = $1 FOR UPDATE")
            .bind(task.uuid())
            .fetch_one(&mut connection)
            .await
            .expect("the task is there");
        LockedRow(connection)
    }

    /// The number of statements that wait for one of PostgreSQL's wait events (`PgSleep`) or event
    /// types (`Lock`).
    ///
    /// # Panics
    /// When the server fails.
    pub async fn waiting_statements(&self, event: &str) -> i64 {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND $2 IN (wait_event, wait_event_type)";
        let waiting = sqlx::query_scalar(waiting).bind(&self.name).bind(event);
        waiting.fetch_one(&self.store.pool).await.expect("the server answers")
    }

    /// Executes other statements.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn execute(&self, statements: &str) {
        let statements = sqlx::AssertSqlSafe(statements.to_owned());
        sqlx::raw_sql(statements)
            .execute(&self.store.pool)
            .await
            .expect("the server does as it is asked");
    }

    /// Makes a task's row unreadable, or restores it.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn corrupt_task(&self, task: TaskId, corrupt: bool) {
        // A new revision, as with every change: a commit from a cached task fails.
        let spoil = "UPDATE tasks SET
                 turn = CASE WHEN $2 THEN jsonb_build_object('spoilt', turn) ELSE nullif(turn -> 'spoilt', 'null'::jsonb) END,
                 revision = revision + 1
             WHERE id = $1 AND $2 IS DISTINCT FROM coalesce(turn ? 'spoilt', false)";
        sqlx::query(spoil)
            .bind(task.uuid())
            .bind(corrupt)
            .execute(&self.store.pool)
            .await
            .expect("the task can be changed");
    }

    /// Stuck tasks, subtasks included: they are not done and will never be reconciled, because they
    /// have no next wake and no unseen intent, and are neither quarantined nor suspended. As text,
    /// with their state.
    ///
    /// # Errors
    /// When the server fails.
    pub async fn stuck_tasks(&self) -> Result<Vec<String>, Error> {
        let forgotten = "
            SELECT format('%s (%s, parent %s): intents %s, seen %s, turn %s, step %s',
                t.id, t.phase, t.parent_id, t.intents, t.intents_seen, t.turn, t.step)
            FROM tasks t
            WHERE t.deleted_at IS NULL AND t.next_wake IS NULL
              AND NOT (t.intents > t.intents_seen AND t.intent_at IS NOT NULL)
              AND t.parked_intents IS DISTINCT FROM t.intents
              AND NOT (t.phase = 'suspended' AND t.suspend)
              AND (t.phase <> 'await_input' OR t.turn IS NOT NULL OR t.step IS NOT NULL OR EXISTS (
                  SELECT FROM messages q WHERE q.task_id = t.id AND q.position IS NULL AND q.processed_at IS NULL))";
        Ok(sqlx::query_scalar(forgotten).fetch_all(&self.store.pool).await?)
    }

    /// Ends all connections to the database, whatever they do. If the test owns the server, it
    /// kills one of its processes with `kill -9`, upon which the server drops all connections and
    /// recovers.
    ///
    /// # Panics
    /// When the server does not recover from an earlier crash within half a minute.
    pub async fn crash(&self) {
        let began = Instant::now();
        let mut connection = loop {
            match self.admin.clone().connect().await {
                Ok(connection) => break connection,
                // It may still be recovering from an earlier crash.
                Err(sqlx::Error::Database(_) | sqlx::Error::Io(_))
                    if began.elapsed() < RECOVERY_TIMEOUT =>
                {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => panic!("the test database server does not answer: {error}"),
            }
        };
        if self.owned {
            let victim: i32 = sqlx::query_scalar("SELECT pg_backend_pid()")
                .fetch_one(&mut connection)
                .await
                .expect("it has a process");
            let killed =
                std::process::Command::new("kill").args(["-9", &victim.to_string()]).status();
            assert!(
                killed.is_ok_and(|status| status.success()),
                "the server's process can be killed"
            );
        } else {
            let end =
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = $1";
            sqlx::query(end)
                .bind(&self.name)
                .execute(&mut connection)
                .await
                .expect("connections can be ended");
        }
    }

    /// How often the server has scanned the table of tasks since the database was created.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn task_table_scans(&self) -> i64 {
        sqlx::query_scalar("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'tasks'")
            .fetch_one(&self.store.pool)
            .await
            .expect("the statistics can be read")
    }

    /// A store with its own pool, like that of another process.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn connect(&self, options: PoolOptions) -> Store {
        Store::connect(&self.url, options).await.expect("the test database answers")
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let admin = self.admin.clone();
        let statement = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        // A test's runtime may be single-threaded and is busy dropping this: the work needs its own
        // runtime and thread. Databases that cannot be dropped are left to `./dev test`, which
        // starts with an empty server.
        let thread = std::thread::spawn(move || {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build()
            else {
                return;
            };
            runtime.block_on(async {
                if let Ok(mut connection) = admin.connect().await {
                    let _ = connection.execute(sqlx::AssertSqlSafe(statement)).await;
                }
            });
        });
        let _ = thread.join();
    }
}

/// The server that tests share.
fn shared_server_url() -> String {
    std::env::var(URL).unwrap_or_else(|_| {
        panic!("{URL} is not set: it is the address of a server on which databases may be made; `./dev test` sets it")
    })
}

/// The name of a template with the current schema. Creates it if it does not exist.
async fn ensure_template(admin: &PgConnectOptions, connection: &mut PgConnection) -> String {
    let mut hasher = DefaultHasher::new();
    for migration in MIGRATOR.iter() {
        (migration.version, &migration.checksum).hash(&mut hasher);
    }
    let name = format!("construct_template_{:016x}", hasher.finish());
    sqlx::query("SELECT pg_advisory_lock($1)")
        .bind(TEMPLATE_LOCK)
        .execute(&mut *connection)
        .await
        .expect("the lock is given");
    let there: Option<i32> = sqlx::query_scalar("SELECT 1 FROM pg_database WHERE datname = $1")
        .bind(&name)
        .fetch_optional(&mut *connection)
        .await
        .expect("the list of databases can be read");
    if there.is_none() {
        // Under another name until it is complete: a process that is killed here leaves no partial
        // template.
        let unfinished = format!("{name}_unfinished");
        run_statement(connection, format!("DROP DATABASE IF EXISTS {unfinished} WITH (FORCE)"))
            .await;
        run_statement(connection, format!("CREATE DATABASE {unfinished}")).await;
        let mut inside =
            admin.clone().database(&unfinished).connect().await.expect("the template answers");
        MIGRATOR.run(&mut inside).await.expect("the migrations apply to an empty database");
        inside.close().await.expect("the connection closes");
        run_statement(connection, format!("ALTER DATABASE {unfinished} RENAME TO {name}")).await;
    }
    sqlx::query("SELECT pg_advisory_unlock($1)")
        .bind(TEMPLATE_LOCK)
        .execute(&mut *connection)
        .await
        .expect("the lock is returned");
    name
}

/// Runs a statement whose names were generated here.
async fn run_statement(connection: &mut PgConnection, statement: String) {
    let words = statement.clone();
    connection
        .execute(sqlx::AssertSqlSafe(statement))
        .await
        .unwrap_or_else(|error| panic!("{words}: {error}"));
}
