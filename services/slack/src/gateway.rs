//! The mesh's public API, of which this service is a client like any other.

use std::time::Duration;

use construct_domain::OrganizationId;
use construct_proto::v1::{
    agent_service_client::AgentServiceClient, approval_service_client::ApprovalServiceClient,
    event_service_client::EventServiceClient, message_service_client::MessageServiceClient,
    task_service_client::TaskServiceClient,
};
use construct_runtime::config::Secret;
use tonic::{
    Code, Request, Response, Status,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};

/// The largest answer that is read, in bytes.
const MAX_ANSWER: usize = 64 * 1024 * 1024;
/// How long one call may take; streams are not bounded by it.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// The connection. Cheap to clone; connects when first used, and again whenever needed.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    channel: Channel,
    /// `Bearer …`; never shown.
    authorization: Option<MetadataValue<Ascii>>,
}

impl Gateway {
    /// # Errors
    /// When the address is none, or the key has characters that no header can have.
    pub(crate) fn new(url: &str, key: Option<&Secret>) -> anyhow::Result<Self> {
        let endpoint = Endpoint::from_shared(url.to_owned())?
            .connect_timeout(Duration::from_secs(3))
            .tcp_nodelay(true)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(5))
            .keep_alive_while_idle(true);
        let authorization = match key {
            Some(key) => {
                let value = format!("Bearer {}", key.expose()).parse::<MetadataValue<Ascii>>();
                let mut value = value.map_err(|_| anyhow::anyhow!("slack_gateway_key cannot stand in a header"))?;
                value.set_sensitive(true);
                Some(value)
            }
            None => None,
        };
        Ok(Self { channel: endpoint.connect_lazy(), authorization })
    }

    pub(crate) fn agents(&self) -> AgentServiceClient<Channel> {
        AgentServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn approvals(&self) -> ApprovalServiceClient<Channel> {
        ApprovalServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn events(&self) -> EventServiceClient<Channel> {
        EventServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn messages(&self) -> MessageServiceClient<Channel> {
        MessageServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn tasks(&self) -> TaskServiceClient<Channel> {
        TaskServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    /// A request on behalf of an organisation.
    pub(crate) fn request<T>(&self, organization: OrganizationId, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        if let Some(authorization) = &self.authorization {
            metadata.insert("authorization", authorization.clone());
        }
        let organization = organization.to_string().parse().expect("an id is visible ASCII");
        metadata.insert("x-organization-id", organization);
        request
    }
}

/// One call, bounded in time.
///
/// # Errors
/// What the gateway says, or that it says nothing.
pub(crate) async fn call<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Status> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(answer) => answer.map(Response::into_inner),
        Err(_) => Err(Status::unavailable(format!("the gateway has not answered within {} s", CALL_TIMEOUT.as_secs()))),
    }
}

/// Whether the same call may succeed later, with nobody changing anything.
pub(crate) fn is_transient(status: &Status) -> bool {
    use std::error::Error as _;
    let passing = [Code::Unavailable, Code::Cancelled, Code::DeadlineExceeded, Code::ResourceExhausted, Code::Internal];
    status.source().is_some() || passing.contains(&status.code())
}
