//! A small client of the public API.
//!
//! Waits poll the API until it reports the expected state. While a service is down, the API may
//! answer `UNAVAILABLE` or not at all; the request is then repeated.

use std::{path::Path, sync::Arc, time::Duration};

use construct_proto::v1::{
    self, agent_service_client::AgentServiceClient, approval_service_client::ApprovalServiceClient,
    budget_service_client::BudgetServiceClient, diagnosis_service_client::DiagnosisServiceClient,
    event_service_client::EventServiceClient, key_service_client::KeyServiceClient,
    message_service_client::MessageServiceClient,
    model_provider_service_client::ModelProviderServiceClient,
    model_service_client::ModelServiceClient, model_token_service_client::ModelTokenServiceClient,
    recovery_service_client::RecoveryServiceClient, scan_service_client::ScanServiceClient,
    schedule_service_client::ScheduleServiceClient, task_service_client::TaskServiceClient,
};
use tonic::{Code, Status, transport::Channel};
use uuid::Uuid;

use crate::{recorder::Recorder, transcript::Transcript, wait::until};

/// The time limit of a turn. It covers the worst case of a crash: a command of a dead worker is
/// redelivered after seconds, one that NATS lost is sent again within half a minute, and a turn has
/// several commands.
pub const TURN_TIMEOUT: Duration = Duration::from_secs(170);
/// Messages per page.
const PAGE_SIZE: i32 = 100;

/// A connection to the gateway that survives restarts of the gateway.
#[derive(Debug, Clone)]
pub struct Client {
    channel: Channel,
}

impl Client {
    /// A client that uses `channel`.
    pub fn new(channel: Channel) -> Self {
        Self { channel }
    }

    /// `AgentService`.
    pub fn agents(&self) -> AgentServiceClient<Channel> {
        AgentServiceClient::new(self.channel.clone())
    }

    /// `ApprovalService`.
    pub fn approvals(&self) -> ApprovalServiceClient<Channel> {
        ApprovalServiceClient::new(self.channel.clone())
    }

    /// `BudgetService`.
    pub fn budgets(&self) -> BudgetServiceClient<Channel> {
        BudgetServiceClient::new(self.channel.clone())
    }

    /// `DiagnosisService`.
    pub fn diagnosis(&self) -> DiagnosisServiceClient<Channel> {
        DiagnosisServiceClient::new(self.channel.clone())
    }

    /// `KeyService`.
    pub fn keys(&self) -> KeyServiceClient<Channel> {
        KeyServiceClient::new(self.channel.clone())
    }

    /// `RecoveryService`.
    pub fn recovery(&self) -> RecoveryServiceClient<Channel> {
        RecoveryServiceClient::new(self.channel.clone())
    }

    /// `ScanService`.
    pub fn scans(&self) -> ScanServiceClient<Channel> {
        ScanServiceClient::new(self.channel.clone())
    }

    /// `ScheduleService`.
    pub fn schedules(&self) -> ScheduleServiceClient<Channel> {
        ScheduleServiceClient::new(self.channel.clone())
    }

    /// `TaskService`.
    pub fn tasks(&self) -> TaskServiceClient<Channel> {
        TaskServiceClient::new(self.channel.clone())
    }

    /// `MessageService`.
    pub fn messages(&self) -> MessageServiceClient<Channel> {
        MessageServiceClient::new(self.channel.clone()).max_decoding_message_size(64 << 20)
    }

    /// `ModelService`.
    pub fn models(&self) -> ModelServiceClient<Channel> {
        ModelServiceClient::new(self.channel.clone())
    }

    /// `ModelProviderService`.
    pub fn providers(&self) -> ModelProviderServiceClient<Channel> {
        ModelProviderServiceClient::new(self.channel.clone())
    }

    /// `ModelTokenService`.
    pub fn tokens(&self) -> ModelTokenServiceClient<Channel> {
        ModelTokenServiceClient::new(self.channel.clone())
    }

    /// `EventService`.
    pub fn events(&self) -> EventServiceClient<Channel> {
        EventServiceClient::new(self.channel.clone()).max_decoding_message_size(64 << 20)
    }

    /// Creates a task for `agent`. Without a workspace it gets its own.
    ///
    /// # Errors
    /// The gateway's status.
    pub async fn create_task(
        &self,
        agent: &str,
        workspace: Option<&Path>,
    ) -> Result<Conversation, Status> {
        let workspace = workspace.map(|path| path.display().to_string()).unwrap_or_default();
        self.create_task_with(v1::TaskSpec {
            agent: agent.to_owned(),
            workspace,
            ..v1::TaskSpec::default()
        })
        .await
    }

