//! Approvals: requested by a commit, decided once, visible only in their organization.

use std::time::Duration;

use construct_domain::{
    ApprovalId,
    approval::{ApprovalCall, ApprovalRequest, ApprovalState, ClosedApproval},
    policy::{Action, Rule},
    task::{Phase, Stage, Step, StepState, Task, Turn},
};

use super::*;
use crate::{
    ApprovalDecision, ApprovalFilter, CommittedTask, Key, LoadedTask, NewApproval, Order, Page,
    StoredApproval, TaskChanges, TaskCommit,
};

fn approval_request(number: u32, hash: &str) -> ApprovalRequest {
    ApprovalRequest {
        call: ApprovalCall { script: 0, number, hash: hash.to_owned() },
        tool: "create_file".to_owned(),
        arguments: format!(r#"{{"path":"{hash}"}}"#),
        arguments_size: 12,
        reason: "it is secret".to_owned(),
    }
}

fn page() -> Page {
    Page { limit: 10, order: Order::default(), after: None }
}

/// A task whose script waits for approvals.
struct WaitingTask {
    f: Fixture,
    task: TaskId,
    step: StepId,
}

impl WaitingTask {
    async fn new(calls: &[ApprovalRequest]) -> Self {
        let f = Fixture::new().await;
        let task = f.task().await;
        let message = f.message(task, "hello").await.id;
        let step = step_id();
        let waiting = Self { f, task, step };
        let loaded = waiting.load().await;
        let mut state = loaded.task.clone();
        state.last_position = 1;
        state.turn = Some(Turn {
            calls: 1,
            ..Turn::new(message, Stage::Code { calls: vec!["a".to_owned()] })
        });
        let (waits, results) = (calls.iter().map(|asked| asked.call.clone()).collect(), Vec::new());
        let suspended = StepState::Suspended { waits, awaits: Vec::new(), results };
        let step = Step {
            id: step,
            number: 1,
            attempt: 1,
            since: now(),
            round: 0,
            resumed: None,
            state: suspended,
        };
        state.next_wake = Some(step.approvals_expire_at());
        state.step = Some(step);
        state.phase = Phase::AwaitApproval;
        let commit =
            TaskCommit { admitted: Some((message, 1)), ..TaskCommit::new(&loaded, &state, now()) };
        waiting.ask(commit, calls).await.expect("committed");
        waiting
    }

    async fn load(&self) -> LoadedTask {
        self.f.store.task_load(self.task).await.expect("read").expect("there")
    }

    async fn ask(
        &self,
        mut commit: TaskCommit<'_>,
        calls: &[ApprovalRequest],
    ) -> Result<CommittedTask, Error> {
        let expires_at = now() + Duration::from_secs(60);
        let question = |asked: &ApprovalRequest| NewApproval {
            id: ApprovalId::from_uuid(Uuid::now_v7()),
            step: self.step,
            request: asked.clone(),
            expires_at,
        };
        commit.new_approvals = calls.iter().map(question).collect();
        self.f.store.task_commit(commit).await
    }

    async fn all(&self) -> Vec<StoredApproval> {
        self.f.store.approvals_of_step(self.step).await.expect("read")
    }

    async fn decide(
        &self,
        id: ApprovalId,
        approved: bool,
        hash: Option<&str>,
    ) -> Result<WriteOutcome<StoredApproval>, Error> {
        let decision = ApprovalDecision {
            approved,
            decided_by: "ada".to_owned(),
            comment: "as agreed".to_owned(),
            arguments_hash: hash.map(str::to_owned),
        };
        self.f.store.approval_decide(&write(), id, decision, rendered("approval.decided")).await
    }
}

#[tokio::test]
async fn approval_request_is_stored_by_commit_and_loaded_with_task() {
    let waiting = WaitingTask::new(&[approval_request(2, "h2"), approval_request(5, "h5")]).await;
    let all = waiting.all().await;
    assert_eq!(all.iter().map(|approval| approval.call.number).collect::<Vec<_>>(), [2, 5]);
    assert_eq!(
        (all[0].state, all[0].tool.as_str(), all[0].reason.as_str()),
        (ApprovalState::Pending, "create_file", "it is secret")
    );
    let loaded = waiting.load().await;
    assert_eq!(loaded.task.phase, Phase::AwaitApproval);
    let calls: Vec<ApprovalCall> =
        loaded.task.approvals.iter().map(|approval| approval.call.clone()).collect();
    assert_eq!(calls, [approval_request(2, "h2").call, approval_request(5, "h5").call]);
}

#[tokio::test]
async fn approval_decision_is_an_intent_and_invalidates_open_commits() {
    let waiting = WaitingTask::new(&[approval_request(2, "h2")]).await;
    let id = waiting.all().await[0].id;
    let before = waiting.load().await;
    let (entity, event) =
        applied_with_event(waiting.decide(id, true, Some("h2")).await.expect("decided"));
    assert_eq!(
        (entity.state, entity.comment.as_str(), entity.decided_by.as_str()),
        (ApprovalState::Approved, "as agreed", "ada")
    );
    assert!(entity.decided_at.is_some());
    assert_eq!(event.map(|event| event.sequence), Some(before.event_sequence + 1));
    let loaded = waiting.load().await;
    assert!(loaded.has_new_intents());
    assert_eq!(loaded.task.approvals[0].state, ApprovalState::Approved);
    // A concurrent commit may be about to close the approval.
    let state: Task = before.task.clone();
    let late = waiting.f.store.task_commit(TaskCommit::new(&before, &state, now())).await;
    assert!(matches!(late, Err(Error::Conflict)), "{late:?}");
}

#[tokio::test]
async fn closed_approval_refuses_decisions_with_its_outcome() {
    let waiting = WaitingTask::new(&[approval_request(2, "h2"), approval_request(3, "h3")]).await;
    let (first, second) = (waiting.all().await[0].id, waiting.all().await[1].id);
    let other = waiting.decide(first, true, Some("another")).await;
    assert!(matches!(other, Err(Error::Conflict)), "{other:?}");
    waiting.decide(first, false, None).await.expect("decided");
    let again = waiting.decide(first, true, None).await.expect_err("it is over");
    assert!(again.to_string().contains("it was rejected by ada at "), "{again}");
    let events = waiting.load().await.event_sequence;

    let loaded = waiting.load().await;
    let closed =
        |id| ClosedApproval { id, state: ApprovalState::Expired, reason: "too late".to_owned() };
    let commit = TaskCommit {
        closed_approvals: vec![closed(first), closed(second)],
        ..TaskCommit::new(&loaded, &loaded.task, now())
    };
    waiting.f.store.task_commit(commit).await.expect("committed");
    let states: Vec<ApprovalState> =
        waiting.all().await.iter().map(|approval| approval.state).collect();
    assert_eq!(
        states,
        [ApprovalState::Rejected, ApprovalState::Expired],
        "what was decided stays decided"
    );
    let late = waiting.decide(second, true, None).await.expect_err("it is over");
    assert!(late.to_string().contains("expired"), "{late}");
    assert_eq!(waiting.load().await.event_sequence, events, "a refused decision leaves nothing");
}

#[tokio::test]
async fn approval_request_is_replaced_only_by_other_arguments() {
    let waiting = WaitingTask::new(&[approval_request(2, "h2"), approval_request(3, "h3")]).await;
    let before = waiting.all().await;
    for approval in &before {
        waiting.decide(approval.id, true, None).await.expect("decided");
    }
    let loaded = waiting.load().await;
    let commit = TaskCommit::new(&loaded, &loaded.task, now());
    waiting
        .ask(commit, &[approval_request(2, "other"), approval_request(3, "h3")])
        .await
        .expect("committed");
    let after = waiting.all().await;
    assert_eq!((after[0].id, after[0].state), (before[0].id, ApprovalState::Pending));
    assert_eq!(
        (after[0].arguments.as_str(), after[0].comment.as_str()),
        (r#"{"path":"other"}"#, "")
    );
    assert_eq!((after[1].id, after[1].state), (before[1].id, ApprovalState::Approved));
}

#[tokio::test]
async fn approvals_are_listed_by_task_and_state_and_end_with_the_task() {
    let waiting = WaitingTask::new(&[approval_request(2, "h2"), approval_request(3, "h3")]).await;
    let store = &waiting.f.store;
    let id = waiting.all().await[0].id;
    waiting.decide(id, true, None).await.expect("decided");
    let list = async |organization, filter: ApprovalFilter| {
        store.approval_list(organization, &filter, &page()).await.expect("read").len()
    };
    let of = |task, state| ApprovalFilter { task, state, tree: None };
    assert_eq!(list(ORG, of(None, None)).await, 2);
    assert_eq!(list(ORG, of(Some(waiting.task), Some(ApprovalState::Pending))).await, 1);
    assert_eq!(list(ORG, of(Some(waiting.f.task().await), None)).await, 0);
    let by_time = Page { order: Order { key: Key::UpdatedAt, descending: false }, ..page() };
    let listed =
        store.approval_list(ORG, &ApprovalFilter::default(), &by_time).await.expect("read");
    assert_eq!(listed.last().map(|approval| approval.id), Some(id), "it changed last");

    store.task_delete(&write(), waiting.task, rendered("task.deleted")).await.expect("deleted");
    assert_eq!(list(ORG, of(None, None)).await, 0);
    assert!(matches!(store.approval_get(ORG, id).await, Err(Error::NotFound { .. })));
    assert!(matches!(waiting.decide(id, true, None).await, Err(Error::NotFound { .. })));
    store.task_purge(waiting.task, deleted_event, now()).await.expect("purged");
    assert!(waiting.all().await.is_empty());
}

#[tokio::test]
async fn approvals_of_another_organization_are_not_found() {
    let waiting = WaitingTask::new(&[approval_request(2, "h2")]).await;
    let (store, id) = (&waiting.f.store, waiting.all().await[0].id);
    let other = other_organization(store).await;
    assert!(matches!(store.approval_get(other, id).await, Err(Error::NotFound { .. })));
    assert!(
        store
            .approval_list(other, &ApprovalFilter::default(), &page())
            .await
            .expect("read")
            .is_empty()
    );
    let decision = ApprovalDecision {
        approved: true,
        decided_by: String::new(),
        comment: String::new(),
        arguments_hash: None,
    };
    let foreign = Write { organization: other, ..write() };
    let decided = store.approval_decide(&foreign, id, decision, rendered("approval.decided")).await;
    assert!(matches!(decided, Err(Error::NotFound { .. })), "{decided:?}");
}

#[tokio::test]
async fn policies_are_stored_with_agents_and_tasks() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let rule = |action| Rule {
        action,
        tools: vec!["fetch".to_owned()],
        paths: Vec::new(),
        commands: Vec::new(),
        hosts: vec!["example.com".to_owned()],
        methods: Vec::new(),
        agents: Vec::new(),
        reason: "so".to_owned(),
    };
    let (ask, deny) = (vec![rule(Action::Ask)], vec![rule(Action::Deny)]);
    let changes = crate::AgentChanges { policy: Some(ask.clone()), ..Default::default() };
    f.store
        .agent_update(&write(), f.agent, None, changes, rendered("agent.updated"))
        .await
        .expect("changed");
    let changes = TaskChanges { policy: Some(deny.clone()), ..TaskChanges::default() };
    f.store
        .task_update(&write(), task, None, changes, rendered("task.updated"))
        .await
        .expect("changed");
    let loaded = f.store.task_load(task).await.expect("read").expect("there");
    assert_eq!((&loaded.agent_policy, &loaded.policy), (&ask, &deny));
    assert_eq!(f.store.task_get(ORG, task).await.expect("there").policy, deny);
    assert_eq!(f.store.agent_get(ORG, f.agent).await.expect("there").policy, ask);
}
