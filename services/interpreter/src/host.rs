//! The host of one script: its access to the tools of its task. Each call is journaled, counted and
//! published to subscribers.

mod errors;
mod quota;
mod tool_called;

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
        ApprovalDecision, ApprovalRequest, AwaitedCall, JournalCompleted, JournalStarted, StepRef,
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
    policy::{Judgment, Policies},
    sandbox::{Host, HostCall, IMPORT, ToolError, ToolTable},
    tools::{self, AwaitOutcome, CallContext, Effect, Environment, Redirects, Toolbox},
};

pub(crate) use quota::ResultQuota;

/// How timers appear in the journal.
pub(crate) const TIMER: &str = "setTimeout";
/// How much of arguments and results is published in events, in bytes.
const MAX_SHOWN_BYTES: usize = 4096;
/// For how many calls (and timers) of a script that much is recorded, beside what the model sees.
/// The total limit for a script is in `report`.
const MAX_RECORDED_CALLS: u32 = 64;
/// For how many calls of a script the model sees the notes about incomplete results.
const MAX_NOTES: usize = 10;
/// How often subtasks are polled while their script also does something else.
const SUBTASK_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// An error that ends the execution and is not the script's fault.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FatalError {
    /// The journal cannot be written, or another process has taken over the execution.
    #[error("failed to write the journal")]
    Journal,
    /// The replayed script makes other calls than before.
    #[error(
        "call {number} was {before} in the first run of the script, and is {now} in the replay"
    )]
    Diverged {
        /// The number of the call.
        number: u32,
        /// The call in the first run.
        before: String,
        /// The call in the replay.
        now: String,
    },
}

/// The state that the scripts of one execution share.
#[derive(Debug)]
pub(crate) struct Shared<'a> {
    pub(crate) toolbox: &'a Toolbox,
    pub(crate) table: &'a ToolTable,
    pub(crate) journal: &'a Journal,
    /// Limits the results in the journal.
    pub(crate) quota: ResultQuota,
    /// Serializes the events.
    pub(crate) progress: tokio::sync::Mutex<Progress>,
    pub(crate) step: &'a StepRef,
    pub(crate) policies: Arc<Policies>,
    /// People's decisions about calls.
    pub(crate) decisions: HashMap<CallId, &'a ApprovalDecision>,
    /// Set when a script can only continue after people have decided or subtasks have ended.
    pub(crate) suspended: AtomicBool,
    /// Set when a script has handed the conversation over. No more calls are made then: a resumed
    /// step has the policy, the secrets and the models of the other agent, which did not write this
    /// code.
    pub(crate) handed_off: AtomicBool,
    /// The number of this run of the scripts: it is greater in later rounds, and in a round in
    /// later deliveries.
    pub(crate) run: u32,
    /// Numbers the published events.
    pub(crate) index: AtomicU64,
    /// The guest's clock in microseconds; it continues from script to script.
    pub(crate) clock: AtomicI64,
    /// Cancels the execution; also used after a fatal error.
    pub(crate) cancel: CancellationToken,
    /// The fatal error, if any.
    pub(crate) fatal_error: OnceLock<FatalError>,
}

/// The host of one script.
#[derive(Debug)]
pub(crate) struct ScriptHost<'a> {
    shared: &'a Shared<'a>,
    script: u32,
    /// Id of the script's tool call, from the model.
    id: &'a str,
    state: Mutex<State>,
    /// Held by the call that polls its subtasks.
    polling: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// The calls and timers that the script has made, by number.
    made: HashSet<u32>,
    /// Records of the calls, for the report.
    records: Vec<CallRecord>,
    /// Calls that wait for an approval, by number.
    approvals: BTreeMap<u32, ApprovalRequest>,
    /// Calls that wait for subtasks.
    awaits: BTreeMap<u32, AwaitedCall>,
    /// Notes for the model, beside the script's output.
    notes: Vec<String>,
    /// Notes about incomplete results of the first [`MAX_NOTES`] calls, by number.
    result_notes: BTreeMap<u32, String>,
    /// Number of further calls with incomplete results.
    more_result_notes: u32,
}

