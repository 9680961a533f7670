//! What a migration may do.
//!
//! # Compatibility
//!
//! The previous version keeps working while a migration is applied and afterwards, and a rollback
//! to it is possible. So a migration extends the schema. What it makes superfluous is removed by a
//! later one, which says so in a line
//!
//! ```sql
//! -- contracts: N
//! ```
//!
//! No released version with migration N uses what is removed. A rollback goes to such a version.
//!
//! # Locks
//!
//! A migration must not block the previous version for long. An index on an existing table is built
//! concurrently, by a file that begins with `-- no-transaction` and does nothing else, because
//! PostgreSQL runs that only outside of a transaction. A foreign key of an existing table is added
//! `NOT VALID` and validated by a later file. Existing rows are changed in small batches, by a `DO`
//! that commits in between, in a file that begins with `-- no-transaction`.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    time::{Duration, Instant},
};

use sqlx::{
    Connection, Executor, SqlSafeStr as _,
    migrate::{Migration, MigrationType, Migrator},
};

use crate::{
    Error,
    store::{MIGRATOR, connect_options},
    testing::Database,
};

/// The first migration that is applied while replicas of the previous version run.
const WHILE_OTHERS_WORK: i64 = 33;

/// The first migration that must not block writes for the duration of a table scan.
const CONCURRENTLY: i64 = 40;

/// The statements of a migration, in lower case, each on one line, without comments.
fn statements(sql: &str) -> Vec<String> {
    let lines: Vec<&str> =
        sql.lines().map(|line| line.split("--").next().unwrap_or_default()).collect();
    let words =
        |statement: &str| statement.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
    lines.join("\n").split(';').map(words).filter(|statement| !statement.is_empty()).collect()
}

/// Splits at commas outside of parentheses.
fn parts(text: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for character in text.chars() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().expect("there is one").push(character);
    }
    parts.iter().map(|part| part.trim().to_owned()).collect()
}

/// The first word after one of `starts`, and the rest.
fn named<'a>(statement: &'a str, starts: &[&str]) -> Option<(&'a str, &'a str)> {
    let rest = starts.iter().find_map(|start| statement.strip_prefix(start))?;
    let rest = ["if exists ", "if not exists ", "only "]
        .iter()
        .fold(rest, |rest, word| rest.strip_prefix(word).unwrap_or(rest));
    Some(rest.split_once([' ', '(']).unwrap_or((rest, "")))
}

const INDEX: [&str; 2] = ["create index concurrently ", "create index "];
const UNIQUE_INDEX: [&str; 2] = ["create unique index concurrently ", "create unique index "];

/// The tables that a migration creates.
fn created_tables(statements: &[String]) -> BTreeSet<&str> {
    statements
        .iter()
        .filter_map(|statement| Some(named(statement, &["create table "])?.0))
        .collect()
}

/// Whether this change of a table reads every row, or builds an index, while writes are blocked.
fn change_reads_all(change: &str) -> bool {
    let has = |words: &[&str]| words.iter().any(|word| change.contains(word));
    change.starts_with("add ")
        && !has(&[" not valid", " using index "])
        && has(&[" unique", " primary key", " exclude ", " references ", " check", " stored"])
}

/// The statements of a migration that block writes to existing tables, or to many of their rows.
fn blocking(sql: &str) -> Vec<String> {
    let statements = statements(sql);
    let new = created_tables(&statements);
    let outside = sql.starts_with("-- no-transaction");
    let few_at_a_time = outside && statements.iter().any(|statement| statement == "commit");
    let blocks = |statement: &&String| {
        if let Some((table, changes)) = named(statement, &["alter table "]) {
            return !new.contains(table)
                && parts(changes).iter().any(|change| change_reads_all(change));
        }
        if let Some((table, _)) = named(statement, &["update ", "delete from "]) {
            return !new.contains(table) && !few_at_a_time;
        }
        let Some((_, rest)) = named(statement, &INDEX).or_else(|| named(statement, &UNIQUE_INDEX))
        else {
            return false;
        };
        let made_here = named(rest, &["on "]).is_some_and(|(table, _)| new.contains(table));
        let concurrently = statement.contains(" index concurrently ");
        if made_here { concurrently } else { !(concurrently && outside && statements.len() == 1) }
    };
    statements.iter().filter(blocks).cloned().collect()
}

