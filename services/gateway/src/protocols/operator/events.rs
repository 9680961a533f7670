//! What happens in a session, in the words of each form.

use std::collections::HashMap;

use construct_proto::v1::{self, block::Block, event::Payload, message_delta::Delta};
use serde_json::{Value, json};

use super::{
    answer::{Failure, Form, Outcome, named, stop_reason},
    session::{said, time},
    tools,
};

/// How a turn ended.
#[derive(Debug)]
pub(super) enum Ended {
    Turn(v1::TurnCompleted),
    /// The message was dropped, or taken back: it gets no turn.
    Dropped,
    /// The session is gone.
    Deleted,
}

/// Follows one message until its turn is over.
pub(super) struct Follow {
    pub(super) message: String,
    /// Turns that come before, as of the task's record `since`.
    ahead: i64,
    since: u64,
    /// Whether the message's own record has been seen: what is told before it is of others' turns.
    sent: bool,
    /// Whether the session is seen from its beginning on.
    whole: bool,
}

impl Follow {
    /// `task` as it was after listening began, and before the message was sent. What ended in
    /// between is told, and counted already.
    pub(super) fn new(message: String, task: &v1::Task) -> Self {
        let status = task.status.clone().unwrap_or_default();
        let busy = match status.phase() {
            v1::TaskPhase::AwaitInput | v1::TaskPhase::Unspecified => false,
            v1::TaskPhase::Suspended => status.turns_used > 0,
            _ => true,
        };
        Self {
            message,
            ahead: status.queued_count + i64::from(busy),
            since: status.event_sequence,
            sent: false,
            whole: false,
        }
    }

    /// Follows a message that an earlier request has sent, by all that happened in the session: its
    /// turn may be over.
    pub(super) const fn again(message: String) -> Self {
        Self { message, ahead: 0, since: 0, sent: false, whole: true }
    }

    /// Whether what happens now happens in the message's turn.
    pub(super) fn is_ours(&self) -> bool {
        self.sent && self.ahead <= 0
    }

    /// Whether an event ends the message's turn.
    pub(super) fn see(&mut self, event: &v1::Event) -> Option<Ended> {
        let counted = (1..=self.since).contains(&event.sequence);
        let gone = match &event.payload {
            Some(Payload::Message(message)) if event.r#type == "message.created" => {
                let own = |metadata: &v1::Metadata| metadata.id == self.message;
                self.sent |= message.metadata.as_ref().is_some_and(own);
                if self.whole && !self.sent && asked(event).is_some() {
                    self.ahead += 1;
                }
                return None;
            }
            Some(Payload::TurnCompleted(turn)) if turn.message_id == self.message => {
                return Some(Ended::Turn(turn.clone()));
            }
            Some(Payload::TurnCompleted(turn)) => turn.message_id.as_str(),
            Some(Payload::Deleted(_)) if event.r#type == "task.deleted" => {
                return Some(Ended::Deleted);
            }
            _ => dropped(event)?,
        };
        if gone == self.message {
            return Some(Ended::Dropped);
        }
        if !counted {
            self.ahead -= 1;
        }
        None
    }
}

/// Passes over the turns that a client has already, when a session is told from its beginning.
pub(super) struct Passing {
    /// The last of them.
    last: String,
    /// The session's last record as it was looked at: what comes behind is passed over in no case.
    until: u64,
    /// What was asked meanwhile and has no answer yet. It is told behind the turns that are passed
    /// over.
    begun: Vec<String>,
}

impl Passing {
    pub(super) const fn new(last: String, until: u64) -> Self {
        Self { last, until, begun: Vec::new() }
    }

    /// Passes over an event. When it was the last one: the turns that have begun.
    pub(super) fn pass(&mut self, event: &v1::Event) -> Option<Vec<String>> {
        self.begun.extend(asked(event).map(str::to_owned));
        let ended = match &event.payload {
            Some(Payload::TurnCompleted(turn)) => Some(turn.message_id.as_str()),
            _ => dropped(event),
        };
        if let Some(ended) = ended {
            self.begun.retain(|turn| turn != ended);
        }
        let is_last = ended.is_some_and(|ended| ended == self.last) || event.sequence >= self.until;
        is_last.then(|| std::mem::take(&mut self.begun))
    }
}

