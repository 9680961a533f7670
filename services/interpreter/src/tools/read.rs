//! `read_file`: the text of a file, bounded whatever the file is like.

use std::io::Read;

use serde::Deserialize;
use serde_json::json;

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::encoding;
use super::error::{NOT_FOUND, OUTSIDE, ToolError, io_error, path_error};
use super::kind::{Kind, MAX_SAFE_INTEGER, optional, required};
use super::output::Output;
use super::stop::Stop;
use super::subject;
use crate::workspace::{RelativePath, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "read_file",
    aliases: &["read"],
    summary: "Returns the text of a file exactly as it is, without line numbers.",
    description: "Of a file over 256 KiB only the first part is returned, with a note at the end saying how to read on.\n\
        Lines over 64 KiB are cut, with a marker. UTF-16 is decoded and what is not valid UTF-8 shown as U+FFFD, with a \
        note at the end saying so.",
    parameters: &[
        required("path", Kind::Path, "File, relative to the workspace."),
        optional("start_line", LINE, "1", "First line to return, counted from 1."),
        optional("end_line", LINE, "the last line", "Last line to return, included."),
    ],
    output: Output::Text,
    like: None,
    example: "read_file(\"src/main.rs\", 10, 40)",
    errors: &[
        NOT_FOUND,
        OUTSIDE,
        ("IsADirectory", "when the path is a directory."),
        ("BinaryFile", "when the file is not text."),
        (
            "LineOutOfRange",
            "when `start_line` is after the end; the message says how many lines there are.",
        ),
    ],
    effect: Effect::Read,
    permission: Permission::FilesRead,
    subject: subject::path,
    provider: Provider::Host,
    limits: limits(60, 256),
};

const TOOL: &str = DEFINITION.name;

const LINE: Kind = Kind::Integer { min: 1, max: MAX_SAFE_INTEGER };

/// Most text returned, in bytes, notes not counted.
const MAX_TEXT: usize = 256 * 1024;

/// Most of one line that is returned, in bytes.
const MAX_LINE: usize = 64 * 1024;

/// How far the end of a line that is too long is looked for, in bytes.
const MAX_LINE_SCAN: u64 = 16 << 20;

/// How much of the beginning decides whether a file is text.
pub(super) const BINARY_PROBE: usize = 8 * 1024;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    path: String,
    start_line: Option<u64>,
    end_line: Option<u64>,
}

pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
) -> Result<String, ToolError> {
    let Arguments { path, start_line, end_line } = arguments;
    let (start, end) = (start_line.unwrap_or(1), end_line.unwrap_or(u64::MAX));
    if end < start {
        return Err(ToolError::invalid(format!(
            "read_file: end_line ({end}) is before start_line ({start})."
        )));
    }
    let located = workspace.locate(&path).map_err(|e| path_error(workspace, &e))?;
    let file = workspace.open_file(&located).map_err(|e| path_error(workspace, &e))?;
    let size = file.metadata().map_err(|e| io_error(&located, &e))?.len();
    let (mut file, decoded) = encoding::reader(file).map_err(|e| io_error(&located, &e))?;

    let mut lines = Lines::new(start, end);
    let mut buffer = vec![0; 64 * 1024];
    let mut first = true;
    loop {
        stop.check().map_err(|stopped| stopped.into_error(TOOL))?;
        let read = file.read(&mut buffer).map_err(|e| io_error(&located, &e))?;
        if read == 0 {
            lines.end_of_file();
            break;
        }
        if first && buffer[..read.min(BINARY_PROBE)].contains(&0) {
            return Err(binary(&located, size));
        }
        first = false;
        if lines.take(&buffer[..read]).is_break() {
            break;
        }
    }
    if lines.at_end && start > 1 && start > lines.total() {
        let total = lines.total();
        let message =
            format!("read_file: {path:?} has {total} lines; start_line {start} is after its end.");
        return Err(
            ToolError::new("LineOutOfRange", message).with(json!({"path": path, "lines": total}))
        );
    }
    Ok(lines.into_text(&located, size, decoded))
}

/// The file is not text.
pub(super) fn binary(path: &RelativePath, size: u64) -> ToolError {
    let path = path.shown();
    // Files that the kernel makes up say that they are empty.
    let of_size = if size > 0 { format!(" of {size} bytes") } else { String::new() };
    let message = format!(
        "{path:?} is a binary file{of_size}; only text can be read and edited. Look at it with a command, for example \
         execute_command(\"file {path}; xxd {path} | head -n 40\")."
    );
    ToolError::new("BinaryFile", message).with(json!({"path": path, "size": size}))
}

