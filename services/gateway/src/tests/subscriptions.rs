//! Subscriptions: replay, live events, and reconnects.

use construct_bus::Bus;
use construct_domain::{
    OrganizationId, StepId, TaskId,
    task::{Step, StepState, Task},
};
use construct_proto::v1::{self, event::Payload};
use construct_store::{NewEvent, Store, TaskChanges, TaskCommit, Write, WriteOutput};
use jiff::Timestamp;
use prost::Message as _;
use tonic::Code;
use tonic_types::StatusExt as _;
use uuid::Uuid;

use super::harness::*;
use crate::{convert, validate::tests::fields};

/// Stands in for the reconciler and the workers, as far as clients see them.
struct Mesh {
    store: Store,
    bus: Bus,
    task: TaskId,
}

impl Mesh {
    async fn connect(gateway: &Gateway, task: &str) -> Self {
        Self {
            store: gateway.store(),
            bus: gateway.nats.bus().await,
            task: task.parse().expect("an id"),
        }
    }

    /// Begins a step as the reconciler does, and publishes progress of it as a worker does.
    async fn progress(&self, step: u64, numbers: std::ops::Range<u64>) {
        self.begin_step(step).await;
        for number in numbers {
            let event = v1::Event {
                id: format!("{step}.{number}"),
                r#type: "message.delta".into(),
                organization_id: OrganizationId::LOCAL.to_string(),
                task_id: self.task.to_string(),
                step,
                index: (1 << 32) + number,
                payload: Some(Payload::MessageDelta(v1::MessageDelta {
                    index: number,
                    ..Default::default()
                })),
                ..Default::default()
            };
            self.bus.publish_event(&event).await.expect("it is published");
        }
    }

    /// Commits the beginning of a step as the reconciler does.
    async fn begin_step(&self, number: u64) {
        let before = self.store.task_load(self.task).await.expect("it loads").expect("it is there");
        let now = Timestamp::now();
        let step = Step {
            id: StepId::from_uuid(Uuid::now_v7()),
            number,
            attempt: 1,
            since: now,
            round: 0,
            resumed: None,
            state: StepState::InFlight { deadline: now + std::time::Duration::from_secs(600) },
        };
        let task = Task { steps: number, step: Some(step), ..before.task.clone() };
        self.store.task_commit(TaskCommit::new(&before, &task, now)).await.expect("it commits");
    }

    /// Commits a record as the reconciler does, which may end a step, and publishes it unless the
    /// publication is to be lost.
    async fn record(&self, kind: &str, step: Option<u64>, publish: bool) {
        let before = self.store.task_load(self.task).await.expect("it loads").expect("it is there");
        let payload = v1::Event {
            payload: Some(Payload::PhaseChanged(v1::PhaseChanged {
                reason: kind.into(),
                ..Default::default()
            })),
            ..Default::default()
        };
        let current = before.task.step.clone().filter(|current| Some(current.number) != step);
        let task = Task { step: current, ..before.task.clone() };
        let mut commit = TaskCommit::new(&before, &task, Timestamp::now());
        commit.events =
            vec![NewEvent { kind: kind.into(), payload: payload.encode_to_vec(), step }];
        let committed = self.store.task_commit(commit).await.expect("it commits");
        if publish {
            let event = v1::Event {
                id: construct_domain::id::event_id(
                    self.task.uuid(),
                    committed.first_event_sequence,
                ),
                sequence: committed.first_event_sequence,
                r#type: kind.into(),
                time: Some(convert::time(Timestamp::now())),
                organization_id: OrganizationId::LOCAL.to_string(),
                task_id: self.task.to_string(),
                step: step.unwrap_or_default(),
                ..payload
            };
            self.bus.publish_event(&event).await.expect("it is published");
        }
    }
}

fn positions(events: &[v1::Event]) -> Vec<String> {
    let position = |event: &v1::Event| match event.sequence {
        0 => format!("{}/{}", event.step, event.index & 0xffff_ffff),
        sequence => sequence.to_string(),
    };
    events.iter().map(position).collect()
}

