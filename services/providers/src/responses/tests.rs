use construct_proto::{
    mesh::v1::FailureClass,
    v1::{ModelParameters, ModelProviderType, ThinkingEffort},
};
use construct_tests::vendor::{VendorServer, responses as recorded};
use futures::TryStreamExt as _;

use super::*;
use crate::{
    call::tests::command,
    tests::{open, read, read_at_every_split},
};

const TEST_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

fn request() -> Request {
    Request::from_command(&command("count the lines")).expect("the command is whole")
}

#[test]
fn recorded_text_parses_the_same_at_every_split() {
    assert_eq!(
        read_at_every_split::<Wire>(recorded::RECORDED_TEXT.as_bytes()),
        [
            Chunk::Named {
                id: "resp_67c9fdcecf488190bdd9a0409de3a1ec07b8b0ad4e5eb654".into(),
                model: "gpt-4.1-2025-04-14".into()
            },
            Chunk::Text("Hi".into()),
            Chunk::Text(" there! — 😀".into()),
            Chunk::Usage(Usage { input_tokens: 37, output_tokens: 11, ..Usage::default() }),
            Chunk::Stop(StopReason::EndTurn),
        ]
    );
}

#[test]
fn recorded_call_parses_the_same_at_every_split_with_reasoning() {
    let kept = json!({"type": "reasoning", "id": "rs_67c9fdcf37fc", "summary": [
        {"type": "summary_text", "text": "**Asking for the weather**"}, {"type": "summary_text", "text": "In Paris."}],
        "encrypted_content": "gAAAAABoISQ24OyVRYbkYfukdJoqdzWT"});
    let arguments = |json: &str| Chunk::Arguments { slot: 1, json: json.into() };
    assert_eq!(
        read_at_every_split::<Wire>(recorded::RECORDED_CALL.as_bytes()),
        [
            Chunk::Thinking("**Asking for the weather**".into()),
            Chunk::Thinking("\n\n".into()),
            Chunk::Thinking("In Paris.".into()),
            Chunk::ThinkingData(kept.to_string()),
            Chunk::Call { slot: 1, id: "call_1234xyz".into(), name: "get_weather".into() },
            arguments("{\""),
            arguments("location"),
            arguments("\":\""),
            arguments("Paris, Île-de-France\"}"),
            Chunk::Usage(Usage {
                input_tokens: 17,
                output_tokens: 1_035,
                cache_read_tokens: 64,
                thinking_tokens: 832,
                ..Usage::default()
            }),
            Chunk::Stop(StopReason::EndTurn),
        ]
    );
}

#[test]
fn item_without_deltas_is_read_when_done() {
    let wire = recorded::Answer::text("abc").and_code("call_1", "1").wire();
    let events = wire.split_inclusive("\n\n").filter(|event| !event.contains(".delta"));
    let wire: String = events.collect();
    let chunks = read::<Wire>([wire.as_bytes()]).expect("whole");
    assert!(chunks.contains(&Chunk::Text("abc".into())), "{chunks:?}");
    assert!(
        chunks.contains(&Chunk::Arguments { slot: 1, json: r#"{"code":"1"}"#.into() }),
        "{chunks:?}"
    );
}

#[test]
fn every_ending_is_mapped() {
    let last = |wire: String| {
        let chunks = read::<Wire>([wire.as_bytes()]);
        chunks.map(|chunks| chunks.last().cloned()).map_err(|failure| failure.class)
    };
    let incomplete = |reason: &str| last(recorded::Answer::text("x").incomplete(reason).wire());
    assert_eq!(incomplete("max_output_tokens"), Ok(Some(Chunk::Stop(StopReason::MaxTokens))));
    assert_eq!(incomplete("content_filter"), Ok(Some(Chunk::Stop(StopReason::Refused))));
    let refusal =
        r#"{"type":"response.refusal.delta","output_index":0,"delta":"I can't help with that."}"#;
    let refused = format!("data: {refusal}\n\n{}", recorded::Answer::empty().wire());
    assert_eq!(last(refused), Ok(Some(Chunk::Stop(StopReason::Refused))));
    for (code, message, class) in [
        ("rate_limit_exceeded", "Rate limit reached", FailureClass::RateLimited),
        ("server_error", "The model failed", FailureClass::Transient),
        (
            "context_length_exceeded",
            "Your input exceeds the context window",
            FailureClass::ContextTooLong,
        ),
        (
            "invalid_prompt",
            "Your prompt was flagged as potentially violating our policy",
            FailureClass::ContentRefused,
        ),
    ] {
        let failed = recorded::failed_event(code, message);
        assert_eq!(last(failed), Err(class), "{code}");
        let error = json!({"type": "error", "code": code, "message": message, "param": null, "sequence_number": 1});
        assert_eq!(last(format!("event: error\ndata: {error}\n\n")), Err(class), "{code}");
        let nested = json!({"type": "error", "error": {"code": code, "message": message}});
        assert_eq!(last(format!("event: error\ndata: {nested}\n\n")), Err(class), "{code}");
    }
    let cut = recorded::Answer::text("x").wire();
    let cut = cut[..cut.find("event: response.completed").expect("the end")].to_owned();
    assert_eq!(last(cut), Err(FailureClass::Transient));
}

async fn sent_body(request: Request) -> Value {
    let server = VendorServer::start().await;
    server.reply(recorded::Answer::text("x").reply());
    let vendor =
        open(ModelProviderType::OpenaiResponses, &format!("{}/v1/", server.url()), TEST_TIMEOUT);
    vendor.invoke(Arc::new(request)).try_collect::<Vec<_>>().await.expect("an answer");
    let sent = server.requests().remove(0);
    assert_eq!(sent.path, "/v1/responses");
    assert_eq!(sent.header("authorization"), "Bearer sk-test-12345");
    sent.body
}

#[tokio::test]
async fn request_has_the_vendor_format() {
    let mut request = request();
    request.parameters =
        ModelParameters { temperature: Some(1.5), top_p: Some(0.5), ..ModelParameters::default() };
    let plain = json!({
        "model": "test-model",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "count the lines"}]}],
        "stream": true, "store": false, "max_output_tokens": 4096,
        "instructions": "You work through scripts.",
        "tools": [{"type": "function", "name": "code_interpreter", "description": "Runs JavaScript.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
            "strict": false}],
        "temperature": 1.5, "top_p": 0.5,
    });
    assert_eq!(sent_body(request.clone()).await, plain);

    request.model = "gpt-5-mini".into();
    request.parameters.thinking = ThinkingEffort::Off.into();
    let mut thinking = plain;
    thinking["model"] = json!("gpt-5-mini");
    thinking["include"] = json!(["reasoning.encrypted_content"]);
    thinking["reasoning"] = json!({"effort": "minimal", "summary": "auto"});
    for field in ["temperature", "top_p"] {
        thinking.as_object_mut().expect("an object").remove(field);
    }
    assert_eq!(sent_body(request).await, thinking);
}

#[test]
fn reasoning_models_are_known_by_name() {
    let uses_reasoning =
        |model: &str| openai::uses_reasoning(&Request { model: model.into(), ..request() });
    for model in ["o1", "o3-mini", "o4-mini", "gpt-5", "gpt-5.1-codex", "codex-mini-latest"] {
        assert!(uses_reasoning(model), "{model}");
    }
    for model in ["gpt-4.1", "gpt-4o", "gpt-5-chat-latest", "omni-moderation", "test-model"] {
        assert!(!uses_reasoning(model), "{model}");
    }
}
