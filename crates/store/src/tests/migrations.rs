//! What a migration may do.

use crate::store::MIGRATOR;

/// The first version that is applied while replicas of the version before work.
const WHILE_OTHERS_WORK: i64 = 33;

/// What the version before would not survive, in statements of one kind each: what it reads or writes would be gone, or refused.
const REFUSED: [(&str, &[&str]); 4] = [
    ("alter table", &[" drop column ", " rename ", " set not null", " type "]),
    ("drop table", &[""]),
    ("drop type", &[""]),
    ("alter type", &[" rename "]),
];

/// The statements of a migration, in lower case and on one line each, without comments.
fn statements(sql: &str) -> Vec<String> {
    let lines: Vec<&str> = sql.lines().map(|line| line.split("--").next().unwrap_or_default()).collect();
    let words = |statement: &str| statement.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
    lines.join("\n").split(';').map(words).filter(|statement| !statement.is_empty()).collect()
}

/// Why the version before would not work any more.
fn refused(statement: &str) -> Option<String> {
    for (kind, parts) in REFUSED {
        if let Some(part) = parts.iter().find(|part| statement.starts_with(kind) && statement.contains(**part)) {
            return Some(format!("{kind}…{part}"));
        }
    }
    // Rows that the version before inserts have no such column.
    let added = statement.split(',').filter(|part| part.contains("add column"));
    let demanded =
        |part: &&str| part.contains(" not null") && !part.contains(" default ") && !part.contains(" generated ");
    added.filter(demanded).map(str::to_owned).next()
}

#[test]
fn a_migration_leaves_what_the_version_before_needs() {
    for migration in MIGRATOR.iter().filter(|migration| migration.version >= WHILE_OTHERS_WORK) {
        for statement in statements(migration.sql.as_str()) {
            let refused = refused(&statement);
            assert_eq!(
                refused, None,
                "{}: {statement}; expand first, and contract in a later version",
                migration.version
            );
        }
    }
}

#[test]
fn what_would_break_the_version_before_is_found() {
    let broken = [
        "ALTER TABLE tasks\n  DROP COLUMN title;",
        "alter table tasks rename column title to name",
        "ALTER TABLE tasks ADD COLUMN a INT, ADD COLUMN b TEXT NOT NULL",
        "ALTER TABLE tasks ALTER COLUMN title SET NOT NULL",
        "DROP TABLE tasks",
    ];
    for sql in broken {
        assert!(statements(sql).iter().any(|statement| refused(statement).is_some()), "{sql}");
    }
    let fine = "-- drop table tasks;\nALTER TABLE tasks ADD COLUMN a TEXT NOT NULL DEFAULT '', ADD COLUMN b INT;\nDROP INDEX x; CREATE TABLE y (z INT NOT NULL);";
    assert_eq!(statements(fine).iter().find_map(|statement| refused(statement)), None);
}
