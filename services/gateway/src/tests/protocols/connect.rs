//! Connect, byte by byte.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use construct_proto::v1;
use prost::Message as _;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use super::*;
use crate::{
    Config,
    tests::{
        issuer::{AUDIENCE, Key},
        walk::login_required,
    },
};

const TASKS: &str = "/construct.v1.TaskService/";

fn envelope(flags: u8, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("it is small");
    [&[flags][..], &length.to_be_bytes(), message].concat()
}

/// The envelopes of a complete stream.
fn envelopes(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut found = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<5>() {
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
        found.push((header[0], rest[..length].to_vec()));
        bytes = &rest[length..];
    }
    assert!(bytes.is_empty(), "{bytes:?}");
    found
}

async fn expect_response(response: reqwest::Response, http: StatusCode, code: &str) -> Value {
    let status = response.status();
    let text = response.text().await.expect("a body");
    assert_eq!(status, http, "{text}");
    let error: Value = serde_json::from_str(&text).expect("the error is JSON");
    assert_eq!(error["code"], code, "{error}");
    error
}

#[tokio::test]
async fn unary_call_accepts_json_and_protobuf_over_both_http_versions() {
    let gateway = Gateway::start().await.with_agent().await;
    for client in [http(), http2()] {
        let create = gateway.url(&format!("{TASKS}CreateTask"));
        let response = client.post(&create).json(&task_json()).send().await.expect("it answers");
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(response.headers()["cache-control"], "no-store");
        let made: Value = response.json().await.expect("JSON");
        assert_eq!(made["spec"]["title"], "over the wire");
        let id = made["metadata"]["id"].as_str().expect("an id").to_owned();

        let body = v1::GetTaskRequest { task: id.clone() }.encode_to_vec();
        let get = gateway.url(&format!("{TASKS}GetTask"));
        let request = client.post(&get).header("content-type", "application/proto").body(body);
        let response = request.send().await.expect("it answers");
        assert_eq!(response.headers()["content-type"], "application/proto");
        let task = v1::Task::decode(response.bytes().await.expect("a body")).expect("a task");
        assert_eq!(super::super::harness::id(task.metadata), id);
    }
}

#[tokio::test]
async fn get_calls_only_methods_without_side_effects() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let get = |query: String| http().get(gateway.url(&format!("{TASKS}GetTask?{query}"))).send();
    let message = json!({"task": task}).to_string();
    let plain: String = form_urlencoded::byte_serialize(message.as_bytes()).collect();
    let packed = base64::engine::general_purpose::URL_SAFE.encode(gzip(message.as_bytes()));
    let proto = base64::engine::general_purpose::URL_SAFE_NO_PAD
        .encode(v1::GetTaskRequest { task: task.clone() }.encode_to_vec());
    for query in [
        format!("connect=v1&encoding=json&message={plain}"),
        format!("encoding=json&message={plain}&other=1"),
        format!("connect=v1&encoding=json&base64=1&compression=gzip&message={packed}"),
        format!("connect=v1&encoding=proto&base64=1&message={proto}"),
    ] {
        let response = get(query.clone()).await.expect("it answers");
        assert_eq!(response.status(), StatusCode::OK, "{query}: {:?}", response.text().await);
    }
    for (query, field) in [
        ("encoding=json".to_owned(), "message"),
        (format!("message={plain}"), "encoding"),
        (format!("encoding=xml&message={plain}"), "encoding"),
        (format!("connect=v2&encoding=json&message={plain}"), "connect"),
        ("encoding=json&base64=1&message=%21".to_owned(), "message"),
    ] {
        let error = expect_response(
            get(query).await.expect("it answers"),
            StatusCode::BAD_REQUEST,
            "invalid_argument",
        )
        .await;
        assert_eq!(error["details"][0]["debug"]["fieldViolations"][0]["field"], field, "{error}");
    }
    // A link cannot call a method with side effects.
    let response = http()
        .get(gateway.url(&format!("{TASKS}DeleteTask?encoding=json&message={plain}")))
        .send()
        .await;
    let response = response.expect("it answers");
    assert_eq!(
        (response.status(), &response.headers()["allow"]),
        (StatusCode::METHOD_NOT_ALLOWED, &"POST".parse().expect("a value"))
    );
}

