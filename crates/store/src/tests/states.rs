//! Documents that clients store: each change is a version, no change overwrites another unnoticed,
//! and personal documents are private.

use construct_domain::{
    UserId,
    access::Role,
    state::{NAMES, VERSIONS_KEPT},
};
use futures::future::join_all;

use super::*;
use crate::{State, StateContent, StateRef, identity::Profile};

const SHARED: StateRef<'static> = StateRef { owner: None, name: "settings" };
const OWN: StateRef<'static> = StateRef { owner: Some(UserId::LOCAL), name: "settings" };

async fn put(
    store: &Store,
    state: StateRef<'_>,
    json: &str,
    expected: Option<i64>,
) -> Result<State, Error> {
    put_by(store, &write(), state, json, expected).await
}

async fn put_by(
    store: &Store,
    write: &Write,
    state: StateRef<'_>,
    json: &str,
    expected: Option<i64>,
) -> Result<State, Error> {
    let written = store
        .state_put(write, state, (StateContent::Text(json), "ada"), expected, rendered("state.put"))
        .await?;
    let (state, event) = applied_with_event(written);
    assert_eq!(
        event, None,
        "whose documents change is not for everybody who may watch the organization"
    );
    Ok(state)
}

async fn delete(
    store: &Store,
    state: StateRef<'_>,
    expected: Option<i64>,
    forget: bool,
) -> Result<State, Error> {
    store
        .state_delete(&write(), state, (expected, forget), "ada", rendered("state.deleted"))
        .await
        .map(applied)
}

async fn get(store: &Store, state: StateRef<'_>) -> Result<(i64, String), Error> {
    store.state_get(ORG, state, None).await.map(|found| (found.version, found.json))
}

async fn versions(store: &Store, state: StateRef<'_>) -> Vec<i64> {
    let found = store.state_versions(ORG, state).await.expect("there are some");
    found.into_iter().map(|state| state.version).collect()
}

fn outdated(result: Result<State, Error>) -> i64 {
    match result {
        Err(Error::VersionMismatch { current }) => current,
        other => panic!("it is not refused: {other:?}"),
    }
}

#[tokio::test]
async fn document_is_returned_verbatim_and_each_change_is_a_version() {
    let database = Database::new().await;
    let store = database.store();
    assert_not_found(store.state_get(ORG, OWN, None).await);
    // Numbers beyond a double, duplicate keys, white space: all must be preserved.
    let first = "{ \"n\": 12345678901234567890.123456789012345678901234567890, \"a\": 1, \"a\": \"\\u0000\" }\n";
    let made = put(&store, OWN, first, Some(0)).await.expect("there is none yet");
    assert_eq!(
        (made.version, made.bytes, made.json.as_str(), made.updated_by.as_str()),
        (1, 84, "", "ada")
    );
    assert_eq!(get(&store, OWN).await.expect("it is there"), (1, first.to_owned()));
    let second = put(&store, OWN, "{}", Some(1)).await.expect("nobody was faster");
    assert_eq!(second.version, 2);
    assert_eq!(
        put(&store, OWN, "{}", None).await.expect("it says the same").version,
        2,
        "nothing changed"
    );
    let before = store.state_get(ORG, OWN, Some(1)).await.expect("it is kept");
    assert_eq!((before.json.as_str(), before.version), (first, 1));
    assert_eq!(store.state_get(ORG, OWN, Some(2)).await.expect("the present one").json, "{}");
    assert_not_found(store.state_get(ORG, OWN, Some(3)).await);
    assert!(!format!("{before:?}").contains("12345"), "{before:?}");
}