/// Says what happens in a session, event by event.
pub(super) struct Teller {
    pub(super) form: Form,
    pub(super) id: Option<String>,
    pub(super) session: String,
    pub(super) agent: String,
    /// Step and block whose text is being told, so that a piece is known as the first of its block.
    telling: Option<(u64, u32)>,
    /// Whether the answer that the model is giving was told in pieces.
    told: bool,
    /// What calls were given whose results are to come, by their ids. A result says it again,
    /// because it is all that some clients look at.
    inputs: HashMap<String, Value>,
}

impl Teller {
    pub(super) fn new(form: Form, id: Option<String>, session: String, agent: String) -> Self {
        Self { form, id, session, agent, telling: None, told: false, inputs: HashMap::new() }
    }

    /// The lines an event is worth.
    pub(super) fn tell(&mut self, event: &v1::Event) -> Vec<Value> {
        let mut lines = match &event.payload {
            Some(Payload::MessageDelta(delta)) => self.delta(event.step, delta),
            Some(Payload::MessageRestarted(restarted)) => {
                (self.telling, self.told) = (None, false);
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
                let failure = Failure::of_turn(error);
                vec![match self.form {
                    Form::Events => failure.line(Form::Events, None, None),
                    Form::Results => self.result(vec![failure.block()], Vec::new(), ""),
                }]
            }
            Some(Payload::TurnCompleted(_)) => {
                // A turn that was cancelled leaves calls without results.
                self.inputs.clear();
                Vec::new()
            }
            _ => Vec::new(),
        };
        for line in &mut lines {
            self.sign(line, event);
        }
        lines
    }

