//! Requests and answers of every vendor: calls, thinking, images and files, usage.

use std::sync::Arc;

use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::{self as mesh, ChatMessage, ModelInvoke, model_completed::StopReason},
    v1::{
        self, Attachment, CodeInterpreterCall, CodeInterpreterResult, Event, MessageDelta,
        MessageSource, ModelParameters, Text, ThinkingEffort, block::Block, event::Payload,
        message_delta::Delta,
    },
};
use construct_tests::vendor::VendorServer;
use futures::TryStreamExt as _;
use serde_json::Value;

use super::{
    TEST_TIMEOUT, open,
    wires::{ANSWER_TEXT, CODE, THINKING_TEXT, Wire},
};
use crate::{
    answer::{Answer, CompletedAnswer},
    call::tests::command,
    delta::{
        Deltas,
        tests::{RecordingProgress, step_context},
    },
    meter::Meter,
    vendor::Request,
};

fn message(source: MessageSource, blocks: Vec<Block>) -> ChatMessage {
    let blocks = blocks.into_iter().map(|block| v1::Block { block: Some(block) }).collect();
    ChatMessage { source: source.into(), blocks }
}

fn text(text: &str) -> Block {
    Block::Text(Text { text: text.into() })
}

fn to(wire: Wire, provider_id: &str) -> ModelInvoke {
    let provider = mesh::Provider {
        id: provider_id.into(),
        r#type: wire.provider().into(),
        ..mesh::Provider::default()
    };
    let mut command = ModelInvoke { provider: Some(provider), ..command("go") };
    if let (Wire::Responses, Some(model)) = (wire, &mut command.model) {
        // This vendor gets thinking only for reasoning models.
        model.vendor_model = "gpt-5.1".into();
    }
    command
}

/// The answer to `command`, with its live text and usage.
async fn ask(
    wire: Wire,
    server: &VendorServer,
    command: &ModelInvoke,
) -> (CompletedAnswer, Usage, Vec<Event>) {
    let request = Arc::new(Request::from_command(command).expect("the command is whole"));
    let vendor = open(wire.provider(), &server.url(), TEST_TIMEOUT);
    let progress_log = RecordingProgress::default();
    let mut progress = progress_log.clone();
    let mut deltas = Deltas::new(step_context(1), &mut progress);
    let mut answer = Answer::new(&request);
    let mut meter = Meter::new(Arc::clone(&request));
    let mut chunks = vendor.invoke(request);
    while let Some(chunk) =
        chunks.try_next().await.unwrap_or_else(|failure| panic!("{wire:?}: {failure}"))
    {
        meter.observe(&chunk);
        if let Some(visible) = answer.push(chunk).expect("in bounds") {
            deltas.push(visible).await;
        }
    }
    deltas.flush().await;
    let usage = meter.usage(true);
    (answer.complete(), usage, progress_log.events())
}

fn body(server: &VendorServer) -> Value {
    server.requests().last().expect("it was asked").body.clone()
}

#[tokio::test]
async fn thinking_text_and_scripts_become_blocks_with_usage() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let (stream, expected) = wire.rich_answer();
        server.reply(wire.reply(&stream));
        let (completed, usage, events) = ask(wire, &server, &to(wire, "provider_1")).await;
        assert_eq!((completed.stop_reason, usage), (StopReason::ToolUse, expected), "{wire:?}");
        let (mut thoughts, mut calls, mut said) = (Vec::new(), Vec::new(), Vec::new());
        for block in &completed.blocks {
            match block.block.as_ref().expect("something") {
                Block::Thinking(thinking) => thoughts.push(thinking),
                Block::CodeInterpreterCall(call) => calls.push(call),
                Block::Text(text) => said.push(text.text.as_str()),
                other => panic!("{wire:?}: {other:?}"),
            }
        }
        assert_eq!(said, [ANSWER_TEXT], "{wire:?}");
        assert_eq!(
            calls.iter().map(|call| call.code.as_str()).collect::<Vec<_>>(),
            [CODE],
            "{wire:?}"
        );
        let thought: String = thoughts.iter().map(|thought| thought.text.as_str()).collect();
        assert_eq!(thought, THINKING_TEXT, "{wire:?}");
        for thought in thoughts {
            assert_eq!(thought.provider_id, "provider_1");
            assert!(
                !thought.vendor.is_empty()
                    && thought.vendor.chars().all(|c| c.is_ascii_lowercase() || c == '_')
            );
        }
        let mut shown = [String::new(), String::new(), String::new()];
        for event in &events {
            match &event.payload {
                Some(Payload::MessageDelta(MessageDelta { delta: Some(delta), .. })) => match delta
                {
                    Delta::Thinking(text) => shown[0].push_str(text),
                    Delta::Text(text) => shown[1].push_str(text),
                    Delta::Code(text) => shown[2].push_str(text),
                },
                other => panic!("{wire:?}: {other:?}"),
            }
        }
        assert_eq!(shown, [THINKING_TEXT, ANSWER_TEXT, CODE], "{wire:?}");
    }
}

