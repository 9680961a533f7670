//! A recorded answer is replayed unchanged without the vendor.

use std::{path::Path, sync::Arc, time::Duration};

use construct_proto::mesh::v1 as mesh;
use construct_tests::vendor::VendorServer;
use futures::StreamExt as _;

use super::*;
use crate::{
    call::tests::command,
    scripted::Scripted,
    tests::{
        TEST_TIMEOUT, until, vendors,
        wires::{KEY, Wire},
    },
    vendor::{Request, Vendor, VendorFactory as _, Vendors},
};

fn recording(folder: &Path) -> Vendors {
    let vendors = vendors(TEST_TIMEOUT);
    let recorder = Recorder::new(folder).expect("a folder");
    Vendors { http: vendors.http.with_recorder(Some(Arc::new(recorder))), ..vendors }
}

fn open(vendors: &Vendors, wire: Wire, url: &str) -> Box<dyn Vendor> {
    let region = if wire == Wire::Bedrock { "/?region=us-east-1" } else { "" };
    let base_url = format!("{url}{region}");
    let provider =
        mesh::Provider { r#type: wire.provider().into(), base_url, ..mesh::Provider::default() };
    vendors.open(&provider, Some(KEY.into()), None).expect("the provider is valid")
}

async fn invoke(vendor: &dyn Vendor, question: &str) -> Vec<Result<Chunk, Failure>> {
    let request = Request::from_command(&command(question)).expect("the command is whole");
    vendor.invoke(Arc::new(request)).collect().await
}

/// The texts of all cassettes, once there are `count`.
async fn cassettes(folder: &Path, count: usize) -> Vec<String> {
    until("the cassettes", async || {
        let files = std::fs::read_dir(folder).expect("readable");
        let mut names: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
        names.retain(|path| {
            !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
        });
        names.sort();
        let texts: Vec<String> =
            names.iter().map(|path| std::fs::read_to_string(path).expect("readable")).collect();
        if texts.len() == count { Ok(texts) } else { Err(texts.len()) }
    })
    .await
}

fn replay(text: &str) -> Scripted {
    Scripted::parse(text, "provider_2".into(), Arc::default()).expect("a cassette is a script")
}

#[tokio::test]
async fn replayed_answer_equals_the_recorded_one_for_every_vendor() {
    for wire in Wire::ALL {
        let folder = tempfile::tempdir().expect("a folder");
        let server = VendorServer::start().await;
        let (stream, _) = wire.rich_answer();
        server
            .reply(wire.reply(&stream).header("x-request-id", "req_1").header("set-cookie", "a=b"));
        let vendor = open(&recording(folder.path()), wire, &server.url());
        let live = invoke(vendor.as_ref(), "go").await;
        let text = &cassettes(folder.path(), 1).await[0];
        assert!(text.contains("req_1") && !text.contains("a=b"), "{text}");
        assert!(text.contains("\"status\": 200") && text.contains("\"go\""), "{text}");
        assert_eq!(invoke(&replay(text), "anything").await, live, "{wire:?}");
    }
}

#[tokio::test]
async fn failure_is_replayed_as_recorded() {
    let wire = Wire::Anthropic;
    let folder = tempfile::tempdir().expect("a folder");
    let server = VendorServer::start().await;
    server.reply(wire.error(429, FailureClass::RateLimited).header("retry-after", "7"));
    let vendor = open(&recording(folder.path()), wire, &server.url());
    assert!(invoke(vendor.as_ref(), "go").await[0].is_err());
    let text = &cassettes(folder.path(), 1).await[0];
    let replayed = invoke(&replay(text), "go").await;
    let [Err(failure)] = &replayed[..] else { panic!("{replayed:?}") };
    assert_eq!((failure.class, failure.http_status), (FailureClass::RateLimited, 429));
    let wait = failure.requested_delay(Timestamp::now()).expect("it says when");
    assert!((Duration::from_secs(5)..=Duration::from_secs(7)).contains(&wait), "{wait:?}");
}

#[tokio::test]
async fn failed_attempt_is_replayed_once_before_the_answer() {
    let wire = Wire::Anthropic;
    let folder = tempfile::tempdir().expect("a folder");
    let server = VendorServer::start().await;
    server.reply(wire.error(500, FailureClass::Transient));
    server.reply(wire.reply(&wire.answer("It is 42.")));
    let vendor = open(&recording(folder.path()), wire, &server.url());
    assert!(invoke(vendor.as_ref(), "go").await[0].is_err());
    // Written one after the other, so that their names are in this order.
    cassettes(folder.path(), 1).await;
    let answer = invoke(vendor.as_ref(), "go").await;
    let texts = cassettes(folder.path(), 2).await;
    let asked = Request::from_command(&command("go")).expect("the command is whole");
    for (attempt, text) in (1..).zip(&texts) {
        let cassette = &Cassette::parse(text).expect("readable").expect("a cassette")[0];
        let of = (cassette.task.as_str(), cassette.step.as_str(), cassette.attempt);
        assert_eq!(of, (asked.task_id.as_str(), asked.step_id.as_str(), attempt));
        assert!(text.contains(&format!("\"try\": {attempt}")), "{text}");
    }
    let script = replay(&format!("[{}]", texts.join(",")));
    let failed = invoke(&script, "go").await;
    assert!(matches!(&failed[..], [Err(failure)] if failure.http_status == 500), "{failed:?}");
    for _ in 0..2 {
        assert_eq!(invoke(&script, "go").await, answer, "also when it is delivered again");
    }
}

#[tokio::test]
async fn cassette_contains_no_key() {
    let wire = Wire::OpenAi;
    let folder = tempfile::tempdir().expect("a folder");
    let server = VendorServer::start().await;
    server.reply(wire.reply(&wire.answer(&format!("Your key is {KEY}, \"{KEY}\"."))));
    server.reply(wire.error_saying(401, &format!("Incorrect API key provided: {KEY}")));
    let vendor = open(&recording(folder.path()), wire, &server.url());
    assert!(invoke(vendor.as_ref(), &format!("is {KEY} my key?")).await[0].is_ok());
    assert!(invoke(vendor.as_ref(), "go").await[0].is_err());
    for text in cassettes(folder.path(), 2).await {
        assert!(!text.contains(KEY), "{text}");
        assert!(text.contains("[api key]"), "{text}");
    }
}

#[tokio::test]
async fn abandoned_answer_is_recorded_up_to_its_end() {
    let wire = Wire::Anthropic;
    let folder = tempfile::tempdir().expect("a folder");
    let server = VendorServer::start().await;
    let stream = wire.answer("The answer is 42, and that is certain.");
    server.reply(wire.reply(&stream).silent_after(stream.len() * 2 / 3));
    let vendor = open(&recording(folder.path()), wire, &server.url());
    let request = Request::from_command(&command("go")).expect("the command is whole");
    let mut chunks = vendor.invoke(Arc::new(request));
    while !matches!(chunks.next().await, Some(Ok(Chunk::Text(_)))) {}
    drop(chunks);
    let text = &cassettes(folder.path(), 1).await[0];
    let cassette = &Cassette::parse(text).expect("readable").expect("a cassette")[0];
    assert!(cassette.end.given_up);
    assert!(cassette.pieces.iter().any(|piece| matches!(piece.content, PieceContent::Text(_))));
}

#[tokio::test]
async fn several_cassettes_are_the_answers_of_a_conversation() {
    let say = |text: &str, purpose: &str| {
        let pieces = vec![Piece { ms: 0, content: PieceContent::Text(text.into()) }];
        Cassette {
            cassette: FORMAT_VERSION,
            purpose: purpose.into(),
            pieces,
            ..Cassette::default()
        }
    };
    let all = vec![say("A title", "title"), say("one", "turn"), say("two", "turn")];
    let script = replay(&serde_json::to_string(&all).expect("JSON"));
    let mut command = command("go");
    let answered = |request: &mesh::ModelInvoke| {
        let request = Request::from_command(request).expect("whole");
        script.invoke(Arc::new(request)).collect::<Vec<_>>()
    };
    assert_eq!(answered(&command).await, [Ok(Chunk::Text("one".into()))]);
    command.messages.push(mesh::ChatMessage { source: 2, ..mesh::ChatMessage::default() });
    assert_eq!(answered(&command).await, [Ok(Chunk::Text("two".into()))]);
    command.purpose = mesh::model_invoke::Purpose::Title.into();
    assert_eq!(answered(&command).await, [Ok(Chunk::Text("A title".into()))]);
    assert!(
        Scripted::parse("{\"cassette\": 1, \"pieces\": 7}", String::new(), Arc::default()).is_err()
    );
}
