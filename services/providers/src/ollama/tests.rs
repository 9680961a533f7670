use construct_proto::v1::{ModelParameters, ModelProviderType, ThinkingEffort};
use construct_tests::vendor::{VendorServer, ollama as recorded};
use futures::TryStreamExt as _;

use super::*;
use crate::{
    call::tests::command,
    tests::{open, read, read_at_every_split},
    transcript::Media,
};

const TEST_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

fn request() -> Request {
    Request::from_command(&command("count the lines")).expect("the command is whole")
}

#[test]
fn recorded_call_parses_the_same_at_every_split() {
    assert_eq!(
        read_at_every_split::<Wire>(recorded::RECORDED_CALL.as_bytes()),
        [
            Chunk::Named { id: String::new(), model: "qwen3".into() },
            Chunk::Thinking("The person asks".into()),
            Chunk::Thinking(" for Tōkyō.".into()),
            Chunk::Text("Let me see — 😀.".into()),
            Chunk::Call { slot: 0, id: String::new(), name: "get_weather".into() },
            Chunk::Arguments { slot: 0, json: r#"{"city":"Tōkyō"}"#.into() },
            Chunk::Usage(Usage { input_tokens: 169, output_tokens: 15, ..Usage::default() }),
            Chunk::Stop(StopReason::EndTurn),
        ]
    );
}

#[test]
fn error_within_the_stream_is_reported() {
    let wire = recorded::Answer::text("abc").wire();
    let line = wire.split_inclusive('\n').next().expect("a line");
    let wire = format!(
        "{line}{}\n",
        recorded::error_body("an error was encountered while running the model")
    );
    assert_eq!(
        read::<Wire>([wire.as_bytes()]).map_err(|failure| failure.class),
        Err(FailureClass::Transient)
    );
    let cut = recorded::Answer::text("abc").with_stop_reason("length").wire();
    let chunks = read::<Wire>([cut.as_bytes()]).expect("whole");
    assert_eq!(chunks.last(), Some(&Chunk::Stop(StopReason::MaxTokens)));
}

#[test]
fn tool_error_of_a_model_without_tools_names_the_remedy() {
    let body = recorded::error_body("registry.ollama.ai/library/gemma3:4b does not support tools")
        .to_string();
    let failure = Wire::default().response_failure(400, body.as_bytes());
    assert_eq!(failure.class, FailureClass::InvalidRequest);
    assert!(failure.message.contains("tool_calling"), "{}", failure.message);
}

#[test]
fn context_is_large_enough_but_within_the_model_window() {
    let context = |chars: usize, window: u32| {
        context_tokens(&Request {
            system: "x".repeat(chars),
            context_window: window,
            max_tokens: 1_000,
            ..request()
        })
    };
    assert_eq!(context(100, 128_000), 8_192);
    assert_eq!(context(40_000, 128_000), 16_384);
    assert_eq!(context(40_500, 128_000), 16_384, "a little more does not load the model again");
    assert_eq!(context(400_000, 40_960), 40_960);
    assert_eq!(context(400_000, 0), 262_144);
}

#[tokio::test]
async fn request_has_the_server_format() {
    let server = VendorServer::start().await;
    server.reply(recorded::Answer::text("x").reply());
    let vendor = open(ModelProviderType::Ollama, &format!("{}/v1", server.url()), TEST_TIMEOUT);
    let mut request = request();
    request.parameters = ModelParameters {
        temperature: Some(0.5),
        top_k: Some(40),
        stop_sequences: vec!["END".into()],
        thinking: ThinkingEffort::Off.into(),
        ..ModelParameters::default()
    };
    vendor.invoke(Arc::new(request)).try_collect::<Vec<_>>().await.expect("an answer");
    let sent = server.requests().remove(0);
    assert_eq!(sent.path, "/api/chat");
    assert_eq!(
        sent.body,
        json!({
            "model": "test-model",
            "messages": [
                {"role": "system", "content": "You work through scripts."},
                {"role": "user", "content": "count the lines"},
            ],
            "stream": true,
            "options": {"num_ctx": 8192, "num_predict": 4096, "temperature": 0.5, "top_k": 40, "stop": ["END"]},
            "tools": [{"type": "function", "function": {"name": "code_interpreter", "description": "Runs JavaScript.",
                "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}}}],
            "think": false,
        })
    );
}

#[test]
fn assistant_turn_keeps_thinking_and_calls_together() {
    let mut messages = Vec::new();
    let turn = Turn {
        role: Role::Assistant,
        parts: vec![
            Part::Thinking { text: "Hm.".into(), data: String::new() },
            Part::Text("x".into()),
            Part::Call { id: "a".into(), name: "run".into(), arguments: json!({"js": "1"}) },
        ],
    };
    push_turn(&mut messages, &turn);
    let image =
        Media { media_type: "image/png".into(), name: String::new(), base64: "AA==".into() };
    let results = Turn {
        role: Role::User,
        parts: vec![
            Part::Result { id: "a".into(), name: "run".into(), output: "no".into(), failed: true },
            Part::Text("and this?".into()),
            Part::Media(image),
        ],
    };
    push_turn(&mut messages, &results);
    assert_eq!(
        json!(messages),
        json!([
            {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "run", "arguments": {"js": "1"}}}],
                "thinking": "Hm."},
            {"role": "tool", "tool_name": "run", "content": "[the script failed]\nno"},
            {"role": "user", "content": "and this?", "images": ["AA=="]},
        ])
    );
}
