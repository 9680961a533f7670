//! gRPC on the wire: compression, deadlines, and the end of a connection.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use construct_bus::subject::CheckProvider;
use construct_proto::{mesh::v1 as mesh, v1};
use futures::stream;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, codec::CompressionEncoding::Gzip};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

use super::*;

/// gRPC's number of `DEADLINE_EXCEEDED`.
const DEADLINE_EXCEEDED: &str = "4";

fn check() -> v1::CheckModelProviderRequest {
    v1::CheckModelProviderRequest { model_provider: "p".into() }
}

/// One message to `Service/Method`, with a deadline.
async fn call(
    gateway: &Gateway,
    content_type: &str,
    method: &str,
    message: &impl prost::Message,
    timeout: &str,
) -> reqwest::Response {
    let message = message.encode_to_vec();
    let length = u32::try_from(message.len()).expect("it is small");
    let request = http2()
        .post(gateway.url(&format!("/construct.v1.{method}")))
        .header("content-type", content_type)
        .header("te", "trailers")
        .header("grpc-timeout", timeout)
        .body([&[0][..], &length.to_be_bytes(), &message].concat());
    wait_for("an answer", request.send()).await.expect("it answers")
}

#[tokio::test]
async fn every_service_accepts_compressed_requests() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let mut tasks = gateway.tasks().send_compressed(Gzip).accept_compressed(Gzip);
    let found = tasks
        .get_task(v1::GetTaskRequest { task: task.clone() })
        .await
        .expect("it is there")
        .into_inner();
    assert_eq!(id(found.metadata), task);

    let mut events = gateway.events().send_compressed(Gzip).accept_compressed(Gzip);
    let request = v1::SubscribeRequest { task, cursor: "0".into(), types: Vec::new() };
    let mut subscription =
        events.subscribe(request).await.expect("the subscription is accepted").into_inner();
    assert_eq!(next_events(&mut subscription, 1).await[0].r#type, "task.created");

    let health = HealthClient::new(gateway.channel()).send_compressed(Gzip).accept_compressed(Gzip);
    let check = || async {
        let service = "construct.v1.EventService".to_owned();
        health
            .clone()
            .check(HealthCheckRequest { service })
            .await
            .map(|answer| answer.into_inner().status())
    };
    _ = wait_until("it serves", check, |answer| matches!(answer, Ok(ServingStatus::Serving))).await;

    let mut reflection = ServerReflectionClient::new(gateway.channel())
        .send_compressed(Gzip)
        .accept_compressed(Gzip);
    let question = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = reflection
        .server_reflection_info(stream::iter([question]))
        .await
        .expect("it answers")
        .into_inner();
    let answer =
        wait_for("a list", answers.message()).await.expect("it succeeds").expect("there is one");
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("{answer:?}")
    };
    assert!(
        list.service.iter().any(|service| service.name == "construct.v1.EventService"),
        "{list:?}"
    );
}

#[tokio::test]
async fn deadline_exceeded_is_reported_in_the_callers_protocol() {
    let gateway = Gateway::start().await.with_agent().await;
    // A worker that receives requests and answers none.
    let bus = gateway.nats.bus().await;
    tokio::spawn(async move {
        bus.answer(&CheckProvider, CancellationToken::new(), |_| async { None }).await
    });
    for content_type in ["application/grpc", "application/grpc-web+proto"] {
        let ask = || async {
            let begun = Instant::now();
            let answer = call(
                &gateway,
                content_type,
                "ModelProviderService/CheckModelProvider",
                &check(),
                "300m",
            )
            .await;
            (answer.headers().clone(), begun.elapsed())
        };
        // Until the worker subscribes, the call fails at once with another code.
        let exceeded = |(headers, _): &(reqwest::header::HeaderMap, Duration)| {
            headers["grpc-status"] == DEADLINE_EXCEEDED
        };
        let (headers, took) = wait_until("the time is over", ask, exceeded).await;
        assert_eq!(headers["content-type"], content_type);
        assert!(took >= Duration::from_millis(300), "{took:?}");
    }
    let answer = http()
        .post(gateway.url("/construct.v1.ModelProviderService/CheckModelProvider"))
        .header("connect-timeout-ms", "300")
        .json(&json!({"modelProvider": "p"}))
        .send();
    let answer = wait_for("an answer", answer).await.expect("it answers");
    assert_eq!(answer.json::<Value>().await.expect("JSON")["code"], "deadline_exceeded");
}