/// The record of a call when the script has ended.
#[derive(Debug, Clone)]
pub(crate) struct CallRecord {
    pub(crate) number: u32,
    pub(crate) name: String,
    /// `None` while it is in progress, or when it was stopped.
    pub(crate) end: Option<CallEnd>,
    /// What it waits for before it begins.
    pub(crate) waits: Option<WaitsFor>,
    /// Its arguments as published; empty if they were not recorded or are no longer known.
    pub(crate) arguments: String,
    /// Its result, likewise.
    pub(crate) result: String,
}

impl CallRecord {
    /// The record of a call in progress.
    pub(crate) fn in_progress(number: u32, name: &str) -> Self {
        let (arguments, result) = (String::new(), String::new());
        Self { number, name: name.to_owned(), end: None, waits: None, arguments, result }
    }

    /// Records how it ended, and its result as published.
    fn ended(&mut self, end: CallEnd, shown: &str) {
        self.end = Some(end);
        if self.number <= MAX_RECORDED_CALLS {
            shown.clone_into(&mut self.result);
        }
    }
}

/// What a call can wait for while its script is suspended.
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
    /// Whether the outcome is unknown: the call was started by a process that died.
    pub(crate) is_unknown: bool,
    pub(crate) duration_micros: i64,
}

impl<'a> ScriptHost<'a> {
    pub(crate) fn new(shared: &'a Shared<'a>, script: u32, id: &'a str) -> Self {
        // Also after a hand-off with an unknown outcome, and before the replayed script repeats the
        // call.
        let handed_off = shared.journal.calls(script).into_iter().any(|(_, past)| match past {
            PastCall::Started(started) => started.name == tools::HAND_OFF,
            PastCall::Completed { completed, .. } => {
                completed.succeeded && completed.name == tools::HAND_OFF
            }
        });
        if handed_off {
            shared.handed_off.store(true, Relaxed);
        }
        Self { shared, script, id, state: Mutex::default(), polling: tokio::sync::Mutex::default() }
    }

    /// Checks a script that has ended by itself after `made` calls and timers: whether it omitted
    /// calls of the first run, which the calls it made do not show.
    pub(crate) fn ended_early(&self, made: u32) -> Option<FatalError> {
        let state = self.state();
        let past = self.shared.journal.calls(self.script);
        let mut missing = past.into_iter().filter(|(number, _)| !state.made.contains(number));
        let (number, first) = missing.next()?;
        // A call that the script made at its very end without awaiting it may not have reached the
        // host.
        let unseen_calls = (made as usize).saturating_sub(state.made.len());
        let before = first.call().0.to_owned();
        (1 + missing.count() > unseen_calls).then(|| FatalError::Diverged {
            number,
            before,
            now: "not made".to_owned(),
        })
    }

    /// The calls so far, by number: those the script has made, and those from the first run that it
    /// has not repeated yet.
    pub(crate) fn calls(&self) -> Vec<CallRecord> {
        let mut calls = self.state().records.clone();
        let is_repeated =
            |calls: &[CallRecord], number| calls.iter().any(|call| call.number == number);
        for call in recorded_calls(self.shared.journal, self.script) {
            if !is_repeated(&calls, call.number) {
                calls.push(call);
            }
        }
        calls.sort_by_key(|call| call.number);
        calls
    }

    /// The approvals to request, limited to the first calls of the script.
    pub(crate) fn pending_approvals(&self) -> Vec<ApprovalRequest> {
        self.state().approvals.values().take(MAX_PENDING_APPROVALS).cloned().collect()
    }

    /// The waits for subtasks, limited to the first ones: a resumed script asks again about the
    /// others.
    pub(crate) fn pending_waits(&self) -> Vec<AwaitedCall> {
        self.state().awaits.values().take(MAX_PENDING_APPROVALS).cloned().collect()
    }

    /// Notes for the model, beside the script's output.
    pub(crate) fn notes(&self) -> Vec<String> {
        let state = self.state();
        let mut notes = state.notes.clone();
        notes.extend(state.result_notes.values().cloned());
        if state.more_result_notes > 0 {
            notes.push(format!(
                "the results of {} more calls are incomplete, see their notes",
                state.more_result_notes
            ));
        }
        notes
    }

    /// The latest end of a wait: early enough for the script to be resumed and to end before its
    /// execution expires.
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