#[tokio::test]
async fn put_with_stale_version_fails_with_the_current_one() {
    let database = Database::new().await;
    let store = database.store();
    assert_eq!(outdated(put(&store, SHARED, "{}", Some(1)).await), 0);
    put(&store, SHARED, "{}", Some(0)).await.expect("there is none");
    assert_eq!(outdated(put(&store, SHARED, "{\"a\": 1}", Some(0)).await), 1);
    assert_eq!(outdated(put(&store, SHARED, "{}", Some(7)).await), 1, "also when it says the same");
    assert_eq!(outdated(delete(&store, SHARED, Some(2), false).await), 1);
    assert_eq!(get(&store, SHARED).await.expect("it is as it was"), (1, "{}".to_owned()));

    // Of many writers that read the same version one succeeds; the same for the first version.
    for expected in [1, 0] {
        let state = StateRef { name: if expected == 0 { "pinned" } else { "settings" }, ..SHARED };
        let texts: Vec<String> = (1..=8).map(|number| format!("{{\"by\": {number}}}")).collect();
        let all = join_all(texts.iter().map(|text| put(&store, state, text, Some(expected)))).await;
        let won: Vec<_> = all.iter().filter(|result| result.is_ok()).collect();
        assert_eq!(won.len(), 1, "{all:?}");
        let mut lost = all.into_iter().filter(Result::is_err).map(outdated);
        assert!(lost.all(|current| current == expected + 1));
    }
    // Writers without an expected version are serialized, and no write is lost.
    let texts: Vec<String> = (1..=8).map(|number| format!("{{\"and\": {number}}}")).collect();
    let all = join_all(texts.iter().map(|text| put(&store, SHARED, text, None))).await;
    let mut numbers: Vec<_> =
        all.into_iter().map(|done| done.expect("it is put").version).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (3..=10).collect::<Vec<_>>());
}

#[tokio::test]
async fn only_the_newest_versions_are_kept() {
    let database = Database::new().await;
    let store = database.store();
    let kept = i64::from(VERSIONS_KEPT);
    for number in 1..=kept + 5 {
        put(&store, SHARED, &format!("{{\"n\": {number}}}"), None).await.expect("it is put");
    }
    assert_eq!(versions(&store, SHARED).await, (5..=kept + 5).rev().collect::<Vec<_>>());
    let oldest = store.state_get(ORG, SHARED, Some(5)).await.expect("it is kept");
    assert_eq!(oldest.json, "{\"n\": 5}");
    assert_not_found(store.state_get(ORG, SHARED, Some(4)).await);
    // Other documents are unchanged.
    put(&store, OWN, "{}", None).await.expect("it is put");
    assert_eq!(versions(&store, OWN).await, [1]);
}

#[tokio::test]
async fn deleted_document_is_restorable_and_versions_never_repeat() {
    let database = Database::new().await;
    let store = database.store();
    assert_not_found(delete(&store, OWN, None, false).await);
    put(&store, OWN, "{\"a\": 1}", None).await.expect("it is put");
    let gone = delete(&store, OWN, Some(1), false).await.expect("it is deleted");
    assert_eq!((gone.version, gone.is_deleted, gone.bytes), (2, true, 0));
    assert_not_found(store.state_get(ORG, OWN, None).await);
    assert_not_found(delete(&store, OWN, None, false).await);
    assert!(store.state_list(ORG, OWN.owner).await.expect("read").is_empty());
    assert_eq!(versions(&store, OWN).await, [1]);
    let back = store.state_get(ORG, OWN, Some(1)).await.expect("it is kept").json;
    assert_eq!(put(&store, OWN, &back, Some(0)).await.expect("there is none").version, 3);
    assert_eq!(versions(&store, OWN).await, [3, 1]);

    let gone = delete(&store, OWN, None, true).await.expect("it is forgotten");
    assert_eq!(gone.version, 4);
    assert_not_found(store.state_versions(ORG, OWN).await);
    assert_not_found(delete(&store, OWN, None, true).await);
    // The versions of a deleted document can be deleted later.
    put(&store, OWN, "{}", None).await.expect("it is put");
    delete(&store, OWN, None, false).await.expect("it is deleted");
    delete(&store, OWN, None, true).await.expect("it is forgotten");
    assert_not_found(store.state_versions(ORG, OWN).await);
}

