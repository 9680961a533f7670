//! Writes the entries of one journal, one after the other, in the order in which they are handed
//! over.
//!
//! Whoever hands one over waits for it only where something must not happen before it is written: a
//! side effect. Everything else goes on meanwhile, because an entry is never written without all
//! that were handed over before it. What a process had not written when it died, no side effect has
//! followed.

use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};

use construct_bus::{Bus, journal::Error};
use construct_domain::StepId;
use construct_proto::mesh::v1::JournalEntry;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{End, Ends};

/// Entries that may wait to be written; whoever has another one waits. Each holds the result of a
/// call.
const WAITING: usize = 16;

/// That an entry was not written, and none will be any more; why, [`Writer::failure`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the journal cannot be written")]
pub(crate) struct NotWritten;

/// Where entries are handed over.
#[derive(Debug)]
pub(super) struct Writer {
    queue: mpsc::Sender<Job>,
    failure: Arc<OnceLock<Error>>,
    ends: Arc<std::sync::Mutex<Ends>>,
}

#[derive(Debug)]
struct Job {
    /// None only to learn when everything before it is written.
    entry: Option<JournalEntry>,
    written: Option<oneshot::Sender<()>>,
}

impl Writer {
    /// Begins to write after the entry with the sequence `last`. Entries that cannot be written now
    /// are tried again until `stop` is cancelled; one that cannot be written at all cancels it.
    pub(super) fn start(
        bus: Bus,
        step: StepId,
        mut last: u64,
        ends: Ends,
        stop: CancellationToken,
    ) -> Self {
        let (queue, mut jobs) = mpsc::channel::<Job>(WAITING);
        let failure = Arc::new(OnceLock::new());
        let failed = Arc::clone(&failure);
        // It lives until all is written, also when the scripts have been dropped: an entry may be
        // on its way then, and the next one has to name it.
        tokio::spawn(async move {
            while let Some(Job { entry, written }) = jobs.recv().await {
                if let Some(entry) = entry {
                    match bus.journal().append_while(step, &entry, last, &stop).await {
                        Ok(sequence) => last = sequence,
                        Err(error) => {
                            // Nobody else writes to it, and this loop ends.
                            let _ = failed.set(error);
                            stop.cancel();
                            return;
                        }
                    }
                }
                if let Some(written) = written {
                    // Who waited for it may be gone.
                    let _ = written.send(());
                }
            }
        });
        Self { queue, failure, ends: Arc::new(std::sync::Mutex::new(ends)) }
    }

    /// Why an entry was not written, if one was not.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Hands an entry over; with it, in the same order as all others, the `end` of a call that
    /// scripts may then see.
    pub(super) async fn hand_over(
        &self,
        entry: JournalEntry,
        end: Option<End>,
    ) -> Result<(), NotWritten> {
        self.send(Job { entry: Some(entry), written: None }, end).await
    }

    /// Hands an entry over and waits until it is written, with all before it.
    pub(super) async fn write(&self, entry: JournalEntry) -> Result<(), NotWritten> {
        self.wait(Some(entry)).await
    }

    /// Waits until everything that was handed over is written.
    pub(super) async fn flush(&self) -> Result<(), NotWritten> {
        self.wait(None).await
    }

    async fn wait(&self, entry: Option<JournalEntry>) -> Result<(), NotWritten> {
        let (written, told) = oneshot::channel();
        self.send(Job { entry, written: Some(written) }, None).await?;
        told.await.map_err(|_| NotWritten)
    }

    async fn send(&self, job: Job, end: Option<End>) -> Result<(), NotWritten> {
        let place = self.queue.reserve().await.map_err(|_| NotWritten)?;
        // Under one lock: two calls that end at the same time wake their script in any order, and
        // it must see them in that of the journal, or it would see them otherwise when it is run
        // again.
        let mut ends = self.ends();
        if let Some(End { script, number, clock_micros }) = end {
            ends.entry(script).or_default().push_back((number, clock_micros));
        }
        place.send(job);
        Ok(())
    }

    /// Ends of calls that scripts have not seen.
    pub(super) fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
