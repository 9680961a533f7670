//! REST and server-sent events.

use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::io::AsyncBufReadExt as _;

use super::*;

async fn expect_json(request: reqwest::RequestBuilder, expected: StatusCode) -> Value {
    let response = request.send().await.expect("it answers");
    let (status, kind) =
        (response.status(), response.headers()["content-type"].to_str().expect("text").to_owned());
    let text = response.text().await.expect("a body");
    assert_eq!(status, expected, "{text}");
    let success = status.is_success();
    assert_eq!(kind, if success { "application/json" } else { "application/problem+json" });
    serde_json::from_str(&text).expect("JSON")
}

#[tokio::test]
async fn tasks_and_messages_are_resources() {
    let gateway = Gateway::start().await.with_agent().await;
    for (key, client) in [("one", http()), ("two", http2())] {
        let tasks = gateway.url("/v1/tasks");
        let spec = json!({"agent": "ada", "workspace": "/work"});
        let create = || client.post(&tasks).header("idempotency-key", key).json(&spec);
        let made = expect_json(create(), StatusCode::CREATED).await;
        let task =
            gateway.url(&format!("/v1/tasks/{}", made["metadata"]["id"].as_str().expect("an id")));
        // The same idempotency key returns the same task.
        assert_eq!(
            expect_json(create(), StatusCode::CREATED).await["metadata"]["id"],
            made["metadata"]["id"]
        );

        let changed =
            expect_json(client.patch(&task).json(&json!({"title": "May"})), StatusCode::OK).await;
        assert_eq!(changed["spec"]["title"], "May");
        assert_eq!(expect_json(client.get(&task), StatusCode::OK).await["spec"]["title"], "May");

        let messages = format!("{task}/messages");
        let body = json!({"blocks": [{"text": {"text": "hello"}}]});
        let message = expect_json(client.post(&messages).json(&body), StatusCode::CREATED).await;
        let id = message["metadata"]["id"].as_str().expect("an id");
        let found = expect_json(client.get(&messages), StatusCode::OK).await;
        assert_eq!(found["messages"][0]["metadata"]["id"], id);
        let deleted = client
            .delete(gateway.url(&format!("/v1/messages/{id}")))
            .send()
            .await
            .expect("it answers");
        assert_eq!(deleted.status(), StatusCode::NO_CONTENT);

        let explanation =
            expect_json(client.get(format!("{task}/explanation")), StatusCode::OK).await;
        assert_eq!(explanation["phase"], "TASK_PHASE_AWAIT_INPUT");
        let suspended = expect_json(client.post(format!("{task}/suspend")), StatusCode::OK).await;
        assert_eq!(suspended["status"]["desiredPhase"], "TASK_PHASE_SUSPENDED");
        let deleted = client.delete(&task).send().await.expect("it answers");
        assert_eq!(
            (deleted.status(), deleted.bytes().await.expect("a body").len()),
            (StatusCode::NO_CONTENT, 0)
        );
        let problem = expect_json(client.get(&task), StatusCode::NOT_FOUND).await;
        assert_eq!(
            (&problem["code"], &problem["resource"]["type"]),
            (&json!("NOT_FOUND"), &json!("task"))
        );
    }
}

#[tokio::test]
async fn pages_and_filters_are_query_parameters() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(gateway.task().await);
    }
    let (mut found, mut token) = (Vec::new(), String::new());
    loop {
        let mut query = vec![("pageSize", "2"), ("order_by", "created_at asc"), ("agent", "ada")];
        query.push(("pageToken", &token));
        let query: String =
            form_urlencoded::Serializer::new(String::new()).extend_pairs(query).finish();
        let page =
            expect_json(http().get(gateway.url(&format!("/v1/tasks?{query}"))), StatusCode::OK)
                .await;
        let tasks = page["tasks"].as_array().expect("tasks");
        found.extend(
            tasks.iter().map(|task| task["metadata"]["id"].as_str().expect("an id").to_owned()),
        );
        match page["page"]["nextPageToken"].as_str() {
            Some(next) => token = next.to_owned(),
            None => break,
        }
    }
    assert_eq!(found, made);
    for (query, field) in [
        ("pagesize=2", "pagesize"),
        ("pageSize=two", "page.page_size"),
        ("phase=BUSY", "filter.phase"),
        ("pageSize=1&page_size=2", "page_size"),
        ("pageSize=1000", "page.page_size"),
        ("createdAfter=yesterday", "filter.created_after"),
        ("idempotencyKey=x", "idempotencyKey"),
    ] {
        let problem = expect_json(
            http().get(gateway.url(&format!("/v1/tasks?{query}"))),
            StatusCode::BAD_REQUEST,
        )
        .await;
        assert_eq!(problem["violations"][0]["field"], field, "{query}: {problem}");
    }
}

