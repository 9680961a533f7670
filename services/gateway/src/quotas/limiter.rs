//! Counts usage and enforces quotas.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use construct_domain::{ApiKeyId, OrganizationId};
use construct_runtime::clock;
use construct_store::{CountSelection, Counts, Limits, Periods, Quota, Store};
use jiff::Timestamp;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tonic::Status;

use super::{
    bucket::{Bucket, WINDOW},
    calendar::Calendar,
    refusal::{QuotaState, QuotaStates, Refusal},
    tiers::UNLIMITED,
};
use crate::{Config, audit::origin::CallerIdentity, caller::Caller, metrics, status};

/// How long the limits of an organization are cached.
const LIMITS_TTL: Duration = Duration::from_secs(5);
/// How long a count of usage is cached.
const COUNTS_TTL: Duration = Duration::from_secs(2);
/// Retry delay for an upload beyond the limit.
const UPLOAD_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Size from which a table drops entries without information. The remaining ones are bounded by the
/// organizations and keys that called within a minute.
const MAX_TABLE_ENTRIES: usize = 4096;

/// The quotas of all organizations, in this gateway.
pub(crate) struct Quotas {
    tiers: BTreeMap<String, Limits>,
    /// The default tier, except for the operator's organization.
    tier: String,
    calendar: Calendar,
    tables: Mutex<Tables>,
}

#[derive(Default)]
struct Tables {
    known: HashMap<OrganizationId, CachedLimits>,
    buckets: HashMap<Subject, Bucket>,
    rejections: HashMap<CredentialHash, CachedRejection>,
    snapshots: HashMap<Scope, Arc<tokio::sync::Mutex<Option<UsageSnapshot>>>>,
}

/// The cached limits of an organization.
#[derive(Debug, Clone)]
struct CachedLimits {
    limits: Limits,
    read: Instant,
}

/// The owner of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Subject {
    Organization(OrganizationId),
    Key(OrganizationId, ApiKeyId),
}

/// What is counted in one query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Scope {
    Organization(OrganizationId),
    /// All keys of an organization.
    Keys(OrganizationId),
}

/// The hash of credentials. A caller that was refused a moment ago is not looked up again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CredentialHash([u8; 32]);

impl CredentialHash {
    pub(crate) fn new(bearer: &str, organization: Option<&str>) -> Self {
        let hash = Sha256::new()
            .chain_update(bearer)
            .chain_update("\0")
            .chain_update(organization.unwrap_or_default());
        Self(hash.finalize().into())
    }
}

/// A refusal that is repeated without a check.
#[derive(Debug, Clone)]
pub(crate) struct CachedRejection {
    pub(crate) known: CallerIdentity,
    refusal: Refusal,
    /// When a request is admitted again.
    free: Instant,
    /// At most as long as limits are cached: they may be raised meanwhile.
    until: Instant,
}

impl CachedRejection {
    /// The refusal at this time.
    pub(crate) fn status(&self, now: Instant) -> Status {
        let mut refusal = self.refusal.clone();
        refusal.state.reset = self.free.saturating_duration_since(now);
        rejection_status(&refusal)
    }
}

/// The counted usage of an organization, or of each of its keys.
struct UsageSnapshot {
    at: Instant,
    day: Timestamp,
    /// What was counted.
    of: CountSelection,
    /// By key; `None` for the organization. A missing key has no usage.
    done: HashMap<Option<ApiKeyId>, Counts>,
    /// Subjects with admitted requests since then, which may have failed. A refusal of another
    /// subject is no reason to count again.
    unconfirmed: HashSet<Option<ApiKeyId>>,
}

impl UsageSnapshot {
    fn counts(&self, subject: Subject) -> Counts {
        self.done.get(&subject.key()).copied().unwrap_or_default()
    }
}

/// What a call adds to the usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct QuotaRequest {
    /// Tasks that it creates.
    pub(crate) tasks: i64,
    /// Whether it causes work of models and scripts.
    pub(crate) work: bool,
    /// Additional stored bytes.
    pub(crate) bytes: i64,
    /// The same for the key: space freed from content of others counts for the organization only.
    pub(crate) bytes_of_key: i64,
}

