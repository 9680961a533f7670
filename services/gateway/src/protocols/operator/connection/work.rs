//! What is done for one request.

use std::sync::Arc;

use construct_proto::v1::{self, event::Payload};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{BUSY, Gone, Held, Out};
use crate::{
    protocols::operator::{
        Options, ROOM,
        answer::{Failure, Form, Outcome, named, stop_reason},
        calls::{Calls, Watch},
        events::{Ended, Follow, Passing, Teller, asked, completed, dropped, started},
        request::{Project, Say, Wanted, text},
        session::{Session, Turn, listed},
        tools,
    },
    status,
};

/// Room for a session of which nothing was read yet.
const SMALL_SESSION: usize = 64 * 1024;

pub(super) struct Work {
    pub(super) calls: Calls,
    pub(super) options: Arc<Options>,
    pub(super) out: Out,
    pub(super) room: Arc<Semaphore>,
    pub(super) stopping: CancellationToken,
    pub(super) id: Option<String>,
    /// What the request is known by when it is sent again.
    pub(super) key: Option<String>,
}

/// Why a request is over before its end.
enum Stop {
    Gone,
    /// With the session it is about, if that is known.
    Failed(Failure, Option<String>),
}

impl From<Gone> for Stop {
    fn from(_: Gone) -> Self {
        Self::Gone
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

/// A message that was accepted.
struct Sent {
    session: String,
    agent: String,
    follow: Follow,
    watch: Watch,
}

/// What is known of the turns of a session.
#[derive(Default)]
struct Known {
    /// The session's last record when it was looked at.
    until: u64,
    /// Each with its usage.
    turns: Vec<(String, (i64, i64))>,
    is_cut: bool,
}

impl Known {
    fn usage(&self, turn: &str) -> (i64, i64) {
        self.turns.iter().find(|(id, _)| id == turn).map(|(_, usage)| *usage).unwrap_or_default()
    }

    /// Passes over so many turns. Which ones these are is not known when it cannot be counted from
    /// the first.
    fn passing(&self, turns: usize) -> Option<Passing> {
        if turns == 0 || self.is_cut {
            return None;
        }
        let last = self.turns.get(turns - 1).map(|(id, _)| id.clone());
        Some(Passing::new(last.unwrap_or_default(), self.until))
    }
}

impl Work {
    pub(super) async fn run(self, wanted: Wanted) {
        let form = wanted.form();
        let goes_on = form == Form::Events || matches!(wanted, Wanted::Stream { .. });
        let done = tokio::select! {
            biased;
            done = self.do_it(wanted, form) => done,
            () = self.stopping.cancelled() => Err(status::unavailable("the gateway is stopping: connect again").into()),
        };
        if let Err(Stop::Failed(failure, session)) = done {
            let line = failure.line(form, self.id.as_deref(), session.as_deref());
            // Behind what the request has told so far: nothing of it follows. A client that is gone
            // needs no answer.
            _ = if goes_on {
                self.out.event(line, None).await
            } else {
                self.out.answer(line, None).await
            };
        }
    }

    async fn do_it(&self, wanted: Wanted, form: Form) -> Result<(), Stop> {
        match wanted {
            Wanted::SendContextRequest { context, agent } => {
                let project =
                    context.project.unwrap_or(Project { name: String::new(), path: String::new() });
                let mut blocks = Vec::new();
                if !project.name.is_empty() {
                    blocks.push(text(format!("Project: {}", project.name)));
                }
                blocks.push(text(context.message));
                let workspace = project.path;
                let message =
                    Message { session: None, agent, tools: context.tools, workspace, blocks };
                let sent = self.send(message).await?;
                self.wait(sent).await
            }
            Wanted::Query(say) | Wanted::Dispatch(say) if form == Form::Events => {
                let metadata = say.metadata.clone();
                let sent = self.send(message(say)?).await?;
                self.tell(sent, metadata).await
            }
            Wanted::Query(say) => {
                let sent = self.send(message(say)?).await?;
                self.wait(sent).await
            }
            Wanted::Dispatch(say) => {
                let sent = self.send(message(say)?).await?;
                let (session, agent) = (&sent.session, &sent.agent);
                let outcome = Outcome { session, agent, stop: "dispatched", ..Outcome::default() };
                self.answer(outcome.line(None)).await
            }
            Wanted::Stream { session, cursor, turns, form } => {
                let cursor = cursor.filter(|cursor| !cursor.is_empty());
                match form {
                    Form::Results => self.stream(session, cursor, turns).await,
                    Form::Events => self.stream_events(session, cursor, turns).await,
                }
            }
            Wanted::Cancel { session, .. } => {
                let session =
                    session.ok_or_else(|| Failure::invalid("give `sessionID`, or `requestID`"))?;
                let request = v1::CancelTaskRequest {
                    task: session.clone(),
                    reason: "The operator's client cancelled it.".to_owned(),
                    ..v1::CancelTaskRequest::default()
                };
                let _: v1::Task = self.calls.unary("TaskService/CancelTask", &request).await?;
                self.answer(json!({"type": "cancelled", "sessionID": session})).await
            }
            Wanted::ListSessions { agent, page_size, page_token } => {
                let page = v1::PageRequest { page_size, page_token, ..v1::PageRequest::default() };
                let filter = v1::list_tasks_request::Filter {
                    agent,
                    ..v1::list_tasks_request::Filter::default()
                };
                let request = v1::ListTasksRequest { page: Some(page), filter: Some(filter) };
                let found: v1::ListTasksResponse =
                    self.calls.unary("TaskService/ListTasks", &request).await?;
                let sessions: Vec<_> = found.tasks.iter().map(listed).collect();
                let next = found.page.unwrap_or_default().next_page_token;
                self.answer(
                    json!({"type": "sessions", "sessions": sessions, "nextPageToken": next}),
                )
                .await
            }
            Wanted::ExportSession { session } => {
                let (loaded, held) = self.load(&session).await?;
                self.answer_holding(
                    json!({"type": "session", "session": loaded.exported()}),
                    Some(held),
                )
                .await
            }
            Wanted::DeleteSession { session } => {
                let request = v1::DeleteTaskRequest {
                    task: session.clone(),
                    ..v1::DeleteTaskRequest::default()
                };
                let _: v1::DeleteTaskResponse =
                    self.calls.unary("TaskService/DeleteTask", &request).await?;
                self.answer(json!({"type": "session-deleted", "sessionID": session})).await
            }
            // The connection itself does that.
            Wanted::Auth { .. } => Ok(()),
        }
    }

    async fn answer(&self, line: Value) -> Result<(), Stop> {
        self.answer_holding(line, None).await
    }

    async fn answer_holding(&self, mut line: Value, held: Option<Held>) -> Result<(), Stop> {
        named(&mut line, self.id.as_deref());
        self.calls.tell_left(&mut line);
        Ok(self.out.answer(line, held).await?)
    }

    /// A session, and what it, and the line that is made of it, hold. A client has one in memory
    /// until it has read it; so has its organization few while they are read, and no more of all
    /// than it may leave unread.
    async fn load(&self, session: &str) -> Result<(Session, Held), Failure> {
        let crowded =
            || Failure::too_many("the gateway shows too many sessions at the moment", BUSY);
        // Nobody closes it.
        let place = Arc::clone(&self.room).acquire_owned().await.map_err(|_| crowded())?;
        // Whose it is, is known then.
        let task = self.task(session).await?;
        let account = self.calls.account();
        let reading = async {
            (
                self.options.sessions.wait(account.holder(), 1).await,
                account.wait_for_answer(SMALL_SESSION).await,
            )
        };
        let (_reading, mut room) =
            tokio::time::timeout(ROOM, reading).await.map_err(|_| crowded())?;
        Ok((Session::load(&self.calls, task, &mut room).await?, Held { place, room }))
    }

    async fn task(&self, session: &str) -> Result<v1::Task, Failure> {
        let request = v1::GetTaskRequest { task: session.to_owned() };
        Ok(self.calls.unary("TaskService/GetTask", &request).await?)
    }

    /// The agent of a session.
    async fn agent(&self, session: &str) -> Result<String, Failure> {
        Ok(self.task(session).await?.spec.unwrap_or_default().agent)
    }

    /// Sends a message, to a new session if it is for none.
    async fn send(&self, message: Message) -> Result<Sent, Stop> {
        let task: v1::Task = match message.session {
            Some(session) => {
                if message.tools.is_some() {
                    return Err(Failure::invalid("tools are chosen when a session begins").into());
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
                if let Some(words) = message.tools.as_deref().and_then(tools::missing) {
                    return Err(Failure::no_tool(words).into());
                }
                let agent = message.agent.or_else(|| self.options.agent.clone());
                let none = || {
                    Failure::no_agent(
                        "name an agent with `agentID`: none is configured for requests without",
                    )
                };
                let spec = v1::TaskSpec {
                    agent: agent.ok_or_else(none)?,
                    workspace: message.workspace,
                    policy: message.tools.map(only).unwrap_or_default(),
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
        // Listening begins before the message is sent, so that nothing of its turn is missed.
        let watch =
            self.calls.subscribe(&session, "").await.map_err(|status| failed(status.into()))?;
        // Read again, now that it is listened: a turn that has ended since the first look would be
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
        let sent: Result<(v1::Message, bool), Status> =
            self.calls.write("MessageService/CreateMessage", &request).await;
        let (sent, is_repeated) = sent.map_err(|status| failed(status.into()))?;
        let message = sent.metadata.unwrap_or_default().id;
        if !is_repeated {
            return Ok(Sent { session, agent, follow: Follow::new(message, &task), watch });
        }
        // What has happened to it since the first time is not told any more: it is looked for in
        // the records, from the session's beginning on.
        let watch =
            self.calls.subscribe(&session, "0").await.map_err(|status| failed(status.into()))?;
        Ok(Sent { session, agent, follow: Follow::again(message), watch })
    }

    /// Under which key a part of the request is done only once, however often it is sent; none if
    /// it has none. The keys of an organization's calls are told from each other by nothing else.
    fn key(&self, part: &str) -> String {
        self.key.as_ref().map(|key| format!("{key}/{part}")).unwrap_or_default()
    }

    /// Waits for the turn's end, and answers with all of it.
    async fn wait(&self, mut sent: Sent) -> Result<(), Stop> {
        let failed = |failure: Failure| Stop::Failed(failure, Some(sent.session.clone()));
        let turn = loop {
            let event = sent.watch.next().await.map_err(|status| failed(status.into()))?;
            let Some(event) = event else { return Err(failed(gone())) };
            match sent.follow.see(&event) {
                None => {}
                Some(Ended::Turn(turn)) => break turn,
                Some(Ended::Dropped) => return Err(failed(never())),
                Some(Ended::Deleted) => return Err(failed(gone())),
            }
        };
        let (mut session, held) = self.load(&sent.session).await.map_err(failed)?;
        let mut outcome = session.outcome(&sent.session, &sent.follow.message, stop_reason(&turn));
        outcome.content.extend(turn.error.as_ref().map(|error| Failure::of_turn(error).block()));
        self.answer_holding(outcome.line(None), Some(held)).await
    }

    /// Tells the turn as it happens.
    async fn tell(&self, mut sent: Sent, metadata: Option<Value>) -> Result<(), Stop> {
        let failed = |failure: Failure| Stop::Failed(failure, Some(sent.session.clone()));
        let mut teller =
            Teller::new(Form::Events, self.id.clone(), sent.session.clone(), sent.agent);
        let message = sent.follow.message.clone();
        let mut line = started(&message);
        line["sessionID"] = sent.session.clone().into();
        if let Some(metadata) = metadata {
            line["metadata"] = metadata;
        }
        named(&mut line, self.id.as_deref());
        self.calls.tell_left(&mut line);
        self.out.event(line, None).await?;
        loop {
            let event = sent.watch.next().await.map_err(|status| failed(status.into()))?;
            let Some(event) = event else { return Err(failed(gone())) };
            match sent.follow.see(&event) {
                None if sent.follow.is_ours() => {
                    for line in teller.tell(&event) {
                        self.out.event(line, None).await?;
                    }
                }
                None => {}
                Some(Ended::Turn(turn)) => {
                    let known = self.known(&sent.session).await.map_err(failed)?;
                    let mut line = completed(known.usage(&turn.message_id), &turn);
                    teller.sign(&mut line, &event);
                    return Ok(self.out.event(line, None).await?);
                }
                Some(Ended::Dropped) => return Err(failed(never())),
                Some(Ended::Deleted) => return Err(failed(gone())),
            }
        }
    }

    async fn known(&self, session: &str) -> Result<Known, Failure> {
        let (loaded, _held) = self.load(session).await?;
        let until = loaded.task.status.as_ref().map_or(0, |status| status.event_sequence);
        let turns = loaded.turns.iter().map(|turn| (turn.id.clone(), turn.usage)).collect();
        Ok(Known { until, turns, is_cut: loaded.is_cut })
    }

    /// Tells in events what happens in a session until the client, or the session, is gone: from a
    /// cursor on, or else from its beginning without so many turns.
    async fn stream_events(
        &self,
        session: String,
        cursor: Option<String>,
        turns: usize,
    ) -> Result<(), Stop> {
        let failed = |failure: Failure| Stop::Failed(failure, Some(session.clone()));
        let watch = self.calls.resume(&session, cursor.as_deref().unwrap_or("0")).await;
        let mut watch = watch.map_err(|status| failed(status.into()))?;
        let mut known = match self.known(&session).await {
            // Of a session that is deleted already only its end is left.
            Err(failure) if failure.code == "SESSION_NOT_FOUND" => Known::default(),
            known => known.map_err(failed)?,
        };
        let mut passing = cursor.is_none().then(|| known.passing(turns)).flatten();
        let mut teller = Teller::new(Form::Events, self.id.clone(), session.clone(), String::new());
        while let Some(event) = watch.next().await.map_err(|status| failed(status.into()))? {
            if watch.has_told(&event) {
                teller.tell(&event);
                continue;
            }
            let lines: Vec<Value> = match &mut passing {
                Some(passed) => {
                    let Some(begun) = passed.pass(&event) else { continue };
                    passing = None;
                    begun.iter().map(|turn| started(turn)).collect()
                }
                None => {
                    // Once for all that has happened before, and then at each turn's end.
                    if matches!(event.payload, Some(Payload::TurnCompleted(_)))
                        && event.sequence > known.until
                    {
                        match self.known(&session).await {
                            Ok(newer) => known = newer,
                            Err(failure) if failure.code == "SESSION_NOT_FOUND" => {}
                            Err(failure) => return Err(failed(failure)),
                        }
                    }
                    let begins = asked(&event).map(started);
                    begins
                        .into_iter()
                        .chain(teller.tell(&event))
                        .chain(ends(&event, &known))
                        .collect()
                }
            };
            for mut line in lines {
                teller.sign(&mut line, &event);
                self.out.event(line, None).await?;
            }
        }
        Err(failed(gone()))
    }

    /// Tells what happens in a session until the client, or the session, is gone.
    async fn stream(
        &self,
        session: String,
        cursor: Option<String>,
        turns: usize,
    ) -> Result<(), Stop> {
        let failed = |failure: Failure| Stop::Failed(failure, Some(session.clone()));
        // Listening begins before the first look, so that nothing falls between.
        let watch = self.calls.resume(&session, cursor.as_deref().unwrap_or_default()).await;
        let mut watch = watch.map_err(|status| failed(status.into()))?;
        let mut start = Outcome { session: &session, stop: "stream_start", ..Outcome::default() };
        let mut agent = String::new();
        let mut room = None;
        // With a cursor everything else is told by events. Of a session that is deleted already
        // only its end is left.
        let looked = match cursor {
            Some(_) => self.agent(&session).await.map(|found| agent = found),
            None => self.load(&session).await.map(|(loaded, held)| {
                loaded.agent().clone_into(&mut agent);
                // Which ones the client has is not known when it cannot be counted from the first.
                let known = if loaded.is_cut { 0 } else { turns };
                (start.is_cut, room) = (loaded.is_cut, Some(held));
                start.turns.extend(loaded.turns.into_iter().skip(known).map(Turn::shown));
            }),
        };
        match looked {
            Err(failure) if failure.code != "SESSION_NOT_FOUND" => return Err(failed(failure)),
            _ => {}
        }
        let mut teller =
            Teller::new(Form::Results, self.id.clone(), session.clone(), agent.clone());
        let mut line = Outcome { agent: &agent, ..start }.line(self.id.as_deref());
        self.calls.tell_left(&mut line);
        self.out.event(line, room).await?;
        while let Some(event) = watch.next().await.map_err(|status| failed(status.into()))? {
            let lines = teller.tell(&event);
            if watch.has_told(&event) {
                continue;
            }
            for line in lines {
                self.out.event(line, None).await?;
            }
            if let Some(Payload::TurnCompleted(turn)) = &event.payload {
                let (mut loaded, held) = match self.load(&session).await {
                    Ok(loaded) => loaded,
                    // Deleted meanwhile: the stream tells that next.
                    Err(failure) if failure.code == "SESSION_NOT_FOUND" => continue,
                    Err(failure) => return Err(failed(failure)),
                };
                let mut outcome = loaded.outcome(&session, &turn.message_id, stop_reason(turn));
                outcome
                    .content
                    .extend(turn.error.as_ref().map(|error| Failure::of_turn(error).block()));
                let mut line = outcome.line(None);
                teller.sign(&mut line, &event);
                self.out.event(line, Some(held)).await?;
            }
        }
        let outcome =
            Outcome { session: &session, agent: &agent, stop: "stream_end", ..Outcome::default() };
        Ok(self.out.event(outcome.line(self.id.as_deref()), None).await?)
    }
}

/// The last line of a turn, if an event ends one.
fn ends(event: &v1::Event, known: &Known) -> Option<Value> {
    if let Some(Payload::TurnCompleted(turn)) = &event.payload {
        return Some(completed(known.usage(&turn.message_id), turn));
    }
    let turn = dropped(event)?;
    let mut line = never().line(Form::Events, None, None);
    line["turnID"] = turn.into();
    Some(line)
}

fn message(say: Say) -> Result<Message, Failure> {
    let blocks = say.blocks().map_err(Failure::invalid)?;
    Ok(Message {
        session: say.session,
        agent: say.agent,
        tools: say.tools,
        workspace: String::new(),
        blocks,
    })
}

/// The rules that let scripts call some tools and no others.
fn only(tools: Vec<String>) -> Vec<v1::PolicyRule> {
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

fn gone() -> Failure {
    Failure::missing("the session was deleted")
}

fn never() -> Failure {
    Failure::dropped("the message was dropped before its turn came")
}
