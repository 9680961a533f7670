//! The journal of one execution: every host call of its scripts, written to JetStream before a side effect begins and
//! when a call ends, so that whoever takes the execution over knows what was done.
//!
//! The journal is also the fence: each entry names the one before it, so that of two processes that believe they run the
//! same execution, one is refused at its next entry and stops before it does anything further.

mod deaths;
mod script;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, MutexGuard, PoisonError},
};

use construct_bus::{
    Bus, history,
    journal::{Error, Loaded},
};
use construct_domain::StepId;
use construct_proto::{
    mesh::v1::{JournalCompleted, JournalEntry, JournalOpened, JournalReleased, JournalStarted, journal_entry::Entry},
    v1::{CodeInterpreterCall, CodeInterpreterResult},
};
use jiff::Timestamp;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

pub(crate) use deaths::Deaths;

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

impl Past {
    /// The name of the call, and the fingerprint of its arguments.
    pub(crate) fn call(&self) -> (&str, &[u8]) {
        match self {
            Self::Started(started) => (&started.name, &started.arguments_hash),
            Self::Completed { completed, .. } => (&completed.name, &completed.arguments_hash),
        }
    }
}

/// The journal of an execution this process has taken over.
#[derive(Debug)]
pub(crate) struct Journal {
    bus: Bus,
    step: StepId,
    past: HashMap<CallId, Past>,
    /// Scripts that had ended.
    scripts: HashMap<u32, JournalCompleted>,
    /// Randomness and clock of the guest, from when the execution first began.
    pub(crate) opened: JournalOpened,
    /// Processes that had taken the execution over and neither ended it nor handed it back.
    pub(crate) deaths: Deaths,
    /// Why an entry cannot be read, for good. Its call is not known, so that the scripts cannot be gone on with.
    pub(crate) unreadable: Option<history::Error>,
    /// Sequence of the newest entry. Locked while one is written, so that entries have one order.
    last: Arc<Mutex<u64>>,
    /// Until it is cancelled, entries that cannot be written now are tried again.
    give_up: CancellationToken,
    ends: Arc<std::sync::Mutex<Ends>>,
}

/// Ends of calls in the order of the journal, as far as their scripts have not seen them: the number, and what the guest's
/// clock shows from there on, in microseconds.
type Ends = HashMap<u32, VecDeque<(u32, i64)>>;

/// What became of the attempt to take an execution over.
#[derive(Debug)]
pub(crate) enum Taken {
    /// It is ours.
    Over(Box<Journal>),
    /// The reconciler has closed it: nobody waits for it.
    Closed,
    /// It was gone on with under a later command: nobody waits for this one.
    Superseded,
    /// What was written of it is lost, so that nobody knows how far it came.
    Gone,
}

/// As whom an execution is taken over.
#[derive(Debug)]
pub(crate) struct Taker {
    /// Randomness and clock of an execution that is only now begun; the command's delivery and round.
    pub(crate) fresh: JournalOpened,
    /// Whether the command may have been carried out before, at least in part.
    pub(crate) again: bool,
    /// Until it is cancelled, entries that cannot be written now are tried again.
    pub(crate) give_up: CancellationToken,
}

impl Journal {
    /// Takes the execution over: reads what was done and fences off whoever was at it before.
    pub(crate) async fn open(bus: &Bus, step: StepId, taker: Taker) -> Result<Taken, Error> {
        let Taker { fresh, again, give_up } = taker;
        let Loaded { entries, last, unreadable } = bus.journal().load(step).await?;
        let (mut past, mut scripts, mut ends) = (HashMap::new(), HashMap::new(), Ends::new());
        let mut known = HashSet::new();
        let mut first = None;
        let mut deaths = Deaths::default();
        let mut order = 0;
        for entry in entries {
            let call = (entry.script, entry.call);
            match entry.entry {
                Some(Entry::Closed(_)) => return Ok(Taken::Closed),
                Some(Entry::Released(_)) => deaths.released(),
                Some(Entry::Opened(opened)) if opened.round > fresh.round => return Ok(Taken::Superseded),
                Some(Entry::Opened(opened)) => {
                    deaths.opened();
                    first = first.or(Some(opened));
                }
                Some(Entry::Started(started)) => {
                    if known.insert(call) {
                        deaths.got_further();
                    }
                    past.insert(call, Past::Started(started));
                }
                Some(Entry::Completed(completed)) if entry.call == script::SCRIPT => {
                    deaths.got_further();
                    scripts.insert(entry.script, completed);
                }
                Some(Entry::Completed(completed)) => {
                    if known.insert(call) {
                        deaths.got_further();
                    }
                    ends.entry(entry.script).or_default().push_back((entry.call, completed.clock_micros));
                    past.insert(call, Past::Completed { completed, order });
                    order += 1;
                }
                None => {}
            }
        }
        // Who has waited for a person has written that it did. Whoever only may have begun has written so too, unless that is
        // older than the stream.
        if first.is_none() && (fresh.round > 0 || (again && bus.journal().kept_since().await? > begun(step))) {
            return Ok(Taken::Gone);
        }
        let first = first.unwrap_or_else(|| fresh.clone());
        let opened = JournalOpened { delivery: fresh.delivery, round: fresh.round, ..first };
        let (last, ends) = (Arc::new(Mutex::new(last)), Arc::new(std::sync::Mutex::new(ends)));
        let journal = Self {
            bus: bus.clone(),
            step,
            past,
            scripts,
            opened: opened.clone(),
            deaths,
            unreadable,
            last,
            give_up,
            ends,
        };
        journal.append((0, 0), Entry::Opened(opened)).await?;
        Ok(Taken::Over(Box::new(journal)))
    }

