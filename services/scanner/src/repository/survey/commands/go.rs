//! cobra, and the flags of the standard library.

use super::{MAX_OF_FILE, argument, called, entry, takes};
use crate::repository::survey::{EntryKind, EntryPoint, Source, text};

pub(super) fn entries(source: &Source<'_>) -> Vec<EntryPoint> {
    let (mut found, lines): (Vec<EntryPoint>, _) = (Vec::new(), &source.lines);
    for (index, line) in lines.iter().enumerate() {
        if found.len() >= MAX_OF_FILE {
            break;
        }
        if line.contains("cobra.Command{") {
            let below = lines[index..].iter().take(25);
            let say = |word: &str| {
                below
                    .clone()
                    .find(|line| line.trim().starts_with(word))
                    .and_then(|line| text::after(line, &[word]))
            };
            let usage = say("Use:").unwrap_or_else(|| called(source).to_owned());
            let mut command = entry(source, EntryKind::Command, &usage, index, "cobra");
            command.about = say("Short:").or_else(|| say("Long:"));
            found.push(command);
        } else if line.contains("Flags().") {
            let (statement, _) = text::statement(lines, index);
            let words: Vec<String> =
                text::literals(&statement).into_iter().map(|(_, _, text)| text).collect();
            if let (Some(command), Some(name)) = (found.last_mut(), words.first()) {
                let about = words.last().filter(|_| words.len() > 1).cloned();
                takes(command, argument(format!("--{name}"), about, index));
            }
        } else if let Some(name) = standard(line) {
            if found.is_empty() {
                found.push(entry(source, EntryKind::Command, called(source), index, "flag"));
            }
            let (statement, _) = text::statement(lines, index);
            let words = text::literals(&statement);
            let about = words.last().filter(|_| words.len() > 1).map(|(_, _, text)| text.clone());
            if let Some(command) = found.last_mut() {
                takes(command, argument(format!("-{name}"), about, index));
            }
        }
    }
    let main = lines.iter().position(|line| line.starts_with("func main()"));
    if let (true, Some(line)) = (found.is_empty() && source.text.contains("package main"), main) {
        found.push(entry(source, EntryKind::Binary, called(source), line, "go"));
    }
    found
}

/// `flag.String("name", …)` and its kin.
fn standard(line: &str) -> Option<String> {
    const KINDS: [&str; 8] =
        ["String", "Int", "Int64", "Uint", "Bool", "Float64", "Duration", "Var"];
    let rest = line.split("flag.").nth(1)?;
    let kind = rest.split('(').next()?.trim_end_matches("Var");
    if !(KINDS.contains(&kind) || kind.is_empty()) {
        return None;
    }
    text::literals(rest).into_iter().next().map(|(_, _, name)| name)
}
