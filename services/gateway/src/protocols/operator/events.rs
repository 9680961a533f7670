//! Formats the events of a session for each response form.

use std::collections::HashMap;

use construct_proto::v1::{self, block::Block, event::Payload, message_delta::Delta};
use serde_json::{Value, json};

use super::{
    answer::{Failure, Form, Outcome, set_id, stop_reason},
    session::{response_block, time},
    tools,
};

/// How a turn ended.
#[derive(Debug)]
pub(super) enum TurnEnd {
    Turn(v1::TurnCompleted),
    /// The message was dropped or superseded: it gets no turn.
    Dropped,
    /// The session was deleted.
    Deleted,
}

/// Follows one message until the end of its turn.
pub(super) struct MessageFollower {
    pub(super) message: String,
    /// Number of turns before it, as of the task's record `since`.
    turns_ahead: i64,
    since: u64,
    /// Whether the message's own record was observed: earlier events belong to other turns.
    is_sent: bool,
    /// Whether the session is observed from its beginning.
    from_beginning: bool,
}

impl MessageFollower {
    /// `task` is the task after subscribing and before sending the message. Turns that ended in
    /// between are reported, but already counted.
    pub(super) fn new(message: String, task: &v1::Task) -> Self {
        let status = task.status.clone().unwrap_or_default();
        let busy = match status.phase() {
            v1::TaskPhase::AwaitInput | v1::TaskPhase::Unspecified => false,
            v1::TaskPhase::Suspended => status.turns_used > 0,
            _ => true,
        };
        Self {
            message,
            turns_ahead: status.queued_count + i64::from(busy),
            since: status.event_sequence,
            is_sent: false,
            from_beginning: false,
        }
    }

    /// Follows a message of an earlier request through all events of the session: its turn may be
    /// over.
    pub(super) const fn for_repeated_request(message: String) -> Self {
        Self { message, turns_ahead: 0, since: 0, is_sent: false, from_beginning: true }
    }

    /// Whether the current events belong to the message's turn.
    pub(super) fn is_ours(&self) -> bool {
        self.is_sent && self.turns_ahead <= 0
    }

    /// Observes an event, and returns the end of the message's turn if it is one.
    pub(super) fn observe(&mut self, event: &v1::Event) -> Option<TurnEnd> {
        let counted = (1..=self.since).contains(&event.sequence);
        let ended_message = match &event.payload {
            Some(Payload::Message(message)) if event.r#type == "message.created" => {
                let own = |metadata: &v1::Metadata| metadata.id == self.message;
                self.is_sent |= message.metadata.as_ref().is_some_and(own);
                if self.from_beginning && !self.is_sent && requested_turn(event).is_some() {
                    self.turns_ahead += 1;
                }
                return None;
            }
            Some(Payload::TurnCompleted(turn)) if turn.message_id == self.message => {
                return Some(TurnEnd::Turn(turn.clone()));
            }
            Some(Payload::TurnCompleted(turn)) => turn.message_id.as_str(),
            Some(Payload::Deleted(_)) if event.r#type == "task.deleted" => {
                return Some(TurnEnd::Deleted);
            }
            _ => dropped_message(event)?,
        };
        if ended_message == self.message {
            return Some(TurnEnd::Dropped);
        }
        if !counted {
            self.turns_ahead -= 1;
        }
        None
    }
}

/// Skips the turns that a client already has when a session is streamed from its beginning.
pub(super) struct TurnSkipper {
    /// The last turn to skip.
    last: String,
    /// The session's last record when it was read. Later events are never skipped.
    until_sequence: u64,
    /// Turns that were requested and not answered meanwhile. They are reported after the skipped
    /// turns.
    started_turns: Vec<String>,
}

impl TurnSkipper {
    pub(super) const fn new(last: String, until_sequence: u64) -> Self {
        Self { last, until_sequence, started_turns: Vec::new() }
    }

    /// Skips an event. After the last one, returns the turns that have started.
    pub(super) fn skip(&mut self, event: &v1::Event) -> Option<Vec<String>> {
        self.started_turns.extend(requested_turn(event).map(str::to_owned));
        let ended = match &event.payload {
            Some(Payload::TurnCompleted(turn)) => Some(turn.message_id.as_str()),
            _ => dropped_message(event),
        };
        if let Some(ended) = ended {
            self.started_turns.retain(|turn| turn != ended);
        }
        let is_last =
            ended.is_some_and(|ended| ended == self.last) || event.sequence >= self.until_sequence;
        is_last.then(|| std::mem::take(&mut self.started_turns))
    }
}

