//! The connection to the gateway.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use construct_proto::v1::{
    agent_service_client::AgentServiceClient, approval_service_client::ApprovalServiceClient,
    budget_service_client::BudgetServiceClient, event_service_client::EventServiceClient,
    key_service_client::KeyServiceClient, message_service_client::MessageServiceClient,
    model_provider_service_client::ModelProviderServiceClient, model_service_client::ModelServiceClient,
    model_token_service_client::ModelTokenServiceClient, organization_service_client::OrganizationServiceClient,
    recovery_service_client::RecoveryServiceClient, schedule_service_client::ScheduleServiceClient,
    secret_service_client::SecretServiceClient, task_service_client::TaskServiceClient,
};
use tonic::{
    Request, Status,
    codegen::http::uri::Authority,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint},
};
use uuid::Uuid;

use crate::{
    context::Target,
    failure::{Failure, may_pass},
};

/// The largest answer that is read, in bytes: a transcript's message may hold a large output.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// How long one call may take before it is given up; streams are not bounded by it.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(200);

/// Where the mesh's public API is. Cheap to clone; connects when first used, and again whenever needed.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    line: Line,
}

/// A connection that says who calls.
pub(crate) type Line = InterceptedService<Channel, Credentials>;

/// Who calls, put into every request. The key is marked as sensitive, so that nothing prints it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Credentials {
    authorization: Option<MetadataValue<Ascii>>,
    organization: Option<MetadataValue<Ascii>>,
}

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        if let Some(organization) = &self.organization {
            request.metadata_mut().insert("x-organization-id", organization.clone());
        }
        Ok(request)
    }
}

impl Gateway {
    /// # Errors
    /// When the address is none, or the key or the organisation cannot be sent.
    pub(crate) fn new(target: &Target) -> Result<Self, Failure> {
        let endpoint = Self::check(&target.address)?;
        let text = |what: &str, text: String| {
            text.parse::<MetadataValue<Ascii>>()
                .map_err(|_| Failure::usage(format!("the {what} has characters that cannot be")))
        };
        let mut authorization = target.key.as_ref().map(|key| text("API key", format!("Bearer {key}"))).transpose()?;
        if let Some(authorization) = &mut authorization {
            authorization.set_sensitive(true);
        }
        let organization = target.organization.clone().map(|id| text("organization", id)).transpose()?;
        if authorization.is_some() && !stays_here(&target.address) {
            eprintln!(
                "warning: the API key goes to {} in plain text; everybody on the way can read it",
                target.address
            );
        }
        let credentials = Credentials { authorization, organization };
        let endpoint = endpoint
            .connect_timeout(Duration::from_secs(3))
            .tcp_nodelay(true)
            // A gateway that vanished without closing the connection is noticed within these.
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(5))
            .keep_alive_while_idle(true);
        Ok(Self { line: InterceptedService::new(endpoint.connect_lazy(), credentials) })
    }

    /// Reads an address.
    ///
    /// # Errors
    /// When it is none.
    pub(crate) fn check(url: &str) -> Result<Endpoint, Failure> {
        let invalid = || {
            Failure::usage(format!("{url} is not an address like http://127.0.0.1:60080 or unix:/run/construct/socket"))
        };
        let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|_| invalid())?;
        // It would be spoken to in plain text.
        if endpoint.uri().scheme_str() == Some("https") {
            return Err(Failure::usage(format!(
                "{url}: TLS to the gateway is not built in; go through a tunnel or a proxy on this machine and give its http:// address"
            )));
        }
        if !url.starts_with("unix:") && !matches!(endpoint.uri().scheme_str(), Some("http")) {
            return Err(invalid());
        }
        Ok(endpoint)
    }

    pub(crate) fn organizations(&self) -> OrganizationServiceClient<Line> {
        OrganizationServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn keys(&self) -> KeyServiceClient<Line> {
        KeyServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn agents(&self) -> AgentServiceClient<Line> {
        AgentServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn approvals(&self) -> ApprovalServiceClient<Line> {
        ApprovalServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn budgets(&self) -> BudgetServiceClient<Line> {
        BudgetServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn recovery(&self) -> RecoveryServiceClient<Line> {
        RecoveryServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn tasks(&self) -> TaskServiceClient<Line> {
        TaskServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn messages(&self) -> MessageServiceClient<Line> {
        MessageServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn models(&self) -> ModelServiceClient<Line> {
        ModelServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn model_providers(&self) -> ModelProviderServiceClient<Line> {
        ModelProviderServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn model_tokens(&self) -> ModelTokenServiceClient<Line> {
        ModelTokenServiceClient::new(self.line.clone())
    }

    pub(crate) fn schedules(&self) -> ScheduleServiceClient<Line> {
        ScheduleServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn secrets(&self) -> SecretServiceClient<Line> {
        SecretServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn events(&self) -> EventServiceClient<Line> {
        EventServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }
}

/// Whether what is sent to an address that was checked stays on this machine.
fn stays_here(url: &str) -> bool {
    let Some(authority) = url.strip_prefix("http://") else { return url.starts_with("unix:") };
    let authority = authority.split('/').next().unwrap_or_default().parse::<Authority>();
    authority.is_ok_and(|authority| {
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    })
}

/// One call, bounded in time.
///
/// # Errors
/// What the gateway says, or that it says nothing.
pub(crate) async fn call<T>(call: impl Future<Output = Result<tonic::Response<T>, Status>>) -> Result<T, Failure> {
    Ok(bounded(call).await?)
}

/// A call that is repeated while the gateway is away, for at most `patience`. Writes are repeated too: their idempotency
/// key makes that one write.
///
/// # Errors
/// What the gateway says last.
pub(crate) async fn patiently<T, F>(patience: Duration, mut attempt: impl FnMut() -> F) -> Result<T, Failure>
where
    F: Future<Output = Result<tonic::Response<T>, Status>>,
{
    let began = Instant::now();
    loop {
        match bounded(attempt()).await {
            Err(status) if may_pass(&status) && began.elapsed() + PAUSE < patience => tokio::time::sleep(PAUSE).await,
            done => return Ok(done?),
        }
    }
}

async fn bounded<T>(call: impl Future<Output = Result<tonic::Response<T>, Status>>) -> Result<T, Status> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::unavailable(format!("no answer within {} s", CALL_TIMEOUT.as_secs()))),
    }
}

/// A key that makes a write one write, however often it is sent.
pub(crate) fn idempotency_key() -> String {
    Uuid::now_v7().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_with_tls_is_refused_because_it_would_be_spoken_to_without() {
        let refused = Gateway::check("https://construct.example.com").expect_err("it is refused");
        assert!(refused.to_string().contains("TLS"), "{refused}");
        for fine in ["http://127.0.0.1:60080", "http://construct.example.com", "unix:/run/construct/socket"] {
            assert!(Gateway::check(fine).is_ok(), "{fine}");
        }
        for wrong in ["ftp://127.0.0.1", "127.0.0.1:60080", "HTTPS://construct.example.com"] {
            assert!(Gateway::check(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_leaves_the_machine_is_known() {
        for (address, here) in [
            ("http://127.0.0.1:60080", true),
            ("http://[::1]:60080/", true),
            ("http://localhost", true),
            ("unix:/run/construct/socket", true),
            ("http://10.0.0.1:60080", false),
            ("http://localhost.example.com", false),
            ("http://127.0.0.1@example.com", false),
        ] {
            assert_eq!(stays_here(address), here, "{address}");
        }
    }
}
