//! Removal of NUL, the only character that PostgreSQL cannot store.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::Value;

use crate::Error;

/// Replaces NUL, which neither `text` nor `jsonb` can hold. The output of a script may contain it,
/// and a task must not stall because its result cannot be stored.
const REPLACEMENT: &str = "\u{FFFD}";

/// `text` without NUL.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    if text.contains('\0') {
        Cow::Owned(text.replace('\0', REPLACEMENT))
    } else {
        Cow::Borrowed(text)
    }
}

/// `text` without NUL, if there is any text.
pub(crate) fn clean_option(text: Option<&str>) -> Option<String> {
    text.map(|text| clean(text).into_owned())
}

/// `texts` without NUL.
pub(crate) fn clean_list(texts: &[String]) -> Vec<String> {
    texts.iter().map(|text| clean(text).into_owned()).collect()
}

/// `value` as JSON without NUL.
pub(crate) fn json(value: &impl Serialize) -> Result<Value, Error> {
    let mut value = serde_json::to_value(value).map_err(Error::internal)?;
    clean_value(&mut value);
    Ok(value)
}

fn clean_value(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Cow::Owned(cleaned) = clean(text) {
                *text = cleaned;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(clean_value),
        Value::Object(fields) => {
            if fields.keys().any(|key| key.contains('\0')) {
                *fields = std::mem::take(fields)
                    .into_iter()
                    .map(|(key, value)| (clean(&key).into_owned(), value))
                    .collect();
            }
            fields.values_mut().for_each(clean_value);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nul_in_json_keys_and_strings_is_replaced() {
        let value = json(&serde_json::json!({"a\0": ["x\0y", {"b": "\0"}], "c": "\\u0000"}))
            .expect("it is JSON");
        assert_eq!(
            value,
            serde_json::json!({"a\u{FFFD}": ["x\u{FFFD}y", {"b": "\u{FFFD}"}], "c": "\\u0000"})
        );
    }
}
