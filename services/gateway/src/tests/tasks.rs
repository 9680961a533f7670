//! Tasks and messages.

use construct_bus::{ConsumeOptions, TaskMessage};
use construct_domain::{MessageId, OrganizationId, TaskId, message::Content, partition};
use construct_proto::v1;
use construct_store::{NewEvent, NewUserMessage, TaskCommit, Write, WriteOutput};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use uuid::Uuid;

use super::harness::*;
use crate::validate::tests::fields;

#[tokio::test]
async fn task_can_be_created_updated_and_deleted() {
    let gateway = Gateway::start().await.with_agent().await;
    gateway.agents().create_agent(agent("eve")).await.expect("it is made");
    let mut tasks = gateway.tasks();
    let task = gateway.task().await;
    let get = || v1::GetTaskRequest { task: task.clone() };
    let found = tasks.get_task(get()).await.expect("it is there").into_inner();
    let status = found.status.expect("set");
    assert_eq!((status.phase(), status.event_sequence), (v1::TaskPhase::AwaitInput, 1));
    assert_eq!(found.spec.expect("set").workspace, "/work");

    let update = v1::UpdateTaskRequest {
        task: task.clone(),
        agent: Some("eve".into()),
        title: Some("Together".into()),
        max_turns: Some(3),
        pinned: Some(v1::PinnedFacts { facts: vec!["It rains.".into()] }),
        ..Default::default()
    };
    let updated = tasks.update_task(update.clone()).await.expect("it is changed").into_inner();
    let spec = updated.spec.expect("set");
    assert_eq!((spec.agent.as_str(), spec.title.as_str(), spec.max_turns), ("eve", "Together", 3));
    assert_eq!(spec.pinned, ["It rains."]);
    let stale =
        v1::UpdateTaskRequest { revision: found.metadata.expect("set").revision, ..update.clone() };
    expect_error(tasks.update_task(stale).await, Code::Aborted);
    let unknown = v1::UpdateTaskRequest { agent: Some("unknown".into()), ..update };
    expect_error(tasks.update_task(unknown).await, Code::NotFound);

    let suspend = v1::SuspendTaskRequest { task: task.clone(), ..Default::default() };
    let suspended = tasks.suspend_task(suspend).await.expect("it is suspended").into_inner();
    assert_eq!(suspended.status.expect("set").desired_phase(), v1::TaskPhase::Suspended);
    let resume = v1::ResumeTaskRequest { task: task.clone(), ..Default::default() };
    let resumed = tasks.resume_task(resume).await.expect("it is resumed").into_inner();
    assert_eq!(resumed.status.expect("set").desired_phase(), v1::TaskPhase::Unspecified);
    let cancel = v1::CancelTaskRequest {
        task: task.clone(),
        reason: "wrong way".into(),
        ..Default::default()
    };
    tasks.cancel_task(cancel).await.expect("it is canceled");
    let explain = v1::ExplainTaskRequest { task: task.clone() };
    let explanation = tasks.explain_task(explain).await.expect("it is explained").into_inner();
    assert!(explanation.waiting_for.contains("wrong way"), "{explanation:?}");

    tasks
        .delete_task(v1::DeleteTaskRequest { task: task.clone(), ..Default::default() })
        .await
        .expect("it is deleted");
    expect_error(tasks.get_task(get()).await, Code::NotFound);
    expect_error(
        gateway.messages().create_message(message(&task, "too late")).await,
        Code::NotFound,
    );
}

#[tokio::test]
async fn tasks_are_filtered_by_agent_phase_and_workspace() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut made = Vec::new();
    for _ in 0..3 {
        made.push(gateway.task().await);
    }
    let list = async |filter: v1::list_tasks_request::Filter, order_by: &str| {
        let page = v1::PageRequest { order_by: order_by.into(), ..Default::default() };
        let request = v1::ListTasksRequest { page: Some(page), filter: Some(filter) };
        let found = gateway.tasks().list_tasks(request).await.expect("a list").into_inner().tasks;
        found.into_iter().map(|task| id(task.metadata)).collect::<Vec<_>>()
    };
    let all = v1::list_tasks_request::Filter {
        agent: "ada".into(),
        workspace: "/work".into(),
        ..Default::default()
    };
    assert_eq!(list(all.clone(), "created_at").await, made);
    made.reverse();
    assert_eq!(list(all.clone(), "").await, made);
    let suspended =
        v1::list_tasks_request::Filter { phase: v1::TaskPhase::Suspended.into(), ..all.clone() };
    assert_eq!(list(suspended, "").await, [""; 0]);
    let later = prost_types::Timestamp { seconds: Timestamp::now().as_second() + 60, nanos: 0 };
    assert_eq!(
        list(v1::list_tasks_request::Filter { created_after: Some(later), ..all }, "").await,
        [""; 0]
    );
}

#[tokio::test]
async fn messages_are_listed_in_order_in_pages() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    for number in 0..5 {
        gateway.send_message(&task, &format!("message {number}")).await;
    }
    let mut page = v1::PageRequest { page_size: 2, ..Default::default() };
    let mut seen = Vec::new();
    loop {
        let request =
            v1::ListMessagesRequest { task: task.clone(), page: Some(page.clone()), filter: None };
        let answer = gateway.messages().list_messages(request).await.expect("a page").into_inner();
        seen.extend(answer.messages.iter().map(|message| text(message).to_owned()));
        page.page_token = answer.page.expect("set").next_page_token;
        if page.page_token.is_empty() {
            break;
        }
    }
    assert_eq!(seen, (0..5).map(|number| format!("message {number}")).collect::<Vec<_>>());
    let unknown = TaskId::from_uuid(Uuid::now_v7()).to_string();
    let request = v1::ListMessagesRequest { task: unknown, ..Default::default() };
    expect_error(gateway.messages().list_messages(request).await, Code::NotFound);
}

