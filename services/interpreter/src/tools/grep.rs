//! `grep`: ripgrep's libraries on a confined walk of the workspace.

mod bounded;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use globset::GlobSet;
use grep_matcher::LineTerminator;
use grep_searcher::{
    BinaryDetection, Searcher, SearcherBuilder, Sink, SinkContext, SinkFinish, SinkMatch,
};
use serde::{Deserialize, Serialize};

use self::bounded::{BoundedMatcher, TOO_LARGE, without_ending};
use super::definition::{Definition, Effect, Permission, Provider, wall_limit};
use super::error::{NOT_FOUND, OUTSIDE, ToolError, path_error};
use super::find::{globs, is_match};
use super::kind::{Kind, NAMES, optional, required};
use super::note;
use super::output::{Output, field, optional_field};
use super::size::json_size;
use super::stop::{Stop, StopReason};
use super::subject;
use crate::workspace::{EntryKind, PathError, RelativePath, Walk, WalkEnd, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "grep",
    aliases: &[],
    summary: "Searches the text of files for a regular expression (regex, in Rust syntax), line by line.",
    description: "Omits binary files, .git, and files that .gitignore or .ignore exclude. Symbolic links are not followed.",
    parameters: &[
        required("query", Kind::Text { min_bytes: 1, max_bytes: 8192 }, "The regular expression."),
        optional("path", Kind::Path, "the workspace", "File or directory to search."),
        optional(
            "options",
            Kind::Object(&[
                optional(
                    "include",
                    NAMES,
                    "all files",
                    "Only files that match one of these globs, for example \"*.rs\".",
                ),
                optional("exclude", NAMES, "none", "Skip files that match one of these globs."),
                optional(
                    "case_sensitive",
                    Kind::Boolean,
                    "true",
                    "Distinguish upper and lower case.",
                ),
                optional("literal", Kind::Boolean, "false", "Treat the query as plain text."),
                optional(
                    "context",
                    Kind::Integer { min: 0, max: 20 },
                    "0",
                    "Lines to show before and after each match.",
                ),
                optional(
                    "max_results",
                    Kind::Integer { min: 1, max: 1_000_000 },
                    "all",
                    "Stop after this many matches.",
                ),
            ]),
            "{}",
            "Options.",
        ),
    ],
    output: Output::Object(&[
        field(
            "matches",
            Output::List(&Output::Object(&[
                field("path", Output::Text, "The file, relative to the workspace."),
                field("line", Output::Integer, "The line, counted from 1."),
                field(
                    "text",
                    Output::Text,
                    "The line; if it has over 500 characters, the part around the match.",
                ),
                optional_field(
                    "before",
                    Output::List(&Output::Text),
                    "Lines before it, if requested.",
                ),
                optional_field(
                    "after",
                    Output::List(&Output::Text),
                    "Lines after it, if requested.",
                ),
                optional_field(
                    "clipped",
                    Output::Boolean,
                    "Whether one of these lines is shortened.",
                ),
            ])),
            "The matching lines, sorted by file.",
        ),
        field("truncated", Output::Boolean, "Whether there may be more matches."),
        field("files_searched", Output::Integer, "Number of text files searched."),
        optional_field("note", Output::Text, "What was omitted, and why."),
    ]),
    base_tool: None,
    example: "grep(\"fn main\", \"src\", { include: \"*.rs\", context: 2 })",
    errors: &[NOT_FOUND, OUTSIDE, TOO_LARGE],
    effect: Effect::Read,
    permission: Permission::FilesRead,
    subject: subject::tree,
    provider: Provider::Host,
    limits: wall_limit(60),
};

const TOOL: &str = DEFINITION.name;

/// Size of a match as JSON without its texts, in bytes: the names of the properties and a number.
const MATCH_OVERHEAD_BYTES: usize = 80;

/// Maximum length of a returned line, in characters.
const MAX_LINE_CHARS: usize = 500;

/// Characters before the match in a shortened line.
const LEADING_CHARS: usize = 100;

/// Memory for one line, in bytes; a file with a longer line is skipped.
const MAX_HEAP_BYTES: usize = 8 << 20;