impl QuotaRequest {
    pub(crate) const TASK: Self = Self { tasks: 1, work: false, bytes: 0, bytes_of_key: 0 };
    pub(crate) const WORK: Self = Self { tasks: 0, work: true, bytes: 0, bytes_of_key: 0 };

    /// A scan: a task with work, and its upload.
    pub(crate) fn scan(bytes: usize) -> Self {
        Self { tasks: 1, work: true, ..Self::storage(i64::try_from(bytes).unwrap_or(i64::MAX)) }
    }

    /// A file or a document: the change of the stored bytes.
    pub(crate) fn storage(bytes: i64) -> Self {
        Self { bytes, bytes_of_key: bytes, ..Self::default() }
    }

    /// What must be counted for it, of an organization or a key.
    fn required_counts(self, limits: &Limits, subject: Subject) -> CountSelection {
        let all = CountSelection::for_limits(limits);
        CountSelection {
            tasks: all.tasks && self.tasks > 0,
            runs: all.runs && self.work,
            tokens: all.tokens && self.work,
            spend: all.spend && self.work,
            storage: all.storage && self.bytes_for(subject) > 0,
        }
    }

    /// The additional bytes of an organization or a key.
    fn bytes_for(self, subject: Subject) -> i64 {
        match subject {
            Subject::Organization(_) => self.bytes,
            Subject::Key(..) => self.bytes_of_key,
        }
    }
}

