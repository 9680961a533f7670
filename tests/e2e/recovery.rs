//! What was given up is told, and taken up again by hand.

use construct_bus::{Pool, RawMessage, subject, topology::Stream};
use construct_domain::{OrganizationId, TaskId};
use construct_proto::{
    mesh::v1::{TaskCensus, TaskWake},
    v1::{
        DeadLetter, DropDeadLetterRequest, GetDeadLetterRequest, ListDeadLettersRequest,
        ListTasksRequest, ModelProviderSpec, ModelProviderType, RedriveDeadLetterRequest,
        RetryTaskRequest, TaskSpec, TurnOutcome,
    },
};
use construct_store::Quarantine;
use construct_tests::{
    client::{Conversation, PATIENCE, id},
    mesh::{Mesh, Service},
    vendor::{VendorServer, ollama},
    wait::until,
};
use serde_json::json;
use tokio::sync::watch;
use tonic::Code;

async fn letters(mesh: &Mesh, count: usize) -> Vec<DeadLetter> {
    let client = mesh.client().unwrap();
    until("dead letters", PATIENCE, async || {
        let listed =
            client.recovery().list_dead_letters(ListDeadLettersRequest::default()).await.unwrap();
        let letters = listed.into_inner().letters;
        if letters.len() == count { Ok(letters) } else { Err(letters) }
    })
    .await
}

/// Waits until a task is put aside, later than `before` if it was already.
async fn put_aside(mesh: &Mesh, task: TaskId, before: Option<&Quarantine>) -> Quarantine {
    until("the task to be put aside", PATIENCE, async || {
        let parked =
            mesh.database.store().task_quarantine_get(OrganizationId::LOCAL, task).await.unwrap();
        parked
            .filter(|parked| before.is_none_or(|before| parked.since > before.since))
            .ok_or("it is not")
    })
    .await
}

/// Looks that failed, and not because something was away.
async fn failed_looks(mesh: &Mesh) -> u64 {
    let page = mesh.metrics(Service::Reconciler).await.unwrap();
    let count = "construct_reconciler_look_seconds_count{error_type=\"lasting\"} ";
    page.lines().find_map(|line| line.strip_prefix(count)).map_or(0, |count| count.parse().unwrap())
}

/// Waits until wakes and results are all taken in.
async fn nothing_waits(mesh: &Mesh) {
    until("wakes and results to be taken in", PATIENCE, async || {
        match mesh.nats.waiting(Stream::Task).await {
            0 => Ok(()),
            waiting => Err(waiting),
        }
    })
    .await;
}

