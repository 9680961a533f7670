//! The journal of one execution: every host call of its scripts, written to JetStream before a side effect begins and
//! when a call ends, so that whoever takes the execution over knows what was done.
//!
//! The journal is also the fence: each entry names the one before it, so that of two processes that believe they run the
//! same execution, one is refused at its next entry and stops before it does anything further.

use std::collections::HashMap;

use construct_bus::{Bus, journal::Error};
use construct_domain::StepId;
use construct_proto::mesh::v1::{JournalCompleted, JournalEntry, JournalOpened, JournalStarted, journal_entry::Entry};
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
    /// Sequence of the newest entry. Locked while one is written, so that entries have one order.
    last: Mutex<u64>,
}

impl Journal {
    /// Takes the execution over: reads what was done and fences off whoever was at it before. `fresh` gives randomness
    /// and clock of an execution that is only now begun.
    pub(crate) async fn open(bus: &Bus, step: StepId, fresh: JournalOpened) -> Result<Self, Error> {
        let entries = bus.journal().load(step).await?;
        let last = entries.last().map_or(0, |(sequence, _)| *sequence);
        let mut past = HashMap::new();
        let mut first = None;
        let mut order = 0;
        for (_, entry) in entries {
            let call = (entry.script, entry.call);
            match entry.entry {
                Some(Entry::Opened(opened)) => first = first.or(Some(opened)),
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
        let opened = JournalOpened { delivery: fresh.delivery, ..first };
        let journal = Self { bus: bus.clone(), step, past, opened: opened.clone(), last: Mutex::new(last) };
        journal.append((0, 0), Entry::Opened(opened)).await?;
        Ok(journal)
    }

    /// What is known of a call from before.
    pub(crate) fn past(&self, call: CallId) -> Option<&Past> {
        self.past.get(&call)
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
        let mut last = self.last.lock().await;
        *last = self.bus.journal().append(self.step, &entry, *last).await?;
        Ok(())
    }
}