impl Quotas {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            tiers: config.gateway_tiers.clone(),
            tier: config.gateway_tier.clone(),
            calendar: config.gateway_calendar,
            tables: Mutex::default(),
        }
    }

    /// Whether the tier exists.
    pub(crate) fn has_tier(&self, tier: &str) -> bool {
        tier == UNLIMITED || self.tiers.contains_key(tier)
    }

    /// The effective tier and limits of an organization with this quota. A tier that is no longer
    /// configured counts as none.
    pub(crate) fn effective_limits(
        &self,
        organization: OrganizationId,
        quota: Option<&Quota>,
    ) -> (String, Limits) {
        let assigned = quota.map(|quota| quota.tier.as_str()).filter(|tier| !tier.is_empty());
        if let Some(tier) = assigned.filter(|tier| !self.has_tier(tier)) {
            tracing::warn!(%organization, tier, "an organization has a tier that is not configured");
        }
        let default = if organization == OrganizationId::LOCAL { UNLIMITED } else { &self.tier };
        let tier = assigned.filter(|tier| self.has_tier(tier)).unwrap_or(default);
        let limits = self.tiers.get(tier).copied().unwrap_or_default();
        (tier.to_owned(), quota.map(|quota| quota.overrides).unwrap_or_default().or(limits))
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The limits of an organization. While the database is unavailable, the last known ones.
    async fn limits(&self, store: Option<&Store>, organization: OrganizationId) -> Limits {
        let now = Instant::now();
        let previous = {
            let mut tables = self.tables();
            let held = tables.known.get_mut(&organization);
            match held {
                Some(held) if now.duration_since(held.read) < LIMITS_TTL => return held.limits,
                Some(held) => {
                    // Other calls use the cached limits while this one reads.
                    held.read = now;
                    Some(held.limits)
                }
                None => None,
            }
        };
        let fallback = previous.unwrap_or_else(|| self.effective_limits(organization, None).1);
        let Some(store) = store else { return fallback };
        let limits = match store.quota_get(organization).await {
            Ok(quota) => self.effective_limits(organization, Some(&quota)).1,
            Err(error) => {
                tracing::debug!(%organization, error = status::chain(&error), "a quota could not be read");
                fallback
            }
        };
        self.tables().cache_limits(organization, limits, Instant::now());
        limits
    }

    /// Applies a changed quota immediately.
    pub(crate) fn update(&self, quota: &Quota) {
        let limits = self.effective_limits(quota.organization, Some(quota)).1;
        let mut tables = self.tables();
        tables.cache_limits(quota.organization, limits, Instant::now());
        tables.rejections.retain(|_, rejection| rejection.known.organization != quota.organization);
        // A raised limit is not used up yet.
        tables.buckets.retain(|subject, _| subject.organization() != quota.organization);
    }

    /// Returns the refusal of credentials that are refused without a check.
    pub(crate) fn cached_rejection(
        &self,
        credential: &CredentialHash,
        now: Instant,
    ) -> Option<CachedRejection> {
        self.tables().rejections.get(credential).filter(|rejection| now < rejection.until).cloned()
    }

    /// Counts a call.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when there were too many.
    pub(crate) async fn count_request(
        &self,
        store: Option<&Store>,
        caller: &Caller,
        credential: Option<CredentialHash>,
    ) -> Result<QuotaStates, Status> {
        let limits = self.limits(store, caller.organization).await;
        self.tables()
            .count_request(&limits, caller, credential, Instant::now())
            .map_err(|refusal| rejection_status(&refusal))
    }

    /// The day and the month of a time.
    pub(crate) fn periods(&self, now: Timestamp) -> Periods {
        self.calendar.periods(now)
    }

    /// Whether the storage of an organization is limited.
    pub(crate) async fn limits_storage(&self, store: &Store, organization: OrganizationId) -> bool {
        self.limits(Some(store), organization).await.storage_bytes.is_some()
    }

    /// Checks whether an organization, and its key with these limits if there is one, may add to
    /// durable usage. Returns the refusal if not.
    ///
    /// # Errors
    /// `UNAVAILABLE` when the usage cannot be counted.
    pub(crate) async fn allow(
        &self,
        store: &Store,
        organization: OrganizationId,
        key: Option<(ApiKeyId, Limits)>,
        requested: QuotaRequest,
    ) -> Result<Option<Refusal>, Status> {
        if let Some((key, limits)) = key {
            let refusal = self
                .check_subject(store, Subject::Key(organization, key), &limits, requested)
                .await?;
            if refusal.is_some() {
                return Ok(refusal);
            }
        }
        let limits = self.limits(Some(store), organization).await;
        self.check_subject(store, Subject::Organization(organization), &limits, requested).await
    }

    async fn check_subject(
        &self,
        store: &Store,
        subject: Subject,
        limits: &Limits,
        requested: QuotaRequest,
    ) -> Result<Option<Refusal>, Status> {
        if requested.required_counts(limits, subject) == CountSelection::default() {
            return Ok(None);
        }
        let scope = subject.scope();
        let snapshot = self.tables().shared_snapshot(scope);
        // Serialized, so that two requests cannot both use the last unit.
        let mut snapshot = snapshot.lock().await;
        let time = clock::now();
        let periods = self.periods(time);
        let held = snapshot.take().filter(|snapshot| snapshot.day == periods.day);
        // The keys of an organization may have different limits.
        let of = held
            .as_ref()
            .map(|held| held.of)
            .unwrap_or_default()
            .union(CountSelection::for_limits(limits));
        let mut read = match held {
            Some(snapshot) if snapshot.of == of && snapshot.at.elapsed() < COUNTS_TTL => snapshot,
            held => count(store, scope, of, &periods, held).await?,
        };
        let mut allowed = check(limits, &read.counts(subject), requested, subject, &periods, time);
        if allowed.is_err() && read.unconfirmed.contains(&subject.key()) {
            read = count(store, scope, of, &periods, Some(read)).await?;
            allowed = check(limits, &read.counts(subject), requested, subject, &periods, time);
        }
        if allowed.is_ok() {
            let done = read.done.entry(subject.key()).or_default();
            done.tasks = done.tasks.saturating_add(requested.tasks);
            done.storage_bytes = done.storage_bytes.saturating_add(requested.bytes_for(subject));
            if requested.tasks > 0 || requested.bytes_for(subject) > 0 {
                read.unconfirmed.insert(subject.key());
            }
        }
        *snapshot = Some(read);
        Ok(allowed.err())
    }
}