#[tokio::test]
async fn invalid_request_gets_problem_with_violations() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let messages = gateway.url(&format!("/v1/tasks/{task}/messages"));
    for (body, field) in [
        (json!({"blocks": [{"text": {"text": "hello"}}], "blocs": []}), "spec.blocs"),
        (json!({"blocks": [{"text": {"txt": "hello"}}]}), "spec.blocks[0].text.txt"),
        (json!({"blocks": []}), "spec.blocks"),
        (json!({"task": "another", "blocks": []}), "task"),
        (json!([]), "spec"),
    ] {
        let problem =
            expect_json(http().post(&messages).json(&body), StatusCode::BAD_REQUEST).await;
        assert_eq!(
            (&problem["code"], &problem["status"]),
            (&json!("INVALID_ARGUMENT"), &json!(400))
        );
        assert_eq!(problem["violations"][0]["field"], field, "{problem}");
    }
    let text = http().post(&messages).header("content-type", "text/plain").body("hello");
    assert_eq!(expect_json(text, StatusCode::UNSUPPORTED_MEDIA_TYPE).await["status"], 415);
    expect_json(http().post(&messages), StatusCode::BAD_REQUEST).await;
    let large = http().post(&messages).header("content-type", "application/json").body(vec![
        b' ';
        4 * 1024 * 1024
            + 1
    ]);
    assert_eq!(
        expect_json(large, StatusCode::PAYLOAD_TOO_LARGE).await["code"],
        "RESOURCE_EXHAUSTED"
    );
    expect_json(http().get(gateway.url("/v1/tusks")), StatusCode::NOT_FOUND).await;
    let put = http().put(gateway.url("/v1/tasks")).send().await.expect("it answers");
    assert_eq!(
        (put.status(), &put.headers()["allow"]),
        (StatusCode::METHOD_NOT_ALLOWED, &"POST, GET, HEAD".parse().expect("a value"))
    );
    // A name in a path may have any characters.
    expect_json(http().get(gateway.url("/v1/agents/a%2Fb%20c")), StatusCode::BAD_REQUEST).await;
}

#[tokio::test]
async fn unreadable_body_gets_the_matching_status() {
    let gateway = Gateway::start().await;
    let post = "POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    // The refusal comes before the client sends the body, so the connection is closed: the next
    // request would be read as the body.
    let expecting = format!("{post}content-length: 5000000\r\nexpect: 100-continue\r\n\r\n");
    let answer = gateway.send_raw(expecting.as_bytes()).await;
    assert!(
        answer.starts_with("HTTP/1.1 413 ") && answer.contains("connection: close\r\n"),
        "{answer}"
    );
    // Without a length the limit applies while the body is read.
    let mut oversized = format!("{post}transfer-encoding: chunked\r\n\r\n").into_bytes();
    for size in [0x10000; 64].into_iter().chain([1]) {
        oversized.extend(format!("{size:x}\r\n").into_bytes());
        oversized.extend(vec![b' '; size]);
        oversized.extend(b"\r\n");
    }
    let answer = gateway.send_raw(&oversized).await;
    assert!(
        answer.starts_with("HTTP/1.1 413 ") && answer.contains("connection: close\r\n"),
        "{answer}"
    );
    let malformed = format!("{post}transfer-encoding: chunked\r\n\r\n2\r\n{{}}XX0\r\n\r\n");
    let answer = gateway.send_raw(malformed.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("INVALID_ARGUMENT"), "{answer}");
}

#[tokio::test]
async fn openapi_document_is_served() {
    let gateway = Gateway::start().await;
    let document = expect_json(http().get(gateway.url("/openapi.json")), StatusCode::OK).await;
    assert_eq!(document["openapi"], "3.1.0");
    assert!(document["paths"]["/v1/tasks"]["post"].is_object());
}