/// Collects the lines asked for from blocks of a file.
struct Lines {
    start: u64,
    end: u64,
    text: Vec<u8>,
    /// The line being read, counted from 1.
    line: u64,
    /// Where the current line starts in `text`.
    line_start: usize,
    /// Bytes of the current line seen so far, and those of them left out.
    seen: u64,
    cut: u64,
    at_end: bool,
    /// The first line that was not returned because the text is long enough.
    continue_at: Option<u64>,
    /// A line went on for longer than is scanned.
    endless: bool,
}

impl Lines {
    fn new(start: u64, end: u64) -> Self {
        Self {
            start,
            end,
            text: Vec::new(),
            line: 1,
            line_start: 0,
            seen: 0,
            cut: 0,
            at_end: false,
            continue_at: None,
            endless: false,
        }
    }

    /// Takes the next block of the file; breaks when no more is needed.
    fn take(&mut self, block: &[u8]) -> std::ops::ControlFlow<()> {
        use std::ops::ControlFlow::{Break, Continue};
        let mut rest = block;
        while !rest.is_empty() {
            if self.line > self.end {
                return Break(());
            }
            let newline = memchr::memchr(b'\n', rest);
            let (piece, after) = rest.split_at(newline.map_or(rest.len(), |at| at + 1));
            rest = after;
            self.seen += piece.len() as u64;
            if self.line >= self.start && self.add(piece, newline.is_some()).is_break() {
                return Break(());
            }
            if newline.is_some() {
                self.line += 1;
                self.seen = 0;
                self.cut = 0;
                self.line_start = self.text.len();
            }
        }
        Continue(())
    }

    fn add(&mut self, piece: &[u8], complete: bool) -> std::ops::ControlFlow<()> {
        use std::ops::ControlFlow::{Break, Continue};
        let room = MAX_LINE.saturating_sub(self.text.len() - self.line_start);
        if self.cut == 0 && piece.len() <= room {
            self.text.extend_from_slice(piece);
        } else {
            let kept = if self.cut == 0 { room } else { 0 };
            self.text.extend_from_slice(&piece[..kept]);
            if self.cut == 0 {
                self.drop_half_character();
            }
            self.cut += (piece.len() - kept) as u64;
            if complete {
                self.mark_cut();
                self.text.push(b'\n');
            } else if self.cut > MAX_LINE_SCAN {
                self.endless = true;
                self.mark_cut();
                return Break(());
            }
        }
        if self.text.len() > MAX_TEXT {
            self.text.truncate(self.line_start);
            self.continue_at = Some(self.line);
            return Break(());
        }
        Continue(())
    }

    /// A character that the cut went through would look like damage to the file.
    fn drop_half_character(&mut self) {
        let tail = self.text.len().saturating_sub(4).max(self.line_start);
        for from in tail..self.text.len() {
            if let Err(error) = std::str::from_utf8(&self.text[from..])
                && error.error_len().is_none()
            {
                let valid = from + error.valid_up_to();
                self.cut += (self.text.len() - valid) as u64;
                self.text.truncate(valid);
                return;
            }
        }
    }

    fn mark_cut(&mut self) {
        let more = if self.endless { "at least " } else { "" };
        let marker = format!("[... {more}{} more bytes in this line]", self.cut);
        self.text.extend_from_slice(marker.as_bytes());
    }

    fn end_of_file(&mut self) {
        self.at_end = true;
        if self.cut > 0 {
            self.mark_cut();
        }
    }

    /// Lines of the whole file, known when its end was reached. What follows the last newline
    /// counts if it is not empty.
    fn total(&self) -> u64 {
        if self.seen > 0 { self.line } else { self.line - 1 }
    }

    fn into_text(self, path: &RelativePath, size: u64, decoded: bool) -> String {
        let (mut text, damaged) = match String::from_utf8(self.text) {
            Ok(text) => (text, false),
            Err(error) => (String::from_utf8_lossy(error.as_bytes()).into_owned(), true),
        };
        let path = path.shown();
        let mut note = |words: String| {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(&words);
        };
        if let Some(next) = self.continue_at {
            let (first, last) = (self.start, next - 1);
            note(format!(
                "[... cut here: these are lines {first} to {last} of {path}, which has {size} bytes. \
                 Read on with read_file({path:?}, {next}).]\n"
            ));
        }
        if self.endless {
            note(format!(
                "[... cut here: line {} of {path} is too long to read on; the file has {size} bytes.]\n",
                self.line
            ));
        }
        if decoded {
            note(format!(
                "[note: {path} is UTF-16 and is shown decoded; edit_file works on UTF-8 only.]\n"
            ));
        }
        if damaged {
            note(format!(
                "[note: {path} is not valid UTF-8; what could not be read is shown as U+FFFD.]\n"
            ));
        }
        text
    }
}
