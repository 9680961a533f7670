//! `grep`: ripgrep's libraries over the confined walk.

mod bounded;

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

use self::bounded::{Bounded, TOO_LARGE, without_ending};
use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::{NOT_FOUND, OUTSIDE, ToolError, path_error};
use super::find::{globs, is_match};
use super::kind::{Kind, NAMES, optional, required};
use super::note;
use super::output::{Output, field, optional_field};
use super::stop::{Stop, Stopped};
use super::subject;
use crate::workspace::{EntryKind, PathError, RelativePath, Walk, WalkEnd, Workspace};

pub(super) const DEFINITION: Definition = Definition {
    name: "grep",
    aliases: &[],
    summary: "Searches the text of files for a regular expression (regex, in Rust syntax), line by line.",
    description: "Leaves out binary files, .git, and what .gitignore and .ignore name. Symbolic links are not followed.",
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
                optional("exclude", NAMES, "none", "Not files that match one of these globs."),
                optional(
                    "case_sensitive",
                    Kind::Boolean,
                    "true",
                    "Distinguish upper and lower case.",
                ),
                optional("literal", Kind::Boolean, "false", "Take the query as plain text."),
                optional(
                    "context",
                    Kind::Integer { min: 0, max: 20 },
                    "0",
                    "Lines to show before and after each match.",
                ),
                optional(
                    "max_results",
                    Kind::Integer { min: 1, max: 2000 },
                    "200",
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
                field("text", Output::Text, "The line; a long one is clipped around the match."),
                optional_field(
                    "before",
                    Output::List(&Output::Text),
                    "Lines before it, if asked for.",
                ),
                optional_field(
                    "after",
                    Output::List(&Output::Text),
                    "Lines after it, if asked for.",
                ),
            ])),
            "The lines that match, sorted by file.",
        ),
        field("truncated", Output::Boolean, "Whether there may be more matches."),
        field("files_searched", Output::Integer, "How many text files were searched."),
        optional_field("note", Output::Text, "What was left out, and why."),
    ]),
    like: None,
    example: "grep(\"fn main\", \"src\", { include: \"*.rs\", context: 2 })",
    errors: &[NOT_FOUND, OUTSIDE, TOO_LARGE],
    effect: Effect::Read,
    permission: Permission::FilesRead,
    subject: subject::tree,
    provider: Provider::Host,
    limits: limits(60, 512),
};

const TOOL: &str = DEFINITION.name;

/// Matches returned when nothing else is asked for.
const DEFAULT_RESULTS: usize = 200;

/// Most text returned, in bytes.
const MAX_TEXT: usize = 512 * 1024;

/// Most of one line that is returned, in characters.
const MAX_LINE: usize = 500;

/// Characters kept in front of a match in a line that is clipped.
const LEAD: usize = 100;

/// Memory for one line, in bytes; a file with a longer one is skipped.
const MAX_HEAP: usize = 8 << 20;

/// Files named in the note that could not be searched.
const MAX_NAMED: usize = 5;

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
pub(super) struct Found {
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
}

pub(super) fn run(
    workspace: &Workspace,
    arguments: Arguments,
    stop: &Stop,
) -> Result<Found, ToolError> {
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
        matcher: Bounded::new(
            &query,
            options.literal.unwrap_or(false),
            options.case_sensitive.unwrap_or(true),
            stop,
        )?,
        searcher: searcher(options.context.unwrap_or(0)),
        stop,
        stopped: None,
        context: options.context.unwrap_or(0),
        max_results: options.max_results.unwrap_or(DEFAULT_RESULTS),
        found: Found { matches: Vec::new(), truncated: false, files_searched: 0, note: None },
        text: 0,
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
        if search.file(file, base.as_path()) == Searched::Binary {
            search.unsearched.push((base.as_path().to_owned(), "is a binary file"));
        }
    }
    if search.stopped == Some(Stopped::Cancelled) {
        return Err(Stopped::Cancelled.into_error(TOOL));
    }
    Ok(search.into_found(end))
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
        .heap_limit(Some(MAX_HEAP))
        .binary_detection(BinaryDetection::quit(0))
        .build()
}

struct Search<'a> {
    matcher: Bounded<'a>,
    searcher: Searcher,
    stop: &'a Stop,
    stopped: Option<Stopped>,
    /// Lines wanted before and after each match.
    context: usize,
    max_results: usize,
    found: Found,
    text: usize,
    /// Files that could not be searched, and why.
    unsearched: Vec<(PathBuf, &'static str)>,
}

/// What became of one file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Searched {
    Whole,
    InPart,
    Binary,
}

