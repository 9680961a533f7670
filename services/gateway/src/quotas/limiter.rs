//! What is counted, and where it ends.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use construct_domain::{ApiKeyId, OrganizationId};
use construct_store::{Counted, Counts, Limits, Periods, Quota, Store};
use jiff::Timestamp;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tonic::Status;

use super::{
    bucket::{Bucket, WINDOW},
    refusal::{Left, Metered, Refusal},
    tiers::UNLIMITED,
};
use crate::{Config, audit::origin::Known, caller::Caller, metrics, status};

/// How long what the operator has said of an organisation is believed before it is read again.
const KNOWN: Duration = Duration::from_secs(5);
/// How long what an organisation has done is believed before it is counted again.
const COUNTED: Duration = Duration::from_secs(2);
/// After how long an upload may have made room.
const UPLOADS: Duration = Duration::from_secs(60);
/// Entries of a table beyond which those are forgotten that say nothing. Others are as many as organisations and keys that called within a
/// minute.
const REMEMBERED: usize = 4096;

/// The quotas of all organisations, as this gateway sees them.
pub(crate) struct Quotas {
    tiers: BTreeMap<String, Limits>,
    /// The tier of organisations of which nothing was said, but for the operator's.
    tier: String,
    tables: Mutex<Tables>,
}

#[derive(Default)]
struct Tables {
    known: HashMap<OrganizationId, Held>,
    buckets: HashMap<Subject, Bucket>,
    shed: HashMap<Mark, Shed>,
    readings: HashMap<OrganizationId, Arc<tokio::sync::Mutex<Option<Reading>>>>,
}

/// What holds for an organisation.
#[derive(Debug, Clone)]
struct Held {
    limits: Limits,
    read: Instant,
}

/// Who has a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Subject {
    Organization(OrganizationId),
    Key(OrganizationId, ApiKeyId),
}

/// What was presented, as a hash. What was refused a moment ago need not be looked up again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Mark([u8; 32]);

impl Mark {
    pub(crate) fn of(bearer: &str, organization: Option<&str>) -> Self {
        let hash = Sha256::new().chain_update(bearer).chain_update("\0").chain_update(organization.unwrap_or_default());
        Self(hash.finalize().into())
    }
}

/// Whose calls are refused unseen, and until when.
#[derive(Debug, Clone)]
pub(crate) struct Shed {
    pub(crate) known: Known,
    refusal: Refusal,
    /// When there is room again.
    free: Instant,
    /// Not for longer than limits are believed: there may be more meanwhile.
    until: Instant,
}

impl Shed {
    /// What is said at this moment.
    pub(crate) fn status(&self, now: Instant) -> Status {
        let mut refusal = self.refusal.clone();
        refusal.left.reset = self.free.saturating_duration_since(now);
        refused(&refusal)
    }
}

/// What an organisation has done, as it was counted last.
struct Reading {
    at: Instant,
    day: Timestamp,
    counts: Counts,
    /// Something was allowed since, which may not have come about.
    is_ahead: bool,
}

/// What a call adds to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Tasks it begins.
    pub(crate) tasks: i64,
    /// Whether models and scripts will work for it.
    pub(crate) work: bool,
    /// Bytes that are to be kept.
    pub(crate) bytes: i64,
}

impl Wanted {
    pub(crate) const TASK: Self = Self { tasks: 1, work: false, bytes: 0 };
    pub(crate) const WORK: Self = Self { tasks: 0, work: true, bytes: 0 };

    /// A scan: a task that works, and what was sent for it.
    pub(crate) fn scan(bytes: usize) -> Self {
        Self { tasks: 1, work: true, bytes: i64::try_from(bytes).unwrap_or(i64::MAX) }
    }

    /// A document: so much more is kept than before, or less.
    pub(crate) fn kept(bytes: i64) -> Self {
        Self { bytes, ..Self::default() }
    }

    /// What has to be counted for it.
    fn counted(self, limits: &Limits) -> Counted {
        let all = Counted::of(limits);
        Counted {
            tasks: all.tasks && self.tasks > 0,
            runs: all.runs && self.work,
            tokens: all.tokens && self.work,
            spend: all.spend && self.work,
            storage: all.storage && self.bytes > 0,
        }
    }
}

