//! A limit on failed log-ins with tokens of an issuer. Guessing is hopeless whatever the rate; what
//! this bounds is the work that who tries can make outside of this process. Keys and codes are one
//! look into an index each, and never limited.
//!
//! Counted are failures per peer address in a minute (of IPv6, per /64, which is what one customer
//! has). Beyond the limit what the address presents is refused unseen, until the minute is over.
//! What was accepted lately is looked at all the same, so that one who fails behind a proxy does
//! not lock out the others there.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, Ipv6Addr},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How long a window is.
const WINDOW: Duration = Duration::from_secs(60);
/// Addresses, and accepted credentials, that are remembered. A full table forgets the windows that
/// are over, then everything: who has so many addresses is not stopped by this anyway.
const REMEMBERED: usize = 4096;

/// Failed log-ins by address.
#[derive(Debug)]
pub(crate) struct Failures {
    /// Failures of an address in a window.
    limit: u32,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    windows: HashMap<IpAddr, Window>,
    accepted: HashSet<[u8; 32]>,
}

#[derive(Debug)]
struct Window {
    since: Instant,
    count: u32,
}

impl Failures {
    /// With at most this many failures of an address in a minute.
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit, table: Mutex::default() }
    }

    /// Whether what this address presents is to be refused unseen. `credential` is the hash of it.
    pub(crate) fn refuses(
        &self,
        peer: Option<IpAddr>,
        credential: &[u8; 32],
        now: Instant,
    ) -> bool {
        let Some(peer) = peer.map(network) else { return false };
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let over = |window: &Window| {
            window.count >= self.limit && now.duration_since(window.since) < WINDOW
        };
        table.windows.get(&peer).is_some_and(over) && !table.accepted.contains(credential)
    }

    /// Something was presented in vain.
    pub(crate) fn failed(&self, peer: Option<IpAddr>, credential: &[u8; 32], now: Instant) {
        let Some(peer) = peer.map(network) else { return };
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.accepted.remove(credential);
        if table.windows.len() >= REMEMBERED && !table.windows.contains_key(&peer) {
            table.windows.retain(|_, window| now.duration_since(window.since) < WINDOW);
            if table.windows.len() >= REMEMBERED {
                table.windows.clear();
            }
        }
        let window = table.windows.entry(peer).or_insert(Window { since: now, count: 0 });
        if now.duration_since(window.since) >= WINDOW {
            *window = Window { since: now, count: 0 };
        }
        window.count = window.count.saturating_add(1);
    }

    /// Something was accepted.
    pub(crate) fn accepted(&self, credential: &[u8; 32]) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.accepted.len() >= REMEMBERED && !table.accepted.contains(credential) {
            table.accepted.clear();
        }
        table.accepted.insert(*credential);
    }
}

/// What one who fails can hardly have many of.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u32 = 20;

    fn address(n: u32) -> Option<IpAddr> {
        Some(IpAddr::from(n.to_be_bytes()))
    }

    #[test]
    fn who_fails_too_often_is_refused_until_the_minute_is_over_but_what_was_accepted_is_not() {
        let (failures, now) = (Failures::new(LIMIT), Instant::now());
        let (bad, good) = ([1; 32], [2; 32]);
        failures.accepted(&good);
        for _ in 0..LIMIT {
            assert!(!failures.refuses(address(1), &bad, now));
            failures.failed(address(1), &bad, now);
        }
        assert!(failures.refuses(address(1), &bad, now));
        assert!(!failures.refuses(address(1), &good, now));
        assert!(!failures.refuses(address(2), &bad, now));
        assert!(!failures.refuses(address(1), &bad, now + WINDOW));
        // Once it is revoked it counts like any other.
        failures.failed(address(1), &good, now);
        assert!(failures.refuses(address(1), &good, now));
    }

    #[test]
    fn neighbors_in_one_network_are_counted_together() {
        let (failures, now) = (Failures::new(LIMIT), Instant::now());
        let one = "2001:db8::1".parse().expect("an address");
        let other = "2001:db8::ffff:2".parse().expect("an address");
        for _ in 0..LIMIT {
            failures.failed(Some(one), &[0; 32], now);
        }
        assert!(failures.refuses(Some(other), &[0; 32], now));
    }

    #[test]
    fn the_table_is_bounded() {
        let (failures, now) = (Failures::new(LIMIT), Instant::now());
        for n in 0..20_000_u32 {
            failures.failed(address(n), &[0; 32], now);
            let mut hash = [0; 32];
            hash[..4].copy_from_slice(&n.to_be_bytes());
            failures.accepted(&hash);
        }
        let table = failures.table.lock().expect("nobody panicked");
        assert!(table.windows.len() <= REMEMBERED && table.accepted.len() <= REMEMBERED);
    }
}
