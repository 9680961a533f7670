//! Errors of the store, in the classes that callers treat alike.

use std::error::Error as StdError;

use construct_domain::{approval::ApprovalState, budget::ExhaustedBudget};
use jiff::Timestamp;
use sqlx::postgres::PgDatabaseError;

use crate::reservation;

/// Why a read or write failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It does not exist, or it belongs to another organization. The two are not distinguished.
    #[error("{what} not found")]
    NotFound {
        /// The kind of entity.
        what: &'static str,
    },
    /// A unique value is taken.
    #[error("a {what} with this {field} exists already")]
    AlreadyExists {
        /// The kind of entity.
        what: &'static str,
        /// The field whose value is taken.
        field: &'static str,
    },
    /// It cannot be deleted while other rows refer to it.
    #[error("the {what} is in use by at least one {by}")]
    InUse {
        /// The kind of entity.
        what: &'static str,
        /// The kind of entity that refers to it.
        by: &'static str,
    },
    /// It changed since it was read: its revision (gateway) or version (reconciler) is not the
    /// expected one. Nothing was written.
    #[error("revision conflict: it was changed concurrently")]
    Conflict,
    /// The version of a document is not the expected one. Nothing was written.
    #[error("{}", version_mismatch_text(*current))]
    VersionMismatch {
        /// The current version; 0: the document does not exist.
        current: i64,
    },
    /// The idempotency key was used for another request.
    #[error("the idempotency key was used for a different request")]
    IdempotencyMismatch,
    /// The change would leave an organization without an owner, or the operator's organization
    /// without the operator.
    #[error("an organization must keep an owner")]
    LastOwner,
    /// The role to grant or revoke is above the caller's own role.
    #[error("insufficient role to grant or revoke a role above your own")]
    InsufficientRole,
    /// The organization is permanent: a personal one, or the operator's.
    #[error("a personal organization and the operator's cannot be deleted")]
    PermanentOrganization,
    /// The message queue of the task is full.
    #[error("the task already has {limit} queued messages")]
    QueueFull {
        /// The limit.
        limit: u32,
    },
    /// The organization has too many unfinished scans.
    #[error("the organization already has {limit} unfinished scans")]
    TooManyScans {
        /// The limit.
        limit: u32,
    },
    /// The organization has too many unfinished uploads.
    #[error("the organization already has {limit} unfinished uploads")]
    TooManyUploads {
        /// The limit.
        limit: u32,
    },
    /// The user owns too many organizations.
    #[error("the user already owns {limit} organizations, the limit")]
    TooManyOrganizations {
        /// The limit.
        limit: u32,
    },
    /// A file has too many parts.
    #[error("the file already has {limit} parts")]
    TooManyParts {
        /// The limit.
        limit: u32,
    },
    /// The part does not begin at the current end of the file.
    #[error("the next part of the file begins at {offset}")]
    WrongOffset {
        /// The current end.
        offset: i64,
    },
    /// The part extends beyond the declared size of the file.
    #[error("the part extends beyond the {size} bytes of the file")]
    TooLong {
        /// The declared size in bytes.
        size: i64,
    },
    /// The file is complete, or it was refused.
    #[error("the file is no longer being uploaded")]
    NotUploading,
    /// The candidate was handed over and is immutable.
    #[error("the candidate was handed over and can no longer be changed")]
    HandedOver,
    /// A candidate of the hand-over is not accepted.
    #[error("a candidate is not accepted")]
    NotAccepted,
    /// The message is no longer queued.
    #[error("the message is no longer queued")]
    NotQueued,
    /// The message is not in the transcript: it is queued, was dropped, or is superseded.
    #[error("the message is not in the transcript of the task")]
    NotInTranscript,
    /// A budget cannot cover the reservation. Nothing was written.
    #[error(transparent)]
    Exhausted(Box<ExhaustedBudget>),
    /// The approval is closed.
    #[error("the approval is closed: {}", closed_text(*state, by, *at))]
    ApprovalClosed {
        /// Its final state.
        state: ApprovalState,
        /// The decider; empty when there was no decision.
        by: String,
        /// When it was closed.
        at: Option<Timestamp>,
    },
    /// The database is unreachable or overloaded, or it canceled the statement. The outcome of a
    /// write is unknown.
    #[error("the database is not available")]
    Unavailable(#[source] Box<dyn StdError + Send + Sync>),
    /// A defect, or unreadable stored data.
    #[error("the database refused a statement or holds unreadable data")]
    Internal(#[source] Box<dyn StdError + Send + Sync>),
}

/// Describes the current version of a document.
fn version_mismatch_text(current: i64) -> String {
    match current {
        0 => "the document does not exist".to_owned(),
        current => format!("the document has version {current}"),
    }
}

/// Describes how an approval was closed.
fn closed_text(state: ApprovalState, by: &str, at: Option<Timestamp>) -> String {
    let by = if by.is_empty() { String::new() } else { format!(" by {by}") };
    let at = at.map(|at| format!(" at {at:.0}")).unwrap_or_default();
    match state {
        ApprovalState::Cancelled => format!("it is no longer needed{at}"),
        ApprovalState::Expired => format!("it expired without a decision{at}"),
        ApprovalState::Pending | ApprovalState::Approved | ApprovalState::Rejected => {
            format!("it was {}{by}{at}", state.as_str())
        }
    }
}

impl Error {
    /// Whether a retry of the same call may succeed.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }

    pub(crate) fn internal(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Internal(source.into())
    }

    /// The error of an insert or update. A violated foreign key means that the referenced row is
    /// missing.
    pub(crate) fn from_write(error: sqlx::Error) -> Self {
        violated_constraint(&error)
            .and_then(|name| constraint_error(name, false))
            .unwrap_or_else(|| error.into())
    }

    /// The error of a statement that reserves money. The functions in `migrations/0012_money.sql`
    /// name the exhausted budget.
    pub(crate) fn from_reservation(error: sqlx::Error) -> Self {
        let database_error =
            error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>());
        match database_error
            .filter(|error| error.code() == reservation::EXHAUSTED_SQLSTATE)
            .map(|error| reservation::parse_exhausted(error.detail()))
        {
            Some(Ok(exhausted)) => Self::Exhausted(Box::new(exhausted)),
            Some(Err(unreadable)) => Self::internal(unreadable),
            None => error.into(),
        }
    }

    /// The error of a delete. A violated foreign key means that another row refers to this one.
    pub(crate) fn from_delete(error: sqlx::Error) -> Self {
        violated_constraint(&error)
            .and_then(|name| constraint_error(name, true))
            .unwrap_or_else(|| error.into())
    }
}