#[tokio::test]
async fn a_task_that_cannot_be_looked_at_is_put_aside_with_the_reason_and_retried_by_hand() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "{{last_user_text}}"}]}))
        .await
        .unwrap();
    let client = mesh.client().unwrap();
    let conversation = client.begin("worker", None).await.unwrap();
    let task: TaskId = conversation.id().parse().unwrap();
    let other = client.begin("worker", None).await.unwrap();
    mesh.database.corrupt_task(task, true).await;
    conversation.say("hello").await;
    let parked = put_aside(&mesh, task, None).await;
    assert!(parked.reason.contains("turn"), "{parked:?}");
    mesh.counted(Service::Reconciler, "construct_reconciler_parked_total 1").await;
    // Whoever asks is told, although the task cannot be read as a whole.
    let why = conversation.explain().await.unwrap();
    assert!(
        why.waiting_for.contains(&parked.reason) && why.released_by.contains("retry"),
        "{why:?}"
    );
    assert_eq!(why.since.unwrap().seconds, parked.since.as_second());
    let error = why.last_error.unwrap();
    assert_eq!((error.code.as_str(), &error.message), ("QUARANTINED", &parked.reason));
    let status = conversation.task().await.unwrap().status.unwrap();
    assert_eq!((status.queued_count, status.last_error.unwrap().code.as_str()), (1, "UNREADABLE"));
    let listed =
        client.tasks().list_tasks(ListTasksRequest::default()).await.unwrap().into_inner().tasks;
    let listed: Vec<String> = listed.iter().map(|task| id(task.metadata.as_ref())).collect();
    for known in [conversation.id(), other.id()] {
        assert!(listed.iter().any(|listed| listed == known), "{known} is not among {listed:?}");
    }
    // It can be asked for before it is repaired, and fails as before.
    let request =
        RetryTaskRequest { task: conversation.id().to_owned(), ..RetryTaskRequest::default() };
    let retried = client.recovery().retry_task(request.clone()).await.unwrap().into_inner();
    assert_eq!(retried.status.unwrap().last_error.unwrap().code, "UNREADABLE");
    put_aside(&mesh, task, Some(&parked)).await;
    mesh.counted(Service::Reconciler, "construct_reconciler_parked_total 2").await;
    // Whatever made it impossible is repaired. Nothing happens by itself.
    mesh.database.corrupt_task(task, false).await;
    let why = conversation.explain().await.unwrap();
    assert!(
        why.waiting_for.contains(&parked.reason) && why.released_by.contains("retry"),
        "{why:?}"
    );
    let status = conversation.task().await.unwrap().status.unwrap();
    assert_eq!((status.queued_count, status.last_error), (1, None));

    client.recovery().retry_task(request.clone()).await.unwrap();
    let status = conversation.settled().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed);
    assert_eq!(conversation.transcript().await.check(&["hello"]).answers(), ["hello"]);
    let why = conversation.explain().await.unwrap();
    assert!(why.waiting_for.contains("a message from a user"), "{why:?}");
    // Of a task that is not put aside nothing changes.
    until("a retry that changes nothing", PATIENCE, async || {
        // The turn's last commits may still come.
        let before = conversation.task().await.unwrap();
        let retried = mesh
            .client()
            .unwrap()
            .recovery()
            .retry_task(request.clone())
            .await
            .unwrap()
            .into_inner();
        let after = conversation.task().await.unwrap();
        if before == retried && retried == after { Ok(()) } else { Err((before, retried)) }
    })
    .await;
}

/// A mesh with an agent whose model answers while the gate is open.
async fn gated() -> (Mesh, VendorServer, watch::Sender<bool>) {
    let (open, gate) = watch::channel(false);
    let vendor = VendorServer::answering(move |_| {
        ollama::Answer::text("Done.").reply().behind(gate.clone())
    })
    .await;
    let mesh = Mesh::start().await.unwrap();
    let provider = ModelProviderSpec {
        name: "worker".into(),
        r#type: ModelProviderType::Ollama.into(),
        base_url: vendor.url(),
        ..ModelProviderSpec::default()
    };
    mesh.agent("worker", provider).await.unwrap();
    (mesh, vendor, open)
}

/// A task that has a title: the model is called for nothing but answers.
async fn titled(mesh: &Mesh) -> Conversation {
    let spec = TaskSpec { agent: "worker".into(), title: "Poison".into(), ..TaskSpec::default() };
    mesh.client().unwrap().begin_as(spec).await.unwrap()
}

/// Waits until the model is called.
async fn called(vendor: &VendorServer) {
    until("the model to be called", PATIENCE, async || match vendor.open_answers() {
        1 => Ok(()),
        open => Err(open),
    })
    .await;
}

#[tokio::test]
async fn a_task_that_cannot_be_looked_at_just_now_says_why_and_goes_on_once_it_can() {
    let (mesh, vendor, open) = gated().await;
    let conversation = titled(&mesh).await;
    conversation.say("hello").await;
    called(&vendor).await;
    let locked = mesh.database.lock_task(conversation.id().parse().unwrap()).await;
    open.send_replace(true);
    let why = until("the task to say that it cannot be looked at", PATIENCE, async || {
        let why = conversation.explain().await.map_err(|error| error.to_string())?;
        if why.waiting_for.contains("cannot look at the task") {
            Ok(why)
        } else {
            Err(why.waiting_for)
        }
    })
    .await;
    let error = why.last_error.as_ref().unwrap();
    assert_eq!(error.code, "RECONCILE_FAILED");
    assert!(
        error.message.contains("statement timeout") && why.waiting_for.contains(&error.message),
        "{why:?}"
    );
    assert!(
        why.released_by.starts_with("the reconciler service, which tries again")
            && why.next_wake.is_some()
    );
    locked.release().await;
    let status = conversation.settled().await.status.unwrap();
    assert_eq!((status.last_outcome(), status.last_error), (TurnOutcome::Completed, None));
    assert_eq!(conversation.transcript().await.check(&["hello"]).answers(), ["Done."]);
    assert_eq!(vendor.requests().len(), 1);
    let why = conversation.explain().await.unwrap();
    assert!(why.waiting_for == "a message from a user" && why.last_error.is_none(), "{why:?}");
}