    /// Says which session and request a line belongs to, and where it stands.
    pub(super) fn sign(&self, line: &mut Value, event: &v1::Event) {
        named(line, self.id.as_deref());
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
        // Who came back between a call and its result was told of the call before.
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
        // Code is told when it is complete, and thoughts are the model's own.
        let Some(Delta::Text(text)) = &delta.delta else { return Vec::new() };
        let place = Some((step, delta.block));
        let first = std::mem::replace(&mut self.telling, place) != place;
        self.told = true;
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
        let told = source == v1::MessageSource::Assistant && std::mem::take(&mut self.told);
        let mut lines = Vec::new();
        for block in blocks {
            lines.extend(match (&block.block, self.form) {
                (Some(Block::Text(text)), Form::Events)
                    if source == v1::MessageSource::Assistant =>
                {
                    (!told).then(|| json!({"type": "response-block", "content": text.text}))
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
                (Some(Block::Text(_)), Form::Results) if told => None,
                (Some(Block::Text(_) | Block::Attachment(_)), Form::Results)
                    if source != v1::MessageSource::Assistant =>
                {
                    None
                }
                (Some(Block::CodeInterpreterCall(call)), Form::Results) => {
                    self.inputs.insert(call.id.clone(), json!({"code": call.code}));
                    said(block).map(|block| self.result(vec![block], Vec::new(), ""))
                }
                (_, Form::Results) => {
                    said(block).map(|block| self.result(vec![block], Vec::new(), ""))
                }
                _ => None,
            });
        }
        let is_code = |line: &&mut Value| line["content"][0]["type"] == "code";
        if source == v1::MessageSource::Assistant
            && self.form == Form::Results
            && let Some(last) = lines.iter_mut().rfind(is_code)
        {
            // The model goes on when it knows what its scripts give.
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

/// The message that asks for a turn, if an event tells of one.
pub(super) fn asked(event: &v1::Event) -> Option<&str> {
    let Some(Payload::Message(message)) = &event.payload else { return None };
    let source = message.status.as_ref().map(v1::MessageStatus::source);
    let is_asked = event.r#type == "message.created" && source == Some(v1::MessageSource::User);
    message.metadata.as_ref().filter(|_| is_asked).map(|metadata| metadata.id.as_str())
}

/// The message that gets no turn any more, if an event tells of one: it was dropped, or taken back.
pub(super) fn dropped(event: &v1::Event) -> Option<&str> {
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

/// The first line of a turn in events.
pub(super) fn started(turn: &str) -> Value {
    json!({"type": "turn-started", "turnID": turn})
}

/// The last line of a turn in events.
pub(super) fn completed(usage: (i64, i64), turn: &v1::TurnCompleted) -> Value {
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

    fn sent(message: &str, sequence: u64) -> v1::Event {
        let metadata = Some(v1::Metadata { id: message.into(), ..v1::Metadata::default() });
        event(
            "message.created",
            sequence,
            Payload::Message(v1::Message { metadata, ..v1::Message::default() }),
        )
    }

    #[test]
    fn a_turn_that_ended_before_the_task_was_read_is_not_counted_a_second_time() {
        // Listening began at record 4; the turn before ended with record 5, and the task was read
        // after that.
        let mut follow = Follow::new("own".into(), &task(v1::TaskPhase::AwaitInput, 5));
        assert!(follow.see(&ended("other", 5)).is_none() && !follow.is_ours());
        assert!(follow.see(&sent("own", 6)).is_none() && follow.is_ours());
        assert!(matches!(follow.see(&ended("own", 9)), Some(Ended::Turn(_))));
    }

    fn asked(message: &str, sequence: u64) -> v1::Event {
        let mut event = sent(message, sequence);
        let Some(Payload::Message(message)) = &mut event.payload else { panic!("it is a message") };
        let source = v1::MessageSource::User.into();
        message.status = Some(v1::MessageStatus { source, ..v1::MessageStatus::default() });
        event
    }

    #[test]
    fn turns_that_a_client_has_are_passed_over_and_those_that_have_begun_are_told() {
        // The second of three turns is the last one the client has. The third was asked for before
        // that was over, and another one was dropped.
        let mut passing = Passing::new("second".into(), 9);
        let gone = v1::Deleted { id: "dropped".into() };
        for event in [
            asked("first", 2),
            ended("first", 3),
            asked("second", 4),
            sent("said", 5),
            asked("dropped", 6),
            asked("third", 7),
            event("message.deleted", 8, Payload::Deleted(gone)),
        ] {
            assert_eq!(passing.pass(&event), None);
        }
        assert_eq!(passing.pass(&ended("second", 9)), Some(vec!["third".to_owned()]));
        // What has more turns than there are is told what happens from now on.
        let mut passing = Passing::new(String::new(), 3);
        assert_eq!(passing.pass(&asked("first", 2)), None);
        assert_eq!(passing.pass(&ended("first", 3)), Some(Vec::new()));
    }

    #[test]
    fn a_message_that_was_sent_before_is_found_behind_what_happened_earlier() {
        let mut follow = Follow::again("own".into());
        // What the agent said asks for no turn.
        for event in [
            asked("first", 2),
            sent("said", 3),
            asked("second", 4),
            ended("first", 5),
            asked("own", 6),
        ] {
            assert!(follow.see(&event).is_none() && !follow.is_ours());
        }
        assert!(follow.see(&asked("later", 7)).is_none() && !follow.is_ours());
        assert!(follow.see(&ended("second", 8)).is_none() && follow.is_ours());
        assert!(matches!(follow.see(&ended("own", 9)), Some(Ended::Turn(_))));
    }

    #[test]
    fn what_others_are_told_is_not_ours() {
        let mut follow = Follow::new("own".into(), &task(v1::TaskPhase::InvokeModel, 5));
        assert!(follow.see(&sent("own", 6)).is_none() && !follow.is_ours());
        assert!(follow.see(&ended("other", 7)).is_none() && follow.is_ours());
    }
}
