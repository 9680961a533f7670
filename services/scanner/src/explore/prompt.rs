//! The prompt of an exploration. The model's job is described in the agent's instructions, which
//! people may change.

use construct_store::scan::Scan;
use construct_wire::scan::CANDIDATE_SCHEMA;

const TEMPLATE: &str = include_str!("prompt.md");

/// The first message of the exploration.
pub(super) fn initial_prompt(scan: &Scan, brief: &str) -> String {
    TEMPLATE
        .replace("{repository}", &scan.repository)
        .replace("{commit}", &scan.commit)
        .replace("{turns}", &scan.limits.max_turns.to_string())
        .replace("{schema}", CANDIDATE_SCHEMA)
        // Last, because it is the repository's own text.
        .replace("{brief}", brief)
}
