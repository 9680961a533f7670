//! Scripts that create tasks: concurrent, once each, bounded, across crashes of every service, and
//! canceled with their parent.

use construct_bus::topology::Stream;
use construct_proto::v1::{self, PolicyAction, TaskPhase, TurnOutcome};
use construct_tests::{
    client::{Client, Conversation, TURN_TIMEOUT, id, wait_for_file},
    mesh::{Mesh, Service},
    wait::until,
};
use serde_json::{Value, json};

use crate::read;

/// An agent that answers with its name and the message, after a delay.
fn echo(delay_ms: u64) -> Value {
    json!({"turns": [{"text": "Heard: {{last_user_text}}", "delay_ms": delay_ms}], "count": "since_user"})
}

/// An agent that runs a script and answers with its result.
async fn manager(mesh: &Mesh, code: &[&str]) -> Conversation {
    let script = json!({"turns": [{"text": "I shall have it done.", "code": [code]}, {"text": "Done: {{last_result}}"}]});
    mesh.scripted_agent("boss", &script).await.unwrap();
    begin(mesh).await
}

async fn begin(mesh: &Mesh) -> Conversation {
    let conversation =
        mesh.client().unwrap().create_task("boss", Some(mesh.workspace())).await.unwrap();
    conversation.submit("Go.").await;
    conversation
}

/// The subtasks of a task, oldest first.
async fn list_subtasks(client: &Client, task: &str) -> Result<Vec<v1::Task>, tonic::Status> {
    let filter = v1::list_tasks_request::Filter { parent: task.to_owned(), ..Default::default() };
    let page = v1::PageRequest {
        page_size: 100,
        order_by: "created_at".to_owned(),
        ..v1::PageRequest::default()
    };
    let request = v1::ListTasksRequest { page: Some(page), filter: Some(filter) };
    Ok(client.tasks().list_tasks(request).await?.into_inner().tasks)
}

/// Waits until a task has subtasks that `wanted` accepts.
async fn wait_for_subtasks(
    conversation: &Conversation,
    what: &str,
    wanted: impl Fn(&[v1::TaskStatus]) -> bool,
) -> Vec<Conversation> {
    let found = until(what, TURN_TIMEOUT, async || {
        let tasks = list_subtasks(conversation.client(), conversation.id())
            .await
            .map_err(|status| status.to_string())?;
        let states: Vec<v1::TaskStatus> =
            tasks.iter().filter_map(|task| task.status.clone()).collect();
        if wanted(&states) { Ok(tasks) } else { Err(format!("{states:?}")) }
    })
    .await;
    found
        .iter()
        .map(|task| conversation.client().conversation(&id(task.metadata.as_ref())))
        .collect()
}

fn all_in(count: usize, phase: TaskPhase) -> impl Fn(&[v1::TaskStatus]) -> bool {
    move |states| states.len() == count && states.iter().all(|status| status.phase() == phase)
}

/// Waits until the turn is over and has completed; returns the script's result.
async fn result(conversation: &Conversation) -> String {
    let status = conversation.wait_until_idle().await.status.unwrap();
    let transcript = conversation.transcript().await;
    assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{}", transcript.show());
    let result = transcript.result();
    assert_eq!(result.error, "", "{}", transcript.show());
    result.output.clone()
}

async fn wait_until_nothing_in_flight(mesh: &Mesh) {
    until("the queue of scripts to be empty", TURN_TIMEOUT, async || {
        match mesh.nats.message_count(Stream::Code).await {
            0 => Ok(()),
            messages => Err(format!("{messages} commands")),
        }
    })
    .await;
}

const THREE: [&str; 3] = [
    "const begun = ['one', 'two', 'three'].map(message => tasks.spawn({ message, agent: 'reader', title: message }).task);",
    "const ended = tasks.await(begun);",
    "ended.map((one, n) => `${one.task === begun[n]} ${one.status} ${one.answer} ${one.cost > 0}`).join('\\n')",
];

const EXPECTED_OUTPUT: &str = "true completed Heard: one true\ntrue completed Heard: two true\ntrue completed Heard: three true";

