//! Hand-overs while NATS is unavailable.

use construct_bus::topology::Stream;
use construct_proto::mesh::v1 as mesh_v1;
use construct_tests::proxy::{Proxy, authority};
use jiff::Timestamp;
use prost::Message as _;

use super::*;

/// A scan that is ready for review, and its candidate.
async fn scan_in_review(mesh: &Mesh, github: &GitHubServer) -> (String, String) {
    commit(github, "octo/ledger", "");
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    let scan = create(mesh, scan_spec("octo/ledger", "m")).await;
    wait_for_phase(mesh, &scan, Review).await;
    let candidate = id(candidates(mesh, &scan).await[0].metadata.as_ref());
    (scan, candidate)
}

/// Accepts a candidate and hands it over; returns the id of the hand-over.
async fn hand_over(mesh: &Mesh, scan: &str, candidate: &str) -> String {
    let accept = v1::ReviewCandidateRequest {
        candidate: candidate.to_owned(),
        state: v1::CandidateState::Accepted.into(),
        ..Default::default()
    };
    review(mesh, accept).await.unwrap();
    let request = || v1::CreateToolsRequest {
        scan: scan.to_owned(),
        idempotency_key: "once".into(),
        ..Default::default()
    };
    let scans = mesh.client().unwrap().scans();
    let handed = scans.clone().create_tools(request()).await.unwrap().into_inner();
    assert_eq!(handed.candidates.len(), 1, "{handed:?}");
    let again = scans.clone().create_tools(request()).await.unwrap().into_inner();
    assert_eq!(again, handed, "a request that is repeated hands nothing over again");
    handed.hand_over_id
}

/// Hand-overs that are not marked as published.
async fn unpublished(mesh: &Mesh) -> Vec<String> {
    let untold = mesh.database.store().hand_overs_unpublished(Timestamp::now(), 10).await.unwrap();
    untold.iter().map(|hand_over| hand_over.id.to_string()).collect()
}

/// Waits until the scanner has published the hand-overs and marked them.
async fn wait_until_published(mesh: &Mesh) {
    until("the hand-overs to be published", SCAN_TIMEOUT, async || {
        if unpublished(mesh).await.is_empty() { Ok(()) } else { Err(mesh.log(Service::Scanner)) }
    })
    .await;
}

/// Checks the queue for the consumer of hand-overs: one message, of this hand-over.
async fn assert_one_message(mesh: &Mesh, hand_over: &str, scan: &str) {
    let stored = mesh.nats.stored_messages(Stream::Tool).await;
    assert_eq!(stored.len(), 1, "{stored:?}");
    let id = ("Nats-Msg-Id".to_owned(), format!("tool.create.{hand_over}"));
    assert!(stored[0].headers.contains(&id), "{stored:?}");
    let message = mesh_v1::ToolCreate::decode(stored[0].payload.clone()).unwrap();
    assert_eq!((message.hand_over_id.as_str(), message.scan_id.as_str()), (hand_over, scan));
    assert_eq!(message.candidates[0].content.clone().unwrap().name, "monthly-total");
    // It waits for its consumer.
    assert_eq!(mesh.nats.pending_messages(Stream::Tool).await, 1);
}

#[tokio::test]
async fn hand_over_without_nats_is_published_once_after_recovery() {
    let (mut mesh, github) = begin().await;
    let (scan, candidate) = scan_in_review(&mesh, &github).await;
    mesh.nats.kill();
    mesh.wait_for_metric(Service::Gateway, "construct_bus_connected 0").await;
    let id = hand_over(&mesh, &scan, &candidate).await;
    assert_eq!(unpublished(&mesh).await, std::slice::from_ref(&id));
    // The process that would publish it dies as well.
    mesh.kill(Service::Scanner).unwrap();
    mesh.nats.restart().await;
    mesh.spawn(Service::Scanner).unwrap();
    wait_until_published(&mesh).await;
    assert_one_message(&mesh, &id, &scan).await;
}

#[tokio::test]
async fn late_gateway_event_equals_the_scanners_event() {
    let github = GitHubServer::start().await;
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.set_env("CONSTRUCT_SCANNER_GITHUB_URL", github.url());
    mesh.set_env("CONSTRUCT_SCANNER_TRUSTED_HOSTS", "127.0.0.1");
    let direct = mesh.nats.url().to_owned();
    let proxy = Proxy::start(&authority(&direct)).await.unwrap();
    mesh.set_env("CONSTRUCT_NATS_URL", proxy.proxied_url(&direct));
    mesh.spawn(Service::Gateway).unwrap();
    mesh.set_env("CONSTRUCT_NATS_URL", direct);
    mesh.start_services().await.unwrap();
    mesh.spawn(Service::Scanner).unwrap();
    mesh.wait_until_ready(Service::Scanner).await.unwrap();
    connect(&mesh, &github, "work", Credential::Token(TOKEN.into())).await;
    let (scan, candidate) = scan_in_review(&mesh, &github).await;
    // The gateway's message is published, and no consumer has read it.
    proxy.hold();
    let id = hand_over(&mesh, &scan, &candidate).await;
    wait_until_published(&mesh).await;
    assert_one_message(&mesh, &id, &scan).await;
    proxy.restore();
    // A request follows on the same connection; its answer shows that both were received.
    until("the gateway to be heard again", SCAN_TIMEOUT, async || {
        let request =
            v1::ListRepositoriesRequest { connection: "work".into(), ..Default::default() };
        mesh.client().unwrap().scans().list_repositories(request).await
    })
    .await;
    assert_one_message(&mesh, &id, &scan).await;
}
