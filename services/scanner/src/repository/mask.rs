//! Taking the secrets out of a snapshot, in the snapshot itself, before anything else reads it.
//!
//! A secret is replaced by a mark of the rule that has found it. No line is added or taken away, so
//! that places which are cited stay true. When in doubt a value is masked: a tool is described as
//! well without it.
//!
//! What reads a snapshot for others takes a [`Clean`], which nothing but [`mask`] gives.
//!
//! Deliberately absent: the values. What is reported is the rule, the file and the line.

mod files;
mod keys;
mod rules;

use std::{
    io,
    path::Path,
    sync::{Arc, atomic::AtomicBool},
};

use serde::{Deserialize, Serialize};

use self::rules::Rules;
use super::{
    Manifest, Snapshot, SnapshotError,
    blocking::{blocking, go_on},
    snapshot::MAX_FILE,
};

/// Where the report is kept, so that a second call does nothing.
const NOTE: &str = "masked.json";
/// Where it is kept as long as the files are being changed: what has been masked cannot be found
/// again.
const FOUND: &str = "found.json";
/// So many findings are reported; the rest is counted.
const MAX_FINDINGS: usize = 1000;

/// A secret that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The rule's name, e.g. `github-token`.
    pub rule: String,
    /// The file.
    pub path: String,
    /// The line, counted from 1.
    pub line: u32,
}

/// What was masked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Masked {
    /// The first thousand.
    pub findings: Vec<Finding>,
    /// How many there are.
    pub total: u64,
    /// Files that are no text and were emptied, because what they are called says that they hold
    /// keys.
    pub emptied: Vec<String>,
}

/// A snapshot without its secrets. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Clean {
    snapshot: Snapshot,
    masked: Arc<Masked>,
}

impl Clean {
    /// What was masked.
    #[must_use]
    pub fn masked(&self) -> &Masked {
        &self.masked
    }

    /// What it holds.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        self.snapshot.manifest()
    }

    /// The beginning of a file: at most `limit` bytes.
    ///
    /// # Errors
    /// When there is no such file.
    pub fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>> {
        self.snapshot.read(path, limit)
    }

    /// The lines from `first` to `last`, both counted from 1; fewer when the file is shorter. None
    /// when the file or its line `first` does not exist, or it is no text.
    #[must_use]
    pub fn lines(&self, path: &str, first: u32, last: u32) -> Option<Vec<String>> {
        self.snapshot.lines(path, first, last)
    }

    /// A file as text; none when there is no such file, or it is no text.
    #[must_use]
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        self.snapshot.text(path)
    }

    /// Whether a place that somebody cites exists: a file of the commit, and in it the line,
    /// counted from 1.
    #[must_use]
    pub fn cites(&self, path: &str, line: u32) -> bool {
        self.lines(path, line, line).is_some()
    }

    /// Puts it below a folder where others may read it, on the same file system. One of the commit
    /// that is there stays. Whoever goes on with it opens it there.
    ///
    /// # Errors
    /// When the disk fails.
    pub async fn reveal(&self, into: &Path) -> Result<(), SnapshotError> {
        let (snapshot, into) = (self.snapshot.clone(), into.to_owned());
        let work = move || snapshot.move_below(&into);
        tokio::task::spawn_blocking(work)
            .await
            .map_err(|failed| SnapshotError::Io(io::Error::other(failed)))?
    }

    pub(super) const fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }
}

/// Masks the secrets of a snapshot. A second call gives the report of the first, and so does one
/// that is made at the same time.
///
/// # Errors
/// When the disk fails. Then nobody may read the snapshot; calling it again goes on.
pub async fn mask(snapshot: &Snapshot) -> io::Result<Clean> {
    let snapshot = snapshot.clone();
    blocking(move |wanted| {
        let masked = Arc::new(masked(&snapshot, wanted)?);
        Ok(Clean { snapshot, masked })
    })
    .await?
}

