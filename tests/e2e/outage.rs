//! NATS or PostgreSQL is down at start, or becomes unavailable.

use construct_proto::v1::{TaskPhase, TurnOutcome};
use construct_store::testing::Database;
use construct_tests::{
    client::{TURN_TIMEOUT, wait_for_file},
    clocks,
    mesh::{Disk, Mesh, Service},
    proxy::{Proxy, authority},
    wait::until,
};
use serde_json::json;
use tonic::Code;

fn script() -> serde_json::Value {
    json!({"conversations": [{"match": "", "turns": [{"code": "1 + 1"}, {"text": "{{last_user_text}}: {{last_result}}"}]}]})
}

#[tokio::test]
async fn services_wait_for_nats_and_postgresql() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    let url = mesh.database.url().to_owned();
    let proxy = Proxy::start(&authority(&url)).await.unwrap();
    mesh.set_env("CONSTRUCT_DATABASE_URL", proxy.proxied_url(&url));
    proxy.cut();
    mesh.nats.kill();
    for service in Service::ALL {
        mesh.spawn(service).unwrap();
    }
    for service in Service::ALL {
        // They report what they wait for instead of ending.
        let (status, words) =
            until("a service to say that it is not ready", TURN_TIMEOUT, async || {
                mesh.readiness(service).await
            })
            .await;
        assert_eq!(status, 503, "{service:?}: {words}");
        let either = words.contains("nats") || words.contains("postgresql");
        assert!(either, "{service:?}: {words}");
    }
    mesh.nats.restart().await;
    proxy.restore();
    mesh.start_services().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    conversation.ask("hello").await;
    assert_eq!(conversation.transcript().await.check(&["hello"]).answers(), ["", "hello: 2"]);
}

#[tokio::test]
async fn message_accepted_without_nats_is_answered_after_recovery() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    conversation.ask("before").await;
    mesh.nats.kill();
    mesh.wait_for_metric(Service::Gateway, "construct_bus_connected 0").await;
    // Accepting needs PostgreSQL only.
    conversation.send("meanwhile").await.unwrap();
    let task = conversation.task().await.unwrap().status.unwrap();
    assert!(task.queued_count == 1 || task.turns_used == 1, "{task:?}");
    let why = conversation.explain().await.unwrap();
    assert!(!why.waiting_for.is_empty() && why.next_wake.is_some(), "{why:?}");
    mesh.nats.restart().await;
    let status = conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed);
    let transcript = conversation.transcript().await;
    transcript.check(&["before", "meanwhile"]);
    assert_eq!(transcript.answers(), ["", "before: 2", "", "meanwhile: 2"]);
}

#[tokio::test]
async fn call_without_workers_reports_missing_workers() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    mesh.kill(Service::Providers).unwrap();
    conversation.submit("hello").await;
    let why = until("the task to report missing providers", TURN_TIMEOUT, async || {
        let why = conversation.explain().await.map_err(|error| error.to_string())?;
        let words =
            ["no worker has it yet", "; no process of the providers service is there since "];
        if words.iter().all(|words| why.waiting_for.contains(words)) {
            Ok(why)
        } else {
            Err(why.waiting_for)
        }
    })
    .await;
    assert!(
        why.released_by.starts_with("the operator, by starting the providers service"),
        "{why:?}"
    );
    mesh.spawn(Service::Providers).unwrap();
    assert_eq!(
        conversation.wait_until_idle().await.status.unwrap().last_outcome(),
        TurnOutcome::Completed
    );
}