/// Formats the events of a session, one by one.
pub(super) struct EventFormatter {
    pub(super) form: Form,
    pub(super) id: Option<String>,
    pub(super) session: String,
    pub(super) agent: String,
    /// The step and block of the current text, to recognize the first piece of a block.
    open_block: Option<(u64, u32)>,
    /// Whether the model's current answer was streamed in pieces.
    was_streamed: bool,
    /// The inputs of running calls, by id. A result repeats its input, because some clients read
    /// only results.
    inputs: HashMap<String, Value>,
}

impl EventFormatter {
    pub(super) fn new(form: Form, id: Option<String>, session: String, agent: String) -> Self {
        Self {
            form,
            id,
            session,
            agent,
            open_block: None,
            was_streamed: false,
            inputs: HashMap::new(),
        }
    }

    /// The lines of an event.
    pub(super) fn format(&mut self, event: &v1::Event) -> Vec<Value> {
        let mut lines = match &event.payload {
            Some(Payload::MessageDelta(delta)) => self.delta(event.step, delta),
            Some(Payload::MessageRestarted(restarted)) => {
                (self.open_block, self.was_streamed) = (None, false);
                vec![match self.form {
                    Form::Events => json!({"type": "turn-restarted", "reason": restarted.reason}),
                    Form::Results => self.result(Vec::new(), Vec::new(), "restarted"),
                }]
            }
            Some(Payload::Message(message)) if event.r#type == "message.created" => {
                self.message(message, event.time)
            }
            Some(Payload::ToolCalled(call)) => {
                let tool = tools::id(&call.script_id, &call.step_id, call.number);
                let input = tools::input(&call.arguments);
                vec![match self.form {
                    Form::Events => tool_call(&tool, &call.name, input),
                    Form::Results => {
                        self.inputs.insert(tool.clone(), input.clone());
                        let block =
                            json!({"type": "tool", "id": tool, "name": call.name, "input": input});
                        self.result(vec![block], Vec::new(), "")
                    }
                }]
            }
            Some(Payload::ToolResult(result)) => {
                let tool = tools::id(&result.script_id, &result.step_id, result.number);
                let error = if result.succeeded { "" } else { &result.result };
                let output = if result.succeeded { result.result.as_str() } else { "" };
                vec![match self.form {
                    Form::Events => tool_result(&tool, &result.name, output, error),
                    Form::Results => self.execution(&tool, &result.name, output, error, event.time),
                }]
            }
            Some(Payload::Error(error)) => {
                let failure = Failure::from_turn(error);
                vec![match self.form {
                    Form::Events => failure.line(Form::Events, None, None),
                    Form::Results => self.result(vec![failure.block()], Vec::new(), ""),
                }]
            }
            Some(Payload::TurnCompleted(_)) => {
                // A canceled turn leaves calls without results.
                self.inputs.clear();
                Vec::new()
            }
            _ => Vec::new(),
        };
        for line in &mut lines {
            self.annotate(line, event);
        }
        lines
    }

    /// Adds the session, the request and the cursor to a line.
    pub(super) fn annotate(&self, line: &mut Value, event: &v1::Event) {
        set_id(line, self.id.as_deref());
        line["sessionID"] = self.session.clone().into();
        line["cursor"] = event.cursor.clone().into();
    }

    fn result(&self, content: Vec<Value>, turns: Vec<Value>, stop: &str) -> Value {
        let (session, agent) = (&self.session, &self.agent);
        Outcome { session, agent, content, turns, stop, ..Outcome::default() }.line(None)
    }

    fn execution(
        &mut self,
        id: &str,
        name: &str,
        output: &str,
        error: &str,
        at: Option<prost_types::Timestamp>,
    ) -> Value {
        // A client that reconnected between a call and its result has seen the call already.
        let input = self.inputs.remove(id).unwrap_or_else(|| json!({}));
        let mut call = json!({"id": id, "name": name, "input": input, "result": output, "executedAt": time(at)});
        if !error.is_empty() {
            call["error"] = error.into();
        }
        let turn = json!({
            "request": {"role": "user", "content": []},
            "response": {"role": "assistant", "content": []},
            "toolCalls": [call],
        });
        self.result(Vec::new(), vec![turn], "")
    }

    fn delta(&mut self, step: u64, delta: &v1::MessageDelta) -> Vec<Value> {
        // Code is sent when it is complete; thoughts are not sent.
        let Some(Delta::Text(text)) = &delta.delta else { return Vec::new() };
        let block = Some((step, delta.block));
        let first = std::mem::replace(&mut self.open_block, block) != block;
        self.was_streamed = true;
        vec![match self.form {
            Form::Events => {
                json!({"type": if first { "response-block" } else { "response-chunk" }, "content": text})
            }
            Form::Results => {
                self.result(vec![json!({"type": "text", "text": text})], Vec::new(), "")
            }
        }]
    }

    fn message(&mut self, message: &v1::Message, at: Option<prost_types::Timestamp>) -> Vec<Value> {
        let source = message.status.as_ref().map(v1::MessageStatus::source).unwrap_or_default();
        let blocks = message.spec.as_ref().map(|spec| spec.blocks.as_slice()).unwrap_or_default();
        if source == v1::MessageSource::User {
            return Vec::new();
        }
        let was_streamed =
            source == v1::MessageSource::Assistant && std::mem::take(&mut self.was_streamed);
        let mut lines = Vec::new();
        for block in blocks {
            lines.extend(match (&block.block, self.form) {
                (Some(Block::Text(text)), Form::Events)
                    if source == v1::MessageSource::Assistant =>
                {
                    (!was_streamed).then(|| json!({"type": "response-block", "content": text.text}))
                }
                (Some(Block::CodeInterpreterCall(call)), Form::Events) => {
                    Some(tool_call(&call.id, "code_interpreter", json!({"code": call.code})))
                }
                (Some(Block::CodeInterpreterResult(result)), Form::Events) => {
                    Some(tool_result(&result.id, "code_interpreter", &result.output, &result.error))
                }
                (Some(Block::CodeInterpreterResult(result)), Form::Results) => {
                    Some(self.execution(
                        &result.id,
                        "code_interpreter",
                        &result.output,
                        &result.error,
                        at,
                    ))
                }
                (Some(Block::Text(_)), Form::Results) if was_streamed => None,
                (Some(Block::Text(_) | Block::Attachment(_)), Form::Results)
                    if source != v1::MessageSource::Assistant =>
                {
                    None
                }
                (Some(Block::CodeInterpreterCall(call)), Form::Results) => {
                    self.inputs.insert(call.id.clone(), json!({"code": call.code}));
                    response_block(block).map(|block| self.result(vec![block], Vec::new(), ""))
                }
                (_, Form::Results) => {
                    response_block(block).map(|block| self.result(vec![block], Vec::new(), ""))
                }
                _ => None,
            });
        }
        let is_code = |line: &&mut Value| line["content"][0]["type"] == "code";
        if source == v1::MessageSource::Assistant
            && self.form == Form::Results
            && let Some(last) = lines.iter_mut().rfind(is_code)
        {
            // The model continues once it has the results of its scripts.
            last["stopReason"] = "tool_use".into();
        }
        lines
    }
}

