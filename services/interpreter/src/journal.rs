//! The journal of one execution: every host call of its scripts, written to JetStream before a side
//! effect begins and when a call ends, so that whoever takes the execution over knows what was
//! done.
//!
//! The journal is also the fence: each entry names the one before it, so that of two processes that
//! believe they run the same execution, one is refused at its next entry and stops before it does
//! anything further.

mod deaths;
mod script;
mod writer;

use std::collections::{HashMap, HashSet, VecDeque};

use construct_bus::{
    Bus, history,
    journal::{Error, Loaded},
};
use construct_domain::StepId;
use construct_proto::{
    mesh::v1::{
        JournalCompleted, JournalEntry, JournalOpened, JournalReleased, JournalStarted,
        journal_entry::Entry,
    },
    v1::{CodeInterpreterCall, CodeInterpreterResult},
};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::{
    host::TIMER,
    sandbox::IMPORT,
    tools::{self, Permission},
};

pub(crate) use deaths::Deaths;
pub(crate) use writer::NotWritten;
use writer::Writer;

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
    step: StepId,
    writer: Writer,
    past: HashMap<CallId, Past>,
    /// Scripts that had ended.
    scripts: HashMap<u32, JournalCompleted>,
    /// Randomness and clock of the guest, from when the execution first began.
    pub(crate) opened: JournalOpened,
    /// Processes that had taken the execution over and neither ended it nor handed it back.
    pub(crate) deaths: Deaths,
    /// Whether its calls have used a task's files on another storage than this process has them on:
    /// then nobody goes on here.
    pub(crate) files_elsewhere: bool,
    /// Why an earlier process was told to stop, if one was: then nobody goes on.
    pub(crate) stopped: Option<String>,
    /// Why an entry cannot be read, for good. Its call is not known, so that the scripts cannot be
    /// gone on with.
    pub(crate) unreadable: Option<history::Error>,
}

/// Ends of calls in the order of the journal, as far as their scripts have not seen them: the
/// number, and what the guest's clock shows from there on, in microseconds.
type Ends = HashMap<u32, VecDeque<(u32, i64)>>;

/// The end of a call of a script.
#[derive(Debug, Clone, Copy)]
struct End {
    script: u32,
    number: u32,
    clock_micros: i64,
}

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
    /// Randomness and clock of an execution that is only now begun; the command's delivery and
    /// round.
    pub(crate) fresh: JournalOpened,
    /// Whether the command may have been carried out before, at least in part.
    pub(crate) again: bool,
    /// Ends the execution: until it is cancelled, entries that cannot be written now are tried
    /// again; one that cannot be written at all cancels it.
    pub(crate) stop: CancellationToken,
}

