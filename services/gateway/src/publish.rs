//! Publishes committed changes to the mesh. PostgreSQL already has them, so a failure here never
//! fails a request: a lost wake is replaced by the reconciler's sweep, a lost event by the
//! subscriptions' polling of the stream heads.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use construct_bus::{Bus, publish, subject};
use construct_domain::{OrganizationId, ScanId, TaskId, UserId};
use construct_proto::mesh::v1::{ScanRun, StateChanged, TaskWake};
use construct_store::StoredEvent;

use crate::{events, status::chain};

/// The timeout of publishing in a write. More would make the API as slow as the slowest broker,
/// without benefit.
const PUBLISH_TIMEOUT: Duration = Duration::from_millis(250);

/// Asks the reconciler to reconcile a task.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wake {
    pub(crate) organization: OrganizationId,
    pub(crate) task: TaskId,
    /// For people who watch the bus.
    pub(crate) reason: &'static str,
}

/// Publishes after commits.
#[derive(Debug)]
pub(crate) struct Publisher {
    bus: Bus,
    /// Whether the last attempt failed, so that an outage is logged once instead of with every
    /// request.
    is_failing: AtomicBool,
}

impl Publisher {
    pub(crate) fn new(bus: Bus) -> Self {
        Self { bus, is_failing: AtomicBool::new(false) }
    }

    /// The bus.
    pub(crate) const fn bus(&self) -> &Bus {
        &self.bus
    }

    /// Publishes a committed change, within a bounded time.
    pub(crate) async fn announce(&self, event: Option<&StoredEvent>, wake: Option<Wake>) {
        if event.is_none() && wake.is_none() {
            return;
        }
        if !self.bus.is_connected() {
            self.record_outcome(Err("the connection is down".to_owned()));
            return;
        }
        let (event, wake) = tokio::join!(self.event(event), self.wake(wake));
        self.record_outcome(event.and(wake));
    }

    /// Notifies the scanners of a scan, within a bounded time.
    pub(crate) async fn scan(&self, organization: OrganizationId, scan: ScanId) {
        let run = ScanRun { organization_id: organization.to_string(), scan_id: scan.to_string() };
        let address = subject::ScanRun { organization, scan };
        self.record_outcome(to_text_error(
            self.bus.publish_within(&address, &run, PUBLISH_TIMEOUT).await,
        ));
    }

    /// Publishes the new version and the owner of a document to all gateways, within a bounded
    /// time.
    pub(crate) async fn state(
        &self,
        organization: OrganizationId,
        changed: (Option<UserId>, &str, i64),
    ) {
        if !self.bus.is_connected() {
            return self.record_outcome(Err("the connection is down".to_owned()));
        }
        let (owner, name, version) = changed;
        let changed = StateChanged {
            organization_id: organization.to_string(),
            user_id: owner.map(|owner| owner.to_string()).unwrap_or_default(),
            name: name.to_owned(),
            version,
        };
        let address = subject::StateUpdate { organization };
        let result =
            tokio::time::timeout(PUBLISH_TIMEOUT, self.bus.publish_state(&address, &changed)).await;
        self.record_outcome(
            result.map_err(|_| "it takes too long".to_owned()).and_then(to_text_error),
        );
    }

    async fn event(&self, stored: Option<&StoredEvent>) -> Result<(), String> {
        let Some(stored) = stored else { return Ok(()) };
        let event = events::read(stored).map_err(|error| chain(&error))?;
        to_text_error(self.bus.publish_event_within(&event, PUBLISH_TIMEOUT).await)
    }

    async fn wake(&self, wake: Option<Wake>) -> Result<(), String> {
        let Some(Wake { organization, task, reason }) = wake else { return Ok(()) };
        let wake = TaskWake {
            organization_id: organization.to_string(),
            task_id: task.to_string(),
            reason: reason.to_owned(),
        };
        to_text_error(
            self.bus.publish_within(&subject::TaskWake::new(task), &wake, PUBLISH_TIMEOUT).await,
        )
    }

    fn record_outcome(&self, result: Result<(), String>) {
        let failed = result.is_err();
        if self.is_failing.swap(failed, Ordering::Relaxed) == failed {
            return;
        }
        match result {
            Err(error) => {
                tracing::warn!(
                    error,
                    "changes are committed but cannot be published; they are found later"
                )
            }
            Ok(()) => tracing::info!("changes are published again"),
        }
    }
}

fn to_text_error<T>(result: Result<T, publish::Error>) -> Result<(), String> {
    result.map(drop).map_err(|error| chain(&error))
}
