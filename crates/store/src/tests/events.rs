//! Streams without a gap.

use futures::future::join_all;

use super::*;
use crate::Stream;

#[tokio::test]
async fn event_sequences_are_gapless_under_concurrent_writers() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let writers = (0..50).map(|n| {
        let store = f.store.clone();
        let model = f.model;
        async move {
            let new =
                NewUserMessage { id: message_id(), task, content: text("x"), interrupts: false };
            let on_task = applied_with_event(
                store
                    .message_create(&write(), new, rendered("message.created"))
                    .await
                    .expect("accepted"),
            )
            .1;
            let agent = new_agent(model, &format!("agent{n}"));
            let on_organization = applied_with_event(
                store
                    .agent_create(&write(), agent, rendered("agent.created"))
                    .await
                    .expect("created"),
            )
            .1;
            (on_task.expect("there is an event"), on_organization.expect("there is an event"))
        }
    });
    let written = join_all(writers).await;
    for (stream, first, mut expected) in [
        (
            Stream::task(ORG, task),
            1,
            written.iter().map(|(event, _)| event.clone()).collect::<Vec<_>>(),
        ),
        (
            Stream::organization(ORG),
            3,
            written.iter().map(|(_, event)| event.clone()).collect::<Vec<_>>(),
        ),
    ] {
        expected.sort_by_key(|event| event.sequence);
        let stored = f.store.events_after(stream, first, 1000, u64::MAX).await.expect("read");
        assert_eq!(stored, expected, "what a write returned is what is stored");
        let sequences: Vec<u64> = stored.iter().map(|event| event.sequence).collect();
        assert_eq!(sequences, (first + 1..=first + 50).collect::<Vec<_>>());
        assert_eq!(f.store.event_head(stream).await.expect("read"), first + 50);
    }
}

#[tokio::test]
async fn event_heads_keep_the_requested_order() {
    let f = Fixture::new().await;
    let (a, b) = (f.task().await, f.task().await);
    f.message(b, "x").await;
    let none = Stream::task(ORG, TaskId::from_uuid(Uuid::now_v7()));
    let streams = [Stream::task(ORG, b), none, Stream::task(ORG, a), Stream::organization(ORG)];
    let heads = f.store.event_heads(&streams).await.expect("read");
    assert_eq!(heads, streams.into_iter().zip([2, 0, 1, 3]).collect::<Vec<_>>());
}

#[tokio::test]
async fn events_after_respects_its_limit() {
    let f = Fixture::new().await;
    let task = f.task().await;
    for _ in 0..5 {
        f.message(task, "x").await;
    }
    let part = f.store.events_after(Stream::task(ORG, task), 2, 3, u64::MAX).await.expect("read");
    assert_eq!(part.iter().map(|event| event.sequence).collect::<Vec<_>>(), [3, 4, 5]);
}

#[tokio::test]
async fn page_of_events_ends_with_the_one_that_reaches_its_bytes() {
    let f = Fixture::new().await;
    let task = f.task().await;
    for _ in 0..6 {
        f.message(task, "x").await;
    }
    let page = async |after, bytes| {
        let events =
            f.store.events_after(Stream::task(ORG, task), after, 100, bytes).await.expect("read");
        events.iter().map(|event| event.sequence).collect::<Vec<_>>()
    };
    let all = f.store.events_after(Stream::task(ORG, task), 0, 100, u64::MAX).await.expect("read");
    let size =
        |count: usize| all[..count].iter().map(|event| event.payload.len() as u64).sum::<u64>();
    assert!(all.iter().all(|event| !event.payload.is_empty()));
    assert_eq!(page(0, size(3)).await, [1, 2, 3]);
    assert_eq!(page(0, size(3) + 1).await, [1, 2, 3, 4]);
    assert_eq!(page(4, 1).await, [5], "one event is never left out");
}
