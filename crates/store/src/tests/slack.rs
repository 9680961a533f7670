//! What the Slack service keeps: once, by one at a time.

use std::time::Duration;

use futures::future::join_all;
use serde_json::json;

use super::*;
use crate::{
    SealedSecret,
    slack::{MentionKey, MentionState, NewInstallation, NewMention, NewState, Place, Posted},
};

const LEASE: Duration = Duration::from_secs(10);

fn mention(ts: &str) -> NewMention {
    NewMention {
        key: MentionKey { team: "T1".to_owned(), channel: "C1".to_owned(), ts: ts.to_owned(), attempt: 0 },
        organization: ORG,
        thread: "1.0".to_owned(),
        user: "U1".to_owned(),
        event: json!({"text": "hi"}),
    }
}

#[tokio::test]
async fn a_mention_is_written_down_once_and_held_by_one_at_a_time() {
    let database = Database::new().await;
    let store = database.store();
    let now = now();
    let new = mention("1.1");
    let put = join_all((0..8).map(|_| store.slack_mention_put(&new, now))).await;
    assert_eq!(put.into_iter().filter(|put| *put.as_ref().expect("it is written")).count(), 1);

    let taken = join_all((0..8).map(|_| store.slack_mentions_take(10, LEASE, now))).await;
    let mut taken: Vec<_> = taken.into_iter().flat_map(|taken| taken.expect("it is taken")).collect();
    assert_eq!(taken.len(), 1);
    let mut first = taken.remove(0);
    assert_eq!((first.state, first.lease, first.event["text"].as_str()), (MentionState::Received, 1, Some("hi")));

    // Its holder has died: somebody else takes it, and the first one can write nothing more.
    let later = now + LEASE;
    let mut second = store.slack_mentions_take(10, LEASE, later).await.expect("it is taken").remove(0);
    assert_eq!(second.lease, 2);
    assert!(!store.slack_mention_hold(&first.key, first.lease, later + LEASE).await.expect("it answers"));
    assert!(store.slack_mention_hold(&second.key, second.lease, later + LEASE).await.expect("it answers"));
    first.state = MentionState::Failed;
    assert!(matches!(store.slack_mention_save(&first, true, later).await, Err(Error::Conflict)));

    // One that waits is looked at when something is decided about its task, and one that is over never again.
    (second.task, second.next_look) = (Some("task_1".to_owned()), Some(later + LEASE));
    store.slack_mention_save(&second, true, later).await.expect("it is saved");
    assert_eq!(store.slack_askers("task_1").await.expect("it answers"), ["U1"]);
    assert_eq!(store.slack_mentions_take(10, LEASE, later).await.expect("it answers"), []);
    store.slack_mentions_wake("task_1", later).await.expect("it is woken");
    let mut third = store.slack_mentions_take(10, LEASE, later).await.expect("it is taken").remove(0);
    (third.state, third.next_look, third.message) = (MentionState::Answered, None, Some("msg_1".to_owned()));
    store.slack_mention_save(&third, true, later).await.expect("it is saved");
    store.slack_mentions_wake("task_1", later).await.expect("nothing is woken");
    assert_eq!(store.slack_mentions_take(10, LEASE, later + LEASE).await.expect("it answers"), []);
    assert_eq!(store.slack_mention_before(&third.place(), "1.2").await.expect("it answers").as_deref(), Some("1.1"));
    assert_eq!(store.slack_mention_before(&third.place(), "1.1").await.expect("it answers"), None);
}

