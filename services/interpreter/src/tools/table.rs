//! The table of tools, and how a model is told of them.

use super::definition::Definition;
use super::{
    delete, edit, environment, execute, fetch, find, grep, list, llm, print, program, read, save,
    search, secrets, tasks, write,
};

/// The tools, in the order in which models are told of them: where not all fit, the last are told
/// of in one line.
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

/// Stands between the declarations and the tools that are only named.
const MORE: &str = "// Further tools; tools.describe(\"name\") returns the declaration of one:\n";

/// Stands at the end when not even the names of all fit.
const MOST: &str = "// There are more tools. tools.search(\"words\") finds them by what they do.\n";

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

/// The TypeScript declarations of the tools for the system prompt, in at most `budget` bytes: with
/// doc comments as long as they fit, then as a signature and a summary in one line each, and if
/// those do not fit either, with a note how the rest is found. The same budget always gives the
/// same text, which vendors can therefore cache.
#[must_use]
pub fn declarations(budget: usize) -> String {
    let full: Vec<String> = DEFINITIONS.iter().map(|tool| tool.declaration() + "\n").collect();
    let short: Vec<String> = DEFINITIONS
        .iter()
        .map(|tool| format!("// {}  {}\n", tool.signature(), tool.summary))
        .collect();
    // The more declarations, the fewer lines: looked for from all declarations down to none.
    let size = |declared: usize| {
        let rest: usize = short[declared..].iter().map(String::len).sum();
        let declared: usize = full[..declared].iter().map(String::len).sum();
        declared + if rest > 0 { MORE.len() + rest } else { 0 }
    };
    let declared = (0..=full.len()).rev().find(|declared| size(*declared) <= budget);
    if let Some(declared) = declared {
        let (full, short) = (full[..declared].concat(), short[declared..].concat());
        return if short.is_empty() { full } else { full + MORE + &short };
    }
    let mut text = MORE.to_owned();
    for line in short {
        if text.len() + line.len() + MOST.len() > budget {
            break;
        }
        text.push_str(&line);
    }
    text + MOST
}
