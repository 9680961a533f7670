//! The life of a scan: from its row to candidates, phase by phase.
//!
//! Each phase can be begun again by another process: snapshots, masks, surveys and lists of symbols
//! give what is there already, and what is asked of the gateway has ids that follow from the scan.
//! A process holds a scan by its lease; when it loses that, it stops. While its task explores
//! nobody holds it: it waits by its row.

pub(crate) mod hosts;
mod phases;
pub(crate) mod source;

use std::{sync::Arc, time::Duration};

use construct_bus::subject;
use construct_runtime::{clock, telemetry::Chain};
use construct_store::{
    SealError,
    scan::{Held, NewScanEvent, Scan, ScanChanges, ScanPhase},
};
use construct_wire::scan as show;
use jiff::{SignedDuration, Timestamp};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::{
    explore,
    repository::{SnapshotError, SourceError},
    service::{Shared, tidy},
};

/// The pause after the first failure; it doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// How long after its deadline a scan's task can still be ended: the gateway takes the scan's token
/// so long.
const GRACE: SignedDuration = SignedDuration::from_mins(10);
/// How long the mesh may take to hear what happened. It can be read in any case.
const NEWS: Duration = Duration::from_millis(250);

/// Why a scan cannot be gone on with now, or at all.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Trouble {
    /// Another try may help.
    #[error("{what}")]
    Later {
        /// What went wrong.
        what: String,
        /// Not before then.
        until: Option<Timestamp>,
    },
    /// It is over.
    #[error("{0}")]
    Failed(String),
    /// Somebody else is at it.
    #[error("somebody else is at it")]
    Lost,
}