impl Journal {
    /// Takes the execution over: reads what was done and fences off whoever was at it before.
    pub(crate) async fn open(bus: &Bus, step: StepId, taker: Taker) -> Result<Taken, Error> {
        let Taker { fresh, again, stop } = taker;
        // Nearly always it is new.
        if !again && fresh.round == 0 {
            match bus.journal().append(step, &opening(step, &fresh), 0).await {
                Ok(last) => {
                    let writer = Writer::start(bus.clone(), step, last, Ends::new(), stop);
                    return Ok(Taken::Over(Box::new(Self {
                        step,
                        writer,
                        past: HashMap::new(),
                        scripts: HashMap::new(),
                        opened: fresh,
                        deaths: Deaths::default(),
                        files_elsewhere: false,
                        stopped: None,
                        unreadable: None,
                    })));
                }
                Err(Error::Conflict) => {}
                Err(error) => return Err(error),
            }
        }
        let Loaded { entries, last, unreadable } = bus.journal().load(step).await?;
        let (mut past, mut scripts, mut ends) = (HashMap::new(), HashMap::new(), Ends::new());
        let mut known = HashSet::new();
        let mut first = None;
        let mut deaths = Deaths::default();
        let mut stopped = None;
        let (mut storage, mut files_elsewhere) = (String::new(), false);
        let mut order = 0;
        for entry in entries {
            let call = (entry.script, entry.call);
            if let Some(
                Entry::Started(JournalStarted { name, .. })
                | Entry::Completed(JournalCompleted { name, .. }),
            ) = &entry.entry
                && entry.call != script::SCRIPT
            {
                files_elsewhere |=
                    storage != fresh.storage && !storage.is_empty() && uses_files(name);
            }
            match entry.entry {
                Some(Entry::Closed(_)) => return Ok(Taken::Closed),
                Some(Entry::Released(released)) => {
                    deaths.released();
                    stopped =
                        stopped.or(Some(released.stopped).filter(|reason| !reason.is_empty()));
                }
                Some(Entry::Opened(opened)) if opened.round > fresh.round => {
                    return Ok(Taken::Superseded);
                }
                Some(Entry::Opened(opened)) => {
                    deaths.opened();
                    storage.clone_from(&opened.storage);
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
                    ends.entry(entry.script)
                        .or_default()
                        .push_back((entry.call, completed.clock_micros));
                    past.insert(call, Past::Completed { completed, order });
                    order += 1;
                }
                None => {}
            }
        }
        // Who has waited for a person has written that it did. Whoever only may have begun has
        // written so too, unless that is older than the stream.
        if first.is_none()
            && (fresh.round > 0 || (again && bus.journal().kept_since().await? > begun(step)))
        {
            return Ok(Taken::Gone);
        }
        let first = first.unwrap_or_else(|| fresh.clone());
        let JournalOpened { delivery, round, storage, .. } = fresh;
        let opened = JournalOpened { delivery, round, storage, ..first };
        let last = bus.journal().append(step, &opening(step, &opened), last).await?;
        let writer = Writer::start(bus.clone(), step, last, ends, stop);
        Ok(Taken::Over(Box::new(Self {
            step,
            writer,
            past,
            scripts,
            opened,
            deaths,
            files_elsewhere,
            stopped,
            unreadable,
        })))
    }

