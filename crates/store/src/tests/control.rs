//! Rows of interrupts, rewinds, edits and forks.

use construct_domain::{
    budget::{Period, Scope},
    decide::ContextCompaction,
    message::{Block, CodeCall, CodeResult, Source},
    money::tokens_of_content,
    task::{QueuedMessage, Task, TurnOutcome},
};

use super::*;
use crate::{
    AppendedMessage, BudgetFilter, Key, LoadedTask, MessageFilter, MessagePage, NewBudget, NewFork,
    Order, Page, Rewind, TaskChanges, TaskCommit,
};

async fn load(f: &Fixture, task: TaskId) -> LoadedTask {
    f.store.task_load(task).await.expect("read").expect("there")
}

fn call() -> Content {
    Content {
        blocks: vec![Block::CodeInterpreterCall(CodeCall {
            id: "c".to_owned(),
            code: "1".to_owned(),
        })],
    }
}

fn result() -> Content {
    Content {
        blocks: vec![Block::CodeInterpreterResult(CodeResult {
            id: "c".to_owned(),
            ..CodeResult::default()
        })],
    }
}

/// Commits the next queued message, and then these.
async fn turn(f: &Fixture, task: TaskId, answers: Vec<(Source, Content)>) {
    let loaded = load(f, task).await;
    let mut state = loaded.task.clone();
    state.last_position += 1;
    let admitted = loaded.queued.map(|queued| (queued.message, state.last_position));
    let mut appended = Vec::new();
    for (source, content) in answers {
        state.last_position += 1;
        let position = state.last_position;
        let usage = if source == Source::Assistant { usage(5) } else { Usage::default() };
        appended.push(AppendedMessage {
            id: message_id(),
            position,
            source,
            content,
            agent: None,
            usage,
            step: None,
        });
    }
    let commit = TaskCommit { admitted, appended, ..TaskCommit::new(&loaded, &state, now()) };
    f.store.task_commit(commit).await.expect("committed");
}

/// Five messages: hello, a call, its result, an answer, and another message.
async fn conversation(f: &Fixture) -> (TaskId, Vec<StoredMessage>) {
    let task = f.task().await;
    f.message(task, "hello").await;
    let answers = vec![
        (Source::Assistant, call()),
        (Source::System, result()),
        (Source::Assistant, text("done")),
    ];
    turn(f, task, answers).await;
    f.message(task, "and now?").await;
    turn(f, task, Vec::new()).await;
    let transcript = f.store.transcript(task, i64::MAX, None).await.expect("read");
    assert_eq!(transcript.len(), 5);
    (task, transcript)
}

fn rewind(task: TaskId, message: &StoredMessage) -> Rewind {
    Rewind { task, message: message.id, keep: false }
}

async fn carry_out(f: &Fixture, task: TaskId) -> i64 {
    let loaded = load(f, task).await;
    let from = loaded.task.rewind.expect("a rewind is asked for");
    let state = Task { rewind: None, ..loaded.task.clone() };
    let words = Some("cancelled: back".to_owned());
    let commit = TaskCommit {
        drop_queued: words,
        rewind_from: Some(from),
        ..TaskCommit::new(&loaded, &state, now())
    };
    f.store.task_commit(commit).await.expect("committed");
    from
}

async fn transcript_tokens(f: &Fixture, task: TaskId) -> i64 {
    sqlx::query_scalar("SELECT transcript_tokens FROM tasks WHERE id = $1")
        .bind(task.uuid())
        .fetch_one(&f.store.pool)
        .await
        .expect("read")
}

#[tokio::test]
async fn interrupting_messages_come_first_then_by_arrival() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let calm = f.message(task, "calm").await;
    let next = async || load(&f, task).await.queued.expect("one waits");
    assert_eq!(next().await, QueuedMessage { message: calm.id, interrupts: false });
    let urgent = f.message_as(task, "urgent", true).await;
    f.message_as(task, "as urgent", true).await;
    assert_eq!(next().await, QueuedMessage { message: urgent.id, interrupts: true });
}

