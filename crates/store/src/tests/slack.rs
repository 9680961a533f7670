//! The data of the Slack service: stored once, one lease holder at a time.

use std::time::Duration;

use futures::future::join_all;
use serde_json::json;

use super::*;
use crate::{
    SealedSecret,
    slack::{
        Grant, GrantKind, Member, MentionKey, MentionState, NewInstallState, NewInstallation,
        NewMention, PostState, ThreadKey,
    },
};

const LEASE: Duration = Duration::from_secs(10);

fn mention(ts: &str) -> NewMention {
    NewMention {
        key: MentionKey {
            team: "T1".to_owned(),
            channel: "C1".to_owned(),
            ts: ts.to_owned(),
            attempt: 0,
        },
        organization: ORG,
        thread: "1.0".to_owned(),
        user: "U1".to_owned(),
        event: json!({"text": "hi"}),
    }
}

fn sealed(key: &str) -> SealedSecret {
    SealedSecret { key_id: key.to_owned(), nonce: vec![9], ciphertext: vec![2] }
}

fn installation() -> NewInstallation {
    NewInstallation {
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
    }
}

#[tokio::test]
async fn mention_is_stored_once_and_has_one_lease_holder() {
    let database = Database::new().await;
    let store = database.store();
    let now = now();
    let new = mention("1.1");
    let put = join_all((0..8).map(|_| store.slack_mention_put(&new, now))).await;
    assert_eq!(put.into_iter().filter(|put| *put.as_ref().expect("it is written")).count(), 1);

    let taken = join_all((0..8).map(|_| store.slack_mentions_claim(10, LEASE, now))).await;
    let mut taken: Vec<_> =
        taken.into_iter().flat_map(|taken| taken.expect("it is taken")).collect();
    assert_eq!(taken.len(), 1);
    let mut first = taken.remove(0);
    assert_eq!(
        (first.state, first.lease, first.event["text"].as_str()),
        (MentionState::Received, 1, Some("hi"))
    );

    // Its holder has died: another process claims it, and the first one can no longer write.
    let later = now + LEASE;
    let mut second =
        store.slack_mentions_claim(10, LEASE, later).await.expect("it is taken").remove(0);
    assert_eq!(second.lease, 2);
    assert!(
        !store
            .slack_mention_extend_lease(&first.key, first.lease, later + LEASE)
            .await
            .expect("it answers")
    );
    assert!(
        store
            .slack_mention_extend_lease(&second.key, second.lease, later + LEASE)
            .await
            .expect("it answers")
    );
    first.state = MentionState::Failed;
    assert!(matches!(store.slack_mention_save(&first, true, later).await, Err(Error::Conflict)));

    // A waiting mention is due when something is decided about its task; one that is over never
    // again.
    (second.task, second.next_wake) = (Some("task_1".to_owned()), Some(later + LEASE));
    store.slack_mention_save(&second, true, later).await.expect("it is saved");
    assert_eq!(store.slack_mentions_claim(10, LEASE, later).await.expect("it answers"), []);
    store.slack_mentions_wake("task_1", later).await.expect("it is woken");
    let mut third =
        store.slack_mentions_claim(10, LEASE, later).await.expect("it is taken").remove(0);
    assert!(store.slack_mentions_due(later + LEASE).await.expect("it answers"));
    (third.state, third.next_wake, third.message) =
        (MentionState::Answered, None, Some("msg_1".to_owned()));
    store.slack_mention_save(&third, true, later).await.expect("it is saved");
    store.slack_mentions_wake("task_1", later).await.expect("nothing is woken");
    assert_eq!(store.slack_mentions_claim(10, LEASE, later + LEASE).await.expect("it answers"), []);
    assert_eq!(
        store
            .slack_message_before(&third.thread_key(), "1.2")
            .await
            .expect("it answers")
            .as_deref(),
        Some("1.1")
    );
    assert_eq!(
        store.slack_message_before(&third.thread_key(), "1.1").await.expect("it answers"),
        None
    );
}

