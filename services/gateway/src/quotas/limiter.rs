//! What is counted, and where it ends.

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
    refusal::{Left, Metered, Refusal},
    tiers::UNLIMITED,
};
use crate::{Config, audit::origin::Known, caller::Caller, metrics, status};

/// How long what the operator has said of an organization is believed before it is read again.
const KNOWN: Duration = Duration::from_secs(5);
/// How long what an organization has done is believed before it is counted again.
const COUNTED: Duration = Duration::from_secs(2);
/// After how long an upload may have made room.
const UPLOADS: Duration = Duration::from_secs(60);
/// Entries of a table beyond which those are forgotten that say nothing. Others are as many as
/// organizations and keys that called within a minute.
const REMEMBERED: usize = 4096;

/// The quotas of all organizations, as this gateway sees them.
pub(crate) struct Quotas {
    tiers: BTreeMap<String, Limits>,
    /// The tier of organizations of which nothing was said, but for the operator's.
    tier: String,
    calendar: Calendar,
    tables: Mutex<Tables>,
}

#[derive(Default)]
struct Tables {
    known: HashMap<OrganizationId, Held>,
    buckets: HashMap<Subject, Bucket>,
    shed: HashMap<Mark, Shed>,
    readings: HashMap<Book, Arc<tokio::sync::Mutex<Option<Reading>>>>,
}

/// What holds for an organization.
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

/// What is counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Book {
    Organization(OrganizationId),
    /// All keys of an organization.
    Keys(OrganizationId),
}

/// What was presented, as a hash. What was refused a moment ago need not be looked up again.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Mark([u8; 32]);

