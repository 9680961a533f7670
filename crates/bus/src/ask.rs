//! Questions to any one process of a service, and news to all of them, over plain NATS: not kept, at most once.

use std::time::Duration;

use construct_proto::mesh::v1 as mesh;
use futures::{StreamExt as _, stream::BoxStream};
use tokio_util::sync::CancellationToken;

use crate::{
    Bus, Message,
    control::{ANSWERS, request, subscribe},
    publish::Error as PublishError,
    subject::{Address, BreakerCensus, BreakerNews, Question},
};

/// Processes that answer the same questions share them in this queue group.
const GROUP: &str = "answers";

impl Bus {
    /// Asks any one process, and waits for its answer.
    ///
    /// # Errors
    /// When nobody is there or nobody answers in time.
    pub async fn ask<Q: Question>(
        &self,
        address: &Q,
        question: &Q::Message,
        timeout: Duration,
    ) -> Result<Q::Answer, request::Error> {
        use async_nats::RequestErrorKind as Kind;
        let refused = |error: PublishError| request::Error::Send(error.into());
        address.check(question).map_err(|error| refused(PublishError::Invalid(error)))?;
        let sealed = self.seal(question).await.map_err(|error| refused(error.into()))?;
        let question = async_nats::Request::new().headers(sealed.headers).payload(sealed.payload).timeout(Some(timeout));
        // The client's own time limit does not cover the wait for a broken connection.
        let answered =
            tokio::time::timeout(timeout, self.inner.client.send_request(address.subject(), question)).await;
        let answer = match answered {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                return Err(match error.kind() {
                    Kind::NoResponders => request::Error::NoResponders,
                    Kind::TimedOut => request::Error::Timeout,
                    _ => request::Error::Send(error.into()),
                });
            }
            Err(_elapsed) => return Err(request::Error::Timeout),
        };
        self.open(answer.headers.as_ref(), answer.payload).await.map_err(request::Error::Answer)
    }

    /// Answers questions until told to stop, up to [`ANSWERS`] at a time. Processes that do so share them.
    ///
    /// # Errors
    /// When the subscription cannot be made.
    pub async fn answer<Q, F>(
        &self,
        address: &Q,
        stop: CancellationToken,
        answer: impl Fn(Q::Message) -> F + Send + Sync,
    ) -> Result<(), subscribe::Error>
    where
        Q: Question,
        F: Future<Output = Q::Answer> + Send,
    {
        let questions = self
            .inner
            .client
            .queue_subscribe(address.subject(), GROUP.to_owned())
            .await
            .map_err(subscribe::Error::Refused)?;
        self.flush().await?;
        let answer = &answer;
        questions
            .take_until(stop.cancelled())
            .for_each_concurrent(ANSWERS, |question| async move {
                if let Err(error) = self.answer_one::<Q, F>(question, answer).await {
                    tracing::warn!(error = &*error, "a question was not answered");
                }
            })
            .await;
        Ok(())
    }

    async fn answer_one<Q, F>(
        &self,
        question: async_nats::Message,
        answer: &(impl Fn(Q::Message) -> F + Send + Sync),
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>
    where
        Q: Question,
        F: Future<Output = Q::Answer> + Send,
    {
        let reply = question.reply.ok_or("it says nowhere to answer to")?;
        let request = self.open(question.headers.as_ref(), question.payload).await?;
        let answer = self.seal(&answer(request).await).await.map_err(PublishError::from)?;
        self.inner.client.publish_with_headers(reply, answer.headers, answer.payload).await?;
        Ok(())
    }

    /// Tells all other processes of the providers service that a breaker has changed.
    ///
    /// # Errors
    /// When the payload names another process, or the client is closed.
    pub async fn tell_breaker(&self, address: &BreakerNews, news: &mesh::BreakerChanged) -> Result<(), PublishError> {
        self.tell(address, news).await
    }

    /// Asks all processes of the providers service to say again which of their breakers are open.
    ///
    /// # Errors
    /// When the client is closed.
    pub async fn want_breakers(&self, wanted: &mesh::BreakersWanted) -> Result<(), PublishError> {
        self.tell(&BreakerCensus, wanted).await
    }

    /// Hears how breakers of all processes change, one's own included. Survives reconnects.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn hear_breakers(&self) -> Result<BoxStream<'static, mesh::BreakerChanged>, subscribe::Error> {
        self.hear(BreakerNews::filter()).await
    }

    /// Hears which processes want to be told about open breakers, oneself included. Survives reconnects.
    ///
    /// # Errors
    /// When the server cannot be reached.
    pub async fn hear_breakers_wanted(&self) -> Result<BoxStream<'static, mesh::BreakersWanted>, subscribe::Error> {
        self.hear(BreakerCensus.subject()).await
    }

    async fn tell<A: Address>(&self, address: &A, message: &A::Message) -> Result<(), PublishError> {
        address.check(message).map_err(PublishError::Invalid)?;
        let sealed = self.seal(message).await?;
        self.inner
            .client
            .publish_with_headers(address.subject(), sealed.headers, sealed.payload)
            .await
            .map_err(|error| PublishError::Rejected { retryable: false, source: error.into() })
    }

    async fn hear<M: Message>(&self, filter: String) -> Result<BoxStream<'static, M>, subscribe::Error> {
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
