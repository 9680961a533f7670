use construct_proto::{
    mesh::v1::ModelInvoke,
    v1::{ModelParameters, ModelProviderType, ThinkingEffort},
};
use construct_tests::vendor::{VendorServer, bedrock as recorded};
use futures::TryStreamExt as _;

use super::*;
use crate::{
    call::tests::command,
    tests::{open, read, read_at_every_split},
};

const TEST_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
const CLAUDE: &str = "eu.anthropic.claude-sonnet-4-5-20250929-v1:0";

fn request(model: &str) -> Request {
    let command: ModelInvoke = command("count the lines");
    Request {
        model: model.into(),
        ..Request::from_command(&command).expect("the command is whole")
    }
}

#[test]
fn recorded_stream_parses_the_same_at_every_split() {
    let stream = recorded::recorded(recorded::RECORDED_CALL);
    assert_eq!(
        read_at_every_split::<Wire>(&stream),
        [
            Chunk::Thinking("The song is".into()),
            Chunk::Thinking(" on WZPZ.".into()),
            Chunk::ThinkingData(json!({"signature": "EqQBCgIYAhIM1gbcDa9GJwZA"}).to_string()),
            Chunk::Text("Let me check — 曲 😀.".into()),
            Chunk::Call {
                slot: 2,
                id: "tooluse_kZJMlvQmRJ6eAyJE5GIl7Q".into(),
                name: "top_song".into()
            },
            Chunk::Arguments { slot: 2, json: "{\"sign\"".into() },
            Chunk::Arguments { slot: 2, json: ": \"WZPZ\"}".into() },
            Chunk::Stop(StopReason::ToolUse),
            Chunk::Usage(Usage {
                input_tokens: 125,
                output_tokens: 60,
                cache_read_tokens: 1_024,
                cache_write_tokens: 64,
                ..Usage::default()
            }),
        ]
    );
}

