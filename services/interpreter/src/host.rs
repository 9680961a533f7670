//! What one script can reach: the tools of its task, each call journaled, counted and told to
//! whoever watches.

mod called;
mod errors;
mod kept;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use construct_bus::Progress;
use construct_domain::{
    approval::{APPROVAL_TIMEOUT, MAX_PENDING_APPROVALS},
    decide::CODE_TIMEOUT,
    policy::Action,
};
use construct_proto::{
    mesh::v1::{
        ApprovalDecision, AskedCall, AwaitedCall, JournalCompleted, JournalStarted, StepRef,
    },
    v1::{self, event::Payload},
};
use construct_runtime::clock;
use futures::future::BoxFuture;
use jiff::Timestamp;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, field::Empty};

use crate::{
    journal::{CallId, Journal, PastCall},
    metrics, modules,
    policy::{Judged, Policies},
    sandbox::{Host, HostCall, IMPORT, ToolError, ToolTable},
    tools::{self, AwaitOutcome, CallContext, Effect, Environment, Redirects, Toolbox},
};

pub(crate) use kept::Kept;

/// How timers appear in the journal.
pub(crate) const TIMER: &str = "setTimeout";
/// How much of arguments and results is shown to those who watch, in bytes.
const SHOWN: usize = 4096;
/// Of how many calls (and timers) of a script that much is kept, beside what the model is told of
/// it. How much of one script is kept in all is in `report`.
const KEPT_CALLS: u32 = 64;
/// Of how many calls of a script the model is told what their results lack.
const NOTED: usize = 10;
/// How soon it is asked again how subtasks are that a script waits for while it does something
/// else.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Why a script cannot go on, through no fault of its own.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    /// The journal cannot be written, or somebody else has taken the execution over.
    #[error("the journal cannot be written")]
    Journal,
    /// Run again, the script does something else than it did before.
    #[error(
        "call {number} was {before} when the script ran first, and is {now} when it is run again"
    )]
    Diverged {
        /// Of the call.
        number: u32,
        /// Then.
        before: String,
        /// Now.
        now: String,
    },
}

/// What the scripts of one execution share.
#[derive(Debug)]
pub(crate) struct Shared<'a> {
    pub(crate) toolbox: &'a Toolbox,
    pub(crate) table: &'a ToolTable,
    pub(crate) journal: &'a Journal,
    /// How much it may hold.
    pub(crate) kept: Kept,
    /// One event after the other.
    pub(crate) progress: tokio::sync::Mutex<Progress>,
    pub(crate) step: &'a StepRef,
    pub(crate) policies: Arc<Policies>,
    /// What people have said about calls.
    pub(crate) decisions: HashMap<CallId, &'a ApprovalDecision>,
    /// Set when a script can go on only when people have decided, or subtasks have ended.
    pub(crate) parked: AtomicBool,
    /// Set when a script has handed the conversation over: nothing more is called then, because a
    /// step that is gone on with comes with the policy, the secrets and the models of the other
    /// agent, which has not written this code.
    pub(crate) handed_off: AtomicBool,
    /// Which run of the scripts this is: later rounds, and in one round later deliveries, have
    /// greater numbers.
    pub(crate) run: u32,
    /// Numbers what is told to those who watch.
    pub(crate) index: AtomicU64,
    /// The guest's clock in microseconds; goes on from script to script.
    pub(crate) clock: AtomicI64,
    /// The execution's end; a script that breaks ends it.
    pub(crate) cancel: CancellationToken,
    /// Why it broke.
    pub(crate) broken: OnceLock<Broken>,
}

/// One script's host.
#[derive(Debug)]
pub(crate) struct ScriptHost<'a> {
    shared: &'a Shared<'a>,
    script: u32,
    /// Id of the script's call, as the model named it.
    id: &'a str,
    state: Mutex<State>,
    /// Held by the call that asks again how its subtasks are.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// The calls and timers that the script has made, by number.
    made: HashSet<u32>,
    /// What is reported about the calls.
    uses: Vec<CallRecord>,
    /// Calls that wait for a person, by number.
    asks: BTreeMap<u32, AskedCall>,
    /// Calls that wait for subtasks.
    awaits: BTreeMap<u32, AwaitedCall>,
    /// What the model is told beside what the script says.
    notes: Vec<String>,
    /// What the results of calls lack, by number: of the first [`NOTED`].
    lacks: BTreeMap<u32, String>,
    /// Of how many calls more the results lack something.
    more_lacks: u32,
}