    /// Ends the execution. The future never completes: its script is about to be dropped.
    async fn abort<T>(&self, why: FatalError) -> T {
        let _ = self.shared.fatal_error.set(why);
        self.shared.cancel.cancel();
        std::future::pending().await
    }

    /// Answers a call. `environment` has the variables for commands at this point of the script,
    /// `made` is the guest's clock there.
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
            return self.abort(diverged).await;
        }
        let arguments = clip(&tool_called::arguments(&call, self.shared.toolbox));
        let mut record = CallRecord::in_progress(number, &call.name);
        if number <= MAX_RECORDED_CALLS {
            record.arguments.clone_from(&arguments);
        }
        self.state().records.push(record);
        match past {
            Some(PastCall::Completed { completed, .. }) => {
                self.ended(number, call_end(completed), &clip(&completed.result));
                let result = decode(completed);
                if let Ok(result) = &result {
                    self.shared.toolbox.replay(&call.name, result);
                    self.note(&call);
                    self.add_result_notes(&call, result);
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
            self.publish_called(&call, &arguments).await;
            return self
                .complete(&call, hash, Err(errors::handed_off(&call.name)), Duration::ZERO)
                .await;
        }
        if self.shared.quota.is_full() {
            self.publish_called(&call, &arguments).await;
            return self
                .complete(
                    &call,
                    hash,
                    Err(errors::journal_full(&call.name, &self.shared.quota)),
                    Duration::ZERO,
                )
                .await;
        }
        if let Err(refused) = self.permit(&call, &environment).await {
            self.publish_called(&call, &arguments).await;
            return self.complete(&call, hash, Err(refused), Duration::ZERO).await;
        }
        if !repeatable {
            let started = JournalStarted { name: call.name.clone(), arguments_hash: hash.clone() };
            if self.shared.journal.record_start(id, started).await.is_err() {
                return self.abort(FatalError::Journal).await;
            }
        } else if tool.is_some_and(|tool| tool.effect == Effect::External)
            && self.shared.journal.flush().await.is_err()
        {
            // The call may depend on what the script has read. If those results were not journaled,
            // a replay could read something else and make another call.
            return self.abort(FatalError::Journal).await;
        }
        // A waiting call is published when its wait is over, which may be many runs of the script
        // later.
        if call.name != tools::AWAIT {
            self.publish_called(&call, &arguments).await;
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
            self.publish_called(&call, &arguments).await;
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
            // The call was interrupted, so its outcome is unknown; journaled as failed it would
            // count as done.
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

    /// Adds the note of a successful call for the model.
    fn note(&self, call: &HostCall) {
        if call.name == tools::HAND_OFF {
            self.shared.handed_off.store(true, Relaxed);
            self.state().notes.push(tools::handed_off(&call.args));
        }
    }

    /// Adds notes about an incomplete result. The model must see them, whatever the script does
    /// with the result.
    fn add_result_notes(&self, call: &HostCall, result: &Value) {
        let Some(tool) = tools::definition(&call.name) else { return };
        let notes: Vec<&str> = tool.notes(result).collect();
        if notes.is_empty() {
            return;
        }
        let mut state = self.state();
        state.result_notes.insert(
            call.number,
            clip(&format!("#{} {}: {}", call.number, call.name, notes.join(" "))),
        );
        // Keeps the same notes in whatever order concurrent calls end.
        if state.result_notes.len() > MAX_NOTES {
            state.result_notes.pop_last();
            state.more_result_notes += 1;
        }
    }

    /// Waits for subtasks. If the script waits for nothing else, it is suspended, and repeats the
    /// call when it is resumed. As long as it also does something else, the subtasks are polled.
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
                // Suspended or stopped: the resumed script asks again.
                return std::future::pending().await;
            }
            drop(turn.take());
            let (task_ids, until) = match waited {
                Ok(AwaitOutcome::Pending { tasks, until }) => (tasks, until),
                Ok(AwaitOutcome::Over(value)) => {
                    self.set_wait(number, None);
                    return Ok(value);
                }
                Err(error) => {
                    self.set_wait(number, None);
                    return Err(error);
                }
            };
            let until = Some(timestamp(until));
            self.set_wait(
                number,
                Some(AwaitedCall { script: self.script, number, task_ids, until }),
            );
            tokio::time::sleep(SUBTASK_POLL_INTERVAL).await;
            // One call at a time, so that a script with many waits does not poll faster than
            // answers arrive.
            turn = Some(self.polling.lock().await);
        }
    }

    /// Records what a call waits for. `None` means nothing any more, so that the script is not
    /// suspended before it has seen the result.
    fn set_wait(&self, number: u32, awaited: Option<AwaitedCall>) {
        let mut state = self.state();
        if let Some(record) = state.records.iter_mut().find(|record| record.number == number) {
            record.waits = awaited.is_some().then_some(WaitsFor::Subtasks);
        }
        match awaited {
            Some(awaited) => state.awaits.insert(number, awaited),
            None => state.awaits.remove(&number),
        };
    }

    /// Checks whether the policies permit a new call. Does not return while a person must decide
    /// first.
    async fn permit(&self, call: &HostCall, environment: &Environment) -> Result<(), ToolError> {
        let decision = self.shared.decisions.get(&(self.script, call.number));
        let judging =
            self.shared.policies.judge(call, self.shared.toolbox, environment, decision.is_some());
        let Some(Judgment { verdict, arguments, hash: arguments_hash }) = judging.await else {
            return Ok(());
        };
        let decision = decision.filter(|decision| decision.arguments_hash == arguments_hash);
        // A person's rejection applies whatever the rules are now.
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
        if arguments.len() > errors::MAX_APPROVAL_BYTES {
            return Err(errors::too_large_to_ask(&call.name, arguments.len()));
        }
        let request = ApprovalRequest {
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
            state.approvals.insert(call.number, request);
            if let Some(record) =
                state.records.iter_mut().find(|record| record.number == call.number)
            {
                record.waits = Some(WaitsFor::Approval);
            }
        }
        std::future::pending().await
    }

    /// Publishes that a call is made or rejected; `arguments` as published.
    async fn publish_called(&self, call: &HostCall, arguments: &str) {
        let called = tool_called::event(&self.shared.step.step_id, self.id, call, arguments);
        self.publish("tool.called", call.number, Payload::ToolCalled(called)).await;
    }

    /// Journals the end of a call, publishes it, and returns the result to the script.
    async fn complete(
        &self,
        call: &HostCall,
        arguments_hash: Vec<u8>,
        mut result: Result<Value, ToolError>,
        took: Duration,
    ) -> Result<Value, ToolError> {
        let tool = tools::definition(&call.name);
        let mut json = encode(&result);
        // Variables that a script has set for commands are restored from the journal.
        let is_required = tool.is_some_and(|tool| tool.effect == Effect::Write);
        if !self.shared.quota.try_add(&json, is_required) {
            result = Err(errors::result_dropped(&call.name, json.len(), &self.shared.quota));
            json = encode(&result);
            self.shared.quota.try_add(&json, true);
        }
        metrics::record_call(&call.name, took, result.as_ref().err().map(|error| &*error.name));
        let succeeded = result.is_ok();
        let shown = v1::ToolResult {
            step_id: self.shared.step.step_id.clone(),
            number: call.number,
            name: call.name.clone(),
            succeeded,
            result: clip(&json),
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
            self.add_result_notes(call, result);
        }
        if self
            .shared
            .journal
            .record_completion((self.script, call.number), completed)
            .await
            .is_err()
        {
            return self.abort(FatalError::Journal).await;
        }
        self.ended(call.number, end, &shown.result);
        self.publish("tool.result", call.number, Payload::ToolResult(shown)).await;
        result
    }

    /// Records how a call ended, and its result as published.
    fn ended(&self, number: u32, end: CallEnd, shown: &str) {
        if let Some(call) = self.state().records.iter_mut().find(|call| call.number == number) {
            call.ended(end, shown);
        }
    }

    /// Publishes an event. A replayed call is published again, as a separate event.
    async fn publish(&self, kind: &str, number: u32, payload: Payload) {
        // Numbered under the lock, so that events are published in the order of their numbers.
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
            tracing::warn!(%error, kind, "failed to publish an event");
        }
    }
}