#[tokio::test]
async fn error_has_code_message_and_details() {
    let gateway = Gateway::start().await.with_agent().await;
    let call = |method: &str, body: Value| {
        http().post(gateway.url(&format!("{TASKS}{method}"))).json(&body).send()
    };
    let missing = "task_01890a5d-ac96-774b-bcce-b302099a8057";
    let response = call("GetTask", json!({"task": missing})).await.expect("it answers");
    let error = expect_response(response, StatusCode::NOT_FOUND, "not_found").await;
    assert!(error["message"].as_str().expect("a message").contains(missing), "{error}");
    let detail = &error["details"][0];
    assert_eq!(detail["type"], "google.rpc.ResourceInfo");
    assert_eq!(detail["debug"]["resourceName"], missing);
    let bytes = STANDARD_NO_PAD
        .decode(detail["value"].as_str().expect("base64"))
        .expect("base64 without padding");
    assert!(String::from_utf8_lossy(&bytes).contains(missing));

    // An unknown field is named with its path, and so is one beyond its limit.
    for (body, field) in [
        (json!({"spec": {"agent": "ada", "titel": "x"}}), "spec.titel"),
        (json!({"spec": {"agent": "ada", "title": "x".repeat(201)}}), "spec.title"),
    ] {
        let response = call("CreateTask", body).await.expect("it answers");
        let error = expect_response(response, StatusCode::BAD_REQUEST, "invalid_argument").await;
        assert_eq!(error["details"][0]["debug"]["fieldViolations"][0]["field"], field, "{error}");
    }
}

#[tokio::test]
async fn malformed_request_gets_matching_http_status() {
    let gateway = Gateway::start().await;
    let url = gateway.url(&format!("{TASKS}GetTask"));
    let post =
        |kind: &str, body: Vec<u8>| http().post(&url).header("content-type", kind).body(body);
    for kind in
        ["text/plain", "application/xml", "", "application/connect+json", "application/jsonx"]
    {
        let response = post(kind, b"{}".to_vec()).send().await.expect("it answers");
        assert_eq!(response.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE, "{kind}");
        assert_eq!(response.headers()["accept-post"], "application/json, application/proto");
    }
    let put = http().put(&url).send().await.expect("it answers");
    assert_eq!(
        (put.status(), &put.headers()["allow"]),
        (StatusCode::METHOD_NOT_ALLOWED, &"GET, POST".parse().expect("a value"))
    );
    let unknown = http()
        .post(gateway.url(&format!("{TASKS}GetTusk")))
        .json(&json!({}))
        .send()
        .await
        .expect("it answers");
    expect_response(unknown, StatusCode::NOT_FOUND, "unimplemented").await;

    let respond = |kind: &'static str, header: &'static str, value: &'static str, body: Vec<u8>| {
        let request = post(kind, body).header(header, value);
        async move { request.send().await.expect("it answers") }
    };
    let json = "application/json; charset=utf-8";
    let cases = [
        (
            "connect-protocol-version",
            "2",
            b"{}".to_vec(),
            StatusCode::BAD_REQUEST,
            "invalid_argument",
        ),
        ("connect-timeout-ms", "soon", b"{}".to_vec(), StatusCode::BAD_REQUEST, "invalid_argument"),
        (
            "connect-timeout-ms",
            "12345678901",
            b"{}".to_vec(),
            StatusCode::BAD_REQUEST,
            "invalid_argument",
        ),
        ("content-encoding", "br", b"{}".to_vec(), StatusCode::NOT_IMPLEMENTED, "unimplemented"),
        (
            "content-encoding",
            "gzip",
            b"no gzip".to_vec(),
            StatusCode::BAD_REQUEST,
            "invalid_argument",
        ),
        (
            "content-encoding",
            "identity",
            b"{".to_vec(),
            StatusCode::BAD_REQUEST,
            "invalid_argument",
        ),
        ("content-encoding", "identity", b"".to_vec(), StatusCode::BAD_REQUEST, "invalid_argument"),
        (
            "content-encoding",
            "identity",
            vec![b' '; 4 * 1024 * 1024 + 1],
            StatusCode::TOO_MANY_REQUESTS,
            "resource_exhausted",
        ),
        (
            "content-encoding",
            "gzip",
            gzip(&vec![b' '; 4 * 1024 * 1024 + 1]),
            StatusCode::TOO_MANY_REQUESTS,
            "resource_exhausted",
        ),
        (
            "connect-timeout-ms",
            "0",
            b"{}".to_vec(),
            StatusCode::GATEWAY_TIMEOUT,
            "deadline_exceeded",
        ),
    ];
    for (header, value, body, http, code) in cases {
        expect_response(respond(json, header, value, body).await, http, code).await;
    }
    let response = post("application/proto", vec![0x0a, 0x7f]).send().await.expect("it answers");
    expect_response(response, StatusCode::BAD_REQUEST, "invalid_argument").await;
}

