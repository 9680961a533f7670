use std::time::{Duration, Instant};

use construct_domain::StepId;
use construct_proto::mesh::v1::{JournalCompleted, JournalEntry, journal_entry::Entry};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::step;
use crate::{
    Journal, User, envelope::INLINE_LIMIT, journal, publish, testing::NatsServer, topology::Stream,
};

fn entry(step: StepId, call: u32) -> JournalEntry {
    let completed =
        JournalCompleted { name: "grep".to_owned(), succeeded: true, ..Default::default() };
    JournalEntry {
        step_id: step.to_string(),
        script: 0,
        call,
        entry: Some(Entry::Completed(completed)),
    }
}

/// All entries of a journal, which must be complete.
async fn entries(journal: &Journal, step: StepId) -> Vec<JournalEntry> {
    let loaded = journal.load(step).await.expect("readable");
    assert!(loaded.unreadable.is_none(), "{loaded:?}");
    loaded.entries
}

#[tokio::test]
async fn journal_reads_back_complete_and_in_order() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    assert_eq!(entries(&journal, step(1)).await, []);
    let mut written = Vec::new();
    let mut last = 0;
    for call in 0..600 {
        let mut entry = entry(step(1), call);
        if let (300, Some(Entry::Completed(completed))) = (call, &mut entry.entry) {
            completed.result = "x".repeat(2 * INLINE_LIMIT);
        }
        last = journal.append(step(1), &entry, last).await.expect("appended");
        // Another execution writes in between.
        if call % 100 == 0 {
            let theirs = journal.load(step(2)).await.expect("readable").last;
            journal
                .append(
                    step(2),
                    &JournalEntry { step_id: step(2).to_string(), ..entry.clone() },
                    theirs,
                )
                .await
                .expect("appended");
        }
        written.push(entry);
    }
    let loaded = journal.load(step(1)).await.expect("readable");
    assert_eq!((loaded.entries, loaded.last), (written, last));
    assert_eq!(entries(&journal, step(2)).await.len(), 6);
    journal.close(step(1)).await.expect("closed");
    let left = entries(&journal, step(1)).await;
    assert!(
        matches!(left.as_slice(), [JournalEntry { entry: Some(Entry::Closed(_)), .. }]),
        "{left:?}"
    );
    let error = journal
        .append(step(1), &entry(step(1), 7), last)
        .await
        .expect_err("the old process is fenced");
    assert!(matches!(error, journal::Error::Conflict), "{error:?}");
    assert_eq!(entries(&journal, step(2)).await.len(), 6);
}

#[tokio::test]
async fn zombie_writer_is_fenced() {
    let server = NatsServer::start().await;
    let (one, two) = (server.bus().await.journal(), server.bus().await.journal());
    let first = one.append(step(1), &entry(step(1), 1), 0).await.expect("appended");
    let takeover = two.append(step(1), &entry(step(1), 2), first).await.expect("appended");
    for expected in [0, first] {
        let error = one.append(step(1), &entry(step(1), 3), expected).await.expect_err("fenced");
        assert!(matches!(error, journal::Error::Conflict), "{error:?}");
    }
    two.append(step(1), &entry(step(1), 3), takeover).await.expect("the new owner continues");
}

#[tokio::test]
async fn lost_journal_differs_from_conflict() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    let last = journal.append(step(1), &entry(step(1), 1), 0).await.expect("appended");
    let before = journal.retained_since().await.expect("known");
    server.recreate_stream(Stream::Journal).await;
    assert!(journal.retained_since().await.expect("known") > before);
    let error =
        journal.append(step(1), &entry(step(1), 2), last).await.expect_err("the journal is lost");
    assert!(matches!(error, journal::Error::Lost), "{error:?}");
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn append_while_retries_until_accepted_or_given_up() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    let (give_up, first) = (CancellationToken::new(), entry(step(1), 1));
    server.pause();
    let appended = journal.append_while(step(1), &first, 0, &give_up);
    tokio::pin!(appended);
    // One attempt takes five seconds.
    let early = tokio::time::timeout(Duration::from_secs(6), &mut appended).await;
    assert!(early.is_err(), "{early:?}");
    server.resume();
    let last = appended.await.expect("written in the end");
    assert_eq!(entries(&journal, step(1)).await, std::slice::from_ref(&first), "once");
    server.pause();
    give_up.cancel();
    let error = journal
        .append_while(step(1), &entry(step(1), 2), last, &give_up)
        .await
        .expect_err("given up");
    assert!(error.is_retryable(), "{error:?}");
    server.resume();
}