#[tokio::test]
async fn thread_keeps_its_task_until_it_is_deleted() {
    let database = Database::new().await;
    let store = database.store();
    let place =
        ThreadKey { team: "T1".to_owned(), channel: "C1".to_owned(), thread: "1.0".to_owned() };
    assert_eq!(
        store.slack_thread_open(&place, ORG, "one").await.expect("it is opened").generation,
        0
    );
    // Before there is a task, the agent can change.
    let thread = store.slack_thread_open(&place, ORG, "two").await.expect("it is opened");
    assert_eq!((thread.agent.as_str(), thread.generation, thread.task), ("two", 1, None));
    store.slack_thread_set_task(&place, 0, "task_0").await.expect("it is too late");
    store.slack_thread_set_task(&place, 1, "task_1").await.expect("it is noted");
    let thread = store.slack_thread_open(&place, ORG, "three").await.expect("it is opened");
    assert_eq!((thread.agent.as_str(), thread.task.as_deref()), ("two", Some("task_1")));
    store.slack_thread_clear_task(&place, "task_1", "three").await.expect("it is forgotten");
    let thread = store.slack_thread(&place).await.expect("it is there");
    assert_eq!((thread.agent.as_str(), thread.generation, thread.task), ("three", 2, None));
}

#[tokio::test]
async fn begun_post_has_an_unknown_outcome() {
    let database = Database::new().await;
    let store = database.store();
    let place =
        ThreadKey { team: "T1".to_owned(), channel: "C1".to_owned(), thread: "1.0".to_owned() };
    assert_eq!(
        store.slack_post_begin(&place, "k", now()).await.expect("it is begun"),
        PostState::NotPosted
    );
    assert_eq!(
        store.slack_post_begin(&place, "k", now()).await.expect("it is begun"),
        PostState::Unknown
    );
    store.slack_post_done(&place, "k", "1.5").await.expect("it is noted");
    assert_eq!(
        store.slack_post_begin(&place, "k", now()).await.expect("it is known"),
        PostState::Posted("1.5".to_owned())
    );
    store.slack_post_forget(&place, "k").await.expect("it is forgotten");
    assert_eq!(store.slack_post(&place, "k").await.expect("it is unknown"), PostState::NotPosted);

    for (key, ts) in [
        ("a.1", Some("1.6")),
        ("a.2", Some("1.7")),
        ("a.2.closed", Some("1.7")),
        ("a.3", None),
        ("b.4", Some("1.8")),
    ] {
        store.slack_post_begin(&place, key, now()).await.expect("it is begun");
        if let Some(ts) = ts {
            store.slack_post_done(&place, key, ts).await.expect("it is noted");
        }
    }
    assert_eq!(
        store.slack_posts_open(&place, "a.", ".closed").await.expect("they are read"),
        ["1"]
    );
}

#[tokio::test]
async fn install_state_is_used_once_and_removed_app_has_no_tokens() {
    let database = Database::new().await;
    let store = database.store();
    let now = now();
    let state = |number: u8, expires_at| NewInstallState {
        state: [number; 32],
        organization: ORG,
        agent: "a".to_owned(),
        expires_at,
    };
    store.slack_state_put(&state(1, now + LEASE), now).await.expect("it is put");
    store.slack_state_put(&state(2, now + LEASE), now).await.expect("it is put");
    assert_eq!(
        store.slack_state_consume(&[1; 32], now).await.expect("it is taken"),
        (ORG, "a".to_owned())
    );
    assert!(matches!(store.slack_state_consume(&[1; 32], now).await, Err(Error::NotFound { .. })));
    assert!(matches!(
        store.slack_state_consume(&[2; 32], now + LEASE).await,
        Err(Error::NotFound { .. })
    ));

    store.slack_install(&installation(), now).await.expect("it is installed");
    let found = store.slack_sealed_with_other_keys("new").await.expect("it answers").remove(0);
    let (revision, until) = (found.revision, Some(now + LEASE));
    assert!(
        store
            .slack_tokens_replace("T1", revision, &sealed("new"), until, now)
            .await
            .expect("they are replaced")
    );
    assert!(
        !store
            .slack_tokens_replace("T1", revision, &sealed("x"), None, now)
            .await
            .expect("it is too late")
    );
    let found = store.slack_installation("T1").await.expect("it is there");
    assert_eq!((found.tokens, found.expires_at), (Some(sealed("new")), until));
    let (asked, earlier) = (mention("1.1"), now - LEASE);
    store.slack_mention_put(&asked, now).await.expect("it is written");
    let taken = store.slack_mentions_claim(10, LEASE, now).await.expect("it is taken").remove(0);
    // A late event of the removal before this installation.
    assert!(!store.slack_uninstall("T1", earlier, now).await.expect("it answers"));
    assert_eq!(
        store.slack_installation("T1").await.expect("it is there").tokens,
        Some(sealed("new"))
    );
    assert!(store.slack_uninstall("T1", now, now).await.expect("it is removed"));
    assert_eq!(store.slack_installation("T1").await.expect("it is there").tokens, None);
    // The contents of its mentions are deleted, and lease holders lose their leases.
    assert!(matches!(store.slack_mention_save(&taken, true, now).await, Err(Error::Conflict)));
    let found = store.slack_mention(&asked.key).await.expect("it is there");
    assert_eq!(
        (found.state, found.next_wake, found.event),
        (MentionState::Failed, None, json!(null))
    );
}