#[tokio::test]
async fn gzip_works_in_both_directions() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let spec = json!({"task": task, "blocks": [{"text": {"text": "again and ".repeat(1000)}}]});
    let response = http()
        .post(gateway.url("/construct.v1.MessageService/CreateMessage"))
        .header("content-type", "application/json")
        .header("content-encoding", "gzip")
        .header("accept-encoding", "gzip")
        .body(gzip(json!({ "spec": spec }).to_string().as_bytes()))
        .send()
        .await
        .expect("it answers");
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["content-encoding"], "gzip");
    let packed = response.bytes().await.expect("a body");
    assert!(packed.len() < 2000, "{}", packed.len());
    let message: Value =
        serde_json::from_reader(flate2::read::GzDecoder::new(&packed[..])).expect("JSON");
    assert_eq!(message["spec"]["blocks"], spec["blocks"]);
}

#[tokio::test]
async fn stream_request_can_be_split_anywhere() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    gateway.send_message(&task, "one").await;
    gateway
        .tasks()
        .delete_task(v1::DeleteTaskRequest { task: task.clone(), ..Default::default() })
        .await
        .expect("it is deleted");
    // The stream of a deleted task ends.
    let message = envelope(0, json!({"task": task, "cursor": "0"}).to_string().as_bytes());
    let mut head = format!(
        "POST /construct.v1.EventService/Subscribe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/connect+json\r\ncontent-length: {}\r\n\r\n",
        message.len()
    )
    .into_bytes();
    let whole = gateway.send_raw(&[&head[..], &message].concat()).await;
    assert!(whole.contains(r#""type":"task.deleted""#), "{whole}");
    assert!(whole.contains("\u{2}\0\0\0\u{2}{}"), "the stream ends without an error: {whole}");
    for cut in 0..message.len() {
        let mut stream = TcpStream::connect(gateway.address).await.expect("it listens");
        stream.set_nodelay(true).expect("an option");
        head.extend_from_slice(&message[..cut]);
        stream.write_all(&head).await.expect("it reads");
        head.truncate(head.len() - cut);
        // Lets the server read the first part alone.
        tokio::task::yield_now().await;
        stream.write_all(&message[cut..]).await.expect("it reads");
        let mut answer = Vec::new();
        wait_for("the stream ends", stream.read_to_end(&mut answer)).await.expect("it answers");
        assert!(
            String::from_utf8_lossy(&answer).contains(r#""type":"task.deleted""#),
            "cut at {cut}"
        );
    }
}

#[tokio::test]
async fn end_of_stream_carries_the_error() {
    let gateway = Gateway::start().await.with_agent().await;
    let url = gateway.url("/construct.v1.EventService/Subscribe");
    let subscribe = |body: Vec<u8>, timeout: &'static str| {
        let request =
            http().post(&url).header("content-type", "application/connect+json").body(body);
        let request = if timeout.is_empty() {
            request
        } else {
            request.header("connect-timeout-ms", timeout)
        };
        async move {
            let response = request.send().await.expect("it answers");
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(response.headers()["content-type"], "application/connect+json");
            envelopes(&wait_for("the stream ends", response.bytes()).await.expect("a body"))
        }
    };
    let good = envelope(0, b"{}");
    for (what, body, timeout, code) in [
        (
            "a missing task",
            envelope(0, br#"{"task":"task_01890a5d-ac96-774b-bcce-b302099a8057"}"#),
            "",
            "not_found",
        ),
        ("an unknown field", envelope(0, br#"{"tusk":"x"}"#), "", "invalid_argument"),
        ("no message", Vec::new(), "", "invalid_argument"),
        ("a message cut short", good[..6].to_vec(), "", "invalid_argument"),
        ("compressed without saying how", envelope(1, b"{}"), "", "invalid_argument"),
        ("unknown flags", envelope(0x40, b"{}"), "", "invalid_argument"),
        ("a message that is too large", vec![0, 0x7f, 0xff, 0xff, 0xff], "", "resource_exhausted"),
        ("time is up", good.clone(), "50", "deadline_exceeded"),
        ("a timeout that is none", good.clone(), "x", "invalid_argument"),
    ] {
        let found = subscribe(body, timeout).await;
        let (flags, end) = found.last().expect("an end");
        let end: Value = serde_json::from_slice(end).expect("JSON");
        assert_eq!((*flags, &end["error"]["code"]), (2, &json!(code)), "{what}: {end}");
    }
}

#[tokio::test]
async fn deadline_covers_authentication() {
    // An issuer that accepts connections and never answers. The gateway's own timeout, 5 s, has
    // another code.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let issuer = format!("http://{}", silent.local_addr().expect("it is bound"));
    let token =
        Key::ec("e").sign(&json!({"iss": issuer, "aud": AUDIENCE, "sub": "ada", "exp": i64::MAX}));
    let config = Config {
        gateway_oidc_issuer: Some(issuer),
        gateway_oidc_audience: Some(AUDIENCE.to_owned()),
        ..login_required()
    };
    let gateway = Gateway::start_with(config).await;
    let call = |path: &str, kind: &str, body: Vec<u8>| {
        let request = http().post(gateway.url(path)).header("content-type", kind).body(body);
        let request = request.header("connect-timeout-ms", "250").bearer_auth(&token);
        async move { wait_for("an answer", request.send()).await.expect("it answers") }
    };
    let (unary, stream) = tokio::join!(
        call("/construct.v1.TaskService/ListTasks", "application/json", b"{}".to_vec()),
        call(
            "/construct.v1.EventService/Subscribe",
            "application/connect+json",
            envelope(0, b"{}")
        ),
    );
    expect_response(unary, StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded").await;
    let found = envelopes(&wait_for("the stream ends", stream.bytes()).await.expect("a body"));
    let end: Value = serde_json::from_slice(&found.last().expect("an end").1).expect("JSON");
    assert_eq!(end["error"]["code"], "deadline_exceeded", "{end}");
}

#[tokio::test]
async fn stream_compresses_only_large_messages() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    gateway.send_message(&task, &"again and ".repeat(1000)).await;
    gateway
        .tasks()
        .delete_task(v1::DeleteTaskRequest { task: task.clone(), ..Default::default() })
        .await
        .expect("it is deleted");
    let request =
        v1::SubscribeRequest { task, cursor: "0".into(), ..Default::default() }.encode_to_vec();
    let response = http2()
        .post(gateway.url("/construct.v1.EventService/Subscribe"))
        .header("content-type", "application/connect+proto")
        .header("connect-content-encoding", "gzip")
        .header("connect-accept-encoding", "br, gzip")
        .body(envelope(1, &gzip(&request)))
        .send()
        .await
        .expect("it answers");
    assert_eq!(response.headers()["connect-content-encoding"], "gzip");
    let found = envelopes(&wait_for("the stream ends", response.bytes()).await.expect("a body"));
    let mut types = Vec::new();
    for (flags, message) in &found[..found.len() - 1] {
        let mut plain = message.clone();
        if *flags == 1 {
            plain.clear();
            std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&message[..]), &mut plain)
                .expect("gzip");
        }
        types.push((*flags, v1::Event::decode(&plain[..]).expect("an event").r#type));
    }
    assert!(types.contains(&(1, "message.created".into())), "{types:?}");
    assert!(types.contains(&(0, "task.deleted".into())), "{types:?}");
}

#[tokio::test]
async fn health_and_reflection_answer_over_connect() {
    let gateway = Gateway::start().await;
    let check = http()
        .post(gateway.url("/grpc.health.v1.Health/Check"))
        .json(&json!({}))
        .send()
        .await
        .expect("it answers");
    assert_eq!(check.json::<Value>().await.expect("JSON"), json!({"status": "SERVING"}));
    for version in ["v1", "v1alpha"] {
        let response =
            http2()
                .post(gateway.url(&format!(
                    "/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
                )))
                .header("content-type", "application/connect+json")
                .body(envelope(0, br#"{"listServices":""}"#))
                .send()
                .await
                .expect("it answers");
        let found =
            envelopes(&wait_for("the stream ends", response.bytes()).await.expect("a body"));
        assert!(
            String::from_utf8_lossy(&found[0].1).contains("construct.v1.TaskService"),
            "{version}: {found:?}"
        );
    }
}
