//! The reconciler's commit: guarded, atomic, and never in conflict with intents.

use construct_domain::{
    message::Source,
    task::{Phase, Stage, Step, StepState, Task, Turn, TurnOutcome},
};
use futures::future::join_all;

use super::*;
use crate::{
    AppendedMessage, CommittedTask, EndedMessage, LoadedTask, Purpose, StepUsage, Stream,
    TaskChanges, TaskCommit,
};

pub(super) async fn load(f: &Fixture, task: TaskId) -> LoadedTask {
    f.store.task_load(task).await.expect("read").expect("there")
}

/// The state after the queued message was admitted.
pub(super) fn admitting(loaded: &LoadedTask) -> (Task, Option<(MessageId, i64)>) {
    let mut task = loaded.task.clone();
    let message = loaded.queued.expect("a message waits").message;
    task.last_position += 1;
    task.steps += 1;
    task.phase = Phase::InvokeModel;
    task.turn = Some(Turn { calls: 1, ..Turn::new(message, Stage::Model) });
    let deadline = now() + std::time::Duration::from_secs(60);
    task.step = Some(Step {
        id: step_id(),
        number: task.steps,
        attempt: 1,
        since: now(),
        round: 0,
        resumed: None,
        state: StepState::InFlight { deadline },
    });
    task.next_wake = Some(deadline);
    let position = task.last_position;
    (task, Some((message, position)))
}

pub(super) async fn admit(f: &Fixture, task: TaskId) -> CommittedTask {
    let loaded = load(f, task).await;
    let (state, admitted) = admitting(&loaded);
    f.store
        .task_commit(TaskCommit { admitted, ..TaskCommit::new(&loaded, &state, now()) })
        .await
        .expect("committed")
}

#[tokio::test]
async fn committed_task_is_loaded_unchanged() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let message = f.message(task, "hello").await;
    let loaded = load(&f, task).await;
    assert_eq!(loaded.queued.map(|queued| queued.message), Some(message.id));
    assert!(loaded.has_new_intents());
    let (state, admitted) = admitting(&loaded);
    let committed = f
        .store
        .task_commit(TaskCommit {
            admitted,
            trace_id: Some("t1".into()),
            events: vec![event("task.phase_changed")],
            ..TaskCommit::new(&loaded, &state, now())
        })
        .await
        .expect("committed");
    assert_eq!((committed.first_event_sequence, committed.has_new_intents), (3, false));
    let again = load(&f, task).await;
    // The database counts the length of the conversation; the decision does not contain it.
    let (admitted, counted) = (loaded.task.context.queued, &again.task.context);
    assert_eq!(
        (counted.transcript, counted.queued),
        (loaded.task.context.transcript + admitted, 0)
    );
    assert!(admitted > 0);
    assert_eq!(again.task, Task { context: counted.clone(), ..state });
    assert_eq!(
        (again.queued, again.version, again.has_new_intents()),
        (None, committed.version, false)
    );

    let mut state = again.task.clone();
    let step = state.step.take().expect("a step runs").id;
    state.turn = None;
    state.phase = Phase::AwaitInput;
    state.next_wake = None;
    state.last_position += 1;
    state.last_outcome = Some(TurnOutcome::Completed);
    let answer = AppendedMessage {
        id: message_id(),
        position: state.last_position,
        source: Source::Assistant,
        content: text("hi"),
        agent: Some(f.agent),
        usage: usage(5),
        step: Some(step),
    };
    let committed = f
        .store
        .task_commit(TaskCommit {
            appended: vec![answer],
            ended_message: Some(EndedMessage { message: message.id, error: None }),
            usage: vec![StepUsage {
                call: Uuid::now_v7(),
                step,
                model: f.model,
                purpose: Purpose::Turn,
                usage: usage(5),
            }],
            tool_uses: [("grep".to_owned(), 2)].into(),
            title: Some("A title".into()),
            events: vec![
                event("message.created"),
                NewEvent { step: Some(1), ..event("turn.completed") },
            ],
            ..TaskCommit::new(&again, &state, now())
        })
        .await
        .expect("committed");
    assert_eq!(committed.first_event_sequence, 4);
    let transcript = f.store.transcript(task, i64::MAX, None).await.expect("read");
    assert_eq!(
        transcript.iter().map(|m| (m.position, m.source)).collect::<Vec<_>>(),
        [(Some(1), Source::User), (Some(2), Source::Assistant)]
    );
    assert!(transcript[0].processed_at.is_some());
    assert_eq!(
        (transcript[1].usage, transcript[1].agent, transcript[1].step),
        (usage(5), Some(f.agent), Some(step))
    );
    let stored = f.store.task_get(ORG, task).await.expect("got");
    assert_eq!(
        (stored.usage, stored.title.as_str(), stored.event_sequence),
        (usage(5), "A title", 5)
    );
    assert_eq!(
        (stored.tool_uses["grep"], stored.queued_count, stored.trace_id.as_deref()),
        (2, 0, Some("t1"))
    );
    assert!(stored.state.titled);
    let events =
        f.store.events_after(Stream::task(ORG, task), 0, 100, u64::MAX).await.expect("read");
    assert_eq!(events.iter().map(|e| e.sequence).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    assert_eq!((events[4].kind.as_str(), events[4].step), ("turn.completed", Some(1)));
}

