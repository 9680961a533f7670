//! A session: a task with its transcript as turns.

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
use crate::limit::Permit;

/// Maximum number of messages shown of a session, the latest ones, and their maximum size in bytes.
/// Nobody reads more in one line.
const MAX_MESSAGES: usize = 10_000;
const MAX_BYTES: usize = 8 << 20;
/// Maximum size of the inputs and outputs of tools shown in a session, in bytes. Those of the
/// oldest calls are dropped.
const MAX_TOOL_BYTES: usize = 4 << 20;

/// Messages read at once. Each can have a megabyte.
const PAGE_SIZE: i32 = 32;
/// Number of copies of a session in memory: as read, and as sent.
const COPIES: usize = 2;

/// The current state of a session.
pub(super) struct Session {
    pub(super) task: v1::Task,
    pub(super) turns: Vec<Turn>,
    /// Earlier turns are not shown.
    pub(super) is_cut: bool,
}

/// A user's message and the response to it.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// Id of the user's message.
    pub(super) id: String,
    request: Vec<Value>,
    pub(super) response: Vec<Value>,
    tools: Vec<Value>,
    pub(super) usage: (i64, i64),
    time: Option<String>,
}

impl Session {
    /// Loads the session of a task. `memory` grows with its size.
    pub(super) async fn load(
        calls: &Calls,
        task: v1::Task,
        memory: &mut Permit,
    ) -> Result<Self, Failure> {
        let mut latest = Latest::default();
        // Reads from the latest message, so that the end of a long session is shown.
        let order_by = "position desc".to_owned();
        let mut page =
            v1::PageRequest { page_size: PAGE_SIZE, order_by, ..v1::PageRequest::default() };
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
            memory.grow(COPIES * bytes).map_err(|full| full.status("unread sessions"))?;
            let is_cut = !latest.extend(found.messages, MAX_MESSAGES, MAX_BYTES, MAX_TOOL_BYTES);
            page.page_token = found.page.unwrap_or_default().next_page_token;
            if is_cut || page.page_token.is_empty() {
                return Ok(Self { task, turns: turns(latest.messages.into_iter().rev()), is_cut });
            }
        }
    }

    pub(super) fn agent(&self) -> &str {
        self.task.spec.as_ref().map_or("", |spec| &spec.agent)
    }

    /// A result for the turn of a message: the agent's response, and all turns so far.
    pub(super) fn outcome<'a>(
        &'a mut self,
        session: &'a str,
        message: &str,
        stop: &'a str,
    ) -> Outcome<'a> {
        let turn = self.turns.iter().find(|turn| turn.id == message);
        Outcome {
            content: turn.map(|turn| turn.response.clone()).unwrap_or_default(),
            usage: turn.map(|turn| turn.usage).unwrap_or_default(),
            turns: std::mem::take(&mut self.turns).into_iter().map(Turn::into_json).collect(),
            session,
            agent: self.agent(),
            is_cut: self.is_cut,
            stop,
        }
    }

    /// The summary of the session with its turns.
    pub(super) fn export(self) -> Value {
        let mut session = summary(&self.task);
        session["turns"] = self.turns.into_iter().map(Turn::into_json).collect();
        if self.is_cut {
            session["turnsCut"] = true.into();
        }
        session
    }
}

