//! One organization's flood leaves slots in the work queues behind the reconciler, and no slot is
//! ever lost.

use std::time::Instant;

use construct_bus::subject;
use construct_domain::{
    OrganizationId, TaskId,
    decide::CODE_GRACE_PERIOD,
    task::{Step, StepState},
};
use construct_proto::{
    mesh::v1::TaskWake,
    v1::{self, TaskPhase, TurnOutcome},
};
use construct_store::{Key, Order, Page, TaskFilter};
use construct_tests::{
    client::{Conversation, TURN_TIMEOUT},
    mesh::{Mesh, Service},
    vendor::{VendorServer, ollama},
    wait::until,
};
use serde_json::json;
use tokio::sync::watch;

/// The tasks of the flooding organization.
const FLOOD: u32 = 40;
/// All tasks of an organization.
const ALL: Page =
    Page { limit: 200, order: Order { key: Key::CreatedAt, descending: true }, after: None };
/// Two slots per organization, and three workers.
const SMALL_LIMITS: [(&str, &str); 4] = [
    ("CONSTRUCT_RECONCILER_MODEL_CALLS", "2"),
    ("CONSTRUCT_RECONCILER_SCRIPTS", "2"),
    ("CONSTRUCT_PROVIDERS_CONCURRENCY", "3"),
    ("CONSTRUCT_INTERPRETER_CONCURRENCY", "3"),
];

/// The number of commands that the first reconciler holds back: `model` calls or scripts (`code`).
async fn held_back_count(mesh: &Mesh, kind: &str) -> Result<u32, String> {
    let page = mesh.metrics(Service::Reconciler).await.map_err(|error| format!("{error:#}"))?;
    let kind = format!("construct_step_kind=\"{kind}\"");
    let line = page.lines().find(|line| {
        line.starts_with("construct_reconciler_queued_commands{") && line.contains(&kind)
    });
    let count = line.and_then(|line| line.rsplit(' ').next()).and_then(|count| count.parse().ok());
    count.ok_or(page)
}

async fn wait_for_held_back(mesh: &Mesh, kind: &str, enough: impl Fn(u32) -> bool) {
    until("commands to be held back", TURN_TIMEOUT, async || {
        match held_back_count(mesh, kind).await {
            Ok(count) if enough(count) => Ok(()),
            other => Err(other),
        }
    })
    .await;
}

/// Creates tasks of an organization with a message each, and wakes the reconciler.
async fn begin(mesh: &Mesh, organization: OrganizationId, count: u32, message: &str) {
    mesh.database.fill_tasks(organization, "worker", count, Some(message)).await;
    let bus = mesh.bus().await;
    for task in
        mesh.database.store().task_list(organization, &TaskFilter::default(), &ALL).await.unwrap()
    {
        let (organization_id, task_id) = (organization.to_string(), task.state.id.to_string());
        let wake = TaskWake { organization_id, task_id, ..TaskWake::default() };
        bus.publish(&subject::TaskWake::new(task.state.id), &wake).await.unwrap();
    }
}

/// Waits until so many tasks of an organization are answered.
async fn wait_for_answers(mesh: &Mesh, organization: OrganizationId, count: u32) {
    until("tasks to be answered", 2 * TURN_TIMEOUT, async || {
        match mesh.database.answer_times(organization).await {
            (done, _) if done.len() >= count as usize => Ok(()),
            (done, left) => Err((done.len(), left)),
        }
    })
    .await;
}

/// The number of answered tasks of an organization.
async fn answered_count(mesh: &Mesh, organization: OrganizationId) -> usize {
    mesh.database.answer_times(organization).await.0.len()
}

/// Waits until a task's explanation contains one of these texts.
async fn wait_for_explanation(conversation: &Conversation, words: &[&str]) {
    until(&format!("the task to report {words:?}"), TURN_TIMEOUT, async || {
        let why = conversation.explain().await.map_err(|error| error.to_string())?.waiting_for;
        if words.iter().any(|words| why.contains(words)) { Ok(()) } else { Err(why) }
    })
    .await;
}