#[tokio::test]
async fn a_result_for_a_task_that_is_put_aside_is_kept_and_not_tried_for_ever() {
    let (mesh, vendor, open) = gated().await;
    let client = mesh.client().unwrap();
    let conversation = titled(&mesh).await;
    let task: TaskId = conversation.id().parse().unwrap();
    let redrive = async |letter: u64| {
        client.recovery().redrive_dead_letter(RedriveDeadLetterRequest { letter }).await.unwrap();
    };

    conversation.say("hello").await;
    called(&vendor).await;
    mesh.database.corrupt_task(task, true).await;
    open.send_replace(true);
    let letter = letters(&mesh, 1).await.remove(0);
    assert_eq!(letter.message_type, "construct.mesh.v1.StepResult");
    assert!(letter.reason.contains("put aside") && letter.redrivable, "{letter:?}");
    let parked = put_aside(&mesh, task, None).await;
    nothing_waits(&mesh).await;
    let failed = failed_looks(&mesh).await;
    // What comes for it further is looked at once and no more, and it is put aside since when it
    // was first.
    redrive(letter.id).await;
    let again = until("the result to be given up again", PATIENCE, async || {
        let letters = letters(&mesh, 1).await;
        if letters[0].id > letter.id { Ok(letters[0].clone()) } else { Err(letters) }
    })
    .await;
    assert_eq!(again.deliveries, 1);
    assert_eq!(failed_looks(&mesh).await, failed + 1);
    assert_eq!(put_aside(&mesh, task, None).await, parked);
    mesh.counted(Service::Reconciler, "construct_reconciler_parked_total 1").await;
    // Repaired, and with the result published again, it goes on where it was.
    mesh.database.corrupt_task(task, false).await;
    redrive(again.id).await;
    conversation.settled().await;
    assert_eq!(conversation.transcript().await.check(&["hello"]).answers(), ["Done."]);
    assert_eq!(vendor.requests().len(), 1);
    assert_eq!(letters(&mesh, 0).await, []);

    // Where it is only asked for again, its step is as well.
    open.send_replace(false);
    conversation.say("and now?").await;
    called(&vendor).await;
    mesh.database.corrupt_task(task, true).await;
    open.send_replace(true);
    let letter = letters(&mesh, 1).await.remove(0);
    mesh.database.corrupt_task(task, false).await;
    let request =
        RetryTaskRequest { task: conversation.id().to_owned(), ..RetryTaskRequest::default() };
    client.recovery().retry_task(request).await.unwrap();
    conversation.settled().await;
    assert_eq!(vendor.requests().len(), 3);
    // The first result is of no use any more, and does no harm.
    redrive(letter.id).await;
    nothing_waits(&mesh).await;
    assert_eq!(
        conversation.transcript().await.check(&["hello", "and now?"]).answers(),
        ["Done.", "Done."]
    );
    assert_eq!(letters(&mesh, 0).await, []);
}

