//! `read_file`: the text of a file. What a script gets is all that it asked for, exactly; what
//! cannot be given so is an error.

use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;

use serde::Deserialize;
use serde_json::{Value, json};

use super::definition::{Definition, Effect, Permission, Provider, whole};
use super::encoding::{ENCODING, Encoding};
use super::error::{NOT_FOUND, OUTSIDE, ToolError, io_error, path_error};
use super::kind::{Kind, MAX_SAFE_INTEGER, named, optional, required};
use super::output::Output;
use super::stop::Stop;
use super::subject;
use crate::workspace::{RelativePath, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "read_file",
    aliases: &["read"],
    summary: "Returns the text of a file exactly as it is, without line numbers.",
    description: "Never a part of what is asked for. Pieces by `offset` and `limit` concatenate to the exact text: each has the \
        characters that begin in its bytes, and is \"\" at the end.",
    parameters: &[
        required("path", Kind::Path, "File, relative to the workspace."),
        optional("start_line", LINE, "1", "First line to return, counted from 1."),
        optional("end_line", LINE, "the last line", "Last line to return, included."),
        named(
            "offset",
            Kind::Integer { min: 0, max: MAX_SAFE_INTEGER },
            "0",
            "First byte; not with lines.",
        ),
        named("limit", LIMIT, "all", "Number of bytes; not with lines."),
        ENCODING,
    ],
    output: Output::Text,
    like: None,
    example: "read_file(\"src/main.rs\", 10, 40)",
    errors: &[
        NOT_FOUND,
        OUTSIDE,
        ("IsADirectory", "when the path is a directory."),
        ("BinaryFile", "when the file is not text."),
        NOT_ENCODED,
        ("FileTooLarge", "when a call cannot return it all; the message says how to go on."),
        (
            "LineOutOfRange",
            "when `start_line` is after the end; the message says how many lines there are.",
        ),
    ],
    effect: Effect::Read,
    permission: Permission::FilesRead,
    subject: subject::path,
    provider: Provider::Host,
    limits: whole(60),
};

const NOT_ENCODED: (&str, &str) =
    ("WrongEncoding", "when the file is not `encoding`; the message names one that fits.");

const TOOL: &str = DEFINITION.name;

const LINE: Kind = Kind::Integer { min: 1, max: MAX_SAFE_INTEGER };

/// At least one character, so that a piece is empty at the end of the file only.
const LIMIT: Kind = Kind::Integer { min: CHARACTER as u64, max: MAX_SAFE_INTEGER };

/// How much of the beginning decides whether a file is text.
pub(super) const BINARY_PROBE: usize = 8 * 1024;

/// How much is read at once, in bytes. Even, so that a unit of UTF-16 is read as a whole.
const BLOCK: u64 = 64 * 1024;

/// Most bytes of one character.
const CHARACTER: usize = 4;

/// Most bytes that a byte of a file takes as JSON, where it is a control character.
const ESCAPED: usize = 6;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    path: String,
    start_line: Option<u64>,
    end_line: Option<u64>,
    offset: Option<u64>,
    limit: Option<u64>,
    #[serde(default)]
    encoding: Encoding,
}

/// The text, which takes at most so many bytes as JSON.
pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
    result_bytes: usize,
) -> Result<String, ToolError> {
    let Arguments { path, start_line, end_line, offset, limit, encoding } = arguments;
    let has_lines = start_line.is_some() || end_line.is_some();
    if has_lines && (offset.is_some() || limit.is_some()) {
        return Err(ToolError::invalid(
            "read_file: give start_line and end_line, or offset and limit, and not some of both.",
        ));
    }
    let (start, end) = (start_line.unwrap_or(1), end_line.unwrap_or(u64::MAX));
    if end < start {
        return Err(ToolError::invalid(format!(
            "read_file: end_line ({end}) is before start_line ({start})."
        )));
    }
    let path = workspace.locate(&path).map_err(|e| path_error(workspace, &e))?;
    let file = workspace.open_file(&path).map_err(|e| path_error(workspace, &e))?;
    let size = file.metadata().map_err(|e| io_error(&path, &e))?.len();
    // Without the quotes around it.
    let room = result_bytes.saturating_sub(2);
    let reading = Reading { path: &path, file, size, encoding, room, stop };
    reading.refuse_other_text()?;
    if has_lines { reading.lines(start, end) } else { reading.bytes(offset.unwrap_or(0), limit) }
}

