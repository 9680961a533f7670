//! The table of tools.

use super::definition::Definition;
use super::{edit, execute, fetch, find, grep, list, print, read, write};

/// The tools, in the order in which models are told of them: where not all fit, the last are told of in one line.
static DEFINITIONS: [Definition; 9] = [
    read::DEFINITION,
    write::DEFINITION,
    edit::DEFINITION,
    list::DEFINITION,
    grep::DEFINITION,
    find::DEFINITION,
    execute::DEFINITION,
    fetch::DEFINITION,
    print::DEFINITION,
];

/// Every tool, in the order in which models are told of them.
#[must_use]
pub fn definitions() -> &'static [Definition] {
    &DEFINITIONS
}

/// The tool of this name or alias.
#[must_use]
pub fn definition(name: &str) -> Option<&'static Definition> {
    DEFINITIONS.iter().find(|tool| tool.is_called(name))
}

/// The TypeScript declarations of all tools, with doc comments, for the system prompt.
#[must_use]
pub fn declarations() -> String {
    DEFINITIONS.iter().map(Definition::declaration).collect::<Vec<_>>().join("\n")
}
