//! Unpacks an archive into a new folder, and counts everything that is unpacked.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, BufReader, Read, Write as _},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use sha2::{Digest as _, Sha256};

use super::{ArchiveKind, Limit, Limits, SnapshotError, names, tarball, zipfile};
use crate::repository::{
    manifest::{FileEntry, Manifest, SkipReason, SkippedEntries},
    tree::Tree,
};

/// Bytes that are unpacked between two checks for cancellation.
const CHUNK_BYTES: usize = 64 * 1024;

/// Unpacks an archive of `size` bytes into a new folder.
pub(super) fn unpack(
    packed: File,
    kind: ArchiveKind,
    size: u64,
    limits: &Limits,
    into: &Path,
    wanted: &AtomicBool,
) -> Result<Manifest, SnapshotError> {
    let unpacked = into.with_extension("all");
    let mut writer = EntryWriter {
        tree: Tree::create(&unpacked)?,
        limits,
        wanted,
        archive_bytes: size,
        bytes: 0,
        entries: 0,
        files: BTreeMap::new(),
        folders: BTreeSet::new(),
        skipped: SkippedEntries::default(),
    };
    match kind {
        ArchiveKind::TarGz => tarball::read_entries(BufReader::new(packed), &mut writer)?,
        ArchiveKind::Zip => zipfile::read_entries(packed, &mut writer)?,
    }
    let EntryWriter { mut files, folders, skipped, .. } = writer;
    // An empty snapshot would hide the problem, e.g. of archives with backslashes in paths.
    if let (true, Some((reason, name))) = (files.is_empty(), skipped.named.first()) {
        return Err(SnapshotError::malformed(format!(
            "nothing in it can be used; the first skipped entry is {name:?} ({reason:?})"
        )));
    }
    // Archives of forges have one root folder, which does not belong to the repository.
    match single_root(&files, &folders) {
        Some(top) => {
            let strip = |path: String| {
                path.split_once('/').map_or(path.clone(), |(_, rest)| rest.to_owned())
            };
            files = files.into_iter().map(|(path, entry)| (strip(path), entry)).collect();
            std::fs::rename(unpacked.join(top), into)?;
        }
        None => std::fs::rename(&unpacked, into)?,
    }
    if let Some(path) =
        files.keys().find(|path| path.split('/').count() > limits.depth.saturating_add(1))
    {
        return Err(SnapshotError::exceeded(Limit::Depth, path.as_bytes()));
    }
    let bytes = files.values().map(|entry| entry.size).sum();
    let alike = names::similar_paths(files.keys());
    Ok(Manifest { commit: String::new(), files, bytes, archive_bytes: size, skipped, alike })
}

/// The single root folder, if there is one.
fn single_root(files: &BTreeMap<String, FileEntry>, folders: &BTreeSet<String>) -> Option<String> {
    let mut tops = BTreeSet::new();
    for path in files.keys() {
        tops.insert(path.split_once('/')?.0);
    }
    tops.extend(folders.iter().map(|path| path.split('/').next().unwrap_or(path)));
    (tops.len() == 1).then(|| tops.first().map(|top| (*top).to_owned())).flatten()
}

/// Writes the entries of an archive, one after the other.
pub(super) struct EntryWriter<'a> {
    tree: Tree,
    limits: &'a Limits,
    wanted: &'a AtomicBool,
    archive_bytes: u64,
    bytes: u64,
    entries: u64,
    files: BTreeMap<String, FileEntry>,
    /// All folders, including the parents of files.
    folders: BTreeSet<String>,
    skipped: SkippedEntries,
}

