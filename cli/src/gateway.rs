//! The connection to the gateway.

use std::time::{Duration, Instant};

use construct_proto::v1::{
    agent_service_client::AgentServiceClient, approval_service_client::ApprovalServiceClient,
    budget_service_client::BudgetServiceClient, event_service_client::EventServiceClient,
    message_service_client::MessageServiceClient, model_provider_service_client::ModelProviderServiceClient,
    model_service_client::ModelServiceClient, model_token_service_client::ModelTokenServiceClient,
    recovery_service_client::RecoveryServiceClient, schedule_service_client::ScheduleServiceClient,
    secret_service_client::SecretServiceClient, task_service_client::TaskServiceClient,
};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};
use uuid::Uuid;

use crate::failure::{Failure, may_pass};

/// The largest answer that is read, in bytes: a transcript's message may hold a large output.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// How long one call may take before it is given up; streams are not bounded by it.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(200);

/// Where the mesh's public API is. Cheap to clone; connects when first used, and again whenever needed.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    channel: Channel,
}

impl Gateway {
    /// # Errors
    /// When `url` is no address.
    pub(crate) fn new(url: &str) -> Result<Self, Failure> {
        let invalid = || Failure::usage(format!("--gateway {url} is not an address like http://127.0.0.1:60080"));
        let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|_| invalid())?;
        if !matches!(endpoint.uri().scheme_str(), Some("http" | "https")) {
            return Err(invalid());
        }
        let endpoint = endpoint
            .connect_timeout(Duration::from_secs(3))
            .tcp_nodelay(true)
            // A gateway that vanished without closing the connection is noticed within these.
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(5))
            .keep_alive_while_idle(true);
        Ok(Self { channel: endpoint.connect_lazy() })
    }

    pub(crate) fn agents(&self) -> AgentServiceClient<Channel> {
        AgentServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn approvals(&self) -> ApprovalServiceClient<Channel> {
        ApprovalServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn budgets(&self) -> BudgetServiceClient<Channel> {
        BudgetServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn recovery(&self) -> RecoveryServiceClient<Channel> {
        RecoveryServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn tasks(&self) -> TaskServiceClient<Channel> {
        TaskServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn messages(&self) -> MessageServiceClient<Channel> {
        MessageServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn models(&self) -> ModelServiceClient<Channel> {
        ModelServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn model_providers(&self) -> ModelProviderServiceClient<Channel> {
        ModelProviderServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn model_tokens(&self) -> ModelTokenServiceClient<Channel> {
        ModelTokenServiceClient::new(self.channel.clone())
    }

    pub(crate) fn schedules(&self) -> ScheduleServiceClient<Channel> {
        ScheduleServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn secrets(&self) -> SecretServiceClient<Channel> {
        SecretServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn events(&self) -> EventServiceClient<Channel> {
        EventServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }
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
