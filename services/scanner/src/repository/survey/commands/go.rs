//! cobra, and the `flag` package of the standard library.

use super::{MAX_PER_FILE, add_argument, command_name, new_argument, new_entry};
use crate::repository::survey::{EntryKind, EntryPoint, SourceFile, text};

pub(super) fn entries(source: &SourceFile<'_>) -> Vec<EntryPoint> {
    let (mut found, lines): (Vec<EntryPoint>, _) = (Vec::new(), &source.lines);
    for (index, line) in lines.iter().enumerate() {
        if found.len() >= MAX_PER_FILE {
            break;
        }
        if line.contains("cobra.Command{") {
            let below = lines[index..].iter().take(25);
            let field = |word: &str| {
                below
                    .clone()
                    .find(|line| line.trim().starts_with(word))
                    .and_then(|line| text::literal_after(line, &[word]))
            };
            let usage = field("Use:").unwrap_or_else(|| command_name(source).to_owned());
            let mut command = new_entry(source, EntryKind::Command, &usage, index, "cobra");
            command.about = field("Short:").or_else(|| field("Long:"));
            found.push(command);
        } else if line.contains("Flags().") {
            let (statement, _) = text::statement_at(lines, index);
            let words: Vec<String> =
                text::string_literals(&statement).into_iter().map(|(_, _, text)| text).collect();
            if let (Some(command), Some(name)) = (found.last_mut(), words.first()) {
                let about = words.last().filter(|_| words.len() > 1).cloned();
                add_argument(command, new_argument(format!("--{name}"), about, index));
            }
        } else if let Some(name) = standard_flag_name(line) {
            if found.is_empty() {
                found.push(new_entry(
                    source,
                    EntryKind::Command,
                    command_name(source),
                    index,
                    "flag",
                ));
            }
            let (statement, _) = text::statement_at(lines, index);
            let words = text::string_literals(&statement);
            let about = words.last().filter(|_| words.len() > 1).map(|(_, _, text)| text.clone());
            if let Some(command) = found.last_mut() {
                add_argument(command, new_argument(format!("-{name}"), about, index));
            }
        }
    }
    let main = lines.iter().position(|line| line.starts_with("func main()"));
    if let (true, Some(line)) = (found.is_empty() && source.text.contains("package main"), main) {
        found.push(new_entry(source, EntryKind::Binary, command_name(source), line, "go"));
    }
    found
}

/// The name in `flag.String("name", …)` and similar calls.
fn standard_flag_name(line: &str) -> Option<String> {
    const KINDS: [&str; 8] =
        ["String", "Int", "Int64", "Uint", "Bool", "Float64", "Duration", "Var"];
    let rest = line.split("flag.").nth(1)?;
    let kind = rest.split('(').next()?.trim_end_matches("Var");
    if !(KINDS.contains(&kind) || kind.is_empty()) {
        return None;
    }
    text::string_literals(rest).into_iter().next().map(|(_, _, name)| name)
}
