//! Removing a deleted organization's messages from the streams.

use construct_domain::OrganizationId;

use crate::{Bus, subject};

/// Why the messages were not all removed.
#[derive(Debug, thiserror::Error)]
#[error("the organization's events could not be removed from the streams")]
pub struct Error(#[source] Box<dyn std::error::Error + Send + Sync>);

impl Bus {
    /// Removes an organization's events and live text. Messages that are published later expire by
    /// age.
    ///
    /// # Errors
    /// When the server fails.
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
