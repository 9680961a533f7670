//! A conversation without its looks: what is said to the gateway, and what comes back.

use std::time::Duration;

use construct_proto::v1::{
    Approval, ApprovalState, Block, CancelTaskRequest, CreateTaskRequest, DecideApprovalRequest,
    Event, ExplainTaskRequest, MessageSpec, ResumeTaskRequest, SubscribeRequest,
    SuspendTaskRequest, Task, TaskPhase, TaskSpec, UpdateTaskRequest,
    decide_approval_request::Decision, event::Payload,
};
use jiff::Timestamp;

use crate::{
    attach, exec,
    failure::Failure,
    follow::{Follow, News},
    gateway::{Gateway, call, idempotency_key},
    tally::Tally,
    why,
};

/// How long a conversation waits for a gateway that went away. A person sees it and can leave.
const PATIENCE: Duration = Duration::from_secs(3600);
/// How long a message is tried to be sent while the person waits.
const SEND: Duration = Duration::from_secs(5);

/// What is said when there is nothing left to talk to.
pub(super) const DELETED: &str = "the task was deleted";

/// What the task does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Idle,
    Running,
    /// A script waits for a person's approval.
    Asking,
    Suspended,
}

impl Mode {
    fn of(phase: TaskPhase) -> Self {
        match phase {
            TaskPhase::InvokeModel | TaskPhase::ExecuteTools | TaskPhase::AwaitSubtasks => {
                Self::Running
            }
            TaskPhase::AwaitApproval => Self::Asking,
            TaskPhase::Suspended => Self::Suspended,
            TaskPhase::AwaitInput | TaskPhase::Unspecified => Self::Idle,
        }
    }
}

/// One conversation. Its task is made with the first message, so that nobody who only looks leaves
/// one behind.
#[derive(Debug)]
pub(super) struct Talk {
    gateway: Gateway,
    agents: Vec<String>,
    /// Who answers the next message.
    agent: String,
    workspace: String,
    /// Shown with the first message.
    attached: Vec<Block>,
    task: Option<Task>,
    follow: Option<Follow>,
    mode: Mode,
    /// The sequence up to which events are history.
    history: u64,
    /// Approvals that were asked for and not decided, oldest first.
    asked: Vec<Approval>,
    /// What could not be said, or was said without our knowing, and its idempotency key: said again
    /// it is the same message.
    unsaid: Option<(MessageSpec, String)>,
}

impl Talk {
    pub(super) fn new(
        gateway: Gateway,
        agents: Vec<String>,
        agent: String,
        workspace: String,
    ) -> Self {
        let (task, follow, mode, history) = (None, None, Mode::Idle, 0);
        let (attached, asked) = (Vec::new(), Vec::new());
        Self {
            gateway,
            agents,
            agent,
            workspace,
            attached,
            task,
            follow,
            mode,
            history,
            asked,
            unsaid: None,
        }
    }

    /// The same, with something that is shown with the first message.
    pub(super) fn showing(self, attached: Vec<Block>) -> Self {
        Self { attached, ..self }
    }

