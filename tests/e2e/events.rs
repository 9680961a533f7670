//! Subscriptions: no gap and no duplicate, however often the connection breaks, and whoever is killed.

use construct_proto::v1::{self, Event, event::Payload};
use construct_tests::{
    client::Conversation,
    mesh::{Mesh, Service},
    recorder::{Recorder, check_order, describe, records, streamed_text, types},
};
use serde_json::json;

fn script() -> serde_json::Value {
    json!({"turns": [
        {
            "text": "One moment please, I shall look into all of that at once, and tell you about it in a great many words.",
            "code": "for (let n = 0; n < 12; n++) execute_command(`echo ${n}; sleep 0.03`); 'looked'",
            "tokens_per_second": 100,
        },
        {"text": "It is all as it should be, as far as I could see, and I did see quite far.", "tokens_per_second": 60},
    ]})
}

#[tokio::test]
async fn a_subscription_that_breaks_after_any_event_misses_nothing_and_repeats_nothing() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    // With a title, none is made after the turn.
    let spec = v1::TaskSpec { agent: "worker".into(), title: "Looking".into(), ..v1::TaskSpec::default() };
    let conversation = mesh.client().unwrap().begin_as(spec).await.unwrap();
    // Somebody listens who does not read, on a connection of his own: that is nobody else's business.
    let mut idle = mesh.client().unwrap().events().subscribe(conversation.subscription()).await.unwrap().into_inner();
    let whole = conversation.record();
    let broken: Vec<Recorder> = [1, 2, 3, 7].into_iter().map(|every| conversation.record_interrupted(every)).collect();
    let last = conversation.ask("go").await.status.unwrap().event_sequence;
    let whole = whole.until_sequence(last).await;
    check_whole(&conversation, &whole);
    for recorder in &broken {
        let events = recorder.until_sequence(last).await;
        assert!(recorder.connections() > 5, "it was interrupted");
        check_whole(&conversation, &events);
        assert_eq!(ids(&events), ids(&whole));
    }
    let mut unread = Vec::new();
    while unread.last().is_none_or(|event: &Event| event.sequence < last) {
        unread.push(idle.message().await.unwrap().expect("the stream goes on"));
    }
    assert_eq!(ids(&unread), ids(&whole));
    // Who comes late sees the same.
    let late = conversation.record().until_sequence(last).await;
    check_whole(&conversation, &late);
    assert_eq!(ids(&late), ids(&whole));

    // Globs choose types; numbers and cursors stay those of the whole stream.
    let subscribe = |types: &[&str], cursor: &str| {
        let types = types.iter().map(|kind| (*kind).to_owned()).collect();
        let request = v1::SubscribeRequest { types, cursor: cursor.to_owned(), ..conversation.subscription() };
        Recorder::start(mesh.client().unwrap().events(), request, None)
    };
    let some = subscribe(&["message.created", "t*n.completed"], "0").until_sequence(last - 1).await;
    let wanted: Vec<&str> =
        types(&whole).into_iter().filter(|kind| ["message.created", "turn.completed"].contains(kind)).collect();
    assert_eq!(types(&some), wanted);
    let tools = subscribe(&["tool.*"], "0").until_count("tool.result", 12).await;
    assert_eq!(tools.len(), 24);
    // Without a cursor only what is new is told.
    let new = subscribe(&[], "");
    new.connected().await;
    let last = conversation.ask("more").await.status.unwrap().event_sequence;
    let seen = new.until_sequence(last).await;
    assert!(records(&seen)[0].sequence > whole.iter().map(|event| event.sequence).max().unwrap_or_default());
    assert_eq!(types(&seen).first(), Some(&"message.created"), "{:?}", seen.iter().map(describe).collect::<Vec<_>>());
}

#[tokio::test]
async fn subscriptions_outlive_the_gateway_that_served_them() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().begin("worker", None).await.unwrap();
    let recorders = [conversation.record(), conversation.record_interrupted(4)];
    conversation.say("go").await;
    // In the middle of a text, and in the middle of a script.
    recorders[0].until_count("message.delta", 4).await;
    mesh.crash(Service::Gateway).await.unwrap();
    recorders[0].until_count("tool.result", 3).await;
    mesh.crash(Service::Gateway).await.unwrap();
    let last = conversation.settled().await.status.unwrap().event_sequence;
    let late = conversation.record().until_sequence(last).await;
    for recorder in &recorders {
        let events = recorder.until_sequence(last).await;
        check_whole(&conversation, &events);
        assert_eq!(ids(&events), ids(&late));
    }
    conversation.transcript().await.check(&["go"]);
}

#[tokio::test]
async fn changes_of_agents_models_and_providers_are_told_to_the_organisation() {
    let mesh = Mesh::start().await.unwrap();
    let client = mesh.client().unwrap();
    let request = v1::SubscribeRequest { cursor: "0".into(), ..v1::SubscribeRequest::default() };
    let recorder = Recorder::start(client.events(), request, Some(2));
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let update = v1::UpdateAgentRequest {
        agent: "worker".into(),
        description: Some("works".into()),
        ..v1::UpdateAgentRequest::default()
    };
    client.agents().update_agent(update).await.unwrap();
    client
        .agents()
        .delete_agent(v1::DeleteAgentRequest { agent: "worker".into(), ..Default::default() })
        .await
        .unwrap();
    client
        .models()
        .delete_model(v1::DeleteModelRequest { model: "worker".into(), ..Default::default() })
        .await
        .unwrap();
    let delete = v1::DeleteModelProviderRequest { model_provider: "worker".into(), ..Default::default() };
    client.providers().delete_model_provider(delete).await.unwrap();
    let events = recorder.until_count("provider.deleted", 1).await;
    check_order(&events);
    assert_eq!(
        types(&events),
        [
            "provider.created",
            "model.created",
            "agent.created",
            "agent.updated",
            "agent.deleted",
            "model.deleted",
            "provider.deleted"
        ]
    );
    let described = events.iter().find_map(|event| match &event.payload {
        Some(Payload::Agent(agent)) if event.r#type == "agent.updated" => agent.spec.clone(),
        _ => None,
    });
    assert_eq!(described.unwrap().description, "works");
}

/// Whatever the connection went through, this is what a subscriber has to have seen of [`script`].
fn check_whole(conversation: &Conversation, events: &[Event]) {
    check_order(events);
    assert!(events.iter().all(|event| event.task_id == conversation.id()));
    let turns = script()["turns"].clone();
    assert_eq!(streamed_text(events, 1), turns[0]["text"].as_str().unwrap());
    assert_eq!(streamed_text(events, 3), turns[1]["text"].as_str().unwrap());
    let count = |kind: &str| types(events).into_iter().filter(|of| *of == kind).count();
    assert_eq!((count("tool.called"), count("tool.result")), (12, 12));
}

fn ids(events: &[Event]) -> Vec<String> {
    events.iter().map(|event| event.id.clone()).collect()
}