#[tokio::test]
async fn only_a_queued_message_can_be_updated_or_deleted() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let first = gateway.send_message(&task, "first").await;
    let second = gateway.send_message(&task, "second").await;
    let message_id = |message: &v1::Message| id(message.metadata.clone());
    let change = |message: &v1::Message, text: &str| v1::UpdateMessageRequest {
        message: message_id(message),
        blocks: super::harness::message("", text).spec.expect("set").blocks,
        ..Default::default()
    };
    let changed = gateway
        .messages()
        .update_message(change(&first, "better"))
        .await
        .expect("it waits")
        .into_inner();
    assert_eq!(text(&changed), "better");
    let delete = |message: &v1::Message| v1::DeleteMessageRequest {
        message: message_id(message),
        ..Default::default()
    };
    gateway.messages().delete_message(delete(&second)).await.expect("it waits");
    expect_error(
        gateway
            .messages()
            .get_message(v1::GetMessageRequest { message: message_id(&second) })
            .await,
        Code::NotFound,
    );

    // The reconciler admits the first message.
    let store = gateway.store();
    let before = store
        .task_load(task.parse().expect("an id"))
        .await
        .expect("it loads")
        .expect("it is there");
    let mut after = before.task.clone();
    after.last_position = 1;
    let mut commit = TaskCommit::new(&before, &after, Timestamp::now());
    commit.admitted = Some((message_id(&first).parse::<MessageId>().expect("an id"), 1));
    store.task_commit(commit).await.expect("it commits");
    expect_error(
        gateway.messages().update_message(change(&first, "too late")).await,
        Code::FailedPrecondition,
    );
    expect_error(gateway.messages().delete_message(delete(&first)).await, Code::FailedPrecondition);
    let found = gateway
        .messages()
        .get_message(v1::GetMessageRequest { message: message_id(&first) })
        .await
        .expect("it is there");
    assert_eq!(found.into_inner().status.expect("set").position, 1);
}

#[tokio::test]
async fn too_many_queued_messages_are_refused() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let id: TaskId = task.parse().expect("an id");
    let write = Write::new(OrganizationId::LOCAL, Timestamp::now());
    for _ in 0..construct_store::QUEUE_LIMIT {
        let new = NewUserMessage {
            id: MessageId::from_uuid(Uuid::now_v7()),
            task: id,
            content: Content::default(),
            interrupts: false,
        };
        let event = NewEvent { kind: "message.created".into(), payload: Vec::new(), step: None };
        let render = |_: &_| WriteOutput { event, response: Vec::new() };
        gateway.store().message_create(&write, new, render).await.expect("there is room");
    }
    let status = expect_error(
        gateway.messages().create_message(message(&task, "one more")).await,
        Code::ResourceExhausted,
    );
    assert!(status.message().contains("1000"), "{status:?}");
}

#[tokio::test]
async fn pages_of_large_messages_are_short_and_complete() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let mut sent = Vec::new();
    for letter in ["a", "b", "c"] {
        sent.push(id(gateway.send_message(&task, &letter.repeat(900 * 1024)).await.metadata));
    }
    let mut request = v1::ListMessagesRequest { task, ..Default::default() };
    let mut pages = Vec::new();
    loop {
        let page =
            gateway.messages().list_messages(request.clone()).await.expect("a page").into_inner();
        pages.push(
            page.messages.into_iter().map(|message| id(message.metadata)).collect::<Vec<_>>(),
        );
        let page_token = page.page.expect("set").next_page_token;
        if page_token.is_empty() {
            break;
        }
        request.page = Some(v1::PageRequest { page_token, ..Default::default() });
    }
    assert_eq!(pages, [&sent[..2], &sent[2..]]);
}

#[tokio::test]
async fn accepted_message_wakes_the_reconciler() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let id: TaskId = task.parse().expect("an id");
    gateway.send_message(&task, "hello").await;
    let bus = gateway.nats.bus().await;
    let mut consumer = bus
        .consume_tasks(partition::for_task(id), ConsumeOptions::new(1, CancellationToken::new()));
    let delivery = wait_for("a wake", consumer.next()).await.expect("it continues");
    let TaskMessage::Wake(wake) = delivery.message else { panic!("a wake") };
    assert_eq!(
        (wake.task_id, wake.organization_id),
        (task.clone(), OrganizationId::LOCAL.to_string())
    );
    let explain = v1::ExplainTaskRequest { task };
    let explanation =
        gateway.tasks().explain_task(explain).await.expect("it is explained").into_inner();
    assert!(explanation.waiting_for.contains("the reconciler"), "{explanation:?}");
    assert!(explanation.next_wake.is_some());
}

#[tokio::test]
async fn oversized_requests_are_refused() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    gateway.send_message(&task, &"x".repeat(1_048_576)).await;
    let status = expect_error(
        gateway.messages().create_message(message(&task, &"x".repeat(1_048_577))).await,
        Code::InvalidArgument,
    );
    assert_eq!(fields(&status), ["spec.blocks"]);
    // Above 4 MiB the request is not even read.
    let large =
        gateway.messages().create_message(message(&task, &"x".repeat(5 * 1024 * 1024))).await;
    let status = expect_error(large, Code::ResourceExhausted);
    assert!(status.message().contains("too large"), "{status:?}");
}
