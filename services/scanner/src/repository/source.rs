//! Sources of repositories.

use std::fmt;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};

use super::SourceError;

/// A source of one repository.
#[async_trait]
pub trait Source: Send + Sync + fmt::Debug {
    /// Resolves a branch, tag or (short) commit id to the exact commit; without a reference, the
    /// head of the default branch.
    ///
    /// # Errors
    /// See [`SourceError`].
    async fn resolve(&self, reference: Option<&str>) -> Result<Commit, SourceError>;

    /// Returns the content of a commit. The stream is unbounded: its reader
    /// ([`super::Snapshot::take`]) limits it.
    ///
    /// # Errors
    /// See [`SourceError`].
    async fn archive(&self, commit: &Commit) -> Result<Archive, SourceError>;
}

/// An exact commit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Commit {
    id: String,
    reference: Option<String>,
}

impl Commit {
    /// A commit by its full id: 40 or 64 hexadecimal digits (SHA-1 or SHA-256); and the branch or
    /// tag that it was resolved from, if any.
    ///
    /// # Errors
    /// When the id is malformed. It becomes the name of a folder.
    pub fn new(id: &str, reference: Option<String>) -> Result<Self, SourceError> {
        let is_id = matches!(id.len(), 40 | 64) && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_id {
            let subject = id.chars().take(80).collect();
            return Err(SourceError::Invalid {
                subject,
                reason: "a commit's id has 40 or 64 hexadecimal digits".to_owned(),
            });
        }
        Ok(Self { id: id.to_ascii_lowercase(), reference })
    }

    /// The id, in lower case.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The requested branch or tag, or the default branch.
    #[must_use]
    pub fn reference(&self) -> Option<&str> {
        self.reference.as_deref()
    }
}

/// The format of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArchiveKind {
    /// tar, compressed with gzip.
    TarGz,
    /// zip; stored and deflated entries.
    Zip,
}

/// The packed content of a commit.
pub struct Archive {
    /// The format.
    pub kind: ArchiveKind,
    /// The stream of bytes.
    pub bytes: BoxStream<'static, Result<Bytes, SourceError>>,
}

impl fmt::Debug for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Archive").field("kind", &self.kind).finish_non_exhaustive()
    }
}