#[tokio::test]
async fn thinking_is_replayed_only_to_its_origin() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let (stream, _) = wire.rich_answer();
        server.reply(wire.reply(&stream));
        let mut command = to(wire, "provider_1");
        let (completed, ..) = ask(wire, &server, &command).await;
        let id = completed
            .blocks
            .iter()
            .find_map(|block| match &block.block {
                Some(Block::CodeInterpreterCall(call)) => Some(call.id.clone()),
                _ => None,
            })
            .expect("a call");
        let result = CodeInterpreterResult {
            id,
            output: "7 seven".into(),
            ..CodeInterpreterResult::default()
        };
        command.messages.push(ChatMessage {
            source: MessageSource::Assistant.into(),
            blocks: completed.blocks.clone(),
        });
        command
            .messages
            .push(message(MessageSource::System, vec![Block::CodeInterpreterResult(result)]));
        server.reply(wire.reply(&wire.answer("Seven.")));
        ask(wire, &server, &command).await;
        let own = body(&server).to_string();
        match wire.thought_sent_back() {
            Some(sent) => assert_eq!(own.matches(sent).count(), 1, "{wire:?}: {own}"),
            None => assert!(!own.contains(THINKING_TEXT), "{wire:?}: {own}"),
        }
        assert!(own.contains("7 seven") && own.contains("code_interpreter"), "{wire:?}: {own}");

        let elsewhere = ModelInvoke { provider: to(wire, "provider_2").provider, ..command };
        server.reply(wire.reply(&wire.answer("Seven.")));
        ask(wire, &server, &elsewhere).await;
        let foreign = body(&server).to_string();
        for secret in [THINKING_TEXT, super::wires::PROOF] {
            assert!(!foreign.contains(secret), "{wire:?}: {foreign}");
        }
        assert!(foreign.contains("7 seven"), "{wire:?}: {foreign}");
    }
}

#[tokio::test]
async fn images_and_files_are_shown_or_named() {
    let attachment = |media_type: &str, name: &str, data: &[u8]| {
        let (media_type, name) = (media_type.into(), name.into());
        Block::Attachment(Attachment {
            media_type,
            name,
            data: data.into(),
            ..Attachment::default()
        })
    };
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        server.reply(wire.reply(&wire.answer("I see.")));
        let mut command = to(wire, "provider_1");
        command.messages.push(message(
            MessageSource::User,
            vec![
                text("What is this?"),
                attachment("image/png", "a.png", b"\x89PNG-image"),
                attachment("application/pdf", "Report (final).pdf", b"%PDF-document"),
                attachment("text/csv", "t.csv", b"1;2"),
            ],
        ));
        ask(wire, &server, &command).await;
        let body = body(&server).to_string();
        assert!(body.contains("What is this?") && body.contains("1;2"), "{wire:?}: {body}");
        for (taken, base64, media_type) in [
            (wire.takes_images(), "iVBORy1pbWFnZQ==", "image/png"),
            (wire.takes_documents(), "JVBERi1kb2N1bWVudA==", "application/pdf"),
        ] {
            assert_eq!(
                body.matches(base64).count(),
                usize::from(taken),
                "{wire:?} {media_type}: {body}"
            );
            let named = format!("{media_type}) that cannot be shown to you");
            assert_eq!(body.contains(&named), !taken, "{wire:?} {media_type}: {body}");
        }
    }
}

