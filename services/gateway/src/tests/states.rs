//! Documents that clients store: their owners, their events, and who receives these.

use std::collections::{BTreeMap, BTreeSet};

use construct_domain::{
    OrganizationId, UserId,
    access::{Role, Scope},
};
use construct_proto::v1::{self, state_service_client::StateServiceClient};
use construct_store::{AuditFilter, Key, Order, Page, Stream};
use prost::Message as _;
use tonic::{Code, Streaming, transport::Channel};
use tonic_types::StatusExt as _;

use super::{
    entities::contains,
    harness::*,
    walk::{create_key, login_required, with_key},
};

const JSON: &str = "{\"providers\": {\"apiKey\": \"sk-hunter2\"}}";

fn states(gateway: &Gateway) -> StateServiceClient<Channel> {
    StateServiceClient::new(gateway.channel())
}

fn put(state: &str, json: &str) -> v1::PutStateRequest {
    v1::PutStateRequest { state: state.into(), json: json.into(), ..v1::PutStateRequest::default() }
}

fn get(state: &str, shared: bool) -> v1::GetStateRequest {
    v1::GetStateRequest { state: state.into(), shared, version: 0 }
}

/// The next `count` changes.
async fn next_changes(stream: &mut Streaming<v1::StateEvent>, count: usize) -> Vec<v1::StateEvent> {
    let mut events = Vec::new();
    while events.len() < count {
        let next = wait_for("a change", stream.message()).await;
        events.push(
            next.unwrap_or_else(|status| panic!("{status:?}, after {events:?}"))
                .expect("the stream continues"),
        );
    }
    events
}

fn ids(events: &[v1::StateEvent]) -> Vec<String> {
    events.iter().map(|event| event.state.clone().expect("it has one").id).collect()
}