    /// Why an entry could not be written, if one could not; none is after it.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.writer.failure()
    }

    /// Waits until everything is written.
    pub(crate) async fn flush(&self) -> Result<(), NotWritten> {
        self.writer.flush().await
    }

    /// Writes that this process hands the execution back in good order.
    pub(crate) async fn release(&self) -> Result<(), NotWritten> {
        self.writer.write(self.entry((0, 0), Entry::Released(JournalReleased::default()))).await
    }

    /// Writes that this process has stopped the execution because it was told to. Before that
    /// nobody may say how far it came: whoever gets its command later would run it.
    pub(crate) async fn stop(&self, reason: &str) -> Result<(), NotWritten> {
        let stopped = if reason.is_empty() { "it was told to stop" } else { reason }.to_owned();
        self.writer.write(self.entry((0, 0), Entry::Released(JournalReleased { stopped }))).await
    }

    /// Has it written that a script has ended, as the model is to be told, when the guest's clock
    /// showed `clock_micros`.
    pub(crate) async fn script_ended(
        &self,
        script: u32,
        code: &str,
        result: &CodeInterpreterResult,
        clock_micros: i64,
    ) -> Result<(), NotWritten> {
        let ended = script::encode(code, result, clock_micros);
        self.writer
            .hand_over(self.entry((script, script::SCRIPT), Entry::Completed(ended)), None)
            .await
    }

    /// What the model is to be told of a script that had ended before, and what the guest's clock
    /// showed then, in microseconds.
    pub(crate) fn ended_script(
        &self,
        script: u32,
        call: &CodeInterpreterCall,
    ) -> Option<(CodeInterpreterResult, i64)> {
        let ended = self.scripts.get(&script)?;
        Some((script::decode(&call.id, &call.code, ended)?, ended.clock_micros))
    }

    /// The calls of a script that are known from before, by number.
    pub(crate) fn calls(&self, script: u32) -> Vec<(u32, &Past)> {
        let mut calls: Vec<_> = self
            .past
            .iter()
            .filter(|((of, _), _)| *of == script)
            .map(|((_, number), past)| (*number, past))
            .collect();
        calls.sort_unstable_by_key(|(number, _)| *number);
        calls
    }

    /// How much it holds of what calls have given, in bytes, as it was taken over.
    pub(crate) fn result_bytes(&self) -> usize {
        let size = |past: &Past| match past {
            Past::Completed { completed, .. } => completed.result.len(),
            Past::Started(_) => 0,
        };
        self.past.values().map(size).sum()
    }

    /// What is known of a call from before.
    pub(crate) fn past(&self, call: CallId) -> Option<&Past> {
        self.past.get(&call)
    }

    /// Calls of a script that succeeded before, in the order in which they ended.
    pub(crate) fn succeeded(&self, script: u32) -> Vec<&JournalCompleted> {
        let succeeded = self.past.iter().filter(|((of, _), _)| *of == script).filter_map(
            |(_, past)| match past {
                Past::Completed { completed, order } if completed.succeeded => {
                    Some((*order, completed))
                }
                Past::Completed { .. } | Past::Started(_) => None,
            },
        );
        let mut succeeded: Vec<_> = succeeded.collect();
        succeeded.sort_unstable_by_key(|(order, _)| *order);
        succeeded.into_iter().map(|(_, completed)| completed).collect()
    }

    /// Which of a script's outstanding calls it sees end next, as far as an end is written down.
    pub(crate) fn next_end(&self, script: u32, outstanding: &dyn Fn(u32) -> bool) -> Option<u32> {
        self.writer
            .ends()
            .get(&script)?
            .iter()
            .map(|(number, _)| *number)
            .find(|number| outstanding(*number))
    }

    /// The script sees the end of a call: what its clock shows from here on.
    pub(crate) fn see_end(&self, script: u32, number: u32) -> Option<i64> {
        let mut ends = self.writer.ends();
        let ends = ends.get_mut(&script)?;
        let position = ends.iter().position(|(ended, _)| *ended == number)?;
        ends.remove(position).map(|(_, clock)| clock)
    }

    /// Writes that a call with a side effect is about to begin.
    pub(crate) async fn started(
        &self,
        call: CallId,
        started: JournalStarted,
    ) -> Result<(), NotWritten> {
        self.writer.write(self.entry(call, Entry::Started(started))).await
    }

    /// Has it written that a call has ended.
    pub(crate) async fn completed(
        &self,
        call: CallId,
        completed: JournalCompleted,
    ) -> Result<(), NotWritten> {
        let end = End { script: call.0, number: call.1, clock_micros: completed.clock_micros };
        self.writer.hand_over(self.entry(call, Entry::Completed(completed)), Some(end)).await
    }

    fn entry(&self, (script, call): CallId, entry: Entry) -> JournalEntry {
        JournalEntry { step_id: self.step.to_string(), script, call, entry: Some(entry) }
    }
}

/// That a process takes an execution over.
fn opening(step: StepId, opened: &JournalOpened) -> JournalEntry {
    JournalEntry {
        step_id: step.to_string(),
        entry: Some(Entry::Opened(opened.clone())),
        ..JournalEntry::default()
    }
}

/// Whether what a call gives, or does, depends on the files of its workspace. One that is not known
/// here, of a later version, may.
fn uses_files(name: &str) -> bool {
    match name {
        TIMER => false,
        IMPORT => true,
        tool => tools::definition(tool).is_none_or(|tool| match tool.permission {
            Permission::FilesRead
            | Permission::FilesWrite
            | Permission::FilesDelete
            | Permission::Commands => true,
            Permission::Pure
            | Permission::Network
            | Permission::Models
            | Permission::Environment
            | Permission::Tasks => false,
        }),
    }
}

/// When an execution was first wanted, as its id says.
fn begun(step: StepId) -> Timestamp {
    let time = step.uuid().get_timestamp().map(|time| time.to_unix());
    let time = time.and_then(|(seconds, nanos)| {
        Timestamp::new(i64::try_from(seconds).ok()?, i32::try_from(nanos).ok()?).ok()
    });
    time.unwrap_or(Timestamp::UNIX_EPOCH)
}
