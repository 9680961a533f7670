//! Who calls. The one place where a request gets its organisation: log-in is added here, and nowhere else.

use construct_domain::OrganizationId;
use tonic::{Status, metadata::MetadataMap};

/// Who calls, and on behalf of which organisation. Every access to data names the organisation of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Whose data the caller works with.
    pub(crate) organization: OrganizationId,
    /// What the caller is called where it is written down who did something.
    pub(crate) name: &'static str,
}

/// Identifies the caller of a request. In local mode everybody who reaches the gateway belongs to the local
/// organisation, which is why it refuses to listen where others could reach it.
#[expect(clippy::unnecessary_wraps, reason = "log-in refuses callers here")]
pub(crate) fn identify(_metadata: &MetadataMap) -> Result<Caller, Status> {
    Ok(Caller { organization: OrganizationId::LOCAL, name: "local" })
}
