//! Outlines: lists of symbols, written into the snapshot. `.construct/outline/<path>.txt` has a
//! line for each function, type and method of a source file, so that an agent reads and searches
//! them instead of whole files.
//!
//! The parsers are C code, and their input is hostile. They run in a child process
//! ([`outline_child`]) without environment, with little memory and time, and with a filter that
//! only lets it read its input and write its output. A file that kills the child is skipped and
//! named.

mod child;
mod symbols;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    path::PathBuf,
    process::Stdio,
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

pub use self::child::outline_child;
use self::symbols::Grammar;
use super::{
    FileEntry, MaskedSnapshot,
    blocking::{blocking, ensure_wanted},
};

/// The folder of the outlines in the snapshot.
const OUTLINE_DIR: &str = ".construct/outline";
/// The note with the report. A second call returns it.
const REPORT_NOTE: &str = "outlined.json";
/// Bytes of source after which a child is replaced, so that its time limit applies to these.
const RECYCLE_AFTER_BYTES: u64 = 32 << 20;
/// The maximum length of a list from the child.
const MAX_LIST_BYTES: u32 = 8 << 20;
/// The file system's limit of a name, less the appended extension.
const MAX_NAME_BYTES: usize = 255 - ".txt".len();
/// Skipped files that are named.
const MAX_NAMED: usize = 200;

/// Limits of parsing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OutlinerLimits {
    /// Larger files are skipped, in bytes: they are not written by hand.
    pub file_bytes: u64,
    /// The total size of all files in bytes.
    pub bytes: u64,
    /// The time limit per file.
    pub file_time: Duration,
    /// The time limit for all files.
    pub time: Duration,
    /// How many files may kill the child before the rest is skipped.
    pub crashes: u32,
}

impl Default for OutlinerLimits {
    fn default() -> Self {
        Self {
            file_bytes: 1 << 20,
            bytes: 256 << 20,
            file_time: Duration::from_secs(5),
            time: Duration::from_secs(600),
            crashes: 20,
        }
    }
}

/// Runs the parsers.
#[derive(Debug, Clone)]
pub struct Outliner {
    program: PathBuf,
    arguments: Vec<OsString>,
    limits: OutlinerLimits,
}

impl Outliner {
    /// A program that calls [`outline_child`] first when it is started with these arguments.
    #[must_use]
    pub fn new(program: PathBuf, arguments: Vec<OsString>, limits: OutlinerLimits) -> Self {
        Self { program, arguments, limits }
    }
}

/// The report of an outline.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutlineReport {
    /// Files with a list.
    pub files: u64,
    /// Lines of all lists.
    pub symbols: u64,
    /// The number of skipped files.
    pub skipped: u64,
    /// The first of them, with the reason.
    pub named: Vec<(String, String)>,
}

impl OutlineReport {
    fn skip(&mut self, path: &str, reason: &str) {
        self.skipped += 1;
        if self.named.len() < MAX_NAMED {
            self.named.push((path.to_owned(), reason.to_owned()));
        }
    }
}

/// Writes the lists of symbols into a snapshot. A second call returns the report of the first.
///
/// # Errors
/// When the disk fails, or the program cannot be started.
pub async fn outline(snapshot: &MaskedSnapshot, outliner: &Outliner) -> io::Result<OutlineReport> {
    let (snapshot, outliner, runtime) =
        (snapshot.clone(), outliner.clone(), tokio::runtime::Handle::current());
    // File work between two waits for the child would block other tasks.
    blocking(move |wanted| {
        runtime.block_on(
            OutlineRun { snapshot: &snapshot, outliner: &outliner, wanted }.outline_files(),
        )
    })
    .await?
}

struct OutlineRun<'a> {
    snapshot: &'a MaskedSnapshot,
    outliner: &'a Outliner,
    wanted: &'a AtomicBool,
}

