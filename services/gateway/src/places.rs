//! Places for connections: so many in all, and so many of one network. Who holds all that one may
//! leaves some for others. What is of no network in particular (a trusted proxy's connections are
//! for many) is counted in all alone.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use crate::identity::failures::network;

/// Places that are taken, by network. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    most: usize,
    of_one: usize,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    by_network: HashMap<IpAddr, usize>,
}

/// A place; it is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Places,
    network: Option<IpAddr>,
}

impl Places {
    pub(crate) fn new(most: usize, of_one: usize) -> Self {
        Self { most, of_one, taken: Arc::default() }
    }

    /// A place, unless there are too many.
    pub(crate) fn take(&self, peer: Option<IpAddr>) -> Option<Place> {
        let network = peer.map(network);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let of_theirs = network.and_then(|network| taken.by_network.get(&network));
        if taken.all >= self.most || of_theirs.is_some_and(|count| *count >= self.of_one) {
            return None;
        }
        taken.all += 1;
        if let Some(network) = network {
            *taken.by_network.entry(network).or_default() += 1;
        }
        drop(taken);
        Some(Place { places: self.clone(), network })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        let Some(network) = self.network else { return };
        if let Some(count) = taken.by_network.get_mut(&network) {
            *count -= 1;
            if *count == 0 {
                taken.by_network.remove(&network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bounded_in_all_and_for_each_network() {
        let places = Places::new(10, 4);
        let peer = |network: u32| Some(IpAddr::from(network.to_be_bytes()));
        let ones: Vec<_> =
            (0..4).map(|_| places.take(peer(1)).expect("there is a place")).collect();
        assert!(places.take(peer(1)).is_none());
        let others: Vec<_> = (2..100)
            .map(|network| places.take(peer(network)))
            .take_while(Option::is_some)
            .collect();
        assert_eq!(ones.len() + others.len(), 10);
        drop(ones);
        assert!(places.take(peer(1)).is_some());
        drop(others);
        assert!(places.taken.lock().expect("nobody panicked").by_network.is_empty());
    }

    #[test]
    fn what_is_of_no_network_is_bounded_in_all() {
        let places = Places::new(10, 4);
        let held: Vec<_> =
            (0..100).map(|_| places.take(None)).take_while(Option::is_some).collect();
        assert_eq!(held.len(), 10);
        assert!(places.take(Some(IpAddr::from([192, 0, 2, 1]))).is_none());
        drop(held);
        assert_eq!(places.taken.lock().expect("nobody panicked").all, 0);
    }
}