#[tokio::test]
async fn subtasks_run_concurrently_and_answer_in_order() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("reader", &echo(3000)).await.unwrap();
    let conversation = manager(&mesh, &THREE).await;
    let recorder = conversation.record();
    let begun =
        wait_for_subtasks(&conversation, "three at once", all_in(3, TaskPhase::InvokeModel)).await;
    conversation.wait_for_phase(TaskPhase::AwaitSubtasks).await;
    wait_until_nothing_in_flight(&mesh).await;
    let why = conversation.explain().await.unwrap();
    assert!(
        why.waiting_for.contains("subtasks of its script to end")
            && why.waiting_for.contains(begun[2].id()),
        "{why:?}"
    );
    assert!(why.deadline.is_some() && why.next_wake.is_some(), "{why:?}");
    let why = begun[0].explain().await.unwrap();
    assert!(
        why.waiting_for.contains(&format!("it is a subtask of {}", conversation.id())),
        "{why:?}"
    );
    assert_eq!(result(&conversation).await, EXPECTED_OUTPUT);
    let task = conversation.task().await.unwrap().status.unwrap();
    assert_eq!(task.subtasks, begun.iter().map(|child| child.id().to_owned()).collect::<Vec<_>>());
    let child = begun[0].task().await.unwrap();
    let status = child.status.unwrap();
    assert_eq!((status.parent.as_str(), status.depth), (conversation.id(), 1));
    assert_eq!(child.spec.unwrap().title, "one");
    recorder.wait_for_count("subtask.spawned", 3).await;
    let results = recorder.events().iter().filter(|event| event.r#type == "tool.result").count();
    assert_eq!(results, 4, "no call is published twice");
}

#[tokio::test]
async fn script_awaiting_subtasks_survives_crash_of_every_service() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("reader", &echo(4000)).await.unwrap();
    let conversation = manager(&mesh, &THREE).await;
    wait_for_subtasks(&conversation, "three at once", all_in(3, TaskPhase::InvokeModel)).await;
    conversation.wait_for_phase(TaskPhase::AwaitSubtasks).await;
    // The answers come while no reconciler runs; then everything is killed.
    mesh.kill(Service::Reconciler).unwrap();
    until("the answers to wait", TURN_TIMEOUT, async || {
        match mesh.nats.message_count(Stream::Model).await {
            0 => Ok(()),
            messages => Err(format!("{messages} model calls")),
        }
    })
    .await;
    for service in [Service::Interpreter, Service::Gateway, Service::Providers] {
        mesh.kill(service).unwrap();
    }
    mesh.start_services().await.unwrap();
    assert_eq!(result(&conversation).await, EXPECTED_OUTPUT);
    assert_eq!(list_subtasks(conversation.client(), conversation.id()).await.unwrap().len(), 3);
}

#[tokio::test]
async fn script_killed_between_create_and_await_creates_once() {
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("reader", &echo(10)).await.unwrap();
    let code = [
        "const begun = [];",
        "for (let n = 0; n < 8; n++) {",
        "  begun.push(tasks.spawn({ message: `number ${n}`, agent: 'reader' }).task);",
        "  try { execute_command(`echo ${n} >> log; sleep 0.3`) } catch (error) { if (error.name !== 'OutcomeUnknown') throw error }",
        "}",
        "tasks.send(begun[0], 'and more');",
        "tasks.await(begun).map(one => one.answer).join('; ')",
    ];
    let conversation = manager(&mesh, &code).await;
    for line in ["1\n", "4\n"] {
        wait_for_file(&mesh.workspace().join("log"), |text| text.contains(line)).await;
        mesh.crash(Service::Interpreter).await.unwrap();
        mesh.crash(Service::Reconciler).await.unwrap();
    }
    let answers: Vec<String> = (1..8).map(|n| format!("Heard: number {n}")).collect();
    assert_eq!(result(&conversation).await, format!("Heard: and more; {}", answers.join("; ")));
    let begun = list_subtasks(conversation.client(), conversation.id()).await.unwrap();
    assert_eq!(begun.len(), 8);
    let first =
        conversation.client().conversation(&id(begun[0].metadata.as_ref())).transcript().await;
    first.check(&["number 0", "and more"]);
}