impl Quotas {
    pub(crate) fn new(config: &Config) -> Self {
        Self { tiers: config.gateway_tiers.clone(), tier: config.gateway_tier.clone(), tables: Mutex::default() }
    }

    /// Whether there is such a tier.
    pub(crate) fn has(&self, tier: &str) -> bool {
        tier == UNLIMITED || self.tiers.contains_key(tier)
    }

    /// The tier and the limits that hold for an organisation of which this was said. One that is configured no more is the one of which
    /// nothing was said.
    pub(crate) fn of(&self, organization: OrganizationId, quota: Option<&Quota>) -> (String, Limits) {
        let said = quota.map(|quota| quota.tier.as_str()).filter(|tier| !tier.is_empty());
        if let Some(tier) = said.filter(|tier| !self.has(tier)) {
            tracing::warn!(%organization, tier, "an organisation has a tier that is not configured");
        }
        let default = if organization == OrganizationId::LOCAL { UNLIMITED } else { &self.tier };
        let tier = said.filter(|tier| self.has(tier)).unwrap_or(default);
        let limits = self.tiers.get(tier).copied().unwrap_or_default();
        (tier.to_owned(), quota.map(|quota| quota.overrides).unwrap_or_default().or(limits))
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The limits of an organisation. While the database is away, the last that were known.
    async fn limits(&self, store: Option<&Store>, organization: OrganizationId) -> Limits {
        let now = Instant::now();
        let before = {
            let mut tables = self.tables();
            let held = tables.known.get_mut(&organization);
            match held {
                Some(held) if now.duration_since(held.read) < KNOWN => return held.limits,
                Some(held) => {
                    // The others go on with what is known while this one looks.
                    held.read = now;
                    Some(held.limits)
                }
                None => None,
            }
        };
        let fallback = before.unwrap_or_else(|| self.of(organization, None).1);
        let Some(store) = store else { return fallback };
        let limits = match store.quota_get(organization).await {
            Ok(quota) => self.of(organization, Some(&quota)).1,
            Err(error) => {
                tracing::debug!(%organization, error = status::chain(&error), "a quota could not be read");
                fallback
            }
        };
        self.tables().hold(organization, limits, Instant::now());
        limits
    }

    /// Takes over at once what was said of an organisation.
    pub(crate) fn changed(&self, quota: &Quota) {
        let limits = self.of(quota.organization, Some(quota)).1;
        let mut tables = self.tables();
        tables.hold(quota.organization, limits, Instant::now());
        tables.shed.retain(|_, shed| shed.known.organization != quota.organization);
        // Who was given more has not used it up.
        tables.buckets.retain(|subject, _| subject.organization() != quota.organization);
    }

    /// Whether what was presented is refused unseen.
    pub(crate) fn shed(&self, mark: &Mark, now: Instant) -> Option<Shed> {
        self.tables().shed.get(mark).filter(|shed| now < shed.until).cloned()
    }

    /// Counts a call.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when there were too many.
    pub(crate) async fn request(
        &self,
        store: Option<&Store>,
        caller: &Caller,
        mark: Option<Mark>,
    ) -> Result<Metered, Status> {
        let limits = self.limits(store, caller.organization).await;
        self.tables().request(&limits, caller, mark, Instant::now()).map_err(|refusal| refused(&refusal))
    }

    /// Whether it is counted what an organisation keeps.
    pub(crate) async fn limits_storage(&self, store: &Store, organization: OrganizationId) -> bool {
        self.limits(Some(store), organization).await.storage_bytes.is_some()
    }

    /// Whether an organisation may do something that lasts; if not, why.
    ///
    /// # Errors
    /// `UNAVAILABLE` when what it has done cannot be counted.
    pub(crate) async fn allow(
        &self,
        store: &Store,
        organization: OrganizationId,
        wanted: Wanted,
    ) -> Result<Option<Refusal>, Status> {
        let limits = self.limits(Some(store), organization).await;
        if wanted.counted(&limits) == Counted::default() {
            return Ok(None);
        }
        let reading = self.tables().reading(organization);
        // One after the other, so that two don't both take what only one may.
        let mut reading = reading.lock().await;
        let time = Timestamp::now();
        let periods = Periods::of(time);
        let of = Counted::of(&limits);
        let held = reading.take().filter(|reading| reading.day == periods.day);
        let mut read = match held {
            Some(reading) if reading.at.elapsed() < COUNTED => reading,
            held => count(store, organization, of, &periods, held).await?,
        };
        let mut allowed = check(&limits, &read.counts, wanted, organization, &periods, time);
        if allowed.is_err() && read.is_ahead {
            read = count(store, organization, of, &periods, Some(read)).await?;
            allowed = check(&limits, &read.counts, wanted, organization, &periods, time);
        }
        if allowed.is_ok() {
            read.counts.tasks = read.counts.tasks.saturating_add(wanted.tasks);
            read.counts.storage_bytes = read.counts.storage_bytes.saturating_add(wanted.bytes);
            read.is_ahead |= wanted.tasks > 0 || wanted.bytes > 0;
        }
        *reading = Some(read);
        Ok(allowed.err())
    }
}

/// Counts what an organisation has done. While that is not possible, what is known of the day goes on to hold, and nobody asks again
/// for a while: those who wait for this one would all wait for the database too.
async fn count(
    store: &Store,
    organization: OrganizationId,
    of: Counted,
    periods: &Periods,
    before: Option<Reading>,
) -> Result<Reading, Status> {
    let counted = store.quota_counts(organization, of, periods).await;
    // Summing up a long ledger takes a while, too.
    let at = Instant::now();
    match (counted, before) {
        (Ok(counts), _) => Ok(Reading { at, day: periods.day, counts, is_ahead: false }),
        (Err(error), Some(before)) => {
            tracing::debug!(%organization, error = status::chain(&error), "what an organization has done could not be counted");
            Ok(Reading { at, ..before })
        }
        (Err(error), None) => Err(status::of_store(error)),
    }
}

impl Tables {
    fn hold(&mut self, organization: OrganizationId, limits: Limits, now: Instant) {
        if self.known.len() >= REMEMBERED {
            self.known.retain(|_, held| now.duration_since(held.read) < KNOWN);
        }
        let before = self.known.insert(organization, Held { limits, read: now });
        // Other limits may need other counts.
        if before.is_none_or(|before| before.limits != limits)
            && let Some(reading) = self.readings.get(&organization)
            && let Ok(mut reading) = reading.try_lock()
        {
            *reading = None;
        }
    }

