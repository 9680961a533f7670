//! Times with the database's precision: microseconds.

use jiff::Timestamp;

/// `time` truncated to microseconds, so that a write returns what a later read returns.
pub(crate) fn micros(time: Timestamp) -> Timestamp {
    Timestamp::from_microsecond(time.as_microsecond()).unwrap_or(time)
}

/// `time` as a parameter of a statement.
pub(crate) fn sql(time: Timestamp) -> jiff_sqlx::Timestamp {
    micros(time).into()
}

/// A nullable time as a parameter of a statement.
pub(crate) fn sql_option(time: Option<Timestamp>) -> Option<jiff_sqlx::Timestamp> {
    time.map(sql)
}

/// A nullable time of a row.
pub(crate) fn from_sql_option(time: Option<jiff_sqlx::Timestamp>) -> Option<Timestamp> {
    time.map(Into::into)
}
