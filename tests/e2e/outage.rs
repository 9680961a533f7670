//! What the mesh stands on is down at start, or goes away.

use construct_proto::v1::TurnOutcome;
use construct_tests::{
    client::PATIENCE,
    mesh::{Mesh, Service},
    proxy::{Proxy, authority},
    wait::until,
};
use serde_json::json;
use tonic::Code;

fn script() -> serde_json::Value {
    json!({"conversations": [{"match": "", "turns": [{"code": "1 + 1"}, {"text": "{{last_user_text}}: {{last_result}}"}]}]})
}

#[tokio::test]
async fn services_wait_for_nats_and_postgresql_to_come_up() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    let url = mesh.database.url().to_owned();
    let proxy = Proxy::start(&authority(&url)).await.unwrap();
    mesh.set("CONSTRUCT_DATABASE_URL", proxy.instead_of(&url));
    proxy.cut();
    mesh.nats.kill();
    for service in Service::ALL {
        mesh.spawn(service).unwrap();
    }
    for service in Service::ALL {
        // They say what they wait for, instead of ending.
        let (status, words) =
            until("a service to say that it is not ready", PATIENCE, async || mesh.readiness(service).await).await;
        assert_eq!(status, 503, "{service:?}: {words}");
        let either = words.contains("nats") || words.contains("postgresql");
        assert!(either, "{service:?}: {words}");
    }
    mesh.nats.restart().await;
    proxy.restore();
    mesh.start_services().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().begin("worker", None).await.unwrap();
    conversation.ask("hello").await;
    assert_eq!(conversation.transcript().await.check(&["hello"]).answers(), ["", "hello: 2"]);
}

#[tokio::test]
async fn a_message_accepted_without_nats_is_answered_when_it_is_back() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().begin("worker", None).await.unwrap();
    conversation.ask("before").await;
    mesh.nats.kill();
    // Accepting needs PostgreSQL alone.
    conversation.send("meanwhile").await.unwrap();
    let task = conversation.task().await.unwrap().status.unwrap();
    assert!(task.queued_count == 1 || task.turns_used == 1, "{task:?}");
    let why = conversation.explain().await.unwrap();
    assert!(!why.waiting_for.is_empty() && why.next_wake.is_some(), "{why:?}");
    mesh.nats.restart().await;
    let status = conversation.settled().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed);
    let transcript = conversation.transcript().await;
    transcript.check(&["before", "meanwhile"]);
    assert_eq!(transcript.answers(), ["", "before: 2", "", "meanwhile: 2"]);
}

#[tokio::test]
async fn without_postgresql_the_api_says_so_and_nothing_is_lost() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    let url = mesh.database.url().to_owned();
    let proxy = Proxy::start(&authority(&url)).await.unwrap();
    mesh.set("CONSTRUCT_DATABASE_URL", proxy.instead_of(&url));
    mesh.start_services().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().begin("worker", None).await.unwrap();
    conversation.ask("before").await;

    proxy.cut();
    let refused = conversation.send("lost").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert!(refused.message().contains("database"), "{refused:?}");
    assert_eq!(conversation.task().await.unwrap_err().code(), Code::Unavailable);
    // A client that goes on trying with one key is heard once.
    let patient = conversation.say("patient");
    let back = async {
        // The gateway itself says that it cannot work.
        until("the gateway to say that it is not ready", PATIENCE, async || {
            match mesh.readiness(Service::Gateway).await {
                Ok((503, words)) => Ok(words),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
        proxy.restore();
    };
    tokio::join!(patient, back);
    conversation.settled().await;
    mesh.ready(Service::Gateway).await.unwrap();
    let transcript = conversation.transcript().await;
    transcript.check(&["before", "patient"]);
    assert_eq!(transcript.answers(), ["", "before: 2", "", "patient: 2"]);
}
