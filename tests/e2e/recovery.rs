//! What was given up is told, and taken up again by hand.

use construct_bus::subject;
use construct_domain::{OrganizationId, TaskId};
use construct_proto::{
    mesh::v1::{TaskCensus, TaskWake},
    v1::{
        DeadLetter, DropDeadLetterRequest, GetDeadLetterRequest, ListDeadLettersRequest, RedriveDeadLetterRequest,
        RetryTaskRequest, TurnOutcome,
    },
};
use construct_tests::{
    client::PATIENCE,
    mesh::{Mesh, Service},
    wait::until,
};
use serde_json::json;
use tonic::Code;

async fn letters(mesh: &Mesh, count: usize) -> Vec<DeadLetter> {
    let client = mesh.client().unwrap();
    until("dead letters", PATIENCE, async || {
        let listed = client.recovery().list_dead_letters(ListDeadLettersRequest::default()).await.unwrap();
        let letters = listed.into_inner().letters;
        if letters.len() == count { Ok(letters) } else { Err(letters) }
    })
    .await
}

#[tokio::test]
async fn a_task_that_cannot_be_looked_at_is_put_aside_with_the_reason_and_retried_by_hand() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "{{last_user_text}}"}]})).await.unwrap();
    let conversation = mesh.client().unwrap().begin("worker", None).await.unwrap();
    let task: TaskId = conversation.id().parse().unwrap();
    mesh.database.spoil(task, true).await;
    conversation.say("hello").await;
    let parked = until("the task to be put aside", PATIENCE, async || {
        mesh.database.store().task_parked(OrganizationId::LOCAL, task).await.unwrap().ok_or("it is not")
    })
    .await;
    assert!(!parked.reason.is_empty());
    mesh.counted(Service::Reconciler, "construct_reconciler_parked_total 1").await;
    // Whatever made it impossible is repaired. Nothing happens by itself.
    mesh.database.spoil(task, false).await;
    let why = conversation.explain().await.unwrap();
    assert!(why.waiting_for.contains(&parked.reason) && why.released_by.contains("retry"), "{why:?}");
    assert_eq!(conversation.task().await.unwrap().status.unwrap().queued_count, 1);

    let request = RetryTaskRequest { task: conversation.id().to_owned(), ..RetryTaskRequest::default() };
    mesh.client().unwrap().recovery().retry_task(request.clone()).await.unwrap();
    let status = conversation.settled().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed);
    assert_eq!(conversation.transcript().await.check(&["hello"]).answers(), ["hello"]);
    let why = conversation.explain().await.unwrap();
    assert!(why.waiting_for.contains("a message from a user"), "{why:?}");
    // Of a task that is not put aside nothing changes.
    until("a retry that changes nothing", PATIENCE, async || {
        // The turn's last commits may still come.
        let before = conversation.task().await.unwrap();
        let retried = mesh.client().unwrap().recovery().retry_task(request.clone()).await.unwrap().into_inner();
        let after = conversation.task().await.unwrap();
        if before == retried && retried == after { Ok(()) } else { Err((before, retried)) }
    })
    .await;
}

#[tokio::test]
async fn what_could_not_be_understood_is_listed_and_published_again_or_removed() {
    let mesh = Mesh::start().await.unwrap();
    let client = mesh.client().unwrap();
    assert_eq!(letters(&mesh, 0).await, []);
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "{{last_user_text}}"}]})).await.unwrap();
    let conversation = client.begin("worker", None).await.unwrap();
    let task: TaskId = conversation.id().parse().unwrap();
    let bus = mesh.bus().await;
    // Something else than a wake, where wakes are expected; and the other one so too.
    let subject = subject::Address::subject(&subject::TaskWake::new(task));
    for n in 0..2 {
        let census = TaskCensus { task_ids: vec![n.to_string()] };
        bus.publish_raw(&subject, &census).await.unwrap();
    }
    let found = letters(&mesh, 2).await;
    assert!(found[0].id < found[1].id);
    let letter = &found[0];
    assert_eq!((letter.stream.as_str(), letter.subject.as_str()), ("CONSTRUCT_TASK", subject.as_str()));
    assert_eq!(letter.message_type, "construct.mesh.v1.TaskCensus");
    assert!(letter.reason.contains("TaskCensus") && letter.redrivable && letter.payload_size > 0, "{letter:?}");
    let shown = client.recovery().get_dead_letter(GetDeadLetterRequest { letter: letter.id }).await.unwrap();
    assert_eq!(&shown.into_inner(), letter);

    // Published again it is not understood any better: another letter.
    let redrive = RedriveDeadLetterRequest { letter: letter.id };
    client.recovery().redrive_dead_letter(redrive).await.unwrap();
    let again = until("the letter to come again", PATIENCE, async || {
        let listed = client.recovery().list_dead_letters(ListDeadLettersRequest::default()).await.unwrap();
        let letters = listed.into_inner().letters;
        if letters.len() == 2 && letters[1].id > found[1].id { Ok(letters) } else { Err(letters) }
    })
    .await;
    assert_eq!(again[0], found[1]);
    let gone = client.recovery().redrive_dead_letter(redrive).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
    let line = "construct_bus_dead_letters_total{messaging_destination_name=\"CONSTRUCT_TASK\"} 3";
    mesh.counted(Service::Reconciler, line).await;
    for letter in again {
        client.recovery().drop_dead_letter(DropDeadLetterRequest { letter: letter.id }).await.unwrap();
    }
    assert_eq!(letters(&mesh, 0).await, []);
    // A wake that is whole is delivered and has no letter.
    let wake = TaskWake {
        organization_id: OrganizationId::LOCAL.to_string(),
        task_id: task.to_string(),
        ..TaskWake::default()
    };
    bus.publish(&subject::TaskWake::new(task), &wake).await.unwrap();
    conversation.ask("hello").await;
    assert_eq!(letters(&mesh, 0).await, []);
}
