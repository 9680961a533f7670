//! A conversation without its presentation: requests to the gateway, and updates from it.

use std::time::Duration;

use construct_proto::v1::{
    Approval, ApprovalState, Block, CancelTaskRequest, CreateTaskRequest, DecideApprovalRequest,
    Event, ExplainTaskRequest, MessageSpec, ResumeTaskRequest, SubscribeRequest,
    SuspendTaskRequest, Task, TaskPhase, TaskSpec, UpdateTaskRequest,
    decide_approval_request::Decision, event::Payload,
};
use jiff::Timestamp;

use crate::{
    attach,
    event_follower::{EventFollower, StreamUpdate},
    exec, explain,
    failure::Failure,
    gateway::{Gateway, call, idempotency_key},
    totals::Totals,
};

/// How long a conversation tries to reconnect. The user sees it and can leave.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(3600);
/// How long to retry requests while the user waits.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// The error when the task was deleted.
pub(super) const DELETED: &str = "the task was deleted";

/// The state of the conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Idle,
    Running,
    /// A script waits for an approval.
    AwaitingApproval,
    Suspended,
}

impl Mode {
    fn for_phase(phase: TaskPhase) -> Self {
        match phase {
            TaskPhase::InvokeModel | TaskPhase::ExecuteTools | TaskPhase::AwaitSubtasks => {
                Self::Running
            }
            TaskPhase::AwaitApproval => Self::AwaitingApproval,
            TaskPhase::Suspended => Self::Suspended,
            TaskPhase::AwaitInput | TaskPhase::Unspecified => Self::Idle,
        }
    }
}

/// One conversation. The first message creates its task, so that opening a conversation leaves no
/// empty task behind.
#[derive(Debug)]
pub(super) struct Chat {
    gateway: Gateway,
    agents: Vec<String>,
    /// The agent that answers the next message.
    agent: String,
    workspace: String,
    /// The attachments of the first message.
    attached: Vec<Block>,
    task: Option<Task>,
    follower: Option<EventFollower>,
    mode: Mode,
    /// The sequence number of the last event of the history; 0 once it was received.
    history: u64,
    /// Pending approvals, oldest first.
    approvals: Vec<Approval>,
    /// A message whose sending failed, perhaps after it was received, and its idempotency key. Sent
    /// again, it is the same message.
    unsent: Option<(MessageSpec, String)>,
}

impl Chat {
    pub(super) fn new(
        gateway: Gateway,
        agents: Vec<String>,
        agent: String,
        workspace: String,
    ) -> Self {
        Self {
            gateway,
            agents,
            agent,
            workspace,
            attached: Vec::new(),
            task: None,
            follower: None,
            mode: Mode::Idle,
            history: 0,
            approvals: Vec::new(),
            unsent: None,
        }
    }

    /// Sets the attachments of the first message.
    pub(super) fn with_attachments(self, attached: Vec<Block>) -> Self {
        Self { attached, ..self }
    }

    /// Opens the conversation of an existing task.
    ///
    /// # Errors
    /// When the gateway refuses or is away.
    pub(super) async fn open(
        gateway: Gateway,
        agents: Vec<String>,
        task: Task,
    ) -> Result<Self, Failure> {
        let agent = task.spec.as_ref().map(|spec| spec.agent.clone()).unwrap_or_default();
        let mut chat = Self::new(gateway, agents, agent, String::new());
        chat.mode =
            task.status.as_ref().map_or(Mode::Idle, |status| Mode::for_phase(status.phase()));
        chat.history = task.status.as_ref().map_or(0, |status| status.event_sequence);
        chat.subscribe(task).await?;
        Ok(chat)
    }