/// Counts the usage of an organization or its keys. If that fails, the snapshot of the day stays
/// valid, and no other call counts again for a while: all waiting calls would wait for the database
/// too.
async fn count(
    store: &Store,
    scope: Scope,
    of: CountSelection,
    periods: &Periods,
    previous: Option<UsageSnapshot>,
) -> Result<UsageSnapshot, Status> {
    let counted = match scope {
        Scope::Organization(organization) => store
            .quota_counts(organization, of, periods)
            .await
            .map(|counts| HashMap::from([(None, counts)])),
        Scope::Keys(organization) => store
            .quota_key_counts(organization, of, periods)
            .await
            .map(|counts| counts.into_iter().map(|(key, counts)| (Some(key), counts)).collect()),
    };
    // Counting a long ledger takes a while, too.
    let at = Instant::now();
    match (counted, previous) {
        (Ok(done), _) => {
            Ok(UsageSnapshot { at, day: periods.day, of, done, unconfirmed: HashSet::new() })
        }
        (Err(error), Some(previous)) if previous.of == of => {
            tracing::debug!(?scope, error = status::chain(&error), "usage could not be counted");
            Ok(UsageSnapshot { at, ..previous })
        }
        (Err(error), _) => Err(status::from_store(error)),
    }
}

impl Tables {
    fn cache_limits(&mut self, organization: OrganizationId, limits: Limits, now: Instant) {
        if self.known.len() >= MAX_TABLE_ENTRIES {
            self.known.retain(|_, held| now.duration_since(held.read) < LIMITS_TTL);
        }
        self.known.insert(organization, CachedLimits { limits, read: now });
    }

    fn shared_snapshot(&mut self, scope: Scope) -> Arc<tokio::sync::Mutex<Option<UsageSnapshot>>> {
        if self.snapshots.len() >= MAX_TABLE_ENTRIES {
            // Entries in use stay.
            self.snapshots.retain(|_, snapshot| Arc::strong_count(snapshot) > 1);
        }
        Arc::clone(self.snapshots.entry(scope).or_default())
    }

    /// Takes a token from each bucket of a caller, or from none.
    fn count_request(
        &mut self,
        limits: &Limits,
        caller: &Caller,
        credential: Option<CredentialHash>,
        now: Instant,
    ) -> Result<QuotaStates, Refusal> {
        let organization = limits
            .requests_per_minute
            .map(|limit| (Subject::Organization(caller.organization), limit));
        // The limit of a key cannot exceed the operator's limit for each key.
        let own = [limits.key_requests_per_minute, caller.limits.requests_per_minute]
            .into_iter()
            .flatten()
            .min();
        let key =
            own.and_then(|limit| Some((Subject::Key(caller.organization, caller.key?), limit)));
        let limited: Vec<(Subject, u32)> = [organization, key]
            .into_iter()
            .flatten()
            .map(|(subject, limit)| (subject, u32::try_from(limit.max(0)).unwrap_or(u32::MAX)))
            .collect();
        if limited.is_empty() {
            return Ok(QuotaStates::default());
        }
        if self.buckets.len() >= MAX_TABLE_ENTRIES {
            self.buckets.retain(|_, bucket| !bucket.is_full(now));
        }
        let wait = |(subject, limit): &(Subject, u32)| {
            let bucket = self.buckets.get(subject).copied().unwrap_or(Bucket::new(now));
            bucket.wait(*limit, now).map(|wait| (*subject, *limit, wait))
        };
        // The longest wait.
        if let Some((subject, limit, wait)) =
            limited.iter().filter_map(wait).max_by_key(|(.., wait)| *wait)
        {
            let refusal = subject.refusal(limit, wait);
            if let Some(credential) = credential {
                if self.rejections.len() >= MAX_TABLE_ENTRIES {
                    self.rejections.retain(|_, rejection| now < rejection.until);
                }
                let (free, until) = (now + wait, now + wait.min(LIMITS_TTL));
                let rejection = CachedRejection {
                    known: CallerIdentity::from(caller),
                    refusal: refusal.clone(),
                    free,
                    until,
                };
                self.rejections.insert(credential, rejection);
            }
            return Err(refusal);
        }
        let mut metered = QuotaStates::default();
        for (subject, limit) in limited {
            let bucket = self.buckets.entry(subject).or_insert(Bucket::new(now));
            bucket.take(limit, now);
            let level = bucket.level(limit, now);
            metered.0.push(subject.quota_state(limit, level.remaining, level.full_in));
        }
        Ok(metered)
    }
}

impl Subject {
    fn organization(self) -> OrganizationId {
        match self {
            Self::Organization(id) | Self::Key(id, _) => id,
        }
    }

    fn key(self) -> Option<ApiKeyId> {
        match self {
            Self::Organization(_) => None,
            Self::Key(_, key) => Some(key),
        }
    }

