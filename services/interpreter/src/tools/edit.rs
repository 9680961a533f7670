//! `edit_file`: exact replacements, all or none of them.

mod nearest;

use std::borrow::Cow;
use std::io::Read;
use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use similar::{Algorithm, TextDiff};

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::encoding::Encoding;
use super::error::{NOT_FOUND, OUTSIDE, ToolError, io_error, path_error};
use super::kind::{Kind, required};
use super::note;
use super::output::{Output, field, optional_field};
use super::read::{BINARY_PROBE_BYTES, binary};
use super::stop::Stop;
use super::subject;
use super::write::CONTENT;
use crate::workspace::{Expected, Version, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "edit_file",
    aliases: &["edit"],
    summary: "Replaces exact pieces of text in a file.",
    description: "Each `old` must occur exactly once in the file as it was before the call, whitespace \
     included.\nEither all edits are made or none. Line endings and the file's mode are kept.",
    parameters: &[
        required("path", Kind::Path, "File, relative to the workspace."),
        required(
            "diffs",
            Kind::Objects(&[
                required("old", CONTENT, "Current text, with enough context to be unique."),
                required("new", CONTENT, "Text to put in its place; empty to delete it."),
            ]),
            "The edits.",
        ),
    ],
    output: Output::Object(&[
        field("path", Output::Text, "The file, relative to the workspace."),
        field("diff", Output::Text, "The changes, as a unified diff."),
        field("replacements", Output::Integer, "Number of edits made."),
        optional_field("note", Output::Text, "What is missing from the diff."),
    ]),
    base_tool: None,
    example: "edit_file(\"src/main.rs\", [{ old: \"let a = 1;\", new: \"let a = 2;\" }])",
    errors: &[
        NOT_FOUND,
        OUTSIDE,
        ("TextNotFound", "when `old` does not occur; the message shows the most similar place."),
        ("AmbiguousEdit", "when `old` occurs more than once; the message gives the lines."),
        ("OverlappingEdits", "when two edits change the same text."),
        ("FileTooLarge", "when the file has more than 16 MiB."),
        ("BinaryFile", "when the file is not text, or is UTF-16."),
        ("FileChanged", "when something else changed the file during the call."),
    ],
    effect: Effect::Write,
    permission: Permission::FilesWrite,
    subject: subject::path,
    provider: Provider::Host,
    limits: limits(60, 256),
};

const TOOL: &str = DEFINITION.name;

/// Largest file, before and after the edit, in bytes.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Largest diff that is returned, in bytes.
const MAX_DIFF_BYTES: usize = 256 * 1024;

/// Time limit for finding the shortest diff; after it a longer diff is accepted.
const DIFF_TIMEOUT: Duration = Duration::from_secs(1);

/// How many occurrences of an ambiguous text are counted, and how many are listed.
const MAX_COUNTED: usize = 1000;
const MAX_LISTED: usize = 10;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    path: String,
    diffs: Vec<Replacement>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Replacement {
    old: String,
    new: String,
}

#[derive(Serialize)]
pub(super) struct EditResult {
    path: String,
    diff: String,
    replacements: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// A replacement with its position in the file.
struct LocatedEdit<'a> {
    index: usize,
    range: Range<usize>,
    new: Cow<'a, str>,
}

pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
) -> Result<EditResult, ToolError> {
    let Arguments { path, diffs } = arguments;
    let refused = |e| path_error(workspace, &e);
    let located = workspace.locate(&path).map_err(refused)?;
    // Until the file is replaced, no other call writes in this workspace, so that no edit is lost.
    let _writing = workspace.lock_for_writing();
    check_stop(stop)?;

    let file = workspace.open_file(&located).map_err(refused)?;
    let version = Version::from_file(&file, &located).map_err(refused)?;
    let size = file.metadata().map_err(|e| io_error(&located, &e))?.len();
    too_large(&path, size)?;
    let mut before = Vec::new();
    // This bounds a file that grows or does not report its size.
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut before).map_err(|e| io_error(&located, &e))?;
    too_large(&path, before.len() as u64)?;
    if let Some(encoding) = Encoding::from_byte_order_mark(&before) {
        let encoding = encoding.name();
        let message = format!(
            "edit_file: {path:?} is UTF-16; only UTF-8 can be edited. Nothing was changed. Read the text with \
             read_file({path:?}, {{ encoding: {encoding:?} }}) and write all of it with create_file({path:?}, text, \
             {{ encoding: {encoding:?} }})."
        );
        return Err(ToolError::new("BinaryFile", message).with(json!({"path": path, "size": size})));
    }
    if before[..before.len().min(BINARY_PROBE_BYTES)].contains(&0) {
        return Err(binary(&located, size));
    }

    let endings = LineEndings::detect(&before);
    let mut edits = Vec::with_capacity(diffs.len());
    for (index, replacement) in diffs.iter().enumerate() {
        edits.push(locate(&path, &before, endings, index, replacement, stop)?);
    }
    edits.sort_by_key(|edit| edit.range.start);
    check_stop(stop)?;
    refuse_overlaps(&path, &before, &edits)?;

    let after = apply(&before, &edits);
    too_large(&path, after.len() as u64)?;
    check_stop(stop)?;
    let (diff, note) = unified_diff(&located.display(), &before, &after);
    check_stop(stop)?;
    workspace.replace(&located, &after, Expected::Version(version)).map_err(refused)?;
    Ok(EditResult { path: located.display(), diff, replacements: edits.len(), note })
}