#[tokio::test]
async fn anyone_may_read_the_login_metadata() {
    let none = Gateway::start().await;
    let path = "/.well-known/oauth-protected-resource";
    let problem = expect_json(http().get(none.url(path)), StatusCode::NOT_FOUND).await;
    assert!(
        problem["detail"].as_str().expect("a text").contains("gateway_oidc_issuer"),
        "{problem}"
    );

    let config = crate::Config {
        gateway_oidc_issuer: Some("https://login.example.com".to_owned()),
        gateway_oidc_audience: Some("construct".to_owned()),
        gateway_oidc_client_id: Some("cli".to_owned()),
        ..crate::tests::walk::login_required()
    };
    let gateway = Gateway::start_with(config).await;
    for client in [http(), http2()] {
        // Without credentials.
        let metadata = expect_json(client.get(gateway.url(path)), StatusCode::OK).await;
        assert_eq!(metadata["resource"], gateway.url(""));
        assert_eq!(metadata["authorization_servers"], json!(["https://login.example.com"]));
        assert_eq!(
            (&metadata["construct_client_id"], &metadata["construct_audience"]),
            (&json!("cli"), &json!("construct"))
        );
        assert_eq!(
            metadata["scopes_supported"],
            json!(["openid", "profile", "email", "offline_access"])
        );
        // Behind a proxy that speaks TLS.
        let proxied = client.get(gateway.url(path)).header("x-forwarded-proto", "https");
        assert_eq!(
            expect_json(proxied, StatusCode::OK).await["resource"],
            gateway.url("").replace("http:", "https:")
        );
        let post = client.post(gateway.url(path)).send().await.expect("it answers");
        assert_eq!(
            (post.status(), &post.headers()["allow"]),
            (StatusCode::METHOD_NOT_ALLOWED, &"GET, HEAD".parse().expect("a value"))
        );
    }
}

#[tokio::test]
async fn head_answers_like_get_without_a_body() {
    let gateway = Gateway::start().await.with_agent().await;
    for client in [http(), http2()] {
        for path in
            ["/v1/agents", "/v1/agents/ada", "/v1/agents/eve", "/openapi.json", "/v1/nothing"]
        {
            let got = client.get(gateway.url(path)).send().await.expect("it answers");
            let head = client.head(gateway.url(path)).send().await.expect("it answers");
            assert_eq!(head.status(), got.status(), "{path}");
            assert_eq!(head.headers()["content-type"], got.headers()["content-type"], "{path}");
            let length = got.bytes().await.expect("a body").len().to_string();
            assert_eq!(head.headers()["content-length"], length, "{path}");
            assert_eq!(head.bytes().await.expect("none").len(), 0, "{path}");
        }
    }
}

#[tokio::test]
async fn unauthenticated_response_has_www_authenticate() {
    let challenge = async |gateway: &Gateway, path: &str, key: Option<&str>| {
        let request =
            http().post(gateway.url(path)).header("content-type", "application/json").body("{}");
        let request = key.into_iter().fold(request, reqwest::RequestBuilder::bearer_auth);
        let refused = request.send().await.expect("it answers");
        assert_eq!(refused.status(), StatusCode::UNAUTHORIZED);
        refused.headers()["www-authenticate"].to_str().expect("text").to_owned()
    };
    let keys = Gateway::start_with(crate::tests::walk::login_required()).await;
    let issuer = crate::Config {
        gateway_oidc_issuer: Some("https://login.example.com".to_owned()),
        gateway_oidc_audience: Some("construct".to_owned()),
        ..crate::tests::walk::login_required()
    };
    let people = Gateway::start_with(issuer).await;
    for path in ["/v1/tasks", "/construct.v1.TaskService/ListTasks"] {
        assert_eq!(challenge(&keys, path, None).await, "Bearer");
        assert_eq!(challenge(&keys, path, Some("ct_x")).await, "Bearer error=\"invalid_token\"");
        let metadata = people.url("/.well-known/oauth-protected-resource");
        assert_eq!(
            challenge(&people, path, None).await,
            format!("Bearer resource_metadata=\"{metadata}\"")
        );
    }
    let got = http().get(keys.url("/v1/agents")).send().await.expect("it answers");
    assert!(got.headers().contains_key("www-authenticate"));
}

/// A stream of server-sent events, read line by line.
struct Events {
    lines: tokio::io::Lines<tokio::io::BufReader<TcpStream>>,
}

