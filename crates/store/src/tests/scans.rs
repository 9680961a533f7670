//! Scans: one lease holder at a time, gapless events, reviews with revisions, one hand-over.

use std::time::Duration;

use construct_domain::{CandidateId, ScanConnectionId, ScanId};
use futures::future::join_all;
use secrecy::ExposeSecret as _;
use serde_json::json;

use super::*;
use crate::{
    Keyring, SealedSecret,
    scan::{
        CandidateState, HandOverResult, LeaseState, NewCandidate, NewScan, NewScanConnection,
        NewScanEvent, Review, Scan, ScanChanges, ScanConnection, ScanCredential, ScanHost,
        ScanKind, ScanLimits, ScanPhase,
    },
};

const LEASE: Duration = Duration::from_secs(10);

fn silent<T>(_: &T) -> WriteOutput {
    WriteOutput { event: event(""), response: Vec::new() }
}

pub(super) fn new(id: ScanId) -> NewScan {
    NewScan {
        id,
        kind: ScanKind::Github,
        location: "octo/ledger".into(),
        repository: "github:octo/ledger".into(),
        connection: None,
        archive: None,
        reference: String::new(),
        model: "m".into(),
        budget_pico_usd: 5,
        limits: ScanLimits { max_bytes: 0, max_files: 0, max_turns: 40, timeout_seconds: 60 },
        created_by: "local".into(),
        task: "task_1".into(),
        token: SealedSecret { key_id: "k".into(), nonce: vec![1], ciphertext: vec![2] },
        deadline: now() + Duration::from_secs(60),
    }
}

async fn create_scan(store: &Store) -> Scan {
    let written = store.scan_create(&write(), new(ScanId::from_uuid(Uuid::now_v7())), silent).await;
    match written.expect("it is made") {
        WriteOutcome::Applied { entity, .. } => entity,
        WriteOutcome::Repeated { .. } => panic!("it has no key"),
    }
}

fn write_at(at: Timestamp) -> Write {
    Write::new(ORG, at)
}

