//! The state that every part of the service shares.

use std::sync::{Arc, atomic::AtomicBool};

use construct_store::{Keyring, Store};
use tokio::sync::Notify;

use crate::{
    config::Config, gateway::Gateway, members::Members, metrics::Metrics, teams::Teams,
    user_cache::UserCache, web::Web,
};

/// The shared state.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) web: Web,
    pub(crate) teams: Teams,
    pub(crate) people: UserCache,
    pub(crate) members: Members,
    pub(crate) gateway: Gateway,
    /// The master keys.
    pub(crate) keyring: Arc<Keyring>,
    pub(crate) metrics: Metrics,
    /// Notified when a mention is due.
    pub(crate) due: Notify,
    /// Whether mentions are due for which this process has no free slot.
    pub(crate) crowded: AtomicBool,
}
