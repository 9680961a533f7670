//! Limits that callers share: a total, and a maximum per caller.
//!
//! Each limit counts one thing: requests, connections, bytes. What is counted is charged to a
//! [`Holder`], and a [`Permit`] returns it when dropped. [`Capacity`] lists the limits of a gateway
//! with their sizes. An [`Account`] belongs to one request: it knows the holder to charge, and
//! holds the permits of the request.
//!
//! Requests without credentials have their own limits. They take nothing from authenticated
//! callers, however many networks they come from (ADR 47).

mod account;
mod capacity;
pub(crate) mod connection;

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use construct_domain::OrganizationId;
use tonic::Status;

pub(crate) use self::{
    account::{Account, BodyTimeout},
    capacity::{Capacity, UNREAD_TIMEOUT},
};
use crate::{identity::peer::Peer, status};

/// How often a waiting caller checks for free capacity.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// To whom something is charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Organization(OrganizationId),
    /// An IPv4 address, or a /64 of IPv6, the network of one customer of a provider.
    Network(IpAddr),
    /// Many callers at once, such as those behind a trusted proxy, or a process of this machine.
    /// Bounded only by the total.
    Shared,
}

impl Holder {
    /// The network of an address.
    pub(crate) fn network(address: Option<IpAddr>) -> Self {
        match address.map(|address| address.to_canonical()) {
            None => Self::Shared,
            Some(IpAddr::V6(v6)) => {
                Self::Network(IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)))
            }
            Some(v4) => Self::Network(v4),
        }
    }
}

impl From<Peer> for Holder {
    fn from(peer: Peer) -> Self {
        Self::network(peer.address())
    }
}

/// A limit. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Limit {
    total: usize,
    each: usize,
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    total: usize,
    by_holder: HashMap<Holder, usize>,
}

/// Why no permit is available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LimitReached {
    /// The total is used up.
    Total,
    /// The maximum of the holder is used up.
    Holder(Holder),
}

impl LimitReached {
    /// `RESOURCE_EXHAUSTED` with a retry delay. `what` is a plural.
    pub(crate) fn status(self, what: &str) -> Status {
        let holder = match self {
            Self::Total | Self::Holder(Holder::Shared) => "the gateway",
            Self::Holder(Holder::Organization(_)) => "the organization",
            Self::Holder(Holder::Network(_)) => "this network",
        };
        status::exhausted(format!("{holder} has too many {what} at the moment"))
    }
}

impl Limit {
    /// At most `total`, and at most `each` per holder. The operator's organization may use the
    /// total: the operator owns the machine.
    pub(crate) fn new(total: usize, each: usize) -> Self {
        Self { total, each, table: Arc::default() }
    }

    /// Acquires a permit without waiting.
    ///
    /// # Errors
    /// When the limit is reached.
    pub(crate) fn acquire(&self, holder: Holder, amount: usize) -> Result<Permit, LimitReached> {
        let mut table = self.table();
        self.check(&table, holder, amount)?;
        table.add(holder, amount);
        drop(table);
        Ok(Permit { limit: self.clone(), holder, amount })
    }

    /// Acquires a permit even beyond the limit: for something that exists already, and reduces what
    /// others can acquire.
    pub(crate) fn charge(&self, holder: Holder, amount: usize) -> Permit {
        self.table().add(holder, amount);
        Permit { limit: self.clone(), holder, amount }
    }

    /// Waits for a permit. The caller sets a timeout.
    pub(crate) async fn wait(&self, holder: Holder, amount: usize) -> Permit {
        loop {
            match self.acquire(holder, amount) {
                Ok(permit) => return permit,
                Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
            }
        }
    }

    /// Whether a permit for this amount is available.
    ///
    /// # Errors
    /// When the limit is reached.
    pub(crate) fn has_room(&self, holder: Holder, amount: usize) -> Result<(), LimitReached> {
        self.check(&self.table(), holder, amount)
    }

    fn check(&self, table: &Table, holder: Holder, amount: usize) -> Result<(), LimitReached> {
        if table.total.saturating_add(amount) > self.total {
            return Err(LimitReached::Total);
        }
        let each = match holder {
            Holder::Organization(OrganizationId::LOCAL) | Holder::Shared => self.total,
            Holder::Organization(_) | Holder::Network(_) => self.each,
        };
        let used = table.by_holder.get(&holder).copied().unwrap_or_default();
        if used.saturating_add(amount) > each { Err(LimitReached::Holder(holder)) } else { Ok(()) }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn add(&mut self, holder: Holder, amount: usize) {
        self.total += amount;
        *self.by_holder.entry(holder).or_default() += amount;
    }

    fn remove(&mut self, holder: Holder, amount: usize) {
        self.total -= amount;
        if let Some(used) = self.by_holder.get_mut(&holder) {
            *used -= amount;
            if *used == 0 {
                self.by_holder.remove(&holder);
            }
        }
    }
}

/// An amount of a limit. Dropping it returns the amount.
#[derive(Debug)]
pub(crate) struct Permit {
    limit: Limit,
    holder: Holder,
    amount: usize,
}

impl Permit {
    /// Increases the amount.
    ///
    /// # Errors
    /// When the limit is reached; the permit does not change.
    pub(crate) fn grow(&mut self, amount: usize) -> Result<(), LimitReached> {
        let mut table = self.limit.table();
        self.limit.check(&table, self.holder, amount)?;
        table.add(self.holder, amount);
        drop(table);
        self.amount += amount;
        Ok(())
    }

