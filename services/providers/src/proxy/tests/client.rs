//! Clients of each protocol: their requests, and how they parse an answer.

use serde_json::{Value, json};

/// A client protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Client {
    Chat,
    Responses,
    Messages,
}

/// A parsed answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Read {
    pub(super) text: String,
    pub(super) thought: String,
    /// Id, name and arguments.
    pub(super) calls: Vec<(String, String, Value)>,
    pub(super) stop: String,
    /// Input tokens, cached input tokens, output tokens.
    pub(super) usage: (i64, i64, i64),
    /// The answer as the client sends it back.
    pub(super) back: Vec<Value>,
}

impl Client {
    pub(super) const ALL: [Self; 3] = [Self::Chat, Self::Responses, Self::Messages];

    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
        }
    }

    /// A request with a tool.
    pub(super) fn question(self, model: &str, stream: bool) -> Value {
        let schema = json!({"type": "object", "properties": {"code": {"type": "string"}}});
        match self {
            Self::Chat => {
                json!({"model": model, "stream": stream, "stream_options": {"include_usage": true},
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}],
                "tools": [{"type": "function", "function":
                    {"name": "code_interpreter", "description": "Runs.", "parameters": schema}}]})
            }
            Self::Responses => {
                json!({"model": model, "stream": stream, "instructions": "Be brief.", "input": "go",
                "tools": [{"type": "function", "name": "code_interpreter", "description": "Runs.",
                    "parameters": schema, "strict": false}]})
            }
            Self::Messages => {
                json!({"model": model, "stream": stream, "max_tokens": 1000, "system": "Be brief.",
                "messages": [{"role": "user", "content": "go"}],
                "tools": [{"name": "code_interpreter", "description": "Runs.", "input_schema": schema}]})
            }
        }
    }

    /// The request again, with the answer and the result of its call.
    pub(super) fn went_on(self, mut question: Value, read: &Read) -> Value {
        let id = &read.calls[0].0;
        let (list, result) = match self {
            Self::Chat => {
                ("messages", json!({"role": "tool", "tool_call_id": id, "content": "it gave 7"}))
            }
            Self::Responses => {
                question["input"] = json!([{"role": "user", "content": "go"}]);
                (
                    "input",
                    json!({"type": "function_call_output", "call_id": id, "output": "it gave 7"}),
                )
            }
            Self::Messages => {
                let block =
                    json!({"type": "tool_result", "tool_use_id": id, "content": "it gave 7"});
                ("messages", json!({"role": "user", "content": [block]}))
            }
        };
        let messages = question[list].as_array_mut().expect("a list");
        messages.extend(read.back.clone());
        messages.push(result);
        question
    }

    pub(super) fn assemble(self, body: &Value) -> Read {
        match self {
            Self::Chat => chat(body),
            Self::Responses => responses(body),
            Self::Messages => messages(body),
        }
    }

    /// The answer of a stream of events, put together as the vendors' SDKs do.
    pub(super) fn streamed(self, stream: &str) -> Read {
        let events = events(stream);
        match self {
            Self::Chat => self.assemble(&chat_of(&events)),
            Self::Responses => {
                for (at, event) in events.iter().enumerate() {
                    assert_eq!(event["sequence_number"], at);
                }
                let last = events.last().expect("an event");
                let read = self.assemble(&last["response"]);
                let pieces = |kind: &str| -> String {
                    events
                        .iter()
                        .filter(|event| event["type"] == kind)
                        .filter_map(|event| event["delta"].as_str())
                        .collect()
                };
                assert_eq!(pieces("response.output_text.delta"), read.text);
                assert_eq!(pieces("response.reasoning_summary_text.delta"), read.thought);
                let items: Vec<&Value> = events
                    .iter()
                    .filter(|event| event["type"] == "response.output_item.done")
                    .map(|event| &event["item"])
                    .collect();
                assert_eq!(json!(items), last["response"]["output"]);
                read
            }
            Self::Messages => self.assemble(&messages_of(&events)),
        }
    }

    /// The kind and the message of an error.
    pub(super) fn error(self, body: &Value) -> (String, String) {
        let error = &body["error"];
        if self == Self::Messages {
            assert_eq!(body["type"], "error", "{body}");
        }
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        (text("type"), text("message"))
    }
}

/// The data of every event.
pub(super) fn events(stream: &str) -> Vec<Value> {
    let mut events = Vec::new();
    for event in stream.split_terminator("\n\n") {
        let data: String = event.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        if !data.is_empty() && data != "[DONE]" {
            let data: Value =
                serde_json::from_str(&data).unwrap_or_else(|error| panic!("{error}: {event}"));
            if let Some(name) = event.lines().find_map(|line| line.strip_prefix("event: ")) {
                assert_eq!(data["type"], name);
            }
            events.push(data);
        }
    }
    events
}

fn int(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("not a number: {value}"))
}

fn parsed(arguments: &Value) -> Value {
    serde_json::from_str(arguments.as_str().expect("a text")).expect("JSON")
}

fn chat(body: &Value) -> Read {
    assert_eq!(body["object"], "chat.completion");
    let choice = &body["choices"][0];
    let message = &choice["message"];
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let usage = &body["usage"];
    Read {
        text: message["content"].as_str().unwrap_or_default().to_owned(),
        thought: message["reasoning_content"].as_str().unwrap_or_default().to_owned(),
        calls: calls
            .map(|call| {
                let text = |value: &Value| value.as_str().expect("a text").to_owned();
                (
                    text(&call["id"]),
                    text(&call["function"]["name"]),
                    parsed(&call["function"]["arguments"]),
                )
            })
            .collect(),
        stop: choice["finish_reason"].as_str().expect("a reason").to_owned(),
        usage: (
            int(&usage["prompt_tokens"]),
            int(&usage["prompt_tokens_details"]["cached_tokens"]),
            int(&usage["completion_tokens"]),
        ),
        back: vec![message.clone()],
    }
}

