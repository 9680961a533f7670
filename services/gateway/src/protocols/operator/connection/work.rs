//! The execution of one request.

use std::sync::Arc;

use construct_proto::v1::{self, event::Payload};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{Disconnected, LineSender, REQUEST_RETRY_SECONDS, SessionHold};
use crate::{
    protocols::operator::{
        Options, SESSION_TIMEOUT,
        answer::{Failure, Form, Outcome, set_id, stop_reason},
        calls::{Calls, Watch},
        events::{
            EventFormatter, MessageFollower, TurnEnd, TurnSkipper, dropped_message, requested_turn,
            turn_completed, turn_started,
        },
        request::{Action, Project, Prompt, text_block},
        session::{Session, Turn, summary},
        tools,
    },
    status,
};

/// Memory reserved for a session before any of it is read, in bytes.
const SMALL_SESSION: usize = 64 * 1024;

pub(super) struct Work {
    pub(super) calls: Calls,
    pub(super) options: Arc<Options>,
    pub(super) out: LineSender,
    pub(super) session_slot: Arc<Semaphore>,
    pub(super) stopping: CancellationToken,
    pub(super) id: Option<String>,
    /// The idempotency key of the request.
    pub(super) key: Option<String>,
}

/// Why a request ends early.
enum Stop {
    Disconnected,
    /// With the request's session, if known.
    Failed(Failure, Option<String>),
}

impl From<Disconnected> for Stop {
    fn from(_: Disconnected) -> Self {
        Self::Disconnected
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure, None)
    }
}

impl From<Status> for Stop {
    fn from(status: Status) -> Self {
        Self::Failed(status.into(), None)
    }
}

/// A message to send.
struct Message {
    session: Option<String>,
    agent: Option<String>,
    tools: Option<Vec<String>>,
    workspace: String,
    blocks: Vec<v1::Block>,
}

/// An accepted message.
struct AcceptedMessage {
    session: String,
    agent: String,
    follow: MessageFollower,
    watch: Watch,
}

/// The turns of a session so far.
#[derive(Default)]
struct SessionTurns {
    /// The session's last record when it was read.
    until_sequence: u64,
    /// Each with its usage.
    turns: Vec<(String, (i64, i64))>,
    is_cut: bool,
}

impl SessionTurns {
    fn usage(&self, turn: &str) -> (i64, i64) {
        self.turns.iter().find(|(id, _)| id == turn).map(|(_, usage)| *usage).unwrap_or_default()
    }

    /// Skips the first `turns` turns. `None` when there is nothing to skip, or when a cut session
    /// makes counting impossible.
    fn skipper(&self, turns: usize) -> Option<TurnSkipper> {
        if turns == 0 || self.is_cut {
            return None;
        }
        let last = self.turns.get(turns - 1).map(|(id, _)| id.clone());
        Some(TurnSkipper::new(last.unwrap_or_default(), self.until_sequence))
    }
}

impl Work {
    pub(super) async fn run(self, action: Action) {
        let form = action.form();
        let is_stream = form == Form::Events || matches!(action, Action::Stream { .. });
        let done = tokio::select! {
            biased;
            done = self.execute(action, form) => done,
            () = self.stopping.cancelled() => Err(status::unavailable("the gateway is stopping: connect again").into()),
        };
        if let Err(Stop::Failed(failure, session)) = done {
            let line = failure.line(form, self.id.as_deref(), session.as_deref());
            // It follows the lines that the request has sent, and ends the request. A disconnected
            // client needs no answer.
            _ = if is_stream {
                self.out.event(line, None).await
            } else {
                self.out.answer(line, None).await
            };
        }
    }