#[tokio::test]
async fn subscription_replays_missed_events_and_then_live_ones() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    gateway.send_message(&task, "one").await;
    let mesh = Mesh::connect(&gateway, &task).await;
    mesh.progress(1, 0..3).await;
    mesh.record("task.phase_changed", Some(1), true).await;
    mesh.progress(2, 0..2).await;

    let mut events = gateway.subscribe(&task, "0").await;
    let replayed = next_events(&mut events, 8).await;
    assert_eq!(positions(&replayed), ["1", "2", "1/0", "1/1", "1/2", "3", "2/0", "2/1"]);
    assert_eq!(replayed[0].r#type, "task.created");
    assert!(
        matches!(&replayed[1].payload, Some(Payload::Message(message)) if text(message) == "one")
    );
    assert!(
        replayed
            .iter()
            .all(|event| event.task_id == task && !event.cursor.is_empty() && !event.id.is_empty())
    );

    mesh.progress(2, 2..4).await;
    mesh.record("task.phase_changed", Some(2), true).await;
    gateway.send_message(&task, "two").await;
    let live = next_events(&mut events, 4).await;
    assert_eq!(positions(&live), ["2/2", "2/3", "4", "5"]);

    // A client that reconnects with any of the cursors sees exactly the events after it.
    let all: Vec<v1::Event> = replayed.into_iter().chain(live).collect();
    for (index, event) in all.iter().enumerate() {
        let mut again = gateway.subscribe(&task, &event.cursor).await;
        let rest = next_events(&mut again, all.len() - index - 1).await;
        assert_eq!(positions(&rest), positions(&all[index + 1..]), "after {}", event.cursor);
        let ids =
            |events: &[v1::Event]| events.iter().map(|event| event.id.clone()).collect::<Vec<_>>();
        assert_eq!(ids(&rest), ids(&all[index + 1..]));
    }
}

#[tokio::test]
async fn subscription_without_cursor_shows_only_new_events() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let mesh = Mesh::connect(&gateway, &task).await;
    mesh.progress(1, 0..3).await;
    let mut events = gateway.subscribe(&task, "").await;
    // What the client does after the answer is new.
    gateway.send_message(&task, "hello").await;
    let first = next_events(&mut events, 1).await;
    assert_eq!(positions(&first), ["2"]);
    mesh.progress(1, 3..5).await;
    loop {
        let next = next_events(&mut events, 1).await;
        if next[0].sequence == 0 {
            assert_eq!(positions(&next), ["1/3"]);
            break;
        }
    }
}

#[tokio::test]
async fn record_whose_publication_was_lost_is_delivered() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let mut events = gateway.subscribe(&task, "0").await;
    assert_eq!(positions(&next_events(&mut events, 1).await), ["1"]);
    let mesh = Mesh::connect(&gateway, &task).await;
    // A record that nothing follows is found by polling the head of the stream.
    mesh.record("task.phase_changed", None, false).await;
    assert_eq!(positions(&next_events(&mut events, 1).await), ["2"]);
    // A record that another follows is read before that one.
    mesh.record("task.phase_changed", None, false).await;
    mesh.record("task.phase_changed", None, true).await;
    assert_eq!(positions(&next_events(&mut events, 2).await), ["3", "4"]);
}

#[tokio::test]
async fn filtered_events_still_advance_the_cursor() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let types = vec!["message.*".to_owned(), "*.deleted".to_owned()];
    let request = v1::SubscribeRequest { task: task.clone(), cursor: "0".into(), types };
    let mut events =
        gateway.events().subscribe(request).await.expect("it is accepted").into_inner();
    gateway.send_message(&task, "one").await;
    gateway
        .tasks()
        .suspend_task(v1::SuspendTaskRequest { task: task.clone(), ..Default::default() })
        .await
        .expect("it is done");
    gateway.send_message(&task, "two").await;
    let seen = next_events(&mut events, 2).await;
    assert_eq!(positions(&seen), ["2", "4"]);
    assert!(seen[1].cursor.starts_with("4."), "{}", seen[1].cursor);
}

