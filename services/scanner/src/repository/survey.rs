//! Finds what people start in a repository, without a model, so that the model spends its tokens on
//! the meaning.
//!
//! Files are read line by line with patterns, and manifests with memory-safe parsers; nothing is
//! executed. Every finding has a location. The result for a snapshot is deterministic.

mod commands;
mod findings;
mod interfaces;
mod languages;
mod manifests;
mod text;

use std::{
    cell::OnceCell,
    collections::{BTreeMap, HashMap},
    io,
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

pub(crate) use self::findings::Findings;
use super::{
    MaskedSnapshot,
    blocking::{blocking, ensure_wanted},
    snapshot::is_binary,
};

/// Limits of a survey.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SurveyLimits {
    /// Bytes of a file that are read.
    pub file_bytes: u64,
    /// The same for files that must be read completely: notebooks, package manifests, interface
    /// descriptions.
    pub document_bytes: u64,
    /// Bytes of all files that are read.
    pub bytes: u64,
    /// Manifests.
    pub modules: usize,
    /// Entry points.
    pub entries: usize,
    /// Arguments of one entry point.
    pub arguments: usize,
    /// Operations of interfaces.
    pub operations: usize,
    /// Characters of one text, such as a description.
    pub text: usize,
    /// Characters of the README.
    pub readme: usize,
    /// The time limit. Files that were not read by then are reported.
    pub time: Duration,
}

impl Default for SurveyLimits {
    fn default() -> Self {
        Self {
            file_bytes: 512 << 10,
            document_bytes: 4 << 20,
            bytes: 512 << 20,
            modules: 500,
            entries: 2000,
            arguments: 60,
            operations: 1000,
            text: 200,
            readme: 3000,
            time: Duration::from_secs(300),
        }
    }
}

/// A file and a line in it, counted from 1.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Location {
    /// The file.
    pub path: String,
    /// The line.
    pub line: u32,
}

/// The findings of a survey.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survey {
    /// The number of files.
    pub files: u64,
    /// Their total size in bytes.
    pub bytes: u64,
    /// The languages, most bytes first. Vendored files do not count.
    pub languages: Vec<Language>,
    /// The README nearest to the root.
    pub readme: Option<Readme>,
    /// Packages, crates and other things with a manifest, those nearest to the root first.
    pub modules: Vec<Module>,
    /// The entry points, the likeliest first.
    pub entries: Vec<EntryPoint>,
    /// The operations of interfaces.
    pub operations: Vec<Operation>,
    /// Which lists were truncated, and what was not read.
    pub truncated: Vec<String>,
}

/// A language.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Language {
    /// Its name.
    pub name: String,
    /// The number of files.
    pub files: u64,
    /// Their total size in bytes.
    pub bytes: u64,
}

/// The beginning of a README.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readme {
    /// Where the text begins.
    pub place: Location,
    /// Its first paragraphs, without images and badges.
    pub text: String,
}

/// A package or another unit with a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// The kind: `cargo`, `python`, `node`, `go`, `docker`, …
    pub kind: String,
    /// Its name; the folder's when the manifest has none.
    pub name: String,
    /// Its description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// The location of its name.
    pub place: Location,
    /// Well-known libraries that characterize it: web frameworks, command lines, models, databases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frameworks: Vec<String>,
    /// The workspace's members, as the manifest writes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<String>,
}

/// The kind of an entry point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A command line that the source defines.
    Command,
    /// A program that a manifest names.
    Binary,
    /// A shell script.
    Shell,
    /// A notebook.
    Notebook,
    /// A workflow that people may start.
    Workflow,
    /// A file that can be executed.
    Script,
    /// A recipe of a Makefile or justfile.
    Recipe,
    /// A script of a package's manifest.
    PackageScript,
    /// The command of a container.
    Container,
}

