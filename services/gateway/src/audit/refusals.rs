//! Refused calls, recorded once and then counted: a caller costs the table a bounded number of
//! rows, however often it tries.
//!
//! Calls are of one kind when the same caller (of unknown callers: the same network) is refused the
//! same method with the same code. The first call of a minute is recorded at once. The others are
//! one entry with their number when the minute is over. At most [`MAX_KINDS_PER_CALLER`] kinds are
//! distinguished per caller, [`MAX_KINDS_PER_ORGANIZATION`] per organization, and
//! [`MAX_KINDS_OF_UNKNOWN_CALLERS`] for all unknown callers. Calls beyond that are counted
//! together, without their method; those of an organization in its own audit log. So no known
//! caller is hidden behind a crowd of unknown ones, and no organization behind another one's
//! callers.

use std::{
    collections::HashMap,
    mem,
    time::{Duration, Instant},
};

use construct_domain::{AuditEntryId, OrganizationId};
use construct_store::AuditEntry;
use jiff::Timestamp;
use uuid::Uuid;

use super::origin::CallerIdentity;
use crate::{identity::peer::Peer, limit::Holder};

/// How long calls are counted together.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// Maximum number of distinguished kinds per caller.
const MAX_KINDS_PER_CALLER: usize = 8;
/// Maximum number of distinguished kinds for the callers of one organization. Their total is
/// bounded by the number of organizations, which the operator creates.
const MAX_KINDS_PER_ORGANIZATION: usize = 100;
/// Maximum number of distinguished kinds for all unknown callers.
const MAX_KINDS_OF_UNKNOWN_CALLERS: usize = 200;

/// The caller of refused calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum RefusedCaller {
    Known(CallerIdentity),
    Network(Holder),
    Process(u32),
    Unknown,
}

impl RefusedCaller {
    pub(super) fn new(known: Option<CallerIdentity>, peer: Peer) -> Self {
        match (known, peer) {
            (Some(known), _) => Self::Known(known),
            (None, Peer::Address(address) | Peer::Forwarded(address)) => {
                Self::Network(Holder::network(Some(address)))
            }
            (None, Peer::Process { uid }) => Self::Process(uid),
            (None, Peer::Unknown) => Self::Unknown,
        }
    }

