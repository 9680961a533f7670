//! Writes the entries of one journal in the order in which they are enqueued.
//!
//! A caller waits for an entry only where something must not happen before it is written: a side
//! effect. Everything else continues meanwhile, because an entry is never written without all
//! entries before it. So no side effect has followed an entry that a crashed process had not
//! written.

use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};

use construct_bus::{Bus, journal::Error};
use construct_domain::StepId;
use construct_proto::mesh::v1::JournalEntry;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{ScriptCallEnd, UnseenEnds};

/// Maximum number of entries that wait to be written; callers wait beyond it. Each entry holds the
/// result of a call.
const QUEUE_CAPACITY: usize = 16;

/// An entry was not written, and no later one will be; [`Writer::failure`] says why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the journal cannot be written")]
pub(crate) struct NotWritten;

/// The queue of entries and the state of its writer task.
#[derive(Debug)]
pub(super) struct Writer {
    queue: mpsc::Sender<QueuedEntry>,
    failure: Arc<OnceLock<Error>>,
    ends: Arc<std::sync::Mutex<UnseenEnds>>,
}

#[derive(Debug)]
struct QueuedEntry {
    /// `None` waits for all entries before it.
    entry: Option<JournalEntry>,
    written: Option<oneshot::Sender<()>>,
}

impl Writer {
    /// Starts to write after the entry with the sequence `last`. Failed writes are retried until
    /// `stop` is canceled; an entry that can never be written cancels it.
    pub(super) fn start(
        bus: Bus,
        step: StepId,
        mut last: u64,
        ends: UnseenEnds,
        stop: CancellationToken,
    ) -> Self {
        let (queue, mut entries) = mpsc::channel::<QueuedEntry>(QUEUE_CAPACITY);
        let failure = Arc::new(OnceLock::new());
        let failed = Arc::clone(&failure);
        // The task runs until everything is written, even after the scripts are dropped: an entry
        // may be on its way then, and the next one has to name it.
        tokio::spawn(async move {
            while let Some(QueuedEntry { entry, written }) = entries.recv().await {
                if let Some(entry) = entry {
                    match bus.journal().append_while(step, &entry, last, &stop).await {
                        Ok(sequence) => last = sequence,
                        Err(error) => {
                            // This task is the only writer, and it ends here.
                            let _ = failed.set(error);
                            stop.cancel();
                            return;
                        }
                    }
                }
                if let Some(written) = written {
                    // The waiting caller may have been dropped.
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

    /// Enqueues an entry. With it, and in the same order as all others, scripts may see the `end`
    /// of a call.
    pub(super) async fn enqueue(
        &self,
        entry: JournalEntry,
        end: Option<ScriptCallEnd>,
    ) -> Result<(), NotWritten> {
        self.send(QueuedEntry { entry: Some(entry), written: None }, end).await
    }

    /// Enqueues an entry and waits until it and all before it are written.
    pub(super) async fn write(&self, entry: JournalEntry) -> Result<(), NotWritten> {
        self.wait(Some(entry)).await
    }

    /// Waits until all enqueued entries are written.
    pub(super) async fn flush(&self) -> Result<(), NotWritten> {
        self.wait(None).await
    }

    async fn wait(&self, entry: Option<JournalEntry>) -> Result<(), NotWritten> {
        let (written, confirmation) = oneshot::channel();
        self.send(QueuedEntry { entry, written: Some(written) }, None).await?;
        confirmation.await.map_err(|_| NotWritten)
    }

    async fn send(&self, entry: QueuedEntry, end: Option<ScriptCallEnd>) -> Result<(), NotWritten> {
        let permit = self.queue.reserve().await.map_err(|_| NotWritten)?;
        // Both happen under one lock. Two calls that end at the same time wake their script in any
        // order, and it must see them in the journal's order: a replay would see them in that
        // order.
        let mut ends = self.ends();
        if let Some(ScriptCallEnd { script, number, clock_micros }) = end {
            ends.entry(script).or_default().push_back((number, clock_micros));
        }
        permit.send(entry);
        Ok(())
    }

    /// Ends of calls that scripts have not seen.
    pub(super) fn ends(&self) -> MutexGuard<'_, UnseenEnds> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