#[tokio::test]
async fn scan_has_one_lease_holder_and_gapless_events() {
    let database = Database::new().await;
    let store = database.store();
    let scan = create_scan(&store).await;
    let now = now();
    assert_eq!(
        store.scan_open_creator(ORG, scan.id).await.expect("it answers").as_deref(),
        Some("local")
    );
    let taken = join_all((0..8).map(|_| store.scans_claim(10, &[], LEASE, now))).await;
    let mut taken: Vec<_> =
        taken.into_iter().flat_map(|taken| taken.expect("it is taken")).collect();
    assert_eq!(taken.len(), 1);
    let mut first = taken.remove(0);
    assert_eq!(store.scans_claim(10, &[], LEASE, now).await.expect("it answers"), []);

    // Its holder has died: another process claims it, and the first one can no longer write.
    let later = now + LEASE;
    let mut second = store.scans_claim(10, &[], LEASE, later).await.expect("it is free").remove(0);
    assert_eq!(
        store.scan_extend_lease(&first, later + LEASE).await.expect("it answers"),
        LeaseState::Lost
    );
    assert!(matches!(
        store.scan_save(&mut first, &ScanChanges::default(), later).await,
        Err(Error::Conflict)
    ));
    let happened = |kind| NewScanEvent { kind, message: "a\0b".into(), tool_calls: 3 };
    second.phase = ScanPhase::Exploring;
    let changes = ScanChanges {
        events: vec![happened("phase"), happened("progress")],
        ..ScanChanges::default()
    };
    let events = store.scan_save(&mut second, &changes, later).await.expect("it is saved");
    assert_eq!(events.iter().map(|event| event.sequence).collect::<Vec<_>>(), [2, 3]);
    let told = store.scan_events(ORG, scan.id, 0, 10).await.expect("they are there");
    assert_eq!(told.iter().map(|event| event.sequence).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(told[1..], events[..]);

    // The lease holder learns of a cancel, and a waiting scan becomes due.
    second.next_wake = Some(later + LEASE * 100);
    store.scan_save(&mut second, &ScanChanges::default(), later).await.expect("it is saved");
    store.scan_cancel(&write_at(later), scan.id, "enough", silent).await.expect("it is asked for");
    assert_eq!(
        store.scan_extend_lease(&second, later).await.expect("it answers"),
        LeaseState::CancelRequested
    );
    assert_eq!(
        store.scans_claim(10, &[], LEASE, later).await.expect("it answers"),
        [],
        "its end is no work"
    );
    let mut third =
        store.scans_claim_waiting(10, LEASE, later).await.expect("it is taken").remove(0);
    assert_eq!((third.cancel_requested, third.cancel_reason.as_str()), (Some(later), "enough"));
    third.phase = ScanPhase::Cancelled;
    third.ended_at = Some(later);
    store
        .scan_save(&mut third, &ScanChanges { release: true, ..ScanChanges::default() }, later)
        .await
        .expect("it is over");
    let over = store.scan_get(ORG, scan.id).await.expect("it is there");
    assert_eq!((over.token, over.next_wake), (None, None));
    assert_eq!(store.scan_open_creator(ORG, scan.id).await.expect("it answers"), None);
    assert_eq!(store.scans_to_clean(later, 10).await.expect("it answers"), [(scan.id, None)]);
    store.scan_mark_cleaned(scan.id, later).await.expect("it is noted");
    assert_eq!(store.scans_with_files(&[scan.id]).await.expect("it answers"), []);
    assert!(matches!(
        store.scan_get(OrganizationId::from_uuid(Uuid::max()), scan.id).await,
        Err(Error::NotFound { .. })
    ));
}

#[tokio::test]
async fn candidates_are_reviewed_by_revision_and_handed_over_once() {
    let database = Database::new().await;
    let store = database.store();
    let scan = create_scan(&store).await;
    let now = now();
    let mut held = store.scans_claim(1, &[], LEASE, now).await.expect("it is taken").remove(0);
    let candidate = |name: &str, score| NewCandidate {
        id: CandidateId::from_uuid(Uuid::now_v7()),
        name: name.into(),
        score,
        content: json!({"name": name}),
    };
    let candidates = vec![candidate("a", 10), candidate("b", 90)];
    let ids: Vec<_> = candidates.iter().map(|candidate| candidate.id).collect();
    held.phase = ScanPhase::Review;
    let changes =
        ScanChanges { candidates, manifest: Some("1 a\n".into()), ..ScanChanges::default() };
    store.scan_save(&mut held, &changes, now).await.expect("it is saved");
    assert_eq!(store.scan_manifest(ORG, scan.id).await.expect("it is there"), "1 a\n");
    let listed = store.candidate_list(ORG, scan.id, None).await.expect("they are there");
    assert_eq!(listed.iter().map(|candidate| candidate.id).collect::<Vec<_>>(), [ids[1], ids[0]]);

    let review = |state, content| Review { state, content, by: "ann".into() };
    let accepted = review(Some(CandidateState::Accepted), None);
    store
        .candidate_review(&write_at(now), ids[0], Some(1), accepted.clone(), silent)
        .await
        .expect("it is accepted");
    let stale =
        store.candidate_review(&write_at(now), ids[0], Some(1), accepted.clone(), silent).await;
    assert!(matches!(stale, Err(Error::Conflict)));
    let renamed = review(None, Some(("b".into(), 10, json!({"name": "b"}))));
    let taken = store.candidate_review(&write_at(now), ids[0], None, renamed, silent).await;
    assert!(matches!(taken, Err(Error::AlreadyExists { .. })));

    let hand_over = |named: Vec<CandidateId>| {
        let store = store.clone();
        async move { store.candidates_hand_over(&write_at(now), scan.id, &named, "ann", silent).await }
    };
    assert!(matches!(hand_over(vec![ids[1]]).await, Err(Error::NotAccepted)));
    assert!(matches!(
        hand_over(vec![CandidateId::from_uuid(Uuid::now_v7())]).await,
        Err(Error::NotFound { .. })
    ));
    let handed = join_all((0..4).map(|_| hand_over(Vec::new()))).await;
    let handed: Vec<HandOverResult> = handed
        .into_iter()
        .map(|written| match written.expect("it is handed over") {
            WriteOutcome::Applied { entity, .. } => entity,
            WriteOutcome::Repeated { .. } => panic!("it has no key"),
        })
        .collect();
    assert_eq!(handed.iter().filter(|handed| handed.id.is_some()).count(), 1);
    assert_eq!(handed.iter().map(|handed| handed.candidates.len()).sum::<usize>(), 1);
    let late = store.candidate_review(&write_at(now), ids[0], None, accepted, silent).await;
    assert!(matches!(late, Err(Error::HandedOver)));

    let later = now + Duration::from_secs(60);
    let untold = store.hand_overs_unpublished(later, 10).await.expect("it answers");
    assert_eq!(untold.iter().map(|untold| untold.candidates[0].id).collect::<Vec<_>>(), [ids[0]]);
    store.hand_over_mark_published(untold[0].id, later).await.expect("it is noted");
    assert_eq!(store.hand_overs_unpublished(later, 10).await.expect("it answers"), []);
}

#[tokio::test]
async fn open_scans_per_organization_are_limited() {
    let database = Database::new().await;
    let store = database.store();
    let made = join_all((0..25).map(|_| async {
        store.scan_create(&write(), new(ScanId::from_uuid(Uuid::now_v7())), silent).await
    }))
    .await;
    let refused =
        made.iter().filter(|made| matches!(made, Err(Error::TooManyScans { .. }))).count();
    assert_eq!((made.iter().filter(|made| made.is_ok()).count(), refused), (20, 5));
}

#[tokio::test]
async fn exploring_scan_is_polled_without_holding_a_lease() {
    let database = Database::new().await;
    let store = database.store();
    let scan = create_scan(&store).await;
    let now = now();
    let mut held = store.scans_claim(1, &[], LEASE, now).await.expect("it is taken").remove(0);
    held.phase = ScanPhase::Exploring;
    held.failures = 3;
    let told = NewScanEvent { kind: "progress", message: String::new(), tool_calls: 7 };
    let changes = ScanChanges { events: vec![told], ..ScanChanges::default() };
    store.scan_save(&mut held, &changes, now).await.expect("it is saved");
    assert_eq!(store.scan_tool_calls(&held).await.expect("it answers"), 7);
    // Until the task has its request, there is work to do.
    let later = now + LEASE;
    assert_eq!(store.scans_claim_waiting(1, LEASE, later).await.expect("it answers"), []);
    let mut held = store.scans_claim(1, &[], LEASE, later).await.expect("it is taken").remove(0);
    held.message = "msg_1".into();
    store.scan_save(&mut held, &ScanChanges::default(), later).await.expect("it is saved");
    let wake = later + Duration::from_secs(5);
    store.scan_release(&held, wake, later).await.expect("it is let go");
    // A released lease is lost.
    assert_eq!(
        store.scan_extend_lease(&held, later + LEASE).await.expect("it answers"),
        LeaseState::Lost
    );
    assert!(matches!(store.scan_release(&held, wake, later).await, Err(Error::Conflict)));
    assert_eq!(store.scans_claim_waiting(1, LEASE, later).await.expect("it answers"), []);
    assert_eq!(store.scans_claim(1, &[], LEASE, wake).await.expect("it answers"), []);
    let look = store.scans_claim_waiting(1, LEASE, wake).await.expect("it is looked at").remove(0);
    assert_eq!((look.failures, look.revision), (0, held.revision), "a look alone is no change");
    // It is canceled between two polls.
    store.scan_cancel(&write_at(wake), scan.id, "", silent).await.expect("it is asked for");
    store.scan_release(&look, wake + LEASE, wake).await.expect("it is let go");
    assert_eq!(store.scans_claim_waiting(1, LEASE, wake).await.expect("it is looked at").len(), 1);
}

#[tokio::test]
async fn organizations_take_turns_for_scan_slots() {
    let database = Database::new().await;
    let store = database.store();
    let (crowd, quiet, third) =
        (ORG, database.create_tenant("quiet").await, database.create_tenant("third").await);
    let now = now();
    let make = async |organization, count: u64, age: u64| {
        for number in 0..count {
            let at = now - Duration::from_secs(age - number);
            let new = new(ScanId::from_uuid(Uuid::now_v7()));
            store
                .scan_create(&Write::new(organization, at), new, silent)
                .await
                .expect("it is made");
        }
    };
    make(crowd, 10, 900).await;
    make(quiet, 2, 600).await;
    make(third, 1, 300).await;
    let mut served = Vec::new();
    let mut turns = Vec::new();
    // With one slot, each scan waits for its task before the next one is claimed.
    while let Some(scan) =
        store.scans_claim(1, &served, LEASE, now).await.expect("it answers").pop()
    {
        served.retain(|organization| *organization != scan.organization);
        served.push(scan.organization);
        turns.push(scan.organization);
        store.scan_release(&scan, now + LEASE, now).await.expect("it is let go");
    }
    assert_eq!(turns[..6], [crowd, quiet, third, crowd, quiet, crowd]);
    assert_eq!(turns.len(), 13);
    // Several slots are shared too: an organization that holds some comes after one that holds
    // none.
    let later = now + LEASE;
    let sorted = |mut of: Vec<OrganizationId>| {
        of.sort_by_key(|organization| organization.uuid());
        of
    };
    let of = |taken: Vec<Scan>| sorted(taken.iter().map(|scan| scan.organization).collect());
    let taken = store.scans_claim(3, &[], LEASE, later).await.expect("they are taken");
    assert_eq!(of(taken), sorted(vec![crowd, quiet, third]));
    let taken = store.scans_claim(2, &[], LEASE, later).await.expect("they are taken");
    assert_eq!(of(taken), sorted(vec![crowd, quiet]));
    assert_eq!(
        of(store.scans_claim(9, &[], LEASE, later).await.expect("they are taken")),
        [crowd; 8]
    );
}

async fn connected(store: &Store, name: &str, keyring: &Keyring, value: &[u8]) -> ScanConnection {
    let id = ScanConnectionId::from_uuid(Uuid::now_v7());
    let new = NewScanConnection {
        id,
        host: ScanHost::Gitlab,
        name: name.into(),
        base_url: String::new(),
        credential: ScanCredential::Token,
        sealed: keyring.seal(&id.to_string(), value).expect("sealed"),
    };
    match store.scan_connection_create(&write(), new, silent).await.expect("it is made") {
        WriteOutcome::Applied { entity, .. } => entity,
        WriteOutcome::Repeated { .. } => panic!("it has no key"),
    }
}

#[tokio::test]
async fn key_rotation_reseals_scan_connections_and_reports_failures() {
    let database = Database::new().await;
    let store = database.store();
    let old = Keyring::new("old", [("old".to_owned(), [1; 32])]).expect("valid");
    let lost = Keyring::new("lost", [("lost".to_owned(), [9; 32])]).expect("valid");
    let new = Keyring::new("new", [("old".to_owned(), [1; 32]), ("new".to_owned(), [2; 32])])
        .expect("valid");
    let one = connected(&store, "one", &old, b"glpat-1").await;
    let two = connected(&store, "two", &old, b"glpat-2").await;
    let gone = connected(&store, "gone", &lost, b"glpat-3").await;
    let current = connected(&store, "current", &new, b"glpat-4").await;

    let report = store.scan_connection_reseal_all(&new, now()).await.expect("rotated");
    assert_eq!((report.resealed, report.failed), (2, vec![gone.id]));
    for (before, value) in [(&one, b"glpat-1"), (&two, b"glpat-2")] {
        let after = store.scan_connection_get(ORG, before.id).await.expect("got");
        assert_eq!((after.sealed.key_id.as_str(), after.revision), ("new", before.revision + 1));
        assert_eq!(
            new.open(&after.id.to_string(), &after.sealed).expect("opened").expose_secret(),
            value
        );
        assert!(
            old.open(&after.id.to_string(), &after.sealed).is_err(),
            "the old key opens it no more"
        );
        assert!(
            new.open(&gone.id.to_string(), &after.sealed).is_err(),
            "it opens for its own record only"
        );
    }
    // Secrets that cannot be opened stay as they are, in case the key is found; so do those that
    // are already sealed with the new key.
    for before in [gone, current] {
        assert_eq!(store.scan_connection_get(ORG, before.id).await.expect("got"), before);
    }
    let again = store.scan_connection_reseal_all(&new, now()).await.expect("rotated");
    assert_eq!((again.resealed, again.failed.len()), (0, 1));
}