#[tokio::test]
async fn racing_commits_have_exactly_one_winner() {
    let f = Fixture::new().await;
    let task = f.task().await;
    for round in 0..20 {
        f.message(task, "hello").await;
        let loaded = load(&f, task).await;
        let commits = (0..4).map(|_| {
            let (state, admitted) = admitting(&loaded);
            let (store, loaded) = (f.store.clone(), loaded.clone());
            async move {
                store
                    .task_commit(TaskCommit {
                        admitted,
                        events: vec![event("x")],
                        ..TaskCommit::new(&loaded, &state, now())
                    })
                    .await
            }
        });
        let results = join_all(commits).await;
        assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 1, "{results:?}");
        assert_eq!(
            results.iter().filter(|r| matches!(r, Err(Error::Conflict))).count(),
            3,
            "{results:?}"
        );
        let transcript = f.store.transcript(task, i64::MAX, None).await.expect("read");
        assert_eq!(transcript.len(), round + 1);
    }
    assert_eq!(f.store.event_head(Stream::task(ORG, task)).await.expect("read"), 41);
}

#[tokio::test]
async fn intent_survives_a_concurrent_commit() {
    let f = Fixture::new().await;
    let task = f.task().await;
    f.message(task, "hello").await;
    let loaded = load(&f, task).await;
    let agent = applied(
        f.store
            .agent_create(&write(), new_agent(f.model, "b"), rendered("agent.created"))
            .await
            .expect("created"),
    )
    .id;
    // Between load and commit: every kind of intent.
    let late = f.message(task, "again").await;
    applied(
        f.store.task_suspend(&write(), task, rendered("task.updated")).await.expect("suspended"),
    );
    applied(
        f.store
            .task_cancel(&write(), task, "enough", rendered("task.updated"))
            .await
            .expect("cancelled"),
    );
    let changes = TaskChanges {
        agent: Some(agent),
        title: Some("mine".into()),
        max_turns_override: Some(3),
        ..TaskChanges::default()
    };
    applied(
        f.store
            .task_update(&write(), task, None, changes, rendered("task.updated"))
            .await
            .expect("changed"),
    );
    let (state, admitted) = admitting(&loaded);
    let committed = f
        .store
        .task_commit(TaskCommit {
            admitted,
            title: Some("made".into()),
            ..TaskCommit::new(&loaded, &state, now())
        })
        .await
        .expect("intents do not disturb a commit");
    assert!(committed.has_new_intents);
    let after = load(&f, task).await;
    assert!(after.has_new_intents());
    assert!(after.task.suspend);
    assert_eq!(after.task.cancel.as_deref(), Some("enough"));
    assert_eq!((after.task.agent, after.task.max_turns, after.title.as_str()), (agent, 3, "mine"));
    assert_eq!(
        (after.queued.map(|queued| queued.message), after.task.phase),
        (Some(late.id), Phase::InvokeModel)
    );
}

#[tokio::test]
async fn concurrent_commits_and_messages_lose_nothing() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let total = 60;
    let sending = join_all((0..total).map(|n| {
        let store = f.store.clone();
        async move {
            let new = NewUserMessage {
                id: message_id(),
                task,
                content: text(&n.to_string()),
                interrupts: false,
            };
            applied(
                store
                    .message_create(&write(), new, rendered("message.created"))
                    .await
                    .expect("accepted"),
            );
        }
    }));
    let committing = async {
        let mut admitted_count = 0;
        let deadline = now() + std::time::Duration::from_secs(30);
        while admitted_count < total {
            assert!(now() < deadline, "only {admitted_count} messages were admitted");
            let loaded = load(&f, task).await;
            if loaded.queued.is_none() {
                tokio::task::yield_now().await;
                continue;
            }
            let (state, admitted) = admitting(&loaded);
            f.store
                .task_commit(TaskCommit {
                    admitted,
                    events: vec![event("x"), event("y")],
                    ..TaskCommit::new(&loaded, &state, now())
                })
                .await
                .expect("nobody else commits");
            admitted_count += 1;
        }
    };
    futures::join!(sending, committing);
    let transcript = f.store.transcript(task, i64::MAX, None).await.expect("read");
    assert_eq!(
        transcript.iter().filter_map(|m| m.position).collect::<Vec<_>>(),
        (1..=total as i64).collect::<Vec<_>>()
    );
    assert!(
        transcript.is_sorted_by_key(|m| m.arrival),
        "they were admitted in the order of their arrival"
    );
    let events =
        f.store.events_after(Stream::task(ORG, task), 0, 1000, u64::MAX).await.expect("read");
    assert_eq!(
        events.iter().map(|e| e.sequence).collect::<Vec<_>>(),
        (1..=1 + 3 * total as u64).collect::<Vec<_>>()
    );
    assert!(!load(&f, task).await.has_new_intents());
}