impl Events {
    async fn open(gateway: &Gateway, path: &str, last: &str) -> Self {
        let mut stream = TcpStream::connect(gateway.address).await.expect("it listens");
        let header =
            if last.is_empty() { String::new() } else { format!("last-event-id: {last}\r\n") };
        // HTTP/1.0, so that the body comes without chunks.
        let request = format!(
            "GET {path} HTTP/1.0\r\nhost: localhost\r\naccept: text/event-stream\r\n{header}\r\n"
        );
        stream.write_all(request.as_bytes()).await.expect("it reads");
        let mut events = Self { lines: tokio::io::BufReader::new(stream).lines() };
        while !events.line().await.expect("a head").is_empty() {}
        assert_eq!(events.line().await.expect("a welcome"), "retry: 1000");
        events
    }

    async fn line(&mut self) -> Option<String> {
        wait_for("the next line", self.lines.next_line()).await.expect("the stream is open")
    }

    /// The next event: its name, its id and its data.
    async fn next(&mut self) -> (String, String, Value) {
        let (mut name, mut id, mut data) = (String::new(), String::new(), Value::Null);
        loop {
            let line = self.line().await.expect("there is an event");
            match line.split_once(": ") {
                Some(("event", value)) => name = value.to_owned(),
                Some(("id", value)) => id = value.to_owned(),
                Some(("data", value)) => data = serde_json::from_str(value).expect("JSON"),
                _ if line.is_empty() && !data.is_null() => return (name, id, data),
                _ => {}
            }
        }
    }
}

#[tokio::test]
async fn resumed_sse_stream_has_no_gap_and_no_duplicate() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    for number in 0..4 {
        gateway.send_message(&task, &format!("message {number}")).await;
    }
    let path = format!("/v1/tasks/{task}/events?cursor=0");
    let mut events = Events::open(&gateway, &path, "").await;
    let mut all = Vec::new();
    for _ in 0..5 {
        all.push(events.next().await);
    }
    assert_eq!((&*all[0].0, &all[0].2["type"]), ("", &json!("task.created")));
    drop(events);
    for (index, (_, id, data)) in all.iter().enumerate() {
        assert_eq!(&data["cursor"], id);
        let mut again = Events::open(&gateway, &path, id).await;
        for expected in &all[index + 1..] {
            assert_eq!(&again.next().await, expected, "after {id}");
        }
        if index == 0 {
            // Live events follow.
            gateway.send_message(&task, "live").await;
            let (_, id, data) = again.next().await;
            assert_eq!(data["type"], "message.created");
            all.push((String::new(), id, data));
            break;
        }
    }
    gateway
        .tasks()
        .delete_task(construct_proto::v1::DeleteTaskRequest { task, ..Default::default() })
        .await
        .expect("it is deleted");
    let mut last = Events::open(&gateway, &path, &all[5].1).await;
    assert_eq!(last.next().await.2["type"], "task.deleted");
    assert_eq!(last.next().await.0, "end");
    assert_eq!(last.line().await, None, "the server closes the connection");
}

#[tokio::test]
async fn organization_events_are_a_resource() {
    let gateway = Gateway::start().await;
    let mut events =
        Events::open(&gateway, "/v1/events?types=agent.*&types=model.created", "").await;
    let gateway = gateway.with_agent().await;
    assert_eq!(events.next().await.2["type"], "model.created");
    assert_eq!(events.next().await.2["type"], "agent.created");
    for (query, field) in [("task=x", "task"), ("cursor=x", "cursor"), ("types=A", "types[0]")] {
        let problem = expect_json(
            http().get(gateway.url(&format!("/v1/events?{query}"))),
            StatusCode::BAD_REQUEST,
        )
        .await;
        assert_eq!(problem["violations"][0]["field"], field, "{problem}");
    }
}

#[tokio::test]
async fn stalled_reader_does_not_delay_other_readers() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let path = format!("/v1/tasks/{task}/events?cursor=0");
    // Clients that subscribe and never read. Their events exceed the buffers between them and the
    // gateway.
    let mut stalled = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(gateway.address).await.expect("it listens");
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes())
            .await
            .expect("it reads");
        stalled.push(stream);
    }
    let mut events = Events::open(&gateway, &path, "").await;
    assert_eq!(events.next().await.2["type"], "task.created");
    let long = "x".repeat(1000 * 1000);
    for number in 0..12 {
        let begun = std::time::Instant::now();
        gateway.send_message(&task, &format!("{number}{long}")).await;
        let (_, _, data) = events.next().await;
        let text = data["message"]["spec"]["blocks"][0]["text"]["text"].as_str().expect("text");
        assert!(text.starts_with(&format!("{number}x")));
        assert!(begun.elapsed().as_secs() < 5, "message {number} took {:?}", begun.elapsed());
    }
    // The stalled clients stay connected: when one reads, it gets everything.
    let mut stream = stalled.swap_remove(0);
    let mut seen = 0;
    let mut buffer = vec![0; 1 << 20];
    wait_for("all of it", async {
        while seen < 12 * long.len() {
            let read = stream.read(&mut buffer).await.expect("the stream is open");
            assert!(read > 0, "closed after {seen} bytes");
            seen += read;
        }
    })
    .await;
}