    /// The organization of the caller; `None` for unknown callers.
    fn organization(self) -> Option<OrganizationId> {
        match self {
            Self::Known(known) => Some(known.organization),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Kind {
    /// One method and code of a caller.
    One(RefusedCaller, String, u8),
    /// All other calls of a caller with this code.
    Rest(RefusedCaller, u8),
    /// All other calls with this code of an organization's callers, or of unknown callers.
    Others(Option<OrganizationId>, u8),
}

struct CountedCalls {
    since: Instant,
    /// The first call.
    entry: AuditEntry,
    /// The number of further calls.
    further: u64,
    last: Timestamp,
}

/// The refused calls of the last minute.
#[derive(Default)]
pub(super) struct Refusals {
    counted: HashMap<Kind, CountedCalls>,
    /// Number of kinds by caller.
    kinds: HashMap<RefusedCaller, usize>,
    /// Number of kinds by organization.
    kinds_by_organization: HashMap<Option<OrganizationId>, usize>,
}

impl Refusals {
    /// Counts a call. Returns its entry if it is the first of its kind.
    pub(super) fn count(
        &mut self,
        caller: RefusedCaller,
        entry: AuditEntry,
        now: Instant,
    ) -> Option<AuditEntry> {
        let kind = self.kind(caller, &entry);
        if let Some(counted) = self.counted.get_mut(&kind) {
            counted.further += 1;
            counted.last = entry.created_at;
            return None;
        }
        if !matches!(kind, Kind::Others(..)) {
            self.count_kind(caller);
        }
        let counted =
            CountedCalls { since: now, entry: entry.clone(), further: 0, last: entry.created_at };
        self.counted.insert(kind, counted);
        Some(entry)
    }

    fn count_kind(&mut self, caller: RefusedCaller) {
        *self.kinds.entry(caller).or_default() += 1;
        *self.kinds_by_organization.entry(caller.organization()).or_default() += 1;
    }

    fn kind(&self, caller: RefusedCaller, entry: &AuditEntry) -> Kind {
        let one = Kind::One(caller, entry.method.clone(), entry.code);
        if self.counted.contains_key(&one) {
            return one;
        }
        let organization = caller.organization();
        let max = if organization.is_some() {
            MAX_KINDS_PER_ORGANIZATION
        } else {
            MAX_KINDS_OF_UNKNOWN_CALLERS
        };
        let kinds_by_organization =
            self.kinds_by_organization.get(&organization).copied().unwrap_or_default();
        let rest = Kind::Rest(caller, entry.code);
        if kinds_by_organization >= max && !self.counted.contains_key(&rest) {
            return Kind::Others(organization, entry.code);
        }
        if self.kinds.get(&caller).is_some_and(|kinds| *kinds + 1 >= MAX_KINDS_PER_CALLER) {
            rest
        } else {
            one
        }
    }

    /// Returns the counts of the minutes that are over; with `last`, of all.
    pub(super) fn due(&mut self, now: Instant, last: bool) -> Vec<AuditEntry> {
        let (over, counted): (HashMap<_, _>, _) = mem::take(&mut self.counted)
            .into_iter()
            .partition(|(_, counted)| last || now.duration_since(counted.since) >= WINDOW);
        self.counted = counted;
        self.kinds.clear();
        self.kinds_by_organization.clear();
        let callers = self.counted.keys().filter_map(|kind| match kind {
            Kind::One(caller, ..) | Kind::Rest(caller, _) => Some(*caller),
            Kind::Others(..) => None,
        });
        for caller in callers.collect::<Vec<_>>() {
            self.count_kind(caller);
        }
        let numbers = over.into_iter().filter(|(_, counted)| counted.further > 0);
        numbers.map(|(kind, counted)| counted.into_entry(&kind)).collect()
    }
}

impl CountedCalls {
    /// Returns the entry with the number of calls after the first.
    fn into_entry(self, kind: &Kind) -> AuditEntry {
        let mut entry = AuditEntry {
            id: AuditEntryId::from_uuid(Uuid::now_v7()),
            count: self.further,
            objects: Vec::new(),
            request_id: String::new(),
            trace_id: String::new(),
            created_at: self.last,
            ..self.entry
        };
        if !matches!(kind, Kind::One(..)) {
            entry.method.clear();
        }
        if let Kind::Others(organization, _) = kind {
            // Of several callers. Those of unknown callers belong to the operator's organization.
            entry.organization = organization.unwrap_or(OrganizationId::LOCAL);
            (entry.user, entry.api_key) = (None, None);
            entry.peer.clear();
            entry.user_agent.clear();
        }
        entry
    }
}

#[cfg(test)]
mod tests {
    use construct_domain::UserId;
    use tonic::{Code, codegen::http::Request};

    use super::*;
    use crate::audit::origin::Origin;

    fn entry(method: &str) -> AuditEntry {
        Origin::from_request(&Request::new(())).entry(method, None, Code::Unauthenticated)
    }

    fn unknown_caller(number: u32) -> RefusedCaller {
        RefusedCaller::new(None, Peer::Address(std::net::IpAddr::from(number.to_be_bytes())))
    }

    fn known_caller(number: u128) -> RefusedCaller {
        caller_of(OrganizationId::LOCAL, number)
    }

    fn caller_of(organization: OrganizationId, number: u128) -> RefusedCaller {
        let user = UserId::from_uuid(Uuid::from_u128(number));
        RefusedCaller::Known(CallerIdentity { organization, user, key: None })
    }

    fn counts(entries: &[AuditEntry]) -> Vec<(String, u64)> {
        let mut counts: Vec<_> =
            entries.iter().map(|entry| (entry.method.clone(), entry.count)).collect();
        counts.sort();
        counts
    }

    #[test]
    fn first_refusal_is_recorded_and_others_are_counted() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        assert_eq!(
            refusals.count(unknown_caller(1), entry("a"), now).map(|entry| entry.count),
            Some(1)
        );
        for _ in 0..1000 {
            assert_eq!(refusals.count(unknown_caller(1), entry("a"), now), None);
        }
        assert!(refusals.count(unknown_caller(1), entry("b"), now).is_some());
        assert!(refusals.count(unknown_caller(2), entry("a"), now).is_some());
        assert_eq!(refusals.due(now + WINDOW / 2, false), []);
        assert_eq!(counts(&refusals.due(now + WINDOW, false)), [("a".to_owned(), 1000)]);
        assert!(refusals.count(unknown_caller(1), entry("a"), now + WINDOW).is_some());
    }

    #[test]
    fn caller_has_a_bounded_number_of_entries() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let at_once = (0..100)
            .filter_map(|n| refusals.count(unknown_caller(1), entry(&n.to_string()), now))
            .count();
        assert_eq!(at_once, MAX_KINDS_PER_CALLER);
        let later = refusals.due(now, true);
        assert_eq!(counts(&later), [(String::new(), 100 - MAX_KINDS_PER_CALLER as u64)]);
    }

    #[test]
    fn crowd_of_unknown_callers_hides_no_known_caller() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let v6 =
            |text: &str| RefusedCaller::new(None, Peer::Address(text.parse().expect("an address")));
        assert!(refusals.count(v6("2001:db8::1"), entry("a"), now).is_some());
        assert!(refusals.count(v6("2001:db8::2"), entry("a"), now).is_none());
        let crowd = 10_000;
        let at_once =
            (0..crowd).filter_map(|n| refusals.count(unknown_caller(n), entry("a"), now)).count();
        assert_eq!(at_once, MAX_KINDS_OF_UNKNOWN_CALLERS);
        assert!(refusals.count(known_caller(1), entry("a"), now).is_some());
        let later = refusals.due(now, true);
        let total: u64 = later.iter().map(|entry| entry.count).sum();
        assert_eq!(total + at_once as u64 + 1, u64::from(crowd) + 2);
        assert!(
            later.iter().any(|entry| entry.method.is_empty() && entry.peer.is_empty()),
            "{later:?}"
        );
    }

