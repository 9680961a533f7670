//! Unreadable columns of a task's row.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// The unreadable columns, with the reasons.
#[derive(Debug, Default)]
pub(super) struct UnreadableColumns(Vec<(&'static str, String)>);

impl UnreadableColumns {
    /// Decodes a JSON column. The default value if it is unreadable.
    pub(super) fn json<T: DeserializeOwned + Default>(
        &mut self,
        column: &'static str,
        value: Value,
    ) -> T {
        self.option(column, Some(value)).unwrap_or_default()
    }

    /// Decodes a nullable JSON column.
    pub(super) fn option<T: DeserializeOwned>(
        &mut self,
        column: &'static str,
        value: Option<Value>,
    ) -> Option<T> {
        match serde_json::from_value(value?) {
            Ok(read) => Some(read),
            Err(error) => {
                self.0.push((column, error.to_string()));
                None
            }
        }
    }

    /// Parses a text column with a fixed set of values.
    pub(super) fn text<T>(
        &mut self,
        column: &'static str,
        value: &str,
        parse: fn(&str) -> Option<T>,
    ) -> Option<T> {
        let parsed = parse(value);
        if parsed.is_none() {
            self.0.push((column, format!("unknown value `{value}`")));
        }
        parsed
    }

    pub(super) fn columns(&self) -> Vec<&'static str> {
        self.0.iter().map(|(column, _)| *column).collect()
    }

    /// Describes the unreadable columns. None when there are none.
    pub(super) fn describe(&self) -> Option<String> {
        let columns: Vec<String> =
            self.0.iter().map(|(column, reason)| format!("{column}: {reason}")).collect();
        (!columns.is_empty()).then(|| columns.join("; "))
    }
}
