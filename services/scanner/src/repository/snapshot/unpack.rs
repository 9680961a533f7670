//! Unpacking into a fresh folder, with everything counted that comes out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, BufReader, Read, Write as _},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use sha2::{Digest as _, Sha256};

use super::{ArchiveKind, Limit, Limits, SnapshotError, names, tarball, zipped};
use crate::repository::{
    manifest::{FileEntry, Manifest, Skip, Skipped},
    tree::Tree,
};

/// How much is unpacked between two looks at whether it is still wanted.
const CHUNK: usize = 64 * 1024;

/// Unpacks an archive of `size` bytes into a new folder.
pub(super) fn unpack(
    packed: File,
    kind: ArchiveKind,
    size: u64,
    limits: &Limits,
    into: &Path,
    wanted: &AtomicBool,
) -> Result<Manifest, SnapshotError> {
    let beside = into.with_extension("all");
    let mut writer = Writer {
        tree: Tree::create(&beside)?,
        limits,
        wanted,
        archive_bytes: size,
        bytes: 0,
        entries: 0,
        files: BTreeMap::new(),
        folders: BTreeSet::new(),
        skipped: Skipped::default(),
    };
    match kind {
        ArchiveKind::TarGz => tarball::entries(BufReader::new(packed), &mut writer)?,
        ArchiveKind::Zip => zipped::entries(packed, &mut writer)?,
    }
    let Writer { mut files, folders, skipped, .. } = writer;
    // An empty snapshot would say that there is nothing in it, as with archives whose paths have
    // backslashes.
    if let (true, Some((why, name))) = (files.is_empty(), skipped.named.first()) {
        return Err(SnapshotError::malformed(format!(
            "nothing in it can be used; the first left out is {name:?} ({why:?})"
        )));
    }
    // Archives of forges have everything in one folder, which is none of the repository's.
    match only_folder(&files, &folders) {
        Some(top) => {
            let strip = |path: String| {
                path.split_once('/').map_or(path.clone(), |(_, rest)| rest.to_owned())
            };
            files = files.into_iter().map(|(path, entry)| (strip(path), entry)).collect();
            std::fs::rename(beside.join(top), into)?;
        }
        None => std::fs::rename(&beside, into)?,
    }
    if let Some(path) =
        files.keys().find(|path| path.split('/').count() > limits.depth.saturating_add(1))
    {
        return Err(SnapshotError::exceeded(Limit::Depth, path.as_bytes()));
    }
    let bytes = files.values().map(|entry| entry.size).sum();
    let alike = names::alike(files.keys());
    Ok(Manifest { commit: String::new(), files, bytes, archive_bytes: size, skipped, alike })
}

/// The one folder that everything lies in.
fn only_folder(files: &BTreeMap<String, FileEntry>, folders: &BTreeSet<String>) -> Option<String> {
    let mut tops = BTreeSet::new();
    for path in files.keys() {
        tops.insert(path.split_once('/')?.0);
    }
    tops.extend(folders.iter().map(|path| path.split('/').next().unwrap_or(path)));
    (tops.len() == 1).then(|| tops.first().map(|top| (*top).to_owned())).flatten()
}

/// Takes the entries of an archive, one after the other.
pub(super) struct Writer<'a> {
    tree: Tree,
    limits: &'a Limits,
    wanted: &'a AtomicBool,
    archive_bytes: u64,
    bytes: u64,
    entries: u64,
    files: BTreeMap<String, FileEntry>,
    /// Every folder, those included that only lie on the way to a file.
    folders: BTreeSet<String>,
    skipped: Skipped,
}

impl<'a> Writer<'a> {
    pub(super) const fn limits(&self) -> &'a Limits {
        self.limits
    }

    /// An entry has begun.
    pub(super) fn begin(&mut self, name: &[u8]) -> Result<(), SnapshotError> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            return Err(SnapshotError::exceeded(Limit::Entries, name));
        }
        self.go_on()
    }

    pub(super) fn skip(&mut self, why: Skip, name: &[u8]) {
        self.skipped.add(why, name);
    }

    /// Whatever comes out of the decompression, of use or not, counts.
    pub(super) fn count(&mut self, bytes: u64, name: &[u8]) -> Result<(), SnapshotError> {
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

    /// A folder.
    pub(super) fn folder(&mut self, name: &[u8]) -> Result<(), SnapshotError> {
        match names::check(name, self.limits)? {
            Err(why) => self.skip(why, name),
            Ok("") => {}
            Ok(path) => {
                self.on_the_way(path, name)?;
                self.claim_folder(path, name)?;
                self.tree.ensure_directory(path)?;
            }
        }
        Ok(())
    }

    /// A regular file with its content, all of which is read, so that a lie about its size comes
    /// out.
    pub(super) fn file(
        &mut self,
        name: &[u8],
        size: u64,
        executable: bool,
        content: &mut dyn Read,
    ) -> Result<(), SnapshotError> {
        let path = match names::check(name, self.limits)? {
            Ok("") => return Err(SnapshotError::hostile("a file has no name", name)),
            Ok(path) => Ok(path),
            Err(why) => Err(why),
        };
        let path = match path {
            Ok(_) if size > self.limits.file_bytes => Err(Skip::TooLarge),
            path => path,
        };
        let path = match path {
            Ok(path) => path,
            Err(why) => {
                self.skip(why, name);
                return self.drain(name, content);
            }
        };
        if self.files.contains_key(path) || self.folders.contains(path) {
            return Err(SnapshotError::hostile("two entries have the same name", name));
        }
        self.on_the_way(path, name)?;
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
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = fill(content, &mut chunk)?;
            if read == 0 {
                break;
            }
            self.go_on()?;
            self.count(read as u64, name)?;
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

    /// Reads what nobody wants, within the limits.
    pub(super) fn drain(
        &mut self,
        name: &[u8],
        content: &mut dyn Read,
    ) -> Result<(), SnapshotError> {
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = fill(content, &mut chunk)?;
            if read == 0 {
                return Ok(());
            }
            self.go_on()?;
            self.count(read as u64, name)?;
        }
    }

    /// No file may lie where a folder is needed.
    fn on_the_way(&mut self, path: &str, name: &[u8]) -> Result<(), SnapshotError> {
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
            // Folders that only lie on the way are not entries, and cost as much.
            if self.folders.len() as u64 > self.limits.entries {
                return Err(SnapshotError::exceeded(Limit::Entries, name));
            }
        }
        Ok(())
    }

    fn go_on(&self) -> Result<(), SnapshotError> {
        if self.wanted.load(Ordering::Relaxed) { Ok(()) } else { Err(SnapshotError::Abandoned) }
    }
}

fn fill(content: &mut dyn Read, chunk: &mut [u8]) -> Result<usize, SnapshotError> {
    loop {
        match content.read(chunk) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Reading the archive fails because of what is in it, and almost never because of the
            // disk.
            read => return read.map_err(SnapshotError::malformed),
        }
    }
}
