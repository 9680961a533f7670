//! Changes of documents that clients store.

use construct_domain::OrganizationId;
use construct_proto::mesh::v1 as mesh;

use super::{Address, Invalid, agree, tokens::ROOT, tokens::Tokens};

const PREFIX: &str = "ctl.gateway";

/// A document of an organization, or of one of its members, has changed. Not stored: the row has
/// the content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateUpdate {
    /// The document's organization.
    pub organization: OrganizationId,
}

impl Address for StateUpdate {
    type Message = mesh::StateChanged;

    fn subject(&self) -> String {
        format!("{ROOT}.{PREFIX}.{}.state", self.organization)
    }

    fn pattern() -> String {
        format!("{ROOT}.{PREFIX}.*.state")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, PREFIX)?;
        let organization = tokens.value()?;
        tokens.word("state")?;
        tokens.end()?;
        Ok(Self { organization })
    }

    fn check(&self, changed: &mesh::StateChanged) -> Result<(), Invalid> {
        agree(
            "the document belongs to another organization",
            self.organization,
            &changed.organization_id,
        )
    }
}
