//! The table of tools, and their declarations for models.

use super::definition::Definition;
use super::{
    delete, edit, environment, execute, fetch, find, grep, list, llm, print, program, read, save,
    search, secrets, tasks, write,
};

/// The tools, in the order in which they are declared to models: if not all fit, the last ones get
/// one line each.
static DEFINITIONS: [Definition; 30] = [
    read::DEFINITION,
    write::DEFINITION,
    edit::DEFINITION,
    list::DEFINITION,
    grep::DEFINITION,
    find::DEFINITION,
    save::DEFINITION,
    execute::DEFINITION,
    print::DEFINITION,
    fetch::DEFINITION,
    secrets::GET,
    llm::ASK,
    llm::JSON,
    llm::EMBED,
    tasks::SPAWN,
    tasks::AWAIT,
    tasks::SEND,
    tasks::PARENT,
    tasks::HAND_OFF,
    tasks::LIST,
    delete::DEFINITION,
    search::SEARCH,
    search::DESCRIBE,
    program::GIT,
    program::NODE,
    program::PYTHON,
    program::NPM,
    environment::SETENV,
    environment::GETENV,
    environment::PWD,
];

/// Separates the declarations from the tools that are only listed.
const LIST_HEADER: &str = "// More tools; tools.describe(\"name\") returns a declaration:\n";

/// Ends a list that does not contain all tools.
const SEARCH_HINT: &str =
    "// There are more tools. tools.search(\"words\") finds them by what they do.\n";

/// All tools, in the order in which they are declared to models.
#[must_use]
pub fn definitions() -> &'static [Definition] {
    &DEFINITIONS
}

/// The tool of this name or alias.
#[must_use]
pub fn definition(name: &str) -> Option<&'static Definition> {
    DEFINITIONS.iter().find(|tool| tool.has_name(name))
}

/// The TypeScript declarations of the tools for the system prompt, in at most `budget` bytes: with
/// doc comments as long as they fit, then as a signature and a summary in one line each, and if
/// those do not fit either, with a note about how to find the rest. The same budget always gives
/// the same text, so that vendors can cache it.
#[must_use]
pub fn declarations(budget: usize) -> String {
    let full: Vec<String> = DEFINITIONS.iter().map(|tool| tool.declaration() + "\n").collect();
    let short: Vec<String> = DEFINITIONS
        .iter()
        .map(|tool| format!("// {}  {}\n", tool.signature(), tool.summary))
        .collect();
    // Tries from all declarations down to none: more declarations mean fewer lines.
    let size = |declared: usize| {
        let rest: usize = short[declared..].iter().map(String::len).sum();
        let declared: usize = full[..declared].iter().map(String::len).sum();
        declared + if rest > 0 { LIST_HEADER.len() + rest } else { 0 }
    };
    let declared = (0..=full.len()).rev().find(|declared| size(*declared) <= budget);
    if let Some(declared) = declared {
        let (full, short) = (full[..declared].concat(), short[declared..].concat());
        return if short.is_empty() { full } else { full + LIST_HEADER + &short };
    }
    let mut text = LIST_HEADER.to_owned();
    for line in short {
        if text.len() + line.len() + SEARCH_HINT.len() > budget {
            break;
        }
        text.push_str(&line);
    }
    text + SEARCH_HINT
}
