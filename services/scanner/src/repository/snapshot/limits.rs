//! How much a repository may be. Who goes beyond is refused, except for single files, which are
//! left out and named.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// How much a repository may be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Bytes of the archive.
    pub archive_bytes: u64,
    /// Bytes of all files together, those that are left out included: they have to be unpacked to
    /// be passed over.
    pub bytes: u64,
    /// Entries of the archive, of whatever kind.
    pub entries: u64,
    /// Bytes of one file; a larger one is left out.
    pub file_bytes: u64,
    /// Folders one within the other.
    pub depth: usize,
    /// Bytes of one path.
    pub path_bytes: usize,
    /// How many times its size an archive may unpack to, once it has unpacked `ratio_from` bytes.
    pub ratio: u64,
    /// Bytes from which on `ratio` counts: what is small may well be repetitive.
    pub ratio_from: u64,
    /// How long the download may take.
    pub download: Duration,
    /// How long it may stand still.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            archive_bytes: 512 << 20,
            bytes: 2 << 30,
            entries: 200_000,
            file_bytes: 8 << 20,
            depth: 64,
            path_bytes: 1024,
            ratio: 100,
            ratio_from: 32 << 20,
            download: Duration::from_secs(600),
            idle: Duration::from_secs(30),
        }
    }
}

/// A limit that an archive goes beyond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// [`Limits::archive_bytes`].
    ArchiveBytes,
    /// [`Limits::bytes`].
    Bytes,
    /// [`Limits::entries`].
    Entries,
    /// [`Limits::depth`].
    Depth,
    /// [`Limits::path_bytes`].
    PathBytes,
    /// [`Limits::ratio`].
    Ratio,
    /// [`Limits::download`] or [`Limits::idle`].
    Download,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ArchiveBytes => "it is larger than an archive may be",
            Self::Bytes => "it unpacks to more than a repository may be",
            Self::Entries => "it has more entries than a repository may have",
            Self::Depth => "its folders are nested too deeply",
            Self::PathBytes => "a path in it is too long",
            Self::Ratio => "it unpacks to too many times its size",
            Self::Download => "its download takes too long",
        })
    }
}
