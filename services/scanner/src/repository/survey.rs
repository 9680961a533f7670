//! What is in a repository that people start: found without a model, so that the model spends its
//! tokens on what it means.
//!
//! Files are read line by line with patterns, and manifests with parsers that are memory-safe;
//! nothing is run. Every statement says where it stands. The result is the same for the same
//! snapshot.

mod commands;
mod found;
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

pub(crate) use self::found::Found;
use super::{
    Clean,
    blocking::{blocking, go_on},
    snapshot::is_binary,
};

/// How much is looked at and said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SurveyLimits {
    /// Bytes of a file that are read.
    pub file_bytes: u64,
    /// The same of files that are understood as a whole or not at all: notebooks, packages'
    /// manifests, descriptions of interfaces.
    pub document_bytes: u64,
    /// Bytes of all files together that are read.
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
    /// How long it may take. What was not looked at by then is said.
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
pub struct Place {
    /// The file.
    pub path: String,
    /// The line.
    pub line: u32,
}

/// What is in a repository.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survey {
    /// How many files.
    pub files: u64,
    /// Their bytes together.
    pub bytes: u64,
    /// The languages, most bytes first. Vendored files don't count.
    pub languages: Vec<Language>,
    /// The README nearest to the root.
    pub readme: Option<Readme>,
    /// Packages, crates and other things with a manifest, those nearest to the root first.
    pub modules: Vec<Module>,
    /// What can be started, the likeliest first.
    pub entries: Vec<EntryPoint>,
    /// What interfaces offer.
    pub operations: Vec<Operation>,
    /// Which of the lists were cut, and what was not read.
    pub truncated: Vec<String>,
}

/// A language.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Language {
    /// Its name.
    pub name: String,
    /// How many files.
    pub files: u64,
    /// Their bytes together.
    pub bytes: u64,
}

/// The beginning of a README.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readme {
    /// Where the text begins.
    pub place: Place,
    /// Its first paragraphs, without pictures and badges.
    pub text: String,
}

/// Something with a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// Of which kind: `cargo`, `python`, `node`, `go`, `docker`, …
    pub kind: String,
    /// Its name; the folder's where the manifest has none.
    pub name: String,
    /// Its description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// Where it says so.
    pub place: Place,
    /// Well-known libraries it uses that say what it is: web frameworks, command lines, models,
    /// data bases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frameworks: Vec<String>,
    /// The workspace's members, as the manifest writes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<String>,
}

/// What kind of thing is started.
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
    /// A file that does something when it is run.
    Script,
    /// A recipe of a Makefile or justfile.
    Recipe,
    /// A script of a package's manifest.
    PackageScript,
    /// What a container runs.
    Container,
}

/// Something that can be started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryPoint {
    /// What kind of thing it is.
    pub kind: EntryKind,
    /// What it is called.
    pub name: String,
    /// Where it is defined.
    pub place: Place,
    /// What the source says of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// With what it is written: `argparse`, `clap`, …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub with: Option<String>,
    /// What it takes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<Argument>,
    /// Whether it lies among tests, examples or benchmarks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub aside: bool,
}

/// What an entry point takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Argument {
    /// As it is written: `--out, -o`, `FILE`, `subcommand build`.
    pub name: String,
    /// What the source says of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// The line that defines it.
    pub line: u32,
}

/// What an interface offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// `openapi`, `asyncapi` or `proto`.
    pub kind: String,
    /// `POST /orders`, or `Orders.Create`.
    pub name: String,
    /// Its summary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// Where.
    pub place: Place,
}

/// A file that is looked at.
pub(crate) struct Source<'a> {
    path: &'a str,
    text: &'a str,
    lines: Vec<&'a str>,
    quoted: OnceCell<HashMap<&'a str, Vec<usize>>>,
}

impl<'a> Source<'a> {
    fn new(path: &'a str, text: &'a str) -> Self {
        Self { path, text, lines: text.lines().collect(), quoted: OnceCell::new() }
    }

