//! Places for subscriptions: so many in all, and so many for one organization, so that none takes
//! them all.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use construct_domain::OrganizationId;
use tonic::Status;

use crate::status;

/// All places of the process. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    limit: usize,
    taken: Arc<Mutex<HashMap<OrganizationId, usize>>>,
}

/// One place, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Places,
    organization: OrganizationId,
}

impl Places {
    /// `limit` places in all. One organization has half of them at most; the operator's all,
    /// because whose machine it is shares it.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, taken: Arc::default() }
    }

    /// Takes a place.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(crate) fn take(&self, organization: OrganizationId) -> Result<Place, Status> {
        let share =
            if organization == OrganizationId::LOCAL { self.limit } else { self.limit.div_ceil(2) };
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.values().sum::<usize>() >= self.limit {
            return Err(status::exhausted("the gateway has too many subscriptions at the moment"));
        }
        let own = taken.entry(organization).or_default();
        if *own >= share {
            return Err(status::exhausted(
                "the organization has too many subscriptions at the moment",
            ));
        }
        *own += 1;
        Ok(Place { places: self.clone(), organization })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.organization) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.organization);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn no_organization_takes_all_places_but_the_operators() {
        let places = Places::new(4);
        let [one, other] = [1, 2].map(|n| OrganizationId::from_uuid(Uuid::from_u128(n)));
        let held = [places.take(one).expect("a place"), places.take(one).expect("a place")];
        assert!(places.take(one).is_err());
        let others = places.take(other).expect("a place");
        drop(held);
        let _again = places.take(one).expect("a place");
        drop(others);
        let _all = [(); 3].map(|()| places.take(OrganizationId::LOCAL).expect("a place"));
        assert!(places.take(other).is_err());
    }
}