    /// Writes that this process hands the execution back in good order.
    pub(crate) async fn release(&self) -> Result<(), Error> {
        self.append((0, 0), Entry::Released(JournalReleased {})).await
    }

    /// Writes that a script has ended, as the model is to be told, when the guest's clock showed `clock_micros`.
    pub(crate) async fn script_ended(
        &self,
        script: u32,
        code: &str,
        result: &CodeInterpreterResult,
        clock_micros: i64,
    ) -> Result<(), Error> {
        let ended = script::encode(code, result, clock_micros);
        self.append((script, script::SCRIPT), Entry::Completed(ended)).await
    }

    /// What the model is to be told of a script that had ended before, and what the guest's clock showed then, in microseconds.
    pub(crate) fn ended_script(&self, script: u32, call: &CodeInterpreterCall) -> Option<(CodeInterpreterResult, i64)> {
        let ended = self.scripts.get(&script)?;
        Some((script::decode(&call.id, &call.code, ended)?, ended.clock_micros))
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

    /// Which of a script's outstanding calls it sees end next, as far as an end is written down.
    pub(crate) fn next_end(&self, script: u32, outstanding: &dyn Fn(u32) -> bool) -> Option<u32> {
        lock(&self.ends).get(&script)?.iter().map(|(number, _)| *number).find(|number| outstanding(*number))
    }

    /// The script sees the end of a call: what its clock shows from here on.
    pub(crate) fn see_end(&self, script: u32, number: u32) -> Option<i64> {
        let mut ends = lock(&self.ends);
        let ends = ends.get_mut(&script)?;
        let position = ends.iter().position(|(ended, _)| *ended == number)?;
        ends.remove(position).map(|(_, clock)| clock)
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
        let end = match &entry {
            Entry::Completed(completed) if call != script::SCRIPT => Some((call, completed.clock_micros)),
            _ => None,
        };
        let entry = JournalEntry { step_id: self.step.to_string(), script, call, entry: Some(entry) };
        // In a task of its own: when the script that waits for it is dropped, the entry may be written all the same, and
        // then `last` must say so, or this process would fence itself.
        let (bus, step) = (self.bus.clone(), self.step);
        let (last, ends, give_up) = (Arc::clone(&self.last), Arc::clone(&self.ends), self.give_up.clone());
        let append = tokio::spawn(async move {
            let mut last = last.lock_owned().await;
            *last = bus.journal().append_while(step, &entry, *last, &give_up).await?;
            // Before another entry can be written: two calls that end at the same time wake their script in any order, and
            // it must see them in that of the journal, or it would see them otherwise when it is run again.
            if let Some(end) = end {
                lock(&ends).entry(script).or_default().push_back(end);
            }
            Ok(())
        });
        append.await.unwrap_or(Err(Error::Conflict))
    }
}

/// When an execution was first wanted, as its id says.
fn begun(step: StepId) -> Timestamp {
    let time = step.uuid().get_timestamp().map(|time| time.to_unix());
    let time =
        time.and_then(|(seconds, nanos)| Timestamp::new(i64::try_from(seconds).ok()?, i32::try_from(nanos).ok()?).ok());
    time.unwrap_or(Timestamp::UNIX_EPOCH)
}

fn lock(ends: &std::sync::Mutex<Ends>) -> MutexGuard<'_, Ends> {
    ends.lock().unwrap_or_else(PoisonError::into_inner)
}