/// What is known about a call when the script is over.
#[derive(Debug, Clone)]
pub(crate) struct CallRecord {
    pub(crate) number: u32,
    pub(crate) name: String,
    /// `None` while it is under way, or when it was stopped.
    pub(crate) end: Option<CallEnd>,
    /// What it waits for, so that nothing of it has begun.
    pub(crate) waits: Option<WaitsFor>,
    /// What it was given, as those who watch are shown it; empty where that is not kept, or not
    /// known any more.
    pub(crate) arguments: String,
    /// What came back, likewise.
    pub(crate) result: String,
}

impl CallRecord {
    /// One that is under way.
    pub(crate) fn begun(number: u32, name: &str) -> Self {
        let (arguments, result) = (String::new(), String::new());
        Self { number, name: name.to_owned(), end: None, waits: None, arguments, result }
    }

    /// Notes how it ended, and what came back as it is shown.
    fn ended(&mut self, end: CallEnd, shown: &str) {
        self.end = Some(end);
        if self.number <= KEPT_CALLS {
            shown.clone_into(&mut self.result);
        }
    }
}

/// What a call can wait for while its script is put away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitsFor {
    /// A person's approval.
    Approval,
    /// Subtasks.
    Subtasks,
}

/// How a call ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallEnd {
    pub(crate) succeeded: bool,
    /// Whether all that is known is that it was begun: the process died that made it.
    pub(crate) is_unknown: bool,
    pub(crate) duration_micros: i64,
}

impl<'a> ScriptHost<'a> {
    pub(crate) fn new(shared: &'a Shared<'a>, script: u32, id: &'a str) -> Self {
        // Also by a call of which nobody knows whether it was carried out, and before the script
        // comes to it again.
        let handed_off = shared.journal.calls(script).into_iter().any(|(_, past)| match past {
            PastCall::Started(started) => started.name == tools::HAND_OFF,
            PastCall::Completed { completed, .. } => {
                completed.succeeded && completed.name == tools::HAND_OFF
            }
        });
        if handed_off {
            shared.handed_off.store(true, Relaxed);
        }
        Self { shared, script, id, state: Mutex::default(), asking: tokio::sync::Mutex::default() }
    }

    /// The script has ended by itself, having made `made` calls and timers. Whether it has left out
    /// what it did before, which the calls it made do not show.
    pub(crate) fn ended_early(&self, made: u32) -> Option<Broken> {
        let state = self.state();
        let past = self.shared.journal.calls(self.script);
        let mut left_out = past.into_iter().filter(|(number, _)| !state.made.contains(number));
        let (number, first) = left_out.next()?;
        // A call that was made in the script's last moment, and that nobody waits for, may not have
        // come to the host.
        let unheard = (made as usize).saturating_sub(state.made.len());
        let before = first.call().0.to_owned();
        (1 + left_out.count() > unheard).then(|| Broken::Diverged {
            number,
            before,
            now: "not made".to_owned(),
        })
    }

    /// The calls so far, by number: those the script has made, and those it made before and has not
    /// come to again.
    pub(crate) fn calls(&self) -> Vec<CallRecord> {
        let mut calls = self.state().uses.clone();
        let again = |calls: &[CallRecord], number| calls.iter().any(|call| call.number == number);
        for call in past_calls(self.shared.journal, self.script) {
            if !again(&calls, call.number) {
                calls.push(call);
            }
        }
        calls.sort_by_key(|call| call.number);
        calls
    }

    /// What people are to be asked; of very many calls those that the script made first.
    pub(crate) fn asked(&self) -> Vec<AskedCall> {
        self.state().asks.values().take(MAX_PENDING_APPROVALS).cloned().collect()
    }

