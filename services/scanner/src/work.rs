//! A scan that this process holds, and how its row is written.

use std::time::Duration;

use construct_bus::subject;
use construct_runtime::clock;
use construct_store::scan::{NewScanEvent, Scan, ScanChanges, ScanPhase};
use construct_wire::scan as wire;
use jiff::Timestamp;

use crate::{error::Error, shared::Shared};

/// The pause after the first failure; it doubles with each further one.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// The longest pause.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// How long the mesh may take to hear what happened. It can be read in any case.
const PUBLISH_TIMEOUT: Duration = Duration::from_millis(250);

/// A scan in the hands of this process.
pub(crate) struct Work<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) scan: Scan,
}

impl Work<'_> {
    /// Goes back to the row: what was changed here may not have been written, or was written
    /// although nobody has heard of it. Gives whether the scan is over.
    pub(crate) async fn reload(&mut self) -> Result<bool, Error> {
        let found = self.shared.store.scan_get(self.scan.organization, self.scan.id).await?;
        if found.lease != self.scan.lease {
            return Err(Error::LeaseLost);
        }
        self.scan = found;
        Ok(self.scan.phase.is_over())
    }

    /// When a scan is tried again that could not be gone on with once more.
    pub(crate) fn next_retry(&mut self) -> Timestamp {
        self.scan.failures = self.scan.failures.saturating_add(1);
        let doubled = MIN_RETRY_DELAY.saturating_mul(1 << self.scan.failures.clamp(1, 7) >> 1);
        clock::now() + doubled.min(MAX_RETRY_DELAY)
    }

    /// Says in the row why the scan has to wait, and in an event when that is new.
    pub(crate) async fn record_wait(
        &mut self,
        what: String,
        again: Timestamp,
        let_go: bool,
    ) -> Result<(), Error> {
        self.scan.next_wake = Some(again);
        let mut changes = ScanChanges { release: let_go, ..ScanChanges::default() };
        if self.scan.reason != what {
            tracing::warn!(scan = %self.scan.id, what, "a scan has to wait");
            changes.events.push(scan_event("waiting", what.clone()));
        }
        self.scan.reason = what;
        self.save(changes).await?;
        self.shared.metrics.record_wait(self.scan.phase);
        Ok(())
    }

    /// Writes down how far the scan has come, with what happened, and tells whoever watches.
    pub(crate) async fn save(&mut self, changes: ScanChanges) -> Result<(), Error> {
        let events = self.shared.store.scan_save(&mut self.scan, &changes, clock::now()).await?;
        let (organization, scan) = (self.scan.organization, self.scan.id);
        for event in &events {
            let message = wire::event(organization, scan, event);
            let address = subject::ScanNews { organization, scan };
            if let Err(error) = self.shared.bus.publish_within(&address, &message, PUBLISH_TIMEOUT).await {
                tracing::debug!(%error, "what happened in a scan is told by its row only");
                break;
            }
        }
        Ok(())
    }

    /// Goes over to another phase, which is an event.
    pub(crate) async fn enter_phase(
        &mut self,
        phase: ScanPhase,
        message: impl Into<String>,
        changes: ScanChanges,
    ) -> Result<(), Error> {
        let now = clock::now();
        let took =
            Duration::try_from(now.duration_since(self.scan.phase_since)).unwrap_or_default();
        let left = std::mem::replace(&mut self.scan.phase, phase);
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
        self.shared.metrics.record_phase(left, took);
        if phase.is_over() {
            tracing::info!(scan = %self.scan.id, outcome = phase.as_str(), reason = self.scan.reason, "a scan is over");
            self.shared.metrics.record_end(phase, left, self.scan.cost_pico_usd);
        }
        Ok(())
    }
}

/// Something that happened.
pub(crate) fn scan_event(kind: &'static str, message: impl Into<String>) -> NewScanEvent {
    let message: String = message.into();
    NewScanEvent { kind, message: message.chars().take(2000).collect(), tool_calls: 0 }
}