/// Checked before each pass over the file. A call may have thousands of edits, each of which takes
/// several passes. Nothing is written before the last.
fn check_stop(stop: &Stop) -> Result<(), ToolError> {
    stop.check().map_err(|stopped| stopped.into_error(TOOL))
}

fn too_large(path: &str, size: u64) -> Result<(), ToolError> {
    if size <= MAX_FILE_BYTES {
        return Ok(());
    }
    let message = format!(
        "edit_file: {path:?} is, or would be, larger than {MAX_FILE_BYTES} bytes; nothing was changed. Use a command such \
         as sed for files of this size."
    );
    Err(ToolError::new("FileTooLarge", message).with(json!({"path": path})))
}

/// Line endings of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineEndings {
    /// No line ends with CR LF.
    Unix,
    /// Every line ends with CR LF.
    Windows,
    /// Some lines end with CR LF.
    Mixed,
}

impl LineEndings {
    fn detect(text: &[u8]) -> Self {
        let mut windows = 0;
        let mut all = 0;
        for at in memchr::memchr_iter(b'\n', text) {
            all += 1;
            windows += usize::from(at > 0 && text[at - 1] == b'\r');
        }
        match windows {
            0 => Self::Unix,
            _ if windows == all => Self::Windows,
            _ => Self::Mixed,
        }
    }
}

fn with_lf(text: &str) -> Cow<'_, str> {
    if text.contains("\r\n") { Cow::Owned(text.replace("\r\n", "\n")) } else { Cow::Borrowed(text) }
}

fn with_crlf(text: &str) -> Cow<'_, str> {
    if text.contains('\n') {
        Cow::Owned(with_lf(text).replace('\n', "\r\n"))
    } else {
        Cow::Borrowed(text)
    }
}

fn locate<'a>(
    path: &str,
    before: &[u8],
    endings: LineEndings,
    index: usize,
    replacement: &'a Replacement,
    stop: &Stop,
) -> Result<LocatedEdit<'a>, ToolError> {
    let (old, new) = (replacement.old.as_str(), replacement.new.as_str());
    if old.is_empty() {
        return Err(ToolError::invalid(format!(
            "edit_file: diffs[{index}].old is empty. Give the text to replace, or use create_file to write a whole \
             file. Nothing was changed."
        )));
    }
    if old == new {
        return Err(ToolError::invalid(format!(
            "edit_file: diffs[{index}].old and diffs[{index}].new are the same. Nothing was changed."
        )));
    }
    // A model writes "\n" whatever the file uses. In a file that uses CR LF throughout, the
    // unchanged text could match from the middle of a line ending.
    let forms: &[(Cow<'a, str>, Cow<'a, str>)] = &match endings {
        LineEndings::Windows => vec![(with_crlf(old), with_crlf(new))],
        LineEndings::Mixed => {
            vec![(Cow::Borrowed(old), Cow::Borrowed(new)), (with_crlf(old), with_crlf(new))]
        }
        LineEndings::Unix => {
            vec![(Cow::Borrowed(old), Cow::Borrowed(new)), (with_lf(old), with_lf(new))]
        }
    };
    for (old, new) in forms {
        let places = occurrences(before, old.as_bytes(), stop)?;
        match places.as_slice() {
            [] => {}
            [start] => {
                return Ok(LocatedEdit {
                    index,
                    range: *start..*start + old.len(),
                    new: new.clone(),
                });
            }
            several => return Err(ambiguous(path, before, index, several)),
        }
    }
    not_found(path, before, index, old, stop)
}

/// The offsets at which `needle` occurs, overlapping occurrences included.
fn occurrences(text: &[u8], needle: &[u8], stop: &Stop) -> Result<Vec<usize>, ToolError> {
    let finder = memchr::memmem::Finder::new(needle);
    let mut found = Vec::new();
    let mut from = 0;
    while found.len() < MAX_COUNTED {
        check_stop(stop)?;
        let Some(at) = text.get(from..).and_then(|rest| finder.find(rest)) else { break };
        found.push(from + at);
        from += at + 1;
    }
    Ok(found)
}

