//! The state that every part of the service shares.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use construct_bus::{Bus, blob};
use construct_domain::OrganizationId;
use construct_store::{Keyring, Store};
use tokio::sync::{Notify, Semaphore};

use crate::{
    config::Config,
    gateway::Gateway,
    hosts::Hosts,
    metrics::Metrics,
    repository::{Outliner, Reach},
};

/// Organizations of which it is remembered when they had their turn.
const MAX_RECENT_ORGANIZATIONS: usize = 256;

/// What all parts share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    /// Where the files of scans lie.
    pub(crate) dir: PathBuf,
    pub(crate) store: Store,
    pub(crate) bus: Bus,
    pub(crate) blobs: blob::Store,
    pub(crate) keyring: Keyring,
    pub(crate) gateway: Gateway,
    pub(crate) reach: Reach,
    pub(crate) hosts: Hosts,
    pub(crate) outliner: Outliner,
    pub(crate) metrics: Metrics,
    /// Places for work.
    pub(crate) work_slots: Arc<Semaphore>,
    /// Places for looks at tasks that explore, and for ends.
    pub(crate) task_check_slots: Arc<Semaphore>,
    /// There may be something to take.
    pub(crate) due: Notify,
    pub(crate) recent: Mutex<VecDeque<OrganizationId>>,
}

impl Shared {
    /// Organizations whose scans were worked on here, the last one at the end.
    pub(crate) fn recent_organizations(&self) -> Vec<OrganizationId> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    /// An organization's scan is worked on. That others forget this with their process costs one
    /// turn and nothing else.
    pub(crate) fn mark_recent(&self, organization: OrganizationId) {
        let mut served = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        served.retain(|other| *other != organization);
        served.push_back(organization);
        if served.len() > MAX_RECENT_ORGANIZATIONS {
            served.pop_front();
        }
    }
}