    /// Creates a task from `spec`.
    ///
    /// # Errors
    /// The gateway's status.
    pub async fn create_task_with(&self, spec: v1::TaskSpec) -> Result<Conversation, Status> {
        let request =
            v1::CreateTaskRequest { spec: Some(spec), ..v1::CreateTaskRequest::default() };
        let task = self.tasks().create_task(request).await?.into_inner();
        Ok(self.conversation(&id(task.metadata.as_ref())))
    }

    /// A task that exists already.
    pub fn conversation(&self, task: &str) -> Conversation {
        Conversation { client: self.clone(), task: task.into() }
    }
}

/// One task as its user sees it.
#[derive(Debug, Clone)]
pub struct Conversation {
    client: Client,
    task: Arc<str>,
}

impl Conversation {
    /// The task's id.
    pub fn id(&self) -> &str {
        &self.task
    }

    /// The client that the task was created with.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Sends a message once.
    ///
    /// # Errors
    /// The gateway's status.
    pub async fn send(&self, text: &str) -> Result<v1::Message, Status> {
        self.send_as(text, "").await
    }

    /// Sends a message until the gateway confirms it. Every attempt has the same idempotency key,
    /// so that the message is accepted once.
    pub async fn submit(&self, text: &str) -> v1::Message {
        let key = Uuid::now_v7().to_string();
        retry_unavailable("the gateway to accept a message", async || {
            self.send_as(text, &key).await
        })
        .await
        .unwrap_or_else(|status| panic!("the message {text:?} is refused: {status}"))
    }

    async fn send_as(&self, text: &str, key: &str) -> Result<v1::Message, Status> {
        let spec = v1::MessageSpec {
            task: self.task.to_string(),
            blocks: text_blocks(text),
            ..v1::MessageSpec::default()
        };
        let request =
            v1::CreateMessageRequest { spec: Some(spec), idempotency_key: key.to_owned() };
        Ok(self.client.messages().create_message(request).await?.into_inner())
    }

    /// Sends a message and waits until the task is idle.
    pub async fn ask(&self, text: &str) -> v1::Task {
        self.submit(text).await;
        self.wait_until_idle().await
    }

    /// The current task.
    ///
    /// # Errors
    /// The gateway's status.
    pub async fn task(&self) -> Result<v1::Task, Status> {
        Ok(self
            .client
            .tasks()
            .get_task(v1::GetTaskRequest { task: self.task.to_string() })
            .await?
            .into_inner())
    }

    /// Waits until the task is idle: no turn and no queued message.
    pub async fn wait_until_idle(&self) -> v1::Task {
        self.wait_for_task("the task to settle", |task, status| {
            let _ = task;
            status.phase() == v1::TaskPhase::AwaitInput && status.queued_count == 0
        })
        .await
    }

    /// Waits until the task is in `phase`.
    pub async fn wait_for_phase(&self, phase: v1::TaskPhase) -> v1::Task {
        self.wait_for_task(phase.as_str_name(), |_, status| status.phase() == phase).await
    }

    /// Waits until `predicate` accepts the task.
    pub async fn wait_for_task(
        &self,
        what: &str,
        predicate: impl Fn(&v1::Task, &v1::TaskStatus) -> bool,
    ) -> v1::Task {
        let what = format!("{what} ({})", self.task);
        // Shortly before the timeout, ask for the reason as well.
        let late = std::time::Instant::now() + TURN_TIMEOUT.mul_f32(0.9);
        until(&what, TURN_TIMEOUT, async || match self.task().await {
            Ok(task) => {
                let status = task.status.clone().unwrap_or_default();
                let why = async || {
                    if std::time::Instant::now() > late { Some(self.explain().await) } else { None }
                };
                if predicate(&task, &status) {
                    Ok(task)
                } else {
                    Err(format!("{status:?}; why: {:?}", why().await))
                }
            }
            Err(status) => Err(format!("{status:?}")),
        })
        .await
    }

    /// Suspends the task; repeats the request until the gateway accepts it.
    pub async fn suspend(&self) {
        let request = v1::SuspendTaskRequest {
            task: self.task.to_string(),
            ..v1::SuspendTaskRequest::default()
        };
        self.intent("suspend", async || {
            self.client.tasks().suspend_task(request.clone()).await.map(drop)
        })
        .await;
    }

    /// Resumes the task.
    pub async fn resume(&self) {
        let request = v1::ResumeTaskRequest {
            task: self.task.to_string(),
            ..v1::ResumeTaskRequest::default()
        };
        self.intent("resume", async || {
            self.client.tasks().resume_task(request.clone()).await.map(drop)
        })
        .await;
    }

