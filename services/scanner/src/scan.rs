//! The life of a scan: from its row to candidates, phase by phase.
//!
//! Each phase can be begun again by another process: snapshots, masks, surveys and lists of symbols
//! give what is there already, and what is asked of the gateway has ids that follow from the scan.
//! A process holds a scan by its lease; when it loses that, it stops. While its task explores
//! nobody holds it: it waits by its row.

mod phases;
pub(crate) mod source;

use std::{sync::Arc, time::Duration};

use construct_runtime::{clock, telemetry::Chain};
use construct_store::scan::{LeaseState, Scan, ScanChanges, ScanPhase};
use jiff::{SignedDuration, Timestamp};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::{cleanup, error::Error, explore, gateway::CALL_TIMEOUT, shared::Shared, work::Work};

/// How long after its deadline a scan's task can still be ended: the gateway takes the scan's token
/// so long.
const CANCEL_GRACE_PERIOD: SignedDuration = SignedDuration::from_mins(10);

/// What became of the time this process had.
enum WorkEnd {
    /// The phases are through, or somebody has to go on at this time, or there is trouble.
    PhasesDone(Result<Option<Timestamp>, Error>),
    /// Somebody wants the scan's end.
    Cancelled,
    /// It took too long.
    TimedOut,
    /// Somebody else is at it.
    Lost,
    /// The process drains.
    Draining,
}

/// Works on a scan until it is over, has to wait, or somebody else is at it. Gives whether somebody
/// can go on with it at once.
pub(crate) async fn work(shared: &Arc<Shared>, scan: Scan, draining: &CancellationToken) -> bool {
    let (id, held) = (scan.id, scan.clone());
    let left = Duration::try_from(scan.deadline.duration_since(clock::now())).unwrap_or_default();
    let mut work = Work { shared, scan };
    let ended = if work.scan.cancel_requested.is_some() {
        WorkEnd::Cancelled
    } else if left.is_zero() {
        WorkEnd::TimedOut
    } else {
        tokio::select! {
            biased;
            () = draining.cancelled() => WorkEnd::Draining,
            held = hold(shared, &held) => match held {
                LeaseState::CancelRequested => WorkEnd::Cancelled,
                LeaseState::Lost | LeaseState::Held => WorkEnd::Lost,
            },
            () = tokio::time::sleep(left) => WorkEnd::TimedOut,
            done = phases::go_on(&mut work) => WorkEnd::PhasesDone(done),
        }
    };
    let written = match ended {
        WorkEnd::PhasesDone(Ok(None)) => Ok(()),
        WorkEnd::PhasesDone(Ok(Some(wake))) => {
            let now = clock::now();
            match shared.store.scan_release(&work.scan, wake, now).await {
                Ok(()) => return wake <= now,
                Err(error) => Err(error.into()),
            }
        }
        WorkEnd::PhasesDone(Err(trouble)) => settle(&mut work, trouble).await,
        WorkEnd::Cancelled => over(&mut work, ScanPhase::Cancelled, None).await,
        WorkEnd::TimedOut => {
            over(&mut work, ScanPhase::Failed, Some("it took longer than it may".to_owned())).await
        }
        WorkEnd::Lost => {
            tracing::warn!(scan = %id, "somebody else goes on with a scan");
            return false;
        }
        WorkEnd::Draining => {
            // Others need not wait for the lease to end.
            if let Err(error) = shared.store.scan_extend_lease(&held, clock::now()).await {
                tracing::debug!(error = %Chain(&error), "a scan could not be handed back");
            }
            return false;
        }
    };
    match written {
        Ok(()) if work.scan.phase.is_over() => cleanup::delete_unless_kept(shared, &work.scan).await,
        Ok(()) => {}
        Err(Error::LeaseLost) => tracing::warn!(scan = %id, "somebody else goes on with a scan"),
        // Its lease ends, and it is begun again.
        Err(error) => {
            tracing::warn!(scan = %id, %error, "what became of a scan could not be written down")
        }
    }
    false
}

/// Holds a scan, until that fails or somebody wants its end.
async fn hold(shared: &Shared, scan: &Scan) -> LeaseState {
    let lease = shared.config.scanner_lease;
    let mut ticks = tokio::time::interval((lease / 4).min(Duration::from_secs(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match shared.store.scan_extend_lease(scan, clock::now() + lease).await {
            Ok(LeaseState::Held) => {}
            Ok(held) => return held,
            Err(error) => tracing::debug!(error = %Chain(&error), "a lease could not be held"),
        }
    }
}

/// Writes down why a scan cannot be gone on with.
async fn settle(work: &mut Work<'_>, trouble: Error) -> Result<(), Error> {
    match trouble {
        Error::LeaseLost => Err(Error::LeaseLost),
        Error::Failed(why) => over(work, ScanPhase::Failed, Some(why)).await,
        Error::Retryable { reason: what, not_before: until } => {
            if work.reload().await? {
                return Ok(());
            }
            let again = work.next_retry().max(until.unwrap_or(Timestamp::MIN)).min(work.scan.deadline);
            work.record_wait(what, again, true).await
        }
    }
}

/// Ends a scan before its candidates are there, and its task with it.
async fn over(work: &mut Work<'_>, phase: ScanPhase, why: Option<String>) -> Result<(), Error> {
    if work.reload().await? {
        return Ok(());
    }
    let why = why.unwrap_or_else(|| match work.scan.cancel_reason.as_str() {
        "" => "somebody has cancelled it".to_owned(),
        reason => reason.to_owned(),
    });
    // Nobody holds the scan meanwhile, and the gateway may be slow.
    let (shared, now) = (work.shared, clock::now());
    let until = now + shared.config.scanner_lease + CALL_TIMEOUT;
    if shared.store.scan_extend_lease(&work.scan, until).await? == LeaseState::Lost {
        return Err(Error::LeaseLost);
    }
    match explore::cancel(work, &why).await {
        Ok(()) => {}
        // As long as its token holds: a task that nobody ends spends on, and nobody else knows that
        // it is to end.
        Err(Error::Retryable { reason: what, .. }) if now < work.scan.deadline + CANCEL_GRACE_PERIOD => {
            let again = work.next_retry();
            work.record_wait(format!("its task cannot be ended yet: {what}"), again, false).await?;
            // Of a scan whose end is wanted, the row says that it is to be looked at now; so the
            // lease says when.
            shared.store.scan_extend_lease(&work.scan, again).await?;
            return Ok(());
        }
        Err(error) => {
            tracing::warn!(scan = %work.scan.id, %error, "the task of a scan could not be cancelled")
        }
    }
    work.scan.reason = why.clone();
    work.enter_phase(phase, why, ScanChanges::default()).await
}
