//! Updates between the processes of a service over core NATS: not stored, delivered at most once.

use construct_proto::mesh::v1 as mesh;
use futures::{StreamExt as _, stream::BoxStream};

use crate::{
    Bus, Message,
    control::subscribe,
    publish::Error as PublishError,
    subject::{Address, BreakerUpdate, BreakersRequest, StateUpdate},
};

impl Bus {
    /// Publishes a change of a breaker to all other processes of the providers service.
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

    /// Requests all processes of the providers service to publish their open breakers again.
    ///
    /// # Errors
    /// When the client is closed.
    pub async fn request_breakers(
        &self,
        request: &mesh::BreakersRequest,
    ) -> Result<(), PublishError> {
        self.publish_core(&BreakersRequest, request).await
    }

    /// Subscribes to breaker changes of all processes, including this one. Survives reconnects.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn subscribe_breakers(
        &self,
    ) -> Result<BoxStream<'static, mesh::BreakerChanged>, subscribe::Error> {
        self.subscribe_decoded(BreakerUpdate::filter()).await
    }

    /// Subscribes to the requests of processes for open breakers, including this one's. Survives
    /// reconnects.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn subscribe_breaker_requests(
        &self,
    ) -> Result<BoxStream<'static, mesh::BreakersRequest>, subscribe::Error> {
        self.subscribe_decoded(BreakersRequest.subject()).await
    }

    /// Publishes a change of a document to all gateways.
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

    /// Subscribes to document changes of an organization, through this gateway and others. Survives
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
                        tracing::warn!(subject = %message.subject, error, "a message cannot be decoded and is ignored");
                        None
                    }
                }
            }
        });
        Ok(decoded.boxed())
    }
}
