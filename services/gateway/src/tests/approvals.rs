//! Policies, and approvals.

use construct_bus::{ConsumeOptions, TaskMessage};
use construct_domain::{
    ApprovalId, StepId, TaskId,
    approval::{ApprovalCall, ApprovalRequest},
    partition,
    task::{Phase, Stage, Step, StepState, Turn},
};
use construct_proto::v1::{
    self, PolicyAction, approval_service_client::ApprovalServiceClient, event::Payload,
};
use construct_store::{NewApproval, TaskCommit};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use tonic::{Code, transport::Channel};
use uuid::Uuid;

use super::harness::*;
use crate::validate::tests::fields;

fn rule() -> v1::PolicyRule {
    v1::PolicyRule {
        action: PolicyAction::Ask.into(),
        tools: vec!["create_file".into()],
        paths: vec!["secrets/**".into()],
        reason: "it is secret".into(),
        ..v1::PolicyRule::default()
    }
}

fn approvals(gateway: &Gateway) -> ApprovalServiceClient<Channel> {
    ApprovalServiceClient::new(gateway.channel())
}

/// Sends a message and requests approval of one call. Returns the approval's id.
async fn request_approval(gateway: &Gateway, task: &str, hash: &str) -> String {
    let message = id(gateway.send_message(task, "do it").await.metadata);
    request_approval_for(gateway, task, &message, hash).await
}

/// Begins a turn with the first message and requests approval of one call, as the reconciler does.
/// Returns the approval's id.
pub(super) async fn request_approval_for(
    gateway: &Gateway,
    task: &str,
    message: &str,
    hash: &str,
) -> String {
    let id: TaskId = task.parse().expect("an id");
    let loaded = gateway.store().task_load(id).await.expect("read").expect("there");
    let call = ApprovalCall { script: 0, number: 3, hash: hash.to_owned() };
    let mut state = loaded.task.clone();
    let message = message.parse().expect("an id");
    state.last_position = 1;
    state.phase = Phase::AwaitApproval;
    state.turn =
        Some(Turn { calls: 1, ..Turn::new(message, Stage::Code { calls: vec!["a".into()] }) });
    let step = Step {
        id: StepId::from_uuid(Uuid::now_v7()),
        number: 1,
        attempt: 1,
        since: Timestamp::now(),
        round: 0,
        resumed: None,
        state: StepState::Suspended {
            waits: vec![call.clone()],
            awaits: Vec::new(),
            results: Vec::new(),
        },
    };
    let request = ApprovalRequest {
        call,
        tool: "create_file".into(),
        arguments: r#"{"path":"secrets/key"}"#.into(),
        arguments_size: 22,
        reason: "it is secret".into(),
    };
    let approval = ApprovalId::from_uuid(Uuid::now_v7());
    let expires_at = step.approvals_expire_at();
    state.next_wake = Some(expires_at);
    state.step = Some(step.clone());
    let mut commit = TaskCommit::new(&loaded, &state, Timestamp::now());
    commit.admitted = Some((message, 1));
    commit.new_approvals = vec![NewApproval { id: approval, step: step.id, request, expires_at }];
    gateway.store().task_commit(commit).await.expect("committed");
    approval.to_string()
}

#[tokio::test]
async fn policies_are_stored_and_replaced_as_a_whole() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut spec = task_spec();
    spec.policy = vec![rule()];
    let request = v1::CreateTaskRequest { spec: Some(spec), ..Default::default() };
    let task = gateway.tasks().create_task(request).await.expect("it is made").into_inner();
    assert_eq!(task.spec.expect("set").policy, [rule()]);
    let task = task.metadata.expect("set").id;

    let policy = Some(v1::Policy { rules: vec![rule(), rule()] });
    let update = v1::UpdateAgentRequest { agent: "ada".into(), policy, ..Default::default() };
    let agent = gateway.agents().update_agent(update).await.expect("it is changed").into_inner();
    assert_eq!(agent.spec.expect("set").policy.len(), 2);
    let untouched =
        v1::UpdateAgentRequest { agent: "ada".into(), max_turns: Some(3), ..Default::default() };
    let agent = gateway.agents().update_agent(untouched).await.expect("it is changed").into_inner();
    assert_eq!(agent.spec.expect("set").policy.len(), 2);
    let cleared = v1::UpdateTaskRequest {
        task: task.clone(),
        policy: Some(v1::Policy::default()),
        ..Default::default()
    };
    let cleared = gateway.tasks().update_task(cleared).await.expect("it is changed").into_inner();
    assert!(cleared.spec.expect("set").policy.is_empty());
}

