//! Limits of a repository. A repository beyond them is refused, except for single files, which are
//! skipped and named.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

/// Limits of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Bytes of the archive.
    pub archive_bytes: u64,
    /// Bytes of all files, including skipped ones: they have to be unpacked to be skipped.
    pub bytes: u64,
    /// Entries of the archive, of any kind.
    pub entries: u64,
    /// Bytes of one file; a larger one is skipped.
    pub file_bytes: u64,
    /// Depth of nested folders.
    pub depth: usize,
    /// Bytes of one path.
    pub path_bytes: usize,
    /// How many times its size an archive may unpack to, once it has unpacked `ratio_from` bytes.
    pub ratio: u64,
    /// Unpacked bytes from which `ratio` applies: small archives may be repetitive.
    pub ratio_from: u64,
    /// The time limit of the download.
    pub download: Duration,
    /// How long the download may stall.
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

/// A limit that an archive exceeds.
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
