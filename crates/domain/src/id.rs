//! Typed, prefixed, time-ordered ids. The table below lists every kind of id, in alphabetical
//! order.

use std::{fmt, str::FromStr};

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// A string that is not a valid id of the expected kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a valid {kind} id: expected `{prefix}_` followed by a UUID")]
pub struct ParseError {
    /// The expected kind, for people.
    pub kind: &'static str,
    /// The expected prefix.
    pub prefix: &'static str,
}

/// A new UUID, version 7 (RFC 9562), with this time instead of the machine's clock.
pub fn new_at(time: Timestamp) -> Uuid {
    let seconds = u64::try_from(time.as_second()).unwrap_or(0);
    let nanos = u32::try_from(time.subsec_nanosecond()).unwrap_or(0);
    Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, seconds, nanos))
}

/// A kind of id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    name: &'static str,
    prefix: &'static str,
}

impl Kind {
    /// The kind whose ids begin with this, if there is one.
    pub fn with_prefix(prefix: &str) -> Option<Self> {
        KINDS.iter().copied().find(|kind| kind.prefix == prefix)
    }

    /// Reads an id of this kind.
    ///
    /// # Errors
    /// [`ParseError`] for any other text.
    pub fn parse(self, text: &str) -> Result<Uuid, ParseError> {
        let error = ParseError { kind: self.name, prefix: self.prefix };
        let uuid = text
            .strip_prefix(self.prefix)
            .and_then(|rest| rest.strip_prefix('_'))
            .ok_or(error.clone())?;
        // Only the canonical form: two spellings of one id would be two subjects and two keys.
        if uuid.len() != 36 || uuid.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(error);
        }
        Uuid::parse_str(uuid).map_err(|_| error)
    }
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident, $prefix:literal, $kind:literal;)*) => {
        const KINDS: &[Kind] = &[$(Kind { name: $kind, prefix: $prefix },)*];
        $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Uuid);

        impl $name {
            /// The prefix of the id's text, before the underscore.
            pub const PREFIX: &'static str = $prefix;

            /// Wraps the UUID (version 7 for ids made by the system).
            pub const fn from_uuid(uuid: Uuid) -> Self {
                Self(uuid)
            }

            /// The UUID inside.
            pub const fn uuid(self) -> Uuid {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}_{}", $prefix, self.0)
            }
        }

        impl FromStr for $name {
            type Err = ParseError;

            fn from_str(text: &str) -> Result<Self, ParseError> {
                Kind { name: $kind, prefix: $prefix }.parse(text).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
        )*
    };
}

ids! {
    /// An agent.
    AgentId, "agent", "agent";
    /// A credential of a program.
    ApiKeyId, "key", "API key";
    /// A call that needs a person's decision.
    ApprovalId, "approval", "approval";
    /// An audit entry.
    AuditEntryId, "audit", "audit entry";
    /// A limit on spending.
    BudgetId, "budget", "budget";
    /// A script that a scan proposes as a Tool.
    CandidateId, "candidate", "candidate";
    /// An uploaded file.
    FileId, "file", "file";
    /// Candidates that are handed over together.
    HandOverId, "handover", "hand-over";
    /// An invitation to join an organization.
    InvitationId, "invitation", "invitation";
    /// A message of a task.
    MessageId, "msg", "message";
    /// A model.
    ModelId, "model", "model";
    /// An account with a model vendor.
    ModelProviderId, "provider", "model provider";
    /// A tenant.
    OrganizationId, "org", "organization";
    /// The credentials and address of a repository host.
    ScanConnectionId, "connection", "connection";
    /// A scan of a repository.
    ScanId, "scan", "scan";
    /// A schedule of messages.
    ScheduleId, "schedule", "schedule";
    /// A secret that scripts may use without seeing it.
    SecretId, "secret", "secret";
    /// One model call or one execution of scripts.
    StepId, "step", "step";
    /// A task.
    TaskId, "task", "task";
    /// A person.
    UserId, "user", "user";
}

impl UserId {
    /// The operator of this machine: owner of [`OrganizationId::LOCAL`].
    pub const LOCAL: Self =
        Self::from_uuid(Uuid::from_u128(0x0000_0000_0000_7000_8000_0000_0000_0002));
}

impl OrganizationId {
    /// The operator's organization. It always exists.
    pub const LOCAL: Self =
        Self::from_uuid(Uuid::from_u128(0x0000_0000_0000_7000_8000_0000_0000_0001));
}

/// The id of a record: its stream (the UUID of a task or organization) and its sequence number
/// there. The same record has the same id wherever it is read.
pub fn event_id(stream: Uuid, sequence: u64) -> String {
    format!("evt_{stream}_{sequence}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_parses_its_own_text() {
        let id = TaskId::from_uuid(Uuid::from_u128(7));
        assert_eq!(id.to_string(), "task_00000000-0000-0000-0000-000000000007");
        assert_eq!(id.to_string().parse(), Ok(id));
    }

    #[test]
    fn id_of_another_kind_or_spelling_is_rejected() {
        for text in [
            "agent_00000000-0000-0000-0000-000000000007",
            "00000000-0000-0000-0000-000000000007",
            "task_00000000000000000000000000000007",
            "task_0000000A-0000-0000-0000-000000000007",
            "task_",
            "",
        ] {
            assert!(text.parse::<TaskId>().is_err(), "{text}");
        }
    }
}
