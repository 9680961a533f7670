use std::time::{Duration, Instant};

use construct_domain::StepId;
use construct_proto::mesh::v1::{JournalCompleted, JournalEntry, journal_entry::Entry};

use super::step;
use crate::{envelope::INLINE_LIMIT, journal, testing::NatsServer};

fn entry(step: StepId, call: u32) -> JournalEntry {
    let completed = JournalCompleted { name: "grep".to_owned(), succeeded: true, ..Default::default() };
    JournalEntry { step_id: step.to_string(), script: 0, call, entry: Some(Entry::Completed(completed)) }
}

#[tokio::test]
async fn a_journal_is_read_back_complete_and_in_order() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    assert_eq!(journal.load(step(1)).await.expect("readable"), []);
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
            let theirs = journal.load(step(2)).await.expect("readable").last().map_or(0, |(last, _)| *last);
            journal
                .append(step(2), &JournalEntry { step_id: step(2).to_string(), ..entry.clone() }, theirs)
                .await
                .expect("appended");
        }
        written.push((last, entry));
    }
    assert_eq!(journal.load(step(1)).await.expect("readable"), written);
    assert_eq!(journal.load(step(2)).await.expect("readable").len(), 6);
    journal.close(step(1)).await.expect("closed");
    let left = journal.load(step(1)).await.expect("readable");
    assert!(matches!(left.as_slice(), [(_, JournalEntry { entry: Some(Entry::Closed(_)), .. })]), "{left:?}");
    let error = journal.append(step(1), &entry(step(1), 7), last).await.expect_err("who still runs it is fenced");
    assert!(matches!(error, journal::Error::Conflict), "{error:?}");
    assert_eq!(journal.load(step(2)).await.expect("readable").len(), 6);
}

#[tokio::test]
async fn a_zombie_that_writes_to_a_journal_is_fenced() {
    let server = NatsServer::start().await;
    let (one, two) = (server.bus().await.journal(), server.bus().await.journal());
    let first = one.append(step(1), &entry(step(1), 1), 0).await.expect("appended");
    let takeover = two.append(step(1), &entry(step(1), 2), first).await.expect("appended");
    for expected in [0, first] {
        let error = one.append(step(1), &entry(step(1), 3), expected).await.expect_err("fenced");
        assert!(matches!(error, journal::Error::Conflict), "{error:?}");
    }
    two.append(step(1), &entry(step(1), 3), takeover).await.expect("the new owner goes on");
}

#[tokio::test]
async fn an_entry_whose_acknowledgement_was_lost_is_recognised() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    let entry = entry(step(1), 1);
    let try_once = || journal.append_as(step(1), &entry, 0, "lost".to_owned());
    let first = try_once().await.expect("accepted");
    assert_eq!(try_once().await.expect("recognised"), first);
    // Another's entry in the same place is not ours.
    let error = journal.append(step(1), &entry, 0).await.expect_err("fenced");
    assert!(matches!(error, journal::Error::Conflict), "{error:?}");
}

#[tokio::test]
async fn an_entry_of_another_step_is_refused() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    let error = journal.append(step(1), &entry(step(2), 1), 0).await.expect_err("refused");
    assert!(!error.is_retryable(), "{error:?}");
}

#[tokio::test]
async fn an_empty_journal_is_known_to_be_empty_at_once() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    let mut fastest = Duration::MAX;
    for number in 0..100 {
        let began = Instant::now();
        assert_eq!(journal.load(step(number)).await.expect("readable"), []);
        fastest = fastest.min(began.elapsed());
    }
    assert!(fastest < Duration::from_millis(10), "{fastest:?}");
}

#[tokio::test]
async fn ends_of_closed_journals_go_and_open_journals_stay() {
    let server = NatsServer::start().await;
    let journal = server.bus().await.journal();
    // More than one batch.
    for number in 1..=300 {
        journal.append(step(number), &entry(step(number), 1), 0).await.expect("appended");
        if number != 7 {
            journal.close(step(number)).await.expect("closed");
        }
    }
    assert_eq!(journal.remove_closed(Duration::from_secs(3600)).await.expect("looked"), 0, "all are young");
    assert_eq!(journal.remove_closed(Duration::ZERO).await.expect("removed"), 299);
    assert_eq!(journal.load(step(7)).await.expect("readable").len(), 1);
    assert_eq!(journal.load(step(8)).await.expect("readable"), []);
    let error = journal.append(step(8), &entry(step(8), 2), 8).await.expect_err("who still runs it stays fenced");
    assert!(matches!(error, journal::Error::Conflict), "{error:?}");
    assert_eq!(journal.remove_closed(Duration::ZERO).await.expect("nothing is left"), 0);
}