#[tokio::test]
async fn workspace_changes_organization_only_after_uninstall() {
    let database = Database::new().await;
    let store = database.store();
    let (now, other) = (now(), OrganizationId::from_uuid(Uuid::now_v7()));
    sqlx::query(
        "INSERT INTO organizations SELECT (jsonb_populate_record(o, jsonb_build_object('id', $1::uuid, 'slug', 'other'))).*
         FROM organizations o WHERE o.id = $2",
    )
    .bind(other.uuid())
    .bind(ORG.uuid())
    .execute(&store.pool)
    .await
    .expect("another organization");
    let theirs = NewInstallation { organization: other, ..installation() };
    assert!(store.slack_install(&installation(), now).await.expect("it answers"));
    store.slack_thread_open(&place(), ORG, "a").await.expect("it is opened");
    store.slack_thread_set_task(&place(), 0, "task_1").await.expect("it is noted");
    let grant = Grant {
        team: "T1".to_owned(),
        channel: String::new(),
        user: String::new(),
        agent: "a".to_owned(),
        kind: GrantKind::Use,
    };
    store.slack_grant(&grant, "U1", now).await.expect("it is allowed");

    assert!(!store.slack_install(&theirs, now).await.expect("it answers"));
    assert_eq!(store.slack_installation("T1").await.expect("it is there").organization, ORG);
    assert!(store.slack_install(&installation(), now).await.expect("it answers"));
    assert_eq!(
        store.slack_thread(&place()).await.expect("it is there").task.as_deref(),
        Some("task_1")
    );
    assert_eq!(store.slack_grants("T1", GrantKind::Use).await.expect("they are read"), [grant]);

    assert!(store.slack_uninstall("T1", now, now).await.expect("it is removed"));
    assert!(store.slack_install(&theirs, now).await.expect("it answers"));
    assert_eq!(store.slack_installation("T1").await.expect("it is there").organization, other);
    let thread = store.slack_thread(&place()).await.expect("it is there");
    assert_eq!((thread.task, thread.generation), (None, 1));
    assert_eq!(store.slack_grants("T1", GrantKind::Use).await.expect("they are read"), []);
}

#[tokio::test]
async fn approvals_are_shown_at_the_first_open_mention_of_a_task() {
    let database = Database::new().await;
    let store = database.store();
    let now = now();
    let mut taken = Vec::new();
    // The first stored mention is not the first one that the gateway accepted.
    for (ts, user, message) in [("1.1", "U1", "msg_2"), ("1.2", "U2", "msg_1")] {
        let new = NewMention { user: user.to_owned(), ..mention(ts) };
        store.slack_mention_put(&new, now).await.expect("it is written");
        let mut asked =
            store.slack_mentions_claim(10, LEASE, now).await.expect("it is taken").remove(0);
        (asked.task, asked.message) = (Some("task_1".to_owned()), Some(message.to_owned()));
        store.slack_mention_save(&asked, false, now).await.expect("it is saved");
        taken.push(asked);
    }
    let showing = async || {
        store.slack_mention_for_approvals("task_1").await.expect("it answers").map(|key| key.ts)
    };
    let askers = async |before| {
        let askers =
            store.slack_askers(&place(), "task_1", before, 10).await.expect("they are read");
        askers.into_iter().map(|(user, _)| user).collect::<Vec<_>>()
    };
    assert_eq!(
        (showing().await.as_deref(), askers(now + LEASE).await),
        (Some("1.2"), vec!["U1".to_owned(), "U2".to_owned()])
    );
    assert_eq!(askers(now).await, Vec::<String>::new());
    // It is answered, and stays open for approvals of subtasks until the next one is.
    (taken[1].state, taken[1].next_wake) = (MentionState::Answered, Some(now + LEASE));
    store.slack_mention_save(&taken[1], true, now).await.expect("it is saved");
    taken[0].state = MentionState::Asked;
    store.slack_mention_save(&taken[0], false, now).await.expect("it is saved");
    assert_eq!(showing().await.as_deref(), Some("1.2"));
    assert!(store.slack_mention_has_successor("task_1", "msg_1").await.expect("it answers"));
    assert!(!store.slack_mention_has_successor("task_1", "msg_2").await.expect("it answers"));
    assert!(
        !store.slack_mention_wake(&taken[0].key, now).await.expect("it answers"),
        "it is worked on"
    );
    assert!(store.slack_mention_wake(&taken[1].key, now).await.expect("it answers"));
    taken[1].next_wake = None;
    store.slack_mention_save(&taken[1], true, now).await.expect("it is saved");
    assert_eq!(showing().await.as_deref(), Some("1.1"));
    assert_eq!(store.slack_mention_for_approvals("task_2").await.expect("it answers"), None);
}

