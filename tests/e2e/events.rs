//! Subscriptions: no gap and no duplicate, however often the connection breaks and whichever
//! service is killed.

use construct_proto::v1::{self, Event, event::Payload};
use construct_tests::{
    client::{Conversation, id},
    mesh::{Mesh, Service},
    recorder::{Recorder, check_order, describe, records, streamed_text, types},
    transcript,
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
async fn subscription_broken_after_any_event_resumes_exactly() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    // With a title, none is created after the turn.
    let spec =
        v1::TaskSpec { agent: "worker".into(), title: "Looking".into(), ..v1::TaskSpec::default() };
    let conversation = mesh.client().unwrap().create_task_with(spec).await.unwrap();
    // A subscriber that does not read, on its own connection, does not affect others.
    let mut idle = mesh
        .client()
        .unwrap()
        .events()
        .subscribe(conversation.subscription())
        .await
        .unwrap()
        .into_inner();
    let whole = conversation.record();
    let broken: Vec<Recorder> =
        [1, 2, 3, 7].into_iter().map(|every| conversation.record_interrupted(every)).collect();
    let last = conversation.ask("go").await.status.unwrap().event_sequence;
    let whole = whole.wait_for_sequence(last).await;
    check_whole(&conversation, &whole);
    for recorder in &broken {
        let events = recorder.wait_for_sequence(last).await;
        assert!(recorder.connections() > 5, "it was interrupted");
        check_whole(&conversation, &events);
        assert_eq!(ids(&events), ids(&whole));
    }
    let mut unread = Vec::new();
    while unread.last().is_none_or(|event: &Event| event.sequence < last) {
        unread.push(idle.message().await.unwrap().expect("the stream continues"));
    }
    assert_eq!(ids(&unread), ids(&whole));
    // A late subscriber sees the same.
    let late = conversation.record().wait_for_sequence(last).await;
    check_whole(&conversation, &late);
    assert_eq!(ids(&late), ids(&whole));

    // Globs select types; numbers and cursors stay those of the whole stream.
    let subscribe = |types: &[&str], cursor: &str| {
        let types = types.iter().map(|kind| (*kind).to_owned()).collect();
        let request = v1::SubscribeRequest {
            types,
            cursor: cursor.to_owned(),
            ..conversation.subscription()
        };
        Recorder::start(mesh.client().unwrap().events(), request, None)
    };
    let some =
        subscribe(&["message.created", "t*n.completed"], "0").wait_for_sequence(last - 1).await;
    let wanted: Vec<&str> = types(&whole)
        .into_iter()
        .filter(|kind| ["message.created", "turn.completed"].contains(kind))
        .collect();
    assert_eq!(types(&some), wanted);
    let tools = subscribe(&["tool.*"], "0").wait_for_count("tool.result", 12).await;
    assert_eq!(tools.len(), 24);
    // Without a cursor only new events arrive.
    let new = subscribe(&[], "");
    new.wait_until_connected().await;
    let last = conversation.ask("more").await.status.unwrap().event_sequence;
    let seen = new.wait_for_sequence(last).await;
    assert!(
        records(&seen)[0].sequence
            > whole.iter().map(|event| event.sequence).max().unwrap_or_default()
    );
    assert_eq!(
        types(&seen).first(),
        Some(&"message.created"),
        "{:?}",
        seen.iter().map(describe).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn subscriptions_survive_gateway_crash() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    let recorders = [conversation.record(), conversation.record_interrupted(4)];
    conversation.submit("go").await;
    // In the middle of a text, and in the middle of a script.
    recorders[0].wait_for_count("message.delta", 4).await;
    mesh.crash(Service::Gateway).await.unwrap();
    recorders[0].wait_for_count("tool.result", 3).await;
    mesh.crash(Service::Gateway).await.unwrap();
    let last = conversation.wait_until_idle().await.status.unwrap().event_sequence;
    let late = conversation.record().wait_for_sequence(last).await;
    for recorder in &recorders {
        let events = recorder.wait_for_sequence(last).await;
        check_whole(&conversation, &events);
        assert_eq!(ids(&events), ids(&late));
    }
    conversation.transcript().await.check(&["go"]);
}

#[tokio::test]
async fn organization_events_report_entity_changes() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.spawn(Service::Gateway).unwrap();
    mesh.wait_until_ready(Service::Gateway).await.unwrap();
    let client = mesh.client().unwrap();
    let subscribe = |types: &[&str], every| {
        let types = types.iter().map(|kind| (*kind).to_owned()).collect();
        let request =
            v1::SubscribeRequest { cursor: "0".into(), types, ..v1::SubscribeRequest::default() };
        Recorder::start(client.events(), request, every)
    };
    let recorder = subscribe(&[], Some(2));
    let updates = subscribe(&["*.updated"], None);
    let models = subscribe(&["model.*"], None);
    for filtered in [&updates, &models] {
        filtered.wait_until_connected().await;
    }
    let agent = id(mesh.scripted_agent("worker", &script()).await.unwrap().metadata.as_ref());

    let update = v1::UpdateModelProviderRequest {
        model_provider: "worker".into(),
        script: Some("[]".into()),
        ..v1::UpdateModelProviderRequest::default()
    };
    let provider = client.providers().update_model_provider(update).await.unwrap().into_inner();
    let update = v1::UpdateModelRequest {
        model: "worker".into(),
        vendor_model: Some("other".into()),
        ..v1::UpdateModelRequest::default()
    };
    let model = client.models().update_model(update).await.unwrap().into_inner();
    let update = v1::UpdateAgentRequest {
        agent: "worker".into(),
        description: Some("works".into()),
        idempotency_key: "once".into(),
        ..v1::UpdateAgentRequest::default()
    };
    let updated = client.agents().update_agent(update.clone()).await.unwrap().into_inner();
    // An identical update is no change, and neither is a refused one.
    client.agents().update_agent(update).await.unwrap();
    let late = v1::UpdateAgentRequest {
        agent: "worker".into(),
        name: Some("late".into()),
        revision: 1,
        ..Default::default()
    };
    client.agents().update_agent(late).await.unwrap_err();
    let delete = v1::DeleteModelRequest { model: "worker".into(), ..Default::default() };
    client.models().delete_model(delete).await.unwrap_err();
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
    let delete =
        v1::DeleteModelProviderRequest { model_provider: "worker".into(), ..Default::default() };
    client.providers().delete_model_provider(delete).await.unwrap();

    let events = recorder.wait_for_count("provider.deleted", 1).await;
    check_order(&events);
    assert_eq!(
        types(&events),
        [
            "provider.created",
            "model.created",
            "agent.created",
            "provider.updated",
            "model.updated",
            "agent.updated",
            "agent.deleted",
            "model.deleted",
            "provider.deleted"
        ]
    );
    // Each event has the whole new entity, or the id of the deleted one.
    let payloads: Vec<Payload> =
        events.iter().skip(3).filter_map(|event| event.payload.clone()).collect();
    let deleted = |id: String| Payload::Deleted(v1::Deleted { id });
    assert_eq!(updated.spec.as_ref().unwrap().description, "works");
    assert_eq!(
        payloads,
        [
            Payload::ModelProvider(provider.clone()),
            Payload::Model(model.clone()),
            Payload::Agent(updated),
            deleted(agent),
            deleted(id(model.metadata.as_ref())),
            deleted(id(provider.metadata.as_ref())),
        ]
    );
    let updates = updates.wait_for_count("agent.updated", 1).await;
    assert_eq!(ids(&updates), ids(&events[3..6]));
    let models = models.wait_for_count("model.deleted", 1).await;
    assert_eq!(types(&models), ["model.created", "model.updated", "model.deleted"]);
}