    /// Cancels the running turn.
    pub async fn cancel(&self, reason: &str) {
        let request = v1::CancelTaskRequest {
            task: self.task.to_string(),
            reason: reason.to_owned(),
            ..v1::CancelTaskRequest::default()
        };
        self.intent("cancel", async || {
            self.client.tasks().cancel_task(request.clone()).await.map(drop)
        })
        .await;
    }

    /// Deletes the task.
    pub async fn delete(&self) {
        let request = v1::DeleteTaskRequest {
            task: self.task.to_string(),
            ..v1::DeleteTaskRequest::default()
        };
        self.intent("delete", async || {
            self.client.tasks().delete_task(request.clone()).await.map(drop)
        })
        .await;
    }

    async fn intent(&self, what: &str, attempt: impl AsyncFn() -> Result<(), Status>) {
        retry_unavailable(what, attempt)
            .await
            .unwrap_or_else(|status| panic!("{what} is refused: {status}"));
    }

    /// Explains why the task does not continue.
    ///
    /// # Errors
    /// The gateway's status.
    pub async fn explain(&self) -> Result<v1::TaskExplanation, Status> {
        let request = v1::ExplainTaskRequest { task: self.task.to_string() };
        Ok(self.client.tasks().explain_task(request).await?.into_inner())
    }

    /// All messages in transcript order; queued ones last.
    pub async fn transcript(&self) -> Transcript {
        self.read_full_transcript(false).await
    }

    /// The same, including superseded messages.
    pub async fn full_transcript(&self) -> Transcript {
        self.read_full_transcript(true).await
    }

    async fn read_full_transcript(&self, include_superseded: bool) -> Transcript {
        let messages = until("the transcript to be readable", TURN_TIMEOUT, async || {
            self.read_transcript(include_superseded).await
        })
        .await;
        Transcript::new(messages)
    }

    async fn read_transcript(&self, include_superseded: bool) -> Result<Vec<v1::Message>, Status> {
        let mut messages = Vec::new();
        let mut page_token = String::new();
        loop {
            let page =
                v1::PageRequest { page_size: PAGE_SIZE, page_token, ..v1::PageRequest::default() };
            let filter =
                v1::list_messages_request::Filter { include_superseded, ..Default::default() };
            let request = v1::ListMessagesRequest {
                task: self.task.to_string(),
                page: Some(page),
                filter: Some(filter),
            };
            let response = self.client.messages().list_messages(request).await?.into_inner();
            messages.extend(response.messages);
            page_token = response.page.unwrap_or_default().next_page_token;
            if page_token.is_empty() {
                return Ok(messages);
            }
        }
    }

    /// Records all events of the task from its beginning. Reconnects when the connection is lost.
    pub fn record(&self) -> Recorder {
        Recorder::start(self.client.events(), self.subscription(), None)
    }

    /// The same, but closes the connection after every `every` events.
    pub fn record_interrupted(&self, every: usize) -> Recorder {
        Recorder::start(self.client.events(), self.subscription(), Some(every))
    }

    /// A subscription from the beginning.
    pub fn subscription(&self) -> v1::SubscribeRequest {
        v1::SubscribeRequest {
            task: self.task.to_string(),
            cursor: "0".to_owned(),
            types: Vec::new(),
        }
    }
}

/// The blocks of a text message.
pub fn text_blocks(text: &str) -> Vec<v1::Block> {
    vec![v1::Block { block: Some(v1::block::Block::Text(v1::Text { text: text.to_owned() })) }]
}

/// The id of an entity.
pub fn id(metadata: Option<&v1::Metadata>) -> String {
    metadata.map(|metadata| metadata.id.clone()).unwrap_or_default()
}

/// Whether a retry may help: the gateway or one of its dependencies is unavailable, or the
/// connection broke.
pub fn is_unavailable(status: &Status) -> bool {
    use std::error::Error as _;
    status.source().is_some()
        || matches!(status.code(), Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded)
}

/// Repeats a request while the gateway or one of its dependencies is unavailable.
///
/// # Errors
/// Any other status.
pub async fn retry_unavailable<T>(
    what: &str,
    mut ask: impl AsyncFnMut() -> Result<T, Status>,
) -> Result<T, Status> {
    until(what, TURN_TIMEOUT, async || match ask().await {
        Err(status) if is_unavailable(&status) => Err(status),
        answer => Ok(answer),
    })
    .await
}

/// Waits until `wanted` accepts the content of the file at `path`.
pub async fn wait_for_file(path: &Path, predicate: impl Fn(&str) -> bool) -> String {
    until(&format!("the content of {}", path.display()), TURN_TIMEOUT, async || {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        if predicate(&text) { Ok(text) } else { Err(text) }
    })
    .await
}
