//! Why a source cannot give what it is asked for. No text here holds an address or a header: both
//! can carry a credential.

use jiff::Timestamp;

/// Why a source cannot give what it is asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// There is no such repository or reference, or the credential may not see it: forges don't say
    /// which.
    #[error("{what} was not found, or the connection may not see it")]
    NotFound {
        /// What was asked for.
        what: String,
    },
    /// It was taken away for legal reasons (HTTP 451) or is gone for good.
    #[error("{what} is not available any more: {why}")]
    Gone {
        /// What was asked for.
        what: String,
        /// What the forge says.
        why: String,
    },
    /// The credential is refused, or may not do this.
    #[error("the forge refuses: {why}")]
    Denied {
        /// What the forge says.
        why: String,
    },
    /// The forge wants to be left alone until then.
    #[error("the forge's limit of requests is reached; it may be asked again at {until}")]
    RateLimited {
        /// When it may be asked again.
        until: Timestamp,
    },
    /// The host may not be reached: not public, not https, or not the one that was configured.
    #[error("{what} may not be reached: {why}")]
    Forbidden {
        /// The host.
        what: String,
        /// Why not.
        why: String,
    },
    /// The forge cannot be reached or fails; the same may succeed later.
    #[error("the forge cannot be reached or fails: {why}")]
    Unavailable {
        /// What happened.
        why: String,
    },
    /// The forge's answer is not what its documentation promises.
    #[error("the forge's answer cannot be understood: {why}")]
    Unexpected {
        /// What is wrong with it.
        why: String,
    },
    /// What was asked for cannot exist, whatever the forge says: a bad name or reference, a folder
    /// that is none.
    #[error("{what} cannot be used: {why}")]
    Invalid {
        /// What was given.
        what: String,
        /// What is wrong with it.
        why: String,
    },
}

impl SourceError {
    /// Whether the same may succeed later, with nobody changing anything.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::RateLimited { .. } | Self::Unavailable { .. })
    }
}

/// What somebody has given for an address, as it may be told: without what can be a credential in
/// it, and not long.
pub(super) fn shown(given: &str) -> String {
    let given = given.rsplit('@').next().unwrap_or(given);
    let given = given.split(['?', '#']).next().unwrap_or(given);
    given.chars().filter(|c| !c.is_control()).take(100).collect()
}