/// The file is not text.
pub(super) fn binary(path: &RelativePath, size: u64) -> ToolError {
    let path = path.shown();
    // Files that the kernel makes up say that they are empty.
    let of_size = if size > 0 { format!(" of {size} bytes") } else { String::new() };
    let message = format!(
        "{path:?} is a binary file{of_size}; only text can be read and edited. Look at it with a command, for example \
         execute_command(\"file {path}; xxd {path} | head -n 40\"), or take its bytes as characters: \
         read_file({path:?}, {{ limit: 1000, encoding: \"latin1\" }})."
    );
    ToolError::new("BinaryFile", message).with(json!({"path": path, "size": size}))
}

/// One call, of a file that is open.
struct Reading<'a> {
    path: &'a RelativePath,
    file: File,
    /// As the file system has it: 0 where the kernel makes the file up.
    size: u64,
    encoding: Encoding,
    /// What the text may take within the quotes of a JSON string, in bytes.
    room: usize,
    stop: &'a Stop,
}

impl Reading<'_> {
    /// Fails where the file is taken for UTF-8 and begins like something else.
    fn refuse_other_text(&self) -> Result<(), ToolError> {
        if self.encoding != Encoding::Utf8 {
            return Ok(());
        }
        let mut start = vec![0; BINARY_PROBE];
        let read = self.file.read_at(&mut start, 0).map_err(|e| self.failed(&e))?;
        let start = &start[..read];
        if let Some(encoding) = Encoding::of_mark(start) {
            return Err(self.not_encoded(0, encoding));
        }
        if start.contains(&0) { Err(binary(self.path, self.size)) } else { Ok(()) }
    }

    /// The characters that begin in these bytes.
    fn bytes(&self, offset: u64, limit: Option<u64>) -> Result<String, ToolError> {
        // More than can fit.
        let most = (self.encoding.most(self.room) + CHARACTER) as u64;
        let wanted = limit.unwrap_or(u64::MAX).min(most);
        let mut bytes = self.read(offset, wanted + CHARACTER as u64)?;
        let last = usize::try_from(wanted).unwrap_or(usize::MAX).min(bytes.len());
        if limit.is_none_or(|limit| limit > wanted) && last < bytes.len() {
            return Err(self.too_large(offset, limit));
        }
        let first = self.encoding.rest_of_character(&bytes, offset);
        let last = last + self.encoding.rest_of_character(&bytes[last..], offset + wanted);
        bytes.truncate(last.max(first));
        bytes.drain(..first);
        if self.encoding.written(&bytes) > self.room {
            return Err(self.too_large(offset, limit));
        }
        self.encoding.decode(bytes).map_err(|at| self.not_text(offset + (first + at) as u64))
    }

    /// At most so many bytes from here on; fewer only at the end of the file.
    fn read(&self, from: u64, most: u64) -> Result<Vec<u8>, ToolError> {
        let mut bytes = Vec::new();
        (&self.file).seek(SeekFrom::Start(from)).map_err(|e| self.failed(&e))?;
        let mut left = most;
        while left > 0 {
            self.look_at()?;
            let block = left.min(BLOCK);
            let read =
                (&self.file).take(block).read_to_end(&mut bytes).map_err(|e| self.failed(&e))?
                    as u64;
            if read < block {
                break;
            }
            left -= read;
        }
        Ok(bytes)
    }

    /// Whole lines.
    fn lines(&self, start: u64, end: u64) -> Result<String, ToolError> {
        let mut lines = Lines::new(start, end, self.encoding, self.room);
        let mut block = Vec::new();
        loop {
            self.look_at()?;
            block.clear();
            // All of a block, so that only the last one can end within a unit of UTF-16.
            (&self.file).take(BLOCK).read_to_end(&mut block).map_err(|e| self.failed(&e))?;
            if block.is_empty() || lines.take(&block).is_break() {
                break;
            }
        }
        if lines.is_full {
            return Err(self.lines_too_large(&lines));
        }
        if start > 1 && lines.first_byte.is_none() {
            let (path, total) = (self.path.shown(), lines.total());
            let message = format!(
                "read_file: {path:?} has {total} lines; start_line {start} is after its end."
            );
            return Err(ToolError::new("LineOutOfRange", message)
                .with(json!({"path": path, "lines": total})));
        }
        let first = lines.first_byte.unwrap_or(0);
        self.encoding.decode(lines.bytes).map_err(|at| self.not_text(first + at as u64))
    }

    fn look_at(&self) -> Result<(), ToolError> {
        self.stop.check().map_err(|stopped| stopped.into_error(TOOL))
    }

    fn failed(&self, error: &io::Error) -> ToolError {
        io_error(self.path, error)
    }

    /// The byte at this place belongs to no character.
    fn not_text(&self, at: u64) -> ToolError {
        self.not_encoded(at, Encoding::Latin1)
    }

    fn not_encoded(&self, at: u64, other: Encoding) -> ToolError {
        let (path, encoding, other) = (self.path.shown(), self.encoding.name(), other.name());
        let message = format!(
            "read_file: {path:?} is not {encoding}: byte {at} belongs to no character of it. Read it with \
             read_file({path:?}, {{ encoding: {other:?} }}), and write what is to be in the same encoding with \
             create_file(path, text, {{ encoding: {other:?} }}). edit_file leaves bytes that it does not change as they are."
        );
        let details = json!({"path": path, "at": at, "encoding": other});
        ToolError::new(NOT_ENCODED.0, message).with(details)
    }

    /// How large a piece may be that fits whatever is in it: a round number.
    fn piece(&self) -> usize {
        1 << (self.room / ESCAPED).max(1).ilog2()
    }

    fn too_large(&self, offset: u64, limit: Option<u64>) -> ToolError {
        let (path, piece) = (self.path.shown(), self.piece());
        let what = match limit {
            Some(limit) => format!("{limit} bytes of {path:?}"),
            None if self.size > offset => format!("{path:?}, {} bytes,", self.size - offset),
            None => format!("{path:?}"),
        };
        let encoding = match self.encoding {
            Encoding::Utf8 => String::new(),
            encoding => format!(", encoding: {:?}", encoding.name()),
        };
        let message = format!(
            "read_file: {what} is too large for one call, which may return {} bytes, as JSON. Read it in pieces, which put together are \
             the whole: read_file({path:?}, {{ offset: {offset}, limit: {piece}{encoding} }}), then offset {}, and so on, until \"\" \
             comes; or by lines: read_file({path:?}, 1, 1000). To change parts of it use edit_file, to search it grep; commands handle \
             files of any size.",
            self.room + 2,
            offset + piece as u64,
        );
        self.file_too_large(message, json!({"piece": piece}))
    }

    fn lines_too_large(&self, lines: &Lines) -> ToolError {
        let (path, start, piece) = (self.path.shown(), lines.start, self.piece());
        let most =
            format!("too large for one call, which may return {} bytes, as JSON", self.room + 2);
        if lines.line > start {
            let last = lines.line - 1;
            let message = format!(
                "read_file: these lines of {path:?} are {most}. Lines {start} to {last} fit: read_file({path:?}, {start}, {last}); \
                 then go on from line {}.",
                lines.line
            );
            return self.file_too_large(message, json!({"last_line": last}));
        }
        let at = lines.first_byte.unwrap_or(0);
        let message = format!(
            "read_file: line {start} of {path:?} alone is {most}. It begins at byte {at}; read it in pieces, which put together are \
             the whole: read_file({path:?}, {{ offset: {at}, limit: {piece} }}), then offset {}, and so on.",
            at + piece as u64
        );
        self.file_too_large(message, json!({"offset": at, "piece": piece}))
    }

    fn file_too_large(&self, message: String, mut details: Value) -> ToolError {
        details["path"] = self.path.shown().into();
        details["limit"] = (self.room + 2).into();
        if self.size > 0 {
            details["size"] = self.size.into();
        }
        ToolError::new("FileTooLarge", message).with(details)
    }
}

