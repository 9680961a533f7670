//! What clients of the other faces see of a task while the gateway is killed: those of gRPC are in
//! `events.rs`.

use std::{net::SocketAddr, time::Duration};

use construct_proto::v1;
use construct_tests::{
    client::{Conversation, TURN_TIMEOUT},
    http,
    mesh::{Mesh, Service, free_address},
    wait::until,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    sync::watch,
    task::JoinHandle,
};

/// The delay before a client reconnects to an unavailable gateway.
const RECONNECT_DELAY: Duration = Duration::from_millis(20);
const WORDS: &str = "I shall look into it, and tell you about all of it in so many words that there is time to be cut off in the middle.";

/// The events of a client of server-sent events that reconnects with the last id whenever the
/// stream breaks.
pub(crate) fn follow_events(url: String, seen: watch::Sender<Vec<Value>>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let client = http::client().build().unwrap();
        let mut last = String::new();
        loop {
            let mut request = client.get(&url).header("accept", "text/event-stream");
            if !last.is_empty() {
                request = request.header("last-event-id", &last);
            }
            // The gateway may be unavailable.
            let Ok(mut response) = request.send().await else {
                tokio::time::sleep(RECONNECT_DELAY).await;
                continue;
            };
            let mut rest = String::new();
            while let Ok(Some(chunk)) = response.chunk().await {
                rest.push_str(std::str::from_utf8(&chunk).unwrap_or_default());
                while let Some((event, after)) = rest.split_once("\n\n") {
                    let field = |name: &str| {
                        event.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned)
                    };
                    if let (Some(id), Some(data)) = (field("id: "), field("data: ")) {
                        last = id;
                        seen.send_modify(|seen| seen.push(serde_json::from_str(&data).unwrap()));
                    }
                    rest = after.to_owned();
                }
            }
        }
    })
}

/// The lines of a client of the operator protocol that reconnects with the last cursor.
fn follow_session(
    address: SocketAddr,
    session: String,
    seen: watch::Sender<Vec<Value>>,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut cursor = Value::Null;
        loop {
            let Ok(mut stream) = TcpStream::connect(address).await else {
                tokio::time::sleep(RECONNECT_DELAY).await;
                continue;
            };
            let mut request = json!({"type": "stream", "sessionID": session});
            if !cursor.is_null() {
                request["cursor"] = cursor.clone();
            }
            _ = stream.write_all(format!("{request}\n").as_bytes()).await;
            let mut lines = BufReader::new(stream).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let Ok(line) = serde_json::from_str::<Value>(&line) else { break };
                // A gateway that has just started reports that it is not ready: the request ends
                // and is repeated.
                if line["stopReason"] == "error" {
                    tokio::time::sleep(RECONNECT_DELAY).await;
                    break;
                }
                if line["cursor"].is_string() {
                    cursor = line["cursor"].clone();
                }
                seen.send_modify(|seen| seen.push(line));
            }
        }
    })
}

/// Waits until `wanted` accepts what a client received.
async fn wait_for_received(
    what: &str,
    seen: &watch::Sender<Vec<Value>>,
    wanted: impl Fn(&[Value]) -> bool,
) -> Vec<Value> {
    until(what, TURN_TIMEOUT, async || {
        let seen = seen.borrow().clone();
        if wanted(&seen) { Ok(seen) } else { Err(seen) }
    })
    .await
}

fn count(seen: &[Value], kind: &str) -> usize {
    seen.iter().filter(|event| event["type"] == kind).count()
}

/// The text of the lines that are pieces of an answer.
fn pieces(lines: &[Value]) -> String {
    let pieces = lines
        .iter()
        .filter(|line| line["stopReason"].is_null() && line["content"][0]["type"] == "text");
    pieces.filter_map(|line| line["content"][0]["text"].as_str()).collect()
}

#[tokio::test]
async fn clients_of_every_protocol_resume_after_gateway_crash() {
    let operator = free_address().unwrap();
    let mut mesh =
        Mesh::start_with(&[("CONSTRUCT_GATEWAY_OPERATOR_LISTEN", &operator.to_string())])
            .await
            .unwrap();
    let script = json!([
        {"text": WORDS, "code": "for (let n = 0; n < 12; n++) execute_command(`echo ${n}; sleep 0.05`); 1", "tokens_per_second": 40},
        {"text": "It is done.", "tokens_per_second": 20},
    ]);
    mesh.scripted_agent("worker", &script).await.unwrap();
    let spec =
        v1::TaskSpec { agent: "worker".into(), title: "Looking".into(), ..v1::TaskSpec::default() };
    let conversation: Conversation = mesh.client().unwrap().create_task_with(spec).await.unwrap();
    let task = conversation.id().to_owned();
    let (events, lines) = (watch::Sender::new(Vec::new()), watch::Sender::new(Vec::new()));
    let clients = [
        follow_events(
            format!("{}/v1/tasks/{task}/events?cursor=0", mesh.gateway_url()),
            events.clone(),
        ),
        follow_session(operator, task, lines.clone()),
    ];
    wait_for_received("the session's turns", &lines, |lines| !lines.is_empty()).await;
    conversation.submit("go").await;
    // In the middle of a text, and in the middle of a script.
    wait_for_received("pieces of text", &events, |events| count(events, "message.delta") >= 4)
        .await;
    mesh.crash(Service::Gateway).await.unwrap();
    wait_for_received("calls", &events, |events| count(events, "tool.result") >= 3).await;
    mesh.crash(Service::Gateway).await.unwrap();

    let last = conversation.wait_until_idle().await.status.unwrap().event_sequence;
    let whole = conversation.record().wait_for_sequence(last).await;
    let seen = wait_for_received("all events", &events, |events| {
        events.iter().any(|event| {
            event["sequence"].as_str().and_then(|number| number.parse().ok()) >= Some(last)
        })
    })
    .await;
    let ids: Vec<&str> = seen.iter().filter_map(|event| event["id"].as_str()).collect();
    assert_eq!(ids, whole.iter().map(|event| event.id.as_str()).collect::<Vec<_>>());

    let lines = wait_for_received("the end of the turn", &lines, |lines| {
        lines.iter().any(|line| line["stopReason"] == "end_turn")
    })
    .await;
    assert_eq!(pieces(&lines), format!("{WORDS}It is done."), "{lines:#?}");
    let opened = lines.iter().filter(|line| line["stopReason"] == "stream_start").count();
    assert!(opened >= 3, "it was cut off twice: {opened}");
    for client in clients {
        client.abort();
    }
}