    async fn execute(&self, action: Action, form: Form) -> Result<(), Stop> {
        match action {
            Action::SendContextRequest { context, agent } => {
                let project =
                    context.project.unwrap_or(Project { name: String::new(), path: String::new() });
                let mut blocks = Vec::new();
                if !project.name.is_empty() {
                    blocks.push(text_block(format!("Project: {}", project.name)));
                }
                blocks.push(text_block(context.message));
                let workspace = project.path;
                let message =
                    Message { session: None, agent, tools: context.tools, workspace, blocks };
                let accepted = self.send(message).await?;
                self.wait_for_turn(accepted).await
            }
            Action::Query(prompt) | Action::Dispatch(prompt) if form == Form::Events => {
                let metadata = prompt.metadata.clone();
                let accepted = self.send(message(prompt)?).await?;
                self.stream_turn(accepted, metadata).await
            }
            Action::Query(prompt) => {
                let accepted = self.send(message(prompt)?).await?;
                self.wait_for_turn(accepted).await
            }
            Action::Dispatch(prompt) => {
                let accepted = self.send(message(prompt)?).await?;
                let (session, agent) = (&accepted.session, &accepted.agent);
                let outcome = Outcome { session, agent, stop: "dispatched", ..Outcome::default() };
                self.answer(outcome.line(None)).await
            }
            Action::Stream { session, cursor, turns, form } => {
                let cursor = cursor.filter(|cursor| !cursor.is_empty());
                match form {
                    Form::Results => self.stream(session, cursor, turns).await,
                    Form::Events => self.stream_events(session, cursor, turns).await,
                }
            }
            Action::Cancel { session, .. } => {
                let session = session
                    .ok_or_else(|| Failure::invalid("`sessionID` or `requestID` is required"))?;
                let request = v1::CancelTaskRequest {
                    task: session.clone(),
                    reason: "The operator's client cancelled it.".to_owned(),
                    ..v1::CancelTaskRequest::default()
                };
                let _: v1::Task = self.calls.unary("TaskService/CancelTask", &request).await?;
                self.answer(json!({"type": "cancelled", "sessionID": session})).await
            }
            Action::ListSessions { agent, page_size, page_token } => {
                let page = v1::PageRequest { page_size, page_token, ..v1::PageRequest::default() };
                let filter = v1::list_tasks_request::Filter {
                    agent,
                    ..v1::list_tasks_request::Filter::default()
                };
                let request = v1::ListTasksRequest { page: Some(page), filter: Some(filter) };
                let listed: v1::ListTasksResponse =
                    self.calls.unary("TaskService/ListTasks", &request).await?;
                let sessions: Vec<_> = listed.tasks.iter().map(summary).collect();
                let next = listed.page.unwrap_or_default().next_page_token;
                self.answer(
                    json!({"type": "sessions", "sessions": sessions, "nextPageToken": next}),
                )
                .await
            }
            Action::ExportSession { session } => {
                let (loaded, hold) = self.load(&session).await?;
                self.answer_holding(
                    json!({"type": "session", "session": loaded.export()}),
                    Some(hold),
                )
                .await
            }
            Action::DeleteSession { session } => {
                let request = v1::DeleteTaskRequest {
                    task: session.clone(),
                    ..v1::DeleteTaskRequest::default()
                };
                let _: v1::DeleteTaskResponse =
                    self.calls.unary("TaskService/DeleteTask", &request).await?;
                self.answer(json!({"type": "session-deleted", "sessionID": session})).await
            }
            // The connection handles it.
            Action::Auth { .. } => Ok(()),
        }
    }

    async fn answer(&self, line: Value) -> Result<(), Stop> {
        self.answer_holding(line, None).await
    }

    async fn answer_holding(&self, mut line: Value, hold: Option<SessionHold>) -> Result<(), Stop> {
        set_id(&mut line, self.id.as_deref());
        self.calls.add_quotas(&mut line);
        Ok(self.out.answer(line, hold).await?)
    }

    /// Loads a session, with the permits and memory that it and its line hold. A client has one
    /// session in memory until it has read it. Its organization reads few at the same time, and may
    /// not leave more unread than its share.
    async fn load(&self, session: &str) -> Result<(Session, SessionHold), Failure> {
        let too_many_sessions = || {
            Failure::too_many(
                "the gateway is reading too many sessions at the moment",
                REQUEST_RETRY_SECONDS,
            )
        };
        // The semaphore is never closed.
        let slot = Arc::clone(&self.session_slot)
            .acquire_owned()
            .await
            .map_err(|_| too_many_sessions())?;
        // Now the organization is known.
        let task = self.task(session).await?;
        let account = self.calls.account();
        let reading = async {
            (
                self.options.sessions.wait(account.holder(), 1).await,
                account.wait_for_answer(SMALL_SESSION).await,
            )
        };
        let (_reading, mut memory) = tokio::time::timeout(SESSION_TIMEOUT, reading)
            .await
            .map_err(|_| too_many_sessions())?;
        Ok((Session::load(&self.calls, task, &mut memory).await?, SessionHold { slot, memory }))
    }

    async fn task(&self, session: &str) -> Result<v1::Task, Failure> {
        let request = v1::GetTaskRequest { task: session.to_owned() };
        Ok(self.calls.unary("TaskService/GetTask", &request).await?)
    }

    /// The agent of a session.
    async fn agent(&self, session: &str) -> Result<String, Failure> {
        Ok(self.task(session).await?.spec.unwrap_or_default().agent)
    }