impl Search<'_> {
    fn is_over(&self) -> bool {
        self.stopped.is_some() || self.found.truncated
    }

    fn file(&mut self, file: File, path: &Path) -> Searched {
        let first = self.found.matches.len();
        let mut collector = Collector {
            path: path.to_string_lossy().into_owned(),
            matcher: &self.matcher,
            context: self.context,
            max_results: self.max_results,
            first,
            found: &mut self.found,
            text: &mut self.text,
            recent: VecDeque::new(),
            binary: false,
        };
        let reader = Stoppable { file, stop: self.stop };
        let searched = self.searcher.search_reader(&self.matcher, reader, &mut collector);
        let binary = collector.binary;
        self.stopped = self.stop.check().err();
        if binary {
            // What was found before the file turned out to be binary is noise.
            self.found.matches.truncate(first);
            return Searched::Binary;
        }
        match searched {
            Ok(()) => {
                self.found.files_searched += 1;
                Searched::Whole
            }
            Err(error) => {
                if self.stopped.is_none() {
                    let too_long = error.kind() == io::ErrorKind::Other;
                    let why =
                        if too_long { "has a line that is too long" } else { "cannot be read" };
                    self.unsearched.push((path.to_owned(), why));
                }
                Searched::InPart
            }
        }
    }

    /// The result, with a note of what it lacks.
    fn into_found(self, end: WalkEnd) -> Found {
        let Self { mut found, stopped, unsearched, .. } = self;
        let enough = found.truncated;
        found.truncated |= end != WalkEnd::Complete || stopped.is_some();
        let mut notes = Vec::new();
        if let Some(why) = note::incomplete(end, stopped) {
            notes.push(format!(
                "Not everything was searched: {why}. Name a directory with `path`, or files with `include`."
            ));
        } else if enough {
            notes.push(format!(
                "There may be more than these {} matches; ask for more with max_results, or for less with `path`, `include` or \
                 a longer query.",
                found.matches.len()
            ));
        }
        if !unsearched.is_empty() {
            let named: Vec<String> = unsearched
                .iter()
                .take(MAX_NAMED)
                .map(|(path, why)| format!("{} {why}", path.display()))
                .collect();
            let more = unsearched.len().saturating_sub(MAX_NAMED);
            let more = if more > 0 { format!(", and {more} more") } else { String::new() };
            notes.push(format!(
                "Not searched to the end: {}{more}. Use a command for such files.",
                named.join(", ")
            ));
        }
        found.note = (!notes.is_empty()).then(|| notes.join(" "));
        found
    }
}

/// A file that ends early when the call does: searching a large one takes seconds.
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
    matcher: &'a Bounded<'a>,
    context: usize,
    max_results: usize,
    /// The place of the file's first match among all.
    first: usize,
    found: &'a mut Found,
    text: &'a mut usize,
    /// The last lines seen, matches or not, with their numbers: at most [`Collector::context`].
    recent: VecDeque<(u64, String)>,
    binary: bool,
}

impl Collector<'_> {
    /// Whether the second line stands at most [`Collector::context`] lines below the first.
    fn is_near(&self, line: u64, later: u64) -> bool {
        later.saturating_sub(line) <= self.context as u64
    }

    /// The searcher shows a line between two matches once. It belongs to both, as a line that
    /// matches belongs to its neighbors.
    fn see(&mut self, line: u64, text: String) {
        if self.context == 0 {
            return;
        }
        for at in (self.first..self.found.matches.len()).rev() {
            if !self.is_near(self.found.matches[at].line, line) {
                break;
            }
            *self.text += text.len();
            if let Some(after) = &mut self.found.matches[at].after {
                after.push(text.clone());
            }
        }
        if self.recent.len() == self.context {
            self.recent.pop_front();
        }
        self.recent.push_back((line, text));
    }

    fn before(&self, line: u64) -> Vec<String> {
        self.recent
            .iter()
            .filter(|(above, _)| self.is_near(*above, line))
            .map(|(_, text)| text.clone())
            .collect()
    }
}

impl Sink for &mut Collector<'_> {
    type Error = io::Error;

    fn matched(&mut self, _searcher: &Searcher, hit: &SinkMatch<'_>) -> Result<bool, io::Error> {
        if self.found.matches.len() >= self.max_results || *self.text >= MAX_TEXT {
            self.found.truncated = true;
            return Ok(false);
        }
        let (line, text) =
            (hit.line_number().unwrap_or(0), clip(hit.bytes(), self.matcher.place(hit.bytes())));
        let before = (self.context > 0).then(|| self.before(line));
        *self.text +=
            self.path.len() + text.len() + before.iter().flatten().map(String::len).sum::<usize>();
        self.see(line, text.clone());
        let after = (self.context > 0).then(Vec::new);
        self.found.matches.push(Match { path: self.path.clone(), line, text, before, after });
        Ok(true)
    }

    fn context(&mut self, _searcher: &Searcher, line: &SinkContext<'_>) -> Result<bool, io::Error> {
        self.see(line.line_number().unwrap_or(0), clip(line.bytes(), 0));
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

/// A line without its ending, clipped around the byte `at`.
fn clip(line: &[u8], at: usize) -> String {
    let line = without_ending(line);
    // Four bytes for a character at most: what is further away cannot be shown. Cuts go between
    // characters.
    let between = |at: usize| {
        (at.saturating_sub(3)..=at).rev().find(|at| is_boundary(line, *at)).unwrap_or(at)
    };
    let from =
        if line.len() <= MAX_LINE { 0 } else { between(at.min(line.len()).saturating_sub(LEAD)) };
    let near = &line[from..between(line.len().min(from + 4 * MAX_LINE))];
    let text = String::from_utf8_lossy(near);
    let shown: String = text.chars().take(MAX_LINE).collect();
    let cut_after = from + near.len() < line.len() || shown.len() < text.len();
    format!("{}{shown}{}", if from > 0 { "…" } else { "" }, if cut_after { "…" } else { "" })
}
