//! The mesh's public API, of which this service is a client like any other.

use std::{path::Path, time::Duration};

use anyhow::Context as _;
use backon::{ConstantBuilder, Retryable as _};
use construct_domain::OrganizationId;
use construct_proto::v1::{
    self, agent_service_client::AgentServiceClient, approval_service_client::ApprovalServiceClient,
    event_service_client::EventServiceClient, key_service_client::KeyServiceClient,
    message_service_client::MessageServiceClient,
    organization_service_client::OrganizationServiceClient, task_service_client::TaskServiceClient,
};
use tonic::{
    Code, Request, Response, Status,
    metadata::{Ascii, MetadataValue},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use crate::config::{self, Config};

/// The largest answer that is read, in bytes.
const MAX_RESPONSE_BYTES: usize = 64 * 1024 * 1024;
/// How long a question waits for the gateway to have room for it, with nobody told why.
const MAX_QUOTA_WAIT: Duration = Duration::from_secs(300);
/// How long one call may take; streams are not bounded by it.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a question is asked again whose answer is needed now.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
/// The time between two of its tries.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// What a request is authorized by; never shown.
#[derive(Debug, Clone)]
pub(crate) struct Authorization(MetadataValue<Ascii>);

impl Authorization {
    /// A key's; none when it has characters that no header can have.
    pub(crate) fn bearer(key: &str) -> Option<Self> {
        let mut value = format!("Bearer {key}").parse::<MetadataValue<Ascii>>().ok()?;
        value.set_sensitive(true);
        Some(Self(value))
    }
}

/// In whose name the mesh is asked about a workspace: its organization's, with the key that the
/// workspace was connected with, or the service's own.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// Whose the workspace is.
    pub(crate) organization: OrganizationId,
    /// None: the service's own key.
    pub(crate) key: Option<Authorization>,
}

/// The connection. Cheap to clone; connects when first used, and again whenever needed.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    channel: Channel,
    /// The service's own.
    own_key: Option<Authorization>,
}

