//! Repositories that are here already: a folder, or an archive that somebody has uploaded.

use std::{
    fs::{File, Metadata},
    io::{self, Read, Write},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use futures::StreamExt as _;
use rustix::fs::FileType;
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;

use super::{
    SourceError,
    source::{Archive, ArchiveKind, Commit, Source},
    tree::Tree,
};

/// The folder that everything in the archive of a folder lies in, as in those of forges.
const TOP: &str = "folder";
/// How deep a folder is looked into, and how many entries are: who takes the snapshot has limits of
/// its own, this keeps the walk finite.
const MAX_DEPTH: usize = 256;
/// See [`MAX_DEPTH`].
const MAX_ENTRIES: usize = 1_000_000;
/// Chunks that wait for their reader.
const QUEUE: usize = 8;
/// Bytes of one.
const CHUNK: usize = 256 * 1024;

/// A folder on this machine. Its commit is the hash of its content. Links, `.git` and what builds
/// have left are not part of it. What changes while it is read is noticed, as the hash is another
/// one then.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// A folder. Who may name one is the caller's to decide.
    #[must_use]
    pub const fn new(path: PathBuf) -> Self {
        Self { path }
    }
}

/// An archive in a file. Its commit is its hash. When everything in it lies in one folder, that is
/// the repository's root, as in the archives of forges. The file is opened once: what takes its
/// name later is not read.
#[derive(Debug, Clone)]
pub struct Upload {
    path: PathBuf,
    file: Arc<File>,
    kind: ArchiveKind,
}

impl Upload {
    /// An archive; how it is packed is seen from its first bytes.
    ///
    /// # Errors
    /// When it cannot be read, or is neither tar in gzip nor zip.
    pub fn new(path: PathBuf) -> Result<Self, SourceError> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let opened = File::options().read(true).custom_flags(flags).open(&path);
        let file = opened.map_err(|error| unreadable(&path, &error))?;
        if !file.metadata().is_ok_and(|found| found.is_file()) {
            return Err(invalid(&path, "it is no file"));
        }
        let (file, mut magic) = (Arc::new(file), Vec::new());
        Reading::new(&file)
            .take(4)
            .read_to_end(&mut magic)
            .map_err(|error| unreadable(&path, &error))?;
        let kind = match magic.as_slice() {
            [0x1f, 0x8b, ..] => ArchiveKind::TarGz,
            [b'P', b'K', ..] => ArchiveKind::Zip,
            _ => {
                return Err(invalid(
                    &path,
                    "it is neither a tar archive in gzip nor a zip archive",
                ));
            }
        };
        Ok(Self { path, file, kind })
    }
}

/// A file from its beginning, whoever else reads it.
struct Reading {
    file: Arc<File>,
    at: u64,
}

impl Reading {
    fn new(file: &Arc<File>) -> Self {
        Self { file: Arc::clone(file), at: 0 }
    }
}

impl Read for Reading {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

fn changed(path: &Path) -> SourceError {
    invalid(path, "it is not any more what it was when its commit was found")
}

fn invalid(path: &Path, why: &str) -> SourceError {
    let what = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    SourceError::Invalid { what, why: why.to_owned() }
}

fn unreadable(path: &Path, error: &io::Error) -> SourceError {
    invalid(path, &format!("it cannot be read: {}", error.kind()))
}

#[async_trait]
impl Source for Folder {
    async fn resolve(&self, reference: Option<&str>) -> Result<Commit, SourceError> {
        if reference.is_some() {
            return Err(invalid(&self.path, "a folder has no branches"));
        }
        let path = self.path.clone();
        let hash = move || {
            each(&Tree::open(&path)?, &mut |_, file| io::copy(file, &mut io::sink()).map(drop))
        };
        let id = blocking(hash).await.map_err(|error| unreadable(&self.path, &error))?;
        Commit::new(&id, None)
    }

    async fn archive(&self, commit: &Commit) -> Result<Archive, SourceError> {
        let (path, id) = (self.path.clone(), commit.id().to_owned());
        let work = move |chunks: &mut Chunks| pack(&path, chunks).map(|hash| hash == id);
        Ok(Archive { kind: ArchiveKind::TarGz, bytes: sent(self.path.clone(), work) })
    }
}

#[async_trait]
impl Source for Upload {
    async fn resolve(&self, reference: Option<&str>) -> Result<Commit, SourceError> {
        if reference.is_some() {
            return Err(invalid(&self.path, "an archive has no branches"));
        }
        let mut reading = Reading::new(&self.file);
        let hash = move || {
            let mut hash = Sha256::new();
            io::copy(&mut reading, &mut Hasher(&mut hash))?;
            Ok(hex(&hash.finalize()))
        };
        let id = blocking(hash).await.map_err(|error| unreadable(&self.path, &error))?;
        Commit::new(&id, None)
    }