    /// What the script waits for of subtasks; of very many waits the first: about the others it
    /// asks again when it is gone on with.
    pub(crate) fn awaited(&self) -> Vec<AwaitedCall> {
        self.state().awaits.values().take(MAX_PENDING_APPROVALS).cloned().collect()
    }

    /// What the model is told beside what the script says.
    pub(crate) fn notes(&self) -> Vec<String> {
        let state = self.state();
        let mut notes = state.notes.clone();
        notes.extend(state.lacks.values().cloned());
        if state.more_lacks > 0 {
            notes.push(format!(
                "the results of {} more calls lack something, as their notes say",
                state.more_lacks
            ));
        }
        notes
    }

    /// When a wait is over at the latest: early enough for the script to be gone on with, and to
    /// end, before it is given up.
    fn longest_wait(&self) -> Timestamp {
        let opened = Timestamp::from_microsecond(self.shared.journal.opened.clock_micros)
            .unwrap_or_default();
        opened
            .saturating_add(APPROVAL_TIMEOUT.saturating_sub(CODE_TIMEOUT))
            .unwrap_or(Timestamp::MAX)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the execution. The future never does: its script is about to be dropped.
    async fn broken<T>(&self, why: Broken) -> T {
        let _ = self.shared.broken.set(why);
        self.shared.cancel.cancel();
        std::future::pending().await
    }

    /// `environment` is what commands find that are called at this place of the script, `made` what
    /// the guest's clock showed there.
    async fn answer(
        &self,
        call: HostCall,
        environment: Arc<Environment>,
        made: Timestamp,
    ) -> Result<Value, ToolError> {
        let (id, number) = ((self.script, call.number), call.number);
        let hash = fingerprint(&call.name, &call.args);
        let tool = tools::definition(&call.name);
        let repeatable = tool.is_none_or(tools::Definition::is_repeatable);
        let past = self.shared.journal.past_call(id);
        if let Some(diverged) = past.and_then(|past| diverged(number, past, &call.name, &hash)) {
            return self.broken(diverged).await;
        }
        let arguments = clipped(&called::arguments(&call, self.shared.toolbox));
        let mut begun = CallRecord::begun(number, &call.name);
        if number <= KEPT_CALLS {
            begun.arguments.clone_from(&arguments);
        }
        self.state().uses.push(begun);
        match past {
            Some(PastCall::Completed { completed, .. }) => {
                self.ended(number, call_end(completed), &clipped(&completed.result));
                let result = decode(completed);
                if let Ok(result) = &result {
                    self.shared.toolbox.replay(&call.name, result);
                    self.note(&call);
                    self.note_lacks(&call, result);
                }
                return result;
            }
            Some(PastCall::Started(_)) if !repeatable => {
                let unknown = errors::outcome_unknown(&call.name);
                return self.complete(&call, hash, Err(unknown), Duration::ZERO).await;
            }
            Some(PastCall::Started(_)) | None => {}
        }
        if self.shared.handed_off.load(Relaxed) {
            self.tell_called(&call, &arguments).await;
            return self
                .complete(&call, hash, Err(errors::handed_off(&call.name)), Duration::ZERO)
                .await;
        }
        if self.shared.kept.is_full() {
            self.tell_called(&call, &arguments).await;
            return self
                .complete(
                    &call,
                    hash,
                    Err(errors::not_made(&call.name, &self.shared.kept)),
                    Duration::ZERO,
                )
                .await;
        }
        if let Err(refused) = self.permit(&call, &environment).await {
            self.tell_called(&call, &arguments).await;
            return self.complete(&call, hash, Err(refused), Duration::ZERO).await;
        }
        if !repeatable {
            let started = JournalStarted { name: call.name.clone(), arguments_hash: hash.clone() };
            if self.shared.journal.record_start(id, started).await.is_err() {
                return self.broken(Broken::Journal).await;
            }
        } else if tool.is_some_and(|tool| tool.effect == Effect::External)
            && self.shared.journal.flush().await.is_err()
        {
            // It may follow from what the script has read. Were that not written, it could be read
            // otherwise when the script is run again, and something else be asked for.
            return self.broken(Broken::Journal).await;
        }
        // One that waits is told of when it has what it waits for, which may be many runs of the
        // script later.
        if call.name != tools::AWAIT {
            self.tell_called(&call, &arguments).await;
        }
        let began = Instant::now();
        let cancel = self.shared.cancel.child_token();
        let redirects: Option<Arc<dyn Redirects>> = Some(Arc::clone(&self.shared.policies) as _);
        let context =
            CallContext { cancel, environment: Some(environment), position: id, redirects };
        if call.name == IMPORT {
            let module = modules::read(self.shared.toolbox, &call.args).await;
            return self.complete(&call, hash, module, began.elapsed()).await;
        }
        let span = tracing::info_span!(
            "interpreter.tool.call",
            otel.name = format_args!("execute_tool {}", call.name),
            gen_ai.operation.name = "execute_tool",
            gen_ai.tool.name = call.name,
            gen_ai.tool.r#type = "function",
            gen_ai.tool.call.id = format_args!("{}/{}", self.shared.step.step_id, number),
            error.r#type = Empty,
        );
        let result = if call.name == tools::AWAIT {
            let waited = self.wait(&call, made..self.longest_wait(), &context).await;
            self.tell_called(&call, &arguments).await;
            waited
        } else {
            self.shared
                .toolbox
                .call(&call.name, call.args.clone(), &context)
                .instrument(span.clone())
                .await
        };
        if let Err(error) = &result {
            span.record("error.type", error.name);
        }
        drop(span);
        if self.shared.cancel.is_cancelled()
            && result.as_ref().is_err_and(|error| error.name == "Cancelled")
        {
            // The call was cut short, so nobody knows how far it came; written down as failed it
            // would be taken for done.
            return std::future::pending().await;
        }
        let result = result.map_err(|error| ToolError {
            name: error.name.to_owned(),
            message: error.message,
            code: None,
            details: error.details,
        });
        if result.is_ok() {
            self.note(&call);
        }
        self.complete(&call, hash, result, began.elapsed()).await
    }

    /// Notes what a call that was carried out has the model told.
    fn note(&self, call: &HostCall) {
        if call.name == tools::HAND_OFF {
            self.shared.handed_off.store(true, Relaxed);
            self.state().notes.push(tools::handed_off(&call.args));
        }
    }

    /// Notes what the result of a call lacks. The model must know, whatever the script does with
    /// it.
    fn note_lacks(&self, call: &HostCall, result: &Value) {
        let Some(tool) = tools::definition(&call.name) else { return };
        let notes: Vec<&str> = tool.notes(result).collect();
        if notes.is_empty() {
            return;
        }
        let mut state = self.state();
        state.lacks.insert(
            call.number,
            clipped(&format!("#{} {}: {}", call.number, call.name, notes.join(" "))),
        );
        // The same ones, in whatever order concurrent calls end.
        if state.lacks.len() > NOTED {
            state.lacks.pop_last();
            state.more_lacks += 1;
        }
    }

    /// Waits for subtasks. While that is all the script waits for, it is put away, and makes the
    /// call again when it is gone on with; as long as it does something else too, the subtasks are
    /// asked about again and again.
    async fn wait(
        &self,
        call: &HostCall,
        time: Range<Timestamp>,
        context: &CallContext,
    ) -> Result<Value, tools::ToolError> {
        let number = call.number;
        let mut turn = None;
        loop {
            let waited = self.shared.toolbox.wait(call.args.clone(), time.clone(), context).await;
            if self.shared.cancel.is_cancelled() {
                // Already put away, or stopped: what is known by now is asked again by whoever goes
                // on.
                return std::future::pending().await;
            }
            drop(turn.take());
            let (task_ids, until) = match waited {
                Ok(AwaitOutcome::Pending { tasks, until }) => (tasks, until),
                Ok(AwaitOutcome::Over(value)) => {
                    self.waits(number, None);
                    return Ok(value);
                }
                Err(error) => {
                    self.waits(number, None);
                    return Err(error);
                }
            };
            let until = Some(timestamp(until));
            self.waits(number, Some(AwaitedCall { script: self.script, number, task_ids, until }));
            tokio::time::sleep(LOOK_AGAIN).await;
            // One after the other, so that a script with many waits asks no more often than the
            // answers come.
            turn = Some(self.asking.lock().await);
        }
    }

    /// Notes what a call waits for; none: nothing any more, so that the script is not put away
    /// before it has seen what came of it.
    fn waits(&self, number: u32, awaited: Option<AwaitedCall>) {
        let mut state = self.state();
        if let Some(record) = state.uses.iter_mut().find(|record| record.number == number) {
            record.waits = awaited.is_some().then_some(WaitsFor::Subtasks);
        }
        match awaited {
            Some(awaited) => state.awaits.insert(number, awaited),
            None => state.awaits.remove(&number),
        };
    }

    /// Whether the policies let a call be made that was not made before. Does not return while a
    /// person must decide first.
    async fn permit(&self, call: &HostCall, environment: &Environment) -> Result<(), ToolError> {
        let decision = self.shared.decisions.get(&(self.script, call.number));
        let judging =
            self.shared.policies.judge(call, self.shared.toolbox, environment, decision.is_some());
        let Some(Judged { verdict, arguments, hash: arguments_hash }) = judging.await else {
            return Ok(());
        };
        let decision = decision.filter(|decision| decision.arguments_hash == arguments_hash);
        // Whatever the rules say by now, a person has said no.
        if let Some(rejected_by) = decision.filter(|decision| !decision.approved) {
            return Err(errors::rejected(&call.name, rejected_by));
        }
        match verdict.action {
            Action::Allow => return Ok(()),
            Action::Deny => return Err(errors::denied(&call.name, &verdict.reason)),
            Action::Ask if decision.is_some() => return Ok(()),
            Action::Ask => {}
        }
        let arguments = arguments.to_string();
        if arguments.len() > errors::ASKED {
            return Err(errors::too_large_to_ask(&call.name, arguments.len()));
        }
        let asked = AskedCall {
            script: self.script,
            number: call.number,
            tool: call.name.clone(),
            arguments_size: arguments.len() as u64,
            arguments,
            arguments_hash,
            reason: verdict.reason,
        };
        {
            let mut state = self.state();
            state.asks.insert(call.number, asked);
            if let Some(record) = state.uses.iter_mut().find(|record| record.number == call.number)
            {
                record.waits = Some(WaitsFor::Approval);
            }
        }
        std::future::pending().await
    }

    /// Tells that a call is made, or refused; `arguments` as they are shown.
    async fn tell_called(&self, call: &HostCall, arguments: &str) {
        let called = called::event(&self.shared.step.step_id, self.id, call, arguments);
        self.tell("tool.called", call.number, Payload::ToolCalled(called)).await;
    }

    /// Journals the end of a call, tells it, and hands it to the script.
    async fn complete(
        &self,
        call: &HostCall,
        arguments_hash: Vec<u8>,
        mut result: Result<Value, ToolError>,
        took: Duration,
    ) -> Result<Value, ToolError> {
        let tool = tools::definition(&call.name);
        let mut json = written(&result);
        // What a script has set for commands is set again from what is kept.
        let must = tool.is_some_and(|tool| tool.effect == Effect::Write);
        if !self.shared.kept.takes(&json, must) {
            result = Err(errors::left_out(&call.name, json.len(), &self.shared.kept));
            json = written(&result);
            self.shared.kept.takes(&json, true);
        }
        metrics::record_call(&call.name, took, result.as_ref().err().map(|error| &*error.name));
        let succeeded = result.is_ok();
        let shown = v1::ToolResult {
            step_id: self.shared.step.step_id.clone(),
            number: call.number,
            name: call.name.clone(),
            succeeded,
            result: clipped(&json),
            duration_micros: micros(took),
            script_id: self.id.to_owned(),
        };
        let completed = JournalCompleted {
            name: call.name.clone(),
            arguments_hash,
            succeeded,
            result: json,
            duration_micros: micros(took),
            clock_micros: clock::now().as_microsecond(),
        };
        let end = call_end(&completed);
        if let Ok(result) = &result {
            self.note_lacks(call, result);
        }
        if self
            .shared
            .journal
            .record_completion((self.script, call.number), completed)
            .await
            .is_err()
        {
            return self.broken(Broken::Journal).await;
        }
        self.ended(call.number, end, &shown.result);
        self.tell("tool.result", call.number, Payload::ToolResult(shown)).await;
        result
    }

    /// Notes how a call ended, and what came back as it is shown.
    fn ended(&self, number: u32, end: CallEnd, shown: &str) {
        if let Some(call) = self.state().uses.iter_mut().find(|call| call.number == number) {
            call.ended(end, shown);
        }
    }

    /// Tells those who watch. When the script is run again, a call that is made again is told of
    /// again, as an event of its own.
    async fn tell(&self, kind: &str, number: u32, payload: Payload) {
        // Numbered under the lock: whoever watches is told in the order of the numbers.
        let mut progress = self.shared.progress.lock().await;
        let index = (u64::from(self.shared.run) << 32) | self.shared.index.fetch_add(1, Relaxed);
        let event = v1::Event {
            id: format!(
                "{}:{}:{}:{number}:{kind}",
                self.shared.step.step_id, self.shared.run, self.script
            ),
            r#type: kind.to_owned(),
            time: Some(timestamp(Timestamp::now())),
            organization_id: self.shared.step.organization_id.clone(),
            task_id: self.shared.step.task_id.clone(),
            step: self.shared.step.number,
            index,
            payload: Some(payload),
            ..v1::Event::default()
        };
        if let Err(error) = progress.send(&event).await {
            tracing::warn!(%error, kind, "an event could not be told");
        }
    }
}

impl Host for ScriptHost<'_> {
    fn declare(&self) -> &ToolTable {
        self.shared.table
    }

