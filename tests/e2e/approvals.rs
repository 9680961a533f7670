//! A script that needs an approval waits across restarts as rows and a journal, and continues as if
//! it had never stopped.

use std::process::Stdio;

use construct_bus::topology::Stream;
use construct_proto::v1::{self, ApprovalState, PolicyAction, TaskPhase, TurnOutcome};
use construct_tests::{
    client::{Conversation, TURN_TIMEOUT},
    mesh::{Mesh, Service, binary},
    recorder::{Recorder, check_order},
    wait::until,
};
use serde_json::{Value, json};

use crate::read;

/// The file `log` counts the executions of each call.
pub(crate) const SCRIPT: [&str; 7] = [
    "print('before');",
    "execute_command('echo open >> log');",
    "let told;",
    "try { told = create_file('secrets/key', 'the key').status }",
    "catch (error) { told = `${error.name}: ${error.message}` }",
    "execute_command('echo after >> log');",
    "told",
];

fn policy() -> Vec<v1::PolicyRule> {
    vec![v1::PolicyRule {
        action: PolicyAction::Ask.into(),
        tools: vec!["create_file".to_owned()],
        paths: vec!["secrets/**".to_owned()],
        reason: "it is secret".to_owned(),
        ..v1::PolicyRule::default()
    }]
}

/// A task whose agent needs approval before it writes secrets, and which waits for one.
pub(crate) struct AwaitingApproval {
    pub(crate) conversation: Conversation,
    recorder: Recorder,
    pub(crate) approval: String,
}

impl AwaitingApproval {
    pub(crate) async fn start(mesh: &Mesh, code: &[&str]) -> Self {
        let script = json!({"turns": [
            {"text": "I shall do it.", "code": [code]},
            {"text": "Done: {{last_result}}"},
        ]});
        mesh.scripted_agent("worker", &script).await.unwrap();
        let client = mesh.client().unwrap();
        let update = v1::UpdateAgentRequest {
            agent: "worker".to_owned(),
            policy: Some(v1::Policy { rules: policy() }),
            ..v1::UpdateAgentRequest::default()
        };
        client.agents().update_agent(update).await.unwrap();
        let conversation = client.create_task("worker", Some(mesh.workspace())).await.unwrap();
        let recorder = conversation.record();
        conversation.submit("Do it.").await;
        conversation.wait_for_phase(TaskPhase::AwaitApproval).await;
        let approval = pending(mesh, &conversation).await.pop().expect("something is asked");
        Self { conversation, recorder, approval: id(&approval) }
    }

    /// Waits until the turn is over; returns the script's result.
    pub(crate) async fn result(&self) -> String {
        let status = self.conversation.wait_until_idle().await.status.unwrap();
        let transcript = self.conversation.transcript().await;
        transcript.check(&["Do it."]);
        assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{}", transcript.show());
        check_order(&self.recorder.wait_for_sequence(status.event_sequence).await);
        let result = transcript.result();
        assert_eq!(result.error, "", "{}", transcript.show());
        result.output.clone()
    }