fn chat_of(events: &[Value]) -> Value {
    let mut message = json!({"role": "assistant", "content": ""});
    let (mut reason, mut usage) = (Value::Null, Value::Null);
    let grow = |value: &mut Value, more: &Value| {
        if let Some(more) = more.as_str() {
            *value = json!(value.as_str().unwrap_or_default().to_owned() + more);
        }
    };
    for event in events {
        assert_eq!(event["object"], "chat.completion.chunk", "{event}");
        if !event["usage"].is_null() {
            usage = event["usage"].clone();
        }
        let choice = &event["choices"][0];
        if !choice["finish_reason"].is_null() {
            reason = choice["finish_reason"].clone();
        }
        for key in ["content", "reasoning_content"] {
            let more = choice["delta"][key].clone();
            if !more.is_null() {
                grow(&mut message[key], &more);
            }
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let at = usize::try_from(int(&call["index"])).expect("an index");
            if message["tool_calls"].is_null() {
                message["tool_calls"] = json!([]);
            }
            let calls = message["tool_calls"].as_array_mut().expect("a list");
            if calls.len() == at {
                calls.push(call.clone());
            } else {
                grow(&mut calls[at]["function"]["arguments"], &call["function"]["arguments"]);
            }
        }
    }
    json!({"object": "chat.completion", "usage": usage, "choices": [{"message": message, "finish_reason": reason}]})
}

fn responses(body: &Value) -> Read {
    assert_eq!(body["object"], "response");
    let output = body["output"].as_array().expect("a list");
    let usage = &body["usage"];
    let mut read = Read {
        stop: body["status"].as_str().expect("a status").to_owned(),
        usage: (
            int(&usage["input_tokens"]),
            int(&usage["input_tokens_details"]["cached_tokens"]),
            int(&usage["output_tokens"]),
        ),
        back: output.clone(),
        ..Read::default()
    };
    for item in output {
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        match item["type"].as_str() {
            Some("message") => {
                read.text.push_str(item["content"][0]["text"].as_str().expect("a text"))
            }
            Some("reasoning") => {
                read.thought.push_str(item["summary"][0]["text"].as_str().unwrap_or_default())
            }
            Some("function_call") => {
                read.calls.push((
                    text(&item["call_id"]),
                    text(&item["name"]),
                    parsed(&item["arguments"]),
                ));
            }
            other => panic!("{other:?}"),
        }
    }
    read
}

fn messages(body: &Value) -> Read {
    assert_eq!(body["type"], "message");
    let content = body["content"].as_array().expect("a list");
    let usage = &body["usage"];
    let cached = int(&usage["cache_read_input_tokens"]);
    let mut read = Read {
        stop: body["stop_reason"].as_str().expect("a reason").to_owned(),
        usage: (
            int(&usage["input_tokens"]) + cached + int(&usage["cache_creation_input_tokens"]),
            cached,
            int(&usage["output_tokens"]),
        ),
        back: vec![json!({"role": "assistant", "content": content})],
        ..Read::default()
    };
    for block in content {
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        match block["type"].as_str() {
            Some("text") => read.text.push_str(block["text"].as_str().expect("a text")),
            Some("thinking") => read.thought.push_str(block["thinking"].as_str().expect("a text")),
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                read.calls.push((text(&block["id"]), text(&block["name"]), block["input"].clone()))
            }
            other => panic!("{other:?}"),
        }
    }
    read
}

fn messages_of(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    let mut json_of: Vec<String> = Vec::new();
    for event in &events[1..] {
        let at = event["index"].as_u64().and_then(|at| usize::try_from(at).ok());
        match event["type"].as_str() {
            Some("content_block_start") => {
                let content = message["content"].as_array_mut().expect("a list");
                assert_eq!(at, Some(content.len()));
                content.push(event["content_block"].clone());
                json_of.push(String::new());
            }
            Some("content_block_delta") => {
                let at = at.expect("an index");
                let block = &mut message["content"][at];
                let delta = &event["delta"];
                let (key, more) = match delta["type"].as_str() {
                    Some("text_delta") => ("text", &delta["text"]),
                    Some("thinking_delta") => ("thinking", &delta["thinking"]),
                    Some("signature_delta") => ("signature", &delta["signature"]),
                    Some("input_json_delta") => {
                        json_of[at].push_str(delta["partial_json"].as_str().expect("a text"));
                        continue;
                    }
                    other => panic!("{other:?}"),
                };
                block[key] = json!(
                    block[key].as_str().expect("a text").to_owned()
                        + more.as_str().expect("a text")
                );
            }
            Some("content_block_stop") => {
                let at = at.expect("an index");
                if !json_of[at].is_empty() {
                    message["content"][at]["input"] =
                        serde_json::from_str(&json_of[at]).expect("JSON");
                }
            }
            Some("message_delta") => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["usage"] = event["usage"].clone();
            }
            Some("message_stop") => return message,
            Some("ping") => {}
            other => panic!("{other:?}"),
        }
    }
    panic!("the stream does not end: {events:?}")
}
