use construct_proto::v1::{
    self, CodeInterpreterCall, CodeInterpreterResult, MessageSource, ModelParameters,
    ModelProviderType, block::Block as Piece,
};
use construct_tests::vendor::{VendorServer, gemini as recorded};
use futures::TryStreamExt as _;

use super::*;
use crate::{
    call::tests::command,
    tests::{open, read, read_at_every_split},
};

const TEST_TIMEOUT: Duration = Duration::from_secs(10);

fn request() -> Request {
    Request::from_command(&command("count the lines")).expect("the command is whole")
}

#[test]
fn recorded_calls_parse_the_same_at_every_split() {
    let chunks = read_at_every_split::<Wire>(recorded::RECORDED_CALLS.as_bytes());
    let sealed = json!({"call": "PFNpZ25hdHVyZSBBPg=="}).to_string();
    let name = "get_current_temperature";
    let call = |slot, id: &str| Chunk::Call { slot, id: id.into(), name: name.into() };
    let arguments = |slot, json: &str| Chunk::Arguments { slot, json: json.into() };
    let usage = |output_tokens, input_tokens, cache_read_tokens| {
        Chunk::Usage(Usage {
            input_tokens,
            output_tokens,
            cache_read_tokens,
            thinking_tokens: 55,
            ..Usage::default()
        })
    };
    assert_eq!(
        chunks,
        [
            Chunk::Named {
                id: "xRS0aZC5BNHVz7IPuaO42Qk".into(),
                model: "gemini-3-pro-preview".into()
            },
            usage(55, 252, 0),
            Chunk::Thinking("**Planning the check**\n\nBoth cities — 都市 — are needed.".into()),
            usage(85, 252, 0),
            Chunk::ThinkingData(sealed),
            call(0, "gp737npz"),
            arguments(0, r#"{"location":"Paris"}"#),
            call(1, "gp737nq0"),
            arguments(1, r#"{"location":"London"}"#),
            usage(91, 52, 200),
            Chunk::Stop(StopReason::EndTurn),
        ]
    );
}

#[test]
fn signature_is_replayed_at_its_original_position() {
    let wire = recorded::Answer::text("All is fine.").and_signature("sig-text").wire();
    let chunks = read_at_every_split::<Wire>(wire.as_bytes());
    assert!(
        chunks.contains(&Chunk::ThinkingData(json!({"text": "sig-text"}).to_string())),
        "{chunks:?}"
    );
    let thinking = |signature: Signature| Part::Thinking {
        text: "Hm.".into(),
        data: json!(signature).to_string(),
    };
    let call =
        |id: &str| Part::Call { id: id.into(), name: "run".into(), arguments: json!({"js": "1"}) };
    let turn = Turn {
        role: Role::Assistant,
        parts: vec![
            Part::Text("x".into()),
            thinking(Signature::Text("sig-1".into())),
            thinking(Signature::Call("sig-2".into())),
            call("a"),
            call("b"),
            thinking(Signature::Text("sig-3".into())),
        ],
    };
    let called = |id: &str| json!({"id": id, "name": "run", "args": {"js": "1"}});
    assert_eq!(
        content_from_turn(&turn, true),
        json!({"role": "model", "parts": [
            {"text": "x", "thoughtSignature": "sig-1"},
            {"functionCall": called("a"), "thoughtSignature": "sig-2"},
            {"functionCall": called("b")},
            {"text": "", "thoughtSignature": "sig-3"},
        ]})
    );
}

#[test]
fn foreign_call_gets_the_skip_signature() {
    let call =
        |id: &str| Part::Call { id: id.into(), name: "run".into(), arguments: json!({"js": "1"}) };
    let turn = Turn { role: Role::Assistant, parts: vec![call("a"), call("b")] };
    let signatures = |signed| {
        let content = content_from_turn(&turn, signed);
        [0, 1].map(|at| content["parts"][at].get("thoughtSignature").cloned())
    };
    assert_eq!(signatures(true), [Some(json!(SKIP_SIGNATURE)), None]);
    assert_eq!(signatures(false), [None, None], "earlier models know nothing of signatures");
}

#[test]
fn every_finish_reason_is_mapped() {
    for (reason, expected) in [
        ("STOP", Ok(StopReason::EndTurn)),
        ("MAX_TOKENS", Ok(StopReason::MaxTokens)),
        ("SAFETY", Ok(StopReason::Refused)),
        ("PROHIBITED_CONTENT", Ok(StopReason::Refused)),
        ("MALFORMED_FUNCTION_CALL", Err(FailureClass::Transient)),
        ("SOMETHING_NEW", Ok(StopReason::EndTurn)),
    ] {
        let chunks =
            read::<Wire>([recorded::Answer::text("x").with_stop_reason(reason).wire().as_bytes()]);
        let stop = chunks.map(|chunks| chunks.last().cloned()).map_err(|failure| failure.class);
        assert_eq!(stop, expected.map(|stop| Some(Chunk::Stop(stop))), "{reason}");
    }
}

#[test]
fn blocked_prompt_is_a_content_refusal() {
    let event = json!({"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 7}});
    let failure = read::<Wire>([format!("data: {event}\n\n").as_bytes()]).expect_err("refused");
    assert_eq!(failure.class, FailureClass::ContentRefused);
    assert!(failure.message.contains("SAFETY"), "{}", failure.message);
}

#[test]
fn errors_are_classified_by_vendor_codes() {
    let info = |reason: &str| json!({"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason});
    for (status, name, message, details, class) in [
        (
            400,
            "INVALID_ARGUMENT",
            "API key not valid.",
            vec![info("API_KEY_INVALID")],
            FailureClass::Authentication,
        ),
        (
            400,
            "INVALID_ARGUMENT",
            "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
            Vec::new(),
            FailureClass::ContextTooLong,
        ),
        (
            400,
            "FAILED_PRECONDITION",
            "User location is not supported.",
            Vec::new(),
            FailureClass::InvalidRequest,
        ),
        (503, "UNAVAILABLE", "The model is overloaded.", Vec::new(), FailureClass::Overloaded),
        (504, "DEADLINE_EXCEEDED", "", Vec::new(), FailureClass::Transient),
    ] {
        let body = json!({"error": {"code": status, "message": message, "status": name, "details": details}});
        for body in [body.clone(), json!([body])] {
            let failure = Wire::default().response_failure(status, body.to_string().as_bytes());
            assert_eq!(failure.class, class, "{name}: {message}");
            assert!(!failure.message.is_empty());
        }
    }
    let wire =
        recorded::Answer::text("abc").wire() + &recorded::error_event(500, "INTERNAL", "oops");
    assert_eq!(
        read::<Wire>([wire.as_bytes()]).map_err(|failure| failure.class),
        Err(FailureClass::Transient)
    );
}

#[tokio::test]
async fn retry_delay_is_read_from_the_body() {
    let server = VendorServer::start().await;
    let delay =
        json!({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.07s"});
    server.reply(recorded::error(
        429,
        "RESOURCE_EXHAUSTED",
        "You exceeded your current quota.",
        &[delay],
    ));
    let vendor = open(ModelProviderType::Gemini, &server.url(), TEST_TIMEOUT);
    let failure =
        vendor.invoke(Arc::new(request())).try_collect::<Vec<_>>().await.expect_err("refused");
    assert_eq!((failure.class, failure.http_status), (FailureClass::RateLimited, 429));
    let wait = failure.requested_delay(Timestamp::now()).expect("a time");
    assert!((Duration::from_secs(30)..=Duration::from_secs(35)).contains(&wait), "{wait:?}");
}

#[tokio::test]
async fn request_has_the_vendor_format() {
    let server = VendorServer::start().await;
    server.reply(recorded::Answer::text("x").reply());
    let vendor = open(ModelProviderType::Gemini, &server.url(), TEST_TIMEOUT);
    let mut request = request();
    let message = |source: MessageSource, block: Piece| construct_proto::mesh::v1::ChatMessage {
        source: source.into(),
        blocks: vec![v1::Block { block: Some(block) }],
    };
    let call = CodeInterpreterCall { id: "a".into(), code: "f()".into() };
    let result =
        CodeInterpreterResult { id: "a".into(), error: "Error: no".into(), ..Default::default() };
    request.messages.extend([
        message(MessageSource::Assistant, Piece::CodeInterpreterCall(call)),
        message(MessageSource::System, Piece::CodeInterpreterResult(result)),
    ]);
    request.model = "gemini-2.5-flash".into();
    request.parameters = ModelParameters {
        temperature: Some(1.5),
        top_p: Some(0.5),
        top_k: Some(40),
        stop_sequences: ["1", "2", "3", "4", "5", "6"].map(Into::into).to_vec(),
        thinking: v1::ThinkingEffort::Low.into(),
        ..ModelParameters::default()
    };
    vendor.invoke(Arc::new(request)).try_collect::<Vec<_>>().await.expect("an answer");

    let sent = server.requests().remove(0);
    assert_eq!(sent.path, "/v1beta/models/gemini-2.5-flash:streamGenerateContent");
    assert_eq!(sent.query, "alt=sse");
    assert_eq!(sent.header("x-goog-api-key"), "sk-test-12345");
    let name = "code_interpreter";
    assert_eq!(
        sent.body,
        json!({
            "contents": [
                {"role": "user", "parts": [{"text": "count the lines"}]},
                {"role": "model", "parts": [{"functionCall": {"id": "a", "name": name, "args": {"code": "f()"}}}]},
                {"role": "user", "parts": [
                    {"functionResponse": {"id": "a", "name": name, "response": {"error": "Error: no"}}}]},
            ],
            "generationConfig": {"maxOutputTokens": 4096, "temperature": 1.5, "topP": 0.5, "topK": 40,
                "stopSequences": ["1", "2", "3", "4", "5"],
                "thinkingConfig": {"includeThoughts": true, "thinkingBudget": 2048}},
            "systemInstruction": {"parts": [{"text": "You work through scripts."}]},
            "tools": [{"functionDeclarations": [{"name": name, "description": "Runs JavaScript.",
                "parametersJsonSchema":
                    {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}}]}],
        })
    );
}

#[test]
fn each_model_generation_gets_its_own_thinking_request() {
    let level = |level: &str| json!({"includeThoughts": true, "thinkingLevel": level});
    assert_eq!(thinking_config(Effort::Off, "gemini-3.8-flash"), level("low"));
    assert_eq!(thinking_config(Effort::Medium, "gemini-3-pro-preview"), level("high"));
    assert_eq!(thinking_config(Effort::Medium, "gemini-3.1-pro"), level("medium"));
    assert_eq!(thinking_config(Effort::Off, "gemini-2.5-pro")["thinkingBudget"], 128);
    assert_eq!(
        thinking_config(Effort::Off, "gemini-2.5-flash"),
        json!({"includeThoughts": false, "thinkingBudget": 0})
    );
}
