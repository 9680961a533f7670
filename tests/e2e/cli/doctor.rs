//! `construct doctor` reports faults of a deployment with their remedies.

use construct_bus::{subject, topology::Stream};
use construct_domain::{TaskId, compute};
use construct_proto::{
    mesh::v1::TaskCensus,
    v1::{self, DiagnoseRequest, Finding, FindingSeverity as Severity},
};

use super::*;

/// Waits until a check reports this severity and text.
async fn wait_for_finding(mesh: &Mesh, check: &str, severity: Severity, words: &str) -> Finding {
    let client = mesh.client().unwrap();
    until(&format!("{check} to be found {severity:?}"), TURN_TIMEOUT, async || {
        let diagnosis = client.diagnosis().diagnose(DiagnoseRequest {}).await.unwrap().into_inner();
        let fits = |finding: &&Finding| {
            finding.check == check
                && finding.severity() == severity
                && finding.summary.contains(words)
        };
        let finding = diagnosis.findings.iter().find(fits).cloned();
        finding.ok_or(diagnosis)
    })
    .await
}

#[tokio::test]
async fn doctor_reports_deployment_faults_with_remedies() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.spawn(Service::Scanner).unwrap();
    mesh.wait_until_ready(Service::Scanner).await.unwrap();
    let well = until("all checks to succeed", TURN_TIMEOUT, async || {
        let done = construct(&mesh, &["doctor"], "").await;
        if done.code() == 0 && done.output.contains("0 problems, 0 warnings") {
            Ok(done)
        } else {
            Err(done)
        }
    })
    .await;
    for check in [
        "postgresql.schema",
        "nats.streams",
        "reconciler",
        "providers",
        "interpreter.cpu-2",
        "scanner",
        "tasks.overdue",
        "blobs",
    ] {
        assert!(well.output.contains(&format!("ok   {check} ")), "{check}: {}", well.output);
    }

    // An invalid payload where wakes are expected.
    mesh.scripted_agent("worker", &json!({"turns": [{"code": "1"}, {"text": "done"}]}))
        .await
        .unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    let task: TaskId = conversation.id().parse().unwrap();
    let wrong = subject::Address::subject(&subject::TaskWake::new(task));
    mesh.bus()
        .await
        .publish_raw(&wrong, &TaskCensus { task_ids: vec!["x".to_owned()] })
        .await
        .unwrap();
    let dead = wait_for_finding(&mesh, "nats.dead", Severity::Warning, "dead letters: 1").await;
    assert!(dead.remedy.contains("construct deadletter list"), "{dead:?}");

    // A task that cannot be reconciled.
    mesh.database.corrupt_task(task, true).await;
    conversation.submit("hello").await;
    wait_for_finding(&mesh, "tasks.quarantined", Severity::Warning, "failed: 1").await;
    mesh.database.corrupt_task(task, false).await;

    // A missing service, and the work that it blocks.
    mesh.kill(Service::Interpreter).unwrap();
    let other = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    other.submit("hello").await;
    let pool = format!("interpreter.{}", compute::DEFAULT);
    let missing = wait_for_finding(&mesh, &pool, Severity::Problem, "no interpreter serves").await;
    assert!(missing.summary.contains("wait") && !missing.remedy.is_empty(), "{missing:?}");
    let done = construct(&mesh, &["doctor"], "").await;
    assert!(done.code() == 1 && done.output.contains(&format!("FAIL {pool} ")), "{done:?}");
    other.wait_for_phase(v1::TaskPhase::InvokeModel).await;
    let top = construct(&mesh, &["top", "--once"], "").await;
    let line = |worker: &str| {
        top.output.lines().find(|line| line.starts_with(worker)).unwrap_or_default().to_owned()
    };
    assert!(line(&pool).ends_with("no worker"), "{top:?}");
    assert!(
        line("reconciler").ends_with('-') && top.output.contains(" invoking a model"),
        "{top:?}"
    );
    assert!(
        top.output.contains("1 quarantined") || top.output.contains("1 dead letters"),
        "{top:?}"
    );
    let mut person = terminal(&mesh, &["top", "-n", "500ms"]);
    person.wait_for_text("no worker").await;
    mesh.spawn(Service::Interpreter).unwrap();
    mesh.wait_until_ready(Service::Interpreter).await.unwrap();
    other.wait_until_idle().await;
    person
        .wait_for_screen("all workers to be active", |screen| {
            !screen.contains("no worker")
                && screen.contains("all idle")
                && screen.contains("worker")
        })
        .await;
    person.press("q").await;
    assert_eq!(person.wait_for_exit().await, 0);
    wait_for_finding(&mesh, &pool, Severity::Ok, "").await;

    // A deleted stream.
    mesh.kill(Service::Reconciler).unwrap();
    mesh.nats.remove_stream(Stream::Spending).await;
    wait_for_finding(&mesh, "nats.streams", Severity::Problem, "no stream CONSTRUCT_SPENDING")
        .await;
    mesh.spawn(Service::Reconciler).unwrap();
    mesh.wait_until_ready(Service::Reconciler).await.unwrap();
    wait_for_finding(&mesh, "nats.streams", Severity::Ok, "").await;

    // A missing key.
    let spec = v1::ModelProviderSpec {
        name: "vendor".to_owned(),
        r#type: v1::ModelProviderType::Openai.into(),
        api_key: "sk-test".to_owned(),
        ..Default::default()
    };
    let request = v1::CreateModelProviderRequest { spec: Some(spec), ..Default::default() };
    mesh.client().unwrap().providers().create_model_provider(request).await.unwrap();
    wait_for_finding(&mesh, "credentials", Severity::Ok, "").await;
    mesh.kill(Service::Gateway).unwrap();
    mesh.set_env("CONSTRUCT_MASTER_KEY", "another:QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE=");
    mesh.spawn(Service::Gateway).unwrap();
    mesh.wait_until_ready(Service::Gateway).await.unwrap();
    wait_for_finding(&mesh, "credentials", Severity::Problem, "not have: 1").await;
    // Without any service, doctor says that.
    mesh.kill(Service::Gateway).unwrap();
    assert_eq!(construct(&mesh, &["doctor"], "").await.code(), 3);
}
