//! What cannot be read of a task's row.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// The columns that cannot be read, with why.
#[derive(Debug, Default)]
pub(super) struct UnreadableColumns(Vec<(&'static str, String)>);

impl UnreadableColumns {
    /// A column of JSON; where it cannot be read, what is there without one.
    pub(super) fn json<T: DeserializeOwned + Default>(
        &mut self,
        column: &'static str,
        value: Value,
    ) -> T {
        self.option(column, Some(value)).unwrap_or_default()
    }

    /// A column of JSON that may be empty.
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

    /// A column of words, of which some are known.
    pub(super) fn text<T>(
        &mut self,
        column: &'static str,
        word: &str,
        parse: fn(&str) -> Option<T>,
    ) -> Option<T> {
        let known = parse(word);
        if known.is_none() {
            self.0.push((column, format!("`{word}` is not known")));
        }
        known
    }

    pub(super) fn columns(&self) -> Vec<&'static str> {
        self.0.iter().map(|(column, _)| *column).collect()
    }

    /// What cannot be read, and why. None when everything can.
    pub(super) fn describe(&self) -> Option<String> {
        let words: Vec<String> =
            self.0.iter().map(|(column, why)| format!("{column}: {why}")).collect();
        (!words.is_empty()).then(|| words.join("; "))
    }
}
