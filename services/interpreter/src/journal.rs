//! The journal of one execution: every host call of its scripts, written to JetStream before a side effect begins and
//! when a call ends, so that whoever takes the execution over knows what was done.
//!
//! The journal is also the fence: each entry names the one before it, so that of two processes that believe they run the
//! same execution, one is refused at its next entry and stops before it does anything further.

use std::{collections::HashMap, sync::Arc};

use construct_bus::{Bus, journal::Error};
use construct_domain::StepId;
use construct_proto::mesh::v1::{
    JournalCompleted, JournalEntry, JournalOpened, JournalReleased, JournalStarted, journal_entry::Entry,
};
use tokio::sync::Mutex;

/// A call, named by its script (from 0) and its number in it (from 1).
pub(crate) type CallId = (u32, u32);

/// What an earlier process wrote about a call.
#[derive(Debug, Clone)]
pub(crate) enum Past {
    /// Begun; whether it had its effect is unknown.
    Started(JournalStarted),
    /// Ended, as the `order`-th of all.
    Completed { completed: JournalCompleted, order: usize },
}

/// The journal of an execution this process has taken over.
#[derive(Debug)]
pub(crate) struct Journal {
    bus: Bus,
    step: StepId,
    past: HashMap<CallId, Past>,
    /// Randomness and clock of the guest, from when the execution first began.
    pub(crate) opened: JournalOpened,
    /// Processes that had taken the execution over and neither ended it nor handed it back: they died.
    pub(crate) deaths: u32,
    /// Sequence of the newest entry. Locked while one is written, so that entries have one order.
    last: Arc<Mutex<u64>>,
}

/// What became of the attempt to take an execution over.
#[derive(Debug)]
pub(crate) enum Taken {
    /// It is ours.
    Over(Journal),
    /// The reconciler has closed it: nobody waits for it.
    Closed,
    /// It was gone on with under a later command: nobody waits for this one.
    Superseded,
}

impl Journal {
    /// Takes the execution over: reads what was done and fences off whoever was at it before. `fresh` gives randomness
    /// and clock of an execution that is only now begun.
    pub(crate) async fn open(bus: &Bus, step: StepId, fresh: JournalOpened) -> Result<Taken, Error> {
        let entries = bus.journal().load(step).await?;
        let last = entries.last().map_or(0, |(sequence, _)| *sequence);
        let mut past = HashMap::new();
        let mut first = None;
        let (mut order, mut deaths) = (0, 0_u32);
        for (_, entry) in entries {
            let call = (entry.script, entry.call);
            match entry.entry {
                Some(Entry::Closed(_)) => return Ok(Taken::Closed),
                Some(Entry::Released(_)) => deaths = deaths.saturating_sub(1),
                Some(Entry::Opened(opened)) if opened.round > fresh.round => return Ok(Taken::Superseded),
                Some(Entry::Opened(opened)) => {
                    deaths += 1;
                    first = first.or(Some(opened));
                }
                Some(Entry::Started(started)) => {
                    past.insert(call, Past::Started(started));
                }
                Some(Entry::Completed(completed)) => {
                    past.insert(call, Past::Completed { completed, order });
                    order += 1;
                }
                None => {}
            }
        }
        let first = first.unwrap_or_else(|| fresh.clone());
        let opened = JournalOpened { delivery: fresh.delivery, round: fresh.round, ..first };
        let last = Arc::new(Mutex::new(last));
        let journal = Self { bus: bus.clone(), step, past, opened: opened.clone(), deaths, last };
        journal.append((0, 0), Entry::Opened(opened)).await?;
        Ok(Taken::Over(journal))
    }

    /// Writes that this process hands the execution back in good order.
    pub(crate) async fn release(&self) -> Result<(), Error> {
        self.append((0, 0), Entry::Released(JournalReleased {})).await
    }

    /// The calls of a script that are known from before, by number.
    pub(crate) fn calls(&self, script: u32) -> Vec<(u32, &Past)> {
        let mut calls: Vec<_> =
            self.past.iter().filter(|((of, _), _)| *of == script).map(|((_, number), past)| (*number, past)).collect();
        calls.sort_unstable_by_key(|(number, _)| *number);
        calls
    }

    /// What is known of a call from before.
    pub(crate) fn past(&self, call: CallId) -> Option<&Past> {
        self.past.get(&call)
    }

    /// Calls of all scripts that succeeded before, in the order in which they ended.
    pub(crate) fn succeeded(&self) -> Vec<&JournalCompleted> {
        let succeeded = self.past.values().filter_map(|past| match past {
            Past::Completed { completed, order } if completed.succeeded => Some((*order, completed)),
            Past::Completed { .. } | Past::Started(_) => None,
        });
        let mut succeeded: Vec<_> = succeeded.collect();
        succeeded.sort_unstable_by_key(|(order, _)| *order);
        succeeded.into_iter().map(|(_, completed)| completed).collect()
    }

    /// Numbers of a script's calls in the order in which they ended before.
    pub(crate) fn ended(&self, script: u32) -> Vec<u32> {
        let mut ended: Vec<(usize, u32)> = self
            .past
            .iter()
            .filter_map(|((of, number), past)| match past {
                Past::Completed { order, .. } if *of == script => Some((*order, *number)),
                Past::Completed { .. } | Past::Started(_) => None,
            })
            .collect();
        ended.sort_unstable();
        ended.into_iter().map(|(_, number)| number).collect()
    }

    /// Writes that a call with a side effect is about to begin.
    pub(crate) async fn started(&self, call: CallId, started: JournalStarted) -> Result<(), Error> {
        self.append(call, Entry::Started(started)).await
    }

    /// Writes that a call has ended.
    pub(crate) async fn completed(&self, call: CallId, completed: JournalCompleted) -> Result<(), Error> {
        self.append(call, Entry::Completed(completed)).await
    }

    async fn append(&self, (script, call): CallId, entry: Entry) -> Result<(), Error> {
        let entry = JournalEntry { step_id: self.step.to_string(), script, call, entry: Some(entry) };
        // In a task of its own: when the script that waits for it is dropped, the entry may be written all the same, and
        // then `last` must say so, or this process would fence itself.
        let (bus, step, last) = (self.bus.clone(), self.step, Arc::clone(&self.last));
        let append = tokio::spawn(async move {
            let mut last = last.lock_owned().await;
            *last = bus.journal().append(step, &entry, *last).await?;
            Ok(())
        });
        append.await.unwrap_or(Err(Error::Conflict))
    }
}
