//! A repository, from its host to what a model may read of it.
//!
//! The steps, each on the result of the previous one:
//!
//! 1. A [`Source`] resolves the commit, and returns it as an archive.
//! 2. [`Snapshot::take`] unpacks it below a directory descriptor, within [`Limits`].
//! 3. [`mask`] replaces the secrets in the snapshot itself. Nothing else reads it before.
//! 4. [`survey`] finds what people start in it; [`brief`] summarizes that for a model, in bounded
//!    text.
//! 5. [`outline`] writes lists of its symbols into it. The parsers are C code, and run in a child
//!    process that can do nothing else.
//!
//! Then [`MaskedSnapshot::has_line`] checks whether a citation exists, and [`Manifest::compare`]
//! lists what changed between two commits.
//!
//! Deliberately absent: tables, the bus, and the life of a scan. All file work blocks, and runs on
//! threads for blocking calls.

mod api;
mod blocking;
mod brief;
mod credential;
mod error;
mod github;
mod gitlab;
mod http;
mod local;
mod manifest;
mod mask;
mod outline;
mod snapshot;
mod source;
mod survey;
mod tree;

pub use self::{
    brief::brief,
    error::SourceError,
    github::{GitHub, GitHubAuth, Listing, Owner, Repository},
    gitlab::GitLab,
    http::{ForgeClients, ForgeClientsError},
    local::{Folder, Upload},
    manifest::{Changes, FileEntry, Manifest, SkipReason, SkippedEntries},
    mask::{Finding, MaskReport, MaskedSnapshot, mask},
    outline::{OutlineReport, Outliner, OutlinerLimits, outline, outline_child},
    snapshot::{Limit, Limits, Snapshot, SnapshotError},
    source::{Archive, ArchiveKind, Commit, Source},
    survey::{
        Argument, EntryKind, EntryPoint, Language, Location, Module, Operation, Readme, Survey,
        SurveyLimits, survey,
    },
};
pub(crate) use snapshot::STAGING_PREFIX;
pub(crate) use {snapshot::line_range, tree::Tree};
