//! A scan that this process holds, and how its row is written.

use std::time::Duration;

use construct_bus::subject;
use construct_runtime::clock;
use construct_store::scan::{NewScanEvent, Scan, ScanChanges, ScanPhase};
use construct_wire::scan as wire;
use jiff::Timestamp;

use crate::{error::Error, shared::Shared};

/// The delay after the first failure. It doubles with each further one.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// The longest retry delay.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// The time limit for publishing an event. Subscribers can read it from the table in any case.
const PUBLISH_TIMEOUT: Duration = Duration::from_millis(250);

/// A scan whose lease this process holds.
pub(crate) struct Work<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) scan: Scan,
}

impl Work<'_> {
    /// Reloads the row: changes in memory may not have been written, or were written although the
    /// response was lost. Returns whether the scan is over.
    pub(crate) async fn reload(&mut self) -> Result<bool, Error> {
        let current = self.shared.store.scan_get(self.scan.organization, self.scan.id).await?;
        if current.lease != self.scan.lease {
            return Err(Error::LeaseLost);
        }
        self.scan = current;
        Ok(self.scan.phase.is_over())
    }

    /// Counts a failure, and returns the time of the next attempt.
    pub(crate) fn next_retry(&mut self) -> Timestamp {
        self.scan.failures = self.scan.failures.saturating_add(1);
        let backoff = MIN_RETRY_DELAY.saturating_mul(1 << self.scan.failures.clamp(1, 7) >> 1);
        clock::now() + backoff.min(MAX_RETRY_DELAY)
    }

    /// Stores why the scan has to wait, with an event if the reason is new.
    pub(crate) async fn record_wait(
        &mut self,
        reason: String,
        next_wake: Timestamp,
        release: bool,
    ) -> Result<(), Error> {
        self.scan.next_wake = Some(next_wake);
        let mut changes = ScanChanges { release, ..ScanChanges::default() };
        if self.scan.reason != reason {
            tracing::warn!(scan = %self.scan.id, reason, "a scan has to wait");
            changes.events.push(scan_event("waiting", reason.clone()));
        }
        self.scan.reason = reason;
        self.save(changes).await?;
        self.shared.metrics.record_wait(self.scan.phase);
        Ok(())
    }

    /// Stores the scan's state with its events, and publishes them.
    pub(crate) async fn save(&mut self, changes: ScanChanges) -> Result<(), Error> {
        let events = self.shared.store.scan_save(&mut self.scan, &changes, clock::now()).await?;
        let (organization, scan) = (self.scan.organization, self.scan.id);
        for event in &events {
            let message = wire::event(organization, scan, event);
            let address = subject::ScanUpdate { organization, scan };
            if let Err(error) =
                self.shared.bus.publish_within(&address, &message, PUBLISH_TIMEOUT).await
            {
                tracing::debug!(%error, "cannot publish an event of a scan; its row has it");
                break;
            }
        }
        Ok(())
    }

    /// Enters another phase, with an event.
    pub(crate) async fn enter_phase(
        &mut self,
        phase: ScanPhase,
        message: impl Into<String>,
        changes: ScanChanges,
    ) -> Result<(), Error> {
        let now = clock::now();
        let duration =
            Duration::try_from(now.duration_since(self.scan.phase_since)).unwrap_or_default();
        let previous = std::mem::replace(&mut self.scan.phase, phase);
        self.scan.phase_since = now;
        self.scan.failures = 0;
        self.scan.next_wake = (!phase.is_over()).then_some(now);
        if phase.is_over() {
            self.scan.ended_at = Some(now);
        } else {
            self.scan.reason.clear();
        }
        let mut changes = changes;
        changes.events.push(scan_event("phase", message));
        changes.release |= phase.is_over();
        self.save(changes).await?;
        self.shared.metrics.record_phase(previous, duration);
        if phase.is_over() {
            tracing::info!(scan = %self.scan.id, outcome = phase.as_str(), reason = self.scan.reason, "a scan is over");
            self.shared.metrics.record_end(phase, previous, self.scan.cost_pico_usd);
        }
        Ok(())
    }
}

/// Creates an event.
pub(crate) fn scan_event(kind: &'static str, message: impl Into<String>) -> NewScanEvent {
    let message: String = message.into();
    NewScanEvent { kind, message: message.chars().take(2000).collect(), tool_calls: 0 }
}
