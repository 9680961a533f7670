//! Pools of interpreters: a task's scripts run in the pool it names, with its limits, and wait
//! while no process serves it.

use construct_proto::v1::{self, TurnOutcome};
use construct_tests::{
    client::{Conversation, TURN_TIMEOUT},
    mesh::{Mesh, Service},
    wait::until,
};
use futures::StreamExt as _;
use serde_json::json;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

/// 96 MiB: more than a script of `cpu-2` may use, less than the limit of the pool `bench` here.
const LARGE: &str = "new Uint8Array(96 << 20).fill(1).length >> 20";

#[tokio::test]
async fn operator_pool_is_served_by_own_process_with_own_limits() {
    let mut mesh = Mesh::prepare(&[
        ("CONSTRUCT_GATEWAY_POOLS", "cpu-2,bench"),
        ("CONSTRUCT_INTERPRETER_POOLS", "bench"),
        ("CONSTRUCT_INTERPRETER_LIMITS", "{bench={script_memory_bytes=134217728}}"),
    ])
    .await
    .unwrap();
    mesh.start_services().await.unwrap();
    mesh.set_env("CONSTRUCT_INTERPRETER_POOLS", "cpu-2");
    mesh.start_replica(Service::Interpreter).await.unwrap();
    let bus = mesh.bus().await;
    let mut commands = bus.tap("construct.v1.cmd.code.execute.>").await.unwrap();

    let conversations = json!({"conversations": [
        {"match": "write", "turns": [{"code": "create_file('note', 'from one pool'); 'written'"}, {"text": "{{last_result}}"}]},
        {"match": "read", "turns": [{"code": "read_file('note')"}, {"text": "{{last_result}}"}]},
        {"match": "large", "turns": [{"code": LARGE}, {"text": "{{last_result}}"}]},
    ]});
    mesh.scripted_agent("worker", &conversations).await.unwrap();
    let client = mesh.client().unwrap();
    let begin = async |compute: &str| {
        let workspace = mesh.workspace().display().to_string();
        let spec = v1::TaskSpec {
            agent: "worker".into(),
            workspace,
            compute: compute.into(),
            ..Default::default()
        };
        client.create_task_with(spec).await
    };

    // Unknown pools are refused, and the existing ones are named.
    let refused = begin("gpu").await.expect_err("there is no such pool");
    assert_refused(&refused, "spec.compute");
    let update = v1::UpdateAgentRequest {
        agent: "worker".into(),
        compute: Some("gpu".into()),
        ..Default::default()
    };
    assert_refused(
        &client.agents().update_agent(update).await.expect_err("there is no such pool"),
        "compute",
    );

    // The same script in two pools with one workspace.
    let (small, large) = (begin("").await.unwrap(), begin("bench").await.unwrap());
    assert_eq!(small.task().await.unwrap().spec.unwrap().compute, "cpu-2");
    assert_eq!(large.task().await.unwrap().spec.unwrap().compute, "bench");
    assert!(answer(&small, "large").await.contains("emory"), "it does not fit into cpu-2");
    assert!(answer(&large, "large").await.contains("96"), "it fits into bench");
    assert!(answer(&large, "write").await.contains("written"));
    assert!(answer(&small, "read").await.contains("from one pool"));
    for (conversation, pool) in
        [(&small, "cpu-2"), (&large, "bench"), (&large, "bench"), (&small, "cpu-2")]
    {
        let command = commands.next().await.expect("it is tapped");
        let expected = format!("construct.v1.cmd.code.execute.{pool}.{}", conversation.id());
        assert_eq!(command.subject, expected);
    }

    // Without its process, a task of the pool waits and names the reason; others continue.
    mesh.kill(Service::Interpreter).unwrap();
    large.submit("read").await;
    wait_for_explanation(&large, "; no interpreter serves the pool `bench` since ").await;
    assert!(answer(&small, "read").await.contains("from one pool"));
    mesh.set_env("CONSTRUCT_INTERPRETER_POOLS", "bench");
    mesh.spawn(Service::Interpreter).unwrap();
    assert_eq!(
        large.wait_until_idle().await.status.unwrap().last_outcome(),
        TurnOutcome::Completed
    );
    assert!(large.transcript().await.answers().pop().unwrap().contains("from one pool"));

    // A workspace that no interpreter of the pool has described yet: not even the model can be
    // called.
    mesh.wait_until_ready(Service::Interpreter).await.unwrap();
    mesh.kill(Service::Interpreter).unwrap();
    let own =
        v1::TaskSpec { agent: "worker".into(), compute: "bench".into(), ..Default::default() };
    let own = client.create_task_with(own).await.unwrap();
    own.submit("large").await;
    // With the reason behind that.
    wait_for_explanation(&own, "no interpreter of the pool `bench` describes its tools: ").await;
    wait_for_explanation(&own, "; no interpreter serves the pool `bench` since ").await;
    mesh.spawn(Service::Interpreter).unwrap();
    assert_eq!(own.wait_until_idle().await.status.unwrap().last_outcome(), TurnOutcome::Completed);
}

#[track_caller]
fn assert_refused(status: &Status, field: &str) {
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    let details = status.get_error_details();
    let violations = &details.bad_request().expect("it names the field").field_violations;
    assert_eq!(
        violations.iter().map(|violation| violation.field.as_str()).collect::<Vec<_>>(),
        [field]
    );
    assert!(
        violations[0].description.contains("no pool `gpu`; there are `cpu-2`, `bench`"),
        "{violations:?}"
    );
}

async fn answer(conversation: &Conversation, said: &str) -> String {
    conversation.ask(said).await;
    conversation.transcript().await.answers().pop().expect("an answer")
}

async fn wait_for_explanation(conversation: &Conversation, words: &str) {
    until(&format!("the task to report {words:?}"), TURN_TIMEOUT, async || {
        let explanation = conversation.explain().await.map_err(|error| error.to_string())?;
        if explanation.waiting_for.contains(words) { Ok(()) } else { Err(explanation.waiting_for) }
    })
    .await;
}
