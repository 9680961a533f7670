//! Masks the secrets of a snapshot, in the snapshot itself, before anything else reads it.
//!
//! A secret is replaced by a mark with the name of its rule. No line is added or removed, so
//! citations stay correct. In doubt a value is masked: a tool is described as well without it.
//!
//! Code that reads a snapshot for others takes a [`MaskedSnapshot`], which only [`mask`] creates.
//!
//! Deliberately absent: the values. The report has the rule, the file and the line.

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
    blocking::{blocking, ensure_wanted},
    snapshot::MAX_FILE_BYTES,
};

/// The note with the report. A second call returns it.
const REPORT_NOTE: &str = "masked.json";
/// The note with the findings while files are being changed: masked secrets cannot be found again.
const PENDING_NOTE: &str = "found.json";
/// Findings that are reported; the rest is counted.
const MAX_FINDINGS: usize = 1000;

/// A masked secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The rule's name, e.g. `github-token`.
    pub rule: String,
    /// The file.
    pub path: String,
    /// The line, counted from 1.
    pub line: u32,
}

/// The report of a mask.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaskReport {
    /// The first thousand findings.
    pub findings: Vec<Finding>,
    /// The number of findings.
    pub total: u64,
    /// Binary files that were emptied, because their names say that they hold keys.
    pub emptied: Vec<String>,
}

/// A snapshot without its secrets. Cheap to clone.
#[derive(Debug, Clone)]
pub struct MaskedSnapshot {
    snapshot: Snapshot,
    report: Arc<MaskReport>,
}

impl MaskedSnapshot {
    /// The report of a mask.
    #[must_use]
    pub fn report(&self) -> &MaskReport {
        &self.report
    }

    /// The content.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        self.snapshot.manifest()
    }

    /// Reads at most `limit` bytes from the beginning of a file.
    ///
    /// # Errors
    /// When there is no such file.
    pub fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>> {
        self.snapshot.read(path, limit)
    }

    /// Returns the lines from `first` to `last`, counted from 1 and inclusive; fewer when the file
    /// is shorter. None when the file or its line `first` does not exist, or it is not text.
    #[must_use]
    pub fn lines(&self, path: &str, first: u32, last: u32) -> Option<Vec<String>> {
        self.snapshot.lines(path, first, last)
    }

    /// Returns a file as text; none when it does not exist, or is not text.
    #[must_use]
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        self.snapshot.text(path)
    }

    /// Whether a citation exists: a file of the commit with this line, counted from 1.
    #[must_use]
    pub fn has_line(&self, path: &str, line: u32) -> bool {
        self.lines(path, line, line).is_some()
    }

    /// Moves the snapshot below a folder where others may read it, on the same file system. An
    /// existing snapshot of the commit stays. Reopen it there to continue.
    ///
    /// # Errors
    /// When the disk fails.
    pub async fn publish_to(&self, into: &Path) -> Result<(), SnapshotError> {
        let (snapshot, into) = (self.snapshot.clone(), into.to_owned());
        let work = move || snapshot.move_to(&into);
        tokio::task::spawn_blocking(work)
            .await
            .map_err(|failed| SnapshotError::Io(io::Error::other(failed)))?
    }

    pub(super) const fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }
}

/// Masks the secrets of a snapshot. A second call returns the report of the first, and so does a
/// concurrent one.
///
/// # Errors
/// When the disk fails. Then the snapshot must not be read; another call continues.
pub async fn mask(snapshot: &Snapshot) -> io::Result<MaskedSnapshot> {
    let snapshot = snapshot.clone();
    blocking(move |wanted| {
        let masked = Arc::new(mask_blocking(&snapshot, wanted)?);
        Ok(MaskedSnapshot { snapshot, report: masked })
    })
    .await?
}

/// The findings, as they are noted before any file is changed.
#[derive(Default, Serialize, Deserialize)]
struct PendingMask {
    report: MaskReport,
    /// The files to change.
    files: Vec<String>,
}