#[tokio::test]
async fn personal_documents_are_private_and_go_with_their_member() {
    let database = Database::new().await;
    let store = database.store();
    let profile = Profile {
        issuer: "https://test".into(),
        subject: "bob".into(),
        email: "bob@example.com".into(),
        email_verified: true,
        name: "bob".into(),
    };
    let (bob, _) = store.user_sign_in(&profile, None, now()).await.expect("he is taken in");
    let bobs = StateRef { owner: Some(bob), ..OWN };
    assert_not_found(put(&store, bobs, "{}", None).await);
    let member = "INSERT INTO members (organization_id, user_id, role, created_at, updated_at) VALUES ($1, $2, 'member', now(), now())";
    let member = sqlx::query(member).bind(ORG.uuid()).bind(bob.uuid()).execute(&store.pool);
    member.await.expect("he is a member");
    let other = other_organization(&store).await;
    for (state, text) in
        [(SHARED, "{\"of\": \"all\"}"), (OWN, "{\"of\": \"ada\"}"), (bobs, "{\"of\": \"bob\"}")]
    {
        put(&store, state, text, Some(0)).await.expect("each is another one");
        put(&store, StateRef { name: "pinned", ..state }, "{}", Some(0))
            .await
            .expect("each is another one");
    }
    let elsewhere = Write::new(other, now());
    put_by(&store, &elsewhere, SHARED, "{\"of\": \"others\"}", Some(0))
        .await
        .expect("it is theirs");
    for (state, text) in
        [(SHARED, "{\"of\": \"all\"}"), (OWN, "{\"of\": \"ada\"}"), (bobs, "{\"of\": \"bob\"}")]
    {
        assert_eq!(get(&store, state).await.expect("it is there"), (1, text.to_owned()));
        let listed = store.state_list(ORG, state.owner).await.expect("read");
        assert_eq!(
            listed.iter().map(|state| state.name.as_str()).collect::<Vec<_>>(),
            ["pinned", "settings"]
        );
        assert!(listed.iter().all(|listed| listed.json.is_empty() && listed.owner == state.owner));
    }
    put(&store, bobs, "{\"of\": \"bob\", \"again\": true}", None).await.expect("it is put");

    store
        .member_remove(&write(), bob, Role::Owner, rendered("member.removed"))
        .await
        .expect("he leaves");
    let left: i64 = sqlx::query_scalar(
        "SELECT (SELECT count(*) FROM states WHERE owner = $1) + (SELECT count(*) FROM state_versions WHERE version = 1)",
    )
    .bind(bob.uuid())
    .fetch_one(&store.pool)
    .await
    .expect("counted");
    assert_eq!(left, 0);
    assert_eq!(store.state_list(ORG, None).await.expect("read").len(), 2);
}