#[tokio::test]
async fn a_thread_keeps_its_task_until_that_is_gone() {
    let database = Database::new().await;
    let store = database.store();
    let place = Place { team: "T1".to_owned(), channel: "C1".to_owned(), thread: "1.0".to_owned() };
    assert_eq!(store.slack_thread_open(&place, ORG, "one").await.expect("it is opened").generation, 0);
    // Before there is a task, another agent is another request.
    let thread = store.slack_thread_open(&place, ORG, "two").await.expect("it is opened");
    assert_eq!((thread.agent.as_str(), thread.generation, thread.task), ("two", 1, None));
    store.slack_thread_task(&place, 0, "task_0").await.expect("it is too late");
    store.slack_thread_task(&place, 1, "task_1").await.expect("it is noted");
    let thread = store.slack_thread_open(&place, ORG, "three").await.expect("it is opened");
    assert_eq!((thread.agent.as_str(), thread.task.as_deref()), ("two", Some("task_1")));
    store.slack_thread_forget(&place, "task_1", "three").await.expect("it is forgotten");
    let thread = store.slack_thread(&place).await.expect("it is there");
    assert_eq!((thread.agent.as_str(), thread.generation, thread.task), ("three", 2, None));
}

#[tokio::test]
async fn a_post_may_have_been_made_as_soon_as_it_was_begun() {
    let database = Database::new().await;
    let store = database.store();
    let place = Place { team: "T1".to_owned(), channel: "C1".to_owned(), thread: "1.0".to_owned() };
    assert_eq!(store.slack_post_begin(&place, "k", now()).await.expect("it is begun"), Posted::Never);
    assert_eq!(store.slack_post_begin(&place, "k", now()).await.expect("it is begun"), Posted::Perhaps);
    store.slack_post_done(&place, "k", "1.5").await.expect("it is noted");
    assert_eq!(store.slack_post_begin(&place, "k", now()).await.expect("it is known"), Posted::At("1.5".to_owned()));
    store.slack_post_forget(&place, "k").await.expect("it is forgotten");
    assert_eq!(store.slack_post(&place, "k").await.expect("it is unknown"), Posted::Never);
}

#[tokio::test]
async fn a_state_is_used_once_and_in_time_and_an_app_that_is_removed_has_no_tokens() {
    let database = Database::new().await;
    let store = database.store();
    let now = now();
    let state =
        |number: u8, expires_at| NewState { state: [number; 32], organization: ORG, agent: "a".to_owned(), expires_at };
    store.slack_state_put(&state(1, now + LEASE), now).await.expect("it is put");
    store.slack_state_put(&state(2, now + LEASE), now).await.expect("it is put");
    assert_eq!(store.slack_state_take(&[1; 32], now).await.expect("it is taken"), (ORG, "a".to_owned()));
    assert!(matches!(store.slack_state_take(&[1; 32], now).await, Err(Error::NotFound { .. })));
    assert!(matches!(store.slack_state_take(&[2; 32], now + LEASE).await, Err(Error::NotFound { .. })));

    let sealed = |key: &str| SealedSecret { key_id: key.to_owned(), nonce: vec![1], ciphertext: vec![2] };
    let new = NewInstallation {
        team: "T1".to_owned(),
        organization: ORG,
        team_name: "Team".to_owned(),
        app: "A1".to_owned(),
        bot_user: "U9".to_owned(),
        installed_by: "U1".to_owned(),
        agent: "a".to_owned(),
        scopes: String::new(),
        tokens: sealed("old"),
        expires_at: None,
    };
    store.slack_install(&new, now).await.expect("it is installed");
    let found = store.slack_sealed_otherwise("new").await.expect("it answers").remove(0);
    let (revision, until) = (found.revision, Some(now + LEASE));
    assert!(store.slack_tokens_replace("T1", revision, &sealed("new"), until, now).await.expect("they are replaced"));
    assert!(!store.slack_tokens_replace("T1", revision, &sealed("x"), None, now).await.expect("it is too late"));
    let found = store.slack_installation("T1").await.expect("it is there");
    assert_eq!((found.tokens, found.expires_at), (Some(sealed("new")), until));
    store.slack_uninstall("T1", now).await.expect("it is removed");
    assert_eq!(store.slack_installation("T1").await.expect("it is there").tokens, None);
}
