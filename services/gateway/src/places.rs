//! Places for connections: so many in all, and so many of one network. Who holds all that one may leaves some for others.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
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
    network: IpAddr,
}

impl Places {
    pub(crate) fn new(most: usize, of_one: usize) -> Self {
        Self { most, of_one, taken: Arc::default() }
    }

    /// A place, unless there are too many.
    pub(crate) fn take(&self, peer: SocketAddr) -> Option<Place> {
        let network = network(peer.ip());
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.all >= self.most || taken.by_network.get(&network).is_some_and(|count| *count >= self.of_one) {
            return None;
        }
        taken.all += 1;
        *taken.by_network.entry(network).or_default() += 1;
        drop(taken);
        Some(Place { places: self.clone(), network })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        if let Some(count) = taken.by_network.get_mut(&self.network) {
            *count -= 1;
            if *count == 0 {
                taken.by_network.remove(&self.network);
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
        let peer = |network: u32| SocketAddr::from((network.to_be_bytes(), 1));
        let ones: Vec<_> = (0..4).map(|_| places.take(peer(1)).expect("there is a place")).collect();
        assert!(places.take(peer(1)).is_none());
        let others: Vec<_> = (2..100).map(|network| places.take(peer(network))).take_while(Option::is_some).collect();
        assert_eq!(ones.len() + others.len(), 10);
        drop(ones);
        assert!(places.take(peer(1)).is_some());
        drop(others);
        assert!(places.taken.lock().expect("nobody panicked").by_network.is_empty());
    }
}
