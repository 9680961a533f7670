//! How entries get into the table that no write takes along.

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
    origin::{Known, Origin},
    refusals::{Refusals, Who},
};
use crate::{api::Api, metrics, status::chain};

/// Entries that wait to be written. When the database is away so long that there are more, they are
/// lost, and counted as lost.
const WAITING: usize = 4096;
/// Entries that are written at once.
const AT_ONCE: usize = 256;
/// How often it is looked whether counted calls are to be written.
const LOOK: Duration = Duration::from_secs(1);
/// How long to wait for the database before the next attempt.
const PAUSE: Duration = Duration::from_secs(1);
/// How long is waited for the last entries when the process ends.
const LAST: Duration = Duration::from_millis(200);

/// How long after a call was abandoned its outcome is certain: PostgreSQL has ended by then what it
/// was told last, and with it stored the call's own entry, or not.
const CERTAIN: Duration = STATEMENT_TIMEOUT.saturating_add(Duration::from_secs(1));

/// A call that nobody waits for any more.
struct Abandoned {
    at: Instant,
    /// Of strangers: whose calls are counted.
    stranger: Option<Who>,
    entry: AuditEntry,
}

/// Where calls are noted.
pub(crate) struct AuditWriter {
    refusals: Mutex<Refusals>,
    /// The oldest first.
    abandoned: Mutex<VecDeque<Abandoned>>,
    sender: mpsc::Sender<AuditEntry>,
    /// Taken by the one job that writes.
    receiver: Mutex<Option<mpsc::Receiver<AuditEntry>>>,
}

impl AuditWriter {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = mpsc::channel(WAITING);
        Self {
            refusals: Mutex::default(),
            abandoned: Mutex::default(),
            sender,
            receiver: Mutex::new(Some(receiver)),
        }
    }

    /// A call was refused. Nobody waits for the database because of that: what it doesn't take is
    /// written a little later.
    pub(crate) fn refused(&self, origin: &Origin, known: Option<Known>, entry: AuditEntry) {
        let who = Who::of(known, origin.peer);
        let first = self.refusals().note(who, entry, Instant::now());
        if let Some(first) = first {
            self.later(first);
        }
    }

    /// A call ended because nobody waits for it any more. What it had sent to PostgreSQL may still
    /// be done, and then the entry that was sent along is the true one. So this one, which has the
    /// same id, is written when that is certain: if the other is there, it is not.
    pub(crate) fn abandoned(&self, origin: &Origin, known: Option<Known>, entry: AuditEntry) {
        // Strangers who begin calls and leave are counted, like others of theirs that come to
        // nothing.
        let stranger = known.is_none().then(|| Who::of(known, origin.peer));
        let mut abandoned = self.abandoned.lock().unwrap_or_else(PoisonError::into_inner);
        if abandoned.len() < WAITING {
            abandoned.push_back(Abandoned { at: Instant::now(), stranger, entry });
        } else {
            metrics::audit_entries_lost(1);
        }
    }

    /// The entries of abandoned calls whose outcome is certain.
    fn certain(&self, now: Instant) -> Vec<AuditEntry> {
        let mut abandoned = self.abandoned.lock().unwrap_or_else(PoisonError::into_inner);
        let count =
            abandoned.iter().take_while(|call| now.duration_since(call.at) >= CERTAIN).count();
        let certain: Vec<Abandoned> = abandoned.drain(..count).collect();
        drop(abandoned);
        let entries =
            certain.into_iter().filter_map(|Abandoned { stranger, entry, .. }| match stranger {
                Some(who) => self.refusals().note(who, entry, now),
                None => Some(entry),
            });
        entries.collect()
    }

    /// Has an entry written soon.
    pub(crate) fn later(&self, entry: AuditEntry) {
        if self.sender.try_send(entry).is_err() {
            metrics::audit_entries_lost(1);
        }
    }

    /// Writes what waits until the process drains, and then what is there.
    pub(crate) async fn write(api: Api, store: Store, draining: CancellationToken) {
        let writer = api.audit_writer();
        let receiver = writer.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
        // There is one such job.
        let Some(mut receiver) = receiver else { return };
        let mut ticks = tokio::time::interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut entries = Vec::new();
        loop {
            tokio::select! {
                () = draining.cancelled() => break,
                _ = receiver.recv_many(&mut entries, AT_ONCE) => {}
                _ = ticks.tick() => {
                    let now = Instant::now();
                    entries.extend(writer.certain(now));
                    entries.extend(writer.refusals().due(now, false));
                }
            }
            while !entries.is_empty() {
                match store.audit_append(&entries).await {
                    Ok(()) => entries.clear(),
                    Err(error) => {
                        tracing::warn!(
                            error = chain(&error),
                            "the audit trail cannot be written; it is tried again"
                        );
                        tokio::select! {
                            () = draining.cancelled() => break,
                            () = tokio::time::sleep(PAUSE) => {}
                        }
                    }
                }
            }
        }
        // Calls that are under way may still be refused.
        while let Ok(1..) =
            tokio::time::timeout(LAST, receiver.recv_many(&mut entries, AT_ONCE)).await
        {}
        let now = Instant::now();
        entries.extend(writer.certain(now));
        // Better no entry of a call that nobody waited for than one that is not true.
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
                "the end of the audit trail cannot be written"
            );
        }
    }

    fn refusals(&self) -> std::sync::MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes an entry before the call it tells of is answered.
///
/// # Errors
/// When the database does not take it.
pub(crate) async fn now(api: &Api, entry: &AuditEntry) -> Result<(), Error> {
    match api.store() {
        Ok(store) => store.audit_append(std::slice::from_ref(entry)).await,
        Err(status) => Err(Error::Unavailable(status.message().into())),
    }
}

/// Whether a call that ended like this was refused to who made it.
pub(crate) const fn is_refusal(code: Code) -> bool {
    matches!(code, Code::Unauthenticated | Code::PermissionDenied)
}