#[tokio::test]
async fn invalid_policy_names_each_wrong_field() {
    let gateway = Gateway::start().await.with_agent().await;
    let with = |change: &dyn Fn(&mut v1::PolicyRule)| {
        let mut rule = rule();
        change(&mut rule);
        rule
    };
    for (rule, field) in [
        (with(&|rule| rule.action = 0), "spec.policy[1].action"),
        (with(&|rule| rule.action = 9), "spec.policy[1].action"),
        (with(&|rule| rule.tools = vec!["{a".into()]), "spec.policy[1].tools[0]"),
        (with(&|rule| rule.paths = vec!["ok".into(), "[z-a]".into()]), "spec.policy[1].paths[1]"),
        (with(&|rule| rule.commands = vec![String::new()]), "spec.policy[1].commands[0]"),
        (with(&|rule| rule.hosts = vec!["x".repeat(1025)]), "spec.policy[1].hosts[0]"),
        (with(&|rule| rule.hosts = vec!["x".into(); 101]), "spec.policy[1].hosts"),
        (with(&|rule| rule.methods = vec!["GET POST".into()]), "spec.policy[1].methods[0]"),
        (with(&|rule| rule.agents = vec!["x".repeat(1025)]), "spec.policy[1].agents[0]"),
        (with(&|rule| rule.reason = "x".repeat(1025)), "spec.policy[1].reason"),
    ] {
        let spec = v1::TaskSpec { policy: vec![self::rule(), rule], ..task_spec() };
        let request = v1::CreateTaskRequest { spec: Some(spec), ..Default::default() };
        let status =
            expect_error(gateway.tasks().create_task(request).await, Code::InvalidArgument);
        assert_eq!(fields(&status), [field]);
    }
    let mut many = agent("eve");
    many.spec.as_mut().expect("set").policy = vec![rule(); 101];
    let status = expect_error(gateway.agents().create_agent(many).await, Code::InvalidArgument);
    assert_eq!(fields(&status), ["spec.policy"]);
}