#[tokio::test]
async fn superseded_messages_keep_position_and_are_listed_on_request() {
    let f = Fixture::new().await;
    let (task, all) = conversation(&f).await;
    f.message(task, "waits").await;
    applied(
        f.store
            .task_rewind(&write(), rewind(task, &all[1]), rendered("task.updated"))
            .await
            .expect("asked for"),
    );
    let later = f.message(task, "later").await;
    assert_eq!(carry_out(&f, task).await, 2);
    let shown = f.store.transcript(task, i64::MAX, None).await.expect("read");
    assert_eq!(shown.iter().map(|message| message.id).collect::<Vec<_>>(), [all[0].id]);
    assert_eq!(transcript_tokens(&f, task).await, tokens_of_content(&text("hello")));
    let page = MessagePage { limit: 100, descending: false, after: None };
    let list = async |superseded| {
        let filter = MessageFilter { superseded, ..MessageFilter::default() };
        f.store.message_list(ORG, task, &filter, &page).await.expect("listed")
    };
    assert_eq!(list(false).await.len(), 3, "one in the transcript, one dropped, one that waits");
    let whole = list(true).await;
    assert_eq!(
        whole.iter().filter_map(|message| message.position).collect::<Vec<_>>(),
        [1, 2, 3, 4, 5]
    );
    assert_eq!(whole.iter().filter(|message| message.superseded_at.is_some()).count(), 4);
    let loaded = load(&f, task).await;
    assert_eq!(
        (loaded.task.rewind, loaded.queued.map(|queued| queued.message)),
        (None, Some(later.id))
    );
    assert_eq!(
        f.store.task_get(ORG, task).await.expect("got").usage,
        Usage::default(),
        "nothing was booked here"
    );
}

#[tokio::test]
async fn rewind_keeps_scripts_with_their_results() {
    for (at, keep, shown) in [(1, false, 1), (1, true, 3), (2, false, 1), (2, true, 3)] {
        let f = Fixture::new().await;
        let (task, all) = conversation(&f).await;
        let rewind = Rewind { keep, ..rewind(task, &all[at]) };
        applied(
            f.store
                .task_rewind(&write(), rewind, rendered("task.updated"))
                .await
                .expect("asked for"),
        );
        carry_out(&f, task).await;
        let transcript = f.store.transcript(task, i64::MAX, None).await.expect("read");
        assert_eq!(transcript.len(), shown, "at {at}, kept: {keep}");
    }
}

#[tokio::test]
async fn rewind_to_a_superseded_or_queued_message_is_refused() {
    let f = Fixture::new().await;
    let (task, all) = conversation(&f).await;
    let asked = async |at: usize, keep| {
        let rewind = Rewind { keep, ..rewind(task, &all[at]) };
        f.store.task_rewind(&write(), rewind, rendered("task.updated")).await
    };
    let queued = f.message(task, "waits").await;
    let waits = Rewind { task, message: queued.id, keep: false };
    let refused = f.store.task_rewind(&write(), waits, rendered("task.updated")).await;
    assert!(matches!(refused, Err(Error::NotInTranscript)), "{refused:?}");
    let elsewhere = Rewind { task: f.task().await, ..rewind(task, &all[0]) };
    assert_not_found(f.store.task_rewind(&write(), elsewhere, rendered("task.updated")).await);
    applied(asked(2, true).await.expect("asked for"));
    let again = asked(3, false).await;
    assert!(matches!(again, Err(Error::NotInTranscript)), "it is as good as gone: {again:?}");
    applied(asked(1, false).await.expect("further back is possible"));
    assert_eq!(carry_out(&f, task).await, 2);
    let gone = asked(4, false).await;
    assert!(matches!(gone, Err(Error::NotInTranscript)), "{gone:?}");
}