impl Mark {
    pub(crate) fn of(bearer: &str, organization: Option<&str>) -> Self {
        let hash = Sha256::new()
            .chain_update(bearer)
            .chain_update("\0")
            .chain_update(organization.unwrap_or_default());
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

/// What an organization or each of its keys has done, as it was counted last.
struct Reading {
    at: Instant,
    day: Timestamp,
    /// What was counted.
    of: CountSelection,
    /// By key; none: the organization. Who is not in it has done nothing.
    done: HashMap<Option<ApiKeyId>, Counts>,
    /// Whom something was allowed since, which may not have come about. Another's refusal is no
    /// reason to count again.
    ahead: HashSet<Option<ApiKeyId>>,
}

impl Reading {
    fn of(&self, subject: Subject) -> Counts {
        self.done.get(&subject.key()).copied().unwrap_or_default()
    }
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
    /// The same for the key: where room is made by what another has stored, it is the
    /// organization's alone.
    pub(crate) bytes_of_key: i64,
}

impl Wanted {
    pub(crate) const TASK: Self = Self { tasks: 1, work: false, bytes: 0, bytes_of_key: 0 };
    pub(crate) const WORK: Self = Self { tasks: 0, work: true, bytes: 0, bytes_of_key: 0 };

    /// A scan: a task that works, and what was sent for it.
    pub(crate) fn scan(bytes: usize) -> Self {
        Self { tasks: 1, work: true, ..Self::kept(i64::try_from(bytes).unwrap_or(i64::MAX)) }
    }

    /// A file or a document: so much more is kept than before, or less.
    pub(crate) fn kept(bytes: i64) -> Self {
        Self { bytes, bytes_of_key: bytes, ..Self::default() }
    }

    /// What has to be counted for it, of an organization or a key.
    fn counted(self, limits: &Limits, subject: Subject) -> CountSelection {
        let all = CountSelection::for_limits(limits);
        CountSelection {
            tasks: all.tasks && self.tasks > 0,
            runs: all.runs && self.work,
            tokens: all.tokens && self.work,
            spend: all.spend && self.work,
            storage: all.storage && self.bytes_of(subject) > 0,
        }
    }

    /// What an organization or a key keeps more.
    fn bytes_of(self, subject: Subject) -> i64 {
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

    /// Whether there is such a tier.
    pub(crate) fn has(&self, tier: &str) -> bool {
        tier == UNLIMITED || self.tiers.contains_key(tier)
    }

    /// The tier and the limits that hold for an organization of which this was said. One that is
    /// configured no more is the one of which nothing was said.
    pub(crate) fn of(
        &self,
        organization: OrganizationId,
        quota: Option<&Quota>,
    ) -> (String, Limits) {
        let said = quota.map(|quota| quota.tier.as_str()).filter(|tier| !tier.is_empty());
        if let Some(tier) = said.filter(|tier| !self.has(tier)) {
            tracing::warn!(%organization, tier, "an organization has a tier that is not configured");
        }
        let default = if organization == OrganizationId::LOCAL { UNLIMITED } else { &self.tier };
        let tier = said.filter(|tier| self.has(tier)).unwrap_or(default);
        let limits = self.tiers.get(tier).copied().unwrap_or_default();
        (tier.to_owned(), quota.map(|quota| quota.overrides).unwrap_or_default().or(limits))
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The limits of an organization. While the database is away, the last that were known.
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

    /// Takes over at once what was said of an organization.
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
        self.tables()
            .request(&limits, caller, mark, Instant::now())
            .map_err(|refusal| refused(&refusal))
    }

    /// The day and the month that a time is in.
    pub(crate) fn periods(&self, now: Timestamp) -> Periods {
        self.calendar.periods(now)
    }

    /// Whether it is counted what an organization keeps.
    pub(crate) async fn limits_storage(&self, store: &Store, organization: OrganizationId) -> bool {
        self.limits(Some(store), organization).await.storage_bytes.is_some()
    }

    /// Whether a key with these limits, if there is one, and its organization may do something that
    /// lasts; if not, why.
    ///
    /// # Errors
    /// `UNAVAILABLE` when what they have done cannot be counted.
    pub(crate) async fn allow(
        &self,
        store: &Store,
        organization: OrganizationId,
        key: Option<(ApiKeyId, Limits)>,
        wanted: Wanted,
    ) -> Result<Option<Refusal>, Status> {
        if let Some((key, limits)) = key {
            let refusal =
                self.room(store, Subject::Key(organization, key), &limits, wanted).await?;
            if refusal.is_some() {
                return Ok(refusal);
            }
        }
        let limits = self.limits(Some(store), organization).await;
        self.room(store, Subject::Organization(organization), &limits, wanted).await
    }

    async fn room(
        &self,
        store: &Store,
        subject: Subject,
        limits: &Limits,
        wanted: Wanted,
    ) -> Result<Option<Refusal>, Status> {
        if wanted.counted(limits, subject) == CountSelection::default() {
            return Ok(None);
        }
        let book = subject.book();
        let reading = self.tables().reading(book);
        // One after the other, so that two don't both take what only one may.
        let mut reading = reading.lock().await;
        let time = clock::now();
        let periods = self.periods(time);
        let held = reading.take().filter(|reading| reading.day == periods.day);
        // Of the keys of one organization some may have other limits than others.
        let of = held
            .as_ref()
            .map(|held| held.of)
            .unwrap_or_default()
            .union(CountSelection::for_limits(limits));
        let mut read = match held {
            Some(reading) if reading.of == of && reading.at.elapsed() < COUNTED => reading,
            held => count(store, book, of, &periods, held).await?,
        };
        let mut allowed = check(limits, &read.of(subject), wanted, subject, &periods, time);
        if allowed.is_err() && read.ahead.contains(&subject.key()) {
            read = count(store, book, of, &periods, Some(read)).await?;
            allowed = check(limits, &read.of(subject), wanted, subject, &periods, time);
        }
        if allowed.is_ok() {
            let done = read.done.entry(subject.key()).or_default();
            done.tasks = done.tasks.saturating_add(wanted.tasks);
            done.storage_bytes = done.storage_bytes.saturating_add(wanted.bytes_of(subject));
            if wanted.tasks > 0 || wanted.bytes_of(subject) > 0 {
                read.ahead.insert(subject.key());
            }
        }
        *reading = Some(read);
        Ok(allowed.err())
    }
}

/// Counts what an organization or its keys have done. While that is not possible, what is known of
/// the day goes on to hold, and nobody asks again for a while: those who wait for this one would
/// all wait for the database too.
async fn count(
    store: &Store,
    book: Book,
    of: CountSelection,
    periods: &Periods,
    before: Option<Reading>,
) -> Result<Reading, Status> {
    let counted = match book {
        Book::Organization(organization) => store
            .quota_counts(organization, of, periods)
            .await
            .map(|counts| HashMap::from([(None, counts)])),
        Book::Keys(organization) => store
            .quota_key_counts(organization, of, periods)
            .await
            .map(|counts| counts.into_iter().map(|(key, counts)| (Some(key), counts)).collect()),
    };
    // Summing up a long ledger takes a while, too.
    let at = Instant::now();
    match (counted, before) {
        (Ok(done), _) => Ok(Reading { at, day: periods.day, of, done, ahead: HashSet::new() }),
        (Err(error), Some(before)) if before.of == of => {
            tracing::debug!(
                ?book,
                error = status::chain(&error),
                "what was done could not be counted"
            );
            Ok(Reading { at, ..before })
        }
        (Err(error), _) => Err(status::from_store(error)),
    }
}

impl Tables {
    fn hold(&mut self, organization: OrganizationId, limits: Limits, now: Instant) {
        if self.known.len() >= REMEMBERED {
            self.known.retain(|_, held| now.duration_since(held.read) < KNOWN);
        }
        self.known.insert(organization, Held { limits, read: now });
    }

    fn reading(&mut self, book: Book) -> Arc<tokio::sync::Mutex<Option<Reading>>> {
        if self.readings.len() >= REMEMBERED {
            // What somebody works with stays.
            self.readings.retain(|_, reading| Arc::strong_count(reading) > 1);
        }
        Arc::clone(self.readings.entry(book).or_default())
    }

    /// Takes one from each bucket that there is for a caller, or from none.
    fn request(
        &mut self,
        limits: &Limits,
        caller: &Caller,
        mark: Option<Mark>,
        now: Instant,
    ) -> Result<Metered, Refusal> {
        let organization = limits
            .requests_per_minute
            .map(|limit| (Subject::Organization(caller.organization), limit));
        // Whoever limits a key cannot give it more than the operator gives each.
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
        if let Some((subject, limit, wait)) =
            limited.iter().filter_map(wait).max_by_key(|(.., wait)| *wait)
        {
            let refusal = subject.refusal(limit, wait);
            if let Some(mark) = mark {
                if self.shed.len() >= REMEMBERED {
                    self.shed.retain(|_, shed| now < shed.until);
                }
                let (free, until) = (now + wait, now + wait.min(KNOWN));
                let shed =
                    Shed { known: Known::from(caller), refusal: refusal.clone(), free, until };
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

    fn key(self) -> Option<ApiKeyId> {
        match self {
            Self::Organization(_) => None,
            Self::Key(_, key) => Some(key),
        }
    }

    fn book(self) -> Book {
        match self {
            Self::Organization(organization) => Book::Organization(organization),
            Self::Key(organization, _) => Book::Keys(organization),
        }
    }

    /// As refusals name it, and what it is called.
    fn named(self) -> (String, &'static str) {
        match self {
            Self::Organization(id) => (format!("organization:{id}"), "the organization"),
            Self::Key(_, id) => (format!("api_key:{id}"), "this API key"),
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
        let (subject, who) = self.named();
        let words = format!("{who} may make {limit} requests a minute, and has made them");
        Refusal { subject, words, left: self.left(limit, 0, wait) }
    }
}

/// What is said, and counted.
pub(crate) fn refused(refusal: &Refusal) -> Status {
    metrics::quota_exceeded(refusal.left.id);
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
    subject: Subject,
    periods: &Periods,
    now: Timestamp,
) -> Result<(), Refusal> {
    let until = |time: Timestamp| Duration::try_from(time.duration_since(now)).unwrap_or_default();
    let length = |from: Timestamp, to: Timestamp| Duration::try_from(to.duration_since(from)).ok();
    let (day, month) =
        (length(periods.day, periods.next_day), length(periods.month, periods.next_month));
    let (tomorrow, next_month) = (until(periods.next_day), until(periods.next_month));
    let work = i64::from(wanted.work);
    let today = |used, more| (used, more, day, tomorrow);
    let quotas = [
        (
            ["tasks_per_day", "key_tasks_per_day"],
            "tasks",
            limits.tasks_per_day,
            today(counts.tasks, wanted.tasks),
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
            (counts.storage_bytes, wanted.bytes_of(subject), None, UPLOADS),
        ),
    ];
    let (name, who) = subject.named();
    for (ids, unit, limit, (used, more, window, reset)) in quotas {
        let Some(limit) = limit.filter(|limit| more > 0 && used.saturating_add(more) > *limit)
        else {
            continue;
        };
        let words = match unit {
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
            words,
            left: Left {
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