/// An entry point.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryPoint {
    /// Its kind.
    pub kind: EntryKind,
    /// Its name.
    pub name: String,
    /// Where it is defined.
    pub place: Location,
    /// Its description in the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// The library or tool behind it: `argparse`, `clap`, …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub with: Option<String>,
    /// Its arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<Argument>,
    /// Whether it is among tests, examples or benchmarks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub aside: bool,
}

/// An argument of an entry point.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Argument {
    /// As it is written: `--out, -o`, `FILE`, `subcommand build`.
    pub name: String,
    /// Its description in the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// The line that defines it.
    pub line: u32,
}

/// An operation of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// `openapi`, `asyncapi` or `proto`.
    pub kind: String,
    /// `POST /orders`, or `Orders.Create`.
    pub name: String,
    /// Its summary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// Its location.
    pub place: Location,
}

/// A file that is surveyed.
pub(crate) struct SourceFile<'a> {
    path: &'a str,
    text: &'a str,
    lines: Vec<&'a str>,
    literal_lines: OnceCell<HashMap<&'a str, Vec<usize>>>,
}

impl<'a> SourceFile<'a> {
    fn new(path: &'a str, text: &'a str) -> Self {
        Self { path, text, lines: text.lines().collect(), literal_lines: OnceCell::new() }
    }

    fn name(&self) -> &'a str {
        self.path.rsplit('/').next().unwrap_or(self.path)
    }

    fn stem(&self) -> &'a str {
        let name = self.name();
        name.rsplit_once('.').map_or(name, |(stem, _)| stem)
    }

    /// The folder's name; `.` for the root.
    fn folder(&self) -> &'a str {
        self.path.rsplit('/').nth(1).unwrap_or(".")
    }

    fn location(&self, index: usize) -> Location {
        Location { path: self.path.to_owned(), line: line_number(index) }
    }

    /// The first line, counted from 0, at or after `from` that contains this quoted literal; `from`
    /// when there is none. All literals of a file are indexed at once: a manifest has many, and
    /// each lookup would otherwise scan the file.
    fn line_of_literal(&self, literal: &str, from: usize) -> usize {
        let quoted = self.literal_lines.get_or_init(|| {
            let mut quoted: HashMap<&'a str, Vec<usize>> = HashMap::new();
            for (index, line) in self.lines.iter().enumerate() {
                // Text between two literals is a harmless key.
                for piece in line.split('"').skip(1).filter(|piece| !piece.is_empty()) {
                    if quoted.len() >= MAX_LITERALS && !quoted.contains_key(piece) {
                        continue;
                    }
                    let lines = quoted.entry(piece).or_default();
                    if lines.last() != Some(&index) {
                        lines.push(index);
                    }
                }
            }
            quoted
        });
        let lines = quoted.get(literal).map_or(&[][..], Vec::as_slice);
        lines.get(lines.partition_point(|line| *line < from)).copied().unwrap_or(from)
    }

    /// The first line, counted from 0, that contains all these words; 0 when there is none.
    fn line_with(&self, words: &[&str]) -> usize {
        self.lines.iter().position(|line| words.iter().all(|word| line.contains(word))).unwrap_or(0)
    }
}

/// Literals of one file that are indexed.
const MAX_LITERALS: usize = 100_000;

fn line_number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX).saturating_add(1)
}

/// Surveys a snapshot.
///
/// # Errors
/// When the disk fails.
pub async fn survey(snapshot: &MaskedSnapshot, limits: &SurveyLimits) -> io::Result<Survey> {
    let (snapshot, limits) = (snapshot.clone(), limits.clone());
    blocking(move |wanted| survey_blocking(&snapshot, &limits, wanted)).await?
}

/// Partially read files that are named.
const MAX_NAMED_FILES: usize = 10;

