//! Monitors which pools of interpreters are served, so that a task waiting for an unserved pool can
//! say so.
//!
//! It is only for explanations: a command waits in its pool's queue until an interpreter arrives.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use construct_bus::{Bus, Pool};
use construct_runtime::clock;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::deadline::Deadline;

/// The poll interval. Explanations of tasks query their own pool directly.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// The timeout of an interpreter's answer, if the caller has as much time.
const POOL_TIMEOUT: Duration = Duration::from_secs(1);

/// The known status of the pools.
#[derive(Debug)]
pub(crate) struct PoolMonitor {
    bus: Bus,
    /// Since when no interpreter serves a pool, as observed by this gateway. Contains unserved
    /// pools only.
    absent: Mutex<HashMap<String, Timestamp>>,
}

impl PoolMonitor {
    pub(crate) fn new(bus: Bus) -> Self {
        Self { bus, absent: Mutex::default() }
    }

    /// Polls the pools until the process drains.
    pub(crate) async fn watch(&self, names: &[String], draining: &CancellationToken) {
        loop {
            for name in names {
                self.absence(name, Deadline::new(None, POOL_TIMEOUT)).await;
            }
            tokio::select! {
                () = draining.cancelled() => return,
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }

    /// Since when no interpreter serves the pool. `None` when one does, or when it is unknown.
    pub(crate) async fn absence(&self, name: &str, deadline: Deadline) -> Option<Timestamp> {
        let pool = Pool::new(name).ok()?;
        let served = self.bus.pool_is_served(&pool, deadline.remaining(POOL_TIMEOUT)).await;
        let mut absent = self.absent.lock().unwrap_or_else(PoisonError::into_inner);
        match served {
            Ok(true) => {
                if absent.remove(name).is_some() {
                    tracing::info!(pool = name, "the pool is served by an interpreter");
                }
                None
            }
            Ok(false) => Some(*absent.entry(name.to_owned()).or_insert_with(|| {
                tracing::info!(pool = name, "no interpreter serves the pool");
                clock::now()
            })),
            Err(error) => {
                tracing::debug!(pool = name, %error, "cannot determine whether the pool is served");
                absent.get(name).copied()
            }
        }
    }
}
