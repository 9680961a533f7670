//! The list `reasoning_details`, which arrives in pieces and is sent back as a whole.

use serde_json::Value;

/// Fields whose pieces are concatenated; all others are sent once.
const CONCATENATED_FIELDS: [&str; 3] = ["text", "summary", "data"];

/// The list so far.
#[derive(Debug, Default)]
pub(super) struct Details(Vec<Value>);

impl Details {
    /// Takes further pieces, and returns their visible thinking.
    pub(super) fn push(&mut self, pieces: Vec<Value>) -> String {
        let mut shown = String::new();
        for piece in pieces {
            for field in ["text", "summary"] {
                shown.push_str(piece[field].as_str().unwrap_or_default());
            }
            match self.0.last_mut() {
                Some(last) if continues(last, &piece) => append_piece(last, piece),
                _ => self.0.push(piece),
            }
        }
        shown
    }

    /// The complete list as JSON, once; none when nothing arrived.
    pub(super) fn take(&mut self) -> Option<String> {
        let details = std::mem::take(&mut self.0);
        (!details.is_empty()).then(|| Value::Array(details).to_string())
    }
}

/// Whether `piece` continues `last`: it has the same type and index, and no other id.
fn continues(last: &Value, piece: &Value) -> bool {
    let same = |field: &str| last[field] == piece[field];
    // Encrypted pieces are complete.
    let sealed = piece["type"] == "reasoning.encrypted";
    !sealed
        && same("type")
        && same("index")
        && (piece["id"].is_null() || last["id"].is_null() || same("id"))
}

fn append_piece(last: &mut Value, piece: Value) {
    let Value::Object(piece) = piece else { return };
    for (field, value) in piece {
        match (&mut last[field.as_str()], value) {
            (Value::String(whole), Value::String(more))
                if CONCATENATED_FIELDS.contains(&field.as_str()) =>
            {
                whole.push_str(&more)
            }
            (missing @ Value::Null, value) => *missing = value,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pieces_are_joined_and_encrypted_ones_stay_separate() {
        let mut details = Details::default();
        assert_eq!(details.take(), None);
        let text = |text: &str| json!({"type": "reasoning.text", "text": text, "format": "anthropic-claude-v1", "index": 0});
        assert_eq!(details.push(vec![text("Let me ")]), "Let me ");
        assert_eq!(details.push(vec![text("see.")]), "see.");
        assert_eq!(
            details.push(vec![
                json!({"type": "reasoning.text", "signature": "sig", "index": 0, "text": null})
            ]),
            ""
        );
        let sealed = |data: &str| json!({"type": "reasoning.encrypted", "data": data, "index": 1, "id": "tool_1"});
        details.push(vec![sealed("a"), sealed("b")]);
        let expected = json!([
            {"type": "reasoning.text", "text": "Let me see.", "format": "anthropic-claude-v1", "index": 0, "signature": "sig"},
            sealed("a"), sealed("b"),
        ]);
        assert_eq!(details.take(), Some(expected.to_string()));
        assert_eq!(details.take(), None);
    }
}