#[tokio::test]
async fn document_content_appears_only_in_its_own_answers() {
    let gateway = Gateway::start().await;
    let mut client = states(&gateway);
    let request = v1::PutStateRequest {
        idempotency_key: "once".into(),
        expected_version: Some(0),
        ..put("settings", JSON)
    };
    let made = client.put_state(request.clone()).await.expect("it is put").into_inner();
    assert_eq!((made.id.as_str(), made.version, made.json.as_str()), ("settings@1", 1, ""));
    assert_eq!(
        (made.updated_by.as_str(), made.bytes),
        ("local", i64::try_from(JSON.len()).expect("few"))
    );
    let again = client.put_state(request.clone()).await.expect("it is repeated").into_inner();
    assert_eq!(made, again);
    let got = client.get_state(get("settings", false)).await.expect("it is there").into_inner();
    assert_eq!(got, v1::State { json: JSON.into(), ..made });
    expect_error(client.get_state(get("settings", true)).await, Code::NotFound);

    // A version conflict names the current version.
    let late = v1::PutStateRequest { expected_version: Some(7), ..put("settings", "{}") };
    let status = expect_error(client.put_state(late).await, Code::Aborted);
    let details = status.get_error_details();
    let violation = &details.precondition_failure().expect("there is one").violations[0];
    assert_eq!((violation.r#type.as_str(), violation.description.as_str()), ("VERSION", "1"));
    let shared = v1::PutStateRequest { shared: true, ..put("settings", JSON) };
    client.put_state(shared.clone()).await.expect("the operator may");
    let delete = v1::DeleteStateRequest {
        state: "settings".into(),
        shared: true,
        ..v1::DeleteStateRequest::default()
    };
    client.delete_state(delete).await.expect("it is deleted");
    let versions = v1::ListStateVersionsRequest { state: "settings".into(), shared: true };
    let versions =
        client.list_state_versions(versions).await.expect("it is listed").into_inner().versions;
    assert_eq!(
        versions.iter().map(|state| (state.version, state.json.as_str())).collect::<Vec<_>>(),
        [(1, "")]
    );
    let earlier = v1::GetStateRequest { version: 1, ..get("settings", true) };
    assert_eq!(client.get_state(earlier).await.expect("it is kept").into_inner().json, JSON);

    // The audit trail has the name, whose document it was, and the version.
    let page =
        Page { limit: 100, order: Order { key: Key::CreatedAt, descending: false }, after: None };
    let trail =
        gateway.store().audit_list(OrganizationId::LOCAL, &AuditFilter::default(), &page).await;
    let trail = trail.expect("it is read");
    let objects: Vec<_> = trail
        .iter()
        .map(|entry| (entry.method.as_str(), entry.code, entry.objects.join(" ")))
        .collect();
    let entry = |method, code, objects: &str| (method, code, objects.to_owned());
    let (put, deleted) = ("StateService/PutState", "StateService/DeleteState");
    let expected = [
        entry(put, 0, "settings own settings@1"),
        entry(put, 10, "settings own"),
        entry(put, 0, "settings shared settings@1"),
        entry(deleted, 0, "settings shared"),
    ];
    for expected in &expected {
        assert!(objects.contains(expected), "{expected:?}: {objects:?}");
    }
    assert!(!format!("{trail:?}").contains("hunter2"));
    // The organization's event stream has nothing of documents.
    let events = gateway
        .store()
        .events_after(Stream::organization(OrganizationId::LOCAL), 0, 100, u64::MAX)
        .await;
    assert!(events.expect("read").is_empty());
    for shown in [format!("{shared:?}"), format!("{got:?}"), format!("{request:?}")] {
        assert!(!shown.contains("hunter2"), "{shown}");
    }
    let list = client
        .list_states(v1::ListStatesRequest { shared: false })
        .await
        .expect("listed")
        .into_inner();
    assert!(list.states.len() == 1 && !contains(&list.encode_to_vec(), "hunter2"));
}

#[tokio::test]
async fn members_have_own_documents_and_read_shared_ones() {
    let gateway = Gateway::start_with(login_required()).await;
    let mut client = states(&gateway);
    let profile = construct_store::identity::Profile {
        issuer: "https://test".into(),
        subject: "bob".into(),
        email: "bob@example.com".into(),
        email_verified: true,
        name: "bob".into(),
    };
    let now = jiff::Timestamp::now();
    let (bob, _) =
        gateway.store().user_sign_in(&profile, None, now).await.expect("he is signed in");
    let member = format!(
        "INSERT INTO members (organization_id, user_id, role, created_at, updated_at) VALUES ('{}', '{}', 'owner', now(), now())",
        OrganizationId::LOCAL.uuid(),
        bob.uuid()
    );
    gateway.database.execute(&member).await;
    let mut keys = BTreeMap::new();
    for (name, user, role, scope) in [
        ("ada", UserId::LOCAL, Role::Admin, Scope::StatesWrite),
        ("reader", UserId::LOCAL, Role::Viewer, Scope::StatesRead),
        ("bob", bob, Role::Member, Scope::StatesWrite),
    ] {
        let local = (OrganizationId::LOCAL, user);
        keys.insert(name, create_key(&gateway, local, role, &[scope], None).await.1);
    }
    let mut write = async |user: &str, shared: bool, json: &str| {
        // The same idempotency key for all users, as one program would use it.
        let request = v1::PutStateRequest {
            shared,
            idempotency_key: format!("first-{shared}"),
            ..put("pinned", json)
        };
        client
            .put_state(with_key(request, Some(&keys[user])))
            .await
            .map(tonic::Response::into_inner)
    };
    write("ada", true, "{\"of\": \"all\"}").await.expect("an admin may");
    let status = expect_error(write("bob", true, "{}").await, Code::PermissionDenied);
    assert!(status.message().contains("`admin`"), "{status:?}");
    expect_error(write("reader", false, "{}").await, Code::PermissionDenied);
    let mut updated_by = BTreeSet::new();
    for user in ["ada", "bob"] {
        let made = write(user, false, "{}").await.expect("it is their own");
        assert_eq!((made.version, made.shared), (1, false));
        assert!(updated_by.insert(made.updated_by), "{user} got the answer of another user");
    }
    let mut client = states(&gateway);
    for user in ["ada", "bob"] {
        let own = put("pinned", &format!("{{\"of\": \"{user}\"}}"));
        client.put_state(with_key(own, Some(&keys[user]))).await.expect("it is their own");
    }
    for (user, own) in [("ada", "ada"), ("reader", "ada"), ("bob", "bob")] {
        for (shared, of) in [(true, "all"), (false, own)] {
            let got = client.get_state(with_key(get("pinned", shared), Some(&keys[user]))).await;
            let got =
                got.unwrap_or_else(|status| panic!("{user} {shared}: {status:?}")).into_inner();
            assert_eq!(got.json, format!("{{\"of\": \"{of}\"}}"), "{user}");
        }
    }
    let delete = |shared| v1::DeleteStateRequest {
        state: "pinned".into(),
        shared,
        ..v1::DeleteStateRequest::default()
    };
    expect_error(
        client.delete_state(with_key(delete(true), Some(&keys["bob"]))).await,
        Code::PermissionDenied,
    );

    // Changes of one user neither affect nor notify another.
    let watch =
        v1::WatchStatesRequest { cursor: "pinned@2".into(), ..v1::WatchStatesRequest::default() };
    let mut watched = client
        .watch_states(with_key(watch, Some(&keys["ada"])))
        .await
        .expect("it begins")
        .into_inner();
    client
        .put_state(with_key(put("storage", JSON), Some(&keys["bob"])))
        .await
        .expect("it is his own");
    client.delete_state(with_key(delete(false), Some(&keys["bob"]))).await.expect("it is his own");
    let listed = |user: &str| with_key(v1::ListStatesRequest { shared: false }, Some(&keys[user]));
    let versions = |user: &str| {
        let request = v1::ListStateVersionsRequest { state: "pinned".into(), shared: false };
        with_key(request, Some(&keys[user]))
    };
    for (user, names, kept) in [("ada", ["pinned"], vec![2, 1]), ("bob", ["storage"], vec![2, 1])] {
        let states = client.list_states(listed(user)).await.expect("listed").into_inner().states;
        assert_eq!(
            states.iter().map(|state| state.name.as_str()).collect::<Vec<_>>(),
            names,
            "{user}"
        );
        let states =
            client.list_state_versions(versions(user)).await.expect("listed").into_inner().versions;
        assert_eq!(states.iter().map(|state| state.version).collect::<Vec<_>>(), kept, "{user}");
    }
    let earlier = v1::GetStateRequest { version: 2, ..get("pinned", false) };
    let got = client
        .get_state(with_key(earlier, Some(&keys["ada"])))
        .await
        .expect("it is hers")
        .into_inner();
    assert_eq!(got.json, "{\"of\": \"ada\"}");
    client
        .put_state(with_key(put("designs", "{}"), Some(&keys["ada"])))
        .await
        .expect("it is her own");
    assert_eq!(ids(&next_changes(&mut watched, 1).await), ["designs@1"]);
}

#[tokio::test]
async fn watcher_gets_missed_and_then_new_versions() {
    let gateway = Gateway::start().await;
    let mut client = states(&gateway);
    client.put_state(put("settings", "{\"n\": 1}")).await.expect("it is put");
    client.put_state(put("storage", "{}")).await.expect("it is put");
    let watch = |states: &[&str], cursor: &str| v1::WatchStatesRequest {
        states: states.iter().map(|state| (*state).to_owned()).collect(),
        shared: false,
        cursor: cursor.into(),
    };
    let mut all = client.watch_states(watch(&[], "")).await.expect("it begins").into_inner();
    let first = next_changes(&mut all, 2).await;
    assert_eq!(ids(&first), ["settings@1", "storage@1"]);
    assert_eq!(first[0].state.as_ref().expect("set").json, "{\"n\": 1}");
    assert_eq!(
        (first[0].cursor.as_str(), first[1].cursor.as_str()),
        ("settings@1", "settings@1,storage@1")
    );
    let mut one = client
        .watch_states(watch(&["pinned"], &first[1].cursor))
        .await
        .expect("it begins")
        .into_inner();

    client.put_state(put("settings", "{\"n\": 2}")).await.expect("it is put");
    client
        .put_state(v1::PutStateRequest { shared: true, ..put("pinned", "{}") })
        .await
        .expect("it is put");
    let changed = next_changes(&mut all, 1).await;
    assert_eq!(ids(&changed), ["settings@2"]);
    client.put_state(put("pinned", "{\"mine\": true}")).await.expect("it is put");
    let pinned = next_changes(&mut one, 1).await;
    assert_eq!(ids(&pinned), ["pinned@1"]);
    assert!(!pinned[0].state.as_ref().expect("set").shared, "shared documents are a separate set");
    assert_eq!(ids(&next_changes(&mut all, 1).await), ["pinned@1"]);
    drop((all, one));

    // A client that reconnects gets each changed document once, and deletions.
    client.put_state(put("settings", "{\"n\": 3}")).await.expect("it is put");
    let delete =
        v1::DeleteStateRequest { state: "storage".into(), ..v1::DeleteStateRequest::default() };
    client.delete_state(delete).await.expect("it is deleted");
    let mut back =
        client.watch_states(watch(&[], &changed[0].cursor)).await.expect("it begins").into_inner();
    let missed = next_changes(&mut back, 3).await;
    assert_eq!(ids(&missed), ["pinned@1", "settings@3", "storage@2"]);
    let deleted = missed[2].state.as_ref().expect("set");
    assert!(deleted.deleted && deleted.json.is_empty());
    client.put_state(put("storage", "{}")).await.expect("it is put");
    assert_eq!(ids(&next_changes(&mut back, 1).await), ["storage@3"]);
    // A document that was erased is reported as deleted, as when a member was removed and joined
    // again.
    let mut ghost = client
        .watch_states(watch(&["designs"], "designs@7"))
        .await
        .expect("it begins")
        .into_inner();
    let deleted = next_changes(&mut ghost, 1).await;
    assert_eq!((ids(&deleted), deleted[0].cursor.as_str()), (vec!["designs@0".to_owned()], ""));
    assert!(deleted[0].state.as_ref().is_some_and(|state| state.deleted));
    client.put_state(put("designs", "{}")).await.expect("it is put");
    assert_eq!(ids(&next_changes(&mut ghost, 1).await), ["designs@1"]);
    let end = expect_error(client.watch_states(watch(&[], "7")).await, Code::InvalidArgument);
    assert_eq!(crate::validate::tests::fields(&end), ["cursor"]);
}

#[tokio::test]
async fn restored_version_and_repeated_request_are_answered() {
    let gateway = Gateway::start().await;
    let mut client = states(&gateway);
    for json in ["{\"n\": 1}", "{\"n\": 2}"] {
        client.put_state(put("settings", json)).await.expect("it is put");
    }
    let back =
        v1::PutStateRequest { restore: 1, idempotency_key: "back".into(), ..put("settings", "") };
    let first = client.put_state(back.clone()).await.expect("it is kept").into_inner();
    assert_eq!(first.version, 3);
    client.put_state(put("settings", "{\"n\": 4}")).await.expect("it is put");
    assert_eq!(client.put_state(back.clone()).await.expect("it is repeated").into_inner(), first);
    let now = client.get_state(get("settings", false)).await.expect("it is there").into_inner();
    assert_eq!((now.version, now.json.as_str()), (4, "{\"n\": 4}"));
    let nothing = v1::PutStateRequest { restore: 9, idempotency_key: String::new(), ..back };
    let status = expect_error(client.put_state(nothing.clone()).await, Code::NotFound);
    assert!(status.message().contains("settings@9"), "{status:?}");
    let both = v1::PutStateRequest { json: "{}".into(), ..nothing };
    let status = expect_error(client.put_state(both).await, Code::InvalidArgument);
    assert_eq!(crate::validate::tests::fields(&status), ["json"]);
}
