//! Local repositories: a folder, or an uploaded archive.

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

/// The root folder in the archive of a folder, as in archives of forges.
const ROOT_NAME: &str = "folder";
/// The maximum depth and number of entries of a folder. The snapshot has limits of its own; these
/// keep the walk finite.
const MAX_DEPTH: usize = 256;
/// See [`MAX_DEPTH`].
const MAX_ENTRIES: usize = 1_000_000;
/// Chunks that wait for their reader.
const CHANNEL_CAPACITY: usize = 8;
/// Bytes of a chunk.
const CHUNK_BYTES: usize = 256 * 1024;

/// A folder on this machine. Its commit is the hash of its content. Links, `.git` and build output
/// are not part of it. A change during reading is noticed, because the hash differs then.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// A folder. The caller decides who may name one.
    #[must_use]
    pub const fn new(path: PathBuf) -> Self {
        Self { path }
    }
}

/// An archive in a file. Its commit is its hash. A single top folder is the repository's root, as
/// in archives of forges. The file is opened once: a later file of the same name is not read.
#[derive(Debug, Clone)]
pub struct Upload {
    path: PathBuf,
    file: Arc<File>,
    kind: ArchiveKind,
}

impl Upload {
    /// Opens an archive; its first bytes tell its kind.
    ///
    /// # Errors
    /// When it cannot be read, or is neither tar in gzip nor zip.
    pub fn new(path: PathBuf) -> Result<Self, SourceError> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let opened = File::options().read(true).custom_flags(flags).open(&path);
        let file = opened.map_err(|error| unreadable_error(&path, &error))?;
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Err(invalid_error(&path, "it is not a file"));
        }
        let (file, mut magic) = (Arc::new(file), Vec::new());
        FileReader::new(&file)
            .take(4)
            .read_to_end(&mut magic)
            .map_err(|error| unreadable_error(&path, &error))?;
        let kind = match magic.as_slice() {
            [0x1f, 0x8b, ..] => ArchiveKind::TarGz,
            [b'P', b'K', ..] => ArchiveKind::Zip,
            _ => {
                return Err(invalid_error(
                    &path,
                    "it is neither a tar archive in gzip nor a zip archive",
                ));
            }
        };
        Ok(Self { path, file, kind })
    }
}

/// Reads a shared file from its beginning.
struct FileReader {
    file: Arc<File>,
    offset: u64,
}

impl FileReader {
    fn new(file: &Arc<File>) -> Self {
        Self { file: Arc::clone(file), offset: 0 }
    }
}

impl Read for FileReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

fn changed_error(path: &Path) -> SourceError {
    invalid_error(path, "it changed after its commit was resolved")
}

fn invalid_error(path: &Path, reason: &str) -> SourceError {
    let subject = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    SourceError::Invalid { subject, reason: reason.to_owned() }
}

fn unreadable_error(path: &Path, error: &io::Error) -> SourceError {
    invalid_error(path, &format!("it cannot be read: {}", error.kind()))
}

#[async_trait]
impl Source for Folder {
    async fn resolve(&self, reference: Option<&str>) -> Result<Commit, SourceError> {
        if reference.is_some() {
            return Err(invalid_error(&self.path, "a folder has no branches"));
        }
        let path = self.path.clone();
        let hash = move || {
            visit_files(&Tree::open(&path)?, &mut |_, file| {
                io::copy(file, &mut io::sink()).map(drop)
            })
        };
        let id = run_blocking(hash).await.map_err(|error| unreadable_error(&self.path, &error))?;
        Commit::new(&id, None)
    }

    async fn archive(&self, commit: &Commit) -> Result<Archive, SourceError> {
        let (path, id) = (self.path.clone(), commit.id().to_owned());
        let work = move |chunks: &mut ChunkWriter| pack(&path, chunks).map(|hash| hash == id);
        Ok(Archive { kind: ArchiveKind::TarGz, bytes: stream_from_thread(self.path.clone(), work) })
    }
}

#[async_trait]
impl Source for Upload {
    async fn resolve(&self, reference: Option<&str>) -> Result<Commit, SourceError> {
        if reference.is_some() {
            return Err(invalid_error(&self.path, "an archive has no branches"));
        }
        let mut reading = FileReader::new(&self.file);
        let hash = move || {
            let mut hash = Sha256::new();
            io::copy(&mut reading, &mut HashWriter(&mut hash))?;
            Ok(hex(&hash.finalize()))
        };
        let id = run_blocking(hash).await.map_err(|error| unreadable_error(&self.path, &error))?;
        Commit::new(&id, None)
    }

    async fn archive(&self, commit: &Commit) -> Result<Archive, SourceError> {
        let (mut reading, id) = (FileReader::new(&self.file), commit.id().to_owned());
        let work = move |chunks: &mut ChunkWriter| {
            let mut hash = Sha256::new();
            io::copy(&mut HashingReader { content: &mut reading, hash: &mut hash }, chunks)?;
            chunks.flush()?;
            Ok(hex(&hash.finalize()) == id)
        };
        Ok(Archive { kind: self.kind, bytes: stream_from_thread(self.path.clone(), work) })
    }
}