    /// Sends a message, to a new session if none is named.
    async fn send(&self, message: Message) -> Result<AcceptedMessage, Stop> {
        let task: v1::Task = match message.session {
            Some(session) => {
                if message.tools.is_some() {
                    return Err(
                        Failure::invalid("`tools` is allowed only for a new session").into()
                    );
                }
                let request = v1::GetTaskRequest { task: session };
                let task: v1::Task = self.calls.unary("TaskService/GetTask", &request).await?;
                let (name, id) = (
                    task.spec.as_ref().map_or("", |spec| &spec.agent),
                    task.status.as_ref().map_or("", |status| &status.agent_id),
                );
                if message.agent.as_ref().is_some_and(|agent| agent != name && agent != id) {
                    return Err(Failure::invalid(format!("the session's agent is `{name}`")).into());
                }
                task
            }
            None => {
                if let Some(error) = message.tools.as_deref().and_then(tools::unknown_tool) {
                    return Err(Failure::no_tool(error).into());
                }
                let agent = message.agent.or_else(|| self.options.agent.clone());
                let none =
                    || Failure::no_agent("`agentID` is required: no default agent is configured");
                let spec = v1::TaskSpec {
                    agent: agent.ok_or_else(none)?,
                    workspace: message.workspace,
                    policy: message.tools.map(allow_only).unwrap_or_default(),
                    ..v1::TaskSpec::default()
                };
                let request =
                    v1::CreateTaskRequest { spec: Some(spec), idempotency_key: self.key("task") };
                self.calls.unary("TaskService/CreateTask", &request).await?
            }
        };
        let session = task.metadata.clone().unwrap_or_default().id;
        let agent = task.spec.clone().unwrap_or_default().agent;
        let failed = |failure: Failure| Stop::Failed(failure, Some(session.clone()));
        // Subscribes before sending the message, so that no event of its turn is missed.
        let watch =
            self.calls.subscribe(&session, "").await.map_err(|status| failed(status.into()))?;
        // Reads the task again after subscribing: a turn that ended since the first read would be
        // waited for.
        let request = v1::GetTaskRequest { task: session.clone() };
        let task: Result<v1::Task, Status> =
            self.calls.unary("TaskService/GetTask", &request).await;
        let task = task.map_err(|status| failed(status.into()))?;
        let spec = v1::MessageSpec {
            task: session.clone(),
            blocks: message.blocks,
            ..v1::MessageSpec::default()
        };
        let request =
            v1::CreateMessageRequest { spec: Some(spec), idempotency_key: self.key("message") };
        let accepted: Result<(v1::Message, bool), Status> =
            self.calls.write("MessageService/CreateMessage", &request).await;
        let (accepted, is_repeated) = accepted.map_err(|status| failed(status.into()))?;
        let message = accepted.metadata.unwrap_or_default().id;
        if !is_repeated {
            return Ok(AcceptedMessage {
                session,
                agent,
                follow: MessageFollower::new(message, &task),
                watch,
            });
        }
        // For a repeated request, events of the past are not sent again: they are searched for in
        // the records, from the session's beginning.
        let watch =
            self.calls.subscribe(&session, "0").await.map_err(|status| failed(status.into()))?;
        Ok(AcceptedMessage {
            session,
            agent,
            follow: MessageFollower::for_repeated_request(message),
            watch,
        })
    }

    /// The idempotency key of a part of the request; empty if the request has none. All calls of an
    /// organization share one key space, so parts need distinct keys.
    fn key(&self, part: &str) -> String {
        self.key.as_ref().map(|key| format!("{key}/{part}")).unwrap_or_default()
    }

    /// Waits for the end of the turn, and answers with the whole turn.
    async fn wait_for_turn(&self, mut accepted: AcceptedMessage) -> Result<(), Stop> {
        let failed = |failure: Failure| Stop::Failed(failure, Some(accepted.session.clone()));
        let turn = loop {
            let event = accepted.watch.next().await.map_err(|status| failed(status.into()))?;
            let Some(event) = event else { return Err(failed(session_deleted())) };
            match accepted.follow.observe(&event) {
                None => {}
                Some(TurnEnd::Turn(turn)) => break turn,
                Some(TurnEnd::Dropped) => return Err(failed(message_dropped())),
                Some(TurnEnd::Deleted) => return Err(failed(session_deleted())),
            }
        };
        let (mut session, hold) = self.load(&accepted.session).await.map_err(failed)?;
        let mut outcome =
            session.outcome(&accepted.session, &accepted.follow.message, stop_reason(&turn));
        outcome.content.extend(turn.error.as_ref().map(|error| Failure::from_turn(error).block()));
        self.answer_holding(outcome.line(None), Some(hold)).await
    }

