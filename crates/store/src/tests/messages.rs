//! The message queue of a task.

use construct_domain::{
    FileId,
    message::{AttachedFile, Attachment, Block, Content, Source},
};
use futures::future::join_all;

use super::*;
use crate::{MessageFilter, MessagePage, QUEUE_LIMIT, TaskCommit};

#[tokio::test]
async fn concurrent_messages_have_one_order() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let mut messages = join_all((0..50).map(|n: u32| {
        let store = f.store.clone();
        async move {
            let new = NewUserMessage {
                id: message_id(),
                task,
                content: text(&n.to_string()),
                interrupts: false,
            };
            applied_with_event(
                store
                    .message_create(&write(), new, rendered("message.created"))
                    .await
                    .expect("accepted"),
            )
        }
    }))
    .await;
    messages.sort_by_key(|(message, _)| message.arrival);
    let arrivals: Vec<i64> = messages.iter().map(|(message, _)| message.arrival).collect();
    assert_eq!(arrivals, (1..=50).collect::<Vec<_>>());
    assert!(
        messages.is_sorted_by_key(|(_, event)| event.as_ref().map(|event| event.sequence)),
        "events tell the same order"
    );
    let page = MessagePage { limit: 100, descending: false, after: None };
    let listed =
        f.store.message_list(ORG, task, &MessageFilter::default(), &page).await.expect("listed");
    assert_eq!(listed, messages.into_iter().map(|(message, _)| message).collect::<Vec<_>>());
    assert_eq!(f.store.task_get(ORG, task).await.expect("got").queued_count, 50);
}

#[tokio::test]
async fn message_queue_is_bounded() {
    let f = Fixture::new().await;
    let task = f.task().await;
    sqlx::query(
        "WITH t AS (UPDATE tasks SET intents = intents + $2, intent_at = created_at WHERE id = $1)
         INSERT INTO messages (id, organization_id, task_id, arrival, source, content, created_at, updated_at)
         SELECT gen_random_uuid(), $3, $1, n, 'user', '{\"blocks\": []}', '2026-01-01Z', '2026-01-01Z' FROM generate_series(1, $2) n",
    )
    .bind(task.uuid())
    .bind(i64::from(QUEUE_LIMIT) - 1)
    .bind(ORG.uuid())
    .execute(&f.store.pool)
    .await
    .expect("filled");
    f.message(task, "the last one").await;
    let new =
        NewUserMessage { id: message_id(), task, content: text("too much"), interrupts: false };
    let refused = f
        .store
        .message_create(&write_with_key("k", 1), new.clone(), rendered("message.created"))
        .await;
    assert!(matches!(refused, Err(Error::QueueFull { limit: QUEUE_LIMIT })), "{refused:?}");
    let loaded = f.store.task_load(task).await.expect("read").expect("there");
    let message = loaded.queued.expect("one waits").message;
    let mut state = loaded.task.clone();
    state.last_position += 1;
    let commit =
        TaskCommit { admitted: Some((message, 1)), ..TaskCommit::new(&loaded, &state, now()) };
    f.store.task_commit(commit).await.expect("committed");
    applied(
        f.store
            .message_create(&write_with_key("k", 1), new, rendered("message.created"))
            .await
            .expect("there is room again"),
    );
}

#[tokio::test]
async fn only_queued_messages_can_be_updated_or_deleted() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let (a, b) = (f.message(task, "a").await, f.message(task, "b").await);
    let changed = f
        .store
        .message_update(&write(), b.id, Some(1), text("B"), rendered("message.updated"))
        .await;
    let changed = applied(changed.expect("changed"));
    assert_eq!((changed.revision, &changed.content), (2, &text("B")));
    assert_eq!(f.store.message_get(ORG, b.id).await.expect("got"), changed);
    let old = f
        .store
        .message_update(&write(), b.id, Some(1), text("C"), rendered("message.updated"))
        .await;
    assert!(matches!(old, Err(Error::Conflict)), "{old:?}");
    let loaded = f.store.task_load(task).await.expect("read").expect("there");
    let mut state = loaded.task.clone();
    state.last_position += 1;
    let commit =
        TaskCommit { admitted: Some((a.id, 1)), ..TaskCommit::new(&loaded, &state, now()) };
    f.store.task_commit(commit).await.expect("committed");
    let late =
        f.store.message_update(&write(), a.id, None, text("A"), rendered("message.updated")).await;
    assert!(matches!(late, Err(Error::NotQueued)), "{late:?}");
    let late = f.store.message_delete(&write(), a.id, rendered("message.deleted")).await;
    assert!(matches!(late, Err(Error::NotQueued)), "{late:?}");
    applied(
        f.store
            .message_delete(&write(), b.id, rendered("message.deleted"))
            .await
            .expect("taken back"),
    );
    assert_not_found(f.store.message_get(ORG, b.id).await);
    assert_eq!(
        f.store.task_get(ORG, task).await.expect("got").event_sequence,
        5,
        "what was refused left no event"
    );
}