    fn call<'a>(&'a self, call: HostCall) -> BoxFuture<'a, Result<Value, ToolError>> {
        self.state().made.insert(call.number);
        // Now, and not when the call is carried out: what the script sets meanwhile is not what it
        // was judged with.
        let environment = self.shared.toolbox.environment();
        Box::pin(self.answer(call, environment, self.now()))
    }

    fn sleep<'a>(&'a self, number: u32, duration: Duration) -> BoxFuture<'a, ()> {
        self.state().made.insert(number);
        Box::pin(async move {
            let milliseconds = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
            let hash = fingerprint(TIMER, &milliseconds.into());
            let past = self.shared.journal.past_call((self.script, number));
            if let Some(diverged) = past.and_then(|past| diverged(number, past, TIMER, &hash)) {
                let () = self.broken(diverged).await;
            }
            if matches!(past, Some(PastCall::Completed { .. })) {
                return;
            }
            tokio::time::sleep(duration).await;
            let completed = JournalCompleted {
                name: TIMER.to_owned(),
                arguments_hash: hash,
                succeeded: true,
                duration_micros: micros(duration),
                clock_micros: clock::now().as_microsecond(),
                ..JournalCompleted::default()
            };
            if self
                .shared
                .journal
                .record_completion((self.script, number), completed)
                .await
                .is_err()
            {
                let () = self.broken(Broken::Journal).await;
            }
        })
    }

    /// The guest's clock stands still but for host calls: it shows when the last one ended that the
    /// script has seen. So it shows the same when the script is run again.
    fn now(&self) -> Timestamp {
        Timestamp::from_microsecond(self.shared.clock.load(Relaxed))
            .unwrap_or(Timestamp::UNIX_EPOCH)
    }

    fn seed(&self) -> [u8; 32] {
        let seed = Sha256::new()
            .chain_update(&self.shared.journal.opened.seed)
            .chain_update(self.script.to_be_bytes());
        seed.finalize().into()
    }

    /// Concurrent calls end for the script in the order of the journal, now and when it is run
    /// again.
    fn next_settled(&self, outstanding: &dyn Fn(u32) -> bool) -> Option<u32> {
        self.shared.journal.next_end(self.script, outstanding)
    }

    /// When nothing but people's decisions and the end of subtasks can let the script go on, it is
    /// put away: a run that is ended here goes on from the journal.
    fn stands_still(&self, mut under_way: &mut dyn Iterator<Item = u32>) {
        let waits = {
            let state = self.state();
            let waits =
                |number| state.asks.contains_key(&number) || state.awaits.contains_key(&number);
            !(state.asks.is_empty() && state.awaits.is_empty())
                && Iterator::all(&mut under_way, waits)
        };
        if waits {
            self.shared.parked.store(true, Relaxed);
            self.shared.cancel.cancel();
        }
    }

    fn settled(&self, number: u32) {
        if let Some(clock) = self.shared.journal.see_end(self.script, number) {
            self.shared.clock.fetch_max(clock, Relaxed);
        }
    }
}

