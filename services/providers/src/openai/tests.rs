use construct_proto::{
    mesh::v1::{ChatMessage, FailureClass, model_completed::StopReason},
    v1::{
        self, CodeInterpreterCall, CodeInterpreterResult, MessageSource, ModelParameters,
        ModelProviderType, Text,
    },
};
use construct_tests::vendor::{VendorServer, openai as recorded};
use futures::TryStreamExt as _;
use v1::block::Block as Piece;

use super::{events::WireUsage, *};
use crate::{
    answer::{Answer, CompletedAnswer},
    call::tests::{NO_DELAY_POLICY, command, run},
    cancels::CancelSignal,
    delta::tests::RecordingProgress,
    tests::{completed, open, read_at_every_split},
};

const TEST_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<Chunk>, Failure> {
    crate::tests::read::<Wire>(pieces)
}

fn request() -> Request {
    Request::from_command(&command("count the lines")).expect("the command is whole")
}

fn complete(wire: &str) -> (CompletedAnswer, Usage) {
    let mut answer = Answer::new(&request());
    let chunks = read([wire.as_bytes()]).expect("the stream is whole");
    let usage = crate::meter::tests::used(&request(), &chunks, true);
    for chunk in chunks {
        answer.push(chunk).expect("in bounds");
    }
    (answer.complete(), usage)
}

/// The calls of an answer as `id: code`.
fn calls(completed: &CompletedAnswer) -> Vec<String> {
    completed
        .blocks
        .iter()
        .filter_map(|block| match &block.block {
            Some(Piece::CodeInterpreterCall(call)) => Some(format!("{}: {}", call.id, call.code)),
            _ => None,
        })
        .collect()
}

fn events(data: &[Value]) -> String {
    data.iter().map(|data| format!("data: {data}\n\n")).collect()
}

#[test]
fn every_recording_parses_the_same_at_every_split() {
    let built = recorded::Answer::text("Grüße 😀").and_code("call_1", "print('ä')").wire();
    for recording in [
        recorded::RECORDED_CALL,
        recorded::RECORDED_XAI,
        recorded::RECORDED_OLLAMA,
        recorded::RECORDED_OPENROUTER,
        recorded::RECORDED_OPENROUTER_REASONING,
        recorded::RECORDED_DEEPSEEK,
        &built,
    ] {
        read_at_every_split::<Wire>(recording.as_bytes());
    }
}

#[test]
fn reasoning_comes_before_its_answer() {
    let (completed, usage) = complete(recorded::RECORDED_DEEPSEEK);
    let [thinking, text] = &completed.blocks[..] else { panic!("not two blocks: {completed:?}") };
    assert!(
        matches!(&thinking.block, Some(Piece::Thinking(thinking)) if thinking.text == "9.8 is 9.80 — 更大.")
    );
    assert!(matches!(&text.block, Some(Piece::Text(text)) if text.text == "9.8"));
    assert_eq!(
        usage,
        Usage {
            input_tokens: 8,
            output_tokens: 90,
            cache_read_tokens: 10,
            thinking_tokens: 80,
            ..Usage::default()
        }
    );
}

/// Calls of other tools than the code tool become scripts.
#[test]
fn openai_stream_is_read() {
    let (completed, usage) = complete(recorded::RECORDED_CALL);
    assert_eq!(
        completed.blocks[0].block,
        Some(Piece::Text(Text { text: "Hello — こんにちは.".into() }))
    );
    let expected = "call_DdmO9pD3xa9XTPNJ32zg2hcA: get_weather({\"location\":\"Paris, France\"})";
    assert_eq!(calls(&completed), [expected]);
    assert_eq!(completed.stop_reason, StopReason::ToolUse);
    assert_eq!(usage, Usage { input_tokens: 19, output_tokens: 10, ..Usage::default() });
}

