//! Outages of PostgreSQL and NATS, at the start or later.

use std::{net::SocketAddr, time::Instant};

use construct_bus::testing::NatsServer;
use construct_proto::v1;
use construct_store::testing::Database;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tonic::{Code, Status, body::Body, codegen::http};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_types::StatusExt as _;
use tower::ServiceExt as _;

use super::harness::*;

/// An address without a listener.
const UNREACHABLE: &str = "127.0.0.1:1";

async fn health(gateway: &Gateway, service: &str) -> ServingStatus {
    let request = HealthCheckRequest { service: service.into() };
    let answer =
        HealthClient::new(gateway.channel()).check(request).await.expect("health always answers");
    answer.into_inner().status()
}

#[tokio::test]
async fn requests_are_unavailable_until_dependencies_are_reachable() {
    for (has_database, has_nats) in [(false, true), (true, false)] {
        let (database, nats) = tokio::join!(Database::new(), NatsServer::start());
        let database_url = if has_database {
            database.url().to_owned()
        } else {
            format!("postgres://nobody@{UNREACHABLE}/none")
        };
        let nats_url =
            if has_nats { nats.url().to_owned() } else { format!("nats://{UNREACHABLE}") };
        let gateway = Gateway::launch(database, nats, &database_url, &nats_url).await;
        let list = async || {
            let answer = gateway.agents().list_agents(v1::ListAgentsRequest::default()).await;
            answer.expect_err("nothing works").code()
        };
        // Until the gateway serves its listener, connections are refused: unavailable as well.
        wait_until("it says that it is unavailable", list, |code| *code == Code::Unavailable).await;
        assert_eq!(health(&gateway, "").await, ServingStatus::NotServing);
        assert_eq!(health(&gateway, "construct.v1.TaskService").await, ServingStatus::NotServing);
    }
}

#[tokio::test]
async fn ready_gateway_reports_health_and_services() {
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let gateway = Gateway::start().await;
    let request = ServerReflectionRequest {
        message_request: Some(MessageRequest::ListServices(String::new())),
        ..ServerReflectionRequest::default()
    };
    let mut client = ServerReflectionClient::new(gateway.channel());
    let answers =
        client.server_reflection_info(tokio_stream::once(request)).await.expect("it answers");
    let answer = answers.into_inner().message().await.expect("it answers").expect("it answers");
    let Some(MessageResponse::ListServicesResponse(services)) = answer.message_response else {
        panic!("a list")
    };
    let ours: Vec<String> = services.service.into_iter().map(|service| service.name).collect();
    for service in ["Agent", "Event", "Message", "ModelProvider", "Model", "Task"] {
        let name = format!("construct.v1.{service}Service");
        assert!(ours.contains(&name), "{ours:?}");
        let status = || health(&gateway, &name);
        wait_until(&name, status, |status| *status == ServingStatus::Serving).await;
    }
}

/// Older clients use the earlier version, which lists the same.
#[tokio::test]
async fn both_reflection_versions_list_the_same_services() {
    use tonic_reflection::pb::{v1, v1alpha};
    let gateway = Gateway::start().await;
    let list = v1::server_reflection_request::MessageRequest::ListServices(String::new());
    let request = v1::ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let mut client = v1::server_reflection_client::ServerReflectionClient::new(gateway.channel());
    let answers =
        client.server_reflection_info(tokio_stream::once(request)).await.expect("it answers");
    let answer = answers.into_inner().message().await.expect("it answers").expect("it answers");
    let Some(v1::server_reflection_response::MessageResponse::ListServicesResponse(now)) =
        answer.message_response
    else {
        panic!("a list")
    };
    let list = v1alpha::server_reflection_request::MessageRequest::ListServices(String::new());
    let request =
        v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let mut client =
        v1alpha::server_reflection_client::ServerReflectionClient::new(gateway.channel());
    let answers =
        client.server_reflection_info(tokio_stream::once(request)).await.expect("it answers");
    let answer = answers.into_inner().message().await.expect("it answers").expect("it answers");
    let Some(v1alpha::server_reflection_response::MessageResponse::ListServicesResponse(before)) =
        answer.message_response
    else {
        panic!("a list")
    };
    let now: Vec<String> = now.service.into_iter().map(|service| service.name).collect();
    let before: Vec<String> = before.service.into_iter().map(|service| service.name).collect();
    assert_eq!(now, before);
    for version in ["v1", "v1alpha"] {
        assert!(now.contains(&format!("grpc.reflection.{version}.ServerReflection")), "{now:?}");
    }
}

