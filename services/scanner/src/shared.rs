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
    hosts::HostClients,
    metrics::Metrics,
    repository::{ForgeClients, Outliner},
};

/// Recently served organizations that are remembered.
const MAX_RECENT_ORGANIZATIONS: usize = 256;

/// The shared state.
pub(crate) struct Shared {
    pub(crate) config: Config,
    /// The folder for the files of scans.
    pub(crate) dir: PathBuf,
    pub(crate) store: Store,
    pub(crate) bus: Bus,
    pub(crate) blobs: blob::Store,
    pub(crate) keyring: Keyring,
    pub(crate) gateway: Gateway,
    pub(crate) forge_clients: ForgeClients,
    pub(crate) hosts: HostClients,
    pub(crate) outliner: Outliner,
    pub(crate) metrics: Metrics,
    /// The slots for work.
    pub(crate) work_slots: Arc<Semaphore>,
    /// The slots for polling and ending tasks.
    pub(crate) task_check_slots: Arc<Semaphore>,
    /// Notified when a scan may be due.
    pub(crate) due: Notify,
    pub(crate) recent: Mutex<VecDeque<OrganizationId>>,
}

impl Shared {
    /// Organizations whose scans were processed here, the latest last.
    pub(crate) fn recent_organizations(&self) -> Vec<OrganizationId> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    /// Records that a scan of an organization is processed. When a restart forgets this, it costs
    /// one turn and nothing else.
    pub(crate) fn mark_recent(&self, organization: OrganizationId) {
        let mut served = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        served.retain(|other| *other != organization);
        served.push_back(organization);
        if served.len() > MAX_RECENT_ORGANIZATIONS {
            served.pop_front();
        }
    }
}