    /// Streams the events of the turn.
    async fn stream_turn(
        &self,
        mut accepted: AcceptedMessage,
        metadata: Option<Value>,
    ) -> Result<(), Stop> {
        let failed = |failure: Failure| Stop::Failed(failure, Some(accepted.session.clone()));
        let mut formatter = EventFormatter::new(
            Form::Events,
            self.id.clone(),
            accepted.session.clone(),
            accepted.agent,
        );
        let message = accepted.follow.message.clone();
        let mut line = turn_started(&message);
        line["sessionID"] = accepted.session.clone().into();
        if let Some(metadata) = metadata {
            line["metadata"] = metadata;
        }
        set_id(&mut line, self.id.as_deref());
        self.calls.add_quotas(&mut line);
        self.out.event(line, None).await?;
        loop {
            let event = accepted.watch.next().await.map_err(|status| failed(status.into()))?;
            let Some(event) = event else { return Err(failed(session_deleted())) };
            match accepted.follow.observe(&event) {
                None if accepted.follow.is_ours() => {
                    for line in formatter.format(&event) {
                        self.out.event(line, None).await?;
                    }
                }
                None => {}
                Some(TurnEnd::Turn(turn)) => {
                    let turns_so_far =
                        self.session_turns(&accepted.session).await.map_err(failed)?;
                    let mut line = turn_completed(turns_so_far.usage(&turn.message_id), &turn);
                    formatter.annotate(&mut line, &event);
                    return Ok(self.out.event(line, None).await?);
                }
                Some(TurnEnd::Dropped) => return Err(failed(message_dropped())),
                Some(TurnEnd::Deleted) => return Err(failed(session_deleted())),
            }
        }
    }

    async fn session_turns(&self, session: &str) -> Result<SessionTurns, Failure> {
        let (loaded, _hold) = self.load(session).await?;
        let until_sequence = loaded.task.status.as_ref().map_or(0, |status| status.event_sequence);
        let turns = loaded.turns.iter().map(|turn| (turn.id.clone(), turn.usage)).collect();
        Ok(SessionTurns { until_sequence, turns, is_cut: loaded.is_cut })
    }

    /// Streams the events of a session until the client or the session is gone: after a cursor, or
    /// from the beginning without the first `turns` turns.
    async fn stream_events(
        &self,
        session: String,
        cursor: Option<String>,
        turns: usize,
    ) -> Result<(), Stop> {
        let failed = |failure: Failure| Stop::Failed(failure, Some(session.clone()));
        let watch = self.calls.resume(&session, cursor.as_deref().unwrap_or("0")).await;
        let mut watch = watch.map_err(|status| failed(status.into()))?;
        let mut turns_so_far = match self.session_turns(&session).await {
            // Of a deleted session only its end is left.
            Err(failure) if failure.code == "SESSION_NOT_FOUND" => SessionTurns::default(),
            turns_so_far => turns_so_far.map_err(failed)?,
        };
        let mut skipper = cursor.is_none().then(|| turns_so_far.skipper(turns)).flatten();
        let mut formatter =
            EventFormatter::new(Form::Events, self.id.clone(), session.clone(), String::new());
        while let Some(event) = watch.next().await.map_err(|status| failed(status.into()))? {
            if watch.is_delivered(&event) {
                formatter.format(&event);
                continue;
            }
            let lines: Vec<Value> = match &mut skipper {
                Some(active) => {
                    let Some(started_turns) = active.skip(&event) else { continue };
                    skipper = None;
                    started_turns.iter().map(|turn| turn_started(turn)).collect()
                }
                None => {
                    // Loads the usage once for all past turns, and then at the end of each turn.
                    if matches!(event.payload, Some(Payload::TurnCompleted(_)))
                        && event.sequence > turns_so_far.until_sequence
                    {
                        match self.session_turns(&session).await {
                            Ok(newer) => turns_so_far = newer,
                            Err(failure) if failure.code == "SESSION_NOT_FOUND" => {}
                            Err(failure) => return Err(failed(failure)),
                        }
                    }
                    let start_line = requested_turn(&event).map(turn_started);
                    start_line
                        .into_iter()
                        .chain(formatter.format(&event))
                        .chain(turn_end_line(&event, &turns_so_far))
                        .collect()
                }
            };
            for mut line in lines {
                formatter.annotate(&mut line, &event);
                self.out.event(line, None).await?;
            }
        }
        Err(failed(session_deleted()))
    }

