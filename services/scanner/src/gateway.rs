//! The mesh's public API, of which this service is a client like any other.

use std::time::Duration;

use construct_proto::v1::{
    message_service_client::MessageServiceClient, task_service_client::TaskServiceClient,
};
use secrecy::{ExposeSecret as _, SecretString};
use tonic::{
    Code, Request, Response, Status,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};

use crate::error::Error;

/// The largest answer that is read, in bytes.
const MAX_ANSWER: usize = 64 * 1024 * 1024;
/// How long one call may take.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// The connection. Cheap to clone; connects when first used, and again whenever needed.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    channel: Channel,
}

impl Gateway {
    /// # Errors
    /// When the address is none.
    pub(crate) fn new(url: &str) -> anyhow::Result<Self> {
        let endpoint = Endpoint::from_shared(url.to_owned())?
            .connect_timeout(Duration::from_secs(3))
            .tcp_nodelay(true)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(5))
            .keep_alive_while_idle(true);
        Ok(Self { channel: endpoint.connect_lazy() })
    }

    pub(crate) fn messages(&self) -> MessageServiceClient<Channel> {
        MessageServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn tasks(&self) -> TaskServiceClient<Channel> {
        TaskServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    /// A request with the token of a scan.
    pub(crate) fn request<T>(&self, token: &SecretString, message: T) -> Result<Request<T>, Error> {
        let mut request = Request::new(message);
        let value = format!("Bearer {}", token.expose_secret()).parse::<MetadataValue<Ascii>>();
        let mut value = value
            .map_err(|_| Error::Failed("the scan's token cannot stand in a header".to_owned()))?;
        value.set_sensitive(true);
        request.metadata_mut().insert("authorization", value);
        Ok(request)
    }
}

impl From<tonic::Status> for Error {
    fn from(status: tonic::Status) -> Self {
        if is_transient(&status) {
            Self::Retryable { reason: format!("the gateway: {}", status.message()), not_before: None }
        } else {
            Self::Failed(format!("the gateway refuses: {}", status.message()))
        }
    }
}

/// One call, bounded in time.
///
/// # Errors
/// What the gateway says, or that it says nothing.
pub(crate) async fn call<T>(
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(answer) => answer.map(Response::into_inner),
        Err(_) => Err(Status::unavailable(format!(
            "the gateway has not answered within {} s",
            CALL_TIMEOUT.as_secs()
        ))),
    }
}

/// Whether the same call may succeed later, with nobody changing anything.
pub(crate) fn is_transient(status: &Status) -> bool {
    use std::error::Error as _;
    let passing = [
        Code::Unavailable,
        Code::Cancelled,
        Code::DeadlineExceeded,
        Code::ResourceExhausted,
        Code::Internal,
    ];
    status.source().is_some() || passing.contains(&status.code())
}
