//! A repository, from where it is kept to what a model may read of it.
//!
//! In this order, each step on what the one before has left:
//!
//! 1. A [`Source`] says which commit is meant, and gives it as an archive.
//! 2. [`Snapshot::take`] lays it down below a directory descriptor, within [`Limits`].
//! 3. [`mask`] replaces the secrets in the snapshot itself. Nothing else has read it before.
//! 4. [`survey`] finds what people start in it; [`brief`] tells a model of that, in bounded text.
//! 5. [`outline`] writes lists of its symbols into it. The parsers are C, and run in a child
//!    process that can do nothing else.
//!
//! Then [`Clean::cites`] says whether a place somebody names exists, and [`Manifest::compare`] what
//! changed between two commits.
//!
//! Deliberately absent: any table, the bus, and the life of a scan. All work on files blocks, and
//! runs where that is allowed.

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
    http::{Reach, ReachError},
    local::{Folder, Upload},
    manifest::{Changes, FileEntry, Manifest, Skip, Skipped},
    mask::{Clean, Finding, Masked, mask},
    outline::{Outlined, Outliner, OutlinerLimits, outline, outline_child},
    snapshot::{Limit, Limits, Snapshot, SnapshotError},
    source::{Archive, ArchiveKind, Commit, Source},
    survey::{
        Argument, EntryKind, EntryPoint, Language, Module, Operation, Place, Readme, Survey,
        SurveyLimits, survey,
    },
};
pub(crate) use snapshot::STAGING;
pub(crate) use {snapshot::lines_of, tree::Tree};