#[tokio::test]
async fn commit_conflicts_when_its_message_was_deleted() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let message = f.message(task, "hello").await;
    let loaded = load(&f, task).await;
    let (state, admitted) = admitting(&loaded);
    applied(
        f.store
            .message_delete(&write(), message.id, rendered("message.deleted"))
            .await
            .expect("taken back"),
    );
    let result = f
        .store
        .task_commit(TaskCommit { admitted, ..TaskCommit::new(&loaded, &state, now()) })
        .await;
    assert!(matches!(result, Err(Error::Conflict)), "{result:?}");
    assert_eq!(load(&f, task).await.queued, None);
}

#[tokio::test]
async fn edit_of_a_queued_message_survives_its_admission() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let message = f.message(task, "hello").await;
    let loaded = load(&f, task).await;
    let (state, admitted) = admitting(&loaded);
    let commit =
        f.store.task_commit(TaskCommit { admitted, ..TaskCommit::new(&loaded, &state, now()) });
    let update_write = write();
    let update = f.store.message_update(
        &update_write,
        message.id,
        None,
        text("changed"),
        rendered("message.updated"),
    );
    let (commit, update) = futures::join!(commit, update);
    match commit {
        // The update ran during the commit, which is retried then, like every commit that loses a
        // race.
        Err(Error::Conflict) => {
            let loaded = load(&f, task).await;
            let (state, admitted) = admitting(&loaded);
            let commit = TaskCommit { admitted, ..TaskCommit::new(&loaded, &state, now()) };
            f.store.task_commit(commit).await.expect("committed");
        }
        commit => drop(commit.expect("committed")),
    }
    let expected = match update {
        Ok(_) => text("changed"),
        Err(Error::NotQueued) => text("hello"),
        Err(error) => panic!("{error:?}"),
    };
    let transcript = f.store.transcript(task, i64::MAX, None).await.expect("read");
    assert_eq!((transcript.len(), &transcript[0].content), (1, &expected));
}

#[tokio::test]
async fn cancel_drops_only_messages_queued_before_it() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let before = f.message(task, "before").await;
    applied(
        f.store
            .task_cancel(&write(), task, "enough", rendered("task.updated"))
            .await
            .expect("cancelled"),
    );
    let after = f.message(task, "after").await;
    let loaded = load(&f, task).await;
    assert!(loaded.is_dropped_by_cancel(&before) && !loaded.is_dropped_by_cancel(&after));
    let mut state = loaded.task.clone();
    state.cancel = None;
    let time = now();
    let committed = f
        .store
        .task_commit(TaskCommit {
            drop_queued: Some("cancelled: enough".to_owned()),
            ..TaskCommit::new(&loaded, &state, time)
        })
        .await
        .expect("committed");
    assert_eq!(
        committed.next_wake,
        Some(time),
        "the message that came later asks for another look"
    );
    let loaded = load(&f, task).await;
    assert_eq!(
        (loaded.task.cancel.as_deref(), loaded.queued.map(|queued| queued.message)),
        (None, Some(after.id))
    );
    let dropped = f.store.message_get(ORG, before.id).await.expect("got");
    assert_eq!(
        (dropped.position, dropped.error.as_deref(), dropped.processed_at),
        (None, Some("cancelled: enough"), Some(time))
    );
}

#[tokio::test]
async fn second_cancel_survives_the_commit_of_the_first() {
    let f = Fixture::new().await;
    let task = f.task().await;
    applied(
        f.store
            .task_cancel(&write(), task, "first", rendered("task.updated"))
            .await
            .expect("cancelled"),
    );
    let loaded = load(&f, task).await;
    applied(
        f.store
            .task_cancel(&write(), task, "second", rendered("task.updated"))
            .await
            .expect("cancelled"),
    );
    let state = Task { cancel: None, ..loaded.task.clone() };
    f.store
        .task_commit(TaskCommit {
            drop_queued: Some("cancelled: enough".to_owned()),
            ..TaskCommit::new(&loaded, &state, now())
        })
        .await
        .expect("committed");
    assert_eq!(load(&f, task).await.task.cancel.as_deref(), Some("second"));
}