fn line_of(text: &[u8], at: usize) -> usize {
    1 + memchr::memchr_iter(b'\n', &text[..at]).count()
}

fn ambiguous(path: &str, before: &[u8], index: usize, places: &[usize]) -> ToolError {
    let lines: Vec<usize> = places.iter().take(MAX_LISTED).map(|at| line_of(before, *at)).collect();
    let named: Vec<String> = lines.iter().map(ToString::to_string).collect();
    let more = if places.len() > MAX_LISTED { ", …" } else { "" };
    let (count, named) = (places.len(), named.join(", "));
    let least = if count >= MAX_COUNTED { "at least " } else { "" };
    ToolError::new(
        "AmbiguousEdit",
        format!(
            "edit_file: diffs[{index}].old occurs {least}{count} times in {path:?}, at lines {named}{more}. Include \
             more of the surrounding text to make it unique. Nothing was changed."
        ),
    )
    .with(json!({"path": path, "index": index, "occurrences": count, "lines": lines}))
}

/// The error for a text that does not occur, with the most similar text of the file.
fn not_found<T>(
    path: &str,
    before: &[u8],
    index: usize,
    old: &str,
    stop: &Stop,
) -> Result<T, ToolError> {
    let text = String::from_utf8_lossy(before);
    let mut message =
        format!("edit_file: diffs[{index}].old does not occur in {path:?}. Nothing was changed.");
    let mut details = json!({"path": path, "index": index});
    match nearest::find(&text, old, stop).map_err(|stopped| stopped.into_error(TOOL))? {
        Some(near) => {
            let why = if near.only_whitespace { "It differs only in whitespace. " } else { "" };
            let (line, shown) = (near.line, &near.text);
            message.push_str(&format!(
                " {why}The most similar text is at line {line}:\n{shown}\nCopy it exactly, whitespace included."
            ));
            details["nearest"] = json!({"line": line, "text": shown});
        }
        None => message.push_str(" There is no similar text; read the file again."),
    }
    Err(ToolError::new("TextNotFound", message).with(details))
}

fn refuse_overlaps(path: &str, before: &[u8], edits: &[LocatedEdit<'_>]) -> Result<(), ToolError> {
    for pair in edits.windows(2) {
        let [first, second] = pair else { continue };
        if second.range.start < first.range.end {
            let (a, b) = (first.index.min(second.index), first.index.max(second.index));
            let line = line_of(before, second.range.start);
            let message = format!(
                "edit_file: diffs[{a}] and diffs[{b}] change the same text of {path:?}, at line {line}. Combine them \
                 into one. Nothing was changed."
            );
            return Err(ToolError::new("OverlappingEdits", message)
                .with(json!({"path": path, "indices": [a, b], "line": line})));
        }
    }
    Ok(())
}

fn apply(before: &[u8], edits: &[LocatedEdit<'_>]) -> Vec<u8> {
    let mut after = Vec::with_capacity(before.len());
    let mut from = 0;
    for edit in edits {
        after.extend_from_slice(&before[from..edit.range.start]);
        after.extend_from_slice(edit.new.as_bytes());
        from = edit.range.end;
    }
    after.extend_from_slice(&before[from..]);
    after
}

/// The diff, and a note about what is missing from it.
fn unified_diff(path: &str, before: &[u8], after: &[u8]) -> (String, Option<String>) {
    let texts = (String::from_utf8_lossy(before), String::from_utf8_lossy(after));
    let is_replaced = matches!(texts.0, Cow::Owned(_)) || matches!(texts.1, Cow::Owned(_));
    let (before, after) = texts;
    let diff: TextDiff<'_, '_, str> = TextDiff::configure()
        .algorithm(Algorithm::Myers)
        .timeout(DIFF_TIMEOUT)
        .diff_lines(&*before, &*after);
    let mut text = diff
        .unified_diff()
        .context_radius(3)
        .header(&format!("a/{path}"), &format!("b/{path}"))
        .to_string();
    let mut notes = Vec::new();
    if text.len() > MAX_DIFF_BYTES {
        // Cut between lines if possible.
        let end = text.floor_char_boundary(MAX_DIFF_BYTES);
        let end = text[..end].rfind('\n').map_or(end, |at| at + 1);
        notes.push(format!(
            "All edits were made; the diff is truncated, {} more bytes are omitted.",
            text.len() - end
        ));
        text.truncate(end);
    }
    if is_replaced && text.contains(char::REPLACEMENT_CHARACTER) {
        notes.push(note::NOT_UTF8.to_owned());
    }
    (text, note::join(notes))
}
