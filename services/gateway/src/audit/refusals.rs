//! Refused calls, written down once and then counted: whoever is refused costs the table a bounded
//! number of rows, however often they try.
//!
//! Calls are alike when the same caller (of strangers: the same network) is refused the same method
//! with the same code. The first of a minute is an entry at once; those that follow are one entry
//! with their number when the minute is over. Of one caller at most [`KINDS`] kinds are told apart,
//! of one organization [`ORGANIZATION`], and of all strangers [`STRANGERS`]; what is beyond is
//! counted together, without saying what was called, and of an organization's in its own trail. So
//! nobody who is known can be hidden behind a crowd of strangers, and no organization behind
//! another one's callers.

use std::{
    collections::HashMap,
    mem,
    net::IpAddr,
    time::{Duration, Instant},
};

use construct_domain::{AuditEntryId, OrganizationId};
use construct_store::AuditEntry;
use jiff::Timestamp;
use uuid::Uuid;

use super::origin::Known;
use crate::identity::{failures::network, peer::Peer};

/// How long calls are counted together.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// Kinds of refusals that are told apart of one caller.
const KINDS: usize = 8;
/// Kinds that are told apart of the callers of one organization. What all of them together may cost
/// is bounded by how many organizations there are, which the operator makes.
const ORGANIZATION: usize = 100;
/// Kinds that are told apart of all strangers.
const STRANGERS: usize = 200;

/// Who was refused, as far as it is told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Who {
    Known(Known),
    Network(IpAddr),
    Process(u32),
    Unknown,
}

impl Who {
    pub(super) fn of(known: Option<Known>, peer: Peer) -> Self {
        match (known, peer) {
            (Some(known), _) => Self::Known(known),
            (None, Peer::Address(address) | Peer::Forwarded(address)) => {
                Self::Network(network(address))
            }
            (None, Peer::Process { uid }) => Self::Process(uid),
            (None, Peer::Unknown) => Self::Unknown,
        }
    }

    /// Whose; none: nobody's that is known.
    fn organization(self) -> Option<OrganizationId> {
        match self {
            Self::Known(known) => Some(known.organization),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Kind {
    /// Of this caller, this method and code.
    One(Who, String, u8),
    /// Whatever else this caller was refused with this code.
    Rest(Who, u8),
    /// Whatever else was refused with this code to the callers of an organization, or to strangers.
    Others(Option<OrganizationId>, u8),
}

struct Counted {
    since: Instant,
    /// The first.
    entry: AuditEntry,
    /// How many there were since.
    further: u64,
    last: Timestamp,
}

/// What was refused in the last minute.
#[derive(Default)]
pub(super) struct Refusals {
    counted: HashMap<Kind, Counted>,
    /// Kinds by caller.
    kinds: HashMap<Who, usize>,
    /// Kinds of all callers together, by organization.
    together: HashMap<Option<OrganizationId>, usize>,
}

impl Refusals {
    /// Counts a call. Gives its entry, when it is the first of its kind.
    pub(super) fn note(&mut self, who: Who, entry: AuditEntry, now: Instant) -> Option<AuditEntry> {
        let kind = self.kind(who, &entry);
        if let Some(counted) = self.counted.get_mut(&kind) {
            counted.further += 1;
            counted.last = entry.created_at;
            return None;
        }
        if !matches!(kind, Kind::Others(..)) {
            self.add(who);
        }
        let counted =
            Counted { since: now, entry: entry.clone(), further: 0, last: entry.created_at };
        self.counted.insert(kind, counted);
        Some(entry)
    }

    fn add(&mut self, who: Who) {
        *self.kinds.entry(who).or_default() += 1;
        *self.together.entry(who.organization()).or_default() += 1;
    }

    fn kind(&self, who: Who, entry: &AuditEntry) -> Kind {
        let one = Kind::One(who, entry.method.clone(), entry.code);
        if self.counted.contains_key(&one) {
            return one;
        }
        let organization = who.organization();
        let most = if organization.is_some() { ORGANIZATION } else { STRANGERS };
        let together = self.together.get(&organization).copied().unwrap_or_default();
        let rest = Kind::Rest(who, entry.code);
        if together >= most && !self.counted.contains_key(&rest) {
            return Kind::Others(organization, entry.code);
        }
        if self.kinds.get(&who).is_some_and(|kinds| *kinds + 1 >= KINDS) { rest } else { one }
    }

    /// The numbers of the minutes that are over; of all that have begun, when it is the last time.
    pub(super) fn due(&mut self, now: Instant, last: bool) -> Vec<AuditEntry> {
        let (over, counted): (HashMap<_, _>, _) = mem::take(&mut self.counted)
            .into_iter()
            .partition(|(_, counted)| last || now.duration_since(counted.since) >= WINDOW);
        self.counted = counted;
        self.kinds.clear();
        self.together.clear();
        let callers = self.counted.keys().filter_map(|kind| match kind {
            Kind::One(who, ..) | Kind::Rest(who, _) => Some(*who),
            Kind::Others(..) => None,
        });
        for who in callers.collect::<Vec<_>>() {
            self.add(who);
        }
        let numbers = over.into_iter().filter(|(_, counted)| counted.further > 0);
        numbers.map(|(kind, counted)| counted.number(&kind)).collect()
    }
}

impl Counted {
    /// The entry that says how many there were besides the first.
    fn number(self, kind: &Kind) -> AuditEntry {
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
            // Of several callers; strangers are in the operator's trail.
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
        Origin::of(&Request::new(())).entry(method, None, Code::Unauthenticated)
    }

    fn stranger(number: u32) -> Who {
        Who::of(None, Peer::Address(IpAddr::from(number.to_be_bytes())))
    }

    fn known(number: u128) -> Who {
        of(OrganizationId::LOCAL, number)
    }

    fn of(organization: OrganizationId, number: u128) -> Who {
        let user = UserId::from_uuid(Uuid::from_u128(number));
        Who::Known(Known { organization, user, key: None })
    }

    fn counts(entries: &[AuditEntry]) -> Vec<(String, u64)> {
        let mut counts: Vec<_> =
            entries.iter().map(|entry| (entry.method.clone(), entry.count)).collect();
        counts.sort();
        counts
    }

    #[test]
    fn the_first_is_told_at_once_and_the_rest_is_counted_when_the_minute_is_over() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.note(stranger(1), entry("a"), now).map(|entry| entry.count), Some(1));
        for _ in 0..1000 {
            assert_eq!(refusals.note(stranger(1), entry("a"), now), None);
        }
        assert!(refusals.note(stranger(1), entry("b"), now).is_some());
        assert!(refusals.note(stranger(2), entry("a"), now).is_some());
        assert_eq!(refusals.due(now + WINDOW / 2, false), []);
        assert_eq!(counts(&refusals.due(now + WINDOW, false)), [("a".to_owned(), 1000)]);
        assert!(refusals.note(stranger(1), entry("a"), now + WINDOW).is_some());
    }

    #[test]
    fn whoever_tries_everything_is_a_bounded_number_of_rows_and_none_is_left_out() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let at_once =
            (0..100).filter_map(|n| refusals.note(stranger(1), entry(&n.to_string()), now)).count();
        assert_eq!(at_once, KINDS);
        let later = refusals.due(now, true);
        assert_eq!(counts(&later), [(String::new(), 100 - KINDS as u64)]);
    }