fn tool_call(id: &str, name: &str, input: Value) -> Value {
    json!({"type": "tool-call", "toolID": id, "name": name, "input": input})
}

fn tool_result(id: &str, name: &str, output: &str, error: &str) -> Value {
    let mut line = json!({"type": "tool-result", "toolID": id, "name": name, "output": output});
    if !error.is_empty() {
        line["error"] = json!({"code": "TOOL_ERROR", "message": error});
    }
    line
}

/// The message that requests a turn, if the event is one.
pub(super) fn requested_turn(event: &v1::Event) -> Option<&str> {
    let Some(Payload::Message(message)) = &event.payload else { return None };
    let source = message.status.as_ref().map(v1::MessageStatus::source);
    let is_asked = event.r#type == "message.created" && source == Some(v1::MessageSource::User);
    message.metadata.as_ref().filter(|_| is_asked).map(|metadata| metadata.id.as_str())
}

/// The dropped or superseded message of an event, which gets no turn.
pub(super) fn dropped_message(event: &v1::Event) -> Option<&str> {
    match &event.payload {
        Some(Payload::Deleted(deleted)) if event.r#type != "task.deleted" => Some(&deleted.id),
        Some(Payload::Message(message)) if event.r#type == "message.updated" => {
            let is_dropped =
                |status: &v1::MessageStatus| status.position == 0 && status.processed_at.is_some();
            let metadata = message
                .metadata
                .as_ref()
                .filter(|_| message.status.as_ref().is_some_and(is_dropped));
            metadata.map(|metadata| metadata.id.as_str())
        }
        _ => None,
    }
}

/// The first line of a turn in event form.
pub(super) fn turn_started(turn: &str) -> Value {
    json!({"type": "turn-started", "turnID": turn})
}