#[tokio::test]
async fn oversized_images_and_documents_are_named() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        server.reply(wire.reply(&wire.answer("I see.")));
        let mut command = to(wire, "provider_1");
        let attachment = |media_type: &str, name: &str, size: usize| {
            let (media_type, name, data) = (media_type.into(), name.into(), vec![0; size]);
            Block::Attachment(Attachment { media_type, name, data, ..Attachment::default() })
        };
        let shown = [("image/png", "i.png", 4 << 20), ("application/pdf", "d.pdf", 5 << 20)];
        let blocks = shown.map(|(media_type, name, size)| attachment(media_type, name, size));
        command.messages.push(message(MessageSource::User, blocks.into()));
        ask(wire, &server, &command).await;
        let body = body(&server).to_string();
        let (image, document) = match wire {
            Wire::Anthropic => (false, true),
            Wire::Bedrock => (false, false),
            _ => (wire.takes_images(), wire.takes_documents()),
        };
        let mut encoded = 0;
        for ((media_type, name, size), taken) in shown.into_iter().zip([image, document]) {
            let named = format!("({name}, {media_type}) that cannot be shown to you");
            assert_eq!(body.contains(&named), !taken, "{wire:?} {media_type}");
            encoded += if taken { size.div_ceil(3) * 4 } else { 0 };
        }
        assert!(
            (encoded..encoded + 100_000).contains(&body.len()),
            "{wire:?}: {} bytes",
            body.len()
        );
    }
}

#[tokio::test]
async fn calls_of_one_vendor_continue_at_any_other() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        server.reply(wire.reply(&wire.answer("Fine.")));
        let mut command = to(wire, "provider_1");
        let call = |id: &str| {
            Block::CodeInterpreterCall(CodeInterpreterCall { id: id.into(), code: "f()".into() })
        };
        let result = |id: &str, error: &str| {
            Block::CodeInterpreterResult(CodeInterpreterResult {
                id: id.into(),
                output: "out".into(),
                error: error.into(),
                ..CodeInterpreterResult::default()
            })
        };
        // Ids that no other vendor accepts.
        command.messages.push(message(MessageSource::Assistant, vec![call("a:1|ä"), call("")]));
        command.messages.push(message(
            MessageSource::System,
            vec![result("a:1|ä", ""), result("", "Error: no")],
        ));
        let (completed, ..) = ask(wire, &server, &command).await;
        assert_eq!(completed.stop_reason, StopReason::EndTurn, "{wire:?}");
        let body = body(&server).to_string();
        assert!(!body.contains("a:1|ä"), "{wire:?}: {body}");
        assert!(body.contains("Error: no"), "{wire:?}: {body}");
    }
}

#[tokio::test]
async fn every_effort_is_sent_in_the_vendor_format() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let mut bodies = Vec::new();
        for effort in [
            ThinkingEffort::Unspecified,
            ThinkingEffort::Off,
            ThinkingEffort::Low,
            ThinkingEffort::Medium,
            ThinkingEffort::High,
        ] {
            server.reply(wire.reply(&wire.answer("x")));
            let mut command = to(wire, "provider_1");
            let mut model = command.model.unwrap_or_default();
            // A reasoning model of each vendor.
            model.vendor_model = match wire {
                Wire::Anthropic => "claude-opus-4-7",
                Wire::Bedrock => "eu.anthropic.claude-sonnet-4-6",
                Wire::Gemini => "gemini-3.5-flash",
                Wire::Ollama => "gpt-oss:20b",
                Wire::Xai => "grok-4.3",
                _ => "gpt-5.1",
            }
            .into();
            model.max_output_tokens = 64_000;
            command.model = Some(model);
            command.parameters =
                Some(ModelParameters { thinking: effort.into(), ..ModelParameters::default() });
            ask(wire, &server, &command).await;
            bodies.push(body(&server).to_string());
        }
        let asks = |body: &str| {
            ["thinking", "reasoning\":{\"effort", "reasoning_effort", "think\":", "output_config"]
                .iter()
                .any(|word| body.contains(word))
        };
        assert!(!asks(&bodies[0]), "{wire:?}: {}", bodies[0]);
        assert!(bodies[1..].iter().all(|body| asks(body)), "{wire:?}: {bodies:?}");
        assert!(bodies[4].contains("high"), "{wire:?}: {}", bodies[4]);
    }
}

#[tokio::test]
async fn missing_or_extra_byte_never_panics() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let (stream, _) = wire.rich_answer();
        for at in (0..stream.len()).step_by(stream.len() / 40 + 1) {
            let mut damaged = stream.clone();
            damaged.remove(at);
            damaged.insert(at, 0xFF);
            server.reply(wire.reply(&damaged));
            let vendor = open(wire.provider(), &server.url(), TEST_TIMEOUT);
            let request = Arc::new(Request::from_command(&to(wire, "provider_1")).expect("whole"));
            // Either is fine, as long as it ends.
            let _ = vendor.invoke(request).try_collect::<Vec<_>>().await;
        }
    }
}