#[tokio::test]
async fn message_pages_list_transcript_then_queue() {
    let f = Fixture::new().await;
    let task = f.task().await;
    for n in 0..6 {
        f.message(task, &n.to_string()).await;
    }
    for position in 1..=3 {
        let loaded = f.store.task_load(task).await.expect("read").expect("there");
        let mut state = loaded.task.clone();
        state.last_position = position;
        let admitted = loaded.queued.map(|queued| (queued.message, position));
        f.store
            .task_commit(TaskCommit { admitted, ..TaskCommit::new(&loaded, &state, now()) })
            .await
            .expect("committed");
    }
    for descending in [false, true] {
        let mut page = MessagePage { limit: 2, descending, after: None };
        let mut seen = Vec::new();
        loop {
            let part = f
                .store
                .message_list(ORG, task, &MessageFilter::default(), &page)
                .await
                .expect("listed");
            let Some(last) = part.last() else { break };
            page.after = Some(last.cursor());
            seen.extend(part.into_iter().map(|message| message.position));
        }
        let mut expected = vec![Some(1), Some(2), Some(3), None, None, None];
        if descending {
            expected.reverse();
        }
        assert_eq!(seen, expected);
    }
    let page = MessagePage { limit: 10, descending: false, after: None };
    let filter = MessageFilter { source: Some(Source::User), after_position: 2, superseded: false };
    assert_eq!(f.store.message_list(ORG, task, &filter, &page).await.expect("listed").len(), 4);
    let filter =
        MessageFilter { source: Some(Source::Assistant), after_position: 0, superseded: false };
    assert!(f.store.message_list(ORG, task, &filter, &page).await.expect("listed").is_empty());
    assert_not_found(
        f.store.message_list(ORG, TaskId::from_uuid(Uuid::now_v7()), &filter, &page).await,
    );
}

#[tokio::test]
async fn task_files_are_those_of_the_transcript_newest_first() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let file = |n: u64| {
        let id = FileId::from_uuid(Uuid::from_u128(n.into()));
        let file = Some(AttachedFile { id, sha256: "0f".repeat(32), size: n });
        Block::Attachment(Attachment {
            media_type: "text/csv".into(),
            file,
            ..Attachment::default()
        })
    };
    let own =
        Attachment { media_type: "image/png".into(), data: "AA==".into(), ..Attachment::default() };
    let first = vec![Block::Text("file".into()), file(1), file(2)];
    for blocks in [first, vec![Block::Attachment(own), file(3)], vec![file(4)]] {
        let new = NewUserMessage {
            id: message_id(),
            task,
            content: Content { blocks },
            interrupts: false,
        };
        applied(
            f.store
                .message_create(&write(), new, rendered("message.created"))
                .await
                .expect("accepted"),
        );
    }
    // The last message is queued, and not part of the transcript.
    for position in 1..=2 {
        let loaded = f.store.task_load(task).await.expect("read").expect("there");
        let mut state = loaded.task.clone();
        state.last_position = position;
        let admitted = loaded.queued.map(|queued| (queued.message, position));
        let commit = TaskCommit { admitted, ..TaskCommit::new(&loaded, &state, now()) };
        f.store.task_commit(commit).await.expect("committed");
    }
    let sizes = async |most| -> Vec<u64> {
        let files = f.store.task_files(task, most).await.expect("read");
        files.into_iter().map(|attachment| attachment.file.expect("a file").size).collect()
    };
    assert_eq!(sizes(10).await, [3, 2, 1]);
    assert_eq!(sizes(2).await, [3, 2]);
    sqlx::query(
        "UPDATE messages SET superseded_at = created_at WHERE task_id = $1 AND position = 2",
    )
    .bind(task.uuid())
    .execute(&f.store.pool)
    .await
    .expect("put aside");
    assert_eq!(sizes(10).await, [2, 1]);
}