/// How many files that could not be searched the note lists.
const MAX_LISTED: usize = 5;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    query: String,
    path: Option<String>,
    #[serde(default)]
    options: Options,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    include: Option<Vec<String>>,
    exclude: Option<Vec<String>>,
    case_sensitive: Option<bool>,
    literal: Option<bool>,
    context: Option<usize>,
    max_results: Option<usize>,
}

#[derive(Serialize)]
pub(super) struct GrepResult {
    matches: Vec<Match>,
    truncated: bool,
    files_searched: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

#[derive(Serialize)]
struct Match {
    path: String,
    line: u64,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<Vec<String>>,
    #[serde(skip_serializing_if = "is_false")]
    clipped: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// Returns all matches, up to about `result_bytes` bytes of JSON.
pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
    result_bytes: usize,
) -> Result<GrepResult, ToolError> {
    let Arguments { query, path, options } = arguments;
    let refused = |e: PathError| path_error(workspace, &e);
    let base = match path {
        Some(path) => workspace.locate(&path).map_err(refused)?,
        None => RelativePath::root(),
    };
    let include =
        options.include.as_deref().map(|list| globs(TOOL, "include", list)).transpose()?;
    let exclude =
        options.exclude.as_deref().map(|list| globs(TOOL, "exclude", list)).transpose()?;
    let mut search = Search {
        matcher: BoundedMatcher::new(
            &query,
            options.literal.unwrap_or(false),
            options.case_sensitive.unwrap_or(true),
            stop,
        )?,
        searcher: searcher(options.context.unwrap_or(0)),
        stop,
        stopped: None,
        context: options.context.unwrap_or(0),
        max_results: options.max_results.unwrap_or(usize::MAX),
        result: GrepResult { matches: Vec::new(), truncated: false, files_searched: 0, note: None },
        // With a reserve for the lines after the last match. A result that is still too large is
        // rejected as a whole.
        room: result_bytes - result_bytes / 8,
        is_full: false,
        is_replaced: false,
        unsearched: Vec::new(),
    };
    let mut end = WalkEnd::Complete;
    if workspace.file_type(&base).map_err(refused)? == rustix::fs::FileType::Directory {
        let walk = Walk { recursive: true, include_ignored: false };
        let walked = workspace.walk(&base, walk, &mut |entry| {
            search.stopped = stop.check().err();
            if search.is_over() {
                return ControlFlow::Break(());
            }
            if entry.kind == EntryKind::File
                && selected(include.as_ref(), exclude.as_ref(), entry.path, &base)
                && let Some(file) = entry.open()
            {
                search.file(file, entry.path);
            }
            if search.is_over() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        end = walked.map_err(refused)?;
    } else {
        let file = workspace.open_file(&base).map_err(refused)?;
        if search.file(file, base.as_path()) == SearchOutcome::Binary {
            search.unsearched.push((base.as_path().to_owned(), "is a binary file"));
        }
    }
    if search.stopped == Some(StopReason::Cancelled) {
        return Err(StopReason::Cancelled.into_error(TOOL));
    }
    Ok(search.into_result(end))
}

fn selected(
    include: Option<&GlobSet>,
    exclude: Option<&GlobSet>,
    path: &Path,
    base: &RelativePath,
) -> bool {
    include.is_none_or(|globs| is_match(globs, path, base))
        && !exclude.is_some_and(|globs| is_match(globs, path, base))
}

fn searcher(context: usize) -> Searcher {
    SearcherBuilder::new()
        .line_terminator(LineTerminator::crlf())
        .line_number(true)
        .before_context(context)
        .after_context(context)
        .heap_limit(Some(MAX_HEAP_BYTES))
        .binary_detection(BinaryDetection::quit(0))
        .build()
}

struct Search<'a> {
    matcher: BoundedMatcher<'a>,
    searcher: Searcher,
    stop: &'a Stop,
    stopped: Option<StopReason>,
    /// Number of lines before and after each match.
    context: usize,
    max_results: usize,
    result: GrepResult,
    /// Remaining size for matches, in bytes of JSON.
    room: usize,
    /// A match did not fit.
    is_full: bool,
    /// A line had invalid UTF-8.
    is_replaced: bool,
    /// Files that could not be searched, and why.
    unsearched: Vec<(PathBuf, &'static str)>,
}

/// The outcome of searching one file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SearchOutcome {
    Complete,
    Partial,
    Binary,
}

impl Search<'_> {
    fn is_over(&self) -> bool {
        self.stopped.is_some() || self.result.truncated
    }

    fn file(&mut self, file: File, path: &Path) -> SearchOutcome {
        let first = self.result.matches.len();
        let mut collector = Collector {
            path: path.to_string_lossy().into_owned(),
            matcher: &self.matcher,
            context: self.context,
            max_results: self.max_results,
            first,
            result: &mut self.result,
            room: &mut self.room,
            is_full: &mut self.is_full,
            is_replaced: &mut self.is_replaced,
            recent: VecDeque::new(),
            binary: false,
        };
        let reader = Stoppable { file, stop: self.stop };
        let searched = self.searcher.search_reader(&self.matcher, reader, &mut collector);
        let binary = collector.binary;
        self.stopped = self.stop.check().err();
        if binary {
            // Matches before the file turned out to be binary are noise.
            self.result.matches.truncate(first);
            return SearchOutcome::Binary;
        }
        match searched {
            Ok(()) => {
                self.result.files_searched += 1;
                SearchOutcome::Complete
            }
            Err(error) => {
                if self.stopped.is_none() {
                    let too_long = error.kind() == io::ErrorKind::Other;
                    let why =
                        if too_long { "has a line that is too long" } else { "cannot be read" };
                    self.unsearched.push((path.to_owned(), why));
                }
                SearchOutcome::Partial
            }
        }
    }

    /// The result, with a note about what is missing from it.
    fn into_result(self, end: WalkEnd) -> GrepResult {
        let Self { mut result, stopped, unsearched, is_full, is_replaced, .. } = self;
        result.truncated |= end != WalkEnd::Complete || stopped.is_some() || !unsearched.is_empty();
        let mut notes = Vec::new();
        if let Some(why) = note::incomplete(end, stopped) {
            notes.push(format!(
                "The search is incomplete: {why}. Give a directory with `path`, or files with `include`."
            ));
        } else if is_full {
            notes.push(format!(
                "There are more than these {} matches, but one call cannot return more. Search a directory with \
                 `path`, certain files with `include`, or use a more specific query.",
                result.matches.len()
            ));
        }
        if !unsearched.is_empty() {
            let named: Vec<String> = unsearched
                .iter()
                .take(MAX_LISTED)
                .map(|(path, why)| format!("{} {why}", path.display()))
                .collect();
            let more = unsearched.len().saturating_sub(MAX_LISTED);
            let more = if more > 0 { format!(", and {more} more") } else { String::new() };
            notes.push(format!(
                "Not completely searched: {}{more}. Use a command for such files.",
                named.join(", ")
            ));
        }
        let clipped = result.matches.iter().filter(|one| one.clipped).count();
        if clipped > 0 {
            notes.push(format!(
                "In {clipped} matches, a line has more than {MAX_LINE_CHARS} characters and is shortened; \
                 read_file(path, line, line) returns all of it."
            ));
        }
        if is_replaced {
            notes.push(note::NOT_UTF8.to_owned());
        }
        result.note = note::join(notes);
        result
    }
}

/// A file that fails to read once the call is stopped: searching a large file takes seconds.
struct Stoppable<'a> {
    file: File,
    stop: &'a Stop,
}

