//! Scans of repositories.
//!
//! The gateway writes what users request: connections, scans, cancels, reviews and hand-overs. The
//! scanner that holds a scan's lease writes everything else, together with its events. The lease
//! guards every change, so that of two processes that work on the same scan one fails.

mod candidate;
mod connection;
mod intent;
mod work;

use construct_domain::{OrganizationId, ScanConnectionId, ScanId};
use jiff::Timestamp;
use uuid::Uuid;

pub use candidate::{Candidate, HandOver, HandOverResult, NewCandidate, Review};
pub use connection::{NewScanConnection, ScanConnection};
pub use intent::{MAX_OPEN_SCANS, NewScan, ScanFilter};
pub use work::{LeaseState, NewScanEvent, ScanChanges};

use crate::{Cursor, Error, Key, SealedSecret, model_provider::sealed_secret, time};

const ENTITY: &str = "scan";

macro_rules! text_enum {
    ($(#[$doc:meta])* $name:ident, $what:literal { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// Replaces all of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The stored form.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }

            fn from_column(text: &str) -> Result<Self, Error> {
                let variant = Self::ALL.iter().copied().find(|variant| variant.as_str() == text);
                variant.ok_or_else(|| Error::internal(format!(concat!("unknown ", $what, " `{}`"), text)))
            }
        }
    };
}

text_enum! {
    /// The source of a scan's files.
    ScanKind, "kind of scan" {
        /// GitHub, or a GitHub Enterprise server.
        Github = "github",
        /// GitLab.
        Gitlab = "gitlab",
        /// An uploaded archive.
        Upload = "upload",
        /// A directory on the scanner's machine.
        Folder = "folder",
    }
}

text_enum! {
    /// The phase of a scan.
    ScanPhase, "phase of a scan" {
        /// No scanner has started it.
        Queued = "queued",
        /// Its files are fetched and masked.
        Snapshot = "snapshot",
        /// The files are surveyed without a model.
        Survey = "survey",
        /// A task explores the files.
        Exploring = "exploring",
        /// The answer of the model is checked.
        Checking = "checking",
        /// The scanner is done; people review the candidates.
        Review = "review",
        /// It failed.
        Failed = "failed",
        /// It was canceled.
        Cancelled = "cancelled",
    }
}

text_enum! {
    /// The state of a candidate.
    CandidateState, "state of a candidate" {
        /// Not reviewed yet.
        Proposed = "proposed",
        /// It is to become a Tool.
        Accepted = "accepted",
        /// It is not to become a Tool.
        Rejected = "rejected",
        /// It was accepted and handed over.
        HandedOver = "handed_over",
    }
}

text_enum! {
    /// Hosts of repositories.
    ScanHost, "host of repositories" {
        /// GitHub, or a GitHub Enterprise server.
        Github = "github",
        /// GitLab.
        Gitlab = "gitlab",
    }
}

text_enum! {
    /// The kind of credential of a connection.
    ScanCredential, "kind of credential" {
        /// A personal token.
        Token = "token",
        /// A GitHub app.
        App = "app",
    }
}

impl ScanPhase {
    /// Whether the scanner has nothing more to do.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Review | Self::Failed | Self::Cancelled)
    }
}

/// The limits of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanLimits {
    /// Total bytes of the unpacked files; 0: the scanner's default.
    pub max_bytes: i64,
    /// Number of files; 0: the scanner's default.
    pub max_files: i64,
    /// Model calls for each answer of the exploration: the first one, and at most two repaired
    /// ones.
    pub max_turns: i32,
    /// Timeout in seconds.
    pub timeout_seconds: i64,
}

/// A scan.
#[derive(Debug, Clone, PartialEq)]
pub struct Scan {
    /// Its id.
    pub id: ScanId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The source of its files.
    pub kind: ScanKind,
    /// `owner/name`, a path, or the name of an upload.
    pub location: String,
    /// Identifies the repository: the same for all its scans.
    pub repository: String,
    /// The connection to the repository; none if there is none or it was deleted.
    pub connection: Option<ScanConnectionId>,
    /// The connection's name when the scan was created; empty: there was none.
    pub connection_name: String,
    /// Where the uploaded archive is stored.
    pub archive: Option<String>,
    /// Branch, tag or commit; empty: the default branch.
    pub reference: String,
    /// Name of the exploring model.
    pub model: String,
    /// The budget of the exploration, in 10⁻¹² US dollars.
    pub budget_pico_usd: i64,
    /// Its limits.
    pub limits: ScanLimits,
    /// The creator.
    pub created_by: String,
    /// The exploring task.
    pub task: String,
    /// The token for that task, sealed for the scan's id; none when the scan is over.
    pub token: Option<SealedSecret>,
    /// Its deadline.
    pub deadline: Timestamp,
    /// When its cancel was requested.
    pub cancel_requested: Option<Timestamp>,
    /// The comment with the cancel.
    pub cancel_reason: String,
    /// Its phase.
    pub phase: ScanPhase,
    /// When it entered its phase.
    pub phase_since: Timestamp,
    /// Why it failed, was canceled, or waits.
    pub reason: String,
    /// When it is due; none when it is over.
    pub next_wake: Option<Timestamp>,
    /// The number of its current lease.
    pub lease: i64,
    /// Consecutive failures.
    pub failures: i32,
    /// The exact commit.
    pub commit: String,
    /// How often the model was asked to repair its answer.
    pub repairs: i32,
    /// The text of the last repair request.
    pub request: String,
    /// The message of the last repair request.
    pub message: String,
    /// Files of the snapshot.
    pub files: i64,
    /// Files left out of it.
    pub files_skipped: i64,
    /// Masked secrets.
    pub secrets_masked: i64,
    /// Candidates.
    pub candidates: i64,
    /// Refused proposals.
    pub refused: i64,
    /// The cost of the exploration.
    pub cost_pico_usd: i64,
    /// Sequence of the newest event.
    pub event_sequence: i64,
    /// When the scanner was done.
    pub ended_at: Option<Timestamp>,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

impl Scan {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), "", self.created_at, self.updated_at)
    }
}