/// The summary of a session.
pub(super) fn summary(task: &v1::Task) -> Value {
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

/// A time in RFC 3339.
pub(super) fn time(time: Option<prost_types::Timestamp>) -> Option<String> {
    let time = time?;
    jiff::Timestamp::new(time.seconds, time.nanos).ok().map(|time| time.to_string())
}

/// The latest messages, the last one first.
#[derive(Default)]
struct Latest {
    messages: Vec<v1::Message>,
    /// Size of all messages, and of the inputs and outputs of their tools, in bytes.
    bytes: usize,
    tool_bytes: usize,
}

impl Latest {
    /// Adds earlier messages. Returns `false` when a limit is reached.
    fn extend(
        &mut self,
        earlier: Vec<v1::Message>,
        messages: usize,
        bytes: usize,
        tool_bytes: usize,
    ) -> bool {
        for mut message in earlier {
            self.tool_bytes +=
                tool_uses(&message).map(|it| it.arguments.len() + it.result.len()).sum::<usize>();
            if self.tool_bytes > tool_bytes {
                drop_tool_data(&mut message);
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
fn tool_uses(message: &v1::Message) -> impl Iterator<Item = &v1::ToolUse> {
    message.spec.iter().flat_map(|spec| &spec.blocks).flat_map(|block| match &block.block {
        Some(Block::CodeInterpreterResult(result)) => result.tool_uses.as_slice(),
        _ => &[],
    })
}

/// Drops the inputs and outputs of a message's calls.
fn drop_tool_data(message: &mut v1::Message) {
    let blocks = message.spec.iter_mut().flat_map(|spec| &mut spec.blocks);
    let tool_uses = blocks.flat_map(|block| match &mut block.block {
        Some(Block::CodeInterpreterResult(result)) => result.tool_uses.as_mut_slice(),
        _ => &mut [],
    });
    for it in tool_uses {
        it.arguments.clear();
        it.result.clear();
    }
}

fn turns(messages: impl Iterator<Item = v1::Message>) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    // Scripts without results so far, by the ids of their calls.
    let mut scripts = HashMap::new();
    for message in messages {
        let (spec, status) = (message.spec.unwrap_or_default(), message.status.unwrap_or_default());
        let metadata = message.metadata.unwrap_or_default();
        if status.source() == v1::MessageSource::User {
            let request = spec.blocks.iter().filter_map(request_block).collect();
            let time = time(metadata.created_at);
            turns.push(Turn { id: metadata.id, request, time, ..Turn::default() });
            continue;
        }
        // Responses before the first user message belong to no turn: a forked or cut conversation
        // may begin with them.
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
                turn.tools.extend(script_calls(result, script, time(metadata.created_at)));
            } else if status.source() == v1::MessageSource::Assistant {
                turn.response.extend(response_block(block));
            }
        }
    }
    turns
}

fn request_block(block: &v1::Block) -> Option<Value> {
    match block.block.as_ref()? {
        Block::Text(text) => Some(json!({"type": "text", "text": text.text})),
        Block::Attachment(it) if it.media_type.starts_with("image/") => {
            Some(json!({"type": "image", "url": attachment_url(it), "mimeType": it.media_type}))
        }
        Block::Attachment(it) if it.file.is_empty() => {
            Some(json!({"type": "file", "path": it.name, "size": it.data.len()}))
        }
        Block::Attachment(it) => Some(
            json!({"type": "file", "path": it.name, "size": it.size, "url": attachment_url(it)}),
        ),
        _ => None,
    }
}

/// The address of an attachment: at the gateway, or a data URL.
fn attachment_url(attachment: &v1::Attachment) -> String {
    match attachment.file.as_str() {
        "" => {
            format!("data:{};base64,{}", attachment.media_type, STANDARD.encode(&attachment.data))
        }
        file => format!("/v1/files/{file}/content"),
    }
}

/// A block of the agent's response.
pub(super) fn response_block(block: &v1::Block) -> Option<Value> {
    match block.block.as_ref()? {
        Block::Text(text) => Some(json!({"type": "text", "text": text.text})),
        Block::CodeInterpreterCall(call) => {
            Some(json!({"type": "code", "language": "javascript", "source": call.code}))
        }
        Block::Attachment(it) if it.media_type.starts_with("image/") => {
            Some(json!({"type": "image", "url": attachment_url(it), "alt": it.name}))
        }
        _ => None,
    }
}

/// A script and its tool calls, with their stored inputs and outputs.
fn script_calls(
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
    pub(super) fn into_json(self) -> Value {
        json!({
            "id": self.id,
            "request": {"role": "user", "content": self.request},
            "response": {"role": "assistant", "content": self.response},
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
    fn tool_data_of_the_oldest_calls_is_dropped() {
        let mut latest = Latest::default();
        for (more, expected) in [
            (vec![5, 4], vec![5, 4]),
            (vec![1], vec![5, 4, 1]),
            (vec![1, 0, 3], vec![5, 4, 1, 0, 0, 0]),
        ] {
            assert!(latest.extend(more.into_iter().map(message).collect(), 100, 1000, 10));
            let remaining = latest
                .messages
                .iter()
                .flat_map(tool_uses)
                .map(|it| it.arguments.len() + it.result.len());
            assert_eq!(remaining.collect::<Vec<_>>(), expected);
        }
        assert!(latest.messages.iter().flat_map(tool_uses).all(|it| it.name == "grep"));
    }

    #[test]
    fn latest_messages_are_limited_in_number_and_size() {
        let mut latest = Latest::default();
        assert!(latest.extend(vec![message(1), message(1)], 3, 1000, 10));
        assert!(!latest.extend(vec![message(1), message(1)], 3, 1000, 10));
        assert_eq!(latest.messages.len(), 3);
        let (mut latest, one) = (Latest::default(), message(0).encoded_len());
        assert!(latest.extend(vec![message(0), message(0)], 100, 2 * one, 10));
        assert!(!latest.extend(vec![message(0)], 100, 2 * one, 10));
        assert_eq!(latest.messages.len(), 2);
        // Dropped data does not count.
        let (mut latest, bare) = (Latest::default(), message(0).encoded_len());
        assert!(latest.extend(vec![message(20)], 100, bare, 10));
    }
}