/// The name of the violated constraint.
pub(crate) fn violated_constraint(error: &sqlx::Error) -> Option<&str> {
    error.as_database_error()?.constraint()
}

/// Maps a violated constraint to an error. The migrations define the names.
fn constraint_error(name: &str, deleting: bool) -> Option<Error> {
    let taken = |what, field| Some(Error::AlreadyExists { what, field });
    let reference = |what, by| {
        Some(if deleting { Error::InUse { what, by } } else { Error::NotFound { what } })
    };
    match name {
        "organizations_slug_key" => taken("organization", "slug"),
        "organizations_pkey" => taken("organization", "id"),
        "invitations_email_key" => taken("invitation", "e-mail address that is still pending"),
        "agents_name_key" => taken("agent", "name"),
        "agents_pkey" => taken("agent", "id"),
        "messages_pkey" => taken("message", "id"),
        "model_providers_name_key" => taken("model provider", "name"),
        "model_providers_pkey" => taken("model provider", "id"),
        "models_name_key" => taken("model", "name"),
        "models_pkey" => taken("model", "id"),
        "files_pkey" => taken("file", "id"),
        "scan_connections_name_key" => taken("connection", "name"),
        "scan_candidates_name_key" => taken("candidate", "name"),
        "scans_connection_fkey" => reference("connection", "scan"),
        "schedules_name_key" => taken("schedule", "name"),
        "schedules_pkey" => taken("schedule", "id"),
        "schedules_task_fkey" => reference("task", "schedule"),
        "schedules_agent_fkey" => reference("agent", "schedule"),
        "secrets_name_key" => taken("secret", "name"),
        "secrets_pkey" => taken("secret", "id"),
        "tasks_pkey" => taken("task", "id"),
        "budgets_scope_key" => taken("budget", "scope and period"),
        "budgets_pkey" => taken("budget", "id"),
        "budgets_agent_fkey" => reference("agent", "budget"),
        "budgets_task_fkey" => reference("task", "budget"),
        "states_member_fkey" => reference("member", "state"),
        "agent_secrets_secret_fkey" => reference("secret", "agent"),
        "agents_model_fkey" => reference("model", "agent"),
        "model_fallbacks_fallback_fkey" => reference("model", "model"),
        "models_provider_fkey" => reference("model provider", "model"),
        "tasks_agent_fkey" => reference("agent", "task"),
        "agents_organization_fkey"
        | "api_keys_organization_fkey"
        | "budgets_organization_fkey"
        | "events_organization_fkey"
        | "files_organization_fkey"
        | "idempotency_keys_organization_fkey"
        | "invitations_organization_fkey"
        | "members_organization_fkey"
        | "model_providers_organization_fkey"
        | "models_organization_fkey"
        | "reservations_organization_fkey"
        | "scan_connections_organization_fkey"
        | "scans_organization_fkey"
        | "schedules_organization_fkey"
        | "secrets_organization_fkey"
        | "setup_codes_organization_fkey"
        | "states_organization_fkey"
        | "step_usage_organization_fkey"
        | "tasks_organization_fkey" => Some(Error::NotFound { what: "organization" }),
        _ => None,
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        let unavailable = match &error {
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed
            | sqlx::Error::BeginFailed => true,
            sqlx::Error::Database(database) => {
                database.code().is_some_and(|code| is_transient(&code))
            }
            _ => false,
        };
        if unavailable {
            Self::Unavailable(Box::new(error))
        } else {
            Self::Internal(Box::new(error))
        }
    }
}