/// Checks that every slot was returned: more tasks than there are slots are answered, and nothing
/// waits.
async fn check_no_slot_lost(mesh: &Mesh, organization: OrganizationId, answered: u32) {
    begin(mesh, organization, 6, "hello").await;
    wait_for_answers(mesh, organization, answered + 6).await;
    for kind in ["model", "code"] {
        wait_for_held_back(mesh, kind, |count| count == 0).await;
    }
}

/// A flood of calls that a model answers on command, through so many reconcilers.
async fn flood_of_model_calls(reconcilers: usize) {
    let (open, gate) = watch::channel(false);
    let vendor = VendorServer::answering(move |request| {
        let last = request.body["messages"].as_array().and_then(|messages| messages.last());
        let reply = ollama::Answer::text("Done.").reply();
        if last.is_some_and(|last| last["content"] == "flood") {
            reply.behind(gate.clone())
        } else {
            reply
        }
    })
    .await;
    // One worker more than the flood has slots.
    let workers = (2 * reconcilers + 1).to_string();
    let small =
        SMALL_LIMITS.into_iter().chain([("CONSTRUCT_PROVIDERS_CONCURRENCY", workers.as_str())]);
    let mut mesh = Mesh::start_with(&small.collect::<Vec<_>>()).await.unwrap();
    for _ in 1..reconcilers {
        mesh.start_replica(Service::Reconciler).await.unwrap();
    }
    let provider = v1::ModelProviderSpec {
        name: "worker".into(),
        r#type: v1::ModelProviderType::Ollama.into(),
        base_url: vendor.url(),
        ..v1::ModelProviderSpec::default()
    };
    mesh.agent("worker", provider).await.unwrap();
    let (local, other) = (OrganizationId::LOCAL, mesh.database.create_tenant("other").await);
    begin(&mesh, local, FLOOD, "flood").await;
    until("the flood to have all its places", TURN_TIMEOUT, async || match vendor.open_answers() {
        count if count == 2 * reconcilers => Ok(()),
        count => Err(count),
    })
    .await;
    wait_for_held_back(&mesh, "model", |count| count > 2).await;
    begin(&mesh, other, 3, "hello").await;
    wait_for_answers(&mesh, other, 3).await;
    assert_eq!((answered_count(&mesh, local).await, vendor.open_answers()), (0, 2 * reconcilers));
    open.send_replace(true);
    wait_for_answers(&mesh, local, FLOOD).await;
    check_no_slot_lost(&mesh, local, FLOOD).await;
    assert_eq!(vendor.requests().len(), FLOOD as usize + 3 + 6, "every call was made once");
}

#[tokio::test]
async fn slow_model_calls_leave_slots_for_another_organization() {
    flood_of_model_calls(1).await;
}

#[tokio::test]
async fn flood_across_two_reconcilers_leaves_slots_for_another() {
    flood_of_model_calls(2).await;
}

