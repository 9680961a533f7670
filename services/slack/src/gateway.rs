//! A client of the mesh's public API.

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

/// Bytes of a response at most.
const MAX_RESPONSE_BYTES: usize = 64 * 1024 * 1024;
/// The longest quota delay that a question waits out without telling the user.
const MAX_QUOTA_WAIT: Duration = Duration::from_secs(300);
/// The timeout of one call; streams are not bounded by it.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// How long [`retry_transient`] retries.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
/// The delay between its attempts.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// The authorization of a request; never logged.
#[derive(Debug, Clone)]
pub(crate) struct Authorization(MetadataValue<Ascii>);

impl Authorization {
    /// The authorization with a key; none when the key has characters that are invalid in a header.
    pub(crate) fn bearer(key: &str) -> Option<Self> {
        let mut value = format!("Bearer {key}").parse::<MetadataValue<Ascii>>().ok()?;
        value.set_sensitive(true);
        Some(Self(value))
    }
}

/// The caller of requests about a workspace: its organization, with the key that the workspace was
/// connected with, or the service's own.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// The organization that owns the workspace.
    pub(crate) organization: OrganizationId,
    /// None: the service's own key.
    pub(crate) key: Option<Authorization>,
}

/// The connection. Cheap to clone; connects on first use, and reconnects as needed.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    channel: Channel,
    /// The service's own key.
    own_key: Option<Authorization>,
}

impl Gateway {
    /// # Errors
    /// When the address is invalid, the certificates cannot be used, or the key has characters that
    /// are invalid in a header.
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
                .context("slack_gateway_key has characters that are invalid in a header")
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

    /// Creates a request about a workspace.
    pub(crate) fn request<T>(&self, caller: &Caller, message: T) -> Request<T> {
        self.request_by(caller, None, message)
    }

    /// Creates a request with a user's own key `by`, or with the workspace's.
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

    /// Returns the user and the organization of a key; none: the service's own.
    pub(crate) async fn who_am_i(
        &self,
        key: Option<&Authorization>,
    ) -> Result<v1::WhoAmIResponse, Status> {
        call(self.organizations().who_am_i(self.request_with_key(key, v1::WhoAmIRequest {}))).await
    }

    /// Creates a request in the organization of the key.
    fn request_with_key<T>(&self, key: Option<&Authorization>, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(Authorization(value)) = key.or(self.own_key.as_ref()) {
            request.metadata_mut().insert("authorization", value.clone());
        }
        request
    }
}

/// The TLS configuration. The files are read once: after renewing them, restart the service.
fn tls_config(config: &Config) -> anyhow::Result<ClientTlsConfig> {
    let read = |path: &Path| {
        std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
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

/// Retries a read while the gateway fails transiently, for half a minute at most. For reads after a
/// step that cannot be repeated.
///
/// # Errors
/// The gateway's status, or that it did not respond.
pub(crate) async fn retry_transient<T, F>(ask: impl FnMut() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<T, Status>>,
{
    let delays = ConstantBuilder::default().with_delay(RETRY_DELAY).without_max_times();
    match tokio::time::timeout(RETRY_TIMEOUT, ask.retry(delays).when(is_transient)).await {
        Ok(answer) => answer,
        Err(_) => Err(Status::unavailable(format!(
            "the gateway did not respond within {} s",
            RETRY_TIMEOUT.as_secs()
        ))),
    }
}

/// Whether the same call may succeed soon without any change.
pub(crate) fn is_transient(status: &Status) -> bool {
    use std::error::Error as _;

    use tonic_types::StatusExt as _;
    // With a daily or monthly quota, tell the user now rather than tomorrow.
    let quota = status.get_details_quota_failure().and(status.get_details_retry_info());
    if quota.and_then(|info| info.retry_delay).is_some_and(|delay| delay > MAX_QUOTA_WAIT) {
        return false;
    }
    // It is as large the next time.
    if status.get_details_error_info().is_some_and(|info| info.reason == "REQUEST_TOO_LARGE") {
        return false;
    }
    let transient_codes = [
        Code::Unavailable,
        Code::Cancelled,
        Code::DeadlineExceeded,
        Code::ResourceExhausted,
        Code::Internal,
    ];
    status.source().is_some() || transient_codes.contains(&status.code())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of calls to a gateway that gives these responses, and the result.
    async fn retry_against(answers: &[Result<u32, Status>]) -> (usize, Result<u32, Code>) {
        let mut calls = 0;
        let answer = retry_transient(|| {
            let answer = answers[calls.min(answers.len() - 1)].clone();
            calls += 1;
            async move { answer }
        });
        let answer = answer.await.map_err(|status| status.code());
        (calls, answer)
    }

    #[tokio::test(start_paused = true)]
    async fn transient_gateway_errors_are_retried_and_refusals_are_not() {
        let (unavailable, refused) =
            (Err(Status::unavailable("restarts")), Err(Status::permission_denied("no")));
        assert_eq!(
            retry_against(&[unavailable.clone(), unavailable.clone(), Ok(7)]).await,
            (3, Ok(7))
        );
        assert_eq!(
            retry_against(&[unavailable.clone(), refused.clone(), Ok(7)]).await,
            (2, Err(Code::PermissionDenied))
        );
        let (tries, ended) = retry_against(&[unavailable]).await;
        assert_eq!(ended, Err(Code::Unavailable));
        assert!((59..=61).contains(&tries), "{tries}");
    }
}