impl<'a> EntryWriter<'a> {
    pub(super) const fn limits(&self) -> &'a Limits {
        self.limits
    }

    /// Starts an entry.
    pub(super) fn begin_entry(&mut self, name: &[u8]) -> Result<(), SnapshotError> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            return Err(SnapshotError::exceeded(Limit::Entries, name));
        }
        self.ensure_wanted()
    }

    pub(super) fn skip(&mut self, reason: SkipReason, name: &[u8]) {
        self.skipped.add(reason, name);
    }

    /// Counts all decompressed bytes, whether they are used or not.
    pub(super) fn count_bytes(&mut self, bytes: u64, name: &[u8]) -> Result<(), SnapshotError> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.limits.bytes {
            return Err(SnapshotError::exceeded(Limit::Bytes, name));
        }
        if self.bytes > self.limits.ratio_from
            && self.bytes / self.archive_bytes.max(1) >= self.limits.ratio
        {
            return Err(SnapshotError::exceeded(Limit::Ratio, name));
        }
        Ok(())
    }

    /// Creates a folder.
    pub(super) fn add_folder(&mut self, name: &[u8]) -> Result<(), SnapshotError> {
        match names::check_name(name, self.limits)? {
            Err(reason) => self.skip(reason, name),
            Ok("") => {}
            Ok(path) => {
                self.claim_parents(path, name)?;
                self.claim_folder(path, name)?;
                self.tree.ensure_directory(path)?;
            }
        }
        Ok(())
    }

    /// Writes a regular file. All its content is read, so that a wrong size is noticed.
    pub(super) fn add_file(
        &mut self,
        name: &[u8],
        size: u64,
        executable: bool,
        content: &mut dyn Read,
    ) -> Result<(), SnapshotError> {
        let path = match names::check_name(name, self.limits)? {
            Ok("") => return Err(SnapshotError::hostile("a file has no name", name)),
            Ok(path) => Ok(path),
            Err(reason) => Err(reason),
        };
        let path = match path {
            Ok(_) if size > self.limits.file_bytes => Err(SkipReason::TooLarge),
            path => path,
        };
        let path = match path {
            Ok(path) => path,
            Err(reason) => {
                self.skip(reason, name);
                return self.drain(name, content);
            }
        };
        if self.files.contains_key(path) || self.folders.contains(path) {
            return Err(SnapshotError::hostile("two entries have the same name", name));
        }
        self.claim_parents(path, name)?;
        let entry = self.write(path, name, size, executable, content)?;
        self.files.insert(path.to_owned(), entry);
        Ok(())
    }

    fn write(
        &mut self,
        path: &str,
        name: &[u8],
        size: u64,
        executable: bool,
        content: &mut dyn Read,
    ) -> Result<FileEntry, SnapshotError> {
        let mut file = self.tree.create_file(path)?;
        let (mut hash, mut written) = (Sha256::new(), 0_u64);
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let read = read_chunk(content, &mut chunk)?;
            if read == 0 {
                break;
            }
            self.ensure_wanted()?;
            self.count_bytes(read as u64, name)?;
            written += read as u64;
            if written > size {
                return Err(SnapshotError::hostile("a file is longer than its header says", name));
            }
            hash.update(&chunk[..read]);
            file.write_all(&chunk[..read])?;
        }
        if written != size {
            return Err(SnapshotError::malformed("a file is shorter than its header says"));
        }
        let hash = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(FileEntry { size, hash, executable })
    }

    /// Reads and drops content, within the limits.
    pub(super) fn drain(
        &mut self,
        name: &[u8],
        content: &mut dyn Read,
    ) -> Result<(), SnapshotError> {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let read = read_chunk(content, &mut chunk)?;
            if read == 0 {
                return Ok(());
            }
            self.ensure_wanted()?;
            self.count_bytes(read as u64, name)?;
        }
    }

    /// Fails when a parent folder's path is a file.
    fn claim_parents(&mut self, path: &str, name: &[u8]) -> Result<(), SnapshotError> {
        let ends: Vec<usize> = path.match_indices('/').map(|(at, _)| at).collect();
        for end in ends {
            self.claim_folder(&path[..end], name)?;
        }
        Ok(())
    }

    fn claim_folder(&mut self, path: &str, name: &[u8]) -> Result<(), SnapshotError> {
        if self.files.contains_key(path) {
            return Err(SnapshotError::hostile("a path leads through a file", name));
        }
        if !self.folders.contains(path) {
            self.folders.insert(path.to_owned());
            // Parent folders are not entries, but cost as much.
            if self.folders.len() as u64 > self.limits.entries {
                return Err(SnapshotError::exceeded(Limit::Entries, name));
            }
        }
        Ok(())
    }

    fn ensure_wanted(&self) -> Result<(), SnapshotError> {
        if self.wanted.load(Ordering::Relaxed) { Ok(()) } else { Err(SnapshotError::Abandoned) }
    }
}

fn read_chunk(content: &mut dyn Read, chunk: &mut [u8]) -> Result<usize, SnapshotError> {
    loop {
        match content.read(chunk) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Reading fails because of the archive's content, almost never because of the disk.
            read => return read.map_err(SnapshotError::malformed),
        }
    }
}