#[tokio::test]
async fn cancel_ends_the_tree_and_reports_finished_subtasks() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("slow", &echo(60_000)).await.unwrap();
    let middle = json!({"turns": [{"code": [["tasks.await(tasks.spawn({ message: 'wait', agent: 'slow' }).task).status"]]}, {"text": "{{last_result}}"}]});
    mesh.scripted_agent("middle", &middle).await.unwrap();
    let code = ["tasks.await(tasks.spawn({ message: 'manage', agent: 'middle' }).task).status"];
    let conversation = manager(&mesh, &code).await;
    let middle = wait_for_subtasks(
        &conversation,
        "a subtask that waits",
        all_in(1, TaskPhase::AwaitSubtasks),
    )
    .await
    .remove(0);
    let leaf = wait_for_subtasks(&middle, "one below it", all_in(1, TaskPhase::InvokeModel))
        .await
        .remove(0);
    assert_eq!(leaf.task().await.unwrap().status.unwrap().depth, 2);
    conversation.wait_for_phase(TaskPhase::AwaitSubtasks).await;
    conversation.cancel("enough").await;
    for task in [&conversation, &middle, &leaf] {
        let status = task.wait_until_idle().await.status.unwrap();
        assert_eq!(status.last_outcome(), TurnOutcome::Cancelled, "{}", task.id());
    }
    let error = &conversation.transcript().await.result().error;
    assert!(
        error.contains("canceled while waiting for subtasks") && error.contains("#1 tasks.spawn"),
        "{error}"
    );
    let error = leaf.task().await.unwrap().status.unwrap().last_error.unwrap();
    assert!(error.message.contains("its parent task was cancelled: enough"), "{error:?}");
    // A cancel of a subtask alone is reported to its waiting parent.
    let conversation = begin(&mesh).await;
    let middle = wait_for_subtasks(
        &conversation,
        "a subtask that waits",
        all_in(1, TaskPhase::AwaitSubtasks),
    )
    .await
    .remove(0);
    let leaf = wait_for_subtasks(&middle, "one below it", all_in(1, TaskPhase::InvokeModel))
        .await
        .remove(0);
    leaf.cancel("no need").await;
    assert_eq!(result(&middle).await, "cancelled");
    assert_eq!(result(&conversation).await, "completed");
}

