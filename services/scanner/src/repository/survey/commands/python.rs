//! argparse, click, typer and fire.

use super::{MAX_PER_FILE, add_argument, command_name, new_argument, new_entry};
use crate::repository::survey::{Argument, EntryKind, EntryPoint, SourceFile, text};

pub(super) fn entries(source: &SourceFile<'_>) -> Vec<EntryPoint> {
    let (mut found, lines) = (Vec::new(), &source.lines);
    let typer = source.text.contains("import typer") || source.text.contains("from typer");
    // Decorators before their function, with the first line of each.
    let mut decorators: Vec<(usize, String)> = Vec::new();
    let mut parser: Option<usize> = None;
    let mut index = 0;
    while index < lines.len() && found.len() < MAX_PER_FILE {
        let line = lines[index].trim();
        let step = if line.starts_with('@') {
            let (statement, count) = text::statement_at(lines, index);
            decorators.push((index, statement));
            count
        } else if line.starts_with("def ") || line.starts_with("async def ") {
            let (statement, count) = text::statement_at(lines, index);
            found.extend(decorated_command(source, &decorators, &statement, index, typer));
            decorators.clear();
            count
        } else if line.contains("ArgumentParser(") {
            let (statement, count) = text::statement_at(lines, index);
            let name = text::literal_after(&statement, &["prog="])
                .unwrap_or_else(|| command_name(source).to_owned());
            let mut entry = new_entry(source, EntryKind::Command, &name, index, "argparse");
            entry.about = text::literal_after(&statement, &["description="]);
            parser = Some(found.len());
            found.push(entry);
            count
        } else if line.contains(".add_argument(") || line.contains(".add_parser(") {
            let (statement, count) = text::statement_at(lines, index);
            let at = *parser.get_or_insert_with(|| {
                found.push(new_entry(
                    source,
                    EntryKind::Command,
                    command_name(source),
                    index,
                    "argparse",
                ));
                found.len() - 1
            });
            add_argument(&mut found[at], argparse_argument(&statement, index));
            count
        } else if line.contains("fire.Fire(") {
            found.push(new_entry(source, EntryKind::Command, command_name(source), index, "fire"));
            1
        } else {
            if !line.is_empty() && !line.starts_with('#') {
                decorators.clear();
            }
            1
        };
        index += step;
    }
    let main = lines.iter().position(|line| line.starts_with("if __name__ =="));
    if let (true, Some(line)) = (found.is_empty(), main) {
        let mut script = new_entry(source, EntryKind::Script, command_name(source), line, "python");
        script.about = docstring(lines);
        found.push(script);
    }
    if let Some(first) = found.first_mut()
        && first.about.is_none()
    {
        first.about = docstring(lines);
    }
    found
}

fn argparse_argument(statement: &str, index: usize) -> Argument {
    if statement.contains(".add_parser(") {
        let name = text::leading_literals(statement, ".add_parser(")
            .into_iter()
            .next()
            .unwrap_or_default();
        return new_argument(
            format!("subcommand {name}"),
            text::literal_after(statement, &["help=", "description="]),
            index,
        );
    }
    let mut names = text::leading_literals(statement, ".add_argument(").join(", ");
    for (word, label) in [
        ("required=True", "required"),
        ("action=\"store_true\"", "flag"),
        ("action='store_true'", "flag"),
    ] {
        if statement.contains(word) {
            names.push_str(&format!(" ({label})"));
        }
    }
    new_argument(names, text::literal_after(statement, &["help="]), index)
}

/// The command of a function with click or typer decorators.
fn decorated_command(
    source: &SourceFile<'_>,
    decorators: &[(usize, String)],
    definition: &str,
    index: usize,
    typer: bool,
) -> Option<EntryPoint> {
    let is_command = |text: &String| {
        text.contains(".command") || text.contains(".group(") || text.starts_with("@command")
    };
    let (_, decorator) = decorators.iter().find(|(_, text)| is_command(text))?;
    // Bot frameworks have commands, too.
    let click = source.text.contains("click");
    if !typer && !click {
        return None;
    }
    let function = definition
        .trim_start_matches("async ")
        .trim_start_matches("def ")
        .split('(')
        .next()
        .unwrap_or_default();
    let name = text::leading_literals(decorator, "(")
        .into_iter()
        .next()
        .unwrap_or_else(|| function.trim().replace('_', "-"));
    let mut found =
        new_entry(source, EntryKind::Command, &name, index, if typer { "typer" } else { "click" });
    found.about = text::literal_after(decorator, &["help="]).or_else(|| {
        let below = index + text::statement_at(&source.lines, index).1;
        docstring(source.lines.get(below..).unwrap_or_default())
    });
    for (line, decorator) in decorators {
        for (call, positional) in [("option(", false), ("argument(", true)] {
            if decorator.contains(call) {
                let names = text::leading_literals(decorator, call).join(", ");
                let name = if positional { names.to_uppercase() } else { names };
                add_argument(
                    &mut found,
                    new_argument(name, text::literal_after(decorator, &["help="]), *line),
                );
            }
        }
    }
    if typer {
        let parameters = text::function_parameters(definition).into_iter().take(MAX_PER_FILE);
        found.arguments.extend(parameters.map(|text| {
            let about = text::literal_after(&text, &["help="]);
            let name = text.split(" = ").next().unwrap_or_default().chars().take(80).collect();
            new_argument(name, about, index)
        }));
    }
    Some(found)
}

/// The first line of a docstring before any code.
fn docstring(lines: &[&str]) -> Option<String> {
    let first = lines
        .iter()
        .position(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'))?;
    let line = lines[first].trim().trim_start_matches(['r', 'u', 'b']);
    let rest = line.strip_prefix("\"\"\"").or_else(|| line.strip_prefix("'''"))?;
    let rest = rest.trim_end_matches("\"\"\"").trim_end_matches("'''").trim();
    let text =
        if rest.is_empty() { lines.get(first + 1).map_or("", |line| line.trim()) } else { rest };
    (!text.is_empty()).then(|| text.to_owned())
}