/// An event of a scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanEvent {
    /// Its position: 1, 2, 3, …
    pub sequence: i64,
    /// `phase`, `progress`, …
    pub kind: String,
    /// The phase of the scan.
    pub phase: ScanPhase,
    /// Shown to people.
    pub message: String,
    /// Files of the snapshot.
    pub files: i64,
    /// Candidates so far.
    pub candidates: i64,
    /// The cost of the exploration so far.
    pub cost_pico_usd: i64,
    /// Its tool calls so far.
    pub tool_calls: i64,
    /// When it happened.
    pub created_at: Timestamp,
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    kind: String,
    location: String,
    repository: String,
    connection_id: Option<Uuid>,
    connection_name: String,
    archive: Option<String>,
    reference: String,
    model: String,
    budget_pico_usd: i64,
    max_bytes: i64,
    max_files: i64,
    max_turns: i32,
    timeout_seconds: i64,
    created_by: String,
    task: String,
    token_key_id: Option<String>,
    token_nonce: Option<Vec<u8>>,
    token_ciphertext: Option<Vec<u8>>,
    deadline: Timestamp,
    cancel_requested_at: Option<jiff_sqlx::Timestamp>,
    cancel_reason: String,
    phase: String,
    phase_since: Timestamp,
    reason: String,
    next_wake: Option<jiff_sqlx::Timestamp>,
    lease: i64,
    failures: i32,
    commit_id: String,
    repairs: i32,
    request: String,
    message: String,
    files: i64,
    files_skipped: i64,
    secrets_masked: i64,
    candidates: i64,
    refused: i64,
    cost_pico_usd: i64,
    event_sequence: i64,
    ended_at: Option<jiff_sqlx::Timestamp>,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for Scan {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: ScanId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            kind: ScanKind::from_column(&row.kind)?,
            location: row.location,
            repository: row.repository,
            connection: row.connection_id.map(ScanConnectionId::from_uuid),
            connection_name: row.connection_name,
            archive: row.archive,
            reference: row.reference,
            model: row.model,
            budget_pico_usd: row.budget_pico_usd,
            limits: ScanLimits {
                max_bytes: row.max_bytes,
                max_files: row.max_files,
                max_turns: row.max_turns,
                timeout_seconds: row.timeout_seconds,
            },
            created_by: row.created_by,
            task: row.task,
            token: sealed_secret(row.token_key_id, row.token_nonce, row.token_ciphertext),
            deadline: row.deadline,
            cancel_requested: time::from_sql_option(row.cancel_requested_at),
            cancel_reason: row.cancel_reason,
            phase: ScanPhase::from_column(&row.phase)?,
            phase_since: row.phase_since,
            reason: row.reason,
            next_wake: time::from_sql_option(row.next_wake),
            lease: row.lease,
            failures: row.failures,
            commit: row.commit_id,
            repairs: row.repairs,
            request: row.request,
            message: row.message,
            files: row.files,
            files_skipped: row.files_skipped,
            secrets_masked: row.secrets_masked,
            candidates: row.candidates,
            refused: row.refused,
            cost_pico_usd: row.cost_pico_usd,
            event_sequence: row.event_sequence,
            ended_at: time::from_sql_option(row.ended_at),
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

/// Queries of scans, and statements that return the scans they changed.
macro_rules! scans {
    ([$($head:literal)*], [$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            crate::scan::Row,
            "" $(+ $head)* + " s.id, s.organization_id, s.kind, s.location, s.repository, s.connection_id, s.connection_name, s.archive,
                 s.reference, s.model, s.budget_pico_usd, s.max_bytes, s.max_files, s.max_turns, s.timeout_seconds, s.created_by,
                 s.task, s.token_key_id, s.token_nonce, s.token_ciphertext, s.deadline, s.cancel_requested_at, s.cancel_reason,
                 s.phase, s.phase_since, s.reason, s.next_wake, s.lease, s.failures, s.commit_id, s.repairs, s.request, s.message,
                 s.files, s.files_skipped, s.secrets_masked, s.candidates, s.refused, s.cost_pico_usd, s.event_sequence, s.ended_at,
                 s.revision, s.created_at, s.updated_at " $(+ $tail)+,
            $($argument),*
        )
    };
}
use scans;
