//! A client of the mesh's public API.

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

/// Bytes of a response at most.
const MAX_RESPONSE_BYTES: usize = 64 * 1024 * 1024;
/// The timeout of one call.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// The connection. Cheap to clone; connects on first use, and reconnects as needed.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    channel: Channel,
}

impl Gateway {
    /// # Errors
    /// When the address is invalid.
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
        MessageServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn tasks(&self) -> TaskServiceClient<Channel> {
        TaskServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    /// Creates a request with the token of a scan.
    pub(crate) fn request<T>(&self, token: &SecretString, message: T) -> Result<Request<T>, Error> {
        let mut request = Request::new(message);
        let value = format!("Bearer {}", token.expose_secret()).parse::<MetadataValue<Ascii>>();
        let mut value = value.map_err(|_| {
            Error::Failed("the scan's token has characters that are invalid in a header".to_owned())
        })?;
        value.set_sensitive(true);
        request.metadata_mut().insert("authorization", value);
        Ok(request)
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        if is_transient(&status) {
            Self::Retryable {
                reason: format!("the gateway: {}", status.message()),
                not_before: None,
            }
        } else {
            Self::Failed(format!("the gateway refused the request: {}", status.message()))
        }
    }
}

/// Performs one call with a timeout.
///
/// # Errors
/// The gateway's status, or that it did not respond.
pub(crate) async fn call<T>(
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(answer) => answer.map(Response::into_inner),
        Err(_) => Err(Status::unavailable(format!(
            "the gateway did not respond within {} s",
            CALL_TIMEOUT.as_secs()
        ))),
    }
}

/// Whether the same call may succeed later without any change.
pub(crate) fn is_transient(status: &Status) -> bool {
    use std::error::Error as _;
    let transient_codes = [
        Code::Unavailable,
        Code::Cancelled,
        Code::DeadlineExceeded,
        Code::ResourceExhausted,
        Code::Internal,
    ];
    status.source().is_some() || transient_codes.contains(&status.code())
}
