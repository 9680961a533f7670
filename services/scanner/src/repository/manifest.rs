//! What a snapshot holds: every file with its size and hash, and what was left out. Kept beside the
//! snapshot, so that two commits can be compared when the older one's files are gone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Of what is left out, so many are named; the rest is counted.
const MAX_NAMED: usize = 100;

/// What a snapshot holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The commit's id.
    pub commit: String,
    /// The files by their paths, with `/` between the parts.
    pub files: BTreeMap<String, FileEntry>,
    /// Their sizes together, in bytes.
    pub bytes: u64,
    /// Size of the archive it came in, in bytes.
    pub archive_bytes: u64,
    /// What was left out.
    pub skipped: Skipped,
    /// Groups of paths that differ in case or Unicode normalization only. They are kept apart, as
    /// the file system here does; on others they would be one file.
    pub alike: Vec<Vec<String>>,
}

/// A file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// In bytes.
    pub size: u64,
    /// SHA-256 of its content before secrets were masked, in hexadecimal.
    pub hash: String,
    /// Whether the archive calls it executable. Here no file is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub executable: bool,
}

/// Why an entry of an archive was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Skip {
    /// A symbolic link. What it points to is not followed, then or later.
    Symlink,
    /// A hard link.
    Hardlink,
    /// A device, pipe or sparse file.
    Special,
    /// Larger than one file may be.
    TooLarge,
    /// Its name has a backslash, a control character, or is not UTF-8.
    OddName,
    /// `.git` or `.construct`: the version control's own, and ours.
    Reserved,
    /// Encrypted, or packed in a way that is not supported.
    Unreadable,
}

/// What was left out of a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// How many, by reason.
    pub counts: BTreeMap<Skip, u64>,
    /// The first of them, with their names made printable.
    pub named: Vec<(Skip, String)>,
}

impl Skipped {
    /// Counts one.
    pub(crate) fn add(&mut self, why: Skip, name: &[u8]) {
        *self.counts.entry(why).or_default() += 1;
        if self.named.len() < MAX_NAMED {
            self.named.push((why, printable(name)));
        }
    }

    /// How many were left out for this reason.
    #[must_use]
    pub fn count(&self, why: Skip) -> u64 {
        self.counts.get(&why).copied().unwrap_or(0)
    }
}

/// A name as it can be shown: control characters escaped, at most 200 characters.
pub(crate) fn printable(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_default().take(200).collect()
}

/// What changed from one commit to another. Each list is sorted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Paths only the newer one has.
    pub added: Vec<String>,
    /// Paths only the older one has.
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
    /// What changed from this one to a newer one.
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
    fn what_changed_between_two_commits_is_known_without_their_files() {
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
