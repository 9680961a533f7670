//! Browsers, and web pages that attack through them.

use std::time::Duration;

use reqwest::{Method, StatusCode};

use super::*;
use crate::Config;

const APP: &str = "https://app.example";
/// One request of each protocol.
const EVERY_PROTOCOL: [(&str, &str, &str); 5] = [
    ("gRPC", "/construct.v1.TaskService/ListTasks", "application/grpc"),
    ("gRPC-Web", "/construct.v1.TaskService/ListTasks", "application/grpc-web+proto"),
    ("Connect", "/construct.v1.TaskService/ListTasks", "application/json"),
    ("Connect's streams", "/construct.v1.EventService/Subscribe", "application/connect+json"),
    ("REST", "/v1/tasks", "application/json"),
];

/// Whether an answer refuses the caller.
async fn is_refused(response: reqwest::Response) -> bool {
    let grpc = response.headers().get("grpc-status").is_some_and(|status| status == "7");
    grpc || response.status() == StatusCode::FORBIDDEN
}

#[tokio::test]
async fn page_of_unknown_origin_is_refused() {
    let gateway = Gateway::start().await;
    for (protocol, path, kind) in EVERY_PROTOCOL {
        let ask = |name: &'static str, value: &'static str| {
            http2()
                .post(gateway.url(path))
                .header("content-type", kind)
                .header(name, value)
                .body("{}")
                .send()
        };
        for (name, value) in [
            ("origin", "https://evil.example"),
            ("origin", "null"),
            ("sec-fetch-site", "cross-site"),
        ] {
            assert!(
                is_refused(ask(name, value).await.expect("it answers")).await,
                "{protocol}: {name}: {value}"
            );
        }
        // DNS rebinding: the page's own host name resolves to this gateway.
        let rebound = http()
            .post(gateway.url(path))
            .header("content-type", kind)
            .header("host", "evil.example");
        assert!(
            is_refused(rebound.body("{}").send().await.expect("it answers")).await,
            "{protocol}"
        );
        let local = http()
            .post(gateway.url(path))
            .header("content-type", kind)
            .header("host", "localhost:60080");
        assert!(
            !is_refused(local.body("{}").send().await.expect("it answers")).await,
            "{protocol}"
        );
    }
    // A preflight is refused as well.
    let preflight = http()
        .request(Method::OPTIONS, gateway.url("/v1/tasks"))
        .header("origin", "https://evil.example")
        .header("access-control-request-method", "POST")
        .send()
        .await
        .expect("it answers");
    assert_eq!(preflight.status(), StatusCode::FORBIDDEN);
    assert!(!preflight.headers().contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn page_of_configured_origin_may_call() {
    let config = Config { gateway_origins: vec![APP.into()], ..Config::default() };
    let gateway = Gateway::start_local(config).await;
    for (protocol, path, kind) in EVERY_PROTOCOL {
        let preflight = http()
            .request(Method::OPTIONS, gateway.url(path))
            .header("origin", APP)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "content-type")
            .send()
            .await
            .expect("it answers");
        assert_eq!(preflight.status(), StatusCode::NO_CONTENT, "{protocol}");
        assert_eq!(preflight.headers()["access-control-allow-origin"], APP, "{protocol}");
        let allowed =
            preflight.headers()["access-control-allow-headers"].to_str().expect("text").to_owned();
        assert!(
            allowed.contains("x-organization-id") && allowed.contains("authorization"),
            "{allowed}"
        );
        if kind == "application/grpc" || kind == "application/connect+json" {
            continue;
        }
        let request = http()
            .post(gateway.url(path))
            .header("content-type", kind)
            .header("origin", APP)
            .body("{}");
        let response = request.send().await.expect("it answers");
        assert_eq!(response.headers()["access-control-allow-origin"], APP, "{protocol}");
        assert!(!is_refused(response).await, "{protocol}");
    }
}

#[tokio::test]
async fn unauthenticated_sender_of_a_body_still_gets_the_refusal() {
    let gateway =
        Gateway::start_with(Config { gateway_login: crate::Login::Required, ..Config::default() })
            .await;
    let piece = vec![b' '; 5 * 1024];
    for (protocol, path, kind) in EVERY_PROTOCOL.into_iter().skip(1) {
        let request = |more: &str| {
            format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\nauthorization: Bearer ct_wrong\r\n\
                 content-length: {}\r\n{more}\r\n",
                8 * piece.len()
            )
        };
        let mut stream = TcpStream::connect(gateway.address).await.expect("it listens");
        stream.set_nodelay(true).expect("an option");
        // Twice: the connection stays usable.
        for more in ["", "connection: close\r\n"] {
            stream.write_all(request(more).as_bytes()).await.expect("it reads");
            for _ in 0..8 {
                // Enough time to refuse the request and to close the connection.
                tokio::time::sleep(Duration::from_millis(30)).await;
                stream
                    .write_all(&piece)
                    .await
                    .unwrap_or_else(|error| panic!("{protocol}: {error}"));
            }
        }
        let mut answers = Vec::new();
        wait_for("the connection is closed", stream.read_to_end(&mut answers))
            .await
            .expect("it answers");
        let answers = String::from_utf8_lossy(&answers);
        let status =
            if matches!(protocol, "Connect" | "REST") { "HTTP/1.1 401 " } else { "HTTP/1.1 200 " };
        assert_eq!(answers.matches(status).count(), 2, "{protocol}: {answers}");
        assert!(refusals(&answers) >= 2, "{protocol}: {answers}");
        // A client that waits for `100 Continue` does not get it.
        let mut stream = TcpStream::connect(gateway.address).await.expect("it listens");
        stream.write_all(request("expect: 100-continue\r\n").as_bytes()).await.expect("it reads");
        let answer = read_refusal(&mut stream, protocol).await;
        assert!(!answer.starts_with("HTTP/1.1 100"), "{protocol}: {answer}");
    }
}

/// The number of refusals, in the form of any protocol.
fn refusals(answers: &str) -> usize {
    let answers = answers.to_lowercase().replace(": ", ":");
    ["\"code\":\"unauthenticated\"", "grpc-status:16"]
        .iter()
        .map(|refusal| answers.matches(refusal).count())
        .sum()
}

/// Reads until the answer has a refusal.
async fn read_refusal(stream: &mut TcpStream, protocol: &str) -> String {
    let (mut answer, mut part) = (String::new(), [0; 4096]);
    while refusals(&answer) == 0 {
        let read = wait_for("it answers", stream.read(&mut part)).await.expect("it answers");
        assert!(read > 0, "{protocol}: {answer}");
        answer.push_str(&String::from_utf8_lossy(&part[..read]));
    }
    answer
}

#[tokio::test]
async fn unauthenticated_request_is_refused_before_its_body() {
    let gateway =
        Gateway::start_with(Config { gateway_login: crate::Login::Required, ..Config::default() })
            .await;
    for (protocol, path, kind) in EVERY_PROTOCOL.into_iter().skip(2) {
        // A body is announced and never sent.
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: 1000\r\n\r\n"
        );
        let mut stream = TcpStream::connect(gateway.address).await.expect("it listens");
        stream.write_all(request.as_bytes()).await.expect("it reads");
        read_refusal(&mut stream, protocol).await;
    }
}
