//! Removing what streams hold of an organization that is gone.

use construct_domain::OrganizationId;

use crate::{Bus, subject};

/// Why not everything was removed.
#[derive(Debug, thiserror::Error)]
#[error("what happened in the organization could not be removed from its streams")]
pub struct Error(#[source] Box<dyn std::error::Error + Send + Sync>);

impl Bus {
    /// Removes the events and the live text of an organization. Those that are published later go
    /// by their age.
    ///
    /// # Errors
    /// When the server does not do it.
    pub async fn forget_organization(&self, organization: OrganizationId) -> Result<(), Error> {
        for (stream, subjects) in subject::organization_subjects(organization) {
            let stream = self
                .inner
                .jetstream
                .get_stream(stream.name())
                .await
                .map_err(|error| Error(error.into()))?;
            stream.purge().filter(subjects).await.map_err(|error| Error(error.into()))?;
        }
        Ok(())
    }
}