fn mask_blocking(snapshot: &Snapshot, wanted: &AtomicBool) -> io::Result<MaskReport> {
    let _lock = snapshot.lock()?;
    if let Some(masked) = snapshot.note(REPORT_NOTE)? {
        return Ok(masked);
    }
    let pending = match snapshot.note(PENDING_NOTE)? {
        Some(pending) => pending,
        None => {
            let pending = find_secrets(snapshot, wanted)?;
            snapshot.set_note(PENDING_NOTE, &pending)?;
            pending
        }
    };
    for path in &pending.files {
        ensure_wanted(wanted)?;
        // In a file that is masked already nothing is found, or its marks are written again.
        let content = snapshot.read(path, MAX_FILE_BYTES)?;
        if let Some(masked) = mask_file(path, &content, &mut Vec::new()) {
            snapshot.replace(path, &masked)?;
        }
    }
    snapshot.set_note(REPORT_NOTE, &pending.report)?;
    Ok(pending.report)
}

fn find_secrets(snapshot: &Snapshot, wanted: &AtomicBool) -> io::Result<PendingMask> {
    let mut pending = PendingMask::default();
    let report = &mut pending.report;
    for path in snapshot.manifest().files.keys() {
        ensure_wanted(wanted)?;
        let content = snapshot.read(path, MAX_FILE_BYTES)?;
        let mut hits = Vec::new();
        let Some(masked) = mask_file(path, &content, &mut hits) else { continue };
        pending.files.push(path.clone());
        if masked.is_empty() {
            report.emptied.push(path.clone());
        }
        for (rule, line) in hits {
            report.total += 1;
            if report.findings.len() < MAX_FINDINGS {
                report.findings.push(Finding { rule: rule.to_owned(), path: path.clone(), line });
            }
        }
    }
    Ok(pending)
}

/// Returns the masked content, if the file has secrets; adds each with its line to `hits`.
fn mask_file(path: &str, content: &[u8], hits: &mut Vec<(&'static str, u32)>) -> Option<Vec<u8>> {
    if content.is_empty() {
        return None;
    }
    let rules = Rules::all();
    let kind = files::file_kind(path);
    // Windows writes UTF-16 text, in which no pattern matches directly.
    if let Some(text) = decode_utf16(content) {
        return match kind {
            files::FileKind::KeyStore => Some(Vec::new()),
            kind => rules.mask(kind, text.as_bytes(), hits),
        };
    }
    match (kind, content.contains(&0)) {
        // The positions of its secrets are unknown.
        (
            files::FileKind::KeyStore | files::FileKind::Environment | files::FileKind::Credentials,
            true,
        ) => Some(Vec::new()),
        (files::FileKind::KeyStore, false) if content == b"\n".repeat(content.len()) => None,
        (files::FileKind::KeyStore, false) => {
            hits.push(("key-store", 1));
            Some(b"\n".repeat(count_newlines(content)))
        }
        // Binary files contain strings as well, but names before values mean nothing there.
        (_, true) => rules.mask(files::FileKind::Lock, content, hits),
        // Text that is not UTF-8 is searched by bytes: secrets are ASCII.
        (kind, false) => {
            let masked = rules.mask(kind, content, hits);
            debug_assert!(
                masked
                    .as_ref()
                    .is_none_or(|masked| count_newlines(masked) == count_newlines(content)),
                "{path}"
            );
            masked
        }
    }
}

/// Decodes UTF-16 text with a byte order mark.
fn decode_utf16(content: &[u8]) -> Option<String> {
    let join: fn([u8; 2]) -> u16 = match content {
        [0xff, 0xfe, ..] => u16::from_le_bytes,
        [0xfe, 0xff, ..] => u16::from_be_bytes,
        _ => return None,
    };
    let units: Vec<u16> = content[2..].as_chunks().0.iter().map(|pair| join(*pair)).collect();
    Some(String::from_utf16_lossy(&units))
}

fn count_newlines(content: &[u8]) -> usize {
    content.iter().filter(|byte| **byte == b'\n').count()
}

#[cfg(test)]
mod tests;
