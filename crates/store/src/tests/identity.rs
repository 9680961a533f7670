//! Users, organizations and API keys.

use construct_domain::{
    ApiKeyId, InvitationId, OrganizationId, UserId,
    access::{Role, Scope},
};
use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use crate::{
    Error, Limits, NewEvent, Page, Store, Write, WriteOutcome, WriteOutput,
    identity::{
        ApiKey, Member, NewApiKey, NewInvitation, NewOrganization, NewSetupCode, Profile,
        SecretHash,
    },
    testing::Database,
};

fn now() -> Timestamp {
    "2026-11-22T12:00:00Z".parse().expect("a time")
}

fn later(seconds: i64) -> Timestamp {
    now() + SignedDuration::from_secs(seconds)
}

fn write(organization: OrganizationId) -> Write {
    Write::new(organization, now())
}

fn silent<T>(_: &T) -> WriteOutput {
    WriteOutput {
        event: NewEvent { kind: String::new(), payload: Vec::new(), step: None },
        response: Vec::new(),
    }
}

fn entity<T>(written: WriteOutcome<T>) -> T {
    match written {
        WriteOutcome::Applied { entity, event: None } => entity,
        _ => panic!("it is done by this call, and tells nobody"),
    }
}

fn profile(subject: &str, verified: bool) -> Profile {
    Profile {
        issuer: "https://issuer".into(),
        subject: subject.into(),
        email: format!("{subject}@example.com"),
        email_verified: verified,
        name: subject.into(),
    }
}

async fn person(store: &Store, subject: &str) -> UserId {
    store.user_sign_in(&profile(subject, true), None, now()).await.expect("they are taken in").0
}

async fn team(store: &Store, owner: UserId) -> OrganizationId {
    let id = OrganizationId::from_uuid(Uuid::now_v7());
    let new = NewOrganization {
        id,
        name: "Team".into(),
        slug: "team".into(),
        avatar_url: String::new(),
        owner,
    };
    store
        .organization_create(&write(OrganizationId::LOCAL), new, None, None, silent)
        .await
        .expect("it is made");
    id
}

/// Invites a user and signs them in.
async fn joined(store: &Store, organization: OrganizationId, subject: &str, role: Role) -> UserId {
    invite(store, organization, subject, role).await.expect("they are invited");
    person(store, subject).await
}

async fn invite(
    store: &Store,
    organization: OrganizationId,
    subject: &str,
    role: Role,
) -> Result<(), Error> {
    let new = NewInvitation {
        id: InvitationId::from_uuid(Uuid::now_v7()),
        email: format!("{subject}@example.com"),
        role,
        invited_by: "test".into(),
        expires_at: later(60),
    };
    store.invitation_create(&write(organization), new, silent).await.map(drop)
}

fn secret(number: u8) -> SecretHash {
    SecretHash { prefix: format!("ct_{number}"), hash: [number; 32] }
}

#[tokio::test]
async fn owners_removing_each_other_leave_one_owner() {
    let database = Database::new().await;
    let store = database.store();
    let ada = person(&store, "ada").await;
    let organization = team(&store, ada).await;
    let bob = joined(&store, organization, "bob", Role::Owner).await;
    for _ in 0..10 {
        let write = write(organization);
        let (one, other) = tokio::join!(
            store.member_update(&write, (ada, Role::Viewer), Role::Owner, None, silent),
            store.member_remove(&write, bob, Role::Owner, silent),
        );
        let failed: Vec<Error> = [one.err(), other.err()].into_iter().flatten().collect();
        assert!(matches!(failed.as_slice(), [Error::LastOwner]), "{failed:?}");
        let members = store
            .member_list(organization, &Page { limit: 10, order: Default::default(), after: None })
            .await;
        let owners: Vec<Member> = members
            .expect("read")
            .into_iter()
            .filter(|member| member.role == Role::Owner)
            .collect();
        assert_eq!(owners.len(), 1);
        // Restore the state for the next round.
        if owners[0].user == ada {
            joined(&store, organization, "bob", Role::Owner).await;
        } else {
            let back =
                store.member_update(&write, (ada, Role::Owner), Role::Owner, None, silent).await;
            entity(back.expect("an owner may"));
        }
    }
}

