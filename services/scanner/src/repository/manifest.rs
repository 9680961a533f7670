//! The content of a snapshot: every file with its size and hash, and what was skipped. It is stored
//! beside the snapshot, so that two commits can be compared without the older one's files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Skipped entries that are named; the rest is counted.
const MAX_NAMED: usize = 100;

/// The content of a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The commit's id.
    pub commit: String,
    /// The files by path, with `/` as the separator.
    pub files: BTreeMap<String, FileEntry>,
    /// Their total size in bytes.
    pub bytes: u64,
    /// The size of the archive in bytes.
    pub archive_bytes: u64,
    /// What was skipped.
    pub skipped: SkippedEntries,
    /// Groups of paths that differ only in case or Unicode normalization. They are kept apart, as
    /// on this file system; on others they would be one file.
    pub alike: Vec<Vec<String>>,
}

/// A file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The size in bytes.
    pub size: u64,
    /// SHA-256 of its content before masking, in hexadecimal.
    pub hash: String,
    /// Whether it is executable in the archive. In the snapshot no file is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub executable: bool,
}

/// Why an entry of an archive was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// A symbolic link. It is never followed.
    Symlink,
    /// A hard link.
    Hardlink,
    /// A device, pipe or sparse file.
    Special,
    /// Larger than the limit for one file.
    TooLarge,
    /// Its name has a backslash or a control character, or is not UTF-8.
    OddName,
    /// `.git` or `.construct`, which are reserved.
    Reserved,
    /// Encrypted, or with an unsupported compression.
    Unreadable,
}

/// The entries that were skipped.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedEntries {
    /// Their number, by reason.
    pub counts: BTreeMap<SkipReason, u64>,
    /// The first of them, with printable names.
    pub named: Vec<(SkipReason, String)>,
}

impl SkippedEntries {
    /// Counts an entry.
    pub(crate) fn add(&mut self, reason: SkipReason, name: &[u8]) {
        *self.counts.entry(reason).or_default() += 1;
        if self.named.len() < MAX_NAMED {
            self.named.push((reason, printable(name)));
        }
    }

    /// The number of entries that were skipped for this reason.
    #[must_use]
    pub fn count(&self, reason: SkipReason) -> u64 {
        self.counts.get(&reason).copied().unwrap_or(0)
    }
}

/// A printable name: control characters escaped, at most 200 characters.
pub(crate) fn printable(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_default().take(200).collect()
}

/// The differences between two commits. Each list is sorted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Paths that only the newer commit has.
    pub added: Vec<String>,
    /// Paths that only the older commit has.
    pub removed: Vec<String>,
    /// Paths whose content differs.
    pub changed: Vec<String>,
}

impl Changes {
    /// Whether nothing differs.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }
}

impl Manifest {
    /// Lists what changed from this commit to a newer one.
    #[must_use]
    pub fn compare(&self, newer: &Self) -> Changes {
        let mut changes = Changes::default();
        for (path, entry) in &newer.files {
            match self.files.get(path) {
                None => changes.added.push(path.clone()),
                Some(old) if old.hash != entry.hash => changes.changed.push(path.clone()),
                Some(_) => {}
            }
        }
        changes.removed =
            self.files.keys().filter(|path| !newer.files.contains_key(*path)).cloned().collect();
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(files: &[(&str, &str)]) -> Manifest {
        let entry = |hash: &str| FileEntry { size: 1, hash: hash.to_owned(), executable: false };
        let files = files.iter().map(|(path, hash)| ((*path).to_owned(), entry(hash))).collect();
        Manifest { files, ..Manifest::default() }
    }

    #[test]
    fn manifests_are_compared_without_files() {
        let old = manifest(&[("a", "1"), ("b", "2"), ("c", "3")]);
        let new = manifest(&[("a", "1"), ("b", "9"), ("d", "4")]);
        let changes = old.compare(&new);
        assert_eq!(
            (changes.added, changes.removed, changes.changed),
            (vec!["d".to_owned()], vec!["c".to_owned()], vec!["b".to_owned()])
        );
        assert!(new.compare(&new).is_empty());
    }
}