/// The calls of a script as an earlier process left them.
pub(crate) fn past_calls(journal: &Journal, script: u32) -> Vec<CallRecord> {
    let calls = journal.calls(script).into_iter().map(|(number, past)| match past {
        PastCall::Started(started) => CallRecord::begun(number, &started.name),
        PastCall::Completed { completed, .. } => {
            let mut call = CallRecord::begun(number, &completed.name);
            call.ended(call_end(completed), &clipped(&completed.result));
            call
        }
    });
    calls.filter(|call| call.name != TIMER).collect()
}

/// What tells a call from another one that stands in its place.
fn fingerprint(name: &str, arguments: &Value) -> Vec<u8> {
    Sha256::new()
        .chain_update(name)
        .chain_update([0])
        .chain_update(arguments.to_string())
        .finalize()
        .to_vec()
}

/// Whether the journal has another call in this place.
fn diverged(number: u32, past: &PastCall, name: &str, hash: &[u8]) -> Option<Broken> {
    let (before, before_hash) = past.call();
    let now = match (before == name, before_hash == hash) {
        (true, true) => return None,
        (true, false) => format!("{name} with other arguments"),
        (false, _) => name.to_owned(),
    };
    Some(Broken::Diverged { number, before: before.to_owned(), now })
}

/// How a call ended, as the journal has it.
fn call_end(completed: &JournalCompleted) -> CallEnd {
    CallEnd {
        succeeded: completed.succeeded,
        is_unknown: !completed.succeeded
            && decode(completed).is_err_and(|error| error.name == errors::OUTCOME_UNKNOWN),
        duration_micros: completed.duration_micros,
    }
}

/// A result as it is journaled.
fn written(result: &Result<Value, ToolError>) -> String {
    match result {
        Ok(value) => value.to_string(),
        Err(error) => serde_json::to_string(error).unwrap_or_default(),
    }
}

/// A journaled result as the script got it.
fn decode(completed: &JournalCompleted) -> Result<Value, ToolError> {
    let unreadable = |error: serde_json::Error| {
        ToolError::new(
            "InternalError",
            format!("the journaled result of {} cannot be read: {error}", completed.name),
        )
    };
    if completed.succeeded {
        return serde_json::from_str(&completed.result).map_err(unreadable);
    }
    let error: Value = serde_json::from_str(&completed.result).map_err(unreadable)?;
    let text = |key: &str| error[key].as_str().map(str::to_owned);
    Err(ToolError {
        name: text("name").unwrap_or_default(),
        message: text("message").unwrap_or_default(),
        code: text("code"),
        details: error.get("details").cloned(),
    })
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// At most [`SHOWN`] bytes, cut between characters.
fn clipped(text: &str) -> String {
    let mut shown = text[..text.floor_char_boundary(SHOWN)].to_owned();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

/// A time for protobuf.
fn timestamp(time: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: time.as_second(), nanos: time.subsec_nanosecond() }
}