/// Whether inserts, updates or reads of the previous version fail after this change of a table.
/// `all` are the changes of the same statement.
fn change_is_refused(change: &str, all: &[String]) -> bool {
    let is = |starts: &[&str]| starts.iter().any(|start| change.starts_with(start));
    if is(&["drop ", "rename ", "set schema "]) {
        return true;
    }
    if is(&["alter "]) {
        // Defaults and identities: inserts of the previous version have no value for them.
        let drops = change.contains(" drop ") && !change.contains(" drop not null");
        return drops || change.contains(" set not null") || change.contains(" type ");
    }
    if is(&[
        "add constraint ",
        "add foreign key ",
        "add check",
        "add unique",
        "add primary ",
        "add exclude ",
    ]) {
        // The previous version leaves new columns empty.
        let column =
            change.split_once(" foreign key (").and_then(|(_, rest)| rest.split([',', ')']).next());
        let is_new = |column: &str| {
            let adds = |change: &String| {
                named(change, &["add column ", "add "]).is_some_and(|(name, _)| name == column)
            };
            all.iter().any(adds)
        };
        return !column.is_some_and(is_new);
    }
    is(&["add "])
        && change.contains(" not null")
        && !change.contains(" default ")
        && !change.contains(" generated ")
}

/// The statements that break the previous version, because its reads or writes would fail. New
/// tables do not matter.
fn refused(sql: &str) -> Vec<String> {
    let all: Vec<String> =
        MIGRATOR.iter().flat_map(|migration| statements(migration.sql.as_str())).collect();
    let plain: BTreeSet<&str> =
        all.iter().filter_map(|made| Some(named(made, &INDEX)?.0)).collect();
    let statements = statements(sql);
    let new = created_tables(&statements);
    let is_refused = |statement: &&String| {
        if let Some((table, changes)) = named(statement, &["alter table "]) {
            let changes = parts(changes);
            return !new.contains(table)
                && changes.iter().any(|change| change_is_refused(change, &changes));
        }
        if let Some((_, rest)) = named(statement, &UNIQUE_INDEX) {
            return named(rest, &["on "]).is_none_or(|(table, _)| !new.contains(table));
        }
        // An ON CONFLICT may refer to a unique index. Other indexes only affect speed.
        if let Some((index, _)) = named(statement, &["drop index "]) {
            return !plain.contains(index);
        }
        let gone = ["drop table ", "drop type ", "drop view ", "drop function "];
        gone.iter().any(|gone| statement.starts_with(gone))
            || statement.starts_with("alter type ") && statement.contains(" rename ")
    };
    statements.iter().filter(is_refused).cloned().collect()
}

/// The migration since which nothing uses what this one removes, if it names one.
fn contracts(sql: &str) -> Option<Result<i64, std::num::ParseIntError>> {
    let since = sql.lines().find_map(|line| line.trim().strip_prefix("-- contracts:"))?;
    Some(since.trim().parse())
}

/// The objection to a migration, if any.
fn objection(version: i64, sql: &str) -> Option<String> {
    let blocking = if version >= CONCURRENTLY { blocking(sql) } else { Vec::new() };
    if !blocking.is_empty() {
        return Some(format!("{blocking:?}; see above how nobody is kept from writing"));
    }
    let refused = refused(sql);
    match contracts(sql) {
        None if refused.is_empty() => None,
        None => Some(format!(
            "{refused:?}; expand first, and contract in a later version, with a line `-- contracts: N`"
        )),
        Some(_) if refused.is_empty() => Some("it contracts nothing".to_owned()),
        Some(Ok(since)) if since < version && MIGRATOR.version_exists(since) => None,
        Some(since) => Some(format!("it contracts since {since:?}, which is no earlier migration")),
    }
}

#[test]
fn migrations_keep_the_previous_version_working() {
    let newer = || MIGRATOR.iter().filter(|migration| migration.version >= WHILE_OTHERS_WORK);
    assert!(newer().next().is_some());
    for migration in newer() {
        let objection = objection(migration.version, migration.sql.as_str());
        assert!(objection.is_none(), "{}: {objection:?}", migration.version);
    }
}

#[test]
fn contracting_migration_names_the_migration_it_follows() {
    let drop = "ALTER TABLE tasks DROP COLUMN title;";
    let says = |since: &str| {
        objection(40, &format!("-- Titles are elsewhere.\n-- contracts: {since}\n{drop}"))
    };
    assert_eq!(says("34"), None);
    for wrong in ["40", "41", "0", "", "long ago"] {
        assert!(says(wrong).is_some(), "{wrong}");
    }
    assert!(objection(40, drop).is_some());
    assert!(
        objection(40, "-- contracts: 34\nCREATE TABLE y (z INT)").is_some(),
        "there is nothing to contract"
    );
    assert_eq!(objection(40, "CREATE TABLE y (z INT)"), None);
}