impl Host for ScriptHost<'_> {
    fn declare(&self) -> &ToolTable {
        self.shared.table
    }

    fn call<'a>(&'a self, call: HostCall) -> BoxFuture<'a, Result<Value, ToolError>> {
        self.state().made.insert(call.number);
        // Taken now, not when the call is executed: the policy decides with the variables at this
        // point.
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
                let () = self.abort(diverged).await;
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
                let () = self.abort(FatalError::Journal).await;
            }
        })
    }

    /// The guest's clock only advances at host calls: it shows the end of the last call that the
    /// script has seen. So a replay sees the same times.
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

    /// The script sees concurrent calls end in the order of the journal, now and in a replay.
    fn next_settled(&self, outstanding: &dyn Fn(u32) -> bool) -> Option<u32> {
        self.shared.journal.next_end(self.script, outstanding)
    }

    /// Suspends the script when it can only continue after decisions of people or the end of
    /// subtasks: a run that ends here is resumed from the journal.
    fn on_blocked(&self, mut in_flight: &mut dyn Iterator<Item = u32>) {
        let waits = {
            let state = self.state();
            let waits = |number| {
                state.approvals.contains_key(&number) || state.awaits.contains_key(&number)
            };
            !(state.approvals.is_empty() && state.awaits.is_empty())
                && Iterator::all(&mut in_flight, waits)
        };
        if waits {
            self.shared.suspended.store(true, Relaxed);
            self.shared.cancel.cancel();
        }
    }

    fn on_settled(&self, number: u32) {
        if let Some(clock) = self.shared.journal.see_end(self.script, number) {
            self.shared.clock.fetch_max(clock, Relaxed);
        }
    }
}

