//! Shell scripts, with their options.

use super::{add_argument, command_name, new_argument, new_entry};
use crate::repository::survey::{EntryKind, EntryPoint, SourceFile, text};

pub(super) fn entries(source: &SourceFile<'_>) -> Vec<EntryPoint> {
    // Without a shebang line, it is part of other scripts.
    if !source.lines.first().is_some_and(|line| line.starts_with("#!")) {
        return Vec::new();
    }
    let mut script = new_entry(source, EntryKind::Shell, command_name(source), 0, "shell");
    let begin =
        source.lines.iter().skip(1).position(|line| !line.trim().is_empty()).map_or(1, |at| at + 1);
    let end = source
        .lines
        .iter()
        .skip(begin)
        .position(|line| !line.starts_with('#'))
        .map_or(begin, |at| at + begin);
    script.about = text::comment_above(&source.lines, end, &["#"]);
    for (index, line) in source.lines.iter().enumerate() {
        let trimmed = line.trim();
        if let Some(rest) = trimmed.split("getopts ").nth(1) {
            let letters = rest
                .split_whitespace()
                .next()
                .unwrap_or_default()
                .trim_matches(['"', '\''])
                .trim_start_matches(':');
            for (at, letter) in
                letters.char_indices().filter(|(_, letter)| letter.is_ascii_alphanumeric())
            {
                let valued = letters[at + 1..].starts_with(':');
                add_argument(
                    &mut script,
                    new_argument(
                        format!("-{letter}{}", if valued { " VALUE" } else { "" }),
                        None,
                        index,
                    ),
                );
            }
        } else if trimmed.starts_with('-') && trimmed.contains(')') {
            let pattern = trimmed.split(')').next().unwrap_or_default();
            let parts: Vec<&str> = pattern.split('|').map(str::trim).collect();
            let is_option = |part: &&str| {
                part.len() > 1
                    && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_=*".contains(c))
            };
            if parts.iter().all(|part| is_option(part) && part.starts_with('-'))
                && pattern != "--"
                && pattern != "-*"
            {
                let about = trimmed.split(" # ").nth(1).map(str::to_owned);
                add_argument(&mut script, new_argument(parts.join(", "), about, index));
            }
        }
    }
    vec![script]
}
