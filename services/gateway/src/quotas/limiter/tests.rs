use std::sync::Arc;

use construct_domain::{
    UserId,
    access::{Role, Scope},
};
use tonic::Code;
use tonic_types::StatusExt as _;
use uuid::Uuid;

use super::*;

fn organization() -> OrganizationId {
    OrganizationId::from_uuid(Uuid::now_v7())
}

fn caller(organization: OrganizationId, key: Option<ApiKeyId>) -> Caller {
    Caller {
        organization,
        user: UserId::LOCAL,
        key,
        limits: Limits::default(),
        counted_for: key,
        role: Role::Member,
        scopes: Arc::new([Scope::Admin]),
        until: None,
        confined: None,
    }
}

fn key() -> Option<ApiKeyId> {
    Some(ApiKeyId::from_uuid(Uuid::now_v7()))
}

/// Quotas of a gateway whose tier for everybody has these limits.
fn quotas(limits: Limits) -> Quotas {
    let gateway_tiers = BTreeMap::from([("free".to_owned(), limits)]);
    Quotas::new(&Config { gateway_tiers, gateway_tier: "free".into(), ..Config::default() })
}

fn requests(requests: i64) -> Limits {
    Limits { requests_per_minute: Some(requests), ..Limits::default() }
}

async fn ask(quotas: &Quotas, caller: &Caller) -> Result<Metered, Status> {
    quotas.request(None, caller, None).await
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_one_organization_takes_nothing_from_another() {
    let quotas = quotas(requests(10));
    let (flood, calm) = (caller(organization(), None), caller(organization(), None));
    let mut admitted = 0;
    for _ in 0..1000 {
        admitted += u32::from(ask(&quotas, &flood).await.is_ok());
    }
    assert_eq!(admitted, 10);
    let metered = ask(&quotas, &calm).await.expect("it has asked for nothing yet");
    assert_eq!((metered.0[0].limit, metered.0[0].remaining), (10, 9));
    let refused = ask(&quotas, &flood).await.expect_err("it had its share");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    let details = refused.get_error_details();
    let subject = &details.quota_failure().expect("it says which").violations[0].subject;
    assert_eq!(*subject, format!("organization:{}", flood.organization));
    tokio::time::advance(Duration::from_secs(6)).await;
    ask(&quotas, &flood).await.expect("a tenth of a minute is over");
}

#[tokio::test(start_paused = true)]
async fn each_key_has_its_own_share_of_what_all_have() {
    let limits = Limits { key_requests_per_minute: Some(3), ..requests(5) };
    let quotas = quotas(limits);
    let organization = organization();
    let (one, other, person) =
        (caller(organization, key()), caller(organization, key()), caller(organization, None));
    for _ in 0..3 {
        let metered = ask(&quotas, &one).await.expect("within both");
        assert_eq!(metered.0.len(), 2);
    }
    let refused = ask(&quotas, &one).await.expect_err("the key had its share");
    let details = refused.get_error_details();
    assert_eq!(
        details.quota_failure().expect("it says which").violations[0].quota_id,
        "key_requests_per_minute"
    );
    // What was refused took nothing.
    ask(&quotas, &other).await.expect("the other key has one");
    ask(&quotas, &person).await.expect("whoever comes without a key has the organization's only");
    let refused = ask(&quotas, &other).await.expect_err("the organization had its share");
    let details = refused.get_error_details();
    assert_eq!(
        details.quota_failure().expect("it says which").violations[0].quota_id,
        "requests_per_minute"
    );
}

#[tokio::test(start_paused = true)]
async fn what_was_refused_is_refused_unseen_until_there_is_room() {
    let quotas = quotas(requests(60));
    let flood = caller(organization(), key());
    let mark = Mark::of("ct_secret", None);
    for _ in 0..60 {
        quotas.request(None, &flood, Some(mark.clone())).await.expect("within the limit");
    }
    assert!(quotas.shed(&mark, Instant::now()).is_none());
    quotas.request(None, &flood, Some(mark.clone())).await.expect_err("beyond it");
    let shed = quotas.shed(&mark, Instant::now()).expect("it is known to be beyond");
    assert_eq!(shed.known, Known::from(&flood));
    assert_eq!(shed.status(Instant::now()).code(), Code::ResourceExhausted);
    // Another organization of whoever presents the same.
    assert!(quotas.shed(&Mark::of("ct_secret", Some("organization_2")), Instant::now()).is_none());
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(quotas.shed(&mark, Instant::now()).is_none());
    quotas.request(None, &flood, Some(mark)).await.expect("a second is over");
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_unseen_is_looked_at_again_as_soon_as_limits_are() {
    let quotas = quotas(requests(1));
    let caller = caller(organization(), key());
    let mark = Mark::of("ct_secret", None);
    quotas.request(None, &caller, Some(mark.clone())).await.expect("the first");
    quotas.request(None, &caller, Some(mark.clone())).await.expect_err("the second");
    tokio::time::advance(KNOWN - Duration::from_millis(1)).await;
    let shed = quotas.shed(&mark, Instant::now()).expect("it is known to be beyond");
    let left =
        shed.status(Instant::now()).get_details_retry_info().and_then(|info| info.retry_delay);
    assert!(left.expect("it says when") > Duration::from_secs(50), "{left:?}");
    // Another gateway may have given more.
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(quotas.shed(&mark, Instant::now()).is_none());
}

#[tokio::test(start_paused = true)]
async fn what_the_operator_says_holds_at_once_and_nobody_limits_the_operator_unasked() {
    let quotas = quotas(requests(1));
    let operator = caller(OrganizationId::LOCAL, None);
    for _ in 0..100 {
        let metered = ask(&quotas, &operator).await.expect("not limited");
        assert_eq!(metered, Metered::default());
    }
    let team = caller(organization(), None);
    ask(&quotas, &team).await.expect("the first");
    ask(&quotas, &team).await.expect_err("the second");
    let mut quota = Quota {
        organization: team.organization,
        tier: String::new(),
        overrides: requests(1000),
        revision: 1,
        updated_at: None,
    };
    quotas.changed(&quota);
    let metered = ask(&quotas, &team).await.expect("there is more of it now");
    assert_eq!(metered.0[0].limit, 1000);
    (quota.tier, quota.overrides) = (UNLIMITED.to_owned(), Limits::default());
    quotas.changed(&quota);
    assert_eq!(ask(&quotas, &team).await.expect("not limited any more"), Metered::default());
    // A tier that nobody knows any more is not the way out.
    quota.tier = "gone".to_owned();
    assert_eq!(quotas.of(team.organization, Some(&quota)), ("free".to_owned(), requests(1)));
}

#[tokio::test(start_paused = true)]
async fn tables_are_bounded_by_who_called_within_a_minute() {
    let quotas = quotas(requests(60));
    for _ in 0..3 * REMEMBERED {
        ask(&quotas, &caller(organization(), None)).await.expect("the first of it");
        tokio::time::advance(Duration::from_millis(100)).await;
    }
    let tables = quotas.tables();
    assert!(tables.buckets.len() <= REMEMBERED && tables.known.len() <= REMEMBERED);
}

#[test]
fn only_what_is_asked_for_is_held_against_its_limit() {
    let limits = Limits {
        tasks_per_day: Some(3),
        runs_per_day: Some(4),
        tokens_per_day: Some(100),
        spend_per_month_pico_usd: Some(1000),
        storage_bytes: Some(50),
        ..Limits::default()
    };
    let now: Timestamp = "2026-02-28T18:00:00Z".parse().expect("a time");
    let periods = Periods::containing(now);
    let full = Counts { tasks: 3, runs: 4, tokens: 100, spend_pico_usd: 1000, storage_bytes: 50 };
    let which = |counts: Counts, wanted| {
        check(&limits, &counts, wanted, Subject::Organization(organization()), &periods, now)
            .err()
            .map(|refusal| refusal.left)
    };
    let upload = Wanted::kept(1);
    for (counts, wanted, expected) in [
        (Counts::default(), Wanted::scan(50), None),
        (full, Wanted::default(), None),
        (full, Wanted::TASK, Some(("tasks_per_day", 6 * 3600))),
        (Counts { tasks: 2, ..full }, Wanted::TASK, None),
        (full, Wanted::WORK, Some(("runs_per_day", 6 * 3600))),
        (Counts { runs: 3, ..full }, Wanted::WORK, Some(("tokens_per_day", 6 * 3600))),
        (
            Counts { runs: 3, tokens: 99, ..full },
            Wanted::WORK,
            Some(("spend_per_month_pico_usd", 6 * 3600)),
        ),
        (Counts { runs: 3, tokens: 99, spend_pico_usd: 999, ..full }, Wanted::WORK, None),
        (full, upload, Some(("storage_bytes", 60))),
        (Counts { storage_bytes: 49, ..full }, upload, None),
    ] {
        let found = which(counts, wanted).map(|left| (left.id, left.reset.as_secs()));
        assert_eq!(found, expected, "{counts:?} {wanted:?}");
    }
    // Where room is made by what another has stored, it is none of the key's.
    let put = Wanted { bytes_of_key: 2, ..Wanted::kept(-5) };
    let of_key = Subject::Key(organization(), key().expect("there is one"));
    let (almost, full) =
        (Counts { storage_bytes: 48, ..full }, Counts { storage_bytes: 49, ..full });
    let refusal =
        check(&limits, &full, put, of_key, &periods, now).expect_err("there is room for one byte");
    assert_eq!((refusal.left.id, refusal.left.remaining), ("key_storage_bytes", 1));
    assert!(
        check(&limits, &almost, put, of_key, &periods, now).is_ok() && which(full, put).is_none()
    );
    assert!(put.counted(&limits, of_key).storage);
    let subject = Subject::Organization(organization());
    assert!(!put.counted(&limits, subject).storage);
    assert_eq!(Wanted::WORK.counted(&Limits::default(), subject), CountSelection::default());
}