/// The calls of a script that an earlier process recorded.
pub(crate) fn recorded_calls(journal: &Journal, script: u32) -> Vec<CallRecord> {
    let calls = journal.calls(script).into_iter().map(|(number, past)| match past {
        PastCall::Started(started) => CallRecord::in_progress(number, &started.name),
        PastCall::Completed { completed, .. } => {
            let mut call = CallRecord::in_progress(number, &completed.name);
            call.ended(call_end(completed), &clip(&completed.result));
            call
        }
    });
    calls.filter(|call| call.name != TIMER).collect()
}

/// A hash that identifies a call, to detect another call in its position.
fn fingerprint(name: &str, arguments: &Value) -> Vec<u8> {
    Sha256::new()
        .chain_update(name)
        .chain_update([0])
        .chain_update(arguments.to_string())
        .finalize()
        .to_vec()
}

/// Whether the journal has another call in this position.
fn diverged(number: u32, past: &PastCall, name: &str, hash: &[u8]) -> Option<FatalError> {
    let (before, before_hash) = past.call();
    let now = match (before == name, before_hash == hash) {
        (true, true) => return None,
        (true, false) => format!("{name} with other arguments"),
        (false, _) => name.to_owned(),
    };
    Some(FatalError::Diverged { number, before: before.to_owned(), now })
}

/// How a journaled call ended.
fn call_end(completed: &JournalCompleted) -> CallEnd {
    CallEnd {
        succeeded: completed.succeeded,
        is_unknown: !completed.succeeded
            && decode(completed).is_err_and(|error| error.name == errors::OUTCOME_UNKNOWN),
        duration_micros: completed.duration_micros,
    }
}

/// The journaled form of a result.
fn encode(result: &Result<Value, ToolError>) -> String {
    match result {
        Ok(value) => value.to_string(),
        Err(error) => serde_json::to_string(error).unwrap_or_default(),
    }
}

/// The result of a script from its journaled form.
fn decode(completed: &JournalCompleted) -> Result<Value, ToolError> {
    let unreadable = |error: serde_json::Error| {
        ToolError::new(
            "InternalError",
            format!("failed to read the journaled result of {}: {error}", completed.name),
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

/// Truncates text to [`MAX_SHOWN_BYTES`] bytes, at a character boundary.
fn clip(text: &str) -> String {
    let mut shown = text[..text.floor_char_boundary(MAX_SHOWN_BYTES)].to_owned();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

/// Converts a time to protobuf.
fn timestamp(time: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp { seconds: time.as_second(), nanos: time.subsec_nanosecond() }
}