/// What was found, as it is noted before any file is changed.
#[derive(Default, Serialize, Deserialize)]
struct Found {
    report: Masked,
    /// The files that are to be changed.
    files: Vec<String>,
}

fn masked(snapshot: &Snapshot, wanted: &AtomicBool) -> io::Result<Masked> {
    let _lock = snapshot.lock()?;
    if let Some(masked) = snapshot.note(NOTE)? {
        return Ok(masked);
    }
    let found = match snapshot.note(FOUND)? {
        Some(found) => found,
        None => {
            let found = find(snapshot, wanted)?;
            snapshot.set_note(FOUND, &found)?;
            found
        }
    };
    for path in &found.files {
        go_on(wanted)?;
        // One that is clean already has nothing left that is found, or the marks it has are put
        // there again.
        let content = snapshot.read(path, MAX_FILE)?;
        if let Some(clean) = cleaned(path, &content, &mut Vec::new()) {
            snapshot.replace(path, &clean)?;
        }
    }
    snapshot.set_note(NOTE, &found.report)?;
    Ok(found.report)
}

fn find(snapshot: &Snapshot, wanted: &AtomicBool) -> io::Result<Found> {
    let mut found = Found::default();
    let report = &mut found.report;
    for path in snapshot.manifest().files.keys() {
        go_on(wanted)?;
        let content = snapshot.read(path, MAX_FILE)?;
        let mut hits = Vec::new();
        let Some(clean) = cleaned(path, &content, &mut hits) else { continue };
        found.files.push(path.clone());
        if clean.is_empty() {
            report.emptied.push(path.clone());
        }
        for (rule, line) in hits {
            report.total += 1;
            if report.findings.len() < MAX_FINDINGS {
                report.findings.push(Finding { rule: rule.to_owned(), path: path.clone(), line });
            }
        }
    }
    Ok(found)
}

/// A file without its secrets, when it has any; each is added to `hits` with its line.
fn cleaned(path: &str, content: &[u8], hits: &mut Vec<(&'static str, u32)>) -> Option<Vec<u8>> {
    if content.is_empty() {
        return None;
    }
    let rules = Rules::all();
    let kind = files::kind(path);
    // Windows writes text with two bytes a character, in which no pattern is found as it stands.
    if let Some(text) = wide(content) {
        return match kind {
            files::Kind::KeyStore => Some(Vec::new()),
            kind => rules.mask(kind, text.as_bytes(), hits),
        };
    }
    match (kind, content.contains(&0)) {
        // Its form says nothing of where its secrets are.
        (files::Kind::KeyStore | files::Kind::Environment | files::Kind::Credentials, true) => {
            Some(Vec::new())
        }
        (files::Kind::KeyStore, false) if content == b"\n".repeat(content.len()) => None,
        (files::Kind::KeyStore, false) => {
            hits.push(("key-store", 1));
            Some(b"\n".repeat(newlines(content)))
        }
        // In what is no text there are strings as well; a name before a value means nothing there.
        (_, true) => rules.mask(files::Kind::Lock, content, hits),
        // What is not UTF-8 is looked at byte by byte: a secret is ASCII.
        (kind, false) => {
            let clean = rules.mask(kind, content, hits);
            debug_assert!(
                clean.as_ref().is_none_or(|clean| newlines(clean) == newlines(content)),
                "{path}"
            );
            clean
        }
    }
}

/// Text in UTF-16 that says so.
fn wide(content: &[u8]) -> Option<String> {
    let join: fn([u8; 2]) -> u16 = match content {
        [0xff, 0xfe, ..] => u16::from_le_bytes,
        [0xfe, 0xff, ..] => u16::from_be_bytes,
        _ => return None,
    };
    let units: Vec<u16> = content[2..].as_chunks().0.iter().map(|pair| join(*pair)).collect();
    Some(String::from_utf16_lossy(&units))
}

fn newlines(content: &[u8]) -> usize {
    content.iter().filter(|byte| **byte == b'\n').count()
}

#[cfg(test)]
mod tests;
