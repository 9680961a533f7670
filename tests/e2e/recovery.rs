//! Abandoned work is reported, and continued manually.

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
    client::{Conversation, TURN_TIMEOUT, id},
    mesh::{Mesh, Service},
    vendor::{VendorServer, ollama},
    wait::until,
};
use serde_json::json;
use tokio::sync::watch;
use tonic::Code;

async fn wait_for_dead_letters(mesh: &Mesh, count: usize) -> Vec<DeadLetter> {
    let client = mesh.client().unwrap();
    until("dead letters", TURN_TIMEOUT, async || {
        let listed =
            client.recovery().list_dead_letters(ListDeadLettersRequest::default()).await.unwrap();
        let letters = listed.into_inner().letters;
        if letters.len() == count { Ok(letters) } else { Err(letters) }
    })
    .await
}

/// Waits until a task is quarantined, later than `before` if it already was.
async fn wait_for_quarantine(mesh: &Mesh, task: TaskId, before: Option<&Quarantine>) -> Quarantine {
    until("the task to be quarantined", TURN_TIMEOUT, async || {
        let quarantine =
            mesh.database.store().task_quarantine_get(OrganizationId::LOCAL, task).await.unwrap();
        quarantine
            .filter(|quarantine| before.is_none_or(|before| quarantine.since > before.since))
            .ok_or("it is not")
    })
    .await
}

/// Reconcile failures, except those due to unavailable services.
async fn reconcile_failures(mesh: &Mesh) -> u64 {
    let page = mesh.metrics(Service::Reconciler).await.unwrap();
    let count = "construct_reconciler_reconcile_seconds_count{error_type=\"lasting\"} ";
    page.lines().find_map(|line| line.strip_prefix(count)).map_or(0, |count| count.parse().unwrap())
}

/// Waits until all wakes and results are consumed.
async fn wait_until_consumed(mesh: &Mesh) {
    until("wakes and results to be taken in", TURN_TIMEOUT, async || {
        match mesh.nats.pending_messages(Stream::Task).await {
            0 => Ok(()),
            waiting => Err(waiting),
        }
    })
    .await;
}