#[tokio::test]
async fn stream_of_a_deleted_task_ends_with_task_deleted() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let mut watching = gateway.subscribe(&task, "0").await;
    next_events(&mut watching, 1).await;
    gateway
        .tasks()
        .delete_task(v1::DeleteTaskRequest { task: task.clone(), ..Default::default() })
        .await
        .expect("it is done");
    let last = next_events(&mut watching, 1).await.remove(0);
    assert_eq!(last.r#type, "task.deleted");
    assert!(wait_for("the end", watching.message()).await.expect("no error").is_none());
    // Also for later subscribers, with or without a cursor, and after the task was purged.
    let event = |_| NewEvent { kind: "task.deleted".to_owned(), payload: Vec::new(), step: None };
    let id = task.parse().expect("an id");
    let purged =
        gateway.store().task_purge(id, event, Timestamp::now()).await.expect("it is purged");
    assert_eq!(purged, Some(Vec::new()));
    for (cursor, expected) in [("", 1), ("0", 1), (last.cursor.as_str(), 0)] {
        let mut late = gateway.subscribe(&task, cursor).await;
        for event in next_events(&mut late, expected).await {
            assert_eq!(event.r#type, "task.deleted");
        }
        assert!(
            wait_for("the end", late.message()).await.expect("no error").is_none(),
            "{cursor:?}"
        );
    }
}

#[tokio::test]
async fn subscription_to_missing_task_or_cursor_is_refused() {
    let gateway = Gateway::start().await.with_agent().await;
    let unknown = TaskId::from_uuid(Uuid::now_v7()).to_string();
    let request = |task: &str, cursor: &str| v1::SubscribeRequest {
        task: task.into(),
        cursor: cursor.into(),
        types: Vec::new(),
    };
    expect_error(
        gateway.events().subscribe(request(&unknown, "0")).await.map(|_| ()),
        Code::NotFound,
    );
    let status = expect_error(
        gateway.events().subscribe(request("", "nonsense")).await.map(|_| ()),
        Code::InvalidArgument,
    );
    assert_eq!(fields(&status), ["cursor"]);
    // A cursor of another stream would wait forever.
    let task = gateway.task().await;
    let mut ahead = gateway.subscribe(&task, "99.1.0").await;
    let status = expect_error(wait_for("an answer", ahead.message()).await, Code::InvalidArgument);
    assert_eq!(fields(&status), ["cursor"]);
}

#[tokio::test]
async fn organization_stream_has_events_of_its_entities() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut events = gateway.subscribe("", "0").await;
    let kinds =
        |events: Vec<v1::Event>| events.into_iter().map(|event| event.r#type).collect::<Vec<_>>();
    assert_eq!(
        kinds(next_events(&mut events, 3).await),
        ["provider.created", "model.created", "agent.created"]
    );
    let rename = v1::UpdateAgentRequest {
        agent: "ada".into(),
        name: Some("eve".into()),
        ..Default::default()
    };
    gateway.agents().update_agent(rename).await.expect("it is renamed");
    gateway
        .agents()
        .delete_agent(v1::DeleteAgentRequest { agent: "eve".into(), ..Default::default() })
        .await
        .expect("it is gone");
    let live = next_events(&mut events, 2).await;
    assert!(
        matches!(&live[0].payload, Some(Payload::Agent(agent)) if agent.spec.as_ref().is_some_and(|spec| spec.name == "eve"))
    );
    assert_eq!(kinds(live), ["agent.updated", "agent.deleted"]);
}

#[tokio::test]
async fn slow_subscriber_delays_no_other_and_misses_nothing() {
    const COUNT: u64 = 1500;
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let mut slow = gateway.subscribe(&task, "0").await;
    next_events(&mut slow, 1).await;
    let mut fast = gateway.subscribe(&task, "0").await;
    next_events(&mut fast, 1).await;
    let fast = tokio::spawn(async move { next_events(&mut fast, COUNT as usize).await });
    let store = gateway.store();
    let id: TaskId = task.parse().expect("an id");
    let bus = gateway.nats.bus().await;
    let write = Write::new(OrganizationId::LOCAL, Timestamp::now());
    // Large enough that the connection's flow-control windows don't hold what the slow subscriber
    // doesn't read.
    let filler = "x".repeat(2000);
    for number in 0..COUNT {
        let render = |task: &construct_store::StoredTask| {
            let mut task = convert::task(task);
            task.spec.as_mut().expect("set").workspace = filler.clone();
            let event =
                v1::Event { payload: Some(Payload::Task(Box::new(task))), ..Default::default() };
            WriteOutput {
                event: NewEvent {
                    kind: "task.updated".into(),
                    payload: event.encode_to_vec(),
                    step: None,
                },
                response: Vec::new(),
            }
        };
        let changes =
            TaskChanges { title: Some(format!("title {number}")), ..TaskChanges::default() };
        let written =
            store.task_update(&write, id, None, changes, render).await.expect("it is written");
        let construct_store::WriteOutcome::Applied { event: Some(event), .. } = written else {
            panic!("it is applied")
        };
        bus.publish_event(&crate::events::read(&event).expect("it reads"))
            .await
            .expect("it is published");
    }
    // The fast subscriber gets everything while the slow one reads nothing.
    let fast = fast.await.expect("it sees everything");
    let slow = next_events(&mut slow, COUNT as usize).await;
    for seen in [fast, slow] {
        let seen: Vec<u64> = seen.iter().map(|event| event.sequence).collect();
        assert_eq!(seen, (2..=COUNT + 1).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn stopping_gateway_tells_subscribers_to_reconnect() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let mut events = gateway.subscribe(&task, "0").await;
    next_events(&mut events, 1).await;
    gateway.context.lifecycle().stop("the test wants it");
    let status = expect_error(wait_for("the end", events.message()).await, Code::Unavailable);
    assert!(status.get_error_details().retry_info().is_some());
}