    fn name(&self) -> &'a str {
        self.path.rsplit('/').next().unwrap_or(self.path)
    }

    fn stem(&self) -> &'a str {
        let name = self.name();
        name.rsplit_once('.').map_or(name, |(stem, _)| stem)
    }

    /// The folder's name; of the root, `.`.
    fn folder(&self) -> &'a str {
        self.path.rsplit('/').nth(1).unwrap_or(".")
    }

    fn place(&self, index: usize) -> Place {
        Place { path: self.path.to_owned(), line: number(index) }
    }

    /// The first line, counted from 0, that has this between quotation marks, from a line on; that
    /// one, when none has. All of a file's literals are looked up at once: a manifest has many, and
    /// each of them costs the whole file otherwise.
    fn quoted(&self, literal: &str, from: usize) -> usize {
        let quoted = self.quoted.get_or_init(|| {
            let mut quoted: HashMap<&'a str, Vec<usize>> = HashMap::new();
            for (index, line) in self.lines.iter().enumerate() {
                // What stands between two literals is a harmless key.
                for piece in line.split('"').skip(1).filter(|piece| !piece.is_empty()) {
                    if quoted.len() >= MAX_QUOTED && !quoted.contains_key(piece) {
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

    /// The line, counted from 0, that has all these words; the first, when none has.
    fn line_with(&self, words: &[&str]) -> usize {
        self.lines.iter().position(|line| words.iter().all(|word| line.contains(word))).unwrap_or(0)
    }
}

/// So many literals of one file are known by their lines.
const MAX_QUOTED: usize = 100_000;

fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX).saturating_add(1)
}

/// Surveys a snapshot.
///
/// # Errors
/// When the disk fails.
pub async fn survey(snapshot: &Clean, limits: &SurveyLimits) -> io::Result<Survey> {
    let (snapshot, limits) = (snapshot.clone(), limits.clone());
    blocking(move |wanted| look(&snapshot, &limits, wanted)).await?
}

/// Files that were not read to their end are named, so many of them.
const MAX_CUT: usize = 10;

fn look(snapshot: &Clean, limits: &SurveyLimits, wanted: &AtomicBool) -> io::Result<Survey> {
    let (mut found, mut survey, mut budget) = (Found::new(limits), Survey::default(), limits.bytes);
    let mut languages: BTreeMap<&'static str, (u64, u64)> = BTreeMap::new();
    let mut readme: Option<(usize, String)> = None;
    let (began, mut late, mut cut) = (Instant::now(), 0_u64, Vec::new());
    for (path, entry) in &snapshot.manifest().files {
        go_on(wanted)?;
        survey.files += 1;
        survey.bytes += entry.size;
        if is_vendored(path) {
            continue;
        }
        let mut language = languages::by_name(path);
        let is_read = language.is_none_or(languages::is_read) || manifests::is_manifest(path);
        let has_time = began.elapsed() < limits.time;
        late += u64::from(is_read && !has_time);
        if is_read && has_time && budget > 0 {
            let mut limit = limits.file_bytes.min(budget);
            let mut content = snapshot.read(path, limit + 1)?;
            if content.len() as u64 > limit && interfaces::is_document(path, &content) {
                limit = limits.document_bytes.max(limits.file_bytes).min(budget);
                content = snapshot.read(path, limit + 1)?;
            }
            if content.len() as u64 > limit {
                content.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
                cut.push((path, limit));
            }
            budget -= content.len() as u64;
            if !is_binary(&content) {
                let text = String::from_utf8_lossy(&content);
                language = language.or_else(|| languages::by_shebang(&text));
                let source = Source::new(path, &text);
                manifests::look(&source, &mut found);
                interfaces::look(&source, &mut found);
                commands::look(&source, language.unwrap_or_default(), &mut found);
                found.end_of_file();
                let depth = path.matches('/').count();
                let is_readme = source.stem().eq_ignore_ascii_case("readme");
                if is_readme && readme.as_ref().is_none_or(|(least, _)| depth < *least) {
                    readme = Some((depth, path.clone()));
                    survey.readme = interfaces::readme(&source, limits.readme);
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
    if late > 0 {
        survey.truncated.push(format!("{late} files, for which there was no time left"));
    }
    let named = cut
        .iter()
        .take(MAX_CUT)
        .map(|(path, limit)| format!("{path} beyond its first {limit} bytes"));
    survey.truncated.extend(named);
    if let Some(more) = cut.len().checked_sub(MAX_CUT).filter(|more| *more > 0) {
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

/// Whether a file is somebody else's, copied in.
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

/// Whether a file lies among tests, examples or benchmarks.
fn is_aside(path: &str) -> bool {
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