impl Gateway {
    /// # Errors
    /// When the address is none, the certificates cannot be used, or the key has characters that no
    /// header can have.
    pub(crate) fn new(config: &Config) -> anyhow::Result<Self> {
        let mut endpoint = Endpoint::from_shared(config.slack_gateway_url.clone())?;
        if endpoint.uri().scheme_str() == Some("https") {
            endpoint = endpoint
                .tls_config(tls_config(config)?)
                .context("the gateway's certificates cannot be used")?;
        }
        let key = config::secret(config.slack_gateway_key.as_ref());
        let endpoint = endpoint
            .connect_timeout(Duration::from_secs(3))
            .tcp_nodelay(true)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(5))
            .keep_alive_while_idle(true);
        let own = key.map(|key| {
            Authorization::bearer(key.expose())
                .context("slack_gateway_key cannot stand in a header")
        });
        Ok(Self { channel: endpoint.connect_lazy(), own_key: own.transpose()? })
    }

    pub(crate) fn agents(&self) -> AgentServiceClient<Channel> {
        AgentServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn approvals(&self) -> ApprovalServiceClient<Channel> {
        ApprovalServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn events(&self) -> EventServiceClient<Channel> {
        EventServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn keys(&self) -> KeyServiceClient<Channel> {
        KeyServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn messages(&self) -> MessageServiceClient<Channel> {
        MessageServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn organizations(&self) -> OrganizationServiceClient<Channel> {
        OrganizationServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn tasks(&self) -> TaskServiceClient<Channel> {
        TaskServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    /// A request about a workspace.
    pub(crate) fn request<T>(&self, caller: &Caller, message: T) -> Request<T> {
        self.request_by(caller, None, message)
    }

    /// A request of somebody who has said who they are, or about their workspace.
    pub(crate) fn request_by<T>(
        &self,
        caller: &Caller,
        by: Option<&Authorization>,
        message: T,
    ) -> Request<T> {
        let mut request = self.request_with_key(by.or(caller.key.as_ref()), message);
        let organization = caller.organization.to_string().parse().expect("an id is visible ASCII");
        request.metadata_mut().insert("x-organization-id", organization);
        request
    }

    /// Who a key is, and in which organization; none: the service's own.
    pub(crate) async fn who_am_i(
        &self,
        key: Option<&Authorization>,
    ) -> Result<v1::WhoAmIResponse, Status> {
        call(self.organizations().who_am_i(self.request_with_key(key, v1::WhoAmIRequest {}))).await
    }

    /// A request in the organization that the key opens.
    fn request_with_key<T>(&self, key: Option<&Authorization>, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(Authorization(value)) = key.or(self.own_key.as_ref()) {
            request.metadata_mut().insert("authorization", value.clone());
        }
        request
    }
}

/// Whom to trust, and what to show. Read once: who renews them restarts the service.
fn tls_config(config: &Config) -> anyhow::Result<ClientTlsConfig> {
    let read = |path: &Path| {
        std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()))
    };
    let mut tls = match &config.slack_gateway_ca {
        Some(path) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(path)?)),
        None => ClientTlsConfig::new().with_native_roots(),
    };
    if let (Some(certificate), Some(key)) =
        (&config.slack_gateway_certificate, &config.slack_gateway_certificate_key)
    {
        tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
    }
    Ok(tls)
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

/// Asks again and again while the gateway is in trouble, for half a minute at most: for questions
/// that change nothing, when what led to them cannot be done a second time.
///
/// # Errors
/// What the gateway says, or that it says nothing.
pub(crate) async fn retry_transient<T, F>(ask: impl FnMut() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<T, Status>>,
{
    let pauses = ConstantBuilder::default().with_delay(RETRY_DELAY).without_max_times();
    match tokio::time::timeout(RETRY_TIMEOUT, ask.retry(pauses).when(is_transient)).await {
        Ok(answer) => answer,
        Err(_) => Err(Status::unavailable(format!(
            "the gateway has not answered within {} s",
            RETRY_TIMEOUT.as_secs()
        ))),
    }
}

/// Whether the same call may succeed soon, with nobody changing anything.
pub(crate) fn is_transient(status: &Status) -> bool {
    use std::error::Error as _;

    use tonic_types::StatusExt as _;
    // A quota of a day or a month: whoever asked is better told now than tomorrow.
    let quota = status.get_details_quota_failure().and(status.get_details_retry_info());
    if quota.and_then(|info| info.retry_delay).is_some_and(|delay| delay > MAX_QUOTA_WAIT) {
        return false;
    }
    let passing = [
        Code::Unavailable,
        Code::Cancelled,
        Code::DeadlineExceeded,
        Code::ResourceExhausted,
        Code::Internal,
    ];
    status.source().is_some() || passing.contains(&status.code())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often it was asked, and what came of it, of a gateway that answers like this.
    async fn retry_against(answers: &[Result<u32, Status>]) -> (usize, Result<u32, Code>) {
        let mut asked = 0;
        let answer = retry_transient(|| {
            let answer = answers[asked.min(answers.len() - 1)].clone();
            asked += 1;
            async move { answer }
        });
        let answer = answer.await.map_err(|status| status.code());
        (asked, answer)
    }

    #[tokio::test(start_paused = true)]
    async fn a_gateway_in_trouble_is_asked_again_and_one_that_refuses_is_not() {
        let (away, refused) =
            (Err(Status::unavailable("restarts")), Err(Status::permission_denied("no")));
        assert_eq!(retry_against(&[away.clone(), away.clone(), Ok(7)]).await, (3, Ok(7)));
        assert_eq!(
            retry_against(&[away.clone(), refused.clone(), Ok(7)]).await,
            (2, Err(Code::PermissionDenied))
        );
        let (tries, ended) = retry_against(&[away]).await;
        assert_eq!(ended, Err(Code::Unavailable));
        assert!((59..=61).contains(&tries), "{tries}");
    }
}