#[tokio::test]
async fn edited_message_survives_its_rewind_and_is_accepted_once() {
    let f = Fixture::new().await;
    let (task, all) = conversation(&f).await;
    let before = f.message(task, "waits").await;
    let edit = async |id, key| {
        f.store
            .message_edit(
                &write_with_key(key, 1),
                id,
                message_id(),
                text("hi"),
                rendered("message.created"),
            )
            .await
    };
    let edited = applied(edit(all[0].id, "k").await.expect("edited"));
    assert_eq!(edited.replaces, Some(all[0].id));
    assert!(matches!(edit(all[0].id, "k").await, Ok(WriteOutcome::Repeated { .. })));
    assert!(matches!(edit(all[0].id, "other").await, Err(Error::NotInTranscript)));
    let not_a_users = edit(all[3].id, "third").await;
    assert!(matches!(not_a_users, Err(Error::NotInTranscript)), "{not_a_users:?}");
    carry_out(&f, task).await;
    let loaded = load(&f, task).await;
    assert_eq!(loaded.queued.map(|queued| queued.message), Some(edited.id));
    let dropped = f.store.message_get(ORG, before.id).await.expect("got");
    assert_eq!(dropped.error.as_deref(), Some("cancelled: back"));
    turn(&f, task, Vec::new()).await;
    let shown = f.store.transcript(task, i64::MAX, None).await.expect("read");
    assert_eq!(
        shown.iter().map(|message| (message.id, message.position)).collect::<Vec<_>>(),
        [(edited.id, Some(6))]
    );
}

#[tokio::test]
async fn fork_copies_transcript_without_costs() {
    let f = Fixture::new().await;
    let (task, all) = conversation(&f).await;
    let budget = NewBudget {
        id: construct_domain::BudgetId::from_uuid(Uuid::now_v7()),
        scope: Scope::Task(task),
        period: Period::Total,
        limit: 7,
    };
    applied(
        f.store.budget_create(&write(), budget, rendered("budget.created")).await.expect("created"),
    );
    let changes =
        TaskChanges { pinned: Some(vec!["It rains.".to_owned()]), ..TaskChanges::default() };
    applied(
        f.store
            .task_update(&write(), task, None, changes, rendered("task.updated"))
            .await
            .expect("changed"),
    );
    let fork = |message: &StoredMessage, workspace: &str| NewFork {
        id: TaskId::from_uuid(Uuid::now_v7()),
        source: task,
        message: message.id,
        title: String::new(),
        workspace: workspace.to_owned(),
        workspace_notice: (message_id(), text("elsewhere")),
    };
    let at_script = applied(
        f.store
            .task_fork(&write(), fork(&all[1], "/s"), rendered("task.created"))
            .await
            .expect("forked"),
    );
    assert_eq!(
        at_script.state.last_position, 4,
        "its results come with it, and what is said of the directory"
    );

    let (stored, event) = applied_with_event(
        f.store
            .task_fork(&write(), fork(&all[3], ""), rendered("task.created"))
            .await
            .expect("forked"),
    );
    assert_eq!(event.map(|event| event.sequence), Some(1));
    assert_eq!(stored.forked_from, Some((task, all[3].id)));
    assert_eq!(
        (stored.workspace.as_str(), stored.usage, stored.state.last_position),
        ("", Usage::default(), 5)
    );
    assert_eq!(stored.pinned, ["It rains."]);
    let copy = f.store.transcript(stored.state.id, i64::MAX, None).await.expect("read");
    let contents: Vec<&Content> = copy.iter().map(|message| &message.content).collect();
    let (said, elsewhere) = (all.iter().take(4).map(|message| &message.content), text("elsewhere"));
    assert_eq!(contents, said.chain([&elsewhere]).collect::<Vec<_>>());
    assert_eq!(
        copy.iter().filter_map(|message| message.position).collect::<Vec<_>>(),
        [1, 2, 3, 4, 5]
    );
    assert!(
        copy.iter()
            .all(|message| message.usage == Usage::default() && message.processed_at.is_some())
    );
    assert!(copy.iter().all(|message| all.iter().all(|original| original.id != message.id)));
    let loaded = load(&f, stored.state.id).await;
    assert_eq!((loaded.root, loaded.queued), (stored.state.id, None));

    let page =
        Page { limit: 10, order: Order { key: Key::CreatedAt, descending: false }, after: None };
    let filter = BudgetFilter { task: Some(stored.state.id), ..BudgetFilter::default() };
    let budgets = f.store.budget_list(ORG, &filter, &page, now()).await.expect("listed");
    assert_eq!(budgets.iter().map(|budget| budget.limit).collect::<Vec<_>>(), [7]);

    // In the same workspace there is no notice.
    let same = applied(
        f.store
            .task_fork(&write(), fork(&all[0], "/w"), rendered("task.created"))
            .await
            .expect("forked"),
    );
    assert_eq!((same.workspace.as_str(), same.state.last_position), ("/w", 1));
    // A fork of a fork has no superseded messages.
    let back = Rewind { task: stored.state.id, message: copy[1].id, keep: false };
    applied(
        f.store.task_rewind(&write(), back, rendered("task.updated")).await.expect("asked for"),
    );
    carry_out(&f, stored.state.id).await;
    let again = NewFork { source: stored.state.id, message: copy[0].id, ..fork(&all[0], "") };
    let again = applied(
        f.store.task_fork(&write(), again, rendered("task.created")).await.expect("forked"),
    );
    assert_eq!(
        again.state.last_position, 2,
        "what was said, and that the directory is another one"
    );
}