#[tokio::test]
async fn nats_outage_stops_neither_writes_nor_subscriptions() {
    let mut gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let mut events = gateway.subscribe(&task, "0").await;
    next_events(&mut events, 1).await;
    gateway.nats.kill();
    let begun = Instant::now();
    for number in 0..5 {
        gateway.send_message(&task, &format!("message {number}")).await;
    }
    assert!(begun.elapsed().as_secs() < 5, "five writes took {:?}", begun.elapsed());
    // PostgreSQL has the events that NATS lost.
    let sequences =
        |events: Vec<v1::Event>| events.into_iter().map(|event| event.sequence).collect::<Vec<_>>();
    assert_eq!(sequences(next_events(&mut events, 5).await), [2, 3, 4, 5, 6]);
    // A new subscription does not need NATS either.
    let mut another = gateway.subscribe(&task, "0").await;
    assert_eq!(sequences(next_events(&mut another, 6).await), [1, 2, 3, 4, 5, 6]);
    gateway.nats.restart().await;
    gateway.send_message(&task, "it is back").await;
    assert_eq!(sequences(next_events(&mut events, 1).await), [7]);
    assert_eq!(sequences(next_events(&mut another, 1).await), [7]);
}

#[tokio::test]
async fn unreadable_request_is_a_client_error() {
    let gateway = Gateway::start().await;
    for (what, body, encoding, code) in [
        ("no frame", "", "identity", Code::InvalidArgument),
        ("a frame cut short", "\0\0\0\0\x08abc", "identity", Code::InvalidArgument),
        ("an unknown compression flag", "\x09\0\0\0\0", "identity", Code::InvalidArgument),
        ("broken gzip", "\x01\0\0\0\x08nonsense", "gzip", Code::InvalidArgument),
        ("no protobuf", "\0\0\0\0\x02\x0A\x7F", "identity", Code::InvalidArgument),
        ("an unknown compression", "\x01\0\0\0\x01x", "snappy", Code::Unimplemented),
        // This code is required by gRPC's specification.
        ("compressed without saying how", "\x01\0\0\0\x01x", "", Code::Internal),
    ] {
        let mut request = http::Request::post("/construct.v1.TaskService/GetTask")
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if !encoding.is_empty() {
            request = request.header("grpc-encoding", encoding);
        }
        let request = request.body(Body::new(body.to_owned())).expect("a request");
        let response = gateway.channel().oneshot(request).await.expect("it is answered");
        let status = Status::from_header_map(response.headers()).expect("it is refused at once");
        assert_eq!(status.code(), code, "{what}: {status:?}");
        assert!(!status.message().is_empty(), "{what}");
    }
}

/// Forwards TCP connections until it is cut.
struct Proxy {
    address: SocketAddr,
    target: String,
    running: Option<JoinHandle<()>>,
}

impl Proxy {
    async fn start(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let mut proxy = Self { address, target, running: None };
        proxy.run(listener);
        proxy
    }

    fn run(&mut self, listener: TcpListener) {
        let target = self.target.clone();
        self.running = Some(tokio::spawn(async move {
            // An abort ends the connections as well: they live in this set.
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let target = target.clone();
                connections.spawn(async move {
                    if let Ok(mut server) = TcpStream::connect(target).await {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        }));
    }

    async fn cut(&mut self) {
        let running = self.running.take().expect("it runs");
        running.abort();
        _ = running.await;
    }

    async fn mend(&mut self) {
        let listener = TcpListener::bind(self.address).await.expect("its port is still free");
        self.run(listener);
    }
}

#[tokio::test]
async fn postgresql_outage_fails_requests_and_pauses_subscriptions() {
    let (database, nats) = tokio::join!(Database::new(), NatsServer::start());
    let (head, tail) = database.url().split_once('@').expect("a user stands in the address");
    let (address, name) = tail.split_once('/').expect("a database stands in the address");
    let mut proxy = Proxy::start(address.to_owned()).await;
    let database_url = format!("{head}@{}/{name}", proxy.address);
    let nats_url = nats.url().to_owned();
    let gateway = Gateway::launch(database, nats, &database_url, &nats_url).await;
    gateway.wait_until_ready().await;
    let gateway = gateway.with_agent().await;
    let task = gateway.task().await;
    let mut events = gateway.subscribe(&task, "0").await;
    next_events(&mut events, 1).await;

    proxy.cut().await;
    let status = expect_error(
        gateway.messages().create_message(message(&task, "lost")).await,
        Code::Unavailable,
    );
    assert!(status.get_error_details().retry_info().is_some(), "{status:?}");
    assert!(!format!("{status:?}").contains("postgres:"), "{status:?}");
    wait_until(
        "health says so",
        || health(&gateway, ""),
        |status| *status == ServingStatus::NotServing,
    )
    .await;

    proxy.mend().await;
    wait_until(
        "health says so",
        || health(&gateway, ""),
        |status| *status == ServingStatus::Serving,
    )
    .await;
    gateway.send_message(&task, "it is back").await;
    let next = next_events(&mut events, 1).await;
    assert!(
        matches!(&next[0].payload, Some(v1::event::Payload::Message(message)) if text(message) == "it is back")
    );
}
