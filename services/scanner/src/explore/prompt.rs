//! What the model is told of a scan. What its job is stands in its agent's instructions, which
//! people may change.

use construct_store::scan::Scan;
use construct_wire::scan::CANDIDATE_SCHEMA;

const ASKED: &str = include_str!("prompt.md");

/// The first message.
pub(super) fn first(scan: &Scan, brief: &str) -> String {
    ASKED
        .replace("{repository}", &scan.repository)
        .replace("{commit}", &scan.commit)
        .replace("{turns}", &scan.limits.max_turns.to_string())
        .replace("{schema}", CANDIDATE_SCHEMA)
        // Last, because it is the repository's own text.
        .replace("{brief}", brief)
}