#[tokio::test]
async fn fork_at_a_running_script_has_an_outcome_unknown_result() {
    let f = Fixture::new().await;
    let task = f.task().await;
    f.message(task, "hello").await;
    turn(&f, task, vec![(Source::Assistant, call())]).await;
    let transcript = f.store.transcript(task, i64::MAX, None).await.expect("read");
    let fork = NewFork {
        id: TaskId::from_uuid(Uuid::now_v7()),
        source: task,
        message: transcript[1].id,
        title: String::new(),
        workspace: String::new(),
        workspace_notice: (message_id(), text("elsewhere")),
    };
    let copy =
        applied(f.store.task_fork(&write(), fork, rendered("task.created")).await.expect("forked"));
    let copied = f.store.transcript(copy.state.id, i64::MAX, None).await.expect("read");
    let [_, calls, results, elsewhere] = copied.as_slice() else { panic!("{copied:?}") };
    assert_eq!((&calls.content, &elsewhere.content), (&call(), &text("elsewhere")));
    let [Block::CodeInterpreterResult(result)] = results.content.blocks.as_slice() else {
        panic!("{results:?}")
    };
    assert_eq!((result.id.as_str(), results.position, copy.state.last_position), ("c", Some(3), 4));
    assert!(result.error.contains("unknown what it did"), "{}", result.error);
    assert_eq!(
        transcript_tokens(&f, copy.state.id).await,
        copied.iter().map(|m| tokens_of_content(&m.content)).sum::<i64>()
    );
}

#[tokio::test]
async fn retry_applies_to_failed_turns_without_a_final_answer() {
    let f = Fixture::new().await;
    let task = f.task().await;
    let asked =
        async || f.store.task_retry(&write(), task, rendered("task.updated")).await.expect("asked");
    let retry = async || load(&f, task).await.task.retry;
    let applied = |answer: &WriteOutcome<StoredTask>| {
        matches!(answer, WriteOutcome::Applied { event: Some(_), .. })
    };
    assert!(!applied(&asked().await), "it has had no turn");
    let message = f.message(task, "hello").await;
    // The answers of the model, the outcome of the turn, whether it can be retried.
    for (said, outcome, possible) in [
        (vec![], Some(TurnOutcome::Completed), false),
        (vec![], Some(TurnOutcome::Cancelled), false),
        (vec![], Some(TurnOutcome::Failed), true),
        (
            vec![(Source::Assistant, call()), (Source::System, result())],
            Some(TurnOutcome::MaxTurns),
            true,
        ),
        (vec![(Source::Assistant, text("half of"))], Some(TurnOutcome::Failed), false),
    ] {
        turn(&f, task, said).await;
        let loaded = load(&f, task).await;
        let state = Task { last_outcome: outcome, ..loaded.task.clone() };
        f.store.task_commit(TaskCommit::new(&loaded, &state, now())).await.expect("committed");
        let answer = asked().await;
        assert_eq!(applied(&answer), possible, "{outcome:?}: {answer:?}");
        assert_eq!(retry().await, possible.then_some(message.id), "{outcome:?}");
        f.store.task_intents_mark_seen(&load(&f, task).await).await.expect("noted");
        assert_eq!(retry().await, None, "it was looked at");
    }
}

