//! A session: a task, its transcript as turns.

use std::collections::HashMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use construct_proto::v1::{self, block::Block};
use prost::Message as _;
use serde_json::{Value, json};

use super::{
    answer::{Failure, Outcome},
    calls::Calls,
    tools,
};
use crate::limit::Share;

/// The latest messages of a session that are shown at most, and how many bytes they may have.
/// Nobody reads more in one line.
const MESSAGES: usize = 10_000;
const BYTES: usize = 8 << 20;
/// Bytes of what tools were given and gave that a session is shown with at most; of the oldest
/// calls it is left out.
const KEPT: usize = 4 << 20;

/// Messages that are read at once. Each can have a megabyte.
const PAGE: i32 = 32;
/// How often what is shown of a session is in memory: as it was read, and as it is told.
const FORMS: usize = 2;

/// A session as it stands.
pub(super) struct Session {
    pub(super) task: v1::Task,
    pub(super) turns: Vec<Turn>,
    /// Turns before these are not shown.
    pub(super) is_cut: bool,
}

/// A user's message, and what came of it.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// Id of the user's message.
    pub(super) id: String,
    asked: Vec<Value>,
    pub(super) said: Vec<Value>,
    tools: Vec<Value>,
    pub(super) usage: (i64, i64),
    time: Option<String>,
}

impl Session {
    /// The session of a task. `room` grows with what is in memory of it.
    pub(super) async fn load(
        calls: &Calls,
        task: v1::Task,
        room: &mut Share,
    ) -> Result<Self, Failure> {
        let mut latest = Latest::default();
        // From the latest on, so that of a long session the end is shown.
        let order_by = "position desc".to_owned();
        let mut page = v1::PageRequest { page_size: PAGE, order_by, ..v1::PageRequest::default() };
        loop {
            let request = v1::ListMessagesRequest {
                task: task
                    .metadata
                    .as_ref()
                    .map(|metadata| metadata.id.clone())
                    .unwrap_or_default(),
                page: Some(page.clone()),
                ..v1::ListMessagesRequest::default()
            };
            let found: v1::ListMessagesResponse =
                calls.unary("MessageService/ListMessages", &request).await?;
            let bytes: usize = found.messages.iter().map(v1::Message::encoded_len).sum();
            room.grow(FORMS * bytes).map_err(|full| full.status("sessions that are not read"))?;
            let is_cut = !latest.extend(found.messages, MESSAGES, BYTES, KEPT);
            page.page_token = found.page.unwrap_or_default().next_page_token;
            if is_cut || page.page_token.is_empty() {
                return Ok(Self { task, turns: turns(latest.messages.into_iter().rev()), is_cut });
            }
        }
    }

    pub(super) fn agent(&self) -> &str {
        self.task.spec.as_ref().map_or("", |spec| &spec.agent)
    }

    /// A result about the turn of a message: what the agent said in it, and every turn up to now.
    pub(super) fn outcome<'a>(
        &'a mut self,
        session: &'a str,
        message: &str,
        stop: &'a str,
    ) -> Outcome<'a> {
        let turn = self.turns.iter().find(|turn| turn.id == message);
        Outcome {
            content: turn.map(|turn| turn.said.clone()).unwrap_or_default(),
            usage: turn.map(|turn| turn.usage).unwrap_or_default(),
            turns: std::mem::take(&mut self.turns).into_iter().map(Turn::shown).collect(),
            session,
            agent: self.agent(),
            is_cut: self.is_cut,
            stop,
        }
    }

    /// The session as it is listed, and with its turns when it is exported.
    pub(super) fn exported(self) -> Value {
        let mut session = listed(&self.task);
        session["turns"] = self.turns.into_iter().map(Turn::shown).collect();
        if self.is_cut {
            session["turnsCut"] = true.into();
        }
        session
    }
}

/// What a list says about a session.
pub(super) fn listed(task: &v1::Task) -> Value {
    let metadata = task.metadata.clone().unwrap_or_default();
    let (spec, status) =
        (task.spec.clone().unwrap_or_default(), task.status.clone().unwrap_or_default());
    json!({
        "sessionID": metadata.id,
        "agentID": spec.agent,
        "title": spec.title,
        "state": status.phase().as_str_name().trim_start_matches("TASK_PHASE_").to_lowercase(),
        "createdAt": time(metadata.created_at),
        "updatedAt": time(metadata.updated_at),
        "messages": status.message_count,
    })
}