#[tokio::test]
async fn unreconcilable_task_is_quarantined_and_retried_manually() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "{{last_user_text}}"}]}))
        .await
        .unwrap();
    let client = mesh.client().unwrap();
    let conversation = client.create_task("worker", None).await.unwrap();
    let task: TaskId = conversation.id().parse().unwrap();
    let other = client.create_task("worker", None).await.unwrap();
    mesh.database.corrupt_task(task, true).await;
    conversation.submit("hello").await;
    let quarantine = wait_for_quarantine(&mesh, task, None).await;
    assert!(quarantine.reason.contains("turn"), "{quarantine:?}");
    mesh.wait_for_metric(Service::Reconciler, "construct_reconciler_quarantined_total 1").await;
    // Its status is available although the task cannot be read as a whole.
    let why = conversation.explain().await.unwrap();
    assert!(
        why.waiting_for.contains(&quarantine.reason) && why.released_by.contains("retry"),
        "{why:?}"
    );
    assert_eq!(why.since.unwrap().seconds, quarantine.since.as_second());
    let error = why.last_error.unwrap();
    assert_eq!((error.code.as_str(), &error.message), ("QUARANTINED", &quarantine.reason));
    let status = conversation.task().await.unwrap().status.unwrap();
    assert_eq!((status.queued_count, status.last_error.unwrap().code.as_str()), (1, "UNREADABLE"));
    let listed =
        client.tasks().list_tasks(ListTasksRequest::default()).await.unwrap().into_inner().tasks;
    let listed: Vec<String> = listed.iter().map(|task| id(task.metadata.as_ref())).collect();
    for known in [conversation.id(), other.id()] {
        assert!(listed.iter().any(|listed| listed == known), "{known} is not among {listed:?}");
    }
    // A retry before the repair fails as before.
    let request =
        RetryTaskRequest { task: conversation.id().to_owned(), ..RetryTaskRequest::default() };
    let retried = client.recovery().retry_task(request.clone()).await.unwrap().into_inner();
    assert_eq!(retried.status.unwrap().last_error.unwrap().code, "UNREADABLE");
    wait_for_quarantine(&mesh, task, Some(&quarantine)).await;
    mesh.wait_for_metric(Service::Reconciler, "construct_reconciler_quarantined_total 2").await;
    // The cause is repaired. Nothing happens by itself.
    mesh.database.corrupt_task(task, false).await;
    let why = conversation.explain().await.unwrap();
    assert!(
        why.waiting_for.contains(&quarantine.reason) && why.released_by.contains("retry"),
        "{why:?}"
    );
    let status = conversation.task().await.unwrap().status.unwrap();
    assert_eq!((status.queued_count, status.last_error), (1, None));

    client.recovery().retry_task(request.clone()).await.unwrap();
    let status = conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed);
    assert_eq!(conversation.transcript().await.check(&["hello"]).answers(), ["hello"]);
    let why = conversation.explain().await.unwrap();
    assert!(why.waiting_for.contains("a message from a user"), "{why:?}");
    // A task that is not quarantined does not change.
    until("a retry that changes nothing", TURN_TIMEOUT, async || {
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
async fn gated_mesh() -> (Mesh, VendorServer, watch::Sender<bool>) {
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

/// A task with a title: the model is called for answers only.
async fn task_with_title(mesh: &Mesh) -> Conversation {
    let spec = TaskSpec { agent: "worker".into(), title: "Poison".into(), ..TaskSpec::default() };
    mesh.client().unwrap().create_task_with(spec).await.unwrap()
}

/// Waits until the model is called.
async fn wait_for_call(vendor: &VendorServer) {
    until("the model to be called", TURN_TIMEOUT, async || match vendor.open_answers() {
        1 => Ok(()),
        open => Err(open),
    })
    .await;
}

#[tokio::test]
async fn task_with_reconcile_failures_explains_itself_and_recovers() {
    let (mesh, vendor, open) = gated_mesh().await;
    let conversation = task_with_title(&mesh).await;
    conversation.submit("hello").await;
    wait_for_call(&vendor).await;
    let locked = mesh.database.lock_task(conversation.id().parse().unwrap()).await;
    open.send_replace(true);
    let why = until("the task to report reconcile failures", TURN_TIMEOUT, async || {
        let why = conversation.explain().await.map_err(|error| error.to_string())?;
        if why.waiting_for.contains("reconciling the task has failed") {
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
        why.released_by.starts_with("the reconciler service, which retries")
            && why.next_wake.is_some()
    );
    locked.release().await;
    let status = conversation.wait_until_idle().await.status.unwrap();
    assert_eq!((status.last_outcome(), status.last_error), (TurnOutcome::Completed, None));
    assert_eq!(conversation.transcript().await.check(&["hello"]).answers(), ["Done."]);
    assert_eq!(vendor.requests().len(), 1);
    let why = conversation.explain().await.unwrap();
    assert!(why.waiting_for == "a message from a user" && why.last_error.is_none(), "{why:?}");
}

#[tokio::test]
async fn result_for_quarantined_task_is_kept_without_retries() {
    let (mesh, vendor, open) = gated_mesh().await;
    let client = mesh.client().unwrap();
    let conversation = task_with_title(&mesh).await;
    let task: TaskId = conversation.id().parse().unwrap();
    let redrive = async |letter: u64| {
        client.recovery().redrive_dead_letter(RedriveDeadLetterRequest { letter }).await.unwrap();
    };

    conversation.submit("hello").await;
    wait_for_call(&vendor).await;
    mesh.database.corrupt_task(task, true).await;
    open.send_replace(true);
    let letter = wait_for_dead_letters(&mesh, 1).await.remove(0);
    assert_eq!(letter.message_type, "construct.mesh.v1.StepResult");
    assert!(letter.reason.contains("quarantined") && letter.redrivable, "{letter:?}");
    let quarantine = wait_for_quarantine(&mesh, task, None).await;
    wait_until_consumed(&mesh).await;
    let failed = reconcile_failures(&mesh).await;
    // Later messages for it cause one reconcile each, and the quarantine keeps its first time.
    redrive(letter.id).await;
    let again = until("the result to be dead-lettered again", TURN_TIMEOUT, async || {
        let letters = wait_for_dead_letters(&mesh, 1).await;
        if letters[0].id > letter.id { Ok(letters[0].clone()) } else { Err(letters) }
    })
    .await;
    assert_eq!(again.deliveries, 1);
    assert_eq!(reconcile_failures(&mesh).await, failed + 1);
    assert_eq!(wait_for_quarantine(&mesh, task, None).await, quarantine);
    mesh.wait_for_metric(Service::Reconciler, "construct_reconciler_quarantined_total 1").await;
    // After the repair and a redrive of the result, it continues where it was.
    mesh.database.corrupt_task(task, false).await;
    redrive(again.id).await;
    conversation.wait_until_idle().await;
    assert_eq!(conversation.transcript().await.check(&["hello"]).answers(), ["Done."]);
    assert_eq!(vendor.requests().len(), 1);
    assert_eq!(wait_for_dead_letters(&mesh, 0).await, []);

    // If the task is only retried, its step is repeated.
    open.send_replace(false);
    conversation.submit("and now?").await;
    wait_for_call(&vendor).await;
    mesh.database.corrupt_task(task, true).await;
    open.send_replace(true);
    let letter = wait_for_dead_letters(&mesh, 1).await.remove(0);
    mesh.database.corrupt_task(task, false).await;
    let request =
        RetryTaskRequest { task: conversation.id().to_owned(), ..RetryTaskRequest::default() };
    client.recovery().retry_task(request).await.unwrap();
    conversation.wait_until_idle().await;
    assert_eq!(vendor.requests().len(), 3);
    // The first result is obsolete, and harmless.
    redrive(letter.id).await;
    wait_until_consumed(&mesh).await;
    assert_eq!(
        conversation.transcript().await.check(&["hello", "and now?"]).answers(),
        ["Done.", "Done."]
    );
    assert_eq!(wait_for_dead_letters(&mesh, 0).await, []);
}

#[tokio::test]
async fn failed_turn_continues_when_retried_manually() {
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
    let conversation = client.create_task_with(spec).await.unwrap();
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
    recorder.wait_for_count("turn.completed", 2).await;
    let done = conversation.wait_until_idle().await;
    assert_eq!(done.status.unwrap().last_outcome(), TurnOutcome::Completed);
    let transcript = conversation.transcript().await;
    transcript.check(&["go"]);
    assert_eq!(transcript.answers(), ["", "At last: it ran"]);
    assert_eq!(
        std::fs::read_to_string(folder.join("ran")).unwrap(),
        "once\n",
        "what was done stays done"
    );
    // The repeated request is the same one; another request finds nothing to retry.
    client.recovery().retry_task(request.clone()).await.unwrap();
    let other = RetryTaskRequest { idempotency_key: "other".to_owned(), ..request };
    client.recovery().retry_task(other).await.unwrap();
    assert_eq!(
        conversation.wait_until_idle().await.status.unwrap().last_outcome(),
        TurnOutcome::Completed
    );
    assert_eq!(conversation.transcript().await.messages.len(), transcript.messages.len());
}

#[tokio::test]
async fn undecodable_messages_are_listed_redriven_or_deleted() {
    let mesh = Mesh::start().await.unwrap();
    let client = mesh.client().unwrap();
    assert_eq!(wait_for_dead_letters(&mesh, 0).await, []);
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "{{last_user_text}}"}]}))
        .await
        .unwrap();
    let conversation = client.create_task("worker", None).await.unwrap();
    let task: TaskId = conversation.id().parse().unwrap();
    let bus = mesh.bus().await;
    // An invalid payload where wakes are expected, and one of another kind.
    let subject = subject::Address::subject(&subject::TaskWake::new(task));
    for n in 0..2 {
        let census = TaskCensus { task_ids: vec![n.to_string()] };
        bus.publish_raw(&subject, &census).await.unwrap();
    }
    let found = wait_for_dead_letters(&mesh, 2).await;
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

    // After a redrive it is still undecodable: another dead letter.
    let redrive = RedriveDeadLetterRequest { letter: letter.id };
    client.recovery().redrive_dead_letter(redrive).await.unwrap();
    let again = until("the letter to come again", TURN_TIMEOUT, async || {
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
    mesh.wait_for_metric(Service::Reconciler, line).await;
    for letter in again {
        client
            .recovery()
            .drop_dead_letter(DropDeadLetterRequest { letter: letter.id })
            .await
            .unwrap();
    }
    assert_eq!(wait_for_dead_letters(&mesh, 0).await, []);
    // A valid wake is delivered and causes no dead letter.
    let wake = TaskWake {
        organization_id: OrganizationId::LOCAL.to_string(),
        task_id: task.to_string(),
        ..TaskWake::default()
    };
    bus.publish(&subject::TaskWake::new(task), &wake).await.unwrap();
    conversation.ask("hello").await;
    assert_eq!(wait_for_dead_letters(&mesh, 0).await, []);
}

#[tokio::test]
async fn turn_with_undecodable_command_fails_at_once_with_reason() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": [{"text": "Done."}]})).await.unwrap();
    let client = mesh.client().unwrap();
    let spec = TaskSpec { agent: "worker".into(), title: "Garbage".into(), ..TaskSpec::default() };
    let conversation = client.create_task_with(spec).await.unwrap();
    mesh.stop(Service::Providers).await.unwrap();
    conversation.submit("hello").await;
    let command = until("the command", TURN_TIMEOUT, async || {
        let mut commands = mesh.nats.stored_messages(Stream::Model).await;
        if commands.len() == 1 { Ok(commands.remove(0)) } else { Err(commands.len()) }
    })
    .await;
    let bus = mesh.bus().await;
    let task: TaskId = conversation.id().parse().unwrap();
    let step = conversation.explain().await.unwrap().step_id.parse().unwrap();
    bus.withdraw(&subject::ModelInvoke::new(Pool::model_default(), task), step).await.unwrap();
    bus.republish(&RawMessage { payload: vec![0xff_u8; 3].into(), ..command }).await.unwrap();
    mesh.spawn(Service::Providers).unwrap();

    let status = conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Failed);
    let error = status.last_error.unwrap();
    assert_eq!(error.code, "INTERNAL");
    assert!(error.message.contains("could not read the command"), "{}", error.message);
    let letter = wait_for_dead_letters(&mesh, 1).await.remove(0);
    assert_eq!(
        (letter.message_type.as_str(), letter.redrivable),
        ("construct.mesh.v1.ModelInvoke", false)
    );
}
