//! commander, yargs, cac, oclif, meow and `parseArgs`.

use super::{argument, called, entry, takes};
use crate::repository::survey::{EntryKind, EntryPoint, Source, text};

const LIBRARIES: [&str; 8] =
    ["commander", "yargs", "oclif", "cac", "sade", "meow", "citty", "node:util"];

pub(super) fn entries(source: &Source<'_>) -> Vec<EntryPoint> {
    let imported = |name: &str| {
        source.lines.iter().any(|line| {
            (line.contains("import") || line.contains("require("))
                && text::literals(line).iter().any(|(_, _, text)| {
                    text == name
                        || text.starts_with(&format!("{name}/"))
                        || text.starts_with(&format!("@{name}/"))
                })
        })
    };
    // Where the library comes in as an argument, its options look the same.
    let options = || {
        source
            .lines
            .iter()
            .filter(|line| text::leading(line, ".option(").iter().any(|name| name.starts_with('-')))
    };
    let library = LIBRARIES
        .iter()
        .find(|name| imported(name))
        .or_else(|| (options().count() > 1).then_some(&LIBRARIES[0]));
    let Some(library) = library else { return plain(source) };
    if *library == "node:util" && !source.text.contains("parseArgs(") {
        return plain(source);
    }
    let lines = &source.lines;
    let mut whole = entry(source, EntryKind::Command, called(source), 0, library);
    let mut first = None;
    let mut within_flags = None;
    for (index, line) in lines.iter().enumerate() {
        let trimmed = line.trim();
        let mut add = |name: String, about: Option<String>| {
            first.get_or_insert(index);
            takes(&mut whole, argument(name, about, index));
        };
        let statement = || text::statement(lines, index).0;
        let calls: [(&str, &str); 6] = [
            (".command(", "subcommand "),
            (".option(", ""),
            (".requiredOption(", ""),
            (".argument(", ""),
            (".positional(", ""),
            (".flag(", ""),
        ];
        if let Some((call, prefix)) = calls.iter().find(|(call, _)| line.contains(call)) {
            let words = text::leading(&statement(), call);
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
                    text::after(&statement(), &["describe:", "description:", ".description("])
                }),
            );
        } else if trimmed.starts_with("static flags")
            || trimmed.starts_with("static override flags")
            || trimmed.starts_with("options: {")
        {
            within_flags = Some(line.len() - line.trim_start().len());
        } else if let Some(outer) = within_flags {
            if trimmed.starts_with('}') && line.len() - line.trim_start().len() <= outer {
                within_flags = None;
            } else if trimmed.contains("Flags.")
                || (trimmed.contains("type:") && trimmed.contains('{'))
            {
                let name = trimmed.split(':').next().unwrap_or_default().trim_matches(['"', '\'']);
                let about = text::after(&statement(), &["description:", "summary:"]);
                add(format!("--{name}"), about);
            }
        } else if whole.about.is_none()
            && (line.contains(".description(") || trimmed.starts_with("static description"))
        {
            whole.about = text::after(&statement(), &[".description(", "description ="]);
        }
    }
    let Some(first) = first else { return plain(source) };
    whole.place = source.place(first);
    vec![whole]
}

/// A script with a first line that says what runs it.
fn plain(source: &Source<'_>) -> Vec<EntryPoint> {
    if source.lines.first().is_some_and(|line| line.starts_with("#!")) {
        return vec![entry(source, EntryKind::Script, called(source), 0, "node")];
    }
    Vec::new()
}