/// A time as RFC 3339 has it.
pub(super) fn time(time: Option<prost_types::Timestamp>) -> Option<String> {
    let time = time?;
    jiff::Timestamp::new(time.seconds, time.nanos).ok().map(|time| time.to_string())
}

/// The latest messages, the last one first.
#[derive(Default)]
struct Latest {
    messages: Vec<v1::Message>,
    /// What all have, and what their tools were given and gave.
    bytes: usize,
    kept: usize,
}

impl Latest {
    /// Adds earlier messages. False: no further ones, because there are so many, or they have so
    /// many bytes.
    fn extend(
        &mut self,
        earlier: Vec<v1::Message>,
        messages: usize,
        bytes: usize,
        kept: usize,
    ) -> bool {
        for mut message in earlier {
            self.kept +=
                uses(&message).map(|it| it.arguments.len() + it.result.len()).sum::<usize>();
            if self.kept > kept {
                forget(&mut message);
            }
            self.bytes += message.encoded_len();
            if self.messages.len() == messages || self.bytes > bytes {
                return false;
            }
            self.messages.push(message);
        }
        true
    }
}

/// The tool calls of a message.
fn uses(message: &v1::Message) -> impl Iterator<Item = &v1::ToolUse> {
    message.spec.iter().flat_map(|spec| &spec.blocks).flat_map(|block| match &block.block {
        Some(Block::CodeInterpreterResult(result)) => result.tool_uses.as_slice(),
        _ => &[],
    })
}

/// Leaves out what is kept of a message's calls.
fn forget(message: &mut v1::Message) {
    let blocks = message.spec.iter_mut().flat_map(|spec| &mut spec.blocks);
    let uses = blocks.flat_map(|block| match &mut block.block {
        Some(Block::CodeInterpreterResult(result)) => result.tool_uses.as_mut_slice(),
        _ => &mut [],
    });
    for it in uses {
        it.arguments.clear();
        it.result.clear();
    }
}

fn turns(messages: impl Iterator<Item = v1::Message>) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    // Scripts whose results are to come, by the ids of their calls.
    let mut scripts = HashMap::new();
    for message in messages {
        let (spec, status) = (message.spec.unwrap_or_default(), message.status.unwrap_or_default());
        let metadata = message.metadata.unwrap_or_default();
        if status.source() == v1::MessageSource::User {
            let asked = spec.blocks.iter().filter_map(asked).collect();
            let time = time(metadata.created_at);
            turns.push(Turn { id: metadata.id, asked, time, ..Turn::default() });
            continue;
        }
        // What is said before anybody asked belongs to no turn; a copied conversation may begin
        // like that, and one that is cut.
        let Some(turn) = turns.last_mut() else { continue };
        if let Some(usage) = &status.usage {
            turn.usage.0 += usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens;
            turn.usage.1 += usage.output_tokens;
        }
        for block in &spec.blocks {
            if let Some(Block::CodeInterpreterCall(call)) = &block.block {
                scripts.insert(call.id.clone(), call.code.clone());
            }
            if let Some(Block::CodeInterpreterResult(result)) = &block.block {
                let script = scripts.remove(&result.id);
                turn.tools.extend(executed(result, script, time(metadata.created_at)));
            } else if status.source() == v1::MessageSource::Assistant {
                turn.said.extend(said(block));
            }
        }
    }
    turns
}

fn asked(block: &v1::Block) -> Option<Value> {
    match block.block.as_ref()? {
        Block::Text(text) => Some(json!({"type": "text", "text": text.text})),
        Block::Attachment(it) if it.media_type.starts_with("image/") => {
            Some(json!({"type": "image", "url": address(it), "mimeType": it.media_type}))
        }
        Block::Attachment(it) if it.file.is_empty() => {
            Some(json!({"type": "file", "path": it.name, "size": it.data.len()}))
        }
        Block::Attachment(it) => {
            Some(json!({"type": "file", "path": it.name, "size": it.size, "url": address(it)}))
        }
        _ => None,
    }
}

/// Where what is attached can be had: at the gateway, or in the address itself.
fn address(attachment: &v1::Attachment) -> String {
    match attachment.file.as_str() {
        "" => {
            format!("data:{};base64,{}", attachment.media_type, STANDARD.encode(&attachment.data))
        }
        file => format!("/v1/files/{file}/content"),
    }
}