#[tokio::test]
async fn slow_scripts_leave_slots_for_another_organization() {
    let mesh = Mesh::start_with(&SMALL_LIMITS).await.unwrap();
    let waits = "execute_command('while [ ! -e go ]; do sleep 0.05; done', {timeout_seconds: 500})";
    let script = json!({"conversations": [
        {"match": "flood", "turns": [{"code": waits}, {"text": "Done."}]},
        {"match": "hello", "turns": [{"code": "1 + 1"}, {"text": "Done."}]},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let (local, other) = (OrganizationId::LOCAL, mesh.database.create_tenant("other").await);
    begin(&mesh, local, FLOOD, "flood").await;
    wait_for_held_back(&mesh, "code", |count| count == FLOOD - 2).await;
    begin(&mesh, other, 3, "hello").await;
    wait_for_answers(&mesh, other, 3).await;
    assert_eq!(
        (answered_count(&mesh, local).await, held_back_count(&mesh, "code").await),
        (0, Ok(FLOOD - 2))
    );
    until("the flood to be answered", 2 * TURN_TIMEOUT, async || {
        let own = std::fs::read_dir(mesh.home().join("data/workspaces")).unwrap();
        for folder in own.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()) {
            std::fs::write(folder.join("go"), "").unwrap();
        }
        match answered_count(&mesh, local).await {
            done if done == FLOOD as usize => Ok(()),
            done => Err(done),
        }
    })
    .await;
    check_no_slot_lost(&mesh, local, FLOOD).await;
}

#[tokio::test]
async fn crashes_during_a_flood_lose_no_slot_and_no_task() {
    let mut mesh = Mesh::start_with(&SMALL_LIMITS).await.unwrap();
    let replica = mesh.start_replica(Service::Reconciler).await.unwrap();
    let script = json!({"delay_ms": 400, "turns": [{"code": "execute_command('sleep 0.2')"}, {"text": "Done."}]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let local = OrganizationId::LOCAL;
    begin(&mesh, local, FLOOD, "hello").await;
    wait_for_held_back(&mesh, "model", |count| count > 5).await;
    // Its held-back commands are taken over with its partitions.
    mesh.kill_replica(replica).unwrap();
    wait_for_answers(&mesh, local, 5).await;
    mesh.kill(Service::Providers).unwrap();
    mesh.spawn(Service::Providers).unwrap();
    wait_for_answers(&mesh, local, 12).await;
    // By then no process knows what is in the queues.
    mesh.kill(Service::Reconciler).unwrap();
    mesh.spawn(Service::Reconciler).unwrap();
    wait_for_answers(&mesh, local, 20).await;
    mesh.kill(Service::Interpreter).unwrap();
    mesh.spawn(Service::Interpreter).unwrap();
    mesh.start_services().await.unwrap();
    wait_for_answers(&mesh, local, FLOOD).await;
    for task in mesh.database.store().task_list(local, &TaskFilter::default(), &ALL).await.unwrap()
    {
        assert_eq!(
            task.state.last_position, 4,
            "a message, a script, its result and an answer: {task:?}"
        );
    }
    check_no_slot_lost(&mesh, local, FLOOD).await;
}

#[tokio::test]
async fn queued_task_can_be_canceled_and_holds_no_slot() {
    let one = [("CONSTRUCT_RECONCILER_MODEL_CALLS", "1"), ("CONSTRUCT_RECONCILER_SCRIPTS", "1")];
    let mesh = Mesh::start_with(&one).await.unwrap();
    mesh.scripted_agent("slow", &json!({"delay_ms": 300_000, "turns": [{"text": "Never."}]}))
        .await
        .unwrap();
    mesh.scripted_agent("quick", &json!({"turns": [{"text": "Done."}]})).await.unwrap();
    let sleeps = json!({"turns": [{"code": "execute_command('sleep 600', {timeout_seconds: 590})"}, {"text": "Never."}]});
    mesh.scripted_agent("sleeps", &sleeps).await.unwrap();
    mesh.scripted_agent("adds", &json!({"turns": [{"code": "1 + 1"}, {"text": "Done."}]}))
        .await
        .unwrap();
    let client = mesh.client().unwrap();
    let say = async |agent: &str| {
        let conversation = client.create_task(agent, None).await.unwrap();
        conversation.submit("Go.").await;
        conversation
    };
    let outcome = async |conversation: &Conversation| {
        conversation.wait_until_idle().await.status.unwrap_or_default().last_outcome()
    };

    let slow = say("slow").await;
    slow.wait_for_phase(TaskPhase::InvokeModel).await;
    let (cancelled, deleted, suspended) =
        (say("quick").await, say("quick").await, say("quick").await);
    wait_for_held_back(&mesh, "model", |count| count == 3).await;
    wait_for_explanation(&slow, &["; the call is being worked on"]).await;
    let words = "; the call waits for a slot of its organization in the queue of model calls, where 1 of the organization's are";
    wait_for_explanation(&cancelled, &[words]).await;
    let why = cancelled.explain().await.unwrap();
    assert!(why.released_by.contains("when it is its turn") && why.deadline.is_some(), "{why:?}");
    cancelled.cancel("not wanted").await;
    assert_eq!(outcome(&cancelled).await, TurnOutcome::Cancelled);
    deleted.delete().await;
    suspended.suspend().await;
    suspended.wait_for_phase(TaskPhase::Suspended).await;
    wait_for_held_back(&mesh, "model", |count| count == 0).await;
    suspended.resume().await;
    let last = say("quick").await;
    wait_for_held_back(&mesh, "model", |count| count == 2).await;
    slow.cancel("make room").await;
    assert_eq!([outcome(&suspended).await, outcome(&last).await], [TurnOutcome::Completed; 2]);

    let sleeps = say("sleeps").await;
    sleeps.wait_for_phase(TaskPhase::ExecuteTools).await;
    let (cancelled, suspended, last) = (say("adds").await, say("adds").await, say("adds").await);
    wait_for_held_back(&mesh, "code", |count| count == 3).await;
    wait_for_explanation(&sleeps, &["; the script is being worked on"]).await;
    wait_for_explanation(
        &last,
        &["; the script waits for a slot of its organization in the queue of scripts"],
    )
    .await;
    // No worker has begun them, so the cancel waits for none, and they are known to have done
    // nothing.
    let began = Instant::now();
    cancelled.cancel("not wanted").await;
    assert_eq!(outcome(&cancelled).await, TurnOutcome::Cancelled);
    suspended.suspend().await;
    suspended.wait_for_phase(TaskPhase::Suspended).await;
    until("the script of the suspended task to be over", TURN_TIMEOUT, async || {
        if suspended.transcript().await.results().is_empty() {
            Err("it has no result")
        } else {
            Ok(())
        }
    })
    .await;
    assert!(began.elapsed() < CODE_GRACE_PERIOD, "{:?}", began.elapsed());
    cancelled.transcript().await.check(&["Go."]);
    check_did_nothing(&cancelled, "(not wanted)").await;
    check_did_nothing(&suspended, "(the user suspended the task)").await;
    sleeps.cancel("make room").await;
    assert_eq!(outcome(&last).await, TurnOutcome::Completed);
    last.transcript().await.check(&["Go."]);
    wait_for_held_back(&mesh, "code", |count| count == 0).await;
}

#[tokio::test]
async fn undelivered_script_is_canceled_at_once_without_effect() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent(
        "adds",
        &json!({"turns": [{"code": ["1 + 1", "2 + 2"]}, {"text": "Done."}]}),
    )
    .await
    .unwrap();
    mesh.client().unwrap().create_task("adds", None).await.unwrap().ask("Go.").await;
    mesh.stop(Service::Interpreter).await.unwrap();
    let client = mesh.client().unwrap();
    let conversation = client.create_task("adds", None).await.unwrap();
    conversation.submit("Go.").await;
    wait_for_explanation(&conversation, &["; the script waits in the queue of scripts"]).await;
    let began = Instant::now();
    conversation.cancel("not wanted").await;
    let outcome = conversation.wait_until_idle().await.status.unwrap_or_default().last_outcome();
    assert!(began.elapsed() < CODE_GRACE_PERIOD, "{:?}", began.elapsed());
    assert_eq!(outcome, TurnOutcome::Cancelled);
    check_did_nothing(&conversation, "(not wanted)").await;
    mesh.spawn(Service::Interpreter).unwrap();
    mesh.wait_until_ready(Service::Interpreter).await.unwrap();
    conversation.ask("Go on.").await;
    conversation.transcript().await.check(&["Go.", "Go on."]);
}

/// Checks that the model learns that the scripts of a task did nothing.
async fn check_did_nothing(conversation: &Conversation, why: &str) {
    let transcript = conversation.transcript().await;
    let results = transcript.results();
    let fits = |error: &str| {
        error.starts_with("NotRun: ") && error.contains(why) && error.ends_with("It did nothing.")
    };
    assert!(!results.is_empty() && results.iter().all(|result| fits(&result.error)), "{results:?}");
}

#[tokio::test]
async fn call_unclaimed_by_its_deadline_counts_as_no_attempt() {
    let one = [("CONSTRUCT_RECONCILER_MODEL_CALLS", "1")];
    let mut mesh = Mesh::start_with(&one).await.unwrap();
    mesh.scripted_agent("quick", &json!({"turns": [{"text": "Done."}]})).await.unwrap();
    mesh.stop(Service::Providers).await.unwrap();
    let client = mesh.client().unwrap();
    let (queued, withheld) = (
        client.create_task("quick", None).await.unwrap(),
        client.create_task("quick", None).await.unwrap(),
    );
    queued.submit("Go.").await;
    wait_for_explanation(&queued, &["; the call waits in the queue of model calls"]).await;
    withheld.submit("Go.").await;
    wait_for_held_back(&mesh, "model", |count| count == 1).await;
    // Once more than the attempts of a vendor call.
    for _ in 0..6 {
        for conversation in [&queued, &withheld] {
            let steps = step(&mesh, conversation).await.0;
            expire_deadline(&mesh, conversation).await;
            until("the call to be wanted anew", TURN_TIMEOUT, async || {
                match step(&mesh, conversation).await {
                    (number, Some(step))
                        if number > steps && matches!(step.state, StepState::InFlight { .. }) =>
                    {
                        assert_eq!(step.attempt, 1, "nothing was called");
                        Ok(())
                    }
                    other => Err(other),
                }
            })
            .await;
        }
    }
    mesh.spawn(Service::Providers).unwrap();
    for conversation in [&queued, &withheld] {
        assert_eq!(
            conversation.wait_until_idle().await.status.unwrap_or_default().last_outcome(),
            TurnOutcome::Completed
        );
        conversation.transcript().await.check(&["Go."]);
    }
}

/// The number of steps of a task, and its current step.
async fn step(mesh: &Mesh, conversation: &Conversation) -> (u64, Option<Step>) {
    let task = mesh
        .database
        .store()
        .task_get(OrganizationId::LOCAL, conversation.id().parse().unwrap())
        .await
        .unwrap();
    (task.state.steps, task.state.step)
}

/// Moves the deadline of a task's step into the past, and wakes the task.
async fn expire_deadline(mesh: &Mesh, conversation: &Conversation) {
    let task: TaskId = conversation.id().parse().unwrap();
    let pass = format!(
        "UPDATE tasks SET step = jsonb_set(step, '{{state,deadline}}', '\"2026-01-01T00:00:00Z\"'), next_wake = now(),
             version = version + 1, revision = revision + 1
         WHERE id = '{}'",
        task.uuid()
    );
    mesh.database.execute(&pass).await;
    let (organization_id, task_id) = (OrganizationId::LOCAL.to_string(), task.to_string());
    let wake = TaskWake { organization_id, task_id, ..TaskWake::default() };
    mesh.bus().await.publish(&subject::TaskWake::new(task), &wake).await.unwrap();
}

#[tokio::test]
async fn task_reports_whether_call_runs_is_queued_or_awaits_a_slot() {
    let small =
        [("CONSTRUCT_RECONCILER_MODEL_CALLS", "2"), ("CONSTRUCT_PROVIDERS_CONCURRENCY", "1")];
    let mut mesh = Mesh::start_with(&small).await.unwrap();
    mesh.scripted_agent("slow", &json!({"delay_ms": 300_000, "turns": [{"text": "Never."}]}))
        .await
        .unwrap();
    let client = mesh.client().unwrap();
    let say = async || {
        let spec =
            v1::TaskSpec { agent: "slow".into(), title: "A job".into(), ..v1::TaskSpec::default() };
        let conversation = client.create_task_with(spec).await.unwrap();
        conversation.submit("Go.").await;
        conversation
    };
    let (taken, queued) = (
        "; the call is being worked on",
        "; the call waits in the queue of model calls, no worker has it yet",
    );
    let waits_behind =
        |before| format!("including those being worked on; {before} more wait before it");
    let first = say().await;
    wait_for_explanation(&first, &[taken]).await;
    let second = say().await;
    wait_for_explanation(&second, &[queued]).await;
    let third = say().await;
    wait_for_explanation(&third, &[&waits_behind(0)]).await;
    let fourth = say().await;
    wait_for_explanation(&fourth, &[&waits_behind(1)]).await;
    // Of two reconcilers, the one with the task's partition knows. It has its own slots.
    mesh.start_replica(Service::Reconciler).await.unwrap();
    wait_for_explanation(&first, &[taken]).await;
    wait_for_explanation(&second, &[queued]).await;
    for conversation in [&third, &fourth] {
        wait_for_explanation(conversation, &[queued, &waits_behind(0), &waits_behind(1)]).await;
    }
}