/// Collects the lines asked for from blocks of a file.
struct Lines {
    start: u64,
    end: u64,
    encoding: Encoding,
    room: usize,
    /// The lines, as they are in the file.
    bytes: Vec<u8>,
    /// What they take within the quotes of a JSON string.
    size: usize,
    /// The line that comes next, or goes on, counted from 1.
    line: u64,
    /// Whether something of it was there.
    is_begun: bool,
    /// How much of the file was taken.
    position: u64,
    /// Where the first of the lines begins, if there is one.
    first_byte: Option<u64>,
    /// The lines do not fit, the current one not any more.
    is_full: bool,
}

impl Lines {
    fn new(start: u64, end: u64, encoding: Encoding, room: usize) -> Self {
        Self {
            start,
            end,
            encoding,
            room,
            bytes: Vec::new(),
            size: 0,
            line: 1,
            is_begun: false,
            position: 0,
            first_byte: None,
            is_full: false,
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
            let line_end = self.encoding.line_end(rest);
            let (piece, after) = rest.split_at(line_end.unwrap_or(rest.len()));
            rest = after;
            if self.line >= self.start {
                self.first_byte.get_or_insert(self.position);
                self.size += self.encoding.written(piece);
                if self.size > self.room {
                    self.is_full = true;
                    return Break(());
                }
                self.bytes.extend_from_slice(piece);
            }
            self.position += piece.len() as u64;
            self.is_begun = line_end.is_none();
            self.line += u64::from(line_end.is_some());
        }
        Continue(())
    }

    /// Lines of the whole file, known when its end was reached. What follows the last line feed
    /// counts if it is not empty.
    fn total(&self) -> u64 {
        if self.is_begun { self.line } else { self.line - 1 }
    }
}