/// What the agent said, as a block of a response.
pub(super) fn said(block: &v1::Block) -> Option<Value> {
    match block.block.as_ref()? {
        Block::Text(text) => Some(json!({"type": "text", "text": text.text})),
        Block::CodeInterpreterCall(call) => {
            Some(json!({"type": "code", "language": "javascript", "source": call.code}))
        }
        Block::Attachment(it) if it.media_type.starts_with("image/") => {
            Some(json!({"type": "image", "url": address(it), "alt": it.name}))
        }
        _ => None,
    }
}

/// A script, and the tools it called, with what was kept of what they were given and gave.
fn executed(
    result: &v1::CodeInterpreterResult,
    script: Option<String>,
    time: Option<String>,
) -> Vec<Value> {
    let mut script = json!({
        "id": result.id,
        "name": "code_interpreter",
        "input": script.map_or_else(|| json!({}), |code| json!({"code": code})),
        "result": result.output,
        "executedAt": time,
    });
    if !result.error.is_empty() {
        script["error"] = result.error.clone().into();
    }
    let tool = |tool: &v1::ToolUse| {
        let mut call = json!({
            "id": tools::id(&result.id, "", tool.number),
            "name": tool.name,
            "input": tools::input(&tool.arguments),
            "result": if tool.succeeded { tool.result.as_str() } else { "" },
            "executedAt": time,
        });
        if !tool.succeeded {
            let error = if tool.result.is_empty() { "TOOL_EXECUTION_FAILED" } else { &tool.result };
            call["error"] = error.into();
        }
        call
    };
    let mut all: Vec<Value> = result.tool_uses.iter().map(tool).collect();
    all.push(script);
    all
}

impl Turn {
    pub(super) fn shown(self) -> Value {
        json!({
            "id": self.id,
            "request": {"role": "user", "content": self.asked},
            "response": {"role": "assistant", "content": self.said},
            "toolCalls": self.tools,
            "usage": {"inputTokens": self.usage.0, "outputTokens": self.usage.1},
            "time": self.time,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bytes: usize) -> v1::Message {
        let (arguments, result) = ("a".repeat(bytes / 2), "r".repeat(bytes - bytes / 2));
        let call = v1::ToolUse {
            number: 1,
            name: "grep".to_owned(),
            arguments,
            result,
            ..v1::ToolUse::default()
        };
        let result = v1::CodeInterpreterResult {
            tool_uses: vec![call],
            ..v1::CodeInterpreterResult::default()
        };
        let block = v1::Block { block: Some(Block::CodeInterpreterResult(result)) };
        let spec = v1::MessageSpec { blocks: vec![block], ..v1::MessageSpec::default() };
        v1::Message { spec: Some(spec), ..v1::Message::default() }
    }

    #[test]
    fn of_the_oldest_calls_it_is_left_out_what_tools_were_given_and_gave() {
        let mut latest = Latest::default();
        for (more, expected) in [
            (vec![5, 4], vec![5, 4]),
            (vec![1], vec![5, 4, 1]),
            (vec![1, 0, 3], vec![5, 4, 1, 0, 0, 0]),
        ] {
            assert!(latest.extend(more.into_iter().map(message).collect(), 100, 1000, 10));
            let left = latest
                .messages
                .iter()
                .flat_map(uses)
                .map(|it| it.arguments.len() + it.result.len());
            assert_eq!(left.collect::<Vec<_>>(), expected);
        }
        assert!(latest.messages.iter().flat_map(uses).all(|it| it.name == "grep"));
    }

    #[test]
    fn the_latest_messages_are_kept_up_to_a_number_and_to_a_size() {
        let mut latest = Latest::default();
        assert!(latest.extend(vec![message(1), message(1)], 3, 1000, 10));
        assert!(!latest.extend(vec![message(1), message(1)], 3, 1000, 10));
        assert_eq!(latest.messages.len(), 3);
        let (mut latest, one) = (Latest::default(), message(0).encoded_len());
        assert!(latest.extend(vec![message(0), message(0)], 100, 2 * one, 10));
        assert!(!latest.extend(vec![message(0)], 100, 2 * one, 10));
        assert_eq!(latest.messages.len(), 2);
        // What is left out of it does not count.
        let (mut latest, bare) = (Latest::default(), message(0).encoded_len());
        assert!(latest.extend(vec![message(20)], 100, bare, 10));
    }
}