#[tokio::test]
async fn duplicate_step_results_are_booked_once() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let entry = StepUsage {
        call: Uuid::now_v7(),
        step: step_id(),
        model: f.model,
        purpose: Purpose::Turn,
        usage: usage(7),
    };
    let recorded = join_all(
        (0..8).map(|_| f.store.step_usage_record(ORG, task, Some(f.agent), &entry, now())),
    )
    .await;
    assert_eq!(recorded.iter().filter(|r| matches!(r, Ok(true))).count(), 1, "{recorded:?}");
    assert_eq!(f.store.task_get(ORG, task).await.expect("got").usage, usage(7));
    let loaded = load(&f, task).await;
    let other = StepUsage {
        call: Uuid::now_v7(),
        step: step_id(),
        purpose: Purpose::Title,
        ..entry.clone()
    };
    let commit = TaskCommit {
        usage: vec![entry.clone(), other.clone(), other.clone()],
        events: vec![event("x")],
        ..TaskCommit::new(&loaded, &loaded.task, now())
    };
    f.store.task_commit(commit).await.expect("committed");
    assert!(
        !f.store.step_usage_record(ORG, task, Some(f.agent), &other, now()).await.expect("asked")
    );
    let stored = f.store.task_get(ORG, task).await.expect("got");
    assert_eq!((stored.usage, stored.event_sequence), (usage(7) + usage(7), 2));
}

#[tokio::test]
async fn usage_sums_saturate() {
    let f = Fixture::new().await;
    let task = f.task().await;
    for _ in 0..2 {
        let loaded = load(&f, task).await;
        let usage = Usage { cost_pico_usd: i64::MAX, ..Usage::default() };
        let entry = StepUsage {
            call: Uuid::now_v7(),
            step: step_id(),
            model: f.model,
            purpose: Purpose::Turn,
            usage,
        };
        f.store
            .task_commit(TaskCommit {
                usage: vec![entry],
                ..TaskCommit::new(&loaded, &loaded.task, now())
            })
            .await
            .expect("committed");
    }
    assert_eq!(f.store.task_get(ORG, task).await.expect("got").usage.cost_pico_usd, i64::MAX);
}

#[tokio::test]
async fn nul_in_text_is_stored_as_replacement_character() {
    let f = Fixture::new().await;
    let task = f.task().await;
    f.message(task, "a\0b").await;
    let loaded = load(&f, task).await;
    let (mut state, admitted) = admitting(&loaded);
    state.last_position += 1;
    let appended = AppendedMessage {
        id: message_id(),
        position: state.last_position,
        source: Source::System,
        content: text("c\0d"),
        agent: None,
        usage: Usage::default(),
        step: None,
    };
    let commit = TaskCommit {
        admitted,
        appended: vec![appended],
        title: Some("\0".into()),
        ..TaskCommit::new(&loaded, &state, now())
    };
    f.store.task_commit(commit).await.expect("committed");
    let transcript = f.store.transcript(task, i64::MAX, None).await.expect("read");
    assert_eq!(
        transcript.iter().map(|m| &m.content).collect::<Vec<_>>(),
        [&text("a\u{FFFD}b"), &text("c\u{FFFD}d")]
    );
}

#[tokio::test]
async fn tool_call_counts_accumulate() {
    let f = Fixture::new().await;
    let task = f.task().await;
    for (tool, calls) in [("grep", 1), ("read_file", 2), ("grep", 4)] {
        let loaded = load(&f, task).await;
        let tool_uses = [(tool.to_owned(), calls)].into();
        f.store
            .task_commit(TaskCommit { tool_uses, ..TaskCommit::new(&loaded, &loaded.task, now()) })
            .await
            .expect("committed");
    }
    let stored = f.store.task_get(ORG, task).await.expect("got");
    assert_eq!(stored.tool_uses, [("grep".to_owned(), 5), ("read_file".to_owned(), 2)].into());
}

#[tokio::test]
async fn transcript_positions_are_unique() {
    let f = Fixture::new().await;
    let task = f.task().await;
    f.message(task, "one").await;
    f.message(task, "two").await;
    admit(&f, task).await;
    let loaded = load(&f, task).await;
    let (state, _) = admitting(&loaded);
    let admitted = loaded.queued.map(|queued| (queued.message, 1));
    let result = f
        .store
        .task_commit(TaskCommit { admitted, ..TaskCommit::new(&loaded, &state, now()) })
        .await;
    assert!(matches!(result, Err(Error::Internal(_))), "{result:?}");
    assert_eq!(load(&f, task).await.version, loaded.version, "nothing of it was written");
}