    /// Returns a part of the amount.
    pub(crate) fn shrink(&mut self, amount: usize) {
        let amount = amount.min(self.amount);
        self.limit.table().remove(self.holder, amount);
        self.amount -= amount;
    }

    /// Increases the amount even beyond the limit, as [`Limit::charge`] does.
    pub(crate) fn add(&mut self, amount: usize) {
        self.limit.table().add(self.holder, amount);
        self.amount += amount;
    }

    /// Sets the amount, even beyond the limit.
    pub(crate) fn set(&mut self, amount: usize) {
        match amount.checked_sub(self.amount) {
            Some(more) => self.add(more),
            None => self.shrink(self.amount - amount),
        }
    }

    pub(crate) const fn amount(&self) -> usize {
        self.amount
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.limit.table().remove(self.holder, self.amount);
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn organization(n: u128) -> Holder {
        Holder::Organization(OrganizationId::from_uuid(Uuid::from_u128(n)))
    }

    fn network(n: u32) -> Holder {
        Holder::network(Some(IpAddr::from(n.to_be_bytes())))
    }

    #[test]
    fn holder_never_exceeds_its_maximum() {
        let limit = Limit::new(10, 4);
        let mut own: Vec<_> =
            (0..4).map(|_| limit.acquire(network(1), 1).expect("available")).collect();
        assert_eq!(
            limit.acquire(network(1), 1).expect_err("the holder's maximum"),
            LimitReached::Holder(network(1))
        );
        let others: Vec<_> = (2..100).map_while(|n| limit.acquire(network(n), 1).ok()).collect();
        assert_eq!(own.len() + others.len(), 10);
        assert_eq!(
            limit.acquire(network(100), 1).expect_err("the total is used up"),
            LimitReached::Total
        );
        own.pop();
        assert!(limit.acquire(network(100), 1).is_ok(), "a dropped permit is free again");
        drop((own, others));
        assert!(limit.table().by_holder.is_empty(), "holders without permits are removed");
    }

    #[test]
    fn operator_and_shared_holders_are_bounded_by_the_total_only() {
        for holder in [Holder::Organization(OrganizationId::LOCAL), Holder::Shared] {
            let limit = Limit::new(10, 4);
            let permit = limit.acquire(holder, 10).expect("the total");
            assert_eq!(
                limit.acquire(network(1), 1).expect_err("the total is used up"),
                LimitReached::Total
            );
            drop(permit);
        }
    }

    #[test]
    fn permit_grows_within_the_limit_and_is_returned() {
        let limit = Limit::new(10, 6);
        let mut permit = limit.acquire(organization(1), 2).expect("available");
        permit.grow(4).expect("available");
        assert_eq!(permit.grow(1), Err(LimitReached::Holder(organization(1))));
        permit.shrink(3);
        assert!(limit.acquire(organization(1), 3).is_ok());
        // Existing bytes count, also beyond the limit.
        permit.add(20);
        assert_eq!(
            limit.acquire(organization(2), 1).expect_err("the total is exceeded"),
            LimitReached::Total
        );
        drop(permit);
        assert_eq!(limit.table().total, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn waiter_gets_returned_capacity() {
        let limit = Limit::new(10, 5);
        let used = limit.charge(organization(1), 7);
        let waiting = tokio::spawn({
            let limit = limit.clone();
            async move { limit.wait(organization(1), 5).await }
        });
        tokio::time::sleep(10 * POLL_INTERVAL).await;
        assert!(!waiting.is_finished());
        assert!(limit.acquire(organization(2), 3).is_ok(), "others do not wait");
        drop(used);
        waiting.await.expect("acquired");
        assert_eq!(limit.table().total, 0);
    }

    #[test]
    fn addresses_of_one_customer_are_one_network() {
        let holder = |text: &str| Holder::network(Some(text.parse().expect("an address")));
        assert_eq!(holder("2001:db8::1"), holder("2001:db8::ffff:2"));
        assert_ne!(holder("2001:db8::1"), holder("2001:db8:0:1::1"));
        assert_eq!(holder("::ffff:192.0.2.1"), holder("192.0.2.1"));
        assert_ne!(holder("192.0.2.1"), holder("192.0.2.2"));
    }
}