#[tokio::test]
async fn approval_is_decided_once_and_published() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let hash = "ab".repeat(32);
    let id = request_approval(&gateway, &task, &hash).await;
    let mut service = approvals(&gateway);
    let explain = v1::ExplainTaskRequest { task: task.clone() };
    let explanation =
        gateway.tasks().explain_task(explain).await.expect("it is explained").into_inner();
    assert_eq!(
        (explanation.phase(), &explanation.approvals),
        (v1::TaskPhase::AwaitApproval, &vec![id.clone()])
    );

    let pending = v1::list_approvals_request::Filter {
        task: task.clone(),
        state: v1::ApprovalState::Pending.into(),
        ..Default::default()
    };
    let list = v1::ListApprovalsRequest { page: None, filter: Some(pending) };
    let listed =
        service.list_approvals(list.clone()).await.expect("it is listed").into_inner().approvals;
    let tree = |tree: &str| {
        let filter =
            v1::list_approvals_request::Filter { tree: tree.to_owned(), ..Default::default() };
        v1::ListApprovalsRequest { page: None, filter: Some(filter) }
    };
    let in_tree =
        service.list_approvals(tree(&task)).await.expect("it is listed").into_inner().approvals;
    assert_eq!(in_tree, listed);
    let unknown = TaskId::from_uuid(Uuid::now_v7()).to_string();
    assert!(
        service
            .list_approvals(tree(&unknown))
            .await
            .expect("it is listed")
            .into_inner()
            .approvals
            .is_empty()
    );
    assert_eq!(
        fields(&expect_error(service.list_approvals(tree("?")).await, Code::InvalidArgument)),
        ["filter.tree"]
    );
    let get = v1::GetApprovalRequest { approval: id.clone() };
    let found = service.get_approval(get).await.expect("it is there").into_inner();
    assert_eq!(listed, std::slice::from_ref(&found));
    let spec = found.spec.expect("set");
    assert_eq!(
        (spec.tool.as_str(), spec.arguments.as_str()),
        ("create_file", r#"{"path":"secrets/key"}"#)
    );
    assert_eq!(
        (spec.arguments_hash.as_str(), spec.reason.as_str()),
        (hash.as_str(), "it is secret")
    );

    let decide = v1::DecideApprovalRequest {
        approval: id.clone(),
        decision: v1::decide_approval_request::Decision::Approve.into(),
        comment: "go on".into(),
        arguments_hash: "cd".repeat(32),
        idempotency_key: String::new(),
    };
    expect_error(service.decide_approval(decide.clone()).await, Code::Aborted);
    let decide =
        v1::DecideApprovalRequest { arguments_hash: hash, idempotency_key: "k1".into(), ..decide };
    let decided =
        service.decide_approval(decide.clone()).await.expect("it is decided").into_inner();
    let status = decided.status.clone().expect("set");
    assert_eq!((status.state(), status.comment.as_str()), (v1::ApprovalState::Approved, "go on"));
    assert_eq!(status.decided_by, "local");
    let again =
        service.decide_approval(decide.clone()).await.expect("it is the first answer").into_inner();
    assert_eq!(again, decided);
    let late = v1::DecideApprovalRequest { idempotency_key: "k2".into(), ..decide };
    let refusal = expect_error(service.decide_approval(late).await, Code::FailedPrecondition);
    assert!(refusal.message().contains("it was approved by local at "), "{refusal:?}");
    assert!(
        service.list_approvals(list).await.expect("it is listed").into_inner().approvals.is_empty()
    );

    let mut events = gateway.subscribe(&task, "0").await;
    let event = next_events(&mut events, 3).await.pop().expect("three events");
    assert_eq!(event.r#type, "approval.decided");
    assert!(matches!(event.payload, Some(Payload::Approval(approval)) if approval == decided));

    // The decision wakes the reconciler.
    let id: TaskId = task.parse().expect("an id");
    let options = ConsumeOptions::new(8, CancellationToken::new());
    let mut wakes = gateway.nats.bus().await.consume_tasks(partition::for_task(id), options);
    let wake = wait_for("a wake", async {
        loop {
            let delivery = wakes.next().await.expect("the consumer is open");
            let reason = match &delivery.message {
                TaskMessage::Wake(wake) => wake.reason.clone(),
                TaskMessage::Result(_) => String::new(),
            };
            delivery.receipt.ack().await;
            if delivery.task == id && reason.contains("approval") {
                return reason;
            }
        }
    });
    assert_eq!(wake.await, "an approval was decided");
}

#[tokio::test]
async fn invalid_decision_names_each_wrong_field() {
    let gateway = Gateway::start().await;
    let request = v1::DecideApprovalRequest {
        approval: "nonsense".into(),
        comment: "x".repeat(1025),
        arguments_hash: "AB".into(),
        ..Default::default()
    };
    let status =
        expect_error(approvals(&gateway).decide_approval(request).await, Code::InvalidArgument);
    assert_eq!(fields(&status), ["approval", "comment", "arguments_hash", "decision"]);
    let unknown =
        v1::GetApprovalRequest { approval: ApprovalId::from_uuid(Uuid::now_v7()).to_string() };
    expect_error(approvals(&gateway).get_approval(unknown).await, Code::NotFound);
}
