//! Command lines that source code defines, by the libraries that define them.

mod go;
mod node;
mod python;
mod rust;
mod shell;

use super::{
    Argument, EntryKind, EntryPoint, Findings, SourceFile, findings::MAX_PER_FILE, line_number,
};

/// Characters of a text that are read; the output limit is applied later.
const MAX_TEXT_CHARS: usize = 2000;

/// Collects the entry points of a source file.
pub(super) fn collect(source: &SourceFile<'_>, language: &str, found: &mut Findings) {
    let entries = match language {
        "Python" => python::entries(source),
        "Rust" => rust::entries(source),
        "JavaScript" | "TypeScript" => node::entries(source),
        "Go" => go::entries(source),
        "Shell" => shell::entries(source),
        _ => return,
    };
    for entry in entries {
        found.add_entry(entry);
    }
}

fn new_entry(
    source: &SourceFile<'_>,
    kind: EntryKind,
    name: &str,
    line: usize,
    with: &str,
) -> EntryPoint {
    EntryPoint {
        kind,
        name: name.to_owned(),
        place: source.location(line),
        about: None,
        with: Some(with.to_owned()),
        arguments: Vec::new(),
        aside: false,
    }
}

/// Adds an argument to an entry point, up to a limit.
fn add_argument(entry: &mut EntryPoint, argument: Argument) {
    if entry.arguments.len() < MAX_PER_FILE {
        entry.arguments.push(argument);
    }
}

fn new_argument(name: String, about: Option<String>, line: usize) -> Argument {
    let short = |text: String| text.chars().take(MAX_TEXT_CHARS).collect();
    Argument { name: short(name), about: about.map(short), line: line_number(line) }
}

/// The command name of a file: the folder's name when the file's own is generic.
fn command_name<'a>(source: &SourceFile<'a>) -> &'a str {
    match source.stem() {
        "main" | "__main__" | "cli" | "index" | "mod" | "lib" | "args" | "cmd" | "root" | "app" => {
            let folder = source
                .path
                .rsplit('/')
                .skip(1)
                .find(|part| !["src", "bin", "cmd", "lib"].contains(part));
            folder.unwrap_or(source.stem())
        }
        stem => stem,
    }
}
