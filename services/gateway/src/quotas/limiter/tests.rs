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

/// Quotas of a gateway whose default tier has these limits.
fn quotas(limits: Limits) -> Quotas {
    let gateway_tiers = BTreeMap::from([("free".to_owned(), limits)]);
    Quotas::new(&Config { gateway_tiers, gateway_tier: "free".into(), ..Config::default() })
}

fn requests(requests: i64) -> Limits {
    Limits { requests_per_minute: Some(requests), ..Limits::default() }
}

async fn ask(quotas: &Quotas, caller: &Caller) -> Result<QuotaStates, Status> {
    quotas.count_request(None, caller, None).await
}

#[tokio::test(start_paused = true)]
async fn flooding_organization_takes_nothing_from_another() {
    let quotas = quotas(requests(10));
    let (flood, calm) = (caller(organization(), None), caller(organization(), None));
    let mut admitted = 0;
    for _ in 0..1000 {
        admitted += u32::from(ask(&quotas, &flood).await.is_ok());
    }
    assert_eq!(admitted, 10);
    let metered = ask(&quotas, &calm).await.expect("its first request");
    assert_eq!((metered.0[0].limit, metered.0[0].remaining), (10, 9));
    let refused = ask(&quotas, &flood).await.expect_err("the limit is reached");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    let details = refused.get_error_details();
    let subject = &details.quota_failure().expect("the exhausted quota").violations[0].subject;
    assert_eq!(*subject, format!("organization:{}", flood.organization));
    tokio::time::advance(Duration::from_secs(6)).await;
    ask(&quotas, &flood).await.expect("a tenth of a minute is over");
}

#[tokio::test(start_paused = true)]
async fn key_limit_applies_within_the_organization_limit() {
    let limits = Limits { key_requests_per_minute: Some(3), ..requests(5) };
    let quotas = quotas(limits);
    let organization = organization();
    let (one, other, person) =
        (caller(organization, key()), caller(organization, key()), caller(organization, None));
    for _ in 0..3 {
        let metered = ask(&quotas, &one).await.expect("within both");
        assert_eq!(metered.0.len(), 2);
    }
    let refused = ask(&quotas, &one).await.expect_err("the limit of the key is reached");
    let details = refused.get_error_details();
    assert_eq!(
        details.quota_failure().expect("the exhausted quota").violations[0].quota_id,
        "key_requests_per_minute"
    );
    // Refused requests took no tokens.
    ask(&quotas, &other).await.expect("the other key has one");
    ask(&quotas, &person).await.expect("only the organization's limit applies without a key");
    let refused = ask(&quotas, &other).await.expect_err("the limit of the organization is reached");
    let details = refused.get_error_details();
    assert_eq!(
        details.quota_failure().expect("the exhausted quota").violations[0].quota_id,
        "requests_per_minute"
    );
}

#[tokio::test(start_paused = true)]
async fn refusal_is_cached_until_a_request_is_admitted() {
    let quotas = quotas(requests(60));
    let flood = caller(organization(), key());
    let credential = CredentialHash::new("ct_secret", None);
    for _ in 0..60 {
        quotas
            .count_request(None, &flood, Some(credential.clone()))
            .await
            .expect("within the limit");
    }
    assert!(quotas.cached_rejection(&credential, Instant::now()).is_none());
    quotas.count_request(None, &flood, Some(credential.clone())).await.expect_err("beyond it");
    let rejection = quotas.cached_rejection(&credential, Instant::now()).expect("a cached refusal");
    assert_eq!(rejection.known, CallerIdentity::from(&flood));
    assert_eq!(rejection.status(Instant::now()).code(), Code::ResourceExhausted);
    // The same credentials with another organization.
    assert!(
        quotas
            .cached_rejection(
                &CredentialHash::new("ct_secret", Some("organization_2")),
                Instant::now()
            )
            .is_none()
    );
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(quotas.cached_rejection(&credential, Instant::now()).is_none());
    quotas.count_request(None, &flood, Some(credential)).await.expect("a second is over");
}

