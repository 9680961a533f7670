//! Writes the entries that are not part of a change in the store.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use construct_store::{AuditEntry, Error, STATEMENT_TIMEOUT, Store};
use tokio::{sync::mpsc, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::{
    origin::{CallerIdentity, Origin},
    refusals::{Refusals, RefusedCaller},
};
use crate::{api::Api, metrics, status::chain};

/// Maximum number of entries that wait to be written. When the database is unavailable for so long
/// that there are more, they are lost, and counted as lost.
const QUEUE_CAPACITY: usize = 4096;
/// Maximum number of entries of one write.
const BATCH_SIZE: usize = 256;
/// How often counted calls are checked.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The delay after a failed write.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// How long the last entries are waited for when the process ends.
const FINAL_TIMEOUT: Duration = Duration::from_millis(200);

/// How long after its end the outcome of an abandoned call is certain: by then PostgreSQL has ended
/// its last statement, and stored the call's own entry with it or not.
const CERTAIN_AFTER: Duration = STATEMENT_TIMEOUT.saturating_add(Duration::from_secs(1));

/// A call whose client has gone.
struct AbandonedCall {
    at: Instant,
    /// Of an unknown caller, whose calls are counted.
    unknown_caller: Option<RefusedCaller>,
    entry: AuditEntry,
}

/// Records calls.
pub(crate) struct AuditWriter {
    refusals: Mutex<Refusals>,
    /// Oldest first.
    abandoned: Mutex<VecDeque<AbandonedCall>>,
    sender: mpsc::Sender<AuditEntry>,
    /// Taken by the job that writes.
    receiver: Mutex<Option<mpsc::Receiver<AuditEntry>>>,
}

impl AuditWriter {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = mpsc::channel(QUEUE_CAPACITY);
        Self {
            refusals: Mutex::default(),
            abandoned: Mutex::default(),
            sender,
            receiver: Mutex::new(Some(receiver)),
        }
    }

    /// Records a refused call. It does not wait for the database: what cannot be written now is
    /// written later.
    pub(crate) fn record_refused(
        &self,
        origin: &Origin,
        known: Option<CallerIdentity>,
        entry: AuditEntry,
    ) {
        let caller = RefusedCaller::new(known, origin.peer);
        let first = self.refusals().count(caller, entry, Instant::now());
        if let Some(first) = first {
            self.enqueue(first);
        }
    }

    /// Records a call whose client has gone. Its last statement may still succeed in PostgreSQL,
    /// with its own entry, which is then the true one. So this entry, with the same id, is written
    /// when the outcome is certain: if the other one exists, it is ignored.
    pub(crate) fn record_abandoned(
        &self,
        origin: &Origin,
        known: Option<CallerIdentity>,
        entry: AuditEntry,
    ) {
        // Unknown callers that start calls and leave are counted, like their other failed calls.
        let unknown_caller = known.is_none().then(|| RefusedCaller::new(known, origin.peer));
        let mut abandoned = self.abandoned.lock().unwrap_or_else(PoisonError::into_inner);
        if abandoned.len() < QUEUE_CAPACITY {
            abandoned.push_back(AbandonedCall { at: Instant::now(), unknown_caller, entry });
        } else {
            metrics::audit_entries_lost(1);
        }
    }

    /// Takes the entries of abandoned calls whose outcome is certain.
    fn take_certain(&self, now: Instant) -> Vec<AuditEntry> {
        let mut abandoned = self.abandoned.lock().unwrap_or_else(PoisonError::into_inner);
        let count = abandoned
            .iter()
            .take_while(|call| now.duration_since(call.at) >= CERTAIN_AFTER)
            .count();
        let certain: Vec<AbandonedCall> = abandoned.drain(..count).collect();
        drop(abandoned);
        let entries =
            certain.into_iter().filter_map(|AbandonedCall { unknown_caller, entry, .. }| {
                match unknown_caller {
                    Some(caller) => self.refusals().count(caller, entry, now),
                    None => Some(entry),
                }
            });
        entries.collect()
    }

    /// Queues an entry.
    pub(crate) fn enqueue(&self, entry: AuditEntry) {
        if self.sender.try_send(entry).is_err() {
            metrics::audit_entries_lost(1);
        }
    }

    /// Writes queued entries until the process drains, and then the remaining ones.
    pub(crate) async fn run(api: Api, store: Store, draining: CancellationToken) {
        let writer = api.audit_writer();
        let receiver = writer.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Only one job runs.
        let Some(mut receiver) = receiver else { return };
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut entries = Vec::new();
        loop {
            tokio::select! {
                () = draining.cancelled() => break,
                _ = receiver.recv_many(&mut entries, BATCH_SIZE) => {}
                _ = ticks.tick() => {
                    let now = Instant::now();
                    entries.extend(writer.take_certain(now));
                    entries.extend(writer.refusals().due(now, false));
                }
            }
            while !entries.is_empty() {
                match store.audit_append(&entries).await {
                    Ok(()) => entries.clear(),
                    Err(error) => {
                        tracing::warn!(
                            error = chain(&error),
                            "the audit log cannot be written; retrying"
                        );
                        tokio::select! {
                            () = draining.cancelled() => break,
                            () = tokio::time::sleep(RETRY_DELAY) => {}
                        }
                    }
                }
            }
        }
        // Calls in flight may still be refused.
        while let Ok(1..) =
            tokio::time::timeout(FINAL_TIMEOUT, receiver.recv_many(&mut entries, BATCH_SIZE)).await
        {
        }
        let now = Instant::now();
        entries.extend(writer.take_certain(now));
        // No entry is better than a false one.
        metrics::audit_entries_lost(
            writer.abandoned.lock().unwrap_or_else(PoisonError::into_inner).len(),
        );
        entries.extend(writer.refusals().due(now, true));
        if entries.is_empty() {
            return;
        }
        if let Err(error) = store.audit_append(&entries).await {
            metrics::audit_entries_lost(entries.len());
            tracing::error!(
                error = chain(&error),
                lost = entries.len(),
                "the last entries of the audit log cannot be written"
            );
        }
    }

    fn refusals(&self) -> std::sync::MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes an entry before the response of its call.
///
/// # Errors
/// When the database does not accept it.
pub(crate) async fn write_entry(api: &Api, entry: &AuditEntry) -> Result<(), Error> {
    match api.store() {
        Ok(store) => store.audit_append(std::slice::from_ref(entry)).await,
        Err(status) => Err(Error::Unavailable(status.message().into())),
    }
}

/// Whether a call with this code was refused to its caller.
pub(crate) const fn is_refusal(code: Code) -> bool {
    matches!(code, Code::Unauthenticated | Code::PermissionDenied)
}