#[tokio::test]
async fn state_changes_returns_documents_with_other_versions() {
    let database = Database::new().await;
    let store = database.store();
    let changes = async |known: &[(&'static str, i64)]| {
        let found = store.state_changes(ORG, None, known).await.expect("read");
        found.into_iter().map(|state| (state.name, state.version, state.json)).collect::<Vec<_>>()
    };
    let nothing: Vec<_> = NAMES.iter().map(|name| (*name, 0)).collect();
    assert!(changes(&nothing).await.is_empty());
    put(&store, SHARED, "{\"a\": 1}", None).await.expect("it is put");
    put(&store, OWN, "{\"mine\": 1}", None).await.expect("it is put");
    let settings = |version, json: &str| vec![("settings".to_owned(), version, json.to_owned())];
    assert_eq!(changes(&nothing).await, settings(1, "{\"a\": 1}"));
    assert!(changes(&[("settings", 1)]).await.is_empty());
    assert!(changes(&[("pinned", 0)]).await.is_empty(), "nobody asks for it");
    delete(&store, SHARED, None, false).await.expect("it is deleted");
    assert_eq!(changes(&[("settings", 1)]).await, settings(2, ""));
    assert!(changes(&nothing).await.is_empty(), "who has nothing need not be told that it is gone");
    put(&store, SHARED, "{\"a\": 2}", None).await.expect("it is put");
    assert_eq!(changes(&[("settings", 1)]).await, settings(3, "{\"a\": 2}"));
    // After the restore of an older backup.
    assert_eq!(changes(&[("settings", 9)]).await, settings(3, "{\"a\": 2}"));
}

#[tokio::test]
async fn repeated_put_returns_the_first_response() {
    let database = Database::new().await;
    let store = database.store();
    let put = async |text: &str| {
        let write = write_with_key("k", 1);
        store
            .state_put(
                &write,
                SHARED,
                (StateContent::Text(text), "ada"),
                Some(0),
                rendered("state.put"),
            )
            .await
            .expect("it is answered")
    };
    let first = applied(put("{}").await);
    let WriteOutcome::Repeated { response } = put("{}").await else { panic!("it is done twice") };
    assert_eq!(response, format!("{first:?}").into_bytes());
    assert_eq!(versions(&store, SHARED).await, [1]);
}

#[tokio::test]
async fn state_changes_reports_removed_documents_as_version_zero() {
    let database = Database::new().await;
    let store = database.store();
    put(&store, SHARED, "{}", None).await.expect("it is put");
    put(&store, StateRef { name: "pinned", ..SHARED }, "{}", None).await.expect("it is put");
    // Like a member who was removed and joined again.
    sqlx::query("DELETE FROM states WHERE name = 'settings'")
        .execute(&store.pool)
        .await
        .expect("it is gone");
    let known = [("pinned", 1), ("settings", 7), ("storage", 0)];
    let found = store.state_changes(ORG, None, &known).await.expect("read");
    let [gone] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(
        (gone.name.as_str(), gone.version, gone.is_deleted, gone.updated_at),
        ("settings", 0, true, None)
    );
    // A new document starts at version 1, below the known version.
    put(&store, SHARED, "{\"n\": 1}", Some(0)).await.expect("it is put");
    let found = store.state_changes(ORG, None, &known).await.expect("read");
    let [back] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(
        (back.name.as_str(), back.version, back.json.as_str()),
        ("settings", 1, "{\"n\": 1}")
    );
}

#[tokio::test]
async fn restoring_an_earlier_version_is_idempotent() {
    let database = Database::new().await;
    let store = database.store();
    for text in ["{\"n\": 1}", "{\"n\": 2}"] {
        put(&store, SHARED, text, None).await.expect("it is put");
    }
    let restore = async |write: &Write, version| {
        store
            .state_put(
                write,
                SHARED,
                (StateContent::Version(version), "ada"),
                None,
                rendered("state.put"),
            )
            .await
    };
    let keyed = write_with_key("back", 1);
    let back = applied(restore(&keyed, 1).await.expect("it is kept"));
    assert_eq!(
        (back.version, get(&store, SHARED).await.expect("there")),
        (3, (3, "{\"n\": 1}".to_owned()))
    );
    put(&store, SHARED, "{\"n\": 4}", None).await.expect("it is put");
    let WriteOutcome::Repeated { response } = restore(&keyed, 1).await.expect("answered") else {
        panic!("it is done twice")
    };
    assert_eq!(response, format!("{back:?}").into_bytes());
    assert_eq!(get(&store, SHARED).await.expect("there"), (4, "{\"n\": 4}".to_owned()));
    assert_eq!(
        applied(restore(&write(), 4).await.expect("it says that")).version,
        4,
        "it changes nothing"
    );
    assert_not_found(restore(&write(), 9).await);
    delete(&store, SHARED, None, true).await.expect("it is forgotten");
    assert_not_found(restore(&write(), 1).await);
}

#[tokio::test]
async fn state_growth_subtracts_the_dropped_version() {
    let database = Database::new().await;
    let store = database.store();
    let kept = async || {
        let periods = crate::Periods::containing(now());
        store
            .quota_counts(ORG, crate::CountSelection::ALL, &periods)
            .await
            .expect("counted")
            .storage_bytes
    };
    let growth = async |content: StateContent<'_>| {
        store.state_growth(ORG, SHARED, content, None).await.expect("counted").bytes
    };
    for number in 0..VERSIONS_KEPT + 5 {
        // Different lengths distinguish the dropped version from the new one.
        let text = format!("{{\"n\": \"{}\"}}", "x".repeat(if number % 3 == 0 { 500 } else { 7 }));
        let (before, more) = (kept().await, growth(StateContent::Text(&text)).await);
        put(&store, SHARED, &text, None).await.expect("it is put");
        assert_eq!(kept().await - before, more, "{number}");
        assert_eq!(growth(StateContent::Text(&text)).await, 0, "the same again changes nothing");
    }
    let earlier = *versions(&store, SHARED).await.last().expect("some are kept");
    let (before, more) = (kept().await, growth(StateContent::Version(earlier)).await);
    let back = (StateContent::Version(earlier), "ada");
    applied(
        store
            .state_put(&write(), SHARED, back, None, rendered("state.put"))
            .await
            .expect("it is put"),
    );
    assert_eq!(kept().await - before, more);
    // A put after a deletion drops no version, because it replaces none.
    delete(&store, SHARED, None, false).await.expect("it is deleted");
    let (before, more) = (kept().await, growth(StateContent::Text("{}")).await);
    put(&store, SHARED, "{}", None).await.expect("it is put");
    assert_eq!((kept().await - before, more), (2, 2));
}