#[tokio::test]
async fn document_version_is_its_entity_tag() {
    let gateway = Gateway::start().await;
    let (client, url) = (http(), gateway.url("/v1/states/settings"));
    let long = json!({"json": format!("{{\"a\": \"{}\"}}", "x".repeat(5000))});
    let tag = |response: &reqwest::Response| {
        let tag = response.headers().get("etag").map(|tag| tag.to_str().expect("text").to_owned());
        (response.status().as_u16(), tag.unwrap_or_default())
    };
    let send = async |request: reqwest::RequestBuilder| request.send().await.expect("it answers");
    let put = |body: &Value| client.put(&url).json(body);
    let tagged = |status, tag: &str| (status, tag.to_owned());
    let short = json!({"json": "{}"});
    assert_eq!(tag(&send(put(&short).header("if-none-match", "*")).await), tagged(200, "\"1\""));
    assert_eq!(tag(&send(put(&long).header("if-none-match", "*")).await), tagged(412, ""));
    assert_eq!(tag(&send(put(&long).header("if-match", "\"1\"")).await), tagged(200, "\"2\""));
    let late = send(put(&short).header("if-match", "\"1\"")).await;
    assert_eq!(late.status(), StatusCode::PRECONDITION_FAILED);
    let problem: Value = late.json().await.expect("JSON");
    assert_eq!(
        (&problem["status"], &problem["preconditions"][0]["description"]),
        (&json!(412), &json!("2"))
    );
    // A conflict without a conditional header stays a 409.
    let late = json!({"json": "{}", "expectedVersion": "1"});
    assert_eq!(send(put(&late)).await.status(), StatusCode::CONFLICT);
    assert_eq!(
        send(put(&late).header("if-match", "\"2\"")).await.status(),
        StatusCode::BAD_REQUEST
    );

    // A compressed answer has another entity tag.
    let get = |compressed: bool| {
        let request = client.get(&url);
        if compressed { request.header("accept-encoding", "gzip") } else { request }
    };
    assert_eq!(tag(&send(get(false)).await), tagged(200, "\"2\""));
    let packed = send(get(true)).await;
    assert_eq!(tag(&packed), tagged(200, "\"2-gzip\""));
    assert_eq!(packed.headers()["content-encoding"], "gzip");
    for known in ["\"2\"", "W/\"2-gzip\"", "\"1\", \"2\"", "*"] {
        let same = send(get(false).header("if-none-match", known)).await;
        assert_eq!(tag(&same), tagged(304, "\"2\""), "{known}");
        assert!(same.headers().contains_key("cache-control"));
        assert_eq!(same.bytes().await.expect("a body").len(), 0);
    }
    assert_eq!(
        tag(&send(get(true).header("if-none-match", "\"2-gzip\"")).await),
        tagged(304, "\"2-gzip\"")
    );
    assert_eq!(tag(&send(get(false).header("if-none-match", "\"1\"")).await), tagged(200, "\"2\""));
    let earlier = client.get(format!("{url}?version=1"));
    assert_eq!(tag(&send(earlier.header("if-none-match", "\"2\"")).await), tagged(200, "\"1\""));

    let delete = |condition: &'static str| client.delete(&url).header("if-match", condition);
    assert_eq!(send(delete("\"1\"")).await.status(), StatusCode::PRECONDITION_FAILED);
    assert_eq!(send(delete("W/\"2\"")).await.status(), StatusCode::PRECONDITION_FAILED);
    assert_eq!(send(delete("*")).await.status(), StatusCode::BAD_REQUEST);
    assert_eq!(tag(&send(delete("\"2-gzip\"")).await), tagged(204, ""));
    let document = expect_json(client.get(gateway.url("/openapi.json")), StatusCode::OK).await;
    let state = &document["paths"]["/v1/states/{state}"];
    assert!(
        state["get"]["responses"]["304"].is_object()
            && state["put"]["responses"]["412"].is_object()
    );
    assert!(document["paths"]["/v1/tasks/{task}"]["patch"]["responses"]["412"].is_null());
}
