use std::{net::SocketAddr, time::Duration};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::*;
use crate::Common;

async fn served(context: &Context) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, context.clone()));
    address
}

async fn get_json(address: SocketAddr, path: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

#[tokio::test]
async fn readiness_lists_unmet_conditions() {
    let context = Context::new("sample", Common::default());
    let address = served(&context).await;
    let nats = context.readiness().register("nats");
    let postgres = context.readiness().register("postgres");

    let missing = |name: &str, reason: &str| json!({ "name": name, "reason": reason });
    let (status, body) = get_json(address, "/readyz").await;
    assert_eq!(status, 503);
    assert_eq!(
        body["waiting"],
        json!([missing("nats", "starting"), missing("postgres", "starting")])
    );

    nats.set_ready();
    postgres.set_not_ready("connection refused");
    let (status, body) = get_json(address, "/readyz").await;
    assert_eq!(status, 503);
    assert_eq!(body["waiting"], json!([missing("postgres", "connection refused")]));

    postgres.set_ready();
    let (status, body) = get_json(address, "/readyz").await;
    assert_eq!((status, body), (200, json!({ "ready": true, "draining": false, "waiting": [] })));

    nats.clone().set_not_ready("disconnected");
    assert_eq!(get_json(address, "/readyz").await.0, 503);
}

#[tokio::test]
async fn draining_process_is_alive_and_not_ready() {
    let context = Context::new("sample", Common::default());
    let address = served(&context).await;
    assert_eq!(get_json(address, "/readyz").await.0, 200);
    context.lifecycle().stop("test");
    let (status, body) = get_json(address, "/readyz").await;
    assert_eq!((status, &body["draining"]), (503, &json!(true)));
    let (status, body) = get_json(address, "/healthz").await;
    assert_eq!((status, &body["service"]), (200, &json!("sample")));
    assert_eq!(body["instance"], context.instance_id());
    assert_eq!(get_json(address, "/other").await.0, 404);
}

#[tokio::test]
async fn subscriber_sees_the_first_state_every_change_and_draining() {
    let context = Context::new("sample", Common::default());
    let latch = context.readiness().register("nats");
    let mut changes = context.readiness().subscribe();
    assert!(!changes.next().await.ready);
    latch.set_ready();
    assert!(changes.next().await.ready);
    latch.set_ready();
    let unchanged = timeout(Duration::from_millis(20), changes.next()).await;
    assert!(unchanged.is_err(), "nothing changed, and yet: {unchanged:?}");
    context.lifecycle().stop("test");
    let report = timeout(Duration::from_secs(10), changes.next()).await.unwrap();
    assert!(report.draining && !report.ready);
    let silent = timeout(Duration::from_millis(20), changes.next()).await;
    assert!(silent.is_err(), "draining was told twice: {silent:?}");
}

#[tokio::test]
async fn waiting_for_readiness_ends_when_the_last_latch_is_set() {
    let context = Context::new("sample", Common::default());
    let latches = [context.readiness().register("a"), context.readiness().register("b")];
    let readiness = context.readiness().clone();
    let waiting = tokio::spawn(async move { readiness.wait_ready().await });
    for latch in latches {
        assert!(!waiting.is_finished());
        latch.set_ready();
    }
    timeout(Duration::from_secs(10), waiting).await.unwrap().unwrap();
}

#[test]
fn metrics_show_which_conditions_hold() {
    let readiness = Readiness::new(CancellationToken::new());
    let nats = readiness.register("nats");
    readiness.register("start").set_ready();
    let metrics = metrics::Metrics::new("construct-sample").unwrap();
    readiness.measure(&metrics.meter("sample"));
    let shown = |name: &str, value: u64| {
        let line = format!("construct_condition{{construct_condition_name=\"{name}\"}} {value}\n");
        let page = metrics.text().unwrap();
        assert!(page.contains(&line), "{page}");
    };
    shown("nats", 0);
    shown("start", 1);
    nats.set_ready();
    shown("nats", 1);
    nats.set_not_ready("gone");
    shown("nats", 0);
}
