use construct_proto::v1::{Deleted, Event, ToolCalled, event::Payload};
use futures::StreamExt as _;

use super::{ORGANIZATION, event, task, within};
use crate::{
    Address as _, Bookmark, Bus, Connection, Position, ProgressCount, Replay, Watch,
    subject::Delta, testing::NatsServer,
};

fn watch_task() -> Watch {
    Watch::Task { organization: ORGANIZATION, task: task(1) }
}

fn positions(events: &[Event]) -> Vec<(u64, u64)> {
    events.iter().map(|event| (event.step, event.index)).collect()
}

#[tokio::test]
async fn live_text_and_events_arrive_in_order() {
    let server = NatsServer::start().await;
    let (sender, receiver) = (server.bus().await, server.bus().await);
    let mut live = receiver.subscribe_events(&watch_task()).await.expect("subscribed");
    let mut sent = Vec::new();
    let mut progress = sender.progress();
    for step in 1..=40 {
        for index in 1..=5 {
            let kind = if step % 2 == 1 { "message.delta" } else { "tool.called" };
            let event = event(task(1), kind, step, index);
            progress.send(&event).await.expect("a right event");
            sent.push(event);
        }
        // An event of another task, and the record that ends the step.
        progress.send(&event(task(2), "message.delta", step, 1)).await.expect("a right event");
        let mut record = event(task(1), "message.created", step, 0);
        record.sequence = step;
        progress.send(&record).await.expect("a right event");
        sent.push(record);
    }
    assert_eq!(progress.finish().await, ProgressCount { sent: 40 * 7, lost: 0 });
    let mut received = Vec::new();
    while received.len() < sent.len() {
        received.push(within("the next event", live.next()).await.expect("subscribed"));
    }
    assert_eq!(positions(&received), positions(&sent));
    assert!(received == sent, "the same positions but not the same events");
}

#[tokio::test]
async fn entity_watch_excludes_task_events() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut live = bus
        .subscribe_events(&Watch::Entities { organization: ORGANIZATION })
        .await
        .expect("subscribed");
    bus.publish_event(&event(task(1), "task.created", 0, 0)).await.expect("sent");
    let deleted = Event {
        r#type: "model.deleted".to_owned(),
        organization_id: ORGANIZATION.to_string(),
        payload: Some(Payload::Deleted(Deleted {
            id: "model_00000000-0000-0000-0000-000000000007".to_owned(),
        })),
        ..Default::default()
    };
    bus.publish_event(&deleted).await.expect("sent");
    assert_eq!(within("the event", live.next()).await, Some(deleted));
}

async fn replayed(bus: &Bus, after: Option<Position>, from: Bookmark) -> Replay {
    bus.replay_progress(ORGANIZATION, task(1), after, from).await.expect("readable")
}

#[tokio::test]
async fn replay_is_sorted_unique_and_after_the_position() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    assert_eq!(replayed(&bus, None, Bookmark::default()).await.events, []);
    let mut progress = bus.progress();
    for (kind, step) in
        [("tool.called", 2), ("message.delta", 3), ("message.delta", 1), ("message.delta", 1)]
    {
        for index in 1..=300 {
            progress.send(&event(task(1), kind, step, index)).await.expect("a right event");
        }
    }
    progress.send(&event(task(2), "message.delta", 1, 1)).await.expect("a right event");
    progress.send(&event(task(1), "message.created", 1, 0)).await.expect("a right event");
    assert_eq!(progress.finish().await.lost, 0);

    // The last ones may be on their way.
    let all = within("all of it", async {
        loop {
            let all = replayed(&bus, None, Bookmark::default()).await;
            if all.events.len() >= 900 {
                return all;
            }
        }
    })
    .await;
    let expected: Vec<(u64, u64)> =
        (1..=3).flat_map(|step| (1..=300).map(move |index| (step, index))).collect();
    assert_eq!(positions(&all.events), expected);
    let after = Position { step: 2, index: 299 };
    let rest = replayed(&bus, Some(after), Bookmark::default()).await;
    assert_eq!(positions(&rest.events), expected[599..]);
    assert_eq!(rest.until, all.until, "what is not wanted is read as well");
    // The readers are deleted.
    let stream = bus.inner.jetstream.get_stream("CONSTRUCT_DELTAS").await.expect("it is there");
    assert_eq!(stream.cached_info().state.consumer_count, 0);
}

#[tokio::test]
async fn replay_continues_from_bookmark_until_reconnect() {
    let mut server = NatsServer::start().await;
    let bus = server.bus().await;
    let start = replayed(&bus, None, Bookmark::default()).await.until;
    let kinds =
        [("message.delta", 1), ("tool.called", 2), ("tool.result", 3), ("message.delta", 4)];
    let mut until = start;
    for (kind, index) in kinds {
        bus.publish_event(&event(task(1), kind, 1, index)).await.expect("sent");
        let more = replayed(&bus, None, until).await;
        assert_eq!(positions(&more.events), [(1, index)], "{kind}");
        until = more.until;
    }
    assert_eq!(replayed(&bus, None, until).await.events, []);
    let all = [(1, 1), (1, 2), (1, 3), (1, 4)];
    assert_eq!(positions(&replayed(&bus, None, start).await.events), all, "a bookmark is a value");

    let mut connection = bus.connection();
    server.restart().await;
    let again =
        |state: &Connection| matches!(state, Connection::Up { generation } if *generation > 1);
    within("the connection", connection.wait_for(again)).await.expect("alive");
    assert_eq!(positions(&replayed(&bus, None, until).await.events), all);
}

