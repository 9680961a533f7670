//! Limits that callers share: how much there is in all, and how much one caller may hold of it.
//!
//! Each limit counts one thing: requests, connections, bytes. What is counted is charged to a
//! [`Holder`], and a [`Share`] gives it back when it is dropped. [`Capacity`] lists the limits of a
//! gateway with their sizes. An [`Account`] follows one request: it knows whom to charge, and holds
//! what the request was given.
//!
//! Requests without credentials have limits of their own, so that they take nothing from callers
//! who are known, however many networks they come from (ADR 47).

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

/// How often a caller that waits for a share looks whether there is room.
const POLL: Duration = Duration::from_millis(20);

/// Whom something is charged to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Organization(OrganizationId),
    /// An IPv4 address, or a /64 of IPv6, which is what one customer of a provider has.
    Network(IpAddr),
    /// Many callers at once, as behind a trusted proxy, or a process of this machine. Bounded by
    /// the total only.
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

/// Why there is no share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// Everything is taken.
    Total,
    /// The holder has all that one may have.
    Holder(Holder),
}

impl Full {
    /// `RESOURCE_EXHAUSTED` with the time after which another try is welcome. `what` is a plural.
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
    /// `total` in all, of which one holder has `each` at most. The operator's organization may have
    /// all: whoever owns the machine shares it out.
    pub(crate) fn new(total: usize, each: usize) -> Self {
        Self { total, each, table: Arc::default() }
    }

    /// Takes a share now.
    ///
    /// # Errors
    /// When there is no room for it.
    pub(crate) fn take(&self, holder: Holder, amount: usize) -> Result<Share, Full> {
        let mut table = self.table();
        self.check(&table, holder, amount)?;
        table.add(holder, amount);
        drop(table);
        Ok(Share { limit: self.clone(), holder, amount })
    }

    /// Takes a share whether there is room for it or not: of what is there already, and keeps
    /// others from being taken.
    pub(crate) fn charge(&self, holder: Holder, amount: usize) -> Share {
        self.table().add(holder, amount);
        Share { limit: self.clone(), holder, amount }
    }

    /// Waits for a share. Whoever calls this limits how long.
    pub(crate) async fn wait(&self, holder: Holder, amount: usize) -> Share {
        loop {
            match self.take(holder, amount) {
                Ok(share) => return share,
                Err(_) => tokio::time::sleep(POLL).await,
            }
        }
    }

    /// Whether a share of this size could be taken now.
    ///
    /// # Errors
    /// When there is no room for it.
    pub(crate) fn has_room(&self, holder: Holder, amount: usize) -> Result<(), Full> {
        self.check(&self.table(), holder, amount)
    }

    fn check(&self, table: &Table, holder: Holder, amount: usize) -> Result<(), Full> {
        if table.total.saturating_add(amount) > self.total {
            return Err(Full::Total);
        }
        let each = match holder {
            Holder::Organization(OrganizationId::LOCAL) | Holder::Shared => self.total,
            Holder::Organization(_) | Holder::Network(_) => self.each,
        };
        let held = table.by_holder.get(&holder).copied().unwrap_or_default();
        if held.saturating_add(amount) > each { Err(Full::Holder(holder)) } else { Ok(()) }
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
        if let Some(held) = self.by_holder.get_mut(&holder) {
            *held -= amount;
            if *held == 0 {
                self.by_holder.remove(&holder);
            }
        }
    }
}

/// What was taken of a limit; it is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    limit: Limit,
    holder: Holder,
    amount: usize,
}

impl Share {
    /// Takes more.
    ///
    /// # Errors
    /// When there is no room for it; the share stays as it is.
    pub(crate) fn grow(&mut self, amount: usize) -> Result<(), Full> {
        let mut table = self.limit.table();
        self.limit.check(&table, self.holder, amount)?;
        table.add(self.holder, amount);
        drop(table);
        self.amount += amount;
        Ok(())
    }

    /// Gives back some of it.
    pub(crate) fn shrink(&mut self, amount: usize) {
        let amount = amount.min(self.amount);
        self.limit.table().remove(self.holder, amount);
        self.amount -= amount;
    }

    /// Adds to it whether there is room or not, as [`Limit::charge`] does.
    pub(crate) fn add(&mut self, amount: usize) {
        self.limit.table().add(self.holder, amount);
        self.amount += amount;
    }

    /// Makes it this large, whether there is room or not.
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

impl Drop for Share {
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
    fn holder_never_has_more_than_its_share_of_the_total() {
        let limit = Limit::new(10, 4);
        let mut own: Vec<_> =
            (0..4).map(|_| limit.take(network(1), 1).expect("there is room")).collect();
        assert_eq!(
            limit.take(network(1), 1).expect_err("it has its share"),
            Full::Holder(network(1))
        );
        let others: Vec<_> = (2..100).map_while(|n| limit.take(network(n), 1).ok()).collect();
        assert_eq!(own.len() + others.len(), 10);
        assert_eq!(limit.take(network(100), 1).expect_err("all is taken"), Full::Total);
        own.pop();
        assert!(limit.take(network(100), 1).is_ok(), "what is dropped is free");
        drop((own, others));
        assert!(limit.table().by_holder.is_empty(), "nobody is remembered who holds nothing");
    }

    #[test]
    fn operator_and_shared_holders_are_bounded_by_the_total_only() {
        for holder in [Holder::Organization(OrganizationId::LOCAL), Holder::Shared] {
            let limit = Limit::new(10, 4);
            let held = limit.take(holder, 10).expect("all of it");
            assert_eq!(limit.take(network(1), 1).expect_err("all is taken"), Full::Total);
            drop(held);
        }
    }

    #[test]
    fn share_grows_within_the_limit_and_is_given_back_as_a_whole() {
        let limit = Limit::new(10, 6);
        let mut share = limit.take(organization(1), 2).expect("there is room");
        share.grow(4).expect("there is room");
        assert_eq!(share.grow(1), Err(Full::Holder(organization(1))));
        share.shrink(3);
        assert!(limit.take(organization(1), 3).is_ok());
        // What is there already counts, also beyond the limit.
        share.add(20);
        assert_eq!(
            limit.take(organization(2), 1).expect_err("more than all is taken"),
            Full::Total
        );
        drop(share);
        assert_eq!(limit.table().total, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn waiter_gets_what_another_gives_back() {
        let limit = Limit::new(10, 5);
        let held = limit.charge(organization(1), 7);
        let waiting = tokio::spawn({
            let limit = limit.clone();
            async move { limit.wait(organization(1), 5).await }
        });
        tokio::time::sleep(10 * POLL).await;
        assert!(!waiting.is_finished());
        assert!(limit.take(organization(2), 3).is_ok(), "others need not wait");
        drop(held);
        waiting.await.expect("it has its share");
        assert_eq!(limit.table().total, 0);
    }

    #[test]
    fn addresses_of_one_customer_are_one_network() {
        let of = |text: &str| Holder::network(Some(text.parse().expect("an address")));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }
}