#[tokio::test]
async fn old_mentions_lose_content_and_stay_deduplicated() {
    let database = Database::new().await;
    let store = database.store();
    let now = now();
    let (over, open) = (mention("1.1"), NewMention { thread: "2.0".to_owned(), ..mention("2.1") });
    for new in [&over, &open] {
        store.slack_mention_put(new, now).await.expect("it is written");
        store
            .slack_post_begin(&ThreadKey { thread: new.thread.clone(), ..place() }, "k", now)
            .await
            .expect("it is begun");
    }
    let taken = store.slack_mentions_claim(10, LEASE, now).await.expect("they are taken");
    let mut taken =
        taken.into_iter().find(|taken| taken.key == over.key).expect("it is among them");
    (taken.state, taken.next_wake, taken.error) =
        (MentionState::Failed, None, Some("it went wrong".to_owned()));
    store.slack_mention_save(&taken, true, now).await.expect("it is saved");
    assert_eq!(store.slack_cleanup(now, 100).await.expect("it answers"), 0);
    assert_eq!(store.slack_cleanup(now + LEASE, 100).await.expect("it answers"), 2);
    assert_eq!(store.slack_cleanup(now + LEASE, 100).await.expect("it answers"), 0);
    let found = store.slack_mention(&over.key).await.expect("it is there");
    assert_eq!((found.state, found.event, found.error), (MentionState::Failed, json!(null), None));
    assert!(!store.slack_mention_put(&over, now).await.expect("it is known"));
    assert_eq!(store.slack_mention(&open.key).await.expect("it is there").event, open.event);
    assert_eq!(store.slack_post(&place(), "k").await.expect("it is unknown"), PostState::NotPosted);
    let kept = ThreadKey { thread: "2.0".to_owned(), ..place() };
    assert_eq!(store.slack_post(&kept, "k").await.expect("it is known"), PostState::Unknown);
}

fn place() -> ThreadKey {
    ThreadKey { team: "T1".to_owned(), channel: "C1".to_owned(), thread: "1.0".to_owned() }
}

#[tokio::test]
async fn slack_member_is_removed_on_uninstall_and_resealed_once() {
    let database = Database::new().await;
    let store = database.store();
    let now = now();
    let member = |team: &str, nonce: u8| Member {
        team: team.to_owned(),
        slack_user: "U1".to_owned(),
        organization: ORG,
        user: "user_1".to_owned(),
        name: "Ann".to_owned(),
        key: SealedSecret { nonce: vec![nonce], ..sealed("old") },
    };
    assert_eq!(store.slack_member("T1", "U1").await.expect("it answers"), None);
    for new in [member("T1", 1), member("T1", 2), member("T2", 3)] {
        store.slack_member_put(&new, now).await.expect("it is put");
    }
    assert_eq!(store.slack_member("T1", "U1").await.expect("it answers"), Some(member("T1", 2)));
    let found = store.slack_members_sealed_with_other_keys("new", 10).await.expect("it answers");
    assert_eq!(found, [member("T1", 2), member("T2", 3)]);
    // The user was linked again since the first read.
    assert!(
        !store.slack_member_reseal(&member("T1", 1), &sealed("new")).await.expect("it answers")
    );
    assert!(store.slack_member_reseal(&found[0], &sealed("new")).await.expect("it answers"));
    assert_eq!(
        store.slack_members_sealed_with_other_keys("new", 10).await.expect("it answers"),
        [member("T2", 3)]
    );

    store.slack_install(&installation(), now).await.expect("it is installed");
    assert!(store.slack_uninstall("T1", now, now).await.expect("it is removed"));
    assert_eq!(store.slack_member("T1", "U1").await.expect("it answers"), None);
    assert!(store.slack_member_remove("T2", "U1").await.expect("it is removed"));
    assert!(!store.slack_member_remove("T2", "U1").await.expect("it answers"));
}