#[tokio::test(start_paused = true)]
async fn cached_refusal_expires_with_the_cached_limits() {
    let quotas = quotas(requests(1));
    let caller = caller(organization(), key());
    let credential = CredentialHash::new("ct_secret", None);
    quotas.count_request(None, &caller, Some(credential.clone())).await.expect("the first");
    quotas.count_request(None, &caller, Some(credential.clone())).await.expect_err("the second");
    tokio::time::advance(LIMITS_TTL - Duration::from_millis(1)).await;
    let rejection = quotas.cached_rejection(&credential, Instant::now()).expect("a cached refusal");
    let state =
        rejection.status(Instant::now()).get_details_retry_info().and_then(|info| info.retry_delay);
    assert!(state.expect("a retry delay") > Duration::from_secs(50), "{state:?}");
    // Another gateway may have raised the limit.
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(quotas.cached_rejection(&credential, Instant::now()).is_none());
}

#[tokio::test(start_paused = true)]
async fn quota_change_applies_at_once_and_operator_is_unlimited() {
    let quotas = quotas(requests(1));
    let operator = caller(OrganizationId::LOCAL, None);
    for _ in 0..100 {
        let metered = ask(&quotas, &operator).await.expect("not limited");
        assert_eq!(metered, QuotaStates::default());
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
    quotas.update(&quota);
    let metered = ask(&quotas, &team).await.expect("the raised limit");
    assert_eq!(metered.0[0].limit, 1000);
    (quota.tier, quota.overrides) = (UNLIMITED.to_owned(), Limits::default());
    quotas.update(&quota);
    assert_eq!(ask(&quotas, &team).await.expect("not limited any more"), QuotaStates::default());
    // An unknown tier does not lift limits.
    quota.tier = "gone".to_owned();
    assert_eq!(
        quotas.effective_limits(team.organization, Some(&quota)),
        ("free".to_owned(), requests(1))
    );
}

#[tokio::test(start_paused = true)]
async fn tables_are_bounded_by_recent_callers() {
    let quotas = quotas(requests(60));
    for _ in 0..3 * MAX_TABLE_ENTRIES {
        ask(&quotas, &caller(organization(), None)).await.expect("the first of it");
        tokio::time::advance(Duration::from_millis(100)).await;
    }
    let tables = quotas.tables();
    assert!(tables.buckets.len() <= MAX_TABLE_ENTRIES && tables.known.len() <= MAX_TABLE_ENTRIES);
}

#[test]
fn only_requested_usage_is_checked() {
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
    let which = |counts: Counts, requested| {
        check(&limits, &counts, requested, Subject::Organization(organization()), &periods, now)
            .err()
            .map(|refusal| refusal.state)
    };
    let upload = QuotaRequest::storage(1);
    for (counts, requested, expected) in [
        (Counts::default(), QuotaRequest::scan(50), None),
        (full, QuotaRequest::default(), None),
        (full, QuotaRequest::TASK, Some(("tasks_per_day", 6 * 3600))),
        (Counts { tasks: 2, ..full }, QuotaRequest::TASK, None),
        (full, QuotaRequest::WORK, Some(("runs_per_day", 6 * 3600))),
        (Counts { runs: 3, ..full }, QuotaRequest::WORK, Some(("tokens_per_day", 6 * 3600))),
        (
            Counts { runs: 3, tokens: 99, ..full },
            QuotaRequest::WORK,
            Some(("spend_per_month_pico_usd", 6 * 3600)),
        ),
        (Counts { runs: 3, tokens: 99, spend_pico_usd: 999, ..full }, QuotaRequest::WORK, None),
        (full, upload, Some(("storage_bytes", 60))),
        (Counts { storage_bytes: 49, ..full }, upload, None),
    ] {
        let found = which(counts, requested).map(|state| (state.id, state.reset.as_secs()));
        assert_eq!(found, expected, "{counts:?} {requested:?}");
    }
    // Space freed from content of others does not count for the key.
    let put = QuotaRequest { bytes_of_key: 2, ..QuotaRequest::storage(-5) };
    let of_key = Subject::Key(organization(), key().expect("there is one"));
    let (almost, full) =
        (Counts { storage_bytes: 48, ..full }, Counts { storage_bytes: 49, ..full });
    let refusal =
        check(&limits, &full, put, of_key, &periods, now).expect_err("there is room for one byte");
    assert_eq!((refusal.state.id, refusal.state.remaining), ("key_storage_bytes", 1));
    assert!(
        check(&limits, &almost, put, of_key, &periods, now).is_ok() && which(full, put).is_none()
    );
    assert!(put.required_counts(&limits, of_key).storage);
    let subject = Subject::Organization(organization());
    assert!(!put.required_counts(&limits, subject).storage);
    assert_eq!(
        QuotaRequest::WORK.required_counts(&Limits::default(), subject),
        CountSelection::default()
    );
}