impl Trouble {
    /// Something that may pass.
    pub(crate) fn later(error: &(dyn std::error::Error + 'static)) -> Self {
        Self::Later { what: Chain(error).to_string(), until: None }
    }

    /// Something sealed cannot be opened. A key that is not here may be given back; until then the
    /// scan waits, and its task can be ended.
    pub(crate) fn sealed(error: SealError) -> Self {
        match error {
            error @ SealError::UnknownKey { .. } => Self::later(&error),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl From<construct_store::Error> for Trouble {
    fn from(error: construct_store::Error) -> Self {
        match error {
            construct_store::Error::Conflict => Self::Lost,
            error => Self::later(&error),
        }
    }
}

impl From<SourceError> for Trouble {
    fn from(error: SourceError) -> Self {
        match error {
            SourceError::RateLimited { until } => {
                Self::Later { what: error.to_string(), until: Some(until) }
            }
            error if error.is_transient() => Self::later(&error),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl From<SnapshotError> for Trouble {
    fn from(error: SnapshotError) -> Self {
        match error {
            SnapshotError::Source(error) => error.into(),
            error if error.is_transient() => Self::later(&error),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl From<tonic::Status> for Trouble {
    fn from(status: tonic::Status) -> Self {
        if explore::is_transient(&status) {
            Self::Later { what: format!("the gateway: {}", status.message()), until: None }
        } else {
            Self::Failed(format!("the gateway refuses: {}", status.message()))
        }
    }
}

/// A scan in the hands of this process.
pub(crate) struct Work<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) scan: Scan,
}

impl Work<'_> {
    /// Goes back to the row: what was changed here may not have been written, or was written
    /// although nobody has heard of it. Gives whether the scan is over.
    async fn reload(&mut self) -> Result<bool, Trouble> {
        let found = self.shared.store.scan_get(self.scan.organization, self.scan.id).await?;
        if found.lease != self.scan.lease {
            return Err(Trouble::Lost);
        }
        self.scan = found;
        Ok(self.scan.phase.is_over())
    }

    /// When a scan is tried again that could not be gone on with once more.
    fn again(&mut self) -> Timestamp {
        self.scan.failures = self.scan.failures.saturating_add(1);
        let doubled = PAUSE_MIN.saturating_mul(1 << self.scan.failures.clamp(1, 7) >> 1);
        clock::now() + doubled.min(PAUSE_MAX)
    }

    /// Says in the row why the scan has to wait, and in an event when that is new.
    async fn wait(&mut self, what: String, again: Timestamp, let_go: bool) -> Result<(), Trouble> {
        self.scan.next_wake = Some(again);
        let mut changes = ScanChanges { let_go, ..ScanChanges::default() };
        if self.scan.reason != what {
            tracing::warn!(scan = %self.scan.id, what, "a scan has to wait");
            changes.events.push(event("waiting", what.clone()));
        }
        self.scan.reason = what;
        self.save(changes).await?;
        self.shared.metrics.waits(self.scan.phase);
        Ok(())
    }

    /// Writes down how far the scan has come, with what happened, and tells whoever watches.
    pub(crate) async fn save(&mut self, changes: ScanChanges) -> Result<(), Trouble> {
        let events = self.shared.store.scan_save(&mut self.scan, &changes, clock::now()).await?;
        let (organization, scan) = (self.scan.organization, self.scan.id);
        for event in &events {
            let message = show::event(organization, scan, event);
            let address = subject::ScanNews { organization, scan };
            if let Err(error) = self.shared.bus.publish_within(&address, &message, NEWS).await {
                tracing::debug!(%error, "what happened in a scan is told by its row only");
                break;
            }
        }
        Ok(())
    }

    /// Goes over to another phase, which is an event.
    pub(crate) async fn enter(
        &mut self,
        phase: ScanPhase,
        message: impl Into<String>,
        changes: ScanChanges,
    ) -> Result<(), Trouble> {
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
        changes.events.push(event("phase", message));
        changes.let_go |= phase.is_over();
        self.save(changes).await?;
        self.shared.metrics.phase(left, took);
        if phase.is_over() {
            tracing::info!(scan = %self.scan.id, outcome = phase.as_str(), reason = self.scan.reason, "a scan is over");
            self.shared.metrics.ended(phase, left, self.scan.cost_pico_usd);
        }
        Ok(())
    }
}

/// Something that happened.
pub(crate) fn event(kind: &'static str, message: impl Into<String>) -> NewScanEvent {
    let message: String = message.into();
    NewScanEvent { kind, message: message.chars().take(2000).collect(), tool_calls: 0 }
}

/// What became of the time this process had.
enum Ended {
    /// The phases are through, or somebody has to go on at this time, or there is trouble.
    Done(Result<Option<Timestamp>, Trouble>),
    /// Somebody wants the scan's end.
    Cancelled,
    /// It took too long.
    Late,
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
        Ended::Cancelled
    } else if left.is_zero() {
        Ended::Late
    } else {
        tokio::select! {
            biased;
            () = draining.cancelled() => Ended::Draining,
            held = hold(shared, &held) => match held {
                Held::Cancel => Ended::Cancelled,
                Held::Lost | Held::Yes => Ended::Lost,
            },
            () = tokio::time::sleep(left) => Ended::Late,
            done = phases::go_on(&mut work) => Ended::Done(done),
        }
    };
    let written = match ended {
        Ended::Done(Ok(None)) => Ok(()),
        Ended::Done(Ok(Some(wake))) => {
            let now = clock::now();
            match shared.store.scan_let_go(&work.scan, wake, now).await {
                Ok(()) => return wake <= now,
                Err(error) => Err(error.into()),
            }
        }
        Ended::Done(Err(trouble)) => settle(&mut work, trouble).await,
        Ended::Cancelled => over(&mut work, ScanPhase::Cancelled, None).await,
        Ended::Late => {
            over(&mut work, ScanPhase::Failed, Some("it took longer than it may".to_owned())).await
        }
        Ended::Lost => {
            tracing::warn!(scan = %id, "somebody else goes on with a scan");
            return false;
        }
        Ended::Draining => {
            // Others need not wait for the lease to end.
            if let Err(error) = shared.store.scan_hold(&held, clock::now()).await {
                tracing::debug!(error = %Chain(&error), "a scan could not be handed back");
            }
            return false;
        }
    };
    match written {
        Ok(()) if work.scan.phase.is_over() => tidy::ended(shared, &work.scan).await,
        Ok(()) => {}
        Err(Trouble::Lost) => tracing::warn!(scan = %id, "somebody else goes on with a scan"),
        // Its lease ends, and it is begun again.
        Err(error) => {
            tracing::warn!(scan = %id, %error, "what became of a scan could not be written down")
        }
    }
    false
}

/// Holds a scan, until that fails or somebody wants its end.
async fn hold(shared: &Shared, scan: &Scan) -> Held {
    let lease = shared.config.scanner_lease;
    let mut ticks = tokio::time::interval((lease / 4).min(Duration::from_secs(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match shared.store.scan_hold(scan, clock::now() + lease).await {
            Ok(Held::Yes) => {}
            Ok(held) => return held,
            Err(error) => tracing::debug!(error = %Chain(&error), "a lease could not be held"),
        }
    }
}

/// Writes down why a scan cannot be gone on with.
async fn settle(work: &mut Work<'_>, trouble: Trouble) -> Result<(), Trouble> {
    match trouble {
        Trouble::Lost => Err(Trouble::Lost),
        Trouble::Failed(why) => over(work, ScanPhase::Failed, Some(why)).await,
        Trouble::Later { what, until } => {
            if work.reload().await? {
                return Ok(());
            }
            let again = work.again().max(until.unwrap_or(Timestamp::MIN)).min(work.scan.deadline);
            work.wait(what, again, true).await
        }
    }
}

/// Ends a scan before its candidates are there, and its task with it.
async fn over(work: &mut Work<'_>, phase: ScanPhase, why: Option<String>) -> Result<(), Trouble> {
    if work.reload().await? {
        return Ok(());
    }
    let why = why.unwrap_or_else(|| match work.scan.cancel_reason.as_str() {
        "" => "somebody has cancelled it".to_owned(),
        reason => reason.to_owned(),
    });
    // Nobody holds the scan meanwhile, and the gateway may be slow.
    let (shared, now) = (work.shared, clock::now());
    let until = now + shared.config.scanner_lease + explore::CALL_TIMEOUT;
    if shared.store.scan_hold(&work.scan, until).await? == Held::Lost {
        return Err(Trouble::Lost);
    }
    match explore::cancel(work, &why).await {
        Ok(()) => {}
        // As long as its token holds: a task that nobody ends spends on, and nobody else knows that
        // it is to end.
        Err(Trouble::Later { what, .. }) if now < work.scan.deadline + GRACE => {
            let again = work.again();
            work.wait(format!("its task cannot be ended yet: {what}"), again, false).await?;
            // Of a scan whose end is wanted, the row says that it is to be looked at now; so the
            // lease says when.
            shared.store.scan_hold(&work.scan, again).await?;
            return Ok(());
        }
        Err(error) => {
            tracing::warn!(scan = %work.scan.id, %error, "the task of a scan could not be cancelled")
        }
    }
    work.scan.reason = why.clone();
    work.enter(phase, why, ScanChanges::default()).await
}