#[tokio::test]
async fn invitation_is_accepted_once_by_a_verified_address_in_time() {
    let database = Database::new().await;
    let store = database.store();
    let organization = team(&store, person(&store, "ada").await).await;
    invite(&store, organization, "bob", Role::Member).await.expect("he is invited");
    assert!(matches!(
        invite(&store, organization, "bob", Role::Admin).await,
        Err(Error::AlreadyExists { .. })
    ));
    let (bob, _) = store.user_sign_in(&profile("bob", false), None, now()).await.expect("taken in");
    assert_eq!(
        store.user_role(bob, organization).await.expect("read"),
        None,
        "anybody can claim an address"
    );
    store.user_sign_in(&profile("bob", true), None, later(60)).await.expect("taken in");
    assert_eq!(store.user_role(bob, organization).await.expect("read"), None, "it has expired");
    store.user_sign_in(&profile("bob", true), None, later(59)).await.expect("taken in");
    assert_eq!(store.user_role(bob, organization).await.expect("read"), Some(Role::Member));
    // An existing member keeps their role.
    invite(&store, organization, "bob", Role::Owner).await.expect("he is invited");
    store.user_sign_in(&profile("bob", true), None, now()).await.expect("taken in");
    assert_eq!(store.user_role(bob, organization).await.expect("read"), Some(Role::Member));
}

#[tokio::test]
async fn sign_in_keeps_profile_fields_missing_from_the_token() {
    let database = Database::new().await;
    let store = database.store();
    let ada = person(&store, "ada").await;
    let mut access = profile("ada", false);
    (access.email, access.name) = (String::new(), String::new());
    store.user_sign_in(&access, None, now()).await.expect("taken in");
    let known = store.user_get(ada).await.expect("read");
    assert_eq!(
        (known.email.as_str(), known.email_verified, known.name.as_str()),
        ("ada@example.com", true, "ada")
    );
    // An address that is no longer verified is stored as unverified.
    store.user_sign_in(&profile("ada", false), None, now()).await.expect("taken in");
    assert!(!store.user_get(ada).await.expect("read").email_verified);
}

#[tokio::test]
async fn concurrent_sign_ins_create_one_personal_organization() {
    let database = Database::new().await;
    let store = database.store();
    let profile = profile("ada", true);
    let come = || store.user_sign_in(&profile, None, now());
    let (a, b, c, d) = tokio::join!(come(), come(), come(), come());
    let first = a.expect("taken in");
    for other in [b, c, d] {
        assert_eq!(other.expect("taken in"), first);
    }
    let page = Page { limit: 10, order: Default::default(), after: None };
    let owned = store.organization_list(first.0, &page).await.expect("read");
    assert_eq!(owned.iter().map(|owned| owned.id).collect::<Vec<_>>(), [first.1]);
    let closed = store.organization_delete(&write(first.1), first.1, silent).await;
    assert!(matches!(closed, Err(Error::PermanentOrganization)));
}

#[tokio::test]
async fn key_use_is_recorded_once_a_minute_and_invalid_key_refused() {
    let database = Database::new().await;
    let store = database.store();
    let ada = person(&store, "ada").await;
    let organization = team(&store, ada).await;
    let new = NewApiKey {
        id: ApiKeyId::from_uuid(Uuid::now_v7()),
        name: "k".into(),
        secret: secret(1),
        role: Role::Admin,
        scopes: vec![Scope::TasksRead],
        user: ada,
        expires_at: Some(later(3600)),
        limits: Limits { tasks_per_day: Some(7), ..Limits::default() },
    };
    let key = store.api_key_create(&write(organization), new).await.expect("it is made");
    let used = async || {
        let page = Page { limit: 10, order: Default::default(), after: None };
        let keys: Vec<ApiKey> = store.api_key_list(organization, None, &page).await.expect("read");
        keys[0].last_used_at
    };
    for (at, noted) in [(0, 0), (59, 0), (60, 60), (61, 60), (3599, 3599)] {
        let holder =
            store.api_key_holder(&[1; 32], later(at)).await.expect("read").expect("it is valid");
        assert_eq!((holder.key, holder.role), (key.id, Role::Admin));
        assert_eq!(used().await, Some(later(noted)), "after {at} s");
    }
    assert_eq!(store.api_key_holder(&[1; 32], later(3600)).await.expect("read"), None);
    assert_eq!(store.api_key_holder(&[2; 32], now()).await.expect("read"), None);
    let other = OrganizationId::LOCAL;
    let strange = store.api_key_revoke(&write(other), key.id, None, Role::Owner, silent).await;
    assert!(matches!(strange, Err(Error::NotFound { .. })));
    let above =
        store.api_key_revoke(&write(organization), key.id, None, Role::Member, silent).await;
    assert!(matches!(above, Err(Error::InsufficientRole)));
    assert!(
        store.api_key_holder(&[1; 32], now()).await.expect("read").is_some(),
        "it was rolled back"
    );
    store
        .api_key_revoke(&write(organization), key.id, Some(ada), Role::Owner, silent)
        .await
        .expect("hers");
    assert_eq!(store.api_key_holder(&[1; 32], now()).await.expect("read"), None);
}

