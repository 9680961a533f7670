//! commander, yargs, cac, oclif, meow and `parseArgs`.

use super::{add_argument, command_name, new_argument, new_entry};
use crate::repository::survey::{EntryKind, EntryPoint, SourceFile, text};

const LIBRARIES: [&str; 8] =
    ["commander", "yargs", "oclif", "cac", "sade", "meow", "citty", "node:util"];

pub(super) fn entries(source: &SourceFile<'_>) -> Vec<EntryPoint> {
    let imported = |name: &str| {
        source.lines.iter().any(|line| {
            (line.contains("import") || line.contains("require("))
                && text::string_literals(line).iter().any(|(_, _, text)| {
                    text == name
                        || text.starts_with(&format!("{name}/"))
                        || text.starts_with(&format!("@{name}/"))
                })
        })
    };
    // When the library is passed as an argument, its options look the same.
    let options = || {
        source.lines.iter().filter(|line| {
            text::leading_literals(line, ".option(").iter().any(|name| name.starts_with('-'))
        })
    };
    let library = LIBRARIES
        .iter()
        .find(|name| imported(name))
        .or_else(|| (options().count() > 1).then_some(&LIBRARIES[0]));
    let Some(library) = library else { return shebang_script(source) };
    if *library == "node:util" && !source.text.contains("parseArgs(") {
        return shebang_script(source);
    }
    let lines = &source.lines;
    let mut command = new_entry(source, EntryKind::Command, command_name(source), 0, library);
    let mut first = None;
    let mut flags_indent = None;
    for (index, line) in lines.iter().enumerate() {
        let trimmed = line.trim();
        let mut add = |name: String, about: Option<String>| {
            first.get_or_insert(index);
            add_argument(&mut command, new_argument(name, about, index));
        };
        let statement = || text::statement_at(lines, index).0;
        let calls: [(&str, &str); 6] = [
            (".command(", "subcommand "),
            (".option(", ""),
            (".requiredOption(", ""),
            (".argument(", ""),
            (".positional(", ""),
            (".flag(", ""),
        ];
        if let Some((call, prefix)) = calls.iter().find(|(call, _)| line.contains(call)) {
            let words = text::leading_literals(&statement(), call);
            let Some(name) = words.first() else { continue };
            let yargs = *library == "yargs" && prefix.is_empty();
            let name = if yargs && !name.starts_with('-') {
                format!("--{name}")
            } else {
                format!("{prefix}{name}")
            };
            let about = words.get(1).cloned();
            add(
                name,
                about.or_else(|| {
                    text::literal_after(
                        &statement(),
                        &["describe:", "description:", ".description("],
                    )
                }),
            );
        } else if trimmed.starts_with("static flags")
            || trimmed.starts_with("static override flags")
            || trimmed.starts_with("options: {")
        {
            flags_indent = Some(line.len() - line.trim_start().len());
        } else if let Some(outer) = flags_indent {
            if trimmed.starts_with('}') && line.len() - line.trim_start().len() <= outer {
                flags_indent = None;
            } else if trimmed.contains("Flags.")
                || (trimmed.contains("type:") && trimmed.contains('{'))
            {
                let name = trimmed.split(':').next().unwrap_or_default().trim_matches(['"', '\'']);
                let about = text::literal_after(&statement(), &["description:", "summary:"]);
                add(format!("--{name}"), about);
            }
        } else if command.about.is_none()
            && (line.contains(".description(") || trimmed.starts_with("static description"))
        {
            command.about = text::literal_after(&statement(), &[".description(", "description ="]);
        }
    }
    let Some(first) = first else { return shebang_script(source) };
    command.place = source.location(first);
    vec![command]
}

/// A script with a shebang line.
fn shebang_script(source: &SourceFile<'_>) -> Vec<EntryPoint> {
    if source.lines.first().is_some_and(|line| line.starts_with("#!")) {
        return vec![new_entry(source, EntryKind::Script, command_name(source), 0, "node")];
    }
    Vec::new()
}