#[tokio::test]
async fn database_of_a_newer_version_is_accepted() {
    let database = Database::new().await;
    let apply = async |version: i64| {
        let row = format!("({version}, 'of another version', true, '\\x00', 0)");
        let into = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) VALUES";
        database.execute(&format!("{into} {row}")).await;
    };
    let newest = MIGRATOR.iter().map(|migration| migration.version).max().expect("there are some");
    apply(newest + 1).await;
    apply(newest + 2).await;
    database.store().migrate().await.expect("it goes on");
    // An unknown migration before a known one does not come from a newer version, but from another
    // branch.
    apply(0).await;
    let other = database.store().migrate().await;
    assert!(matches!(other, Err(Error::Internal(_))), "{other:?}");
    database.execute("DELETE FROM _sqlx_migrations WHERE version = 0").await;
    database.store().migrate().await.expect("it goes on");
    // Known migrations must be unchanged.
    database
        .execute(&format!(
            "UPDATE _sqlx_migrations SET checksum = '\\x00' WHERE version = {newest}"
        ))
        .await;
    let changed = database.store().migrate().await;
    assert!(matches!(changed, Err(Error::Internal(_))), "{changed:?}");
}

#[test]
fn statements_that_break_the_previous_version_are_detected() {
    let broken = [
        "ALTER TABLE tasks\n  DROP COLUMN title;",
        "ALTER TABLE IF EXISTS tasks DROP title",
        "alter table tasks rename column title to name",
        "ALTER TABLE tasks ADD COLUMN a INT, ADD COLUMN b NUMERIC(20, 6) NOT NULL",
        "ALTER TABLE tasks ADD b INT NOT NULL",
        "ALTER TABLE tasks ALTER COLUMN title SET NOT NULL",
        "ALTER TABLE tasks ALTER title TYPE bytea",
        "ALTER TABLE tasks ALTER COLUMN title DROP DEFAULT",
        "ALTER TABLE tasks ALTER COLUMN id DROP IDENTITY IF EXISTS",
        "ALTER TABLE tasks ADD CONSTRAINT c CHECK (length(title) > 3)",
        "ALTER TABLE tasks ADD CONSTRAINT c FOREIGN KEY (title) REFERENCES titles (id) NOT VALID",
        "ALTER TABLE tasks ADD COLUMN a INT, ADD FOREIGN KEY (title, a) REFERENCES titles (id, a) NOT VALID",
        "CREATE UNIQUE INDEX i ON tasks (title)",
        "DROP INDEX i",
        "DROP TABLE tasks",
    ];
    for sql in broken {
        assert_eq!(refused(sql).len(), 1, "{sql}");
    }
    let fine =
        "-- drop table tasks;\nALTER TABLE tasks ADD COLUMN a TEXT NOT NULL DEFAULT '', ADD COLUMN b NUMERIC(3, 1);
        CREATE TABLE y (z INT NOT NULL); CREATE UNIQUE INDEX i ON y (z); ALTER TABLE y ADD CONSTRAINT c CHECK (z > 3);
        CREATE INDEX j ON tasks (title); ALTER TABLE tasks ALTER COLUMN title DROP NOT NULL;
        ALTER TABLE tasks ADD COLUMN c UUID, ADD CONSTRAINT f FOREIGN KEY (c) REFERENCES y (z) NOT VALID;";
    assert_eq!(refused(fine), Vec::<String>::new());
}

#[test]
fn index_on_existing_table_must_be_concurrent_and_alone() {
    let concurrently = "CREATE INDEX CONCURRENTLY i ON tasks (title);";
    let both = format!("-- no-transaction\n{concurrently}\nCREATE TABLE y (z INT);");
    for wrong in [
        "CREATE INDEX i ON tasks (title);",
        "CREATE INDEX IF NOT EXISTS i ON ONLY tasks (title)",
        concurrently,
        &both,
    ] {
        assert!(objection(40, wrong).is_some(), "{wrong}");
    }
    for fine in [
        &format!("-- no-transaction\n{concurrently}"),
        "CREATE TABLE y (z INT); CREATE INDEX i ON y (z);",
    ] {
        assert_eq!(objection(40, fine), None, "{fine}");
    }
    assert_eq!(objection(39, "CREATE INDEX i ON tasks (title);"), None, "they have landed");
}