#[tokio::test]
async fn entry_with_lost_ack_is_recognized() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    let entry = entry(step(1), 1);
    let try_once = || journal.append_as(step(1), &entry, 0, "lost");
    let first = try_once().await.expect("accepted");
    assert_eq!(try_once().await.expect("recognized"), first);
    // Another process's entry in the same place is not ours.
    let error = journal.append(step(1), &entry, 0).await.expect_err("fenced");
    assert!(matches!(error, journal::Error::Conflict), "{error:?}");
}

#[tokio::test]
async fn entry_of_another_step_is_rejected() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    let error = journal.append(step(1), &entry(step(2), 1), 0).await.expect_err("refused");
    assert!(!error.is_retryable(), "{error:?}");
}

#[tokio::test]
async fn empty_journal_loads_fast() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    let mut fastest = Duration::MAX;
    for number in 0..100 {
        let began = Instant::now();
        assert_eq!(entries(&journal, step(number)).await, []);
        fastest = fastest.min(began.elapsed());
    }
    assert!(fastest < Duration::from_millis(10), "{fastest:?}");
}

#[tokio::test]
async fn remove_closed_keeps_open_journals() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    // More than one batch.
    for number in 1..=300 {
        journal.append(step(number), &entry(step(number), 1), 0).await.expect("appended");
        if number != 7 {
            journal.close(step(number)).await.expect("closed");
        }
    }
    assert_eq!(
        journal.remove_closed(Timestamp::now() - Duration::from_secs(3600)).await.expect("looked"),
        0,
        "all are young"
    );
    assert_eq!(journal.remove_closed(Timestamp::now()).await.expect("removed"), 299);
    assert_eq!(entries(&journal, step(7)).await.len(), 1);
    assert_eq!(entries(&journal, step(8)).await, []);
    let error = journal
        .append(step(8), &entry(step(8), 2), 8)
        .await
        .expect_err("the old process stays fenced");
    assert!(matches!(error, journal::Error::Lost), "{error:?}");
    assert_eq!(journal.remove_closed(Timestamp::now()).await.expect("nothing is left"), 0);
}

#[tokio::test]
async fn closing_a_journal_in_a_full_stream_frees_space() {
    let server = NatsServer::start().await;
    let (journal, theirs) =
        (server.bus().await.journal(), server.bus_for(User::Reconciler).await.journal());
    server.limit_bytes(Stream::Journal, 8192).await;
    let (mut first, mut second) = (0, 0);
    let error = loop {
        first = match journal.append(step(1), &entry(step(1), 1), first).await {
            Ok(last) => last,
            Err(error) => break error,
        };
        second = match journal.append(step(2), &entry(step(2), 1), second).await {
            Ok(last) => last,
            Err(error) => break error,
        };
    };
    assert!(matches!(error, journal::Error::Publish(publish::Error::Full)), "{error:?}");
    theirs.close(step(1)).await.expect("closed");
    let left = entries(&journal, step(1)).await;
    assert!(
        matches!(left.as_slice(), [JournalEntry { entry: Some(Entry::Closed(_)), .. }]),
        "{left:?}"
    );
    let error = journal
        .append(step(1), &entry(step(1), 11), first)
        .await
        .expect_err("the old process is fenced");
    assert!(matches!(error, journal::Error::Conflict), "{error:?}");
    journal.append(step(2), &entry(step(2), 11), second).await.expect("others continue");
}

#[tokio::test]
async fn entry_with_missing_blob_is_reported_unreadable() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    let mut last = 0;
    for call in 1..=3 {
        let mut entry = entry(step(1), call);
        if let (2, Some(Entry::Completed(completed))) = (call, &mut entry.entry) {
            completed.result = "x".repeat(2 * INLINE_LIMIT);
        }
        last = journal.append(step(1), &entry, last).await.expect("appended");
    }
    std::fs::remove_dir_all(server.blobs().join("sha256")).expect("there is one");
    let loaded = journal.load(step(1)).await.expect("the stream is there");
    let calls: Vec<u32> = loaded.entries.iter().map(|entry| entry.call).collect();
    assert_eq!((calls, loaded.last), (vec![1, 3], last));
    let error = loaded.unreadable.expect("one entry cannot be read");
    assert!(format!("{error:?}").contains("Missing"), "{error:?}");
}