#[test]
fn hidden_reasoning_is_kept() {
    let delta = json!({"contentBlockIndex": 0, "delta": {"reasoningContent": {"redactedContent": "EmwKAhgB"}}});
    let stream = [
        recorded::event("contentBlockDelta", &delta.to_string()),
        recorded::event("contentBlockStop", r#"{"contentBlockIndex":0}"#),
        recorded::Answer::text("x").wire(),
    ]
    .concat();
    let data = json!({"redacted": "EmwKAhgB"}).to_string();
    assert_eq!(
        read_at_every_split::<Wire>(&stream).first(),
        Some(&Chunk::ThinkingData(data.clone()))
    );
    let part = Part::Thinking { text: String::new(), data };
    let sent = block(&part, 0);
    assert_eq!(sent, Some(json!({"reasoningContent": {"redactedContent": "EmwKAhgB"}})));
}

#[test]
fn errors_within_the_stream_are_classified() {
    let begin = recorded::event("messageStart", r#"{"role":"assistant"}"#);
    let payload = |message: &str| json!({"message": message}).to_string();
    for (error, class) in [
        (
            recorded::exception("throttlingException", &payload("Too many requests")),
            FailureClass::RateLimited,
        ),
        (
            recorded::exception("serviceUnavailableException", &payload("busy")),
            FailureClass::Overloaded,
        ),
        (
            recorded::exception("modelStreamErrorException", &payload("broke")),
            FailureClass::Transient,
        ),
        (recorded::exception("internalServerException", "not JSON"), FailureClass::Transient),
        (
            recorded::exception(
                "validationException",
                &payload("Input is too long for requested model."),
            ),
            FailureClass::ContextTooLong,
        ),
        (
            recorded::error("InternalError", "An internal server error occurred"),
            FailureClass::Transient,
        ),
    ] {
        let failure = read::<Wire>([begin.as_slice(), &error]).expect_err("an error");
        assert_eq!(failure.class, class, "{failure}");
        assert!(!failure.message.is_empty());
    }
}

#[test]
fn every_stop_reason_is_mapped() {
    for (reason, expected) in [
        ("end_turn", Ok(StopReason::EndTurn)),
        ("tool_use", Ok(StopReason::ToolUse)),
        ("max_tokens", Ok(StopReason::MaxTokens)),
        ("model_context_window_exceeded", Ok(StopReason::MaxTokens)),
        ("stop_sequence", Ok(StopReason::StopSequence)),
        ("content_filtered", Ok(StopReason::Refused)),
        ("guardrail_intervened", Ok(StopReason::Refused)),
        ("malformed_tool_use", Err(FailureClass::Transient)),
    ] {
        let chunks =
            read::<Wire>([recorded::Answer::text("x").with_stop_reason(reason).wire().as_slice()]);
        let stopped = chunks.map_err(|failure| failure.class).map(|chunks| {
            chunks
                .into_iter()
                .find_map(|chunk| if let Chunk::Stop(stop) = chunk { Some(stop) } else { None })
        });
        assert_eq!(stopped, expected.map(Some), "{reason}");
    }
}

#[test]
fn cache_points_are_set_only_where_supported() {
    let marks = |model: &str| {
        let body = body(&request(model));
        [&body["system"], &body["toolConfig"], &body["messages"]]
            .map(|part| part.to_string().contains("cachePoint"))
    };
    assert_eq!(marks(CLAUDE), [true, true, true]);
    assert_eq!(marks("us.amazon.nova-pro-v1:0"), [true, false, true]);
    assert_eq!(marks("anthropic.claude-3-haiku-20240307-v1:0"), [false, false, false]);
    assert_eq!(marks("us.anthropic.claude-3-5-haiku-20241022-v1:0"), [true, true, true]);
    assert_eq!(marks("meta.llama3-3-70b-instruct-v1:0"), [false, false, false]);
}

#[test]
fn document_gets_text_beside_it_and_a_plain_name() {
    let media = |name: &str| {
        Part::Media(Media {
            media_type: "application/pdf".into(),
            name: name.into(),
            base64: "AA==".into(),
        })
    };
    let turn = Turn { role: Role::User, parts: vec![media("Q3_Übersicht (v2).pdf"), media("")] };
    let content = &message(&turn)["content"];
    assert_eq!(content[0]["document"]["name"], "Q3 bersicht (v2) 0");
    assert_eq!(content[1]["document"]["name"], "document 1");
    assert_eq!(content[2], json!({"text": "(a document)"}));
}

#[tokio::test]
async fn request_has_the_vendor_format() {
    let server = VendorServer::start().await;
    server.reply(recorded::Answer::text("x").reply());
    let vendor = open(ModelProviderType::Bedrock, &server.url(), TEST_TIMEOUT);
    let mut request = request(CLAUDE);
    request.parameters = ModelParameters {
        temperature: Some(1.5),
        top_k: Some(40),
        stop_sequences: vec!["END".into()],
        ..ModelParameters::default()
    };
    vendor.invoke(Arc::new(request.clone())).try_collect::<Vec<_>>().await.expect("an answer");
    let sent = server.requests().remove(0);
    assert_eq!(sent.path, "/model/eu.anthropic.claude-sonnet-4-5-20250929-v1%3A0/converse-stream");
    assert_eq!(sent.query, "", "the region is for us");
    assert_eq!(sent.header("authorization"), "Bearer sk-test-12345");
    assert_eq!(sent.header("content-type"), "application/json");
    let point = json!({"cachePoint": {"type": "default"}});
    assert_eq!(
        sent.body,
        json!({
            "messages": [{"role": "user", "content": [{"text": "count the lines"}, point]}],
            "system": [{"text": "You work through scripts."}, point],
            "toolConfig": {"tools": [{"toolSpec": {"name": "code_interpreter", "description": "Runs JavaScript.",
                "inputSchema": {"json":
                    {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}}}}, point]},
            "inferenceConfig": {"maxTokens": 4096, "temperature": 1.0, "stopSequences": ["END"]},
            "additionalModelRequestFields": {"top_k": 40},
        })
    );
    request.parameters.thinking = ThinkingEffort::Low.into();
    let body = body(&request);
    assert_eq!(body["inferenceConfig"].get("temperature"), None);
    let thinking = json!({"thinking": {"type": "enabled", "budget_tokens": 2048}});
    assert_eq!(body["additionalModelRequestFields"], thinking);
}

#[test]
fn temperature_is_not_sent_with_top_p_to_models_refusing_both() {
    let told = |model: &str| {
        let mut request = request(model);
        request.parameters = ModelParameters {
            temperature: Some(0.3),
            top_p: Some(0.5),
            ..ModelParameters::default()
        };
        let config = body(&request)["inferenceConfig"].clone();
        ["temperature", "topP"].map(|name| config.get(name).is_some())
    };
    assert_eq!(told(CLAUDE), [true, false]);
    assert_eq!(told("us.amazon.nova-pro-v1:0"), [true, true]);
}

#[test]
fn error_responses_are_classified_by_status_and_message() {
    for (status, message, class) in [
        (400, "Input is too long for requested model.", FailureClass::ContextTooLong),
        (400, "The provided model identifier is invalid.", FailureClass::InvalidRequest),
        (
            403,
            "The security token included in the request is invalid.",
            FailureClass::Authentication,
        ),
        (424, "The model returned an error.", FailureClass::Transient),
        (429, "Too many tokens, please wait before trying again.", FailureClass::RateLimited),
        (503, "Bedrock is unable to process your request.", FailureClass::Overloaded),
    ] {
        for field in ["message", "Message"] {
            let failure = Wire::default()
                .response_failure(status, json!({field: message}).to_string().as_bytes());
            assert_eq!((failure.class, failure.message.as_str()), (class, message));
        }
    }
}