    fn scope(self) -> Scope {
        match self {
            Self::Organization(organization) => Scope::Organization(organization),
            Self::Key(organization, _) => Scope::Keys(organization),
        }
    }

    /// Its name in details and in texts.
    fn names(self) -> (String, &'static str) {
        match self {
            Self::Organization(id) => (format!("organization:{id}"), "the organization"),
            Self::Key(_, id) => (format!("api_key:{id}"), "this API key"),
        }
    }

    fn quota_state(self, limit: u32, remaining: u32, reset: Duration) -> QuotaState {
        let id = match self {
            Self::Organization(_) => "requests_per_minute",
            Self::Key(..) => "key_requests_per_minute",
        };
        let (limit, remaining) = (i64::from(limit), i64::from(remaining));
        QuotaState { id, unit: None, limit, window: Some(WINDOW), remaining, reset }
    }

    fn refusal(self, limit: u32, wait: Duration) -> Refusal {
        let (subject, who) = self.names();
        let description = format!("{who} may make {limit} requests a minute, and has made them");
        Refusal { subject, description, state: self.quota_state(limit, 0, wait) }
    }
}

/// Creates the status of a refusal, and counts it.
pub(crate) fn rejection_status(refusal: &Refusal) -> Status {
    metrics::quota_exceeded(refusal.state.id);
    refusal.status()
}

/// Formats an amount in dollars, rounded up to the cent.
fn dollars(pico_usd: i64) -> String {
    let cents = i128::from(pico_usd).saturating_add(9_999_999_999) / 10_000_000_000;
    format!("${}.{:02}", cents / 100, cents % 100)
}

/// Checks the requested usage against the limits.
fn check(
    limits: &Limits,
    counts: &Counts,
    requested: QuotaRequest,
    subject: Subject,
    periods: &Periods,
    now: Timestamp,
) -> Result<(), Refusal> {
    let until = |time: Timestamp| Duration::try_from(time.duration_since(now)).unwrap_or_default();
    let length = |from: Timestamp, to: Timestamp| Duration::try_from(to.duration_since(from)).ok();
    let (day, month) =
        (length(periods.day, periods.next_day), length(periods.month, periods.next_month));
    let (tomorrow, next_month) = (until(periods.next_day), until(periods.next_month));
    let work = i64::from(requested.work);
    let today = |used, more| (used, more, day, tomorrow);
    let quotas = [
        (
            ["tasks_per_day", "key_tasks_per_day"],
            "tasks",
            limits.tasks_per_day,
            today(counts.tasks, requested.tasks),
        ),
        (
            ["runs_per_day", "key_runs_per_day"],
            "runs",
            limits.runs_per_day,
            today(counts.runs, work),
        ),
        (
            ["tokens_per_day", "key_tokens_per_day"],
            "tokens",
            limits.tokens_per_day,
            today(counts.tokens, work),
        ),
        (
            ["spend_per_month_pico_usd", "key_spend_per_month_pico_usd"],
            "pico-usd",
            limits.spend_per_month_pico_usd,
            (counts.spend_pico_usd, work, month, next_month),
        ),
        (
            ["storage_bytes", "key_storage_bytes"],
            "bytes",
            limits.storage_bytes,
            (counts.storage_bytes, requested.bytes_for(subject), None, UPLOAD_RETRY_DELAY),
        ),
    ];
    let (name, who) = subject.names();
    for (ids, unit, limit, (used, more, window, reset)) in quotas {
        let Some(limit) = limit.filter(|limit| more > 0 && used.saturating_add(more) > *limit)
        else {
            continue;
        };
        let description = match unit {
            "bytes" => {
                format!("{who} may keep {limit} bytes of uploads and documents, and keeps {used}")
            }
            "pico-usd" => {
                let (limit, used) = (dollars(limit), dollars(used));
                format!("models may cost {who} {limit} a month, and have cost {used}")
            }
            _ => format!("{who} may have {limit} {unit} a day (of UTC), and has had {used}"),
        };
        let remaining = limit.saturating_sub(used).max(0);
        return Err(Refusal {
            subject: name,
            description,
            state: QuotaState {
                id: ids[usize::from(subject.key().is_some())],
                unit: Some(unit),
                limit,
                window,
                remaining,
                reset,
            },
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