    fn event_count(&self, kind: &str) -> usize {
        self.recorder.events().iter().filter(|event| event.r#type == kind).count()
    }
}

fn id(approval: &v1::Approval) -> String {
    approval.metadata.as_ref().map(|metadata| metadata.id.clone()).unwrap_or_default()
}

fn approval_service(
    mesh: &Mesh,
) -> v1::approval_service_client::ApprovalServiceClient<tonic::transport::Channel> {
    v1::approval_service_client::ApprovalServiceClient::new(mesh.channel().unwrap())
}

async fn pending(mesh: &Mesh, conversation: &Conversation) -> Vec<v1::Approval> {
    let state = ApprovalState::Pending.into();
    let filter = v1::list_approvals_request::Filter {
        task: conversation.id().to_owned(),
        state,
        ..Default::default()
    };
    let request = v1::ListApprovalsRequest { page: None, filter: Some(filter) };
    approval_service(mesh).list_approvals(request).await.unwrap().into_inner().approvals
}

async fn state(mesh: &Mesh, approval: &str) -> ApprovalState {
    let request = v1::GetApprovalRequest { approval: approval.to_owned() };
    approval_service(mesh).get_approval(request).await.unwrap().into_inner().status.unwrap().state()
}

/// Runs the command line; returns its JSON output.
pub(crate) async fn construct(mesh: &Mesh, arguments: &[&str]) -> Value {
    let done = tokio::process::Command::new(binary("construct").unwrap())
        .env_clear()
        .env("CONSTRUCT_GATEWAY_URL", mesh.gateway_url())
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"))
}

/// Waits until no command is in the scripts' queue: no process holds anything of the script.
pub(crate) async fn wait_until_nothing_in_flight(mesh: &Mesh) {
    until("the queue of scripts to be empty", TURN_TIMEOUT, async || {
        match mesh.nats.message_count(Stream::Code).await {
            0 => Ok(()),
            messages => Err(format!("{messages} commands")),
        }
    })
    .await;
}

#[tokio::test]
async fn script_awaiting_approval_survives_crash_of_every_service() {
    let mut mesh = Mesh::start().await.unwrap();
    let asking = AwaitingApproval::start(&mesh, &SCRIPT).await;
    wait_until_nothing_in_flight(&mesh).await;
    assert!(!mesh.workspace().join("secrets").exists());
    let explanation = asking.conversation.explain().await.unwrap();
    assert!(
        explanation.waiting_for.contains(&format!("create_file ({})", asking.approval)),
        "{explanation:?}"
    );
    assert_eq!(explanation.approvals, std::slice::from_ref(&asking.approval));

    for service in Service::ALL {
        mesh.kill(service).unwrap();
    }
    mesh.start_services().await.unwrap();
    asking.conversation.wait_for_phase(TaskPhase::AwaitApproval).await;
    wait_until_nothing_in_flight(&mesh).await;

    let listed = construct(&mesh, &["approval", "list", "--state", "pending", "-o", "json"]).await;
    let spec = &listed["approvals"][0]["spec"];
    assert_eq!((&spec["tool"], &spec["reason"]), (&json!("create_file"), &json!("it is secret")));
    assert_eq!(spec["arguments"], json!(r#"{"content":"the key","path":"secrets/key"}"#));
    let approved = construct(&mesh, &["approval", "approve", &asking.approval, "-o", "json"]).await;
    assert_eq!(approved["status"]["state"], json!("APPROVAL_STATE_APPROVED"));

    assert_eq!(asking.result().await, "before\ncreated");
    assert_eq!(read(&mesh.workspace().join("secrets/key")), "the key");
    assert_eq!(read(&mesh.workspace().join("log")), "open\nafter\n");
    assert_eq!(
        (asking.event_count("approval.requested"), asking.event_count("approval.decided")),
        (1, 1)
    );
    assert_eq!(asking.event_count("tool.result"), 3, "no call is published twice");
}

#[tokio::test]
async fn rejected_call_throws_in_script_and_script_continues() {
    let mesh = Mesh::start().await.unwrap();
    let asking = AwaitingApproval::start(&mesh, &SCRIPT).await;
    let rejected =
        ["approval", "reject", &asking.approval, "--comment", "use the vault", "-o", "json"];
    construct(&mesh, &rejected).await;
    let told = asking.result().await;
    assert!(told.contains("ApprovalRejected: ") && told.contains("use the vault"), "{told}");
    assert!(!mesh.workspace().join("secrets").exists());
    assert_eq!(read(&mesh.workspace().join("log")), "open\nafter\n");
    // A decision is final.
    let again = v1::DecideApprovalRequest {
        approval: asking.approval.clone(),
        decision: v1::decide_approval_request::Decision::Approve.into(),
        ..v1::DecideApprovalRequest::default()
    };
    let refused = approval_service(&mesh).decide_approval(again).await.expect_err("it is over");
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.message().contains("rejected"), "{refused:?}");
}

#[tokio::test]
async fn task_canceled_awaiting_approval_reports_completed_calls() {
    let mesh = Mesh::start().await.unwrap();
    let asking = AwaitingApproval::start(&mesh, &SCRIPT).await;
    asking.conversation.suspend().await;
    asking.conversation.wait_for_phase(TaskPhase::Suspended).await;
    asking.conversation.resume().await;
    asking.conversation.wait_for_phase(TaskPhase::AwaitApproval).await;
    asking.conversation.cancel("not today").await;
    let status = asking.conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Cancelled);
    let transcript = asking.conversation.transcript().await;
    transcript.check(&["Do it."]);
    let result = transcript.result();
    assert!(result.error.contains("canceled while waiting for an approval"), "{}", result.error);
    assert!(result.error.contains("Calls that had ended: #1 execute_command."), "{}", result.error);
    assert!(result.error.contains("they were not approved: #2 create_file"), "{}", result.error);
    assert_eq!(state(&mesh, &asking.approval).await, ApprovalState::Cancelled);
    assert!(!mesh.workspace().join("secrets").exists());
    asking.recorder.wait_for_count("approval.decided", 1).await;
}

#[tokio::test]
async fn approved_call_runs_once_when_interpreter_crashes_after_it() {
    let mut mesh = Mesh::start().await.unwrap();
    // The approved call takes a while, so that it can be interrupted, and writes a line when it
    // starts.
    let script = [
        "let told;",
        "try { execute_command('echo begun >> log; sleep 3; echo done >> log'); told = 'done' }",
        "catch (error) { told = error.name }",
        "told",
    ];
    let agent_policy = vec![v1::PolicyRule {
        action: PolicyAction::Ask.into(),
        commands: vec!["echo *".to_owned()],
        ..v1::PolicyRule::default()
    }];
    mesh.scripted_agent(
        "careful",
        &json!({"turns": [{"code": [&script]}, {"text": "{{last_result}}"}]}),
    )
    .await
    .unwrap();
    let workspace = mesh.workspace().display().to_string();
    let spec = v1::TaskSpec {
        agent: "careful".to_owned(),
        workspace,
        policy: agent_policy,
        ..v1::TaskSpec::default()
    };
    let conversation = mesh.client().unwrap().create_task_with(spec).await.unwrap();
    let recorder = conversation.record();
    conversation.submit("Do it.").await;
    conversation.wait_for_phase(TaskPhase::AwaitApproval).await;
    let approval = id(&pending(&mesh, &conversation).await.pop().expect("something is asked"));
    construct(&mesh, &["approval", "approve", &approval, "-o", "json"]).await;
    construct_tests::client::wait_for_file(&mesh.workspace().join("log"), |text| {
        text.contains("begun")
    })
    .await;
    mesh.crash(Service::Interpreter).await.unwrap();
    let asking = AwaitingApproval { conversation, recorder, approval };
    assert_eq!(asking.result().await, "OutcomeUnknown");
    assert_eq!(read(&mesh.workspace().join("log")), "begun\n");
    assert_eq!(state(&mesh, &asking.approval).await, ApprovalState::Approved);
}