#[test]
fn xai_stream_is_read_and_reasoning_is_billed() {
    let (completed, usage) = complete(recorded::RECORDED_XAI);
    let [thinking, text, _call] = &completed.blocks[..] else {
        panic!("not three blocks: {completed:?}")
    };
    assert!(
        matches!(&thinking.block, Some(Piece::Thinking(thinking)) if thinking.text == "First, 42 — 答え.")
    );
    assert_eq!(text.block, Some(Piece::Text(Text { text: "Ah,".into() })));
    let expected =
        "call_63019942: get_temperature({\"location\":\"San Francisco\",\"unit\":\"°F\"})";
    assert_eq!(calls(&completed), [expected]);
    assert_eq!(
        usage,
        Usage {
            input_tokens: 29,
            output_tokens: 763,
            cache_read_tokens: 8,
            thinking_tokens: 233,
            ..Usage::default()
        }
    );
}

#[test]
fn reasoning_details_are_kept_for_replay() {
    let (completed, usage) = complete(recorded::RECORDED_OPENROUTER_REASONING);
    assert_eq!(calls(&completed), ["toolu_1: 1 + 1"]);
    let thoughts: Vec<&v1::Thinking> = completed
        .blocks
        .iter()
        .filter_map(|block| match &block.block {
            Some(Piece::Thinking(thinking)) => Some(thinking),
            _ => None,
        })
        .collect();
    assert_eq!(thoughts[0].text, "Let me think — 考える.", "not twice");
    let kept: Value = thoughts
        .iter()
        .find_map(|thought| serde_json::from_str(&thought.data).ok())
        .expect("a list");
    let expected = json!([{"type": "reasoning.text", "text": "Let me think — 考える.", "format": "anthropic-claude-v1",
        "index": 0, "signature": "sha256:abc123def456"}]);
    assert_eq!(kept, expected);
    assert_eq!(
        usage,
        Usage {
            input_tokens: 94,
            output_tokens: 20,
            cache_read_tokens: 100,
            thinking_tokens: 12,
            ..Usage::default()
        }
    );
}

#[test]
fn calls_sharing_an_index_with_different_ids_are_separate() {
    let (completed, usage) = complete(recorded::RECORDED_OLLAMA);
    assert_eq!(calls(&completed), ["call_k3f7x1aa: list_files('.')", "call_9qq2m0bb: 1 + 1"]);
    assert_eq!(completed.stop_reason, StopReason::ToolUse, "though the server said `stop`");
    assert!(
        usage.input_tokens > 0 && usage.output_tokens > 0,
        "it counted nothing, so that it is estimated: {usage:?}"
    );
}

#[test]
fn comments_are_skipped_and_usage_may_come_with_a_choice() {
    let (completed, usage) = complete(recorded::RECORDED_OPENROUTER);
    assert_eq!(
        completed.blocks[0].block,
        Some(Piece::Text(Text { text: "Good morning — おはよう 😀".into() }))
    );
    assert_eq!(
        usage,
        Usage { input_tokens: 56, output_tokens: 9, cache_read_tokens: 64, ..Usage::default() },
        "what was cached is not counted twice"
    );
}