#[tokio::test]
async fn compaction_replaces_messages_until_a_rewind_before_its_end() {
    let f = Fixture::new().await;
    let (task, all) = conversation(&f).await;
    let outline = f.store.outline(task).await.expect("read");
    let results: Vec<bool> = outline.shown.iter().map(|entry| entry.results).collect();
    assert_eq!((outline.summary, results), (0, vec![false, false, true, false, false]));
    let size = |places: &[usize]| places.iter().map(|&at| outline.shown[at].tokens).sum::<i64>();
    assert_eq!(transcript_tokens(&f, task).await, size(&[0, 1, 2, 3, 4]));

    let loaded = load(&f, task).await;
    let mut state = loaded.task.clone();
    (state.context.through, state.context.scale, state.context.tokens) = (3, 700, 99);
    let compacted = ContextCompaction {
        through: 3,
        kept: vec![1],
        text: "They counted.".to_owned(),
        tokens: 20,
        replaced: size(&[1, 2]),
        summary: true,
        before: 0,
        after: 0,
    };
    let commit =
        TaskCommit { compaction: Some(compacted), ..TaskCommit::new(&loaded, &state, now()) };
    f.store.task_commit(commit).await.expect("committed");
    assert_eq!(transcript_tokens(&f, task).await, 20 + size(&[0, 3, 4]));
    let context = load(&f, task).await.task.context;
    assert_eq!((context.through, context.scale, context.tokens), (3, 700, 99));
    let compaction = f.store.compaction(task, 3).await.expect("read").expect("there");
    assert_eq!((compaction.text.as_str(), compaction.tokens), ("They counted.", 20));
    let shown =
        f.store.transcript_after(task, 3, &compaction.kept, i64::MAX, None).await.expect("read");
    assert_eq!(shown.iter().filter_map(|message| message.position).collect::<Vec<_>>(), [1, 4, 5]);
    let outline = f.store.outline(task).await.expect("read");
    assert_eq!(outline.summary, 20);
    assert_eq!(outline.shown.iter().map(|entry| entry.position).collect::<Vec<_>>(), [1, 4, 5]);
    assert_eq!(
        f.store.transcript(task, i64::MAX, None).await.expect("read").len(),
        5,
        "all of it is there"
    );

    // A rewind to after its end leaves it. A fork has it, with the positions of the fork.
    applied(
        f.store
            .task_rewind(&write(), rewind(task, &all[4]), rendered("task.updated"))
            .await
            .expect("asked for"),
    );
    carry_out(&f, task).await;
    assert_eq!(transcript_tokens(&f, task).await, 20 + size(&[0, 3]));
    let fork = NewFork {
        id: TaskId::from_uuid(Uuid::now_v7()),
        source: task,
        message: all[3].id,
        title: String::new(),
        workspace: "/w".to_owned(),
        workspace_notice: (message_id(), text("elsewhere")),
    };
    let copy =
        applied(f.store.task_fork(&write(), fork, rendered("task.created")).await.expect("forked"));
    assert_eq!((copy.state.context.through, copy.state.context.scale), (3, 700));
    assert_eq!(f.store.compaction(copy.state.id, 3).await.expect("read"), Some(compaction));

    // A rewind to before its end removes it.
    applied(
        f.store
            .task_rewind(&write(), rewind(task, &all[1]), rendered("task.updated"))
            .await
            .expect("asked for"),
    );
    carry_out(&f, task).await;
    assert_eq!(load(&f, task).await.task.context.through, 0);
    assert_eq!(f.store.compaction(task, 3).await.expect("read"), None);
    assert_eq!(transcript_tokens(&f, task).await, size(&[0]));
}
