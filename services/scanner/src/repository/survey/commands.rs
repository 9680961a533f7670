//! Command lines that source code defines, by the libraries people define them with.

mod go;
mod node;
mod python;
mod rust;
mod shell;

use super::{Argument, EntryKind, EntryPoint, Found, Source, found::MAX_OF_FILE, number};

/// Longer texts are read no further; how much of them is told is decided later.
const MAX_CHARACTERS: usize = 2000;

/// Looks at a source file.
pub(super) fn look(source: &Source<'_>, language: &str, found: &mut Found) {
    let entries = match language {
        "Python" => python::entries(source),
        "Rust" => rust::entries(source),
        "JavaScript" | "TypeScript" => node::entries(source),
        "Go" => go::entries(source),
        "Shell" => shell::entries(source),
        _ => return,
    };
    for entry in entries {
        found.entry(entry);
    }
}

fn entry(source: &Source<'_>, kind: EntryKind, name: &str, line: usize, with: &str) -> EntryPoint {
    EntryPoint {
        kind,
        name: name.to_owned(),
        place: source.place(line),
        about: None,
        with: Some(with.to_owned()),
        arguments: Vec::new(),
        aside: false,
    }
}

/// Adds what an entry point takes, as long as anybody could read it all.
fn takes(entry: &mut EntryPoint, argument: Argument) {
    if entry.arguments.len() < MAX_OF_FILE {
        entry.arguments.push(argument);
    }
}

fn argument(name: String, about: Option<String>, line: usize) -> Argument {
    let short = |text: String| text.chars().take(MAX_CHARACTERS).collect();
    Argument { name: short(name), about: about.map(short), line: number(line) }
}

/// What a file is called as a command: the folder's name where the file is only the way in.
fn called<'a>(source: &Source<'a>) -> &'a str {
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
