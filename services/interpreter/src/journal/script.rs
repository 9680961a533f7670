//! The end of a script in the journal, written when another script follows it.
//!
//! The calls alone do not say how a script ended. A script that a limit ended would continue from
//! its calls when it is replayed, and do more after the next script has begun.

use construct_proto::{
    mesh::v1::JournalCompleted,
    v1::{CodeInterpreterResult, ToolUse},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The call number for the end of the script itself; no call has it.
pub(super) const SCRIPT_END: u32 = 0;

/// A script's report as it is stored. Renaming a field changes the stored format.
#[derive(Serialize, Deserialize)]
struct StoredReport {
    output: String,
    error: String,
    /// Number, name, success, duration in microseconds.
    tool_uses: Vec<(u32, String, bool, i64)>,
    /// Arguments and result of each call, as far as they are kept.
    #[serde(default)]
    kept: Vec<(String, String)>,
}

/// The entry for a script that ended with this result when the guest's clock was `clock_micros`.
pub(super) fn encode(
    code: &str,
    result: &CodeInterpreterResult,
    clock_micros: i64,
) -> JournalCompleted {
    let (uses, kept) = (result.tool_uses.iter(), result.tool_uses.iter());
    let report = StoredReport {
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
        result: serde_json::to_string(&report).unwrap_or_default(),
        clock_micros,
        ..JournalCompleted::default()
    }
}

/// The stored report, if the entry is about this code.
pub(super) fn decode(
    id: &str,
    code: &str,
    entry: &JournalCompleted,
) -> Option<CodeInterpreterResult> {
    if entry.arguments_hash != Sha256::digest(code).as_slice() {
        return None;
    }
    let StoredReport { output, error, tool_uses, kept } =
        serde_json::from_str(&entry.result).ok()?;
    let mut kept = kept.into_iter();
    let tool_use = |(number, name, succeeded, duration_micros)| {
        // Entries of earlier versions have none.
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
    fn arguments_and_results_are_stored_but_optional() {
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