    async fn archive(&self, commit: &Commit) -> Result<Archive, SourceError> {
        let (mut reading, id) = (Reading::new(&self.file), commit.id().to_owned());
        let work = move |chunks: &mut Chunks| {
            let mut hash = Sha256::new();
            io::copy(&mut Hashed { content: &mut reading, hash: &mut hash }, chunks)?;
            chunks.flush()?;
            Ok(hex(&hash.finalize()) == id)
        };
        Ok(Archive { kind: self.kind, bytes: sent(self.path.clone(), work) })
    }
}

/// Sends what another thread writes, and fails when that says that it is not the commit that was
/// meant.
fn sent(
    path: PathBuf,
    work: impl FnOnce(&mut Chunks) -> io::Result<bool> + Send + 'static,
) -> futures::stream::BoxStream<'static, Result<Bytes, SourceError>> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::task::spawn_blocking(move || {
        let mut chunks = Chunks { sender: sender.clone(), buffer: Vec::with_capacity(CHUNK) };
        let failed = match work(&mut chunks) {
            Ok(true) => return,
            Ok(false) => changed(&path),
            Err(error) => unreadable(&path, &error),
        };
        // When nobody receives any more, nobody needs to know.
        drop(sender.blocking_send(Err(failed)));
    });
    received(receiver)
}

fn received(
    receiver: mpsc::Receiver<Result<Bytes, SourceError>>,
) -> futures::stream::BoxStream<'static, Result<Bytes, SourceError>> {
    futures::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|chunk| (chunk, receiver))
    })
    .boxed()
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// Whether a folder holds what a build has made or fetched, by marks that its tools put there.
fn is_built(tree: &Tree, path: &str, name: &str) -> bool {
    let has = |file: &str| tree.open_file(&format!("{path}/{file}")).is_ok();
    ["node_modules", "__pycache__"].contains(&name) || has("CACHEDIR.TAG") || has("pyvenv.cfg")
}

/// The regular files of a folder, sorted by name, and what cannot be looked into. Links are not
/// followed, and names that are not UTF-8 are left out.
fn walk(tree: &Tree) -> io::Result<Vec<String>> {
    let (mut found, mut left, mut seen) = (Vec::new(), vec![(String::new(), 0)], 0);
    while let Some((folder, depth)) = left.pop() {
        let entries = match tree.entries(&folder) {
            // Named like a file that cannot be read; but without the folder itself there is
            // nothing.
            Err(_) if depth > 0 => {
                found.push(folder);
                continue;
            }
            entries => entries?,
        };
        for (name, kind) in entries {
            seen += 1;
            if seen > MAX_ENTRIES || depth > MAX_DEPTH {
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the folder is too large"));
            }
            let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
            match kind {
                FileType::Directory if name != ".git" && !is_built(tree, &path, &name) => {
                    left.push((path, depth + 1))
                }
                FileType::RegularFile if name != ".git" => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    Ok(found)
}

/// What is done with a file: its name, and its content, none when it cannot be read.
type Use<'a> = dyn FnMut((&str, Option<&Metadata>), &mut dyn Read) -> io::Result<()> + 'a;

/// Uses each file of a folder; gives the hash of what was read.
fn each(tree: &Tree, used: &mut Use<'_>) -> io::Result<String> {
    let mut hash = Sha256::new();
    for name in walk(tree)? {
        hash.update((name.len() as u64).to_be_bytes());
        hash.update(name.as_bytes());
        match tree.open_file(&name).and_then(|file| Ok((file.metadata()?, file))) {
            Ok((metadata, file)) => {
                hash.update(metadata.len().to_be_bytes());
                // A file that grows meanwhile is cut where it ended.
                let mut content = file.take(metadata.len());
                used(
                    (&name, Some(&metadata)),
                    &mut Hashed { content: &mut content, hash: &mut hash },
                )?;
            }
            Err(_) => {
                hash.update(u64::MAX.to_be_bytes());
                used((&name, None), &mut io::empty())?;
            }
        }
    }
    Ok(hex(&hash.finalize()))
}

/// Packs a folder the way forges do; gives its hash. It is unpacked right away, so that compressing
/// it would be work for nothing.
fn pack(root: &Path, into: &mut Chunks) -> io::Result<String> {
    let mut archive = tar::Builder::new(GzEncoder::new(into, Compression::none()));
    let hash = each(&Tree::open(root)?, &mut |(name, metadata), content| {
        let mut header = tar::Header::new_gnu();
        match metadata {
            Some(metadata) => {
                header.set_size(metadata.len());
                header.set_mode(metadata.mode() & 0o777);
            }
            // What takes the snapshot leaves it out, and names it.
            None => {
                header.set_size(0);
                header.set_entry_type(tar::EntryType::Char);
            }
        }
        archive.append_data(&mut header, format!("{TOP}/{name}"), content)
    })?;
    archive.into_inner()?.finish()?.flush()?;
    Ok(hash)
}

/// Content that is hashed as it is read.
struct Hashed<'a> {
    content: &'a mut dyn Read,
    hash: &'a mut Sha256,
}

impl Read for Hashed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.content.read(buffer)?;
        self.hash.update(&buffer[..read]);
        Ok(read)
    }
}

/// Sends what is written, in chunks.
struct Chunks {
    sender: mpsc::Sender<Result<Bytes, SourceError>>,
    buffer: Vec<u8>,
}

impl Write for Chunks {
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(content);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(content.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let chunk = Bytes::from(std::mem::take(&mut self.buffer));
        self.sender.blocking_send(Ok(chunk)).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    }
}

struct Hasher<'a>(&'a mut Sha256);

impl Write for Hasher<'_> {
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        self.0.update(content);
        Ok(content.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