    #[test]
    fn neighbors_are_one_and_a_crowd_is_counted_together_but_hides_nobody_who_is_known() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let v6 = |text: &str| Who::of(None, Peer::Address(text.parse().expect("an address")));
        assert!(refusals.note(v6("2001:db8::1"), entry("a"), now).is_some());
        assert!(refusals.note(v6("2001:db8::2"), entry("a"), now).is_none());
        let crowd = 10_000;
        let at_once =
            (0..crowd).filter_map(|n| refusals.note(stranger(n), entry("a"), now)).count();
        assert_eq!(at_once, STRANGERS);
        assert!(refusals.note(known(1), entry("a"), now).is_some());
        let later = refusals.due(now, true);
        let total: u64 = later.iter().map(|entry| entry.count).sum();
        assert_eq!(total + at_once as u64 + 1, u64::from(crowd) + 2);
        assert!(
            later.iter().any(|entry| entry.method.is_empty() && entry.peer.is_empty()),
            "{later:?}"
        );
    }

    #[test]
    fn what_is_counted_together_has_one_code() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        for n in 0..20 {
            refusals.note(stranger(1), entry(&n.to_string()), now);
            refusals.note(stranger(1), AuditEntry { code: 3, ..entry(&n.to_string()) }, now);
        }
        let mut later: Vec<_> =
            refusals.due(now, true).into_iter().map(|entry| (entry.code, entry.count)).collect();
        later.sort_unstable();
        // Four methods are told apart with the one code and three with the other; the first of each
        // rest is an entry of its own.
        assert_eq!(later, [(3, 16), (16, 15)]);
    }

    #[test]
    fn the_callers_of_one_organization_hide_nobody_of_another_and_their_number_is_in_their_own_trail()
     {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let [flooding, quiet] =
            [1, 2].map(|number| OrganizationId::from_uuid(Uuid::from_u128(number)));
        let entry = |organization, method: &str| AuditEntry { organization, ..entry(method) };
        let crowd = 3000;
        let at_once = (0..crowd)
            .filter_map(|n| refusals.note(of(flooding, n), entry(flooding, "a"), now))
            .count();
        // The first of what is beyond is an entry of its own, too.
        assert_eq!(at_once, ORGANIZATION + 1);
        for method in ["a", "b"] {
            let told =
                refusals.note(of(quiet, 1), entry(quiet, method), now).expect("it is told apart");
            assert_eq!((told.organization, told.method.as_str()), (quiet, method));
        }
        // A minute that is over makes room.
        let later = refusals.due(now + WINDOW, false);
        assert_eq!(later.len(), 1, "{later:?}");
        let others = &later[0];
        assert_eq!(
            (others.organization, others.user, others.method.as_str()),
            (flooding, None, "")
        );
        assert_eq!(u128::from(others.count) + at_once as u128, crowd);
        assert!(refusals.note(of(flooding, crowd), entry(flooding, "a"), now + WINDOW).is_some());
        assert_eq!(refusals.together.values().sum::<usize>(), 1);
    }
}
