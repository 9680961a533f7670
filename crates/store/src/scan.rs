//! Scans of repositories.
//!
//! The gateway writes what people want (connections, a scan, a cancel, what is said of a candidate,
//! a hand-over). Everything else of a scan is written by the scanner that holds its lease, together
//! with the events that tell of it; every change is guarded by the lease, so that of two processes
//! that work on the same scan one notices.

mod candidate;
mod connection;
mod intent;
mod work;

use construct_domain::{OrganizationId, ScanConnectionId, ScanId};
use jiff::Timestamp;
use uuid::Uuid;

pub use candidate::{Candidate, HandOver, HandOverResult, NewCandidate, Review};
pub use connection::{NewScanConnection, ScanConnection};
pub use intent::{NewScan, MAX_OPEN_SCANS, ScanFilter};
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
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// As it is stored.
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
    /// Where a scan's files come from.
    ScanKind, "kind of scan" {
        /// GitHub, or a GitHub Enterprise server.
        Github = "github",
        /// GitLab.
        Gitlab = "gitlab",
        /// An archive that somebody has sent.
        Upload = "upload",
        /// A directory of the scanner's machine.
        Folder = "folder",
    }
}

text_enum! {
    /// How far a scan has come.
    ScanPhase, "phase of a scan" {
        /// Nobody has begun.
        Queued = "queued",
        /// Its files are fetched and masked.
        Snapshot = "snapshot",
        /// They are looked through without a model.
        Survey = "survey",
        /// A task explores them.
        Exploring = "exploring",
        /// What the model said is checked.
        Checking = "checking",
        /// The scanner's work is over, and people review.
        Review = "review",
        /// It came to nothing.
        Failed = "failed",
        /// Somebody has ended it.
        Cancelled = "cancelled",
    }
}

text_enum! {
    /// What has become of a candidate.
    CandidateState, "state of a candidate" {
        /// Nobody has decided.
        Proposed = "proposed",
        /// It is to be made into a Tool.
        Accepted = "accepted",
        /// It is not.
        Rejected = "rejected",
        /// It was accepted, and the mesh was told.
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
    /// What opens a connection.
    ScanCredential, "kind of credential" {
        /// A personal token.
        Token = "token",
        /// An app of GitHub's.
        App = "app",
    }
}

impl ScanPhase {
    /// Whether the scanner has nothing more to do.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Review | Self::Failed | Self::Cancelled)
    }
}

/// How much a scan may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanLimits {
    /// Bytes of the unpacked files together; 0: what the scanner does by itself.
    pub max_bytes: i64,
    /// Files; 0: what the scanner does by itself.
    pub max_files: i64,
    /// Model calls for each answer of the exploration: the first one, and at most two mended ones.
    pub max_turns: i32,
    /// How long it may take, in seconds.
    pub timeout_seconds: i64,
}

/// A scan.
#[derive(Debug, Clone, PartialEq)]
pub struct Scan {
    /// Its id.
    pub id: ScanId,
    /// Whose.
    pub organization: OrganizationId,
    /// Where its files come from.
    pub kind: ScanKind,
    /// `owner/name`, a path, or what an upload is called.
    pub location: String,
    /// The same for every scan of the repository.
    pub repository: String,
    /// What opens the repository; none when that is gone, too.
    pub connection: Option<ScanConnectionId>,
    /// Its name when the scan was made; empty: there was none.
    pub connection_name: String,
    /// Where the bytes of an upload lie.
    pub archive: Option<String>,
    /// Branch, tag or commit; empty: the default branch.
    pub reference: String,
    /// Name of the model that explores.
    pub model: String,
    /// What that may cost.
    pub budget_pico_usd: i64,
    /// How much it may take.
    pub limits: ScanLimits,
    /// Who wants it.
    pub created_by: String,
    /// The task that explores.
    pub task: String,
    /// What the scanner speaks to that task with, sealed for the scan's id; none when it is over.
    pub token: Option<SealedSecret>,
    /// When it is given up.
    pub deadline: Timestamp,
    /// When somebody asked for its end.
    pub cancel_requested: Option<Timestamp>,
    /// Why, in their words.
    pub cancel_reason: String,
    /// How far it has come.
    pub phase: ScanPhase,
    /// Since when.
    pub phase_since: Timestamp,
    /// Why it failed, was cancelled, or has to wait.
    pub reason: String,
    /// When somebody has to look at it; none when it is over.
    pub next_wake: Option<Timestamp>,
    /// Who is at it.
    pub lease: i64,
    /// How often in a row it could not be gone on with.
    pub failures: i32,
    /// The exact commit.
    pub commit: String,
    /// How often the model was told what is wrong with its answer.
    pub repairs: i32,
    /// What it is told of that.
    pub request: String,
    /// The message it was told with.
    pub message: String,
    /// Files of the snapshot.
    pub files: i64,
    /// Files left out of it.
    pub files_skipped: i64,
    /// Secrets found and masked.
    pub secrets_masked: i64,
    /// Candidates.
    pub candidates: i64,
    /// Proposals that were refused.
    pub refused: i64,
    /// What the exploration has cost.
    pub cost_pico_usd: i64,
    /// Sequence of the newest event.
    pub event_sequence: i64,
    /// When the scanner's work was over.
    pub ended_at: Option<Timestamp>,
    /// Rises with every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

impl Scan {
    /// Its place in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), "", self.created_at, self.updated_at)
    }
}

/// Something that happened in a scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanEvent {
    /// Its place: 1, 2, 3, …
    pub sequence: i64,
    /// `phase`, `progress`, …
    pub kind: String,
    /// How far the scan had come.
    pub phase: ScanPhase,
    /// For people.
    pub message: String,
    /// Files of the snapshot.
    pub files: i64,
    /// Candidates found.
    pub candidates: i64,
    /// What the exploration had cost.
    pub cost_pico_usd: i64,
    /// Calls of tools it had made.
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

/// A query of scans, and statements that give back what they changed.
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
