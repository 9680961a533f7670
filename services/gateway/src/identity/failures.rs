//! A limit on failed log-ins with tokens of an issuer. Guessing is hopeless at any rate. The limit
//! bounds the work that a client can cause outside of this process. Keys and codes cost one index
//! lookup and are not limited.
//!
//! Failures are counted per peer address in a minute (for IPv6 per /64, the network of one
//! customer). Beyond the limit, credentials from the address are refused without a check until the
//! minute is over. Recently accepted credentials are still checked, so that one failing client
//! behind a proxy does not lock out the others.

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::limit::Holder;

/// Length of a window.
const WINDOW: Duration = Duration::from_secs(60);
/// Maximum number of addresses. A full table drops the windows that are over, then all: a client
/// with so many addresses is not stopped by this anyway.
const MAX_ADDRESSES: usize = 4096;
/// Maximum number of accepted credentials. A full table drops all of them.
const MAX_ACCEPTED: usize = 16_384;

/// Failed log-ins by address.
#[derive(Debug)]
pub(crate) struct Failures {
    /// Maximum number of failures of an address in a window.
    limit: u32,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    windows: HashMap<Holder, Window>,
    accepted: HashSet<[u8; 32]>,
}

#[derive(Debug)]
struct Window {
    since: Instant,
    count: u32,
}

impl Failures {
    /// Allows this number of failures of an address in a minute.
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit, table: Mutex::default() }
    }

    /// Whether a credential from this address is refused without a check. `credential` is its hash.
    pub(crate) fn is_limited(
        &self,
        peer: Option<IpAddr>,
        credential: &[u8; 32],
        now: Instant,
    ) -> bool {
        let Some(peer) = network(peer) else { return false };
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let over = |window: &Window| {
            window.count >= self.limit && now.duration_since(window.since) < WINDOW
        };
        table.windows.get(&peer).is_some_and(over) && !table.accepted.contains(credential)
    }

    /// Records a failed log-in.
    pub(crate) fn record_failure(&self, peer: Option<IpAddr>, credential: &[u8; 32], now: Instant) {
        let Some(peer) = network(peer) else { return };
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.accepted.remove(credential);
        if table.windows.len() >= MAX_ADDRESSES && !table.windows.contains_key(&peer) {
            table.windows.retain(|_, window| now.duration_since(window.since) < WINDOW);
            if table.windows.len() >= MAX_ADDRESSES {
                table.windows.clear();
            }
        }
        let window = table.windows.entry(peer).or_insert(Window { since: now, count: 0 });
        if now.duration_since(window.since) >= WINDOW {
            *window = Window { since: now, count: 0 };
        }
        window.count = window.count.saturating_add(1);
    }

    /// Whether a credential was accepted recently.
    pub(crate) fn was_accepted(&self, credential: &[u8; 32]) -> bool {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).accepted.contains(credential)
    }

    /// Removes a credential that is not or no longer valid.
    pub(crate) fn forget(&self, credential: &[u8; 32]) {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).accepted.remove(credential);
    }

    /// Records an accepted credential.
    pub(crate) fn record_success(&self, credential: &[u8; 32]) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.accepted.len() >= MAX_ACCEPTED && !table.accepted.contains(credential) {
            table.accepted.clear();
        }
        table.accepted.insert(*credential);
    }
}

/// The address or network that failures are counted for.
fn network(address: Option<IpAddr>) -> Option<Holder> {
    address.map(|address| Holder::network(Some(address)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u32 = 20;

    fn address(n: u32) -> Option<IpAddr> {
        Some(IpAddr::from(n.to_be_bytes()))
    }

    #[test]
    fn failing_address_is_limited_except_accepted_credentials() {
        let (failures, now) = (Failures::new(LIMIT), Instant::now());
        let (bad, good) = ([1; 32], [2; 32]);
        failures.record_success(&good);
        for _ in 0..LIMIT {
            assert!(!failures.is_limited(address(1), &bad, now));
            failures.record_failure(address(1), &bad, now);
        }
        assert!(failures.is_limited(address(1), &bad, now));
        assert!(!failures.is_limited(address(1), &good, now));
        assert!(!failures.is_limited(address(2), &bad, now));
        assert!(!failures.is_limited(address(1), &bad, now + WINDOW));
        // A revoked credential counts like any other.
        failures.record_failure(address(1), &good, now);
        assert!(failures.is_limited(address(1), &good, now));
    }

    #[test]
    fn addresses_of_one_network_are_counted_together() {
        let (failures, now) = (Failures::new(LIMIT), Instant::now());
        let one = "2001:db8::1".parse().expect("an address");
        let other = "2001:db8::ffff:2".parse().expect("an address");
        for _ in 0..LIMIT {
            failures.record_failure(Some(one), &[0; 32], now);
        }
        assert!(failures.is_limited(Some(other), &[0; 32], now));
    }

    #[test]
    fn table_is_bounded() {
        let (failures, now) = (Failures::new(LIMIT), Instant::now());
        for n in 0..20_000_u32 {
            failures.record_failure(address(n), &[0; 32], now);
            let mut hash = [0; 32];
            hash[..4].copy_from_slice(&n.to_be_bytes());
            failures.record_success(&hash);
        }
        let table = failures.table.lock().expect("the lock is not poisoned");
        assert!(table.windows.len() <= MAX_ADDRESSES && table.accepted.len() <= MAX_ACCEPTED);
    }
}