    pub(super) fn agent(&self) -> &str {
        &self.agent
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    /// The task's id; empty before the first message.
    pub(super) fn task(&self) -> &str {
        self.task
            .as_ref()
            .and_then(|task| task.metadata.as_ref())
            .map_or("", |metadata| &metadata.id)
    }

    /// Whether the history is still being received.
    pub(super) fn is_catching_up(&self) -> bool {
        self.history > 0
    }

    /// The next update. Pends while there is no task.
    ///
    /// # Errors
    /// When the gateway refuses or stays away.
    pub(super) async fn next_update(&mut self) -> Result<StreamUpdate, Failure> {
        let Some(follower) = &mut self.follower else { return std::future::pending().await };
        let update = follower.next().await?;
        if let StreamUpdate::Event(event) = &update {
            self.apply(event);
        }
        Ok(update)
    }

    /// Sends a message. Returns its id.
    ///
    /// # Errors
    /// When the gateway refuses or is away. It may have received the message; sending the same text
    /// next is then the same message.
    pub(super) async fn send(&mut self, text: String) -> Result<String, Failure> {
        if self.task.is_none() {
            let spec = TaskSpec {
                agent: self.agent.clone(),
                workspace: self.workspace.clone(),
                ..TaskSpec::default()
            };
            let request =
                CreateTaskRequest { spec: Some(spec), idempotency_key: idempotency_key() };
            let task = call(self.gateway.tasks().create_task(request)).await?;
            self.subscribe(task).await?;
        }
        let task = self.task().to_owned();
        if self
            .task
            .as_ref()
            .and_then(|task| task.spec.as_ref())
            .is_some_and(|spec| spec.agent != self.agent)
        {
            let request = UpdateTaskRequest {
                task: task.clone(),
                agent: Some(self.agent.clone()),
                idempotency_key: idempotency_key(),
                ..UpdateTaskRequest::default()
            };
            self.task = Some(call(self.gateway.tasks().update_task(request)).await?);
        }
        let spec = exec::message(&task, attach::message(text, &self.attached));
        let key = match self.unsent.take() {
            Some((unsent, key)) if unsent == spec => key,
            _ => idempotency_key(),
        };
        let (_, key) = self.unsent.insert((spec.clone(), key));
        let message = exec::send(&self.gateway, spec, key.clone(), SEND_TIMEOUT).await?;
        self.unsent = None;
        self.attached.clear();
        match self.mode {
            Mode::Suspended => self.resume().await?,
            Mode::AwaitingApproval => {}
            Mode::Idle | Mode::Running => self.mode = Mode::Running,
        }
        Ok(message)
    }

    /// Selects the next agent for the next message.
    pub(super) fn next_agent(&mut self) {
        let at = self.agents.iter().position(|agent| *agent == self.agent);
        let next = at.map_or(0, |at| (at + 1) % self.agents.len());
        if let Some(agent) = self.agents.get(next) {
            self.agent.clone_from(agent);
        }
    }

    /// Selects the agent for the next message. Returns false for an unknown name.
    pub(super) fn set_agent(&mut self, name: &str) -> bool {
        let exists = self.agents.iter().any(|agent| agent == name);
        if exists {
            name.clone_into(&mut self.agent);
        }
        exists
    }

    /// # Errors
    /// When the gateway refuses or is away.
    pub(super) async fn suspend(&mut self) -> Result<(), Failure> {
        let request =
            SuspendTaskRequest { task: self.task().to_owned(), idempotency_key: idempotency_key() };
        call(self.gateway.tasks().suspend_task(request)).await?;
        Ok(())
    }

    /// Resumes a suspended task.
    ///
    /// # Errors
    /// When the gateway refuses or is away.
    pub(super) async fn resume(&mut self) -> Result<(), Failure> {
        let request =
            ResumeTaskRequest { task: self.task().to_owned(), idempotency_key: idempotency_key() };
        call(self.gateway.tasks().resume_task(request)).await?;
        Ok(())
    }

    /// The oldest pending approval.
    pub(super) fn pending_approval(&self) -> Option<&Approval> {
        self.approvals.first()
    }

    /// Decides the oldest pending approval.
    ///
    /// # Errors
    /// When no approval is pending, or the gateway refuses or is away.
    pub(super) async fn decide(
        &mut self,
        decision: Decision,
        comment: String,
    ) -> Result<(), Failure> {
        let Some(approval) = self.pending_approval() else {
            return Err(Failure::failed("no approval is pending"));
        };
        let request = DecideApprovalRequest {
            approval: approval
                .metadata
                .as_ref()
                .map(|metadata| metadata.id.clone())
                .unwrap_or_default(),
            decision: decision.into(),
            comment,
            // The decision is about the shown arguments only.
            arguments_hash: approval
                .spec
                .as_ref()
                .map(|spec| spec.arguments_hash.clone())
                .unwrap_or_default(),
            idempotency_key: idempotency_key(),
        };
        call(self.gateway.approvals().decide_approval(request)).await?;
        Ok(())
    }

    /// Cancels the running turn.
    ///
    /// # Errors
    /// When the gateway refuses or is away.
    pub(super) async fn cancel(&mut self) -> Result<(), Failure> {
        let request = CancelTaskRequest {
            task: self.task().to_owned(),
            reason: "canceled in the conversation".to_owned(),
            idempotency_key: idempotency_key(),
        };
        call(self.gateway.tasks().cancel_task(request)).await?;
        Ok(())
    }

    /// Explains what the task waits for.
    ///
    /// # Errors
    /// When the gateway refuses or is away.
    pub(super) async fn explain(&self) -> Result<String, Failure> {
        if self.task().is_empty() {
            return Ok("The first message creates the task.".to_owned());
        }
        let request = ExplainTaskRequest { task: self.task().to_owned() };
        let explanation = call(self.gateway.tasks().explain_task(request)).await?;
        Ok(explain::describe(&explanation, Timestamp::now()))
    }

    /// Subscribes from the beginning: the events of an existing task are its history.
    async fn subscribe(&mut self, task: Task) -> Result<(), Failure> {
        let id = task.metadata.as_ref().map(|metadata| metadata.id.clone()).unwrap_or_default();
        let request = SubscribeRequest { task: id, cursor: "0".to_owned(), types: Vec::new() };
        let gateway = self.gateway.clone();
        let follower =
            EventFollower::open(gateway, request, SEND_TIMEOUT, RECONNECT_TIMEOUT).await?;
        self.follower = Some(follower);
        self.task = Some(task);
        Ok(())
    }

    fn apply(&mut self, event: &Event) {
        if event.sequence >= self.history {
            self.history = 0;
        }
        match &event.payload {
            // Also from the history: an approval that was not decided is still pending.
            Some(Payload::Approval(approval)) => {
                let id = |approval: &Approval| {
                    approval.metadata.as_ref().map(|metadata| metadata.id.clone())
                };
                self.approvals.retain(|pending| id(pending) != id(approval));
                if approval
                    .status
                    .as_ref()
                    .is_some_and(|status| status.state() == ApprovalState::Pending)
                {
                    self.approvals.push(approval.clone());
                }
            }
            // While the history is received, the mode is that of the task's status.
            Some(Payload::PhaseChanged(changed)) if !self.is_catching_up() => {
                self.mode = Mode::for_phase(changed.phase())
            }
            Some(Payload::Task(task)) if !self.is_catching_up() => {
                let before = self
                    .task
                    .as_ref()
                    .and_then(|task| task.spec.as_ref())
                    .map(|spec| spec.agent.clone());
                // Another client may have switched the agent. A choice made here but not used yet
                // stays.
                if let Some(spec) =
                    task.spec.as_ref().filter(|_| before.as_deref() == Some(self.agent.as_str()))
                {
                    self.agent.clone_from(&spec.agent);
                }
                self.task = Some(Task::clone(task));
            }
            _ => {}
        }
    }
}

/// The totals of the whole conversation as text; empty without messages.
pub(super) fn describe_totals(totals: &Totals) -> String {
    if *totals == Totals::default() {
        String::new()
    } else {
        format!("total: {}", crate::render::usage(&totals.usage))
    }
}