/// The last line of a turn in event form.
pub(super) fn turn_completed(usage: (i64, i64), turn: &v1::TurnCompleted) -> Value {
    let usage = json!({"input": usage.0, "output": usage.1});
    json!({"type": "turn-completed", "turnID": turn.message_id, "usage": usage, "stopReason": stop_reason(turn)})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(phase: v1::TaskPhase, event_sequence: u64) -> v1::Task {
        let status =
            v1::TaskStatus { phase: phase.into(), event_sequence, ..v1::TaskStatus::default() };
        v1::Task { status: Some(status), ..v1::Task::default() }
    }

    fn event(kind: &str, sequence: u64, payload: Payload) -> v1::Event {
        v1::Event { r#type: kind.into(), sequence, payload: Some(payload), ..v1::Event::default() }
    }

    fn ended(message: &str, sequence: u64) -> v1::Event {
        let turn = v1::TurnCompleted { message_id: message.into(), ..v1::TurnCompleted::default() };
        event("turn.completed", sequence, Payload::TurnCompleted(turn))
    }

    fn created(message: &str, sequence: u64) -> v1::Event {
        let metadata = Some(v1::Metadata { id: message.into(), ..v1::Metadata::default() });
        event(
            "message.created",
            sequence,
            Payload::Message(v1::Message { metadata, ..v1::Message::default() }),
        )
    }

    #[test]
    fn turn_ended_before_the_task_was_read_counts_once() {
        // The subscription began at record 4. The turn before ended with record 5, and the task was
        // read after that.
        let mut follow = MessageFollower::new("own".into(), &task(v1::TaskPhase::AwaitInput, 5));
        assert!(follow.observe(&ended("other", 5)).is_none() && !follow.is_ours());
        assert!(follow.observe(&created("own", 6)).is_none() && follow.is_ours());
        assert!(matches!(follow.observe(&ended("own", 9)), Some(TurnEnd::Turn(_))));
    }

    fn requested_turn(message: &str, sequence: u64) -> v1::Event {
        let mut event = created(message, sequence);
        let Some(Payload::Message(message)) = &mut event.payload else { panic!("it is a message") };
        let source = v1::MessageSource::User.into();
        message.status = Some(v1::MessageStatus { source, ..v1::MessageStatus::default() });
        event
    }

    #[test]
    fn delivered_turns_are_skipped_and_running_turns_reported() {
        // The client has the first two of three turns. The third was requested before the second
        // ended, and another message was dropped.
        let mut skipper = TurnSkipper::new("second".into(), 9);
        let deleted = v1::Deleted { id: "dropped".into() };
        for event in [
            requested_turn("first", 2),
            ended("first", 3),
            requested_turn("second", 4),
            created("said", 5),
            requested_turn("dropped", 6),
            requested_turn("third", 7),
            event("message.deleted", 8, Payload::Deleted(deleted)),
        ] {
            assert_eq!(skipper.skip(&event), None);
        }
        assert_eq!(skipper.skip(&ended("second", 9)), Some(vec!["third".to_owned()]));
        // A client that claims more turns than exist gets only new events.
        let mut skipper = TurnSkipper::new(String::new(), 3);
        assert_eq!(skipper.skip(&requested_turn("first", 2)), None);
        assert_eq!(skipper.skip(&ended("first", 3)), Some(Vec::new()));
    }

    #[test]
    fn repeated_message_is_found_after_earlier_events() {
        let mut follow = MessageFollower::for_repeated_request("own".into());
        // The agent's messages request no turn.
        for event in [
            requested_turn("first", 2),
            created("said", 3),
            requested_turn("second", 4),
            ended("first", 5),
            requested_turn("own", 6),
        ] {
            assert!(follow.observe(&event).is_none() && !follow.is_ours());
        }
        assert!(follow.observe(&requested_turn("later", 7)).is_none() && !follow.is_ours());
        assert!(follow.observe(&ended("second", 8)).is_none() && follow.is_ours());
        assert!(matches!(follow.observe(&ended("own", 9)), Some(TurnEnd::Turn(_))));
    }

    #[test]
    fn events_of_other_turns_are_not_ours() {
        let mut follow = MessageFollower::new("own".into(), &task(v1::TaskPhase::InvokeModel, 5));
        assert!(follow.observe(&created("own", 6)).is_none() && !follow.is_ours());
        assert!(follow.observe(&ended("other", 7)).is_none() && follow.is_ours());
    }
}