    fn reading(&mut self, organization: OrganizationId) -> Arc<tokio::sync::Mutex<Option<Reading>>> {
        if self.readings.len() >= REMEMBERED {
            // What somebody works with stays.
            self.readings.retain(|_, reading| Arc::strong_count(reading) > 1);
        }
        Arc::clone(self.readings.entry(organization).or_default())
    }

    /// Takes one from each bucket that there is for a caller, or from none.
    fn request(
        &mut self,
        limits: &Limits,
        caller: &Caller,
        mark: Option<Mark>,
        now: Instant,
    ) -> Result<Metered, Refusal> {
        let organization = limits.requests_per_minute.map(|limit| (Subject::Organization(caller.organization), limit));
        let key = limits
            .key_requests_per_minute
            .and_then(|limit| Some((Subject::Key(caller.organization, caller.key?), limit)));
        let limited: Vec<(Subject, u32)> = [organization, key]
            .into_iter()
            .flatten()
            .map(|(subject, limit)| (subject, u32::try_from(limit.max(0)).unwrap_or(u32::MAX)))
            .collect();
        if limited.is_empty() {
            return Ok(Metered::default());
        }
        if self.buckets.len() >= REMEMBERED {
            self.buckets.retain(|_, bucket| !bucket.is_full(now));
        }
        let wait = |(subject, limit): &(Subject, u32)| {
            let bucket = self.buckets.get(subject).copied().unwrap_or(Bucket::new(now));
            bucket.wait(*limit, now).map(|wait| (*subject, *limit, wait))
        };
        // The one that takes longest.
        if let Some((subject, limit, wait)) = limited.iter().filter_map(wait).max_by_key(|(.., wait)| *wait) {
            let refusal = subject.refusal(limit, wait);
            if let Some(mark) = mark {
                if self.shed.len() >= REMEMBERED {
                    self.shed.retain(|_, shed| now < shed.until);
                }
                let (free, until) = (now + wait, now + wait.min(KNOWN));
                let shed = Shed { known: Known::from(caller), refusal: refusal.clone(), free, until };
                self.shed.insert(mark, shed);
            }
            return Err(refusal);
        }
        let mut metered = Metered::default();
        for (subject, limit) in limited {
            let bucket = self.buckets.entry(subject).or_insert(Bucket::new(now));
            bucket.take(limit, now);
            let level = bucket.level(limit, now);
            metered.0.push(subject.left(limit, level.remaining, level.full_in));
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

    fn left(self, limit: u32, remaining: u32, reset: Duration) -> Left {
        let id = match self {
            Self::Organization(_) => "requests_per_minute",
            Self::Key(..) => "key_requests_per_minute",
        };
        let (limit, remaining) = (i64::from(limit), i64::from(remaining));
        Left { id, unit: None, limit, window: Some(WINDOW), remaining, reset }
    }

    fn refusal(self, limit: u32, wait: Duration) -> Refusal {
        let (subject, who) = match self {
            Self::Organization(id) => (format!("organization:{id}"), "the organization"),
            Self::Key(_, id) => (format!("api_key:{id}"), "this API key"),
        };
        let words = format!("{who} may make {limit} requests a minute, and has made them");
        Refusal { subject, words, left: self.left(limit, 0, wait) }
    }
}

/// What is said, and counted.
pub(crate) fn refused(refusal: &Refusal) -> Status {
    metrics::quota_refused(refusal.left.id);
    refusal.status()
}

/// An amount as people write it, to the cent above.
fn dollars(pico_usd: i64) -> String {
    let cents = i128::from(pico_usd).saturating_add(9_999_999_999) / 10_000_000_000;
    format!("${}.{:02}", cents / 100, cents % 100)
}

/// Whether there is room for what is wanted.
fn check(
    limits: &Limits,
    counts: &Counts,
    wanted: Wanted,
    organization: OrganizationId,
    periods: &Periods,
    now: Timestamp,
) -> Result<(), Refusal> {
    let until = |time: Timestamp| Duration::try_from(time.duration_since(now)).unwrap_or_default();
    let length = |from: Timestamp, to: Timestamp| Duration::try_from(to.duration_since(from)).ok();
    let (day, month) = (length(periods.day, periods.next_day), length(periods.month, periods.next_month));
    let (tomorrow, next_month) = (until(periods.next_day), until(periods.next_month));
    let work = i64::from(wanted.work);
    let today = |used, more| (used, more, day, tomorrow);
    let quotas = [
        ("tasks_per_day", "tasks", limits.tasks_per_day, today(counts.tasks, wanted.tasks)),
        ("runs_per_day", "runs", limits.runs_per_day, today(counts.runs, work)),
        ("tokens_per_day", "tokens", limits.tokens_per_day, today(counts.tokens, work)),
        (
            "spend_per_month_pico_usd",
            "pico-usd",
            limits.spend_per_month_pico_usd,
            (counts.spend_pico_usd, work, month, next_month),
        ),
        ("storage_bytes", "bytes", limits.storage_bytes, (counts.storage_bytes, wanted.bytes, None, UPLOADS)),
    ];
    for (id, unit, limit, (used, more, window, reset)) in quotas {
        let Some(limit) = limit.filter(|limit| more > 0 && used.saturating_add(more) > *limit) else { continue };
        let words = match id {
            "storage_bytes" => {
                format!("the organization may keep {limit} bytes of uploads and documents, and keeps {used}")
            }
            "spend_per_month_pico_usd" => {
                let (limit, used) = (dollars(limit), dollars(used));
                format!("the organization's models may cost {limit} a month, and have cost {used}")
            }
            _ => format!("the organization may have {limit} {unit} a day (of UTC), and has had {used}"),
        };
        let remaining = limit.saturating_sub(used).max(0);
        return Err(Refusal {
            subject: format!("organization:{organization}"),
            words,
            left: Left { id, unit: Some(unit), limit, window, remaining, reset },
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
