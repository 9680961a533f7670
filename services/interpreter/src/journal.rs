//! The journal of one execution. Every host call of its scripts is written to JetStream before a
//! side effect begins and when the call ends, so that the next process knows what was done.
//!
//! The journal is also the fence. Each entry names the one before it. Of two processes that believe
//! they run the same execution, one is refused at its next entry and stops before it does anything
//! further.

mod crashes;
mod script;
mod writer;

use std::collections::{HashMap, HashSet, VecDeque};

use construct_bus::{
    Bus, history,
    journal::{Error, LoadedJournal},
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

pub(crate) use crashes::CrashCount;
pub(crate) use writer::NotWritten;
use writer::Writer;

/// A call: its script, counted from 0, and its number in the script, counted from 1.
pub(crate) type CallId = (u32, u32);

/// A call that an earlier process journaled.
#[derive(Debug, Clone)]
pub(crate) enum PastCall {
    /// Started; its outcome is unknown.
    Started(JournalStarted),
    /// Ended; `order` is its position among all ends.
    Completed { completed: JournalCompleted, order: usize },
}

impl PastCall {
    /// The name of the call and the fingerprint of its arguments.
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
    past: HashMap<CallId, PastCall>,
    /// Scripts that have ended.
    scripts: HashMap<u32, JournalCompleted>,
    /// Seed and clock of the guest from the first start of the execution.
    pub(crate) opened: JournalOpened,
    /// Processes that took the execution over and neither ended nor released it.
    pub(crate) crashes: CrashCount,
    /// Whether its calls used the task's files on another storage than the one of this process. The
    /// scripts cannot continue here then.
    pub(crate) files_elsewhere: bool,
    /// Why an earlier process stopped the execution, if one did. Nobody continues it then.
    pub(crate) stopped: Option<String>,
    /// The permanent error of an unreadable entry. Its call is unknown, so the scripts cannot
    /// continue.
    pub(crate) unreadable: Option<history::Error>,
}

/// Ends of calls that scripts have not seen, per script in journal order: the call's number, and
/// the guest's clock from there on, in microseconds.
type UnseenEnds = HashMap<u32, VecDeque<(u32, i64)>>;

/// The end of a script's call.
#[derive(Debug, Clone, Copy)]
struct ScriptCallEnd {
    script: u32,
    number: u32,
    clock_micros: i64,
}

/// The outcome of an attempt to take an execution over.
#[derive(Debug)]
pub(crate) enum Takeover {
    /// This process has the execution.
    Acquired(Box<Journal>),
    /// The reconciler has closed the journal: nothing waits for its result.
    Closed,
    /// A later command continues the execution: nothing waits for the result of this one.
    Superseded,
    /// The journal is lost; how far the scripts got is unknown.
    Lost,
}

/// How an execution is taken over.
#[derive(Debug)]
pub(crate) struct TakeoverRequest {
    /// The first entry of a new execution: its seed and clock, and the command's delivery and
    /// round.
    pub(crate) opening: JournalOpened,
    /// Whether the command may have been executed before, at least in part.
    pub(crate) may_have_run: bool,
    /// Ends the execution. Until it is canceled, failed writes of entries are retried; an entry
    /// that can never be written cancels it.
    pub(crate) stop: CancellationToken,
}

impl Journal {
    /// Takes the execution over: reads the journal and fences off any earlier process.
    pub(crate) async fn open(
        bus: &Bus,
        step: StepId,
        request: TakeoverRequest,
    ) -> Result<Takeover, Error> {
        let TakeoverRequest { opening, may_have_run, stop } = request;
        // Nearly all executions are new.
        if !may_have_run && opening.round == 0 {
            match bus.journal().append(step, &opened_entry(step, &opening), 0).await {
                Ok(last) => {
                    let writer = Writer::start(bus.clone(), step, last, UnseenEnds::new(), stop);
                    return Ok(Takeover::Acquired(Box::new(Self {
                        step,
                        writer,
                        past: HashMap::new(),
                        scripts: HashMap::new(),
                        opened: opening,
                        crashes: CrashCount::default(),
                        files_elsewhere: false,
                        stopped: None,
                        unreadable: None,
                    })));
                }
                Err(Error::Conflict) => {}
                Err(error) => return Err(error),
            }
        }
        let LoadedJournal { entries, last, unreadable } = bus.journal().load(step).await?;
        let (mut past, mut scripts, mut ends) = (HashMap::new(), HashMap::new(), UnseenEnds::new());
        let mut seen_calls = HashSet::new();
        let mut first = None;
        let mut crashes = CrashCount::default();
        let mut stopped = None;
        let (mut storage, mut files_elsewhere) = (String::new(), false);
        let mut order = 0;
        for entry in entries {
            let call = (entry.script, entry.call);
            if let Some(
                Entry::Started(JournalStarted { name, .. })
                | Entry::Completed(JournalCompleted { name, .. }),
            ) = &entry.entry
                && entry.call != script::SCRIPT_END
            {
                files_elsewhere |=
                    storage != opening.storage && !storage.is_empty() && uses_files(name);
            }
            match entry.entry {
                Some(Entry::Closed(_)) => return Ok(Takeover::Closed),
                Some(Entry::Released(released)) => {
                    crashes.released();
                    stopped =
                        stopped.or(Some(released.stop_reason).filter(|reason| !reason.is_empty()));
                }
                Some(Entry::Opened(opened)) if opened.round > opening.round => {
                    return Ok(Takeover::Superseded);
                }
                Some(Entry::Opened(opened)) => {
                    crashes.opened();
                    storage.clone_from(&opened.storage);
                    first = first.or(Some(opened));
                }
                Some(Entry::Started(started)) => {
                    if seen_calls.insert(call) {
                        crashes.note_progress();
                    }
                    past.insert(call, PastCall::Started(started));
                }
                Some(Entry::Completed(completed)) if entry.call == script::SCRIPT_END => {
                    crashes.note_progress();
                    scripts.insert(entry.script, completed);
                }
                Some(Entry::Completed(completed)) => {
                    if seen_calls.insert(call) {
                        crashes.note_progress();
                    }
                    ends.entry(entry.script)
                        .or_default()
                        .push_back((entry.call, completed.clock_micros));
                    past.insert(call, PastCall::Completed { completed, order });
                    order += 1;
                }
                None => {}
            }
        }
        // A round above 0 has certainly written entries. A redelivered command wrote one if it
        // started, unless the stream has dropped it by age.
        if first.is_none()
            && (opening.round > 0
                || (may_have_run && bus.journal().retained_since().await? > created_at(step)))
        {
            return Ok(Takeover::Lost);
        }
        let first = first.unwrap_or_else(|| opening.clone());
        let JournalOpened { delivery, round, storage, .. } = opening;
        let opened = JournalOpened { delivery, round, storage, ..first };
        let last = bus.journal().append(step, &opened_entry(step, &opened), last).await?;
        let writer = Writer::start(bus.clone(), step, last, ends, stop);
        Ok(Takeover::Acquired(Box::new(Self {
            step,
            writer,
            past,
            scripts,
            opened,
            crashes,
            files_elsewhere,
            stopped,
            unreadable,
        })))
    }

    /// Why an entry could not be written, if one could not. No entry follows it.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.writer.failure()
    }

    /// Waits until everything is written.
    pub(crate) async fn flush(&self) -> Result<(), NotWritten> {
        self.writer.flush().await
    }

    /// Writes that this process hands the execution back in an orderly way.
    pub(crate) async fn release(&self) -> Result<(), NotWritten> {
        self.writer.write(self.entry((0, 0), Entry::Released(JournalReleased::default()))).await
    }

    /// Writes that this process stopped the execution on request. Only then may it report how far
    /// the scripts got: otherwise the next process that gets the command would run it.
    pub(crate) async fn stop(&self, reason: &str) -> Result<(), NotWritten> {
        let stop_reason =
            if reason.is_empty() { "the step was canceled" } else { reason }.to_owned();
        self.writer
            .write(self.entry((0, 0), Entry::Released(JournalReleased { stop_reason })))
            .await
    }

    /// Records that a script has ended: its report for the model, and the guest's clock in
    /// microseconds.
    pub(crate) async fn record_script_end(
        &self,
        script: u32,
        code: &str,
        result: &CodeInterpreterResult,
        clock_micros: i64,
    ) -> Result<(), NotWritten> {
        let ended = script::encode(code, result, clock_micros);
        self.writer
            .enqueue(self.entry((script, script::SCRIPT_END), Entry::Completed(ended)), None)
            .await
    }

    /// The report of a script that ended before, and the guest's clock at that time, in
    /// microseconds.
    pub(crate) fn ended_script(
        &self,
        script: u32,
        call: &CodeInterpreterCall,
    ) -> Option<(CodeInterpreterResult, i64)> {
        let ended = self.scripts.get(&script)?;
        Some((script::decode(&call.id, &call.code, ended)?, ended.clock_micros))
    }

    /// The journaled calls of a script, by number.
    pub(crate) fn calls(&self, script: u32) -> Vec<(u32, &PastCall)> {
        let mut calls: Vec<_> = self
            .past
            .iter()
            .filter(|((in_script, _), _)| *in_script == script)
            .map(|((_, number), past)| (*number, past))
            .collect();
        calls.sort_unstable_by_key(|(number, _)| *number);
        calls
    }

    /// Size of the journaled results at takeover, in bytes.
    pub(crate) fn result_bytes(&self) -> usize {
        let size = |past: &PastCall| match past {
            PastCall::Completed { completed, .. } => completed.result.len(),
            PastCall::Started(_) => 0,
        };
        self.past.values().map(size).sum()
    }

    /// The journaled record of a call.
    pub(crate) fn past_call(&self, call: CallId) -> Option<&PastCall> {
        self.past.get(&call)
    }

    /// Calls of a script that succeeded before, in the order of their ends.
    pub(crate) fn succeeded(&self, script: u32) -> Vec<&JournalCompleted> {
        let succeeded =
            self.past.iter().filter(|((in_script, _), _)| *in_script == script).filter_map(
                |(_, past)| match past {
                    PastCall::Completed { completed, order } if completed.succeeded => {
                        Some((*order, completed))
                    }
                    PastCall::Completed { .. } | PastCall::Started(_) => None,
                },
            );
        let mut succeeded: Vec<_> = succeeded.collect();
        succeeded.sort_unstable_by_key(|(order, _)| *order);
        succeeded.into_iter().map(|(_, completed)| completed).collect()
    }

    /// The outstanding call of a script that ends next by the journal, if an end is journaled.
    pub(crate) fn next_end(&self, script: u32, outstanding: &dyn Fn(u32) -> bool) -> Option<u32> {
        self.writer
            .ends()
            .get(&script)?
            .iter()
            .map(|(number, _)| *number)
            .find(|number| outstanding(*number))
    }

    /// Marks the end of a call as seen by the script, and returns the guest's clock from there on.
    pub(crate) fn see_end(&self, script: u32, number: u32) -> Option<i64> {
        let mut ends = self.writer.ends();
        let ends = ends.get_mut(&script)?;
        let position = ends.iter().position(|(ended, _)| *ended == number)?;
        ends.remove(position).map(|(_, clock)| clock)
    }

    /// Writes that a call with a side effect is about to start.
    pub(crate) async fn record_start(
        &self,
        call: CallId,
        started: JournalStarted,
    ) -> Result<(), NotWritten> {
        self.writer.write(self.entry(call, Entry::Started(started))).await
    }

    /// Records that a call has ended.
    pub(crate) async fn record_completion(
        &self,
        call: CallId,
        completed: JournalCompleted,
    ) -> Result<(), NotWritten> {
        let end =
            ScriptCallEnd { script: call.0, number: call.1, clock_micros: completed.clock_micros };
        self.writer.enqueue(self.entry(call, Entry::Completed(completed)), Some(end)).await
    }

    fn entry(&self, (script, call): CallId, entry: Entry) -> JournalEntry {
        JournalEntry { step_id: self.step.to_string(), script, call, entry: Some(entry) }
    }
}

/// The entry of a process that takes an execution over.
fn opened_entry(step: StepId, opened: &JournalOpened) -> JournalEntry {
    JournalEntry {
        step_id: step.to_string(),
        entry: Some(Entry::Opened(opened.clone())),
        ..JournalEntry::default()
    }
}

/// Whether a call depends on the files of its workspace. Calls of later versions, unknown here,
/// may.
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

/// The time an execution was created, from its id.
fn created_at(step: StepId) -> Timestamp {
    let time = step.uuid().get_timestamp().map(|time| time.to_unix());
    let time = time.and_then(|(seconds, nanos)| {
        Timestamp::new(i64::try_from(seconds).ok()?, i32::try_from(nanos).ok()?).ok()
    });
    time.unwrap_or(Timestamp::UNIX_EPOCH)
}
