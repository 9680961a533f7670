//! The life of a scan: from its row to candidates, phase by phase.
//!
//! Each phase can be repeated by another process. Snapshots, masks, surveys and outlines are reused
//! if they exist, and requests to the gateway have ids derived from the scan. A process owns a scan
//! by its lease, and stops when it loses the lease. While the task explores, no process holds the
//! scan.

mod phases;
pub(crate) mod source;

use std::{sync::Arc, time::Duration};

use construct_runtime::{clock, telemetry::Chain};
use construct_store::scan::{LeaseState, Scan, ScanChanges, ScanPhase};
use jiff::{SignedDuration, Timestamp};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::{cleanup, error::Error, explore, gateway::CALL_TIMEOUT, shared::Shared, work::Work};

/// How long after its deadline a scan's task can still be ended. The gateway accepts the scan's
/// token that long.
const CANCEL_GRACE_PERIOD: SignedDuration = SignedDuration::from_mins(10);

/// How the processing of a scan ended.
enum WorkEnd {
    /// The phases are done, or are to be continued at this time, or failed.
    PhasesDone(Result<Option<Timestamp>, Error>),
    /// The scan's cancellation was requested.
    Cancelled,
    /// The scan's deadline passed.
    TimedOut,
    /// Another process holds the lease.
    LeaseLost,
    /// The process drains.
    Draining,
}

/// Processes a scan until it is over, has to wait, or its lease is lost. Returns whether it can be
/// continued at once.
pub(crate) async fn process(
    shared: &Arc<Shared>,
    scan: Scan,
    draining: &CancellationToken,
) -> bool {
    let (id, claimed) = (scan.id, scan.clone());
    let remaining =
        Duration::try_from(scan.deadline.duration_since(clock::now())).unwrap_or_default();
    let mut work = Work { shared, scan };
    let end = if work.scan.cancel_requested.is_some() {
        WorkEnd::Cancelled
    } else if remaining.is_zero() {
        WorkEnd::TimedOut
    } else {
        tokio::select! {
            biased;
            () = draining.cancelled() => WorkEnd::Draining,
            lease_state = hold_lease(shared, &claimed) => match lease_state {
                LeaseState::CancelRequested => WorkEnd::Cancelled,
                LeaseState::Lost | LeaseState::Held => WorkEnd::LeaseLost,
            },
            () = tokio::time::sleep(remaining) => WorkEnd::TimedOut,
            result = phases::advance(&mut work) => WorkEnd::PhasesDone(result),
        }
    };
    let written = match end {
        WorkEnd::PhasesDone(Ok(None)) => Ok(()),
        WorkEnd::PhasesDone(Ok(Some(wake))) => {
            let now = clock::now();
            match shared.store.scan_release(&work.scan, wake, now).await {
                Ok(()) => return wake <= now,
                Err(error) => Err(error.into()),
            }
        }
        WorkEnd::PhasesDone(Err(error)) => handle_error(&mut work, error).await,
        WorkEnd::Cancelled => end_early(&mut work, ScanPhase::Cancelled, None).await,
        WorkEnd::TimedOut => {
            end_early(&mut work, ScanPhase::Failed, Some("it exceeded its time limit".to_owned()))
                .await
        }
        WorkEnd::LeaseLost => {
            tracing::warn!(scan = %id, "another process took over a scan");
            return false;
        }
        WorkEnd::Draining => {
            // Others need not wait for the lease to expire.
            if let Err(error) = shared.store.scan_extend_lease(&claimed, clock::now()).await {
                tracing::debug!(error = %Chain(&error), "cannot hand back a scan");
            }
            return false;
        }
    };
    match written {
        Ok(()) if work.scan.phase.is_over() => {
            cleanup::delete_unless_kept(shared, &work.scan).await
        }
        Ok(()) => {}
        Err(Error::LeaseLost) => tracing::warn!(scan = %id, "another process took over a scan"),
        // Its lease expires, and the phase is repeated.
        Err(error) => {
            tracing::warn!(scan = %id, %error, "cannot store the result of a scan")
        }
    }
    false
}

/// Renews the lease until that fails or a cancellation is requested.
async fn hold_lease(shared: &Shared, scan: &Scan) -> LeaseState {
    let lease = shared.config.scanner_lease;
    let mut ticks = tokio::time::interval((lease / 4).min(Duration::from_secs(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match shared.store.scan_extend_lease(scan, clock::now() + lease).await {
            Ok(LeaseState::Held) => {}
            Ok(lease_state) => return lease_state,
            Err(error) => tracing::debug!(error = %Chain(&error), "cannot renew a lease"),
        }
    }
}

/// Stores why a scan cannot continue.
async fn handle_error(work: &mut Work<'_>, error: Error) -> Result<(), Error> {
    match error {
        Error::LeaseLost => Err(Error::LeaseLost),
        Error::Failed(reason) => end_early(work, ScanPhase::Failed, Some(reason)).await,
        Error::Retryable { reason, not_before: until } => {
            if work.reload().await? {
                return Ok(());
            }
            let next_wake =
                work.next_retry().max(until.unwrap_or(Timestamp::MIN)).min(work.scan.deadline);
            work.record_wait(reason, next_wake, true).await
        }
    }
}

/// Ends a scan without candidates, and its task with it.
async fn end_early(
    work: &mut Work<'_>,
    phase: ScanPhase,
    reason: Option<String>,
) -> Result<(), Error> {
    if work.reload().await? {
        return Ok(());
    }
    let reason = reason.unwrap_or_else(|| match work.scan.cancel_reason.as_str() {
        "" => "it was canceled".to_owned(),
        reason => reason.to_owned(),
    });
    // Nothing renews the lease meanwhile, and the gateway may be slow.
    let (shared, now) = (work.shared, clock::now());
    let until = now + shared.config.scanner_lease + CALL_TIMEOUT;
    if shared.store.scan_extend_lease(&work.scan, until).await? == LeaseState::Lost {
        return Err(Error::LeaseLost);
    }
    match explore::cancel_task(work, &reason).await {
        Ok(()) => {}
        // Retry as long as the token is valid. A task that nobody ends spends on, and nobody else
        // knows that it must end.
        Err(Error::Retryable { reason, .. }) if now < work.scan.deadline + CANCEL_GRACE_PERIOD => {
            let next_wake = work.next_retry();
            work.record_wait(format!("its task cannot be ended yet: {reason}"), next_wake, false)
                .await?;
            // A scan with a requested cancellation is always due. So the lease says when to retry.
            shared.store.scan_extend_lease(&work.scan, next_wake).await?;
            return Ok(());
        }
        Err(error) => {
            tracing::warn!(scan = %work.scan.id, %error, "cannot cancel the task of a scan")
        }
    }
    work.scan.reason = reason.clone();
    work.enter_phase(phase, reason, ScanChanges::default()).await
}
