//! clap, with derive macros or builders; and programs without it.

use super::{MAX_PER_FILE, add_argument, command_name, new_argument, new_entry};
use crate::repository::survey::{EntryKind, EntryPoint, SourceFile, text};

pub(super) fn entries(source: &SourceFile<'_>) -> Vec<EntryPoint> {
    let mut found = Vec::new();
    if source.text.contains("clap")
        || source.text.contains("structopt")
        || source.text.contains("argh")
    {
        collect_derived(source, &mut found);
        collect_built(source, &mut found);
    }
    let is_program = source.path.ends_with("src/main.rs") || source.path.contains("src/bin/");
    let main = source.lines.iter().position(|line| line.contains("fn main("));
    if let (true, Some(line)) = (is_program, main) {
        // A crate is usually named like its folder; the manifest tells otherwise.
        let mut program = new_entry(source, EntryKind::Binary, command_name(source), line, "cargo");
        program.about = text::comment_above(&source.lines, 1, &["//!"]).or_else(|| {
            source
                .lines
                .first()
                .and_then(|line| line.strip_prefix("//!"))
                .map(|line| line.trim().to_owned())
        });
        found.push(program);
    }
    found
}

/// Collects `#[derive(Parser)]` items, with their fields or variants.
fn collect_derived(source: &SourceFile<'_>, found: &mut Vec<EntryPoint>) {
    let lines = &source.lines;
    for (index, line) in lines.iter().enumerate() {
        if found.len() >= MAX_PER_FILE {
            return;
        }
        let derives =
            |word: &str| line.trim_start().starts_with("#[derive(") && line.contains(word);
        if !["Parser", "Subcommand", "Args", "StructOpt", "FromArgs"]
            .iter()
            .any(|word| derives(word))
        {
            continue;
        }
        let is_item = |line: &str| line.contains("struct ") || line.contains("enum ");
        let Some(item) = (index + 1..lines.len().min(index + 30))
            .find(|at| is_item(lines[*at]) && !lines[*at].contains("//"))
        else {
            continue;
        };
        let words = lines[item].split(|c: char| !(c.is_alphanumeric() || c == '_'));
        let name =
            words.skip_while(|word| !["struct", "enum"].contains(word)).nth(1).unwrap_or_default();
        let mut entry = new_entry(source, EntryKind::Command, name, item, "clap");
        let attributes = lines[index..item].join(" ");
        entry.about = text::comment_above(lines, index, &["///"])
            .or_else(|| text::comment_above(lines, item, &["///"]))
            .or_else(|| text::literal_after(&attributes, &["about ="]));
        if let Some(called) = text::literal_after(&attributes, &["(name =", " name ="]) {
            entry.name = called;
        }
        let outer = lines[item].len() - lines[item].trim_start().len();
        let (mut doc, mut attribute) = (Vec::new(), String::new());
        let is_enum = lines[item].contains("enum ");
        for (at, line) in lines.iter().enumerate().skip(item + 1).take(400) {
            let depth = line.len() - line.trim_start().len();
            let line = line.trim();
            if depth <= outer && line.starts_with('}') {
                break;
            }
            if depth > outer + 4 || line.is_empty() {
                continue;
            }
            if let Some(text) = line.strip_prefix("///") {
                doc.push(text.trim());
            } else if line.starts_with("#[") {
                attribute.push_str(line);
            } else if line.starts_with(|c: char| c.is_alphabetic()) {
                let field = line.strip_prefix("pub ").unwrap_or(line).trim_end_matches(',');
                let about = (!doc.is_empty()).then(|| doc.join(" "));
                let about = about.or_else(|| text::literal_after(&attribute, &["help ="]));
                let field = field.trim_end_matches(['{', ' ']);
                let name = if is_enum {
                    format!(
                        "subcommand {}",
                        field.split(['(', '{', ' ']).next().unwrap_or_default()
                    )
                } else if attribute.contains("long") || attribute.contains("short") {
                    format!("--{}", field.replace('_', "-"))
                } else {
                    field.to_owned()
                };
                add_argument(&mut entry, new_argument(name, about, at));
                doc.clear();
                attribute.clear();
            }
        }
        found.push(entry);
    }
}

/// Collects `Command::new("x").arg(Arg::new("y"))`.
fn collect_built(source: &SourceFile<'_>, found: &mut Vec<EntryPoint>) {
    let mut current: Option<EntryPoint> = None;
    for (index, line) in source.lines.iter().enumerate() {
        if found.len() >= MAX_PER_FILE {
            return;
        }
        // `std::process` has a `Command::new`, too, which never gets an `Arg`.
        if let Some(call) = ["Command::new(", "App::new("].iter().find(|call| line.contains(**call))
        {
            found.extend(current.take().filter(|entry| !entry.arguments.is_empty()));
            let name = text::leading_literals(line, call).into_iter().next();
            let name = name.unwrap_or_else(|| command_name(source).to_owned());
            current = Some(new_entry(source, EntryKind::Command, &name, index, "clap"));
        }
        let Some(entry) = &mut current else { continue };
        if let Some(name) = text::leading_literals(line, "Arg::new(").into_iter().next() {
            let below = source.lines.iter().skip(index).take(25).enumerate();
            let whole = below
                .take_while(|(at, line)| *at == 0 || !line.contains("Arg::new("))
                .map(|(_, line)| line.trim());
            let about = text::literal_after(&whole.collect::<Vec<_>>().join(" "), &[".help("]);
            add_argument(entry, new_argument(name, about, index));
        } else if let Some(name) = line.split("arg!(").nth(1) {
            add_argument(
                entry,
                new_argument(name.split(')').next().unwrap_or_default().to_owned(), None, index),
            );
        } else if entry.about.is_none() && entry.arguments.is_empty() {
            entry.about = text::literal_after(line, &[".about("]);
        }
    }
    found.extend(current.filter(|entry| !entry.arguments.is_empty()));
}