#[tokio::test]
async fn a_turn_that_has_failed_is_gone_on_with_when_a_person_asks_for_it() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"turns": [
        {"code": "execute_command('echo once >> ran'); 'it ran'"},
        {"text": "At last: {{last_result}}", "fault": {"class": "authentication", "times": 1}},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();
    let folder = mesh.folder("own").unwrap();
    let (agent, workspace) = ("worker".to_owned(), folder.display().to_string());
    let spec = TaskSpec { agent, workspace, title: "A job".to_owned(), ..TaskSpec::default() };
    let conversation = client.begin_as(spec).await.unwrap();
    let recorder = conversation.record();
    let failed = conversation.ask("go").await;
    assert_eq!(failed.status.unwrap().last_outcome(), TurnOutcome::Failed);
    let why = conversation.explain().await.unwrap();
    assert!(why.released_by.contains("task retry"), "{why:?}");

    let request = RetryTaskRequest {
        task: conversation.id().to_owned(),
        idempotency_key: "again".to_owned(),
    };
    client.recovery().retry_task(request.clone()).await.unwrap();
    recorder.until_count("turn.completed", 2).await;
    let done = conversation.settled().await;
    assert_eq!(done.status.unwrap().last_outcome(), TurnOutcome::Completed);
    let transcript = conversation.transcript().await;
    transcript.check(&["go"]);
    assert_eq!(transcript.answers(), ["", "At last: it ran"]);
    assert_eq!(
        std::fs::read_to_string(folder.join("ran")).unwrap(),
        "once\n",
        "what was done stays done"
    );
    // Said once more it is the same request, and another one finds nothing to try.
    client.recovery().retry_task(request.clone()).await.unwrap();
    let other = RetryTaskRequest { idempotency_key: "other".to_owned(), ..request };
    client.recovery().retry_task(other).await.unwrap();
    assert_eq!(conversation.settled().await.status.unwrap().last_outcome(), TurnOutcome::Completed);
    assert_eq!(conversation.transcript().await.messages.len(), transcript.messages.len());
}

#[tokio::test]
async fn what_could_not_be_understood_is_listed_and_published_again_or_removed() {
    let mesh = Mesh::start().await.unwrap();
    let client = mesh.client().unwrap();
    assert_eq!(letters(&mesh, 0).await, []);
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "{{last_user_text}}"}]}))
        .await
        .unwrap();
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
    assert_eq!(
        (letter.stream.as_str(), letter.subject.as_str()),
        ("CONSTRUCT_TASK", subject.as_str())
    );
    assert_eq!(letter.message_type, "construct.mesh.v1.TaskCensus");
    assert!(
        letter.reason.contains("TaskCensus") && letter.redrivable && letter.payload_size > 0,
        "{letter:?}"
    );
    let shown = client
        .recovery()
        .get_dead_letter(GetDeadLetterRequest { letter: letter.id })
        .await
        .unwrap();
    assert_eq!(&shown.into_inner(), letter);

    // Published again it is not understood any better: another letter.
    let redrive = RedriveDeadLetterRequest { letter: letter.id };
    client.recovery().redrive_dead_letter(redrive).await.unwrap();
    let again = until("the letter to come again", PATIENCE, async || {
        let listed =
            client.recovery().list_dead_letters(ListDeadLettersRequest::default()).await.unwrap();
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
        client
            .recovery()
            .drop_dead_letter(DropDeadLetterRequest { letter: letter.id })
            .await
            .unwrap();
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

#[tokio::test]
async fn a_turn_whose_command_cannot_be_read_fails_at_once_and_says_why() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "Done."}]})).await.unwrap();
    let client = mesh.client().unwrap();
    let spec = TaskSpec { agent: "worker".into(), title: "Garbage".into(), ..TaskSpec::default() };
    let conversation = client.begin_as(spec).await.unwrap();
    mesh.stop(Service::Providers).await.unwrap();
    conversation.say("hello").await;
    let command = until("the command", PATIENCE, async || {
        let mut commands = mesh.nats.stored(Stream::Model).await;
        if commands.len() == 1 { Ok(commands.remove(0)) } else { Err(commands.len()) }
    })
    .await;
    let bus = mesh.bus().await;
    let task: TaskId = conversation.id().parse().unwrap();
    let step = conversation.explain().await.unwrap().step_id.parse().unwrap();
    bus.withdraw(&subject::ModelInvoke::new(Pool::model_default(), task), step).await.unwrap();
    bus.publish_again(&RawMessage { payload: vec![0xff_u8; 3].into(), ..command }).await.unwrap();
    mesh.spawn(Service::Providers).unwrap();

    let status = conversation.settled().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Failed);
    let error = status.last_error.unwrap();
    assert_eq!(error.code, "INTERNAL");
    assert!(error.message.contains("could not read its command"), "{}", error.message);
    let letter = letters(&mesh, 1).await.remove(0);
    assert_eq!(
        (letter.message_type.as_str(), letter.redrivable),
        ("construct.mesh.v1.ModelInvoke", false)
    );
}