#[tokio::test]
async fn subscription_ends_at_the_client_deadline() {
    let gateway = Gateway::start().await.with_agent().await;
    let subscription =
        v1::SubscribeRequest { task: gateway.task().await, cursor: "0".into(), types: Vec::new() };
    let begun = Instant::now();
    let mut request = Request::new(subscription.clone());
    request.set_timeout(Duration::from_secs(2));
    let mut events = gateway
        .events()
        .subscribe(request)
        .await
        .expect("the subscription is accepted")
        .into_inner();
    next_events(&mut events, 1).await;
    let end = loop {
        match wait_for("the stream ends", events.message()).await {
            Ok(event) => assert!(event.is_some(), "it ended without a status"),
            Err(status) => break status,
        }
    };
    assert_eq!(end.code(), Code::DeadlineExceeded, "{end:?}");
    assert!(begun.elapsed() >= Duration::from_secs(2), "{:?}", begun.elapsed());

    let answer =
        call(&gateway, "application/grpc-web+proto", "EventService/Subscribe", &subscription, "2S")
            .await;
    let bytes = wait_for("the stream ends", answer.bytes()).await.expect("a body");
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("task.created"), "{text}");
    assert!(text.contains(&format!("grpc-status:{DEADLINE_EXCEEDED}")), "{text}");
}

/// Types of HTTP/2 frames, and the flag of an acknowledgment.
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;

/// Reads a connection without calls until the server closes it; returns the types of the frames.
async fn frames_until_closed(mut stream: TcpStream) -> Vec<u8> {
    let mut kinds = Vec::new();
    let mut head = [0; 9];
    while stream.read_exact(&mut head).await.is_ok() {
        let [a, b, c, kind, flags, ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        stream.read_exact(&mut payload).await.expect("a complete frame");
        kinds.push(kind);
        if matches!(kind, SETTINGS | PING) && flags & ACK == 0 {
            let length = if kind == PING { 8 } else { 0 };
            payload.truncate(usize::from(length));
            let answer = [&[0, 0, length, kind, ACK, 0, 0, 0, 0][..], &payload].concat();
            // Fails when the server has closed the connection.
            _ = stream.write_all(&answer).await;
        }
    }
    kinds
}

#[tokio::test]
async fn stopping_gateway_finishes_calls_and_sends_goaway() {
    let gateway = Gateway::start().await.with_agent().await;
    // A worker that answers when the test says so.
    let (bus, answer, (request_sender, mut requests)) =
        (gateway.nats.bus().await, Arc::new(Notify::new()), mpsc::channel(16));
    let may_answer = Arc::clone(&answer);
    tokio::spawn(async move {
        let respond = |_| {
            let (may_answer, sender) = (Arc::clone(&may_answer), request_sender.clone());
            async move {
                sender.send(()).await.expect("the test receives it");
                may_answer.notified().await;
                Some(mesh::ProviderCheckResult {
                    keys: vec![v1::KeyCheck { accepted: true, ..v1::KeyCheck::default() }],
                })
            }
        };
        bus.answer(&CheckProvider, CancellationToken::new(), respond).await
    });
    let mut idle = TcpStream::connect(gateway.address).await.expect("it listens");
    idle.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .expect("it reads");
    let mut providers = gateway.providers();
    let running = tokio::spawn(async move {
        loop {
            match providers.check_model_provider(check()).await {
                // The worker has not subscribed yet.
                Err(status) if status.code() == Code::Unavailable => tokio::task::yield_now().await,
                answer => return answer,
            }
        }
    });
    wait_for("HTTP/2 begins", idle.readable()).await.expect("it is open");
    wait_for("the call is under way", requests.recv()).await.expect("a request");
    gateway.context.lifecycle().stop("the test wants it to");
    let kinds = wait_for("the connection is closed", frames_until_closed(idle)).await;
    assert!(kinds.contains(&GOAWAY), "{kinds:?}");
    assert!(!running.is_finished(), "the call was canceled");
    answer.notify_one();
    let answer =
        wait_for("the call ends", running).await.expect("it does not panic").expect("it succeeds");
    assert!(answer.into_inner().keys[0].accepted);
}
