//! A database of its own for every test, on a real server.
//!
//! The schema is applied once per version of the migrations, to a template that every database is a copy of.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::{AtomicU64, Ordering},
};

use sqlx::{ConnectOptions, Connection, Executor, PgConnection, postgres::PgConnectOptions};

use crate::{
    PoolOptions, Store,
    store::{MIGRATOR, connect_options},
};

/// Where the server is: an address whose user may create databases.
const URL: &str = "CONSTRUCT_TEST_DATABASE_URL";
/// Keeps processes from making the template at the same time. Any number that nobody else uses.
const TEMPLATE_LOCK: i64 = 0x636F_6E73_7472_7563;

/// A database that is there for one test. Dropped with this value, whatever is connected to it.
#[derive(Debug)]
pub struct Database {
    admin: PgConnectOptions,
    name: String,
    url: String,
    store: Store,
}

impl Database {
    /// A fresh, migrated database.
    ///
    /// # Panics
    /// When `CONSTRUCT_TEST_DATABASE_URL` is not set or its server does not do as asked: a test cannot go on without.
    pub async fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let url = std::env::var(URL).unwrap_or_else(|_| {
            panic!(
                "{URL} is not set: it is the address of a server on which databases may be made; `./dev test` sets it"
            )
        });
        let admin = connect_options(&url).expect("the test database's address is valid");
        let mut connection = admin.clone().connect().await.expect("the test database server answers");
        let template = template(&admin, &mut connection).await;
        // The time keeps apart processes that had the same id, one of which was killed before it could tidy up.
        let time = jiff::Timestamp::now().as_microsecond();
        let name = format!("construct_test_{}_{time}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        run(&mut connection, format!("CREATE DATABASE {name} TEMPLATE {template}")).await;
        connection.close().await.expect("the connection closes");
        let url = admin.clone().database(&name).to_url_lossy().to_string();
        let options = PoolOptions { application_name: "construct-test".to_owned(), ..PoolOptions::default() };
        let store = Store::connect(&url, options).await.expect("the new database answers");
        Self { admin, name, url, store }
    }

    /// The database's address, password included.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A store on the database, its pool shared with the others of this method.
    pub fn store(&self) -> Store {
        self.store.clone()
    }

    /// Every row of every table as text, for tests that look for what must not be stored anywhere. Bytes are in hexadecimal.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn contents(&self) -> String {
        let mut connection =
            self.admin.clone().database(&self.name).connect().await.expect("the test database server answers");
        let tables: Vec<String> =
            sqlx::query_scalar("SELECT table_name::text FROM information_schema.tables WHERE table_schema = 'public'")
                .fetch_all(&mut connection)
                .await
                .expect("the list of tables can be read");
        let mut contents = String::new();
        for table in tables {
            let rows = format!("SELECT t::text FROM public.\"{table}\" t");
            let rows: Vec<String> =
                sqlx::query_scalar(sqlx::AssertSqlSafe(rows)).fetch_all(&mut connection).await.expect("it can be read");
            for row in rows {
                contents.push_str(&format!("{table}: {row}\n"));
            }
        }
        contents
    }

    /// A store with a pool of its own, as another process would have.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn connect(&self, options: PoolOptions) -> Store {
        Store::connect(&self.url, options).await.expect("the test database answers")
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let admin = self.admin.clone();
        let statement = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        // A test's runtime may be single-threaded and is busy dropping this: the work needs a runtime and a thread of
        // its own. What cannot be dropped is left to `./dev test`, which starts with an empty server.
        let thread = std::thread::spawn(move || {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
            runtime.block_on(async {
                if let Ok(mut connection) = admin.connect().await {
                    let _ = connection.execute(sqlx::AssertSqlSafe(statement)).await;
                }
            });
        });
        let _ = thread.join();
    }
}

/// The name of a database with the current schema, made unless it is there.
async fn template(admin: &PgConnectOptions, connection: &mut PgConnection) -> String {
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
        // Under another name until it is whole: a process killed here leaves no half a template.
        let unfinished = format!("{name}_unfinished");
        run(connection, format!("DROP DATABASE IF EXISTS {unfinished} WITH (FORCE)")).await;
        run(connection, format!("CREATE DATABASE {unfinished}")).await;
        let mut inside = admin.clone().database(&unfinished).connect().await.expect("the template answers");
        MIGRATOR.run(&mut inside).await.expect("the migrations apply to an empty database");
        inside.close().await.expect("the connection closes");
        run(connection, format!("ALTER DATABASE {unfinished} RENAME TO {name}")).await;
    }
    sqlx::query("SELECT pg_advisory_unlock($1)")
        .bind(TEMPLATE_LOCK)
        .execute(&mut *connection)
        .await
        .expect("the lock is returned");
    name
}

/// Runs a statement whose names were made here.
async fn run(connection: &mut PgConnection, statement: String) {
    let words = statement.clone();
    connection.execute(sqlx::AssertSqlSafe(statement)).await.unwrap_or_else(|error| panic!("{words}: {error}"));
}