#[tokio::test]
async fn deleted_task_deletes_subtasks_and_parent_sees_deletion() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("slow", &echo(60_000)).await.unwrap();
    let code = ["tasks.await(tasks.spawn({ message: 'wait', agent: 'slow' }).task).status"];
    let conversation = manager(&mesh, &code).await;
    let child = wait_for_subtasks(&conversation, "a subtask", all_in(1, TaskPhase::InvokeModel))
        .await
        .remove(0);
    conversation.wait_for_phase(TaskPhase::AwaitSubtasks).await;
    child.delete().await;
    assert_eq!(result(&conversation).await, "deleted");
    let conversation = begin(&mesh).await;
    let child = wait_for_subtasks(&conversation, "a subtask", all_in(1, TaskPhase::InvokeModel))
        .await
        .remove(0);
    conversation.delete().await;
    until("the subtask to be gone", TURN_TIMEOUT, async || match child.task().await {
        Err(status) if status.code() == tonic::Code::NotFound => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

#[tokio::test]
async fn refusals_are_explained_to_scripts() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("reader", &echo(0)).await.unwrap();
    // Each level creates the next one until it is refused.
    let nest = [
        "let told;",
        "try { told = tasks.await(tasks.spawn('deeper').task).answer } catch (error) { told = `${error.name}: ${error.message}` }",
        "told",
    ];
    let nest = json!({"turns": [{"code": [nest]}, {"text": "[{{last_result}}]"}]});
    mesh.scripted_agent("nest", &nest).await.unwrap();
    let nested = mesh.client().unwrap().create_task("nest", None).await.unwrap();
    nested.submit("Go.").await;
    let told = result(&nested).await;
    assert!(
        told.starts_with("[[[[[TooDeep: tasks.spawn: subtasks can be nested 5 levels deep"),
        "{told}"
    );
    let code = [
        "const told = [];",
        "const attempt = f => { try { told.push(f()) } catch (error) { told.push(`${error.name}: ${error.message}`) } };",
        "attempt(() => tasks.spawn({ message: 'x', agent: 'nobody' }));",
        "attempt(() => tasks.await('task_00000000-0000-0000-0000-000000000001'));",
        "attempt(() => tasks.send('task_00000000-0000-0000-0000-000000000001', 'x'));",
        "attempt(() => tasks.parent('x'));",
        "attempt(() => tasks.hand_off('nobody'));",
        "const begun = [];",
        "for (let n = 0; n < 64; n++) begun.push(tasks.spawn({ message: 'x', agent: 'reader' }).task);",
        "attempt(() => tasks.spawn({ message: 'x', agent: 'reader' }));",
        "attempt(() => tasks.await(begun).filter(one => one.status === 'completed').length);",
        "attempt(() => tasks.list().length);",
        "told.join('\\n')",
    ];
    let conversation = manager(&mesh, &code).await;
    let told = result(&conversation).await;
    let lines: Vec<&str> = told.lines().collect();
    let expected = [
        "AgentNotFound: tasks.spawn: there is no agent \"nobody\"",
        "NotASubtask: tasks.await: task_00000000-0000-0000-0000-000000000001 is no subtask",
        "NotASubtask: tasks.send: ",
        "NoParent: tasks.parent: ",
        "AgentNotFound: tasks.hand_off: there is no agent",
        "TooManySubtasks: tasks.spawn: a task can spawn 64 subtasks",
        "64",
        "64",
    ];
    assert_eq!(lines.len(), expected.len(), "{told}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(expected), "{line}");
    }
}

#[tokio::test]
async fn hand_over_continues_and_subtask_messages_its_parent() {
    let mesh = Mesh::start().await.unwrap();
    let lawyer =
        json!({"turns": [{"text": "unused"}, {"text": "The lawyer says: {{last_result}}"}]});
    let lawyer = mesh.scripted_agent("lawyer", &lawyer).await.unwrap();
    let child = json!({"turns": [{"code": [["tasks.parent('halfway'); 'told'"]]}, {"text": "{{last_result}}"}]});
    mesh.scripted_agent("child", &child).await.unwrap();
    let code = [
        "const [one] = tasks.await([tasks.spawn({ message: 'x', agent: 'child' }).task]);",
        "tasks.hand_off('lawyer', 'mind the contract');",
        "one.answer",
    ];
    let conversation = manager(&mesh, &code).await;
    conversation
        .wait_for_task("both turns to be over", |_, status| {
            status.phase() == TaskPhase::AwaitInput
                && status.queued_count == 0
                && status.message_count >= 6
        })
        .await;
    let transcript = conversation.transcript().await;
    let answers = transcript.answers();
    let first =
        "The lawyer says: told\n[the agent lawyer takes over this conversation: mind the contract]";
    assert_eq!(answers.get(1).map(String::as_str), Some(first), "{}", transcript.show());
    let status = conversation.task().await.unwrap().status.unwrap();
    assert_eq!(status.agent_id, id(lawyer.metadata.as_ref()));
    let shown = transcript.show();
    assert!(shown.contains("[Message of the subtask ") && shown.contains("halfway"), "{shown}");
}

#[tokio::test]
async fn subtask_gets_only_granted_capabilities() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("reader", &echo(0)).await.unwrap();
    let code = [
        "const poor = tasks.spawn({ message: 'x', agent: 'reader', budget: 0.000001 }).task;",
        "const one = tasks.await(poor);",
        "`${one.status}: ${one.error} ${JSON.stringify(one.answer)} ${one.cost}`",
    ];
    let conversation = manager(&mesh, &code).await;
    let told = result(&conversation).await;
    assert!(
        told.starts_with("failed: the budget of the task is exhausted")
            && told.ends_with(" \"\" 0"),
        "{told}"
    );
}