#[tokio::test]
async fn large_progress_replays_the_newest() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut progress = bus.progress();
    let shown = "x".repeat(8 * 1024);
    for index in 1..=1_000 {
        let called =
            ToolCalled { name: "grep".to_owned(), arguments: shown.clone(), ..Default::default() };
        let called = Event {
            payload: Some(Payload::ToolCalled(called)),
            ..event(task(1), "tool.called", 1, index)
        };
        progress.send(&called).await.expect("a right event");
        progress.send(&event(task(1), "message.delta", 2, index)).await.expect("a right event");
    }
    assert_eq!(progress.finish().await.lost, 0);
    let replay = replayed(&bus, None, Bookmark::default()).await;
    let (calls, text): (Vec<_>, Vec<_>) =
        positions(&replay.events).into_iter().partition(|(step, _)| *step == 1);
    assert_eq!(text.len(), 1_000, "other subjects have room of their own");
    // Each message is a little larger than its text.
    assert!((400..=512).contains(&calls.len()), "{}", calls.len());
    assert!(
        calls.iter().map(|(_, index)| *index).eq(1_001 - calls.len() as u64..=1_000),
        "not the newest: {calls:?}"
    );
    assert!((4_000_000..5_000_000).contains(&replay.bytes), "{}", replay.bytes);
    assert_eq!(
        replayed(&bus, None, replay.until).await.events,
        [],
        "what was left out is not read again"
    );
}

#[tokio::test]
async fn replay_after_progress_end_has_later_events_only() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let kinds = ["message.delta", "tool.called", "tool.result"];
    for step in [1, 2] {
        let end = bus.progress_end().await.expect("known");
        assert_eq!(replayed(&bus, None, end).await.events, []);
        for (kind, index) in kinds.into_iter().zip(1..) {
            bus.publish_event(&event(task(2), kind, step, index)).await.expect("sent");
            bus.publish_event(&event(task(1), kind, step, index)).await.expect("sent");
        }
        assert_eq!(
            positions(&replayed(&bus, None, end).await.events),
            [(step, 1), (step, 2), (step, 3)]
        );
    }
}

#[tokio::test]
async fn progress_while_disconnected_is_dropped_and_counted() {
    let mut server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut progress = bus.progress();
    progress.send(&event(task(1), "message.delta", 1, 1)).await.expect("a right event");
    within("the first event", async {
        while replayed(&bus, None, Bookmark::default()).await.events.is_empty() {}
    })
    .await;
    server.kill();
    let mut connection = bus.connection();
    within("the loss to be noticed", connection.wait_for(|state| *state == Connection::Down))
        .await
        .expect("alive");
    progress.send(&event(task(1), "message.delta", 1, 2)).await.expect("a right event");
    assert!(progress.send(&event(task(1), "Wrong.Type", 1, 2)).await.is_err());
    // The first one had no acknowledgement before the connection broke.
    assert_eq!(progress.finish().await, ProgressCount { sent: 0, lost: 2 });
}

#[tokio::test]
async fn progress_requests_one_ack_per_sixteen_events() {
    let server = NatsServer::start().await;
    let (bus, listener) = (server.bus().await, server.bus().await);
    let subject = Delta { organization: ORGANIZATION, task: task(1) }.subject();
    let mut received = listener.inner.client.subscribe(subject).await.expect("subscribed");
    listener.flush().await.expect("the server knows of it");
    let mut progress = bus.progress();
    for index in 1..=40 {
        progress.send(&event(task(1), "message.delta", 1, index)).await.expect("a right event");
    }
    let mut asking = Vec::new();
    for index in 1..=40 {
        let message = within("an event", received.next()).await.expect("subscribed");
        if message.reply.is_some() {
            asking.push(index);
        }
    }
    assert_eq!(asking, [16, 32]);
    assert_eq!(progress.finish().await, ProgressCount { sent: 40, lost: 0 });
}

#[tokio::test]
async fn acks_lost_with_a_connection_do_not_delay_later_events() {
    let mut server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut progress = bus.progress();
    server.pause();
    for index in 1..=60 {
        progress.send(&event(task(1), "message.delta", 1, index)).await.expect("a right event");
    }
    server.kill();
    server.restart().await;
    let mut connection = bus.connection();
    let up = |state: &Connection| matches!(state, Connection::Up { generation } if *generation > 1);
    within("a new connection", connection.wait_for(up)).await.expect("the bus lives");
    // Until none of the sixty is awaited any more.
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    for index in 61..=460 {
        within("an event to be sent", progress.send(&event(task(1), "message.delta", 1, index)))
            .await
            .expect("a right event");
    }
    assert_eq!(progress.finish().await, ProgressCount { sent: 400, lost: 60 });
}