impl OutlineRun<'_> {
    async fn outline_files(self) -> io::Result<OutlineReport> {
        let folder = self.snapshot.snapshot();
        let _lock = folder.lock()?;
        if let Some(outlined) = folder.note(REPORT_NOTE)? {
            return Ok(outlined);
        }
        let limits = &self.outliner.limits;
        let (mut report, mut parser, mut crashes) = (OutlineReport::default(), None, 0);
        let (mut bytes, began) = (0, Instant::now());
        let files = &self.snapshot.manifest().files;
        for (path, entry) in files {
            let Some(grammar) = Grammar::for_path(path) else { continue };
            ensure_wanted(self.wanted)?;
            if entry.size == 0 {
                continue;
            }
            let reason = if entry.size > limits.file_bytes {
                "it is too large"
            } else if path.rsplit('/').next().is_some_and(|name| name.len() > MAX_NAME_BYTES) {
                "its name is too long for the name of its list"
            } else if is_folder(files, &format!("{path}.txt/")) {
                "a folder has the path of its list"
            } else if bytes + entry.size > limits.bytes {
                "the limit of source bytes is reached"
            } else if began.elapsed() > limits.time {
                "the time limit is reached"
            } else if crashes > limits.crashes {
                "too many other files failed to parse"
            } else {
                ""
            };
            if !reason.is_empty() {
                report.skip(path, reason);
                continue;
            }
            bytes += entry.size;
            // Marks may be longer than what they replaced.
            let content = self.snapshot.read(path, limits.file_bytes * 2)?;
            let mut child = match parser.take() {
                Some(child) => child,
                None => Parser::start(self.outliner)?,
            };
            match timeout(limits.file_time, child.parse(grammar, &content)).await {
                Ok(Ok(list)) => {
                    if !list.is_empty() {
                        folder.replace(&format!("{OUTLINE_DIR}/{path}.txt"), list.as_bytes())?;
                        report.files += 1;
                        report.symbols += list.lines().count() as u64;
                    }
                    if child.bytes < RECYCLE_AFTER_BYTES {
                        parser = Some(child);
                    }
                }
                // Dropping the child kills it.
                Ok(Err(_)) => {
                    crashes += 1;
                    report.skip(path, "it exceeds the limits of memory and time");
                }
                Err(_) => {
                    crashes += 1;
                    report.skip(path, "it takes too long to parse");
                }
            }
        }
        folder.set_note(REPORT_NOTE, &report)?;
        Ok(report)
    }
}

/// Whether a path that ends with a slash is a folder.
fn is_folder(files: &BTreeMap<String, FileEntry>, path: &str) -> bool {
    files.range(path.to_owned()..).next().is_some_and(|(next, _)| next.starts_with(path))
}

/// A child process that parses one file after the other.
struct Parser {
    _child: Child,
    input: ChildStdin,
    output: ChildStdout,
    bytes: u64,
}

impl Parser {
    fn start(outliner: &Outliner) -> io::Result<Self> {
        let mut command = Command::new(&outliner.program);
        command.args(&outliner.arguments).env_clear().current_dir("/").kill_on_drop(true);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let missing = || io::Error::other("the child has no pipe");
        let input = child.stdin.take().ok_or_else(missing)?;
        let output = child.stdout.take().ok_or_else(missing)?;
        Ok(Self { _child: child, input, output, bytes: 0 })
    }

    async fn parse(&mut self, grammar: Grammar, content: &[u8]) -> io::Result<String> {
        let length = u32::try_from(content.len()).map_err(io::Error::other)?;
        self.bytes += u64::from(length);
        self.input.write_all(&[grammar as u8]).await?;
        self.input.write_all(&length.to_be_bytes()).await?;
        self.input.write_all(content).await?;
        let length = self.output.read_u32().await?;
        if length > MAX_LIST_BYTES {
            return Err(io::Error::other("the list is too long"));
        }
        let mut list = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.output.read_exact(&mut list).await?;
        // A compromised child could send anything: it becomes text, and no more than text.
        let list = String::from_utf8_lossy(&list);
        Ok(list.chars().filter(|c| *c == '\n' || !c.is_control()).collect())
    }
}