#[tokio::test]
async fn postgresql_outage_is_reported_and_loses_nothing() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    let url = mesh.database.url().to_owned();
    let proxy = Proxy::start(&authority(&url)).await.unwrap();
    mesh.set_env("CONSTRUCT_DATABASE_URL", proxy.proxied_url(&url));
    mesh.start_services().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    conversation.ask("before").await;

    proxy.cut();
    let refused = conversation.send("lost").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert!(refused.message().contains("database"), "{refused:?}");
    assert_eq!(conversation.task().await.unwrap_err().code(), Code::Unavailable);
    // Retries with one idempotency key have one effect.
    let patient = conversation.submit("patient");
    let back = async {
        // The gateway itself reports that it cannot work.
        until("the gateway to say that it is not ready", TURN_TIMEOUT, async || {
            match mesh.readiness(Service::Gateway).await {
                Ok((503, words)) => Ok(words),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
        mesh.wait_for_metric(
            Service::Gateway,
            "construct_condition{construct_condition_name=\"postgresql\"} 0",
        )
        .await;
        proxy.restore();
    };
    tokio::join!(patient, back);
    conversation.wait_until_idle().await;
    mesh.wait_until_ready(Service::Gateway).await.unwrap();
    let transcript = conversation.transcript().await;
    transcript.check(&["before", "patient"]);
    assert_eq!(transcript.answers(), ["", "before: 2", "", "patient: 2"]);
}

/// A worker that cannot be asked may be in the middle of a script. The script is reported as over
/// only when it can have no effects any more.
#[tokio::test]
async fn healthy_slow_script_is_not_abandoned() {
    let mut mesh = Mesh::start().await.unwrap();
    let code = "create_file('first.txt', 'x'); await new Promise(go => setTimeout(go, 2000)); create_file('second.txt', 'x')";
    let script =
        json!({"conversations": [{"match": "", "turns": [{"code": code}, {"text": "done"}]}]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let folder = mesh.folder("work").unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", Some(&folder)).await.unwrap();
    conversation.send("go").await.unwrap();
    wait_for_file(&folder.join("first.txt"), |text| text == "x").await;
    mesh.pause(Service::Interpreter).unwrap();
    conversation.cancel("enough").await;
    until("the script to be canceled", TURN_TIMEOUT, async || {
        let phase = conversation.explain().await.map_err(|error| error.to_string())?;
        if phase.waiting_for.contains("the final result of a canceled script") {
            Ok(())
        } else {
            Err(format!("{phase:?}"))
        }
    })
    .await;
    mesh.nats.kill();
    // The reconciler checks when the worker's time to answer is over, and repeatedly after that.
    until("the reconciler to have tried", TURN_TIMEOUT, async || {
        let log = mesh.log(Service::Reconciler);
        let tried = log.matches("the task could not be reconciled").count();
        if tried > 0 { Ok(()) } else { Err(log) }
    })
    .await;
    assert_eq!(conversation.task().await.unwrap().status.unwrap().phase(), TaskPhase::ExecuteTools);
    mesh.nats.restart().await;
    let status = conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Cancelled);
    mesh.resume(Service::Interpreter).unwrap();
    // Another task's script shows that the interpreter works again.
    let other = mesh
        .client()
        .unwrap()
        .create_task("worker", Some(&mesh.folder("other").unwrap()))
        .await
        .unwrap();
    other.ask("go").await;
    assert!(!folder.join("second.txt").exists(), "it had an effect after it was reported as over");
}

/// On an empty server. Each service has its own user, which cannot create what belongs to others.
#[tokio::test]
async fn services_wait_for_reconciler_to_create_streams() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.nats.kill();
    std::fs::remove_dir_all(mesh.nats.dir().join("store")).unwrap();
    mesh.nats.restart().await;
    mesh.spawn(Service::Gateway).unwrap();
    until("the gateway to say what it waits for", TURN_TIMEOUT, async || {
        let (code, words) =
            mesh.readiness(Service::Gateway).await.map_err(|error| format!("{error:#}"))?;
        let log = mesh.log(Service::Gateway);
        if code == 503 && log.contains("the reconciler creates it") {
            Ok(())
        } else {
            Err(format!("{code} {words}\n{log}"))
        }
    })
    .await;
    mesh.start_services().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    conversation.ask("now").await;
    assert_eq!(conversation.transcript().await.answers(), ["", "now: 2"]);
}

/// NATS 2.9 then has streams that are stuck for good, and reports that it is healthy.
#[tokio::test]
async fn streams_stuck_after_full_disk_are_reported() {
    let mut mesh = Mesh::with_disks_and_clocks(Database::new().await).await.unwrap();
    mesh.start_services().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    conversation.ask("before").await;
    mesh.fill(Disk::Nats).unwrap();
    // Accepting needs PostgreSQL only.
    conversation.send("meanwhile").await.unwrap();
    until("the reconciler to report stuck streams", TURN_TIMEOUT, async || {
        match mesh.readiness(Service::Reconciler).await {
            Ok((503, words)) if words.contains("despite a connection") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    mesh.clear(Disk::Nats).unwrap();
    mesh.nats.restart().await;
    mesh.wait_until_ready(Service::Reconciler).await.unwrap();
}

/// By the machine's clock, one delay would take an hour, and a call would be over before it began.
#[tokio::test]
async fn clock_jumps_neither_stall_tasks_nor_end_their_steps() {
    if clocks::are_disabled() {
        eprintln!("LEFT OUT: no clock jumps, as CONSTRUCT_TEST_CLOCKS=off says");
        return;
    }
    let mut mesh = Mesh::with_disks_and_clocks(Database::new().await).await.unwrap();
    mesh.start_services().await.unwrap();
    // More failures than the attempts of one command: the reconciler then delays the next one.
    let busy = json!({"class": "transient", "message": "busy", "times": 3});
    let code = "await new Promise(go => setTimeout(go, 2500)); 1 + 1";
    let turns =
        json!([{"code": code}, {"fault": busy, "text": "{{last_user_text}}: {{last_result}}"}]);
    mesh.scripted_agent("worker", &json!({"conversations": [{"match": "", "turns": turns}]}))
        .await
        .unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    conversation.send("go").await.unwrap();
    for (service, hours) in [
        (Service::Reconciler, -1),
        (Service::Interpreter, 48),
        (Service::Providers, 48),
        (Service::Gateway, -48),
    ] {
        mesh.jump(service, false, hours * 3_600).unwrap();
    }
    // A warned operator can see the machine's clock.
    until("the reconciler to see that its machine's clock is wrong", TURN_TIMEOUT, async || {
        let log = mesh.log(Service::Reconciler);
        if log.contains("this machine's clock differs from PostgreSQL's") {
            Ok(())
        } else {
            Err(log)
        }
    })
    .await;
    conversation.wait_until_idle().await;
    conversation.ask("again").await;
    let transcript = conversation.transcript().await;
    transcript.check(&["go", "again"]);
    assert_eq!(transcript.answers(), ["", "go: 2", "", "again: 2"]);
    // A service that starts with a wrong clock uses the same time.
    mesh.crash(Service::Reconciler).await.unwrap();
    mesh.crash(Service::Providers).await.unwrap();
    mesh.crash(Service::Interpreter).await.unwrap();
    conversation.ask("once more").await;
    assert_eq!(conversation.transcript().await.answers()[4..], ["", "once more: 2"]);
}