#[tokio::test]
async fn setup_code_is_exchanged_once_before_it_expires() {
    let database = Database::new().await;
    let store = database.store();
    let code = |number, expires_at| NewSetupCode {
        made_by: None,
        secret: secret(number),
        name: "laptop".into(),
        role: Role::Viewer,
        scopes: vec![Scope::TasksRead],
        user: UserId::LOCAL,
        key_expires_at: None,
        expires_at,
        limits: Limits { runs_per_day: Some(3), ..Limits::default() },
    };
    let local = write(OrganizationId::LOCAL);
    store.setup_code_create(&local, &code(1, later(60))).await.expect("it is made");
    let exchange = async |code: u8, key: u8, at| {
        let id = ApiKeyId::from_uuid(Uuid::now_v7());
        store
            .setup_code_exchange(&[code; 32], id, &secret(key), None, at)
            .await
            .expect("it is tried")
    };
    assert_eq!(exchange(1, 10, later(60)).await, None, "too late");
    let (a, b, c) =
        tokio::join!(exchange(1, 11, now()), exchange(1, 12, now()), exchange(1, 13, now()));
    let made: Vec<_> = [a, b, c].into_iter().flatten().collect();
    assert_eq!(made.len(), 1);
    assert_eq!(
        made[0].limits.runs_per_day,
        Some(3),
        "the key has the limits that the code was made with"
    );
    assert_eq!(exchange(1, 14, now()).await, None);
    assert_eq!(exchange(9, 15, now()).await, None);
    // A code ends with the key that created it, and with the user it acts for.
    let ada = person(&store, "ada").await;
    let organization = team(&store, person(&store, "eve").await).await;
    joined(&store, organization, "ada", Role::Admin).await;
    let new = NewApiKey {
        id: ApiKeyId::from_uuid(Uuid::now_v7()),
        name: "k".into(),
        secret: secret(20),
        role: Role::Admin,
        scopes: vec![Scope::Admin],
        user: ada,
        expires_at: None,
        limits: Limits::default(),
    };
    let inside = write(organization);
    let key = store.api_key_create(&inside, new).await.expect("it is made");
    let hers = |number, made_by| NewSetupCode { user: ada, made_by, ..code(number, later(60)) };
    store.setup_code_create(&inside, &hers(2, Some(key.id))).await.expect("it is made");
    store.setup_code_create(&inside, &hers(3, None)).await.expect("it is made");
    store.api_key_revoke(&inside, key.id, None, Role::Owner, silent).await.expect("it is revoked");
    assert_eq!(exchange(2, 21, now()).await, None);
    store.member_remove(&inside, ada, Role::Owner, silent).await.expect("she is removed");
    joined(&store, organization, "ada", Role::Admin).await;
    assert_eq!(exchange(3, 22, now()).await, None, "who comes back does not find the old codes");
}

#[tokio::test]
async fn deleted_organization_refuses_writes() {
    let database = Database::new().await;
    let store = database.store();
    let ada = person(&store, "ada").await;
    let organization = team(&store, ada).await;
    store
        .organization_delete(&write(organization), organization, silent)
        .await
        .expect("it is closed");
    let code = NewSetupCode {
        made_by: None,
        secret: secret(1),
        name: "late".into(),
        role: Role::Viewer,
        scopes: vec![Scope::TasksRead],
        user: ada,
        key_expires_at: None,
        expires_at: later(60),
        limits: Limits::default(),
    };
    let late = store.setup_code_create(&write(organization), &code).await;
    assert!(matches!(late, Err(Error::NotFound { .. })), "{late:?}");
    let idempotency =
        crate::Idempotency { key: "late".into(), method: "UpdateMember", request_hash: [0; 32] };
    let keyed = Write { idempotency: Some(idempotency), ..write(organization) };
    let late = store.member_update(&keyed, (ada, Role::Owner), Role::Owner, None, silent).await;
    assert!(matches!(late, Err(Error::NotFound { .. })), "{late:?}");
}
