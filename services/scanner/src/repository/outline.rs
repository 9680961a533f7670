//! Lists of symbols, written into the snapshot: `.construct/outline/<path>.txt` has one line for
//! each function, type and method of a source file, so that an agent reads and searches them
//! instead of whole files.
//!
//! The parsers are C, and what they parse is hostile. They run in a child process
//! ([`outline_child`]) that has no environment, little memory and time, and a filter that lets it
//! read its input, write its output and nothing else. A file that kills it is left out and named.

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
    Clean, FileEntry,
    blocking::{blocking, go_on},
};

/// Where the lists lie in the snapshot.
const FOLDER: &str = ".construct/outline";
/// Where the report is kept, so that a second call does nothing.
const NOTE: &str = "outlined.json";
/// A child is replaced after so many bytes of source, so that its limit of time is for these.
const RECYCLE: u64 = 32 << 20;
/// A longer list is none that the child may send.
const MAX_LIST: u32 = 8 << 20;
/// The file system's limit of a name, less what is put behind it.
const MAX_NAME: usize = 255 - ".txt".len();
/// So many files that were left out are named.
const MAX_NAMED: usize = 200;

/// How much is parsed, and for how long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OutlinerLimits {
    /// Larger files are left out, in bytes: nobody has written them by hand.
    pub file_bytes: u64,
    /// Bytes of all files together.
    pub bytes: u64,
    /// How long one file may take.
    pub file_time: Duration,
    /// How long all may take.
    pub time: Duration,
    /// How many files may kill the child before the rest is left out.
    pub deaths: u32,
}

impl Default for OutlinerLimits {
    fn default() -> Self {
        Self {
            file_bytes: 1 << 20,
            bytes: 256 << 20,
            file_time: Duration::from_secs(5),
            time: Duration::from_secs(600),
            deaths: 20,
        }
    }
}

/// What runs the parsers.
#[derive(Debug, Clone)]
pub struct Outliner {
    program: PathBuf,
    arguments: Vec<OsString>,
    limits: OutlinerLimits,
}

impl Outliner {
    /// A program that calls [`outline_child`] when it is given these arguments, before it does
    /// anything else.
    #[must_use]
    pub fn new(program: PathBuf, arguments: Vec<OsString>, limits: OutlinerLimits) -> Self {
        Self { program, arguments, limits }
    }
}

/// What was outlined.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outlined {
    /// Files that have a list.
    pub files: u64,
    /// Lines of the lists together.
    pub symbols: u64,
    /// How many files were left out.
    pub skipped: u64,
    /// The first of them, with the reason.
    pub named: Vec<(String, String)>,
}

impl Outlined {
    fn skip(&mut self, path: &str, why: &str) {
        self.skipped += 1;
        if self.named.len() < MAX_NAMED {
            self.named.push((path.to_owned(), why.to_owned()));
        }
    }
}

/// Writes the lists of symbols into a snapshot. A second call gives the report of the first.
///
/// # Errors
/// When the disk fails, or the program cannot be started.
pub async fn outline(snapshot: &Clean, outliner: &Outliner) -> io::Result<Outlined> {
    let (snapshot, outliner, runtime) =
        (snapshot.clone(), outliner.clone(), tokio::runtime::Handle::current());
    // Files are read and written between two waits for the child, which would hold up others.
    blocking(move |wanted| {
        runtime.block_on(Run { snapshot: &snapshot, outliner: &outliner, wanted }.all())
    })
    .await?
}

struct Run<'a> {
    snapshot: &'a Clean,
    outliner: &'a Outliner,
    wanted: &'a AtomicBool,
}

impl Run<'_> {
    async fn all(self) -> io::Result<Outlined> {
        let folder = self.snapshot.snapshot();
        let _lock = folder.lock()?;
        if let Some(outlined) = folder.note(NOTE)? {
            return Ok(outlined);
        }
        let limits = &self.outliner.limits;
        let (mut done, mut parser, mut deaths) = (Outlined::default(), None, 0);
        let (mut bytes, began) = (0, Instant::now());
        let files = &self.snapshot.manifest().files;
        for (path, entry) in files {
            let Some(grammar) = Grammar::of(path) else { continue };
            go_on(self.wanted)?;
            if entry.size == 0 {
                continue;
            }
            let why = if entry.size > limits.file_bytes {
                "it is too large"
            } else if path.rsplit('/').next().is_some_and(|name| name.len() > MAX_NAME) {
                "its name is too long for a list beside it"
            } else if has_folder(files, &format!("{path}.txt/")) {
                "the lists of a folder lie where its list would"
            } else if bytes + entry.size > limits.bytes {
                "there is too much source before it"
            } else if began.elapsed() > limits.time {
                "there was no time left"
            } else if deaths > limits.deaths {
                "too many files before it could not be parsed"
            } else {
                ""
            };
            if !why.is_empty() {
                done.skip(path, why);
                continue;
            }
            bytes += entry.size;
            // What masks have put in may be longer than what they took out.
            let content = self.snapshot.read(path, limits.file_bytes * 2)?;
            let mut running = match parser.take() {
                Some(running) => running,
                None => Parser::start(self.outliner)?,
            };
            match timeout(limits.file_time, running.parse(grammar, &content)).await {
                Ok(Ok(list)) => {
                    if !list.is_empty() {
                        folder.replace(&format!("{FOLDER}/{path}.txt"), list.as_bytes())?;
                        done.files += 1;
                        done.symbols += list.lines().count() as u64;
                    }
                    if running.bytes < RECYCLE {
                        parser = Some(running);
                    }
                }
                // Dropping it kills it.
                Ok(Err(_)) => {
                    deaths += 1;
                    done.skip(path, "it cannot be parsed within the limits of memory and time");
                }
                Err(_) => {
                    deaths += 1;
                    done.skip(path, "it takes too long to parse");
                }
            }
        }
        folder.set_note(NOTE, &done)?;
        Ok(done)
    }
}

/// Whether a path with a slash at its end is a folder's.
fn has_folder(files: &BTreeMap<String, FileEntry>, path: &str) -> bool {
    files.range(path.to_owned()..).next().is_some_and(|(next, _)| next.starts_with(path))
}

/// A child that parses one file after the other.
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
        if length > MAX_LIST {
            return Err(io::Error::other("the list is too long"));
        }
        let mut list = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.output.read_exact(&mut list).await?;
        // Whoever took the child over could send anything: it becomes text, and no more than text.
        let list = String::from_utf8_lossy(&list);
        Ok(list.chars().filter(|c| *c == '\n' || !c.is_control()).collect())
    }
}