    #[test]
    fn calls_counted_together_have_one_code() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        for n in 0..20 {
            refusals.count(unknown_caller(1), entry(&n.to_string()), now);
            refusals.count(unknown_caller(1), AuditEntry { code: 3, ..entry(&n.to_string()) }, now);
        }
        let mut later: Vec<_> =
            refusals.due(now, true).into_iter().map(|entry| (entry.code, entry.count)).collect();
        later.sort_unstable();
        // Four methods are distinguished with the one code and three with the other; the first of
        // each rest has its own entry.
        assert_eq!(later, [(3, 16), (16, 15)]);
    }

    #[test]
    fn flooding_organization_hides_no_other_organization() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let [flooding, quiet] =
            [1, 2].map(|number| OrganizationId::from_uuid(Uuid::from_u128(number)));
        let entry = |organization, method: &str| AuditEntry { organization, ..entry(method) };
        let crowd = 3000;
        let at_once = (0..crowd)
            .filter_map(|n| refusals.count(caller_of(flooding, n), entry(flooding, "a"), now))
            .count();
        // The first call beyond the limit has its own entry, too.
        assert_eq!(at_once, MAX_KINDS_PER_ORGANIZATION + 1);
        for method in ["a", "b"] {
            let entry = refusals
                .count(caller_of(quiet, 1), entry(quiet, method), now)
                .expect("its own kind");
            assert_eq!((entry.organization, entry.method.as_str()), (quiet, method));
        }
        // The end of a minute frees its kinds.
        let later = refusals.due(now + WINDOW, false);
        assert_eq!(later.len(), 1, "{later:?}");
        let others = &later[0];
        assert_eq!(
            (others.organization, others.user, others.method.as_str()),
            (flooding, None, "")
        );
        assert_eq!(u128::from(others.count) + at_once as u128, crowd);
        assert!(
            refusals
                .count(caller_of(flooding, crowd), entry(flooding, "a"), now + WINDOW)
                .is_some()
        );
        assert_eq!(refusals.kinds_by_organization.values().sum::<usize>(), 1);
    }
}