    /// # Errors
    /// When the gateway refuses or is away.
    pub(super) async fn resume(
        gateway: Gateway,
        agents: Vec<String>,
        task: Task,
    ) -> Result<Self, Failure> {
        let agent = task.spec.as_ref().map(|spec| spec.agent.clone()).unwrap_or_default();
        let mut talk = Self::new(gateway, agents, agent, String::new());
        talk.mode = task.status.as_ref().map_or(Mode::Idle, |status| Mode::of(status.phase()));
        talk.history = task.status.as_ref().map_or(0, |status| status.event_sequence);
        talk.listen(task).await?;
        Ok(talk)
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

    /// Whether the history still comes in.
    pub(super) fn is_catching_up(&self) -> bool {
        self.history > 0
    }

    /// The next news; none ever while there is no task.
    ///
    /// # Errors
    /// When the gateway refuses or stays away.
    pub(super) async fn news(&mut self) -> Result<News, Failure> {
        let Some(follow) = &mut self.follow else { return std::future::pending().await };
        let news = follow.next().await?;
        if let News::Event(event) = &news {
            self.note(event);
        }
        Ok(news)
    }

    /// Says something. Returns the message's id.
    ///
    /// # Errors
    /// When the gateway refuses or is away. It may have heard all the same; the same words said
    /// next are then the same message.
    pub(super) async fn say(&mut self, text: String) -> Result<String, Failure> {
        if self.task.is_none() {
            let spec = TaskSpec {
                agent: self.agent.clone(),
                workspace: self.workspace.clone(),
                ..TaskSpec::default()
            };
            let request =
                CreateTaskRequest { spec: Some(spec), idempotency_key: idempotency_key() };
            let task = call(self.gateway.tasks().create_task(request)).await?;
            self.listen(task).await?;
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
        let key = match self.unsaid.take() {
            Some((unsaid, key)) if unsaid == spec => key,
            _ => idempotency_key(),
        };
        let (_, key) = self.unsaid.insert((spec.clone(), key));
        let message = exec::send(&self.gateway, spec, key.clone(), SEND).await?;
        self.unsaid = None;
        self.attached.clear();
        match self.mode {
            Mode::Suspended => self.go_on().await?,
            Mode::Asking => {}
            Mode::Idle | Mode::Running => self.mode = Mode::Running,
        }
        Ok(message)
    }

    /// The next agent answers from the next message on.
    pub(super) fn next_agent(&mut self) {
        let at = self.agents.iter().position(|agent| *agent == self.agent);
        let next = at.map_or(0, |at| (at + 1) % self.agents.len());
        if let Some(agent) = self.agents.get(next) {
            self.agent.clone_from(agent);
        }
    }

    /// This agent answers from the next message on. False when there is none of that name.
    pub(super) fn set_agent(&mut self, name: &str) -> bool {
        let known = self.agents.iter().any(|agent| agent == name);
        if known {
            name.clone_into(&mut self.agent);
        }
        known
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
    pub(super) async fn go_on(&mut self) -> Result<(), Failure> {
        let request =
            ResumeTaskRequest { task: self.task().to_owned(), idempotency_key: idempotency_key() };
        call(self.gateway.tasks().resume_task(request)).await?;
        Ok(())
    }

    /// The call that waits longest for a decision.
    pub(super) fn asked(&self) -> Option<&Approval> {
        self.asked.first()
    }

    /// Decides about the call that waits longest.
    ///
    /// # Errors
    /// When nothing is asked, or the gateway refuses or is away.
    pub(super) async fn decide(
        &mut self,
        decision: Decision,
        words: String,
    ) -> Result<(), Failure> {
        let Some(asked) = self.asked() else {
            return Err(Failure::failed("nothing waits for an approval"));
        };
        let request = DecideApprovalRequest {
            approval: asked
                .metadata
                .as_ref()
                .map(|metadata| metadata.id.clone())
                .unwrap_or_default(),
            decision: decision.into(),
            words,
            // What was shown is what is decided about.
            arguments_hash: asked
                .spec
                .as_ref()
                .map(|spec| spec.arguments_hash.clone())
                .unwrap_or_default(),
            idempotency_key: idempotency_key(),
        };
        call(self.gateway.approvals().decide_approval(request)).await?;
        Ok(())
    }

    /// Ends the running turn.
    ///
    /// # Errors
    /// When the gateway refuses or is away.
    pub(super) async fn cancel(&mut self) -> Result<(), Failure> {
        let request = CancelTaskRequest {
            task: self.task().to_owned(),
            reason: "cancelled in the conversation".to_owned(),
            idempotency_key: idempotency_key(),
        };
        call(self.gateway.tasks().cancel_task(request)).await?;
        Ok(())
    }

    /// What the task waits for.
    ///
    /// # Errors
    /// When the gateway refuses or is away.
    pub(super) async fn why(&self) -> Result<String, Failure> {
        if self.task().is_empty() {
            return Ok("The task begins with your first message.".to_owned());
        }
        let request = ExplainTaskRequest { task: self.task().to_owned() };
        let explanation = call(self.gateway.tasks().explain_task(request)).await?;
        Ok(why::words(&explanation, Timestamp::now()))
    }

    /// From the beginning: of a new task that is now, and of an old one it is the history.
    async fn listen(&mut self, task: Task) -> Result<(), Failure> {
        let id = task.metadata.as_ref().map(|metadata| metadata.id.clone()).unwrap_or_default();
        let request = SubscribeRequest { task: id, cursor: "0".to_owned(), types: Vec::new() };
        self.follow = Some(Follow::open(self.gateway.clone(), request, SEND, PATIENCE).await?);
        self.task = Some(task);
        Ok(())
    }

    fn note(&mut self, event: &Event) {
        if event.sequence >= self.history {
            self.history = 0;
        }
        match &event.payload {
            // Of the history too: what was asked and never decided still waits.
            Some(Payload::Approval(approval)) => {
                let id = |approval: &Approval| {
                    approval.metadata.as_ref().map(|metadata| metadata.id.clone())
                };
                self.asked.retain(|asked| id(asked) != id(approval));
                if approval
                    .status
                    .as_ref()
                    .is_some_and(|status| status.state() == ApprovalState::Pending)
                {
                    self.asked.push(approval.clone());
                }
            }
            // While the history comes in, the mode is what the task said of itself.
            Some(Payload::PhaseChanged(changed)) if !self.is_catching_up() => {
                self.mode = Mode::of(changed.phase())
            }
            Some(Payload::Task(task)) if !self.is_catching_up() => {
                let before = self
                    .task
                    .as_ref()
                    .and_then(|task| task.spec.as_ref())
                    .map(|spec| spec.agent.clone());
                // Somebody else may have switched the agent; a choice made here but not used yet
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

/// What a whole conversation came to, in words; empty when nothing was said.
pub(super) fn total(tally: &Tally) -> String {
    if *tally == Tally::default() {
        String::new()
    } else {
        format!("in all {}", crate::render::usage(&tally.usage))
    }
}