#[tokio::test]
async fn script_awaits_approval_and_subtask_concurrently() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("reader", &echo(2000)).await.unwrap();
    let code = [
        "const begun = tasks.spawn({ message: 'one', agent: 'reader' }).task;",
        "const [one, file] = await Promise.all([",
        "  tools.tasks.await(begun).then(one => { execute_command('echo ended >> log'); return one; }),",
        "  tools.create_file('made', 'x').then(made => made.status),",
        "]);",
        "`${one.answer}, ${file}`",
    ];
    let script = json!({"turns": [{"code": [code]}, {"text": "{{last_result}}"}]});
    mesh.scripted_agent("boss", &script).await.unwrap();
    let policy = vec![v1::PolicyRule {
        action: PolicyAction::Ask.into(),
        tools: vec!["create_file".to_owned()],
        ..v1::PolicyRule::default()
    }];
    let workspace = mesh.workspace().display().to_string();
    let spec =
        v1::TaskSpec { agent: "boss".to_owned(), workspace, policy, ..v1::TaskSpec::default() };
    let conversation = mesh.client().unwrap().create_task_with(spec).await.unwrap();
    conversation.submit("Go.").await;
    conversation.wait_for_phase(TaskPhase::AwaitApproval).await;
    // The wait for the subtask continues while the approval is undecided.
    wait_for_file(&mesh.workspace().join("log"), |text| text == "ended\n").await;
    conversation.wait_for_phase(TaskPhase::AwaitApproval).await;
    let approvals =
        v1::approval_service_client::ApprovalServiceClient::new(mesh.channel().unwrap());
    let pending = approvals
        .clone()
        .list_approvals(v1::ListApprovalsRequest::default())
        .await
        .unwrap()
        .into_inner();
    let decision = v1::DecideApprovalRequest {
        approval: id(pending.approvals[0].metadata.as_ref()),
        decision: v1::decide_approval_request::Decision::Approve.into(),
        ..v1::DecideApprovalRequest::default()
    };
    approvals.clone().decide_approval(decision).await.unwrap();
    assert_eq!(result(&conversation).await, "Heard: one, created");
    assert_eq!(read(&mesh.workspace().join("log")), "ended\n", "nothing is done twice");
}

#[tokio::test]
async fn busy_script_sees_subtask_end_and_suspends_when_only_waiting() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("quick", &echo(1500)).await.unwrap();
    mesh.scripted_agent("slow", &echo(15_000)).await.unwrap();
    let code = [
        "const [quick, slow] = ['quick', 'slow'].map(agent => tasks.spawn({ message: agent, agent }).task);",
        "const timer = new Promise(done => setTimeout(() => done('the timer'), 8000));",
        "const first = await Promise.race([tools.tasks.await(quick).then(one => one.answer), timer]);",
        "create_file('first', first);",
        "const [one] = await Promise.all([tools.tasks.await(slow), timer]);",
        "`${first}, ${one.answer}`",
    ];
    let conversation = manager(&mesh, &code).await;
    wait_for_file(&mesh.workspace().join("first"), |text| text == "Heard: quick").await;
    conversation.wait_for_phase(TaskPhase::AwaitSubtasks).await;
    wait_until_nothing_in_flight(&mesh).await;
    assert_eq!(result(&conversation).await, "Heard: quick, Heard: slow");
}

#[tokio::test]
async fn policy_limits_agents_for_subtasks_and_hand_overs() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("reader", &echo(0)).await.unwrap();
    let lawyer = mesh.scripted_agent("lawyer", &echo(0)).await.unwrap();
    let code = format!(
        "const said = []; \
         const tried = call => {{ try {{ call(); said.push('done') }} catch (error) {{ said.push(error.name) }} }}; \
         tried(() => tasks.spawn({{ message: 'x', agent: 'lawyer' }})); \
         tried(() => tasks.spawn({{ message: 'x', agent: '{}' }})); \
         tried(() => tasks.spawn('x')); \
         tried(() => tasks.hand_off('lawyer')); \
         said.push(tasks.await(tasks.spawn({{ message: 'x', agent: 'reader' }}).task).answer); \
         said.join()",
        id(lawyer.metadata.as_ref())
    );
    let script = json!({"turns": [{"code": [[code]]}, {"text": "{{last_result}}"}]});
    mesh.scripted_agent("boss", &script).await.unwrap();
    let policy = vec![v1::PolicyRule {
        action: PolicyAction::Deny.into(),
        agents: vec!["law*".to_owned(), "boss".to_owned()],
        ..v1::PolicyRule::default()
    }];
    let workspace = mesh.workspace().display().to_string();
    let spec =
        v1::TaskSpec { agent: "boss".to_owned(), workspace, policy, ..v1::TaskSpec::default() };
    let conversation = mesh.client().unwrap().create_task_with(spec).await.unwrap();
    conversation.submit("Go.").await;
    assert_eq!(
        result(&conversation).await,
        "PolicyDenied,AgentNotFound,PolicyDenied,PolicyDenied,Heard: x"
    );
}