    /// Streams the results of a session until the client or the session is gone.
    async fn stream(
        &self,
        session: String,
        cursor: Option<String>,
        turns: usize,
    ) -> Result<(), Stop> {
        let failed = |failure: Failure| Stop::Failed(failure, Some(session.clone()));
        // Subscribes before reading, so that nothing is missed in between.
        let watch = self.calls.resume(&session, cursor.as_deref().unwrap_or_default()).await;
        let mut watch = watch.map_err(|status| failed(status.into()))?;
        let mut start = Outcome { session: &session, stop: "stream_start", ..Outcome::default() };
        let mut agent = String::new();
        let mut hold = None;
        // With a cursor, everything else comes from events. Of a deleted session only its end is
        // left.
        let loaded_start = match cursor {
            Some(_) => self.agent(&session).await.map(|found| agent = found),
            None => self.load(&session).await.map(|(loaded, session_hold)| {
                loaded.agent().clone_into(&mut agent);
                // In a cut session, turns cannot be counted from the first, so none are skipped.
                let delivered = if loaded.is_cut { 0 } else { turns };
                (start.is_cut, hold) = (loaded.is_cut, Some(session_hold));
                start.turns.extend(loaded.turns.into_iter().skip(delivered).map(Turn::into_json));
            }),
        };
        match loaded_start {
            Err(failure) if failure.code != "SESSION_NOT_FOUND" => return Err(failed(failure)),
            _ => {}
        }
        let mut formatter =
            EventFormatter::new(Form::Results, self.id.clone(), session.clone(), agent.clone());
        let mut line = Outcome { agent: &agent, ..start }.line(self.id.as_deref());
        self.calls.add_quotas(&mut line);
        self.out.event(line, hold).await?;
        while let Some(event) = watch.next().await.map_err(|status| failed(status.into()))? {
            let lines = formatter.format(&event);
            if watch.is_delivered(&event) {
                continue;
            }
            for line in lines {
                self.out.event(line, None).await?;
            }
            if let Some(Payload::TurnCompleted(turn)) = &event.payload {
                let (mut loaded, hold) = match self.load(&session).await {
                    Ok(loaded) => loaded,
                    // The session was deleted; the stream reports that next.
                    Err(failure) if failure.code == "SESSION_NOT_FOUND" => continue,
                    Err(failure) => return Err(failed(failure)),
                };
                let mut outcome = loaded.outcome(&session, &turn.message_id, stop_reason(turn));
                outcome
                    .content
                    .extend(turn.error.as_ref().map(|error| Failure::from_turn(error).block()));
                let mut line = outcome.line(None);
                formatter.annotate(&mut line, &event);
                self.out.event(line, Some(hold)).await?;
            }
        }
        let outcome =
            Outcome { session: &session, agent: &agent, stop: "stream_end", ..Outcome::default() };
        Ok(self.out.event(outcome.line(self.id.as_deref()), None).await?)
    }
}

/// The last line of a turn, if the event ends one.
fn turn_end_line(event: &v1::Event, turns_so_far: &SessionTurns) -> Option<Value> {
    if let Some(Payload::TurnCompleted(turn)) = &event.payload {
        return Some(turn_completed(turns_so_far.usage(&turn.message_id), turn));
    }
    let turn = dropped_message(event)?;
    let mut line = message_dropped().line(Form::Events, None, None);
    line["turnID"] = turn.into();
    Some(line)
}

fn message(prompt: Prompt) -> Result<Message, Failure> {
    let blocks = prompt.blocks().map_err(Failure::invalid)?;
    Ok(Message {
        session: prompt.session,
        agent: prompt.agent,
        tools: prompt.tools,
        workspace: String::new(),
        blocks,
    })
}

/// Policy rules that allow scripts to call these tools only.
fn allow_only(tools: Vec<String>) -> Vec<v1::PolicyRule> {
    let deny = v1::PolicyRule {
        action: v1::PolicyAction::Deny.into(),
        reason: "The client offers other tools only.".to_owned(),
        ..v1::PolicyRule::default()
    };
    if tools.is_empty() {
        return vec![deny];
    }
    vec![
        v1::PolicyRule {
            action: v1::PolicyAction::Allow.into(),
            tools,
            ..v1::PolicyRule::default()
        },
        deny,
    ]
}

fn session_deleted() -> Failure {
    Failure::missing("the session was deleted")
}

fn message_dropped() -> Failure {
    Failure::dropped("the message was dropped before its turn came")
}
