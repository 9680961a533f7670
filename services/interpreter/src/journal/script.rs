//! The end of a script, as the journal keeps it where another script follows.
//!
//! Calls alone do not say how a script ended: one that was ended by a limit would go on from them
//! when it is run again, and do more things after the next script has begun.

use construct_proto::{
    mesh::v1::JournalCompleted,
    v1::{CodeInterpreterResult, ToolUse},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The number of no call: what ends under it is the script itself.
pub(super) const SCRIPT: u32 = 0;

/// What the model is told of a script.
#[derive(Serialize, Deserialize)]
struct Told {
    output: String,
    error: String,
    /// Number, name, whether it succeeded, microseconds.
    tool_uses: Vec<(u32, String, bool, i64)>,
    /// What is kept of the arguments and the result of each of them.
    #[serde(default)]
    kept: Vec<(String, String)>,
}

/// The entry for a script that has ended so, when the guest's clock showed `clock_micros`.
pub(super) fn encode(
    code: &str,
    result: &CodeInterpreterResult,
    clock_micros: i64,
) -> JournalCompleted {
    let (uses, kept) = (result.tool_uses.iter(), result.tool_uses.iter());
    let told = Told {
        output: result.output.clone(),
        error: result.error.clone(),
        tool_uses: uses
            .map(|tool| (tool.number, tool.name.clone(), tool.succeeded, tool.duration_micros))
            .collect(),
        kept: kept.map(|tool| (tool.arguments.clone(), tool.result.clone())).collect(),
    };
    JournalCompleted {
        name: "script".to_owned(),
        arguments_hash: Sha256::digest(code).to_vec(),
        succeeded: result.error.is_empty(),
        result: serde_json::to_string(&told).unwrap_or_default(),
        clock_micros,
        ..JournalCompleted::default()
    }
}

/// What the model was to be told, if the entry is about this text.
pub(super) fn decode(
    id: &str,
    code: &str,
    entry: &JournalCompleted,
) -> Option<CodeInterpreterResult> {
    if entry.arguments_hash != Sha256::digest(code).as_slice() {
        return None;
    }
    let Told { output, error, tool_uses, kept } = serde_json::from_str(&entry.result).ok()?;
    let mut kept = kept.into_iter();
    let tool_use = |(number, name, succeeded, duration_micros)| {
        // One that was written before they were kept has none.
        let (arguments, result) = kept.next().unwrap_or_default();
        ToolUse { number, name, succeeded, duration_micros, arguments, result }
    };
    let tool_uses = tool_uses.into_iter().map(tool_use).collect();
    Some(CodeInterpreterResult { id: id.to_owned(), output, error, tool_uses })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_calls_were_given_and_gave_is_written_with_them_and_missing_in_older_entries() {
        let used = |arguments: &str, result: &str| ToolUse {
            number: 1,
            name: "grep".into(),
            succeeded: true,
            duration_micros: 5,
            arguments: arguments.into(),
            result: result.into(),
        };
        let result = |used| CodeInterpreterResult {
            id: "c".into(),
            tool_uses: vec![used],
            ..Default::default()
        };
        let mut entry = encode("1", &result(used("{}", "[]")), 7);
        assert_eq!(decode("c", "1", &entry), Some(result(used("{}", "[]"))));
        assert_eq!(decode("c", "2", &entry), None);
        entry.result = r#"{"output":"","error":"","tool_uses":[[1,"grep",true,5]]}"#.to_owned();
        assert_eq!(decode("c", "1", &entry), Some(result(used("", ""))));
    }
}
