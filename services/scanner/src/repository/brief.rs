//! The summary of a repository for a model: the most useful facts first, within a limit.

use std::fmt::Write as _;

use super::{EntryPoint, Survey};

/// The percentage of the limit that each section may use. What a section leaves goes to the later
/// ones.
const SECTION_SHARES: [(Section, usize); 5] = [
    (Section::Overview, 15),
    (Section::Readme, 20),
    (Section::Modules, 15),
    (Section::Entries, 75),
    (Section::Operations, 100),
];
/// Arguments of one entry point that are listed.
const MAX_ARGUMENTS: usize = 12;

#[derive(Clone, Copy)]
enum Section {
    Overview,
    Readme,
    Modules,
    Entries,
    Operations,
}

/// Summarizes a survey in at most `max_chars` characters.
#[must_use]
pub fn brief(survey: &Survey, max_chars: usize) -> String {
    let (mut text, mut remaining) = (String::new(), max_chars);
    for (part, share) in SECTION_SHARES {
        let room = (max_chars * share / 100).min(remaining);
        let lines = match part {
            Section::Overview => overview(survey),
            Section::Readme => readme(survey),
            Section::Modules => modules(survey),
            Section::Entries => entries(survey),
            Section::Operations => operations(survey),
        };
        let section_text = fit_lines(&lines, room);
        remaining -= section_text.chars().count();
        text.push_str(&section_text);
    }
    text
}

/// Returns as many lines as fit, with a note about missing ones if that fits, too.
fn fit_lines(lines: &[String], room: usize) -> String {
    let (mut text, mut used) = (String::new(), 0);
    for (index, line) in lines.iter().enumerate() {
        let length = line.chars().count() + 1;
        let more = format!("… {} more\n", lines.len() - index);
        let reserve = if index + 1 == lines.len() { 0 } else { more.chars().count() };
        if used + length + reserve > room {
            if used + more.chars().count() <= room && index > 0 {
                text.push_str(&more);
            }
            break;
        }
        text.push_str(line);
        text.push('\n');
        used += length;
    }
    text
}

fn overview(survey: &Survey) -> Vec<String> {
    let mut lines = vec![format!("# Repository\n{} files, {} bytes", survey.files, survey.bytes)];
    let languages: Vec<String> = survey
        .languages
        .iter()
        .take(12)
        .map(|one| format!("{} ({} files)", one.name, one.files))
        .collect();
    lines.push(format!("Languages: {}", languages.join(", ")));
    lines.extend(survey.truncated.iter().map(|text| format!("Not surveyed: {text}")));
    lines
}

fn readme(survey: &Survey) -> Vec<String> {
    let Some(readme) = &survey.readme else { return Vec::new() };
    let heading = format!("\n# README ({}:{})", readme.place.path, readme.place.line);
    std::iter::once(heading).chain(readme.text.lines().map(str::to_owned)).collect()
}

fn modules(survey: &Survey) -> Vec<String> {
    let lines = survey.modules.iter().enumerate().map(|(index, module)| {
        let mut line = if index == 0 { String::from("\n# Packages\n") } else { String::new() };
        let place = format!("{}:{}", module.place.path, module.place.line);
        line.push_str(&format!("- {} {} ({place})", module.kind, module.name));
        if let Some(about) = &module.about {
            line.push_str(&format!(": {about}"));
        }
        if !module.frameworks.is_empty() {
            line.push_str(&format!(" [uses {}]", module.frameworks.join(", ")));
        }
        if !module.members.is_empty() {
            line.push_str(&format!(
                " [members {}]",
                module.members.iter().take(20).cloned().collect::<Vec<_>>().join(", ")
            ));
        }
        line
    });
    lines.collect()
}

fn entries(survey: &Survey) -> Vec<String> {
    let first = |index| if index == 0 { "\n# Entry points\n" } else { "" };
    survey
        .entries
        .iter()
        .enumerate()
        .map(|(index, one)| format!("{}{}", first(index), entry(one)))
        .collect()
}

fn entry(entry: &EntryPoint) -> String {
    let kind = serde_json::to_value(entry.kind)
        .ok()
        .and_then(|kind| kind.as_str().map(str::to_owned))
        .unwrap_or_default();
    let mut text = format!("- {kind} {} ({}:{})", entry.name, entry.place.path, entry.place.line);
    if let Some(about) = &entry.about {
        text.push_str(&format!(": {about}"));
    }
    if let Some(with) = &entry.with {
        text.push_str(&format!(" [{with}]"));
    }
    for argument in entry.arguments.iter().take(MAX_ARGUMENTS) {
        let about = argument.about.as_ref().map(|about| format!(": {about}")).unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = write!(text, "\n    {} (:{}){about}", argument.name, argument.line);
    }
    if let Some(more) = entry.arguments.len().checked_sub(MAX_ARGUMENTS).filter(|more| *more > 0) {
        let _ = write!(text, "\n    … {more} more");
    }
    text
}

fn operations(survey: &Survey) -> Vec<String> {
    let lines = survey.operations.iter().enumerate().map(|(index, operation)| {
        let first = if index == 0 { "\n# Operations\n" } else { "" };
        let about = operation.about.as_ref().map(|about| format!(": {about}")).unwrap_or_default();
        format!(
            "{first}- {} {} ({}:{}){about}",
            operation.kind, operation.name, operation.place.path, operation.place.line
        )
    });
    lines.collect()
}