/// Whether an SQLSTATE is a transient condition.
fn is_transient(code: &str) -> bool {
    // Connection exceptions, insufficient resources, operator intervention (shutdown, starting up,
    // statement timeout), system errors of the server.
    ["08", "53", "57", "58"].iter().any(|class| code.starts_with(class))
        // Serialization failure, deadlock, lock not available, idle transaction ended, read-only
        // during a fail-over.
        || ["40001", "40P01", "55P03", "25P03", "25006"].contains(&code)
}

impl From<sqlx::migrate::MigrateError> for Error {
    fn from(error: sqlx::migrate::MigrateError) -> Self {
        match error {
            sqlx::migrate::MigrateError::Execute(error)
            | sqlx::migrate::MigrateError::ExecuteMigration(error, _) => error.into(),
            other => Self::internal(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_database_errors_are_retryable() {
        assert!(Error::from(sqlx::Error::PoolTimedOut).is_retryable());
        assert!(
            Error::from(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())).is_retryable()
        );
        assert!(!Error::from(sqlx::Error::RowNotFound).is_retryable());
        assert!(!Error::Conflict.is_retryable());
        for (code, expected) in [
            ("57P01", true),
            ("57014", true),
            ("40P01", true),
            ("53300", true),
            ("23505", false),
            ("42601", false),
        ] {
            assert_eq!(is_transient(code), expected, "{code}");
        }
    }

    #[test]
    fn foreign_key_violation_is_not_found_on_write_in_use_on_delete() {
        assert!(matches!(
            constraint_error("models_provider_fkey", false),
            Some(Error::NotFound { what: "model provider" })
        ));
        assert!(matches!(
            constraint_error("models_provider_fkey", true),
            Some(Error::InUse { what: "model provider", by: "model" })
        ));
    }
}