impl Read for Stoppable<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.check().is_err() {
            return Err(io::Error::other("stopped"));
        }
        self.file.read(buffer)
    }
}

struct Collector<'a> {
    path: String,
    matcher: &'a BoundedMatcher<'a>,
    context: usize,
    max_results: usize,
    /// Index of the file's first match in the result.
    first: usize,
    result: &'a mut GrepResult,
    room: &'a mut usize,
    is_full: &'a mut bool,
    is_replaced: &'a mut bool,
    /// The most recent lines, matches or not, with their numbers: at most [`Collector::context`].
    recent: VecDeque<(u64, Line)>,
    binary: bool,
}

impl Collector<'_> {
    /// Whether the second line is at most [`Collector::context`] lines after the first.
    fn is_near(&self, line: u64, later: u64) -> bool {
        later.saturating_sub(line) <= self.context as u64
    }

    /// Adds a line to the context of its neighbors. The searcher reports a line between two matches
    /// once, but it belongs to both; a matching line also belongs to its neighbors.
    fn add_line(&mut self, number: u64, line: Line) {
        *self.is_replaced |= line.is_replaced;
        if self.context == 0 {
            return;
        }
        for at in (self.first..self.result.matches.len()).rev() {
            if !self.is_near(self.result.matches[at].line, number) {
                break;
            }
            *self.room = self.room.saturating_sub(json_size(&line.text));
            let found = &mut self.result.matches[at];
            found.clipped |= line.is_clipped;
            if let Some(after) = &mut found.after {
                after.push(line.text.clone());
            }
        }
        if self.recent.len() == self.context {
            self.recent.pop_front();
        }
        self.recent.push_back((number, line));
    }

    fn lines_before(&self, number: u64) -> impl Iterator<Item = &Line> {
        self.recent
            .iter()
            .filter(move |(above, _)| self.is_near(*above, number))
            .map(|(_, line)| line)
    }
}