#[test]
fn usage_is_read_in_every_dialect() {
    let usage = |usage: Value| complete(&recorded::Answer::text("x").using(Some(usage)).wire()).1;
    assert_eq!(
        usage(
            json!({"prompt_tokens": 100, "completion_tokens": 5, "prompt_cache_hit_tokens": 60, "prompt_cache_miss_tokens": 40})
        ),
        Usage { input_tokens: 40, output_tokens: 5, cache_read_tokens: 60, ..Usage::default() }
    );
    assert_eq!(
        usage(json!({"prompt_tokens": 100, "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30}})),
        Usage {
            input_tokens: 10,
            output_tokens: 5,
            cache_read_tokens: 60,
            cache_write_tokens: 30,
            ..Usage::default()
        },
        "each token is counted once"
    );
    assert_eq!(
        usage(json!({"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 405,
            "completion_tokens_details": {"reasoning_tokens": 300}})),
        Usage { input_tokens: 100, output_tokens: 305, thinking_tokens: 300, ..Usage::default() }
    );
}

#[test]
fn empty_fields_count_as_missing() {
    let piece = |text: &str, reason: &str| {
        json!({"id": "", "model": "", "choices": [
        {"index": 0, "delta": {"role": "assistant", "content": text, "tool_calls": null}, "finish_reason": reason}]})
    };
    let wire = events(&[
        piece("It is ", ""),
        piece("42.", "length"),
        json!({"model": "m", "choices": null, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}),
    ]);
    let (completed, usage) = complete(&wire);
    assert_eq!(completed.stop_reason, StopReason::MaxTokens);
    assert_eq!(usage, Usage { input_tokens: 7, output_tokens: 3, ..Usage::default() });
    let cut = events(&[piece("It is ", "")]);
    assert_eq!(
        read([cut.as_bytes()]).map_err(|failure| failure.class),
        Err(FailureClass::Transient)
    );
}

#[test]
fn stream_may_end_without_done_or_reason_but_not_without_both() {
    let wire = recorded::Answer::text("abc").without_done().wire();
    assert!(read([wire.as_bytes()]).is_ok());
    let unfinished = events(&[
        json!({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}),
    ]);
    assert_eq!(
        read([unfinished.as_bytes()]).map_err(|failure| failure.class),
        Err(FailureClass::Transient)
    );
    assert!(read([unfinished.as_bytes(), b"data: [DONE]\n\n"]).is_ok());
    assert!(read([unfinished.as_bytes(), b"data: [DONE]"]).is_ok());
}

#[test]
fn truncated_event_is_a_transient_failure() {
    let wire = recorded::Answer::text("abc").wire();
    let end = wire.find("finish_reason\":\"stop").expect("the end");
    for at in [0, 50, end] {
        assert_eq!(
            read([&wire.as_bytes()[..at]]).map_err(|failure| failure.class),
            Err(FailureClass::Transient),
            "{at}"
        );
    }
}

#[test]
fn calls_without_id_or_index_are_told_apart() {
    let call = |call: Value| json!({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": null}]});
    let wire = events(&[
        call(json!({"function": {"name": "code_interpreter", "arguments": "{\"code\":"}})),
        call(json!({"function": {"arguments": "\"1\"}"}})),
        call(json!({"function": {"name": "code_interpreter", "arguments": {"code": "2"}}})),
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}),
    ]);
    let step = request().step_id;
    assert_eq!(
        calls(&complete(&wire).0),
        [format!("call_{step}_0: 1"), format!("call_{step}_1: 2")]
    );
}

#[test]
fn refusal_is_text_with_its_stop_reason() {
    let wire = events(&[
        json!({"choices": [{"index": 0, "delta": {"refusal": "I can't help with that."}, "finish_reason": null}]}),
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    ]);
    let (completed, _) = complete(&wire);
    assert_eq!(completed.stop_reason, StopReason::Refused);
    assert_eq!(completed.blocks.len(), 1);
}

#[test]
fn every_finish_reason_is_mapped() {
    for (reason, expected) in [
        ("stop", StopReason::EndTurn),
        ("length", StopReason::MaxTokens),
        ("content_filter", StopReason::Refused),
        ("something_new", StopReason::EndTurn),
    ] {
        assert_eq!(
            complete(&recorded::Answer::text("x").stopping(reason).wire()).0.stop_reason,
            expected,
            "{reason}"
        );
    }
    for (reason, expected) in [
        ("insufficient_system_resource", FailureClass::Overloaded),
        ("error", FailureClass::Transient),
    ] {
        let wire = recorded::Answer::text("x").stopping(reason).wire();
        assert_eq!(
            read([wire.as_bytes()]).map_err(|failure| failure.class),
            Err(expected),
            "{reason}"
        );
    }
}

#[test]
fn errors_are_classified_by_vendor_codes() {
    for (status, body, class) in [
        (
            400,
            json!({"error": {"code": "context_length_exceeded", "message": "too long"}}),
            FailureClass::ContextTooLong,
        ),
        (
            400,
            json!({"error": {"code": 400, "message": "maximum context length is 8192"}}),
            FailureClass::ContextTooLong,
        ),
        (
            400,
            json!({"error": {"code": "content_policy_violation", "message": "no"}}),
            FailureClass::ContentRefused,
        ),
        (
            401,
            json!({"error": {"code": "invalid_api_key", "message": "no"}}),
            FailureClass::Authentication,
        ),
        (
            400,
            json!({"code": "Client specified an invalid argument",
                "error": "Incorrect API key provided: xa***12. You can obtain an API key from https://console.x.ai."}),
            FailureClass::Authentication,
        ),
        (
            400,
            json!({"code": "invalid-argument", "error": "Invalid API key"}),
            FailureClass::Authentication,
        ),
        (
            400,
            json!({"code": "invalid-argument", "error": "Incorrect%20API%20key%20provided:%20xa***12."}),
            FailureClass::Authentication,
        ),
        (
            400,
            json!({"code": "Client specified an invalid argument",
                "error": "This model's maximum prompt length is 131072 but the request contains 136973 tokens."}),
            FailureClass::ContextTooLong,
        ),
        (
            400,
            json!({"error": {"message": "Content Exists Risk", "type": "invalid_request_error", "param": null,
                "code": "invalid_request_error"}}),
            FailureClass::ContentRefused,
        ),
        (
            403,
            json!({"code": "The caller does not have permission to execute the specified operation",
                "error": "Content violates usage guidelines. Model: grok-4-0709, Failed check: SAFETY_CHECK_TYPE_BIO"}),
            FailureClass::ContentRefused,
        ),
        (
            403,
            json!({"code": "permission-denied", "error": "Access to the chat endpoint is denied."}),
            FailureClass::Authentication,
        ),
        (
            429,
            json!({"code": "Some resource has been exhausted",
                "error": "Your team t has either used all available credits or reached its monthly spending limit."}),
            FailureClass::Authentication,
        ),
        (
            429,
            json!({"code": "Some resource has been exhausted", "error": "Too many tokens for team t and model grok-4."}),
            FailureClass::RateLimited,
        ),
        (
            400,
            json!({"code": "invalid-argument", "error": "Model grok-4 does not support parameter reasoningEffort."}),
            FailureClass::InvalidRequest,
        ),
        (
            402,
            json!({"error": {"message": "Insufficient Balance", "type": "unknown_error"}}),
            FailureClass::Authentication,
        ),
        (
            403,
            json!({"error": {"code": 403, "message": "no", "metadata": {"reasons": ["violence"], "flagged_input": "…",
                "provider_name": "OpenAI", "model_slug": "openai/gpt-5.5"}}}),
            FailureClass::ContentRefused,
        ),
        (
            403,
            json!({"error": {"code": 403, "message": "openai/gpt-5.5 requires moderation. Your input was flagged for \"x\"."}}),
            FailureClass::ContentRefused,
        ),
        (
            403,
            json!({"error": {"code": 403, "message": "Key limit exceeded"}}),
            FailureClass::Authentication,
        ),
        (
            403,
            json!({"error": {"message": "Your account was flagged"}}),
            FailureClass::Authentication,
        ),
        (
            404,
            json!({"error": {"code": "model_not_found", "message": "no"}}),
            FailureClass::InvalidRequest,
        ),
        (404, json!({"error": "model 'x' not found"}), FailureClass::InvalidRequest),
        (
            429,
            json!({"error": {"code": "insufficient_quota", "type": "insufficient_quota", "message": "no"}}),
            FailureClass::Authentication,
        ),
        (
            429,
            json!({"error": {"code": "rate_limit_exceeded", "message": "no"}}),
            FailureClass::RateLimited,
        ),
        (
            429,
            json!([{"error": {"code": 429, "message": "Resource exhausted"}}]),
            FailureClass::RateLimited,
        ),
        (500, json!({"error": {"type": "server_error", "message": "no"}}), FailureClass::Transient),
        (503, json!({"message": "busy"}), FailureClass::Overloaded),
    ] {
        let failure = failure_from_body(status, body.to_string().as_bytes());
        assert_eq!(failure.class, class, "{status} {body}");
        assert!(!failure.message.is_empty());
    }
}

#[test]
fn error_within_the_stream_is_classified() {
    for (error, class) in [
        (json!({"code": 429, "message": "rate limited upstream"}), FailureClass::RateLimited),
        (json!({"code": 502, "message": "provider returned error"}), FailureClass::Transient),
        (
            json!({"type": "server_error", "message": "The server had an error"}),
            FailureClass::Transient,
        ),
        (json!({"message": "?"}), FailureClass::Transient),
        (json!("plain"), FailureClass::Transient),
    ] {
        let wire = events(&[
            json!({"choices": [{"index": 0, "delta": {"content": "a"}}]}),
            json!({"error": error, "choices": []}),
        ]);
        assert_eq!(read([wire.as_bytes()]).map_err(|failure| failure.class), Err(class), "{error}");
    }
}

#[tokio::test]
async fn request_has_the_vendor_format() {
    let server = VendorServer::start().await;
    server.reply(recorded::Answer::text("x").reply());
    let vendor = open(ModelProviderType::Openai, &format!("{}/v1/", server.url()), TEST_TIMEOUT);
    let message = |source: MessageSource, blocks: Vec<Piece>| ChatMessage {
        source: source.into(),
        blocks: blocks.into_iter().map(|block| v1::Block { block: Some(block) }).collect(),
    };
    let mut request = request();
    let call = |id: &str| {
        Piece::CodeInterpreterCall(CodeInterpreterCall { id: id.into(), code: "f(\"x\")".into() })
    };
    let failed = CodeInterpreterResult {
        id: "call_2".into(),
        error: "Error: no".into(),
        ..Default::default()
    };
    let fine =
        CodeInterpreterResult { id: "call_1".into(), output: "7".into(), ..Default::default() };
    request.messages.extend([
        message(MessageSource::Assistant, vec![call("call_1"), call("call_2")]),
        message(
            MessageSource::System,
            vec![Piece::CodeInterpreterResult(fine), Piece::CodeInterpreterResult(failed)],
        ),
        message(MessageSource::User, vec![Piece::Text(Text { text: "and?".into() })]),
    ]);
    request.parameters = ModelParameters {
        temperature: Some(1.5),
        top_p: Some(0.5),
        stop_sequences: vec!["END".into()],
        ..ModelParameters::default()
    };
    vendor.invoke(Arc::new(request)).try_collect::<Vec<_>>().await.expect("an answer");

    let sent = server.requests().remove(0);
    assert_eq!(sent.path, "/v1/chat/completions");
    assert_eq!(sent.header("authorization"), "Bearer sk-test-12345");
    let arguments = r#"{"code":"f(\"x\")"}"#;
    let function = json!({"name": "code_interpreter", "arguments": arguments});
    assert_eq!(
        sent.body,
        json!({
            "model": "test-model",
            "messages": [
                {"role": "system", "content": "You work through scripts."},
                {"role": "user", "content": "count the lines"},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "call_1", "type": "function", "function": function},
                    {"id": "call_2", "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "7"},
                {"role": "tool", "tool_call_id": "call_2", "content": "[the script failed]\nError: no"},
                {"role": "user", "content": "and?"},
            ],
            "tools": [{"type": "function", "function": {"name": "code_interpreter", "description": "Runs JavaScript.",
                "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}}}],
            "stream": true, "stream_options": {"include_usage": true},
            "max_tokens": 4096, "temperature": 1.5, "top_p": 0.5, "stop": ["END"],
        })
    );
}

#[test]
fn new_fields_are_sent_only_to_openai_itself() {
    let mut request = request();
    request.parameters.top_k = Some(7);
    let original = serde_json::to_value(Body::new(&request, &OPENAI)).expect("JSON");
    assert_eq!(
        (&original["max_completion_tokens"], original.get("max_tokens"), original.get("top_k")),
        (&json!(4096), None, None)
    );
    let compatible = serde_json::to_value(Body::new(&request, &COMPATIBLE)).expect("JSON");
    assert_eq!(
        (compatible.get("max_completion_tokens"), &compatible["max_tokens"], &compatible["top_k"]),
        (None, &json!(4096), &json!(7))
    );
    for (base, original) in [
        (OpenAi::DEFAULT_BASE_URL, true),
        ("https://mine.openai.azure.com/openai/v1", true),
        ("https://api.openai.com.example/v1", false),
        ("http://localhost:8000/v1", false),
    ] {
        let endpoint = Endpoint::parse(base, None).expect("a URL");
        assert_eq!(
            flavor(&endpoint).max_tokens_field == OPENAI.max_tokens_field,
            original,
            "{base}"
        );
    }
}

#[test]
fn reasoning_model_gets_no_sampling_parameters() {
    let told = |flavor: &Flavor, model: &str, thinking: v1::ThinkingEffort| {
        let mut request = request();
        request.model = model.to_owned();
        request.parameters = ModelParameters {
            temperature: Some(0.5),
            top_p: Some(0.5),
            top_k: Some(7),
            stop_sequences: vec!["END".into()],
            thinking: thinking.into(),
            ..ModelParameters::default()
        };
        let body = serde_json::to_value(Body::new(&request, flavor)).expect("JSON");
        let told = ["temperature", "top_p", "stop"].map(|name| body.get(name).is_some());
        assert!(told.iter().all(|each| *each == told[0]), "{model}: {body}");
        told[0]
    };
    let (unset, low) = (v1::ThinkingEffort::Unspecified, v1::ThinkingEffort::Low);
    let router = &crate::openrouter::FLAVOR;
    for (flavor, model, thinking, expected) in [
        (&OPENAI, "gpt-5.5", unset, false),
        (&OPENAI, "o4-mini", unset, false),
        (&OPENAI, "gpt-5-chat-latest", unset, true),
        (&OPENAI, "gpt-4.1", unset, true),
        (&OPENAI, "something-new", low, false),
        (&COMPATIBLE, "gpt-5.5", unset, true),
        (router, "openai/gpt-5.5", unset, false),
        (router, "openai/gpt-4.1", unset, true),
        (router, "anthropic/claude-opus-5", low, true),
    ] {
        assert_eq!(told(flavor, model, thinking), expected, "{model}");
    }
}

#[test]
fn schema_becomes_an_instruction_where_unsupported() {
    let mut request = request();
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
    request.format = Format::Schema { name: "answer".into(), schema: schema.clone(), strict: true };
    let sent =
        |request: &Request, flavor| serde_json::to_value(Body::new(request, flavor)).expect("JSON");
    let body = sent(&request, &crate::deepseek::FLAVOR);
    assert_eq!(body["response_format"], json!({"type": "json_object"}), "it refuses any other");
    let system = body["messages"][0]["content"].as_str().expect("a text");
    assert!(
        system.starts_with("You work through scripts.") && system.contains("JSON Schema"),
        "{system}"
    );
    assert!(system.ends_with(&schema.to_string()), "{system}");
    let body = sent(&request, &COMPATIBLE);
    assert_eq!(body["response_format"]["json_schema"]["schema"], schema);
    assert_eq!(body["messages"][0]["content"], "You work through scripts.");
    request.format = Format::Json;
    let body = sent(&request, &crate::deepseek::FLAVOR);
    assert_eq!(body["response_format"], json!({"type": "json_object"}));
    assert!(body["messages"][0]["content"].as_str().is_some_and(|system| system.contains("JSON")));
    request.format = Format::Text;
    assert_eq!(sent(&request, &crate::deepseek::FLAVOR).get("response_format"), None);
}

#[test]
fn foreign_call_gets_empty_reasoning_where_required() {
    let call = Part::Call { id: "a".into(), name: "run".into(), arguments: json!({"js": "1"}) };
    for (flavor, expected) in [
        (&crate::deepseek::FLAVOR, Some(json!(""))),
        (&COMPATIBLE, None),
        (&crate::xai::FLAVOR, None),
    ] {
        let mut messages = Vec::new();
        let turn = Turn { role: Role::Assistant, parts: vec![call.clone()] };
        push_turn(&mut messages, turn, flavor);
        assert_eq!(messages[0].get("reasoning_content").cloned(), expected);
        let turn = Turn { role: Role::Assistant, parts: vec![Part::Text("no call".into())] };
        push_turn(&mut messages, turn, flavor);
        assert_eq!(messages[1].get("reasoning_content"), None);
    }
}

#[test]
fn cache_breakpoints_are_set_where_the_model_needs_them() {
    let sent = |model: &str, rounds: usize| {
        let mut request = request();
        request.model = model.to_owned();
        for round in 0..rounds {
            let call = CodeInterpreterCall { id: format!("call_{round}"), code: "1".into() };
            let result = CodeInterpreterResult {
                id: format!("call_{round}"),
                output: "7".into(),
                ..Default::default()
            };
            for (source, block) in [
                (MessageSource::Assistant, Piece::CodeInterpreterCall(call)),
                (MessageSource::System, Piece::CodeInterpreterResult(result)),
            ] {
                let blocks = vec![v1::Block { block: Some(block) }];
                request.messages.push(ChatMessage { source: source.into(), blocks });
            }
        }
        serde_json::to_value(Body::new(&request, &crate::openrouter::FLAVOR)).expect("JSON")
    };
    let marked = |text: &str| json!([{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]);
    let body = sent("anthropic/claude-opus-4.6", 1);
    assert_eq!(body["tools"][0]["cache_control"], json!({"type": "ephemeral"}));
    assert_eq!(
        body["messages"][0],
        json!({"role": "system", "content": marked("You work through scripts.")})
    );
    assert_eq!(body["messages"][1], json!({"role": "user", "content": marked("count the lines")}));
    assert_eq!(
        body["messages"][3],
        json!({"role": "tool", "tool_call_id": "call_0", "content": marked("7")})
    );
    for rounds in 0..6 {
        let body = sent("anthropic/claude-opus-4.6", rounds);
        let last = body["messages"]
            .as_array()
            .and_then(|messages| messages.last())
            .expect("messages")
            .to_string();
        assert!(last.contains("cache_control"), "the last turn is marked: {last}");
        let marks = body.to_string().matches("cache_control").count();
        assert_eq!(
            marks,
            2 + (rounds + 1).min(2),
            "the vendor refuses more than four: {rounds} rounds"
        );
        assert!(!sent("openai/gpt-5", rounds).to_string().contains("cache_control"));
    }
}

#[test]
fn last_text_of_a_message_is_marked() {
    let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
    let mut message =
        json!({"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]});
    set_cache_breakpoint(&mut message);
    assert_eq!(message["content"][1]["cache_control"], json!({"type": "ephemeral"}));
    let mut message = json!({"role": "user", "content": [image]});
    let before = message.clone();
    set_cache_breakpoint(&mut message);
    assert_eq!(message, before);
}

#[tokio::test]
async fn provider_without_key_sends_no_authorization() {
    let server = VendorServer::start().await;
    server.reply(recorded::Answer::text("x").reply());
    let endpoint = Endpoint::parse(&server.url(), None).expect("a URL");
    crate::install_crypto();
    let timeouts = crate::http::Timeouts {
        connect: TEST_TIMEOUT,
        first_byte: TEST_TIMEOUT,
        idle: TEST_TIMEOUT,
    };
    let vendor: Arc<dyn Vendor> = Arc::new(OpenAi::new(Http::new(timeouts), endpoint, &COMPATIBLE));
    completed(
        run(&vendor, NO_DELAY_POLICY, &CancelSignal::default(), &RecordingProgress::default())
            .await
            .0,
    );
    assert_eq!(server.requests()[0].header("authorization"), "");
}

#[test]
fn reported_cost_is_used_only_where_it_is_the_charge() {
    let usage: WireUsage = serde_json::from_value(
        json!({"prompt_tokens": 10, "completion_tokens": 2, "cost": 0.000_123_456_789}),
    )
    .expect("usage");
    assert_eq!(usage.usage(true).cost_pico_usd, 123_456_789);
    assert_eq!(usage.usage(false).cost_pico_usd, 0);
    let odd: WireUsage =
        serde_json::from_value(json!({"prompt_tokens": 10, "cost": {"total": 1}})).expect("usage");
    assert_eq!(odd.usage(true).cost_pico_usd, 0);
}