#[tokio::test]
async fn changes_of_queued_messages_are_published_once_and_in_order() {
    // The reconciler starts later: until then everything is queued.
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.spawn(Service::Gateway).unwrap();
    mesh.wait_until_ready(Service::Gateway).await.unwrap();
    mesh.scripted_agent("worker", &json!([])).await.unwrap();
    let client = mesh.client().unwrap();
    let spec =
        v1::TaskSpec { agent: "worker".into(), title: "Waiting".into(), ..v1::TaskSpec::default() };
    let conversation = client.create_task_with(spec).await.unwrap();
    let filtered = |types: &[&str]| {
        let types = types.iter().map(|kind| (*kind).to_owned()).collect();
        let request = v1::SubscribeRequest { types, ..conversation.subscription() };
        Recorder::start(client.events(), request, None)
    };
    let (all, changed, withdrawn) =
        (conversation.record(), filtered(&["m*.updated"]), filtered(&["message.deleted"]));
    for recorder in [&all, &changed, &withdrawn] {
        recorder.wait_until_connected().await;
    }
    conversation.suspend().await;
    let mut said = Vec::new();
    for text in ["edited", "withdrawn", "dropped"] {
        said.push(id(conversation.submit(text).await.metadata.as_ref()));
    }
    let block = v1::block::Block::Text(v1::Text { text: "as meant".into() });
    let update = v1::UpdateMessageRequest {
        message: said[0].clone(),
        blocks: vec![v1::Block { block: Some(block) }],
        ..v1::UpdateMessageRequest::default()
    };
    let edited = client.messages().update_message(update).await.unwrap().into_inner();
    let delete = v1::DeleteMessageRequest { message: said[1].clone(), ..Default::default() };
    client.messages().delete_message(delete.clone()).await.unwrap();
    client.messages().delete_message(delete).await.unwrap_err();
    conversation.cancel("changed my mind").await;
    // Sent after the cancel and before the reconcile: this message stays.
    let kept = id(conversation.submit("kept").await.metadata.as_ref());
    mesh.spawn(Service::Reconciler).unwrap();

    let task = conversation.wait_for_task("the cancel", |_, status| status.queued_count == 1).await;
    let events = all.wait_for_sequence(task.status.unwrap().event_sequence).await;
    check_order(&events);
    let told: Vec<(&str, &Payload)> = events
        .iter()
        .filter(|event| event.r#type.starts_with("message."))
        .map(|event| (event.r#type.as_str(), event.payload.as_ref().unwrap()))
        .collect();
    let kinds: Vec<&str> = told.iter().map(|(kind, _)| *kind).collect();
    let (created, updated) = ("message.created", "message.updated");
    assert_eq!(
        kinds,
        [created, created, created, updated, "message.deleted", created, updated, updated]
    );
    assert_eq!(told[3].1, &Payload::Message(edited));
    assert_eq!(told[4].1, &Payload::Deleted(v1::Deleted { id: said[1].clone() }));
    let message = |payload: &Payload| match payload {
        Payload::Message(message) => message.clone(),
        other => panic!("{other:?}"),
    };
    let dropped: Vec<v1::Message> = told[6..].iter().map(|(_, payload)| message(payload)).collect();
    let listed = conversation.transcript().await;
    for (dropped, expected) in dropped.iter().zip([&said[0], &said[2]]) {
        assert_eq!(&id(dropped.metadata.as_ref()), expected);
        let status = transcript::status(dropped);
        assert!(status.position == 0 && status.error.starts_with("cancelled"), "{status:?}");
        assert!(status.processed_at.is_some());
        // The events equal the stored messages.
        let kept =
            listed.messages.iter().find(|message| &id(message.metadata.as_ref()) == expected);
        assert_eq!(kept, Some(dropped));
    }
    let waiting: Vec<String> = listed
        .unplaced_messages()
        .into_iter()
        .filter(|message| transcript::status(message).processed_at.is_none())
        .map(|message| id(message.metadata.as_ref()))
        .collect();
    assert_eq!(waiting, [kept]);

    // Globs filter out the others.
    let mine: Vec<String> =
        ids(&events.iter().filter(|event| event.r#type == updated).cloned().collect::<Vec<_>>());
    assert_eq!(ids(&changed.wait_for_count(updated, 3).await), mine);
    assert_eq!(types(&withdrawn.wait_for_count("message.deleted", 1).await), ["message.deleted"]);
}

/// The events of [`script`] that a subscriber must have seen, whatever happened to its connection.
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