#[test]
fn migrations_that_block_writes_for_a_table_scan_are_detected() {
    for wrong in [
        "ALTER TABLE tasks ADD COLUMN a INT UNIQUE;",
        "ALTER TABLE tasks ADD a INT, ADD b INT CHECK (b > 3)",
        "ALTER TABLE tasks ADD COLUMN a UUID REFERENCES titles (id)",
        "ALTER TABLE tasks ADD COLUMN a INT GENERATED ALWAYS AS (length(title)) STORED",
        "ALTER TABLE tasks ADD COLUMN a UUID, ADD CONSTRAINT c FOREIGN KEY (a) REFERENCES titles (id)",
        "UPDATE tasks SET title = ''",
        "DELETE FROM ONLY tasks WHERE title = ''",
        "-- no-transaction\nUPDATE tasks SET title = ''",
    ] {
        assert!(objection(40, wrong).is_some(), "{wrong}");
    }
    for fine in [
        "ALTER TABLE tasks ADD COLUMN a UUID, ADD CONSTRAINT c FOREIGN KEY (a) REFERENCES titles (id) NOT VALID",
        "ALTER TABLE tasks VALIDATE CONSTRAINT c",
        "CREATE TABLE y (z INT UNIQUE); ALTER TABLE y ADD COLUMN a INT UNIQUE; UPDATE y SET z = 3; INSERT INTO y VALUES (4)",
        "-- no-transaction\nDO $$ DECLARE n INT; BEGIN LOOP n := 3; UPDATE tasks SET title = '' WHERE id = ''; COMMIT; END LOOP; END $$",
    ] {
        assert_eq!(objection(40, fine), None, "{fine}");
    }
}

/// All migrations, and one more.
fn with_migration(sql: &'static str) -> Migrator {
    let version =
        MIGRATOR.iter().map(|migration| migration.version).max().expect("there are some") + 1;
    let no_tx = sql.starts_with("-- no-transaction");
    let sql = sqlx::AssertSqlSafe(sql).into_sql_str();
    let more = Migration::new(version, Cow::Borrowed("more"), MigrationType::Simple, sql, no_tx);
    Migrator::with_migrations(MIGRATOR.iter().cloned().chain([more]).collect())
}

#[tokio::test]
async fn migration_lock_timeout_lets_other_statements_pass() {
    let database = Database::new().await;
    let mut other =
        sqlx::PgConnection::connect_with(&connect_options(database.url()).expect("an address"))
            .await
            .expect("connected");
    other.execute("BEGIN; LOCK TABLE tasks IN ACCESS SHARE MODE").await.expect("locked");
    let store = database.store();
    let migrator = with_migration("ALTER TABLE tasks ADD COLUMN more TEXT");
    let migrates = tokio::spawn(async move { store.migrate_with(&migrator).await });
    // Like a concurrent user of the table.
    let (began, mut longest) = (Instant::now(), Duration::ZERO);
    while began.elapsed() < Duration::from_secs(6) {
        let asked = Instant::now();
        database.execute("SELECT count(*) FROM tasks").await;
        longest = longest.max(asked.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(
        longest > Duration::from_millis(500),
        "the migration did not wait for the table: {longest:?}"
    );
    assert!(!migrates.is_finished(), "it goes on trying");
    other.execute("COMMIT").await.expect("let go");
    migrates.await.expect("it ends").expect("it is applied");
    database.execute("SELECT more FROM tasks").await;
}

#[tokio::test]
async fn concurrent_index_build_waits_for_open_transactions() {
    let database = Database::new().await;
    let mut other =
        sqlx::PgConnection::connect_with(&connect_options(database.url()).expect("an address"))
            .await
            .expect("connected");
    other.execute("BEGIN; LOCK TABLE tasks IN ROW EXCLUSIVE MODE").await.expect("locked");
    let store = database.store();
    let migrator =
        with_migration("-- no-transaction\nCREATE INDEX CONCURRENTLY tasks_more ON tasks (title)");
    let migrates = tokio::spawn(async move { store.migrate_with(&migrator).await });
    // Longer than another migration may wait at a time.
    tokio::time::sleep(Duration::from_secs(3)).await;
    database.execute("UPDATE tasks SET title = title").await;
    other.execute("COMMIT").await.expect("let go");
    migrates.await.expect("it ends").expect("it is applied");
    database
        .execute(
            "DO $$ BEGIN ASSERT (SELECT indisvalid FROM pg_index WHERE indexrelid = 'tasks_more'::regclass); END $$",
        )
        .await;
}