/// Streams what another thread writes, and fails when the content is not the expected commit.
fn stream_from_thread(
    path: PathBuf,
    work: impl FnOnce(&mut ChunkWriter) -> io::Result<bool> + Send + 'static,
) -> futures::stream::BoxStream<'static, Result<Bytes, SourceError>> {
    let (sender, receiver) = mpsc::channel(CHANNEL_CAPACITY);
    tokio::task::spawn_blocking(move || {
        let mut chunks =
            ChunkWriter { sender: sender.clone(), buffer: Vec::with_capacity(CHUNK_BYTES) };
        let failed = match work(&mut chunks) {
            Ok(true) => return,
            Ok(false) => changed_error(&path),
            Err(error) => unreadable_error(&path, &error),
        };
        // The receiver may be gone.
        drop(sender.blocking_send(Err(failed)));
    });
    receiver_stream(receiver)
}

fn receiver_stream(
    receiver: mpsc::Receiver<Result<Bytes, SourceError>>,
) -> futures::stream::BoxStream<'static, Result<Bytes, SourceError>> {
    futures::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|chunk| (chunk, receiver))
    })
    .boxed()
}

async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// Whether a folder is build output, by marks of the build tools.
fn is_build_output(tree: &Tree, path: &str, name: &str) -> bool {
    let has = |file: &str| tree.open_file(&format!("{path}/{file}")).is_ok();
    ["node_modules", "__pycache__"].contains(&name) || has("CACHEDIR.TAG") || has("pyvenv.cfg")
}

/// The regular files of a folder, sorted by name, and unreadable folders. Links are not followed,
/// and names that are not UTF-8 are skipped.
fn list_files(tree: &Tree) -> io::Result<Vec<String>> {
    let (mut files, mut pending, mut entry_count) = (Vec::new(), vec![(String::new(), 0)], 0);
    while let Some((folder, depth)) = pending.pop() {
        let entries = match tree.entries(&folder) {
            // Listed like an unreadable file. The folder itself must be readable.
            Err(_) if depth > 0 => {
                files.push(folder);
                continue;
            }
            entries => entries?,
        };
        for (name, kind) in entries {
            entry_count += 1;
            if entry_count > MAX_ENTRIES || depth > MAX_DEPTH {
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the folder is too large"));
            }
            let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
            match kind {
                FileType::Directory if name != ".git" && !is_build_output(tree, &path, &name) => {
                    pending.push((path, depth + 1))
                }
                FileType::RegularFile if name != ".git" => files.push(path),
                _ => {}
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Receives a file's name and metadata, none when it is unreadable, and its content.
type FileVisitor<'a> = dyn FnMut((&str, Option<&Metadata>), &mut dyn Read) -> io::Result<()> + 'a;

/// Visits each file of a folder. Returns the hash of the content.
fn visit_files(tree: &Tree, visit: &mut FileVisitor<'_>) -> io::Result<String> {
    let mut hash = Sha256::new();
    for name in list_files(tree)? {
        hash.update((name.len() as u64).to_be_bytes());
        hash.update(name.as_bytes());
        match tree.open_file(&name).and_then(|file| Ok((file.metadata()?, file))) {
            Ok((metadata, file)) => {
                hash.update(metadata.len().to_be_bytes());
                // A file that grows meanwhile is cut at its earlier end.
                let mut content = file.take(metadata.len());
                visit(
                    (&name, Some(&metadata)),
                    &mut HashingReader { content: &mut content, hash: &mut hash },
                )?;
            }
            Err(_) => {
                hash.update(u64::MAX.to_be_bytes());
                visit((&name, None), &mut io::empty())?;
            }
        }
    }
    Ok(hex(&hash.finalize()))
}

/// Packs a folder like forges do. Returns its hash. It is unpacked right away, so compressing it
/// would be wasted work.
fn pack(root: &Path, into: &mut ChunkWriter) -> io::Result<String> {
    let mut archive = tar::Builder::new(GzEncoder::new(into, Compression::none()));
    let hash = visit_files(&Tree::open(root)?, &mut |(name, metadata), content| {
        let mut header = tar::Header::new_gnu();
        match metadata {
            Some(metadata) => {
                header.set_size(metadata.len());
                header.set_mode(metadata.mode() & 0o777);
            }
            // The snapshot skips and names it.
            None => {
                header.set_size(0);
                header.set_entry_type(tar::EntryType::Char);
            }
        }
        archive.append_data(&mut header, format!("{ROOT_NAME}/{name}"), content)
    })?;
    archive.into_inner()?.finish()?.flush()?;
    Ok(hash)
}

/// Hashes content as it is read.
struct HashingReader<'a> {
    content: &'a mut dyn Read,
    hash: &'a mut Sha256,
}

impl Read for HashingReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.content.read(buffer)?;
        self.hash.update(&buffer[..read]);
        Ok(read)
    }
}

/// Sends what is written, in chunks.
struct ChunkWriter {
    sender: mpsc::Sender<Result<Bytes, SourceError>>,
    buffer: Vec<u8>,
}

impl Write for ChunkWriter {
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(content);
        if self.buffer.len() >= CHUNK_BYTES {
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

struct HashWriter<'a>(&'a mut Sha256);

impl Write for HashWriter<'_> {
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
