//! Messages to running processes over core NATS: not stored, delivered at most once.

use std::time::Duration;

use async_nats::{HeaderMap, Subscriber};
use construct_proto::mesh::v1::{CancelStep, ToolCatalog, ToolCatalogRequest};
use futures::{StreamExt as _, stream::BoxStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::{
    Bus,
    envelope::TIMEOUT,
    publish::Error as PublishError,
    subject::{Address as _, Cancel, Pool, Question, Service, Tools},
};

/// Timeout of the server's confirmation of a subscription.
pub(crate) const CONFIRM_TIMEOUT: Duration = Duration::from_secs(2);

/// How many questions of a kind one process answers at a time. Further ones wait.
pub const MAX_CONCURRENT_ANSWERS: usize = 16;

/// How many questions of a kind are taken from NATS at a time, so that the timeouts of waiting ones
/// run.
const MAX_QUEUED_QUESTIONS: usize = 1024;

/// Errors of subscriptions.
pub mod subscribe {
    /// Why a subscription failed.
    #[derive(Debug, thiserror::Error)]
    pub enum Error {
        /// The subject is invalid, or the client is closed.
        #[error("the subscription is impossible")]
        Refused(#[source] async_nats::SubscribeError),
        /// The server did not confirm it.
        #[error("NATS did not confirm the subscription in time")]
        Unconfirmed,
    }

    impl Error {
        /// Whether another attempt may help without a change by anybody.
        pub const fn is_retryable(&self) -> bool {
            matches!(self, Self::Unconfirmed)
        }
    }
}

/// Errors of requests.
pub mod request {
    use crate::envelope::OpenError;

    /// Why a question has no answer.
    #[derive(Debug, thiserror::Error)]
    pub enum Error {
        /// No process answers at the address.
        #[error("no process answers")]
        NoResponders,
        /// No answer arrived in time.
        #[error("no answer arrived in time")]
        Timeout,
        /// The question could not be sent.
        #[error("the question could not be sent")]
        Send(#[source] Box<dyn std::error::Error + Send + Sync>),
        /// The answer cannot be decoded.
        #[error("the answer cannot be decoded")]
        Answer(#[source] OpenError),
    }

    impl Error {
        /// Whether another attempt may help without a change by anybody.
        pub const fn is_retryable(&self) -> bool {
            match self {
                Self::NoResponders | Self::Timeout => true,
                Self::Send(_) => false,
                Self::Answer(error) => error.is_retryable(),
            }
        }
    }
}

impl Bus {
    /// Tells every process of a service to stop working on a step. A process that is not connected
    /// misses the message.
    ///
    /// # Errors
    /// When the payload names no step, or the client is closed.
    pub async fn publish_cancel(
        &self,
        address: &Cancel,
        cancel: &CancelStep,
    ) -> Result<(), PublishError> {
        address.check(cancel).map_err(PublishError::Invalid)?;
        let sealed = self.seal(cancel).await?;
        self.inner
            .client
            .publish_with_headers(address.subject(), sealed.headers, sealed.payload)
            .await
            .map_err(|error| PublishError::Rejected { retryable: false, source: error.into() })
    }

    /// Subscribes to the cancellations for a service. The subscription survives reconnects. If the
    /// server does not confirm it, because it hangs or is unreachable, this waits until it does.
    ///
    /// # Errors
    /// When the subscription is impossible.
    pub async fn subscribe_cancel(
        &self,
        service: Service,
    ) -> Result<BoxStream<'static, CancelStep>, subscribe::Error> {
        let address = Cancel { service };
        let messages = self.subscribe(address.subject()).await?;
        let mut waits = false;
        while let Err(error) = self.flush().await {
            if !error.is_retryable() {
                return Err(error);
            }
            if !std::mem::replace(&mut waits, true) {
                tracing::warn!(%error, "cancellations cannot be received yet; retrying");
            }
        }
        let bus = self.clone();
        let decoded = messages.filter_map(move |message| {
            let bus = bus.clone();
            async move {
                match bus.open::<CancelStep>(message.headers.as_ref(), message.payload).await {
                    Ok(cancel) if address.check(&cancel).is_ok() => Some(cancel),
                    Ok(_) => {
                        tracing::warn!(subject = %message.subject, "a cancellation without a step is ignored");
                        None
                    }
                    Err(error) => {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(subject = %message.subject, error, "a cancellation cannot be decoded and is ignored");
                        None
                    }
                }
            }
        });
        Ok(decoded.boxed())
    }

    /// Asks any interpreter of a pool which tools scripts can call, and about a workspace.
    ///
    /// # Errors
    /// When there is no interpreter, or none answers in time.
    pub async fn request_tools(
        &self,
        pool: &Pool,
        question: &ToolCatalogRequest,
        timeout: Duration,
    ) -> Result<ToolCatalog, request::Error> {
        self.ask(&Tools { pool: pool.clone() }, question, timeout).await
    }

    /// Asks the processes that answer at an address and returns the first answer. They receive the
    /// timeout and stop working when it has passed.
    ///
    /// # Errors
    /// When no process answers at the address or none answers in time. [`request::Error::Send`]
    /// also when the question does not belong at the address.
    pub async fn ask<Q: Question>(
        &self,
        address: &Q,
        question: &Q::Message,
        timeout: Duration,
    ) -> Result<Q::Answer, request::Error> {
        use async_nats::RequestErrorKind as Kind;
        address.check(question).map_err(|error| request::Error::Send(error.into()))?;
        if timeout.is_zero() {
            return Err(request::Error::Timeout);
        }
        let mut question = self
            .seal(question)
            .await
            .map_err(|error| request::Error::Send(PublishError::from(error).into()))?;
        question.headers.insert(TIMEOUT, timeout.as_millis().max(1).to_string());
        let question = async_nats::Request::new()
            .headers(question.headers)
            .payload(question.payload)
            .timeout(Some(timeout));
        // The client's own timeout does not cover the wait for a broken connection.
        let answered = tokio::time::timeout(
            timeout,
            self.inner.client.send_request(address.subject(), question),
        )
        .await;
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

    /// Whether any interpreter serves a pool now.
    ///
    /// # Errors
    /// When this is unknown: NATS is unreachable, or an interpreter exists and does not answer in
    /// time.
    pub async fn pool_is_served(
        &self,
        pool: &Pool,
        timeout: Duration,
    ) -> Result<bool, request::Error> {
        match self.request_tools(pool, &ToolCatalogRequest::default(), timeout).await {
            Ok(_) => Ok(true),
            Err(request::Error::NoResponders) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Answers a pool's requests for tools until `stop`, up to [`MAX_CONCURRENT_ANSWERS`] at a
    /// time. The pool's interpreters share the requests.
    ///
    /// # Errors
    /// When the subscription fails.
    pub async fn serve_tools<F>(
        &self,
        pool: &Pool,
        stop: CancellationToken,
        answer: impl Fn(ToolCatalogRequest) -> F + Send + Sync,
    ) -> Result<(), subscribe::Error>
    where
        F: Future<Output = ToolCatalog> + Send,
    {
        let answer = |question| {
            let answered = answer(question);
            async { Some(answered.await) }
        };
        self.answer(&Tools { pool: pool.clone() }, stop, answer).await
    }

    /// Answers the questions at an address until `stop`, up to [`MAX_CONCURRENT_ANSWERS`] at a
    /// time. The processes of the address's group share the questions; without a group, all of them
    /// receive each question. A question without an answer (`None`) times out. When the timeout of
    /// a question has passed, its future is dropped wherever it is.
    ///
    /// # Errors
    /// When the subscription fails.
    pub async fn answer<Q: Question, F>(
        &self,
        address: &Q,
        stop: CancellationToken,
        answer: impl Fn(Q::Message) -> F + Send + Sync,
    ) -> Result<(), subscribe::Error>
    where
        F: Future<Output = Option<Q::Answer>> + Send,
    {
        let client = &self.inner.client;
        let questions = match Q::GROUP {
            Some(group) => client.queue_subscribe(address.subject(), group.to_owned()).await,
            None => client.subscribe(address.subject()).await,
        };
        let questions = questions.map_err(subscribe::Error::Refused)?;
        self.flush().await?;
        let slots = Semaphore::new(MAX_CONCURRENT_ANSWERS);
        let (answer, slots, stop) = (&answer, &slots, &stop);
        questions
            .take_until(stop.cancelled())
            .for_each_concurrent(MAX_QUEUED_QUESTIONS, |question| async move {
                let (subject, timeout) =
                    (question.subject.clone(), requested_timeout(question.headers.as_ref()));
                let answering = async {
                    // A question whose turn does not come before `stop` gets no answer.
                    let Some(Ok(_slot)) = stop.run_until_cancelled(slots.acquire()).await else {
                        return Ok(());
                    };
                    self.answer_one(address, question, answer).await
                };
                let answered = match timeout {
                    Some(timeout) => tokio::time::timeout(timeout, answering).await,
                    None => Ok(answering.await),
                };
                match answered {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => {
                        tracing::warn!(%subject, error = &*error, "a question was not answered")
                    }
                    Err(_elapsed) => {
                        tracing::debug!(%subject, ?timeout, "the requester no longer waits for the answer")
                    }
                }
            })
            .await;
        Ok(())
    }

    async fn answer_one<Q: Question, F: Future<Output = Option<Q::Answer>> + Send>(
        &self,
        address: &Q,
        question: async_nats::Message,
        answer: &(impl Fn(Q::Message) -> F + Send + Sync),
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let reply = question.reply.ok_or("it has no reply subject")?;
        let question: Q::Message = self.open(question.headers.as_ref(), question.payload).await?;
        address.check(&question)?;
        let Some(answer) = answer(question).await else { return Ok(()) };
        let answer = self.seal(&answer).await.map_err(PublishError::from)?;
        self.inner.client.publish_with_headers(reply, answer.headers, answer.payload).await?;
        Ok(())
    }

    pub(crate) async fn subscribe(&self, filter: String) -> Result<Subscriber, subscribe::Error> {
        self.inner.client.subscribe(filter).await.map_err(subscribe::Error::Refused)
    }

    /// Waits until the server has processed everything sent so far. It processes messages in order,
    /// so a message to ourselves that comes back proves it.
    pub(crate) async fn flush(&self) -> Result<(), subscribe::Error> {
        let client = &self.inner.client;
        let round_trip = async {
            let inbox = client.new_inbox();
            let mut answer = client.subscribe(inbox.clone()).await.ok()?;
            client.publish(inbox, bytes::Bytes::new()).await.ok()?;
            answer.next().await
        };
        match tokio::time::timeout(CONFIRM_TIMEOUT, round_trip).await {
            Ok(Some(_)) => Ok(()),
            _ => Err(subscribe::Error::Unconfirmed),
        }
    }
}

/// How long the requester waits. `None`: unknown or malformed, as in requests by hand.
fn requested_timeout(headers: Option<&HeaderMap>) -> Option<Duration> {
    headers?.get(TIMEOUT)?.as_str().parse().ok().map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_header_malformed_is_ignored() {
        assert_eq!(requested_timeout(None), None);
        assert_eq!(requested_timeout(Some(&HeaderMap::new())), None);
        for (text, expected) in [
            ("250", Some(Duration::from_millis(250))),
            ("0", Some(Duration::ZERO)),
            ("18446744073709551615", Some(Duration::from_millis(u64::MAX))),
            ("18446744073709551616", None),
            ("", None),
            ("-1", None),
            ("1.5", None),
            ("250m", None),
            ("soon", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(TIMEOUT, text);
            assert_eq!(requested_timeout(Some(&headers)), expected, "{text}");
        }
    }
}
