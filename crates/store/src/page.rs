//! Keyset pagination: a page begins after the last row of the previous page, whatever was inserted
//! meanwhile.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::Error;

/// Later than every stored time, for the first page of a descending order.
const LAST_TIME: Timestamp = Timestamp::constant(253_000_000_000, 0);
/// Earlier than every stored time.
const FIRST_TIME: Timestamp = Timestamp::constant(-60_000_000_000, 0);
/// Greater than every name: names are ASCII letters, digits, dots, dashes and underscores, compared
/// byte by byte.
const LAST_NAME: &str = "~";

/// The sort key of a list. Rows with equal values are ordered by id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Key {
    /// When it was created.
    #[default]
    CreatedAt,
    /// When it last changed. Rows that change while a list is read may appear twice or not at all.
    UpdatedAt,
    /// Its name.
    Name,
}

/// The order of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The sort key.
    pub key: Key,
    /// Whether the greatest value comes first.
    pub descending: bool,
}

impl Default for Order {
    fn default() -> Self {
        Self { key: Key::CreatedAt, descending: true }
    }
}

/// A part of a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Page {
    /// Rows at most.
    pub limit: u32,
    /// The order of the whole list.
    pub order: Order,
    /// The last row of the previous page; none for the first page.
    pub after: Option<Cursor>,
}

/// A position in a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cursor {
    /// The row's value of the order's key.
    pub value: CursorValue,
    /// The row's id.
    pub id: Uuid,
}

/// A value of the sort key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CursorValue {
    /// Of [`Key::CreatedAt`] and [`Key::UpdatedAt`].
    Time(Timestamp),
    /// Of [`Key::Name`].
    Name(String),
}

impl Cursor {
    pub(crate) fn new(
        key: Key,
        id: Uuid,
        name: &str,
        created_at: Timestamp,
        updated_at: Timestamp,
    ) -> Self {
        let value = match key {
            Key::CreatedAt => CursorValue::Time(created_at),
            Key::UpdatedAt => CursorValue::Time(updated_at),
            Key::Name => CursorValue::Name(name.to_owned()),
        };
        Self { value, id }
    }
}

impl Page {
    pub(crate) fn limit(&self) -> i64 {
        self.limit.into()
    }

    /// The position that a page in an order by time begins after. There always is one, so that the
    /// statement can compare with it unconditionally and use an index.
    pub(crate) fn after_time(&self) -> Result<(jiff_sqlx::Timestamp, Uuid), Error> {
        let (time, id) = match &self.after {
            Some(Cursor { value: CursorValue::Time(time), id }) => (*time, *id),
            Some(Cursor { value: CursorValue::Name(_), .. }) => return Err(wrong_order()),
            None if self.order.descending => (LAST_TIME, Uuid::max()),
            None => (FIRST_TIME, Uuid::nil()),
        };
        Ok((crate::time::sql(time), id))
    }

    /// The position that a page in an order by name begins after.
    pub(crate) fn after_name(&self) -> Result<(&str, Uuid), Error> {
        match &self.after {
            Some(Cursor { value: CursorValue::Name(name), id }) => Ok((name, *id)),
            Some(Cursor { value: CursorValue::Time(_), .. }) => Err(wrong_order()),
            None if self.order.descending => Ok((LAST_NAME, Uuid::max())),
            None => Ok(("", Uuid::nil())),
        }
    }
}

fn wrong_order() -> Error {
    Error::internal("the cursor belongs to another order")
}