fn survey_blocking(
    snapshot: &MaskedSnapshot,
    limits: &SurveyLimits,
    wanted: &AtomicBool,
) -> io::Result<Survey> {
    let (mut found, mut survey, mut budget) =
        (Findings::new(limits), Survey::default(), limits.bytes);
    let mut languages: BTreeMap<&'static str, (u64, u64)> = BTreeMap::new();
    let mut readme: Option<(usize, String)> = None;
    let (started_at, mut unread, mut partly_read) = (Instant::now(), 0_u64, Vec::new());
    for (path, entry) in &snapshot.manifest().files {
        ensure_wanted(wanted)?;
        survey.files += 1;
        survey.bytes += entry.size;
        if is_vendored(path) {
            continue;
        }
        let mut language = languages::by_name(path);
        let is_read = language.is_none_or(languages::is_read) || manifests::is_manifest(path);
        let has_time = started_at.elapsed() < limits.time;
        unread += u64::from(is_read && !has_time);
        if is_read && has_time && budget > 0 {
            let mut limit = limits.file_bytes.min(budget);
            let mut content = snapshot.read(path, limit + 1)?;
            if content.len() as u64 > limit && interfaces::is_document(path, &content) {
                limit = limits.document_bytes.max(limits.file_bytes).min(budget);
                content = snapshot.read(path, limit + 1)?;
            }
            if content.len() as u64 > limit {
                content.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
                partly_read.push((path, limit));
            }
            budget -= content.len() as u64;
            if !is_binary(&content) {
                let text = String::from_utf8_lossy(&content);
                language = language.or_else(|| languages::by_shebang(&text));
                let source = SourceFile::new(path, &text);
                manifests::collect(&source, &mut found);
                interfaces::collect(&source, &mut found);
                commands::collect(&source, language.unwrap_or_default(), &mut found);
                found.start_next_file();
                let depth = path.matches('/').count();
                let is_readme = source.stem().eq_ignore_ascii_case("readme");
                if is_readme && readme.as_ref().is_none_or(|(min_depth, _)| depth < *min_depth) {
                    readme = Some((depth, path.clone()));
                    survey.readme = interfaces::read_readme(&source, limits.readme);
                }
            }
        }
        if let Some(language) = language {
            let (files, bytes) = languages.entry(language).or_default();
            *files += 1;
            *bytes += entry.size;
        }
    }
    if budget == 0 {
        survey.truncated.push(format!("only the first {} bytes were read", limits.bytes));
    }
    if unread > 0 {
        survey.truncated.push(format!("{unread} files, because of the time limit"));
    }
    let named = partly_read
        .iter()
        .take(MAX_NAMED_FILES)
        .map(|(path, limit)| format!("{path} beyond its first {limit} bytes"));
    survey.truncated.extend(named);
    if let Some(more) = partly_read.len().checked_sub(MAX_NAMED_FILES).filter(|more| *more > 0) {
        survey.truncated.push(format!("{more} more files beyond their beginnings"));
    }
    survey.languages = languages
        .into_iter()
        .map(|(name, (files, bytes))| Language { name: name.to_owned(), files, bytes })
        .collect();
    survey.languages.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    found.finish(&mut survey);
    Ok(survey)
}

/// Whether a file is vendored.
fn is_vendored(path: &str) -> bool {
    const FOLDERS: [&str; 8] = [
        "node_modules",
        "vendor",
        "third_party",
        "site-packages",
        ".venv",
        "bower_components",
        "Pods",
        "dist-packages",
    ];
    path.split('/').rev().skip(1).any(|part| FOLDERS.contains(&part)) || path.ends_with(".min.js")
}

/// Whether a file is among tests, examples or benchmarks.
fn is_secondary(path: &str) -> bool {
    const FOLDERS: [&str; 14] = [
        "test",
        "tests",
        "testing",
        "testdata",
        "__tests__",
        "example",
        "examples",
        "bench",
        "benches",
        "benchmarks",
        "fixtures",
        "spec",
        "e2e",
        "docs",
    ];
    let name = path.rsplit('/').next().unwrap_or(path);
    let is_test = name.starts_with("test_")
        || name.contains("_test.")
        || name.contains(".test.")
        || name.contains(".spec.");
    is_test || path.split('/').rev().skip(1).any(|part| FOLDERS.contains(&part))
}

#[cfg(test)]
mod tests;
