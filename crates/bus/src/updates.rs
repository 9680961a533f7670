//! News to all processes of a service, over plain NATS: not kept, at most once.

use construct_proto::mesh::v1 as mesh;
use futures::{StreamExt as _, stream::BoxStream};

use crate::{
    Bus, Message,
    control::subscribe,
    publish::Error as PublishError,
    subject::{Address, BreakerUpdate, BreakersRequest, StateUpdate},
};

impl Bus {
    /// Tells all other processes of the providers service that a breaker has changed.
    ///
    /// # Errors
    /// When the payload names another process, or the client is closed.
    pub async fn publish_breaker(
        &self,
        address: &BreakerUpdate,
        update: &mesh::BreakerChanged,
    ) -> Result<(), PublishError> {
        self.publish_core(address, update).await
    }

    /// Asks all processes of the providers service to say again which of their breakers are open.
    ///
    /// # Errors
    /// When the client is closed.
    pub async fn request_breakers(
        &self,
        request: &mesh::BreakersWanted,
    ) -> Result<(), PublishError> {
        self.publish_core(&BreakersRequest, request).await
    }

    /// Hears how breakers of all processes change, one's own included. Survives reconnects.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn subscribe_breakers(
        &self,
    ) -> Result<BoxStream<'static, mesh::BreakerChanged>, subscribe::Error> {
        self.subscribe_decoded(BreakerUpdate::filter()).await
    }

    /// Hears which processes want to be told about open breakers, oneself included. Survives
    /// reconnects.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn subscribe_breaker_requests(
        &self,
    ) -> Result<BoxStream<'static, mesh::BreakersWanted>, subscribe::Error> {
        self.subscribe_decoded(BreakersRequest.subject()).await
    }

    /// Tells all gateways that a document has changed.
    ///
    /// # Errors
    /// When the payload names another organization, or the client is closed.
    pub async fn publish_state(
        &self,
        address: &StateUpdate,
        changed: &mesh::StateChanged,
    ) -> Result<(), PublishError> {
        self.publish_core(address, changed).await
    }

    /// Hears which documents of an organization change, through this gateway and others. Survives
    /// reconnects.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn subscribe_states(
        &self,
        address: &StateUpdate,
    ) -> Result<BoxStream<'static, mesh::StateChanged>, subscribe::Error> {
        self.subscribe_decoded(address.subject()).await
    }

    pub(crate) async fn publish_core<A: Address>(
        &self,
        address: &A,
        message: &A::Message,
    ) -> Result<(), PublishError> {
        address.check(message).map_err(PublishError::Invalid)?;
        let sealed = self.seal(message).await?;
        self.inner
            .client
            .publish_with_headers(address.subject(), sealed.headers, sealed.payload)
            .await
            .map_err(|error| PublishError::Rejected { retryable: false, source: error.into() })
    }

    pub(crate) async fn subscribe_decoded<M: Message>(
        &self,
        filter: String,
    ) -> Result<BoxStream<'static, M>, subscribe::Error> {
        let messages = self.subscribe(filter).await?;
        self.flush().await?;
        let bus = self.clone();
        let decoded = messages.filter_map(move |message| {
            let bus = bus.clone();
            async move {
                match bus.open::<M>(message.headers.as_ref(), message.payload).await {
                    Ok(read) => Some(read),
                    Err(error) => {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(subject = %message.subject, error, "a message cannot be read and is left out");
                        None
                    }
                }
            }
        });
        Ok(decoded.boxed())
    }
}