impl Sink for &mut Collector<'_> {
    type Error = io::Error;

    fn matched(&mut self, _searcher: &Searcher, hit: &SinkMatch<'_>) -> Result<bool, io::Error> {
        if self.result.matches.len() >= self.max_results {
            self.result.truncated = true;
            return Ok(false);
        }
        let number = hit.line_number().unwrap_or(0);
        let line = Line::clip(hit.bytes(), self.matcher.place(hit.bytes()));
        let before: Vec<&Line> = self.lines_before(number).collect();
        let clipped = line.is_clipped || before.iter().any(|line| line.is_clipped);
        let size = MATCH_OVERHEAD_BYTES
            + json_size(&self.path)
            + json_size(&line.text)
            + before.iter().map(|line| json_size(&line.text)).sum::<usize>();
        let before =
            (self.context > 0).then(|| before.into_iter().map(|line| line.text.clone()).collect());
        let Some(left) = self.room.checked_sub(size) else {
            self.result.truncated = true;
            *self.is_full = true;
            return Ok(false);
        };
        *self.room = left;
        let text = line.text.clone();
        self.add_line(number, line);
        let after = (self.context > 0).then(Vec::new);
        self.result.matches.push(Match {
            path: self.path.clone(),
            line: number,
            text,
            before,
            after,
            clipped,
        });
        Ok(true)
    }

    fn context(&mut self, _searcher: &Searcher, line: &SinkContext<'_>) -> Result<bool, io::Error> {
        self.add_line(line.line_number().unwrap_or(0), Line::clip(line.bytes(), 0));
        Ok(true)
    }

    fn finish(&mut self, _searcher: &Searcher, finish: &SinkFinish) -> Result<(), io::Error> {
        self.binary = finish.binary_byte_offset().is_some();
        Ok(())
    }
}

/// Whether a character may begin here: continuation bytes are 10xxxxxx.
fn is_boundary(line: &[u8], at: usize) -> bool {
    line.get(at).is_none_or(|byte| byte & 0xc0 != 0x80)
}

/// A line of a result, without its ending.
#[derive(Debug)]
struct Line {
    text: String,
    /// The line was shortened.
    is_clipped: bool,
    /// Invalid UTF-8 was replaced.
    is_replaced: bool,
}

impl Line {
    /// The line; of a long line the part around the byte `at`.
    fn clip(line: &[u8], at: usize) -> Self {
        let line = without_ending(line);
        // A character has at most four bytes, so more distant bytes cannot be shown. Cuts are at
        // character boundaries.
        let between = |at: usize| {
            (at.saturating_sub(3)..=at).rev().find(|at| is_boundary(line, *at)).unwrap_or(at)
        };
        let is_short = line.len() <= 4 * MAX_LINE_CHARS
            && String::from_utf8_lossy(line).chars().count() <= MAX_LINE_CHARS;
        let from =
            if is_short { 0 } else { between(at.min(line.len()).saturating_sub(LEADING_CHARS)) };
        let near = &line[from..between(line.len().min(from + 4 * MAX_LINE_CHARS))];
        let text = String::from_utf8_lossy(near);
        let shown: String = text.chars().take(MAX_LINE_CHARS).collect();
        let is_clipped = from > 0 || from + near.len() < line.len() || shown.len() < text.len();
        Self { text: shown, is_clipped, is_replaced: matches!(text, Cow::Owned(_)) }
    }
}
