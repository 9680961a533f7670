//! One reconcile of a task: load, decide, commit, perform. Its only input is a worker's result, so
//! it can be repeated at any time and on any replica.

mod report;
mod steps;

use std::{collections::BTreeMap, sync::Arc};

use construct_bus::{Bus, publish, subject};
use construct_domain::{
    ApprovalId, MessageId, StepId, TaskId,
    approval::ApprovalState,
    decide::{self, Decision, Effect, Entropy, Event},
    id,
    message::{Block, Content, Source},
    money::Usage,
    task::{Failure, FailureClass, Outcome, Step, StepResult, Task},
};
use construct_proto::{mesh::v1 as mesh, v1::event::Payload};
use construct_runtime::{Lifecycle, MasterKeys, clock, telemetry::Chain};
use construct_store::{
    AppendedMessage, CommittedTask, EndedMessage, Error, LoadedTask, MessageFilter, MessagePage,
    NewApproval, NewEvent, QUEUE_LIMIT, Store, StoredApproval, StoredEvent, Stream, TaskCommit,
};
use jiff::Timestamp;
use opentelemetry::Context;
use tracing::Instrument as _;
use uuid::Uuid;

use report::{Report, billable_usage, parse_title};
use steps::{PendingResult, may_have_been_sent};

use crate::{
    announce::Announcer,
    catalog::Catalog,
    command,
    command_inputs::{self, CommandInputs},
    compaction,
    failures::FailingTasks,
    in_flight::{CommandRef, InFlightLimiter, Permit, Queue},
    metrics, record, spending, trace,
};

/// Time that a stopped worker has to report its usage before the reservation of its call is
/// released.
const USAGE_REPORT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(120);
/// Maximum number of commit conflicts before the reconcile is given back.
const MAX_CONFLICTS: u32 = 8;
/// Maximum number of decisions of one reconcile, so that a task with a long queue does not block
/// others.
const MAX_DECISIONS: u32 = 16;

/// Reconciles tasks.
#[derive(Debug)]
pub(crate) struct Reconciler {
    pub(crate) store: Store,
    pub(crate) bus: Bus,
    pub(crate) catalog: Catalog,
    pub(crate) announcer: Announcer,
    /// Limits the commands of each organization in the work queues.
    pub(crate) limiter: InFlightLimiter,
    /// Tasks whose reconciles currently fail, for diagnosis.
    pub(crate) failing_tasks: FailingTasks,
    /// Owns jobs that outlive a reconcile.
    pub(crate) lifecycle: Lifecycle,
    /// Keys that sign tokens for models; `None`: scripts get no token.
    pub(crate) token_keys: Option<Arc<MasterKeys>>,
}

/// What to do with the task after a reconcile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextAction {
    /// Nothing until a wake.
    Idle,
    /// Reconcile again at this time.
    RequeueAt(Timestamp),
    /// The task is deleted.
    Deleted,
}

/// What an actor caches about its task between reconciles. Nothing depends on it.
#[derive(Debug, Default)]
pub(crate) struct TaskCache {
    /// The task as the last reconcile left it. The actor does not live long without work, and
    /// neither does this.
    pub(crate) task: Option<Box<LoadedTask>>,
    /// Where the trace of the task's turn was last continued.
    pub(crate) turn: Context,
    /// The result that was found in its queue.
    pending_result: PendingResult,
}

/// A committed decision.
struct CommittedDecision {
    decision: Decision,
    /// `None` when there was nothing to write.
    committed: Option<CommittedTask>,
    /// The inputs of the effects' commands, if they could be read.
    inputs: Result<CommandInputs, Error>,
}

impl Reconciler {
    /// Reconciles the task, with a worker's result if there is one. On `Err` no result is lost: its
    /// message is not acknowledged and is redelivered.
    ///
    /// A result is decided with the task as the previous reconcile left it ([`TaskCache::task`]);
    /// the commit detects changes in between. A wake always loads the task.
    #[tracing::instrument(name = "reconciler.task.activate", skip_all, fields(task = %task))]
    pub(crate) async fn reconcile(
        self: &Arc<Self>,
        task: TaskId,
        result: Option<mesh::StepResult>,
        cache: &mut TaskCache,
    ) -> Result<NextAction, Error> {
        let mut cached = cache.task.take().filter(|_| result.is_some());
        let mut report = match result.map(Report::parse).transpose() {
            Ok(report) => report,
            Err(error) => {
                // The consumer checks that it names a step.
                tracing::error!(%error, "a worker's result is dropped: it names no step");
                None
            }
        };
        let mut conflicts = 0;
        for _ in 0..MAX_DECISIONS {
            let loaded = match cached.take() {
                Some(loaded) => *loaded,
                None => match self.store.task_load(task).await? {
                    Some(loaded) => loaded,
                    None => {
                        self.limiter.forget(task);
                        self.record_late_usage(task, report.as_ref()).await?;
                        return Ok(NextAction::Deleted);
                    }
                },
            };
            if loaded.deleted {
                self.limiter.forget(task);
                self.record_late_usage(task, report.as_ref()).await?;
                return self.purge_task(&loaded).await;
            }
            self.refresh_in_flight(&loaded).await;
            if report.is_none() {
                report = self
                    .expire_untaken_call(&loaded)
                    .await
                    .map(|result| Report::for_failure(result, &loaded.task));
            }
            let span = trace::turn_span(&loaded, &mut cache.turn);
            let decided =
                self.decide_and_commit(&loaded, report.as_ref()).instrument(span.clone()).await;
            let CommittedDecision { decision, committed, inputs } = match decided {
                Err(Error::Conflict) if conflicts < MAX_CONFLICTS => {
                    conflicts += 1;
                    continue;
                }
                done => done?,
            };
            // Only a worker reports results of scripts. It has acknowledged its command, or is
            // about to.
            let reported = report
                .take()
                .is_some_and(|report| matches!(report.result.outcome, Outcome::Code(_)));
            let no_inputs = CommandInputs::default();
            for effect in &decision.effects {
                let inputs = match &inputs {
                    Ok(inputs) => inputs,
                    // A missing command is noticed when the task checks its step, except a title's.
                    // An effect that ends a step is not.
                    Err(_) if is_command(effect) => {
                        if let Effect::MakeTitle(step) = effect {
                            self.limiter.release(
                                loaded.task.organization,
                                &Queue::Model,
                                task,
                                *step,
                            );
                        }
                        continue;
                    }
                    Err(_) => &no_inputs,
                };
                // A command that cannot be built is a result of the step like any other.
                let performed = self.perform(
                    &loaded,
                    &decision.task,
                    effect,
                    inputs,
                    reported,
                    &mut cache.pending_result,
                );
                let failed = performed.instrument(span.clone()).await;
                report =
                    failed.map(|result| Report::for_failure(result, &decision.task)).or(report);
            }
            // Only now: nothing else knows what the slots say about a stopped call.
            self.limiter.release_unneeded(&decision.task, &command::pool(&loaded), clock::now());
            // What fails from here on is repeated by the next reconcile. The end of a step would
            // not be.
            self.store.subtasks_mark_seen(&loaded).await?;
            inputs?;
            let next_wake =
                committed.as_ref().map_or(decision.task.next_wake, |committed| committed.next_wake);
            let again = committed.as_ref().is_some_and(|committed| committed.has_new_intents);
            let left = committed.and_then(|committed| committed.cached_task);
            let next = match next_wake {
                _ if report.is_some() || again => None,
                Some(wake) if wake > clock::now() => Some(NextAction::RequeueAt(wake)),
                Some(_) => None,
                None => Some(NextAction::Idle),
            };
            if let Some(next) = next {
                cache.task = left;
                return Ok(next);
            }
            cached = left;
        }
        Ok(NextAction::RequeueAt(clock::now()))
    }

    /// Records usage for a task that is gone. It is paid for all the same.
    async fn record_late_usage(&self, task: TaskId, report: Option<&Report>) -> Result<(), Error> {
        let Some(report) = report else { return Ok(()) };
        let (Some(organization), Some(paid)) = (report.organization, billable_usage(None, report))
        else {
            return Ok(());
        };
        match self.store.step_usage_record(organization, task, None, &paid, clock::now()).await {
            // The organization was erased as well, so nobody pays.
            Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Decides and commits.
    async fn decide_and_commit(
        &self,
        loaded: &LoadedTask,
        report: Option<&Report>,
    ) -> Result<CommittedDecision, Error> {
        match self.decide_with(loaded, report, None).await {
            // The budget does not cover the decision. It is made again with that known, and then
            // costs nothing.
            Err(Error::Exhausted(exhausted)) => {
                tracing::info!(%exhausted, "a model call is rejected");
                self.decide_with(loaded, report, Some(&exhausted.to_string())).await
            }
            done => done,
        }
    }

    /// Decides and commits. `exhausted` says why no budget covers a model call.
    async fn decide_with(
        &self,
        loaded: &LoadedTask,
        report: Option<&Report>,
        exhausted: Option<&str>,
    ) -> Result<CommittedDecision, Error> {
        // PostgreSQL stores microseconds, and published times must equal stored times.
        let now = Timestamp::from_microsecond(clock::now().as_microsecond())
            .unwrap_or(Timestamp::UNIX_EPOCH);
        let event = report.map_or(Event::Wake, |report| Event::Result(report.result.clone()));
        let decide = |task: &Task| match exhausted {
            None => decide::decide(task, loaded.queued, event.clone(), now, new_entropy(now)),
            Some(exhausted) => decide::decide_without_budget(
                task,
                loaded.queued,
                event.clone(),
                now,
                new_entropy(now),
                exhausted,
            ),
        };
        let mut task = loaded.task.clone();
        compaction::add_fixed_tokens(
            &mut task.context,
            self.catalog.cached_bytes(&command::pool(loaded), &loaded.workspace),
        );
        task.context.counted = report.and_then(|report| report.counted);
        let mut decision = decide(&task);
        if decision.needs_outline {
            task.context.outline = Some(self.store.outline(task.id).await?);
            decision = decide(&task);
        }
        let usage = report.map(|report| report.usage).unwrap_or_default();
        let paid = report.and_then(|report| billable_usage(Some(&loaded.task), report));
        // Only a task with a budget can have a reservation.
        let settled =
            report.filter(|_| loaded.cost_inputs.is_some()).map(|report| report.result.step);

        if !decision.changes(&loaded.task) {
            // No commit will detect that the cached task is stale.
            if loaded.is_cached() {
                return Err(Error::Conflict);
            }
            if let Some(paid) = &paid {
                let (organization, agent) = (loaded.task.organization, loaded.task.agent);
                self.store
                    .step_usage_record(organization, loaded.task.id, Some(agent), paid, now)
                    .await?;
            } else if let Some(step) = settled {
                self.store.step_release(loaded.task.organization, step, now).await?;
            }
            if loaded.has_new_intents() {
                self.store.task_intents_mark_seen(loaded).await?;
            }
            let permits =
                self.apply_concurrency_limit(loaded, &decision.task, &mut decision.effects, now);
            permits.into_iter().for_each(Permit::commit);
            let inputs = command_inputs::gather(self, loaded, &decision).await;
            return Ok(CommittedDecision { decision, committed: None, inputs });
        }

        let current = report.filter(|report| {
            loaded.task.step.as_ref().is_some_and(|step| step.awaits(&report.result))
        });
        // A step that waits for people has not ended: its scripts report again later.
        let ends_step =
            |report: &&Report| !matches!(report.result.outcome, Outcome::Suspended { .. });
        let step = current.filter(ends_step).map(|report| report.number);
        let mut commit = TaskCommit::new(loaded, &decision.task, now);
        commit.admitted = decision.admitted;
        commit.appended = decision
            .appended
            .iter()
            .map(|message| {
                let assistant = message.source == Source::Assistant;
                AppendedMessage {
                    id: message.id,
                    position: message.position,
                    source: message.source,
                    content: Content { blocks: message.blocks.clone() },
                    agent: assistant.then_some(loaded.task.agent),
                    usage: if assistant { usage } else { Usage::default() },
                    step: current.map(|report| report.result.step),
                }
            })
            .collect();
        commit.ended_message = decision
            .ended
            .as_ref()
            .map(|ended| EndedMessage { message: ended.message, error: turn_error(&decision) });
        commit.drop_queued.clone_from(&decision.drop_queued);
        commit.rewind_from = decision.rewound;
        commit.compaction.clone_from(&decision.compacted);
        commit.usage = paid.into_iter().collect();
        commit.settled_step = settled;
        commit.reservation = spending::reservation(loaded, &decision, &self.catalog, now);
        commit.tool_uses = count_tool_uses(&decision);
        commit.title = report.and_then(|report| parse_title(loaded, report));
        // A turn stays in the trace in which it started.
        commit.trace_id = if decision.admitted.is_some() || loaded.trace_id.is_none() {
            trace::current_trace_id()
        } else {
            None
        };
        commit.new_approvals = approval_requests(loaded, &decision);
        commit.closed_approvals.clone_from(&decision.closed_approvals);
        commit.events = self.approval_events(loaded, &commit.new_approvals, &decision, now).await?;
        commit.events.extend(record::decision_events(loaded, &decision, &usage, step, now));
        if let Some(reason) = &decision.drop_queued {
            commit.events.extend(self.dropped_message_events(loaded, reason, now).await?);
        }
        if let Some(title) = commit.title.clone() {
            commit.events.push(self.title_event(loaded, title, commit.events.len(), now).await?);
        }
        if current.is_none() {
            self.close_journals(&decision).await?;
        }
        self.cancel_subtasks(loaded, now).await?;
        let permits =
            self.apply_concurrency_limit(loaded, &decision.task, &mut decision.effects, now);
        let (committed, inputs) =
            tokio::join!(self.commit(commit), command_inputs::gather(self, loaded, &decision));
        let committed = Some(committed?);
        permits.into_iter().for_each(Permit::commit);
        if decision.ended.is_some() || decision.drop_queued.is_some() {
            self.wake_parent(loaded).await;
        }
        metrics::record_decision(
            &loaded.task,
            current.map(|report| &report.result.outcome),
            &decision,
            now,
        );
        Ok(CommittedDecision { committed, inputs, decision })
    }

    /// Removes commands without a slot in their queue, and adds the command whose turn it is. A
    /// command follows from the task's row, so it can be sent later.
    fn apply_concurrency_limit(
        &self,
        loaded: &LoadedTask,
        task: &Task,
        effects: &mut Vec<Effect>,
        now: Timestamp,
    ) -> Vec<Permit> {
        let (organization, pool) = (task.organization, command::pool(loaded));
        if !effects.iter().any(is_command) {
            let due = |queue: &Queue, step: StepId| {
                self.limiter
                    .unsent(organization, queue, task.id)
                    .is_some_and(|work| work.step == step)
            };
            let current =
                CommandRef::for_task(task, &pool).filter(|(queue, work)| due(queue, work.step));
            effects.extend(current.and_then(|_| decide::command(task)));
            effects.extend(
                task.title_step.filter(|&step| due(&Queue::Model, step)).map(Effect::MakeTitle),
            );
        }
        let mut permits = Vec::new();
        effects.retain(|effect| {
            let required = match effect {
                Effect::InvokeModel(_) | Effect::Compact(_) | Effect::ExecuteCode(_) => {
                    CommandRef::for_task(task, &pool)
                }
                Effect::MakeTitle(step) => {
                    let waiting = self
                        .limiter
                        .unsent(organization, &Queue::Model, task.id)
                        .filter(|work| work.step == *step);
                    let work =
                        CommandRef { step: *step, round: 0, until: now + decide::MODEL_TIMEOUT };
                    Some((Queue::Model, waiting.unwrap_or(work)))
                }
                Effect::CancelModel(..) | Effect::CancelCode(..) | Effect::EndCode(_) => None,
            };
            let Some((queue, work)) = required else { return true };
            let permit = self.limiter.acquire(organization, queue, task.id, work, now);
            let granted = permit.is_granted();
            permits.push(permit);
            granted
        });
        permits
    }

    /// Closes the journals of scripts that end without a worker's report, before that is committed.
    /// Their worker may still run them, and would otherwise have side effects that nobody knows of.
    /// While this fails, nothing is committed.
    async fn close_journals(&self, decision: &Decision) -> Result<(), Error> {
        for effect in &decision.effects {
            if let Effect::EndCode(step) = effect {
                self.bus
                    .journal()
                    .close(*step)
                    .await
                    .map_err(|error| Error::Unavailable(error.into()))?;
            }
        }
        Ok(())
    }

    /// Commits, and publishes the committed events.
    async fn commit(&self, commit: TaskCommit<'_>) -> Result<CommittedTask, Error> {
        let (events, created_at) = (commit.events.clone(), commit.now);
        let organization = commit.task.organization;
        let stream = Stream::task(organization, commit.task.id).id();
        let committed = self.store.task_commit(commit).await?;
        let stored = |(sequence, NewEvent { kind, payload, step })| StoredEvent {
            organization,
            stream,
            sequence,
            kind,
            payload,
            step,
            created_at,
        };
        self.announcer
            .announce((committed.first_event_sequence..).zip(events).map(stored).collect());
        Ok(committed)
    }

    /// The events of new and closed approvals.
    async fn approval_events(
        &self,
        loaded: &LoadedTask,
        new: &[NewApproval],
        decision: &Decision,
        now: Timestamp,
    ) -> Result<Vec<NewEvent>, Error> {
        let Some(step) = loaded
            .task
            .step
            .as_ref()
            .filter(|_| !new.is_empty() || !decision.closed_approvals.is_empty())
        else {
            return Ok(Vec::new());
        };
        // A request that replaces another one keeps its id.
        let known = self.store.approvals_of_step(step.id).await?;
        let mut events = Vec::new();
        for NewApproval { id, step, request, expires_at } in new {
            let before = known.iter().find(|known| known.call.is_same_call(&request.call));
            events.push(record::approval_requested(&StoredApproval {
                id: before.map_or(*id, |before| before.id),
                organization: loaded.task.organization,
                task: loaded.task.id,
                step: *step,
                call: request.call.clone(),
                tool: request.tool.clone(),
                arguments: request.arguments.clone(),
                arguments_size: request.arguments_size,
                reason: request.reason.clone(),
                state: ApprovalState::Pending,
                decided_by: String::new(),
                comment: String::new(),
                decided_at: None,
                expires_at: *expires_at,
                revision: before.map_or(1, |before| before.revision + 1),
                created_at: before.map_or(now, |before| before.created_at),
                updated_at: now,
            }));
        }
        for closed in &decision.closed_approvals {
            let Some(mut approval) = known.iter().find(|known| known.id == closed.id).cloned()
            else {
                continue;
            };
            approval.state = closed.state;
            approval.comment.clone_from(&closed.reason);
            approval.decided_at = Some(now);
            approval.revision += 1;
            approval.updated_at = now;
            events.push(record::approval_closed(&approval));
        }
        Ok(events)
    }

    /// The events of queued messages that a cancel or rewind drops.
    async fn dropped_message_events(
        &self,
        loaded: &LoadedTask,
        reason: &str,
        now: Timestamp,
    ) -> Result<Vec<NewEvent>, Error> {
        let after_position = loaded.task.last_position;
        let filter =
            MessageFilter { source: Some(Source::User), after_position, superseded: false };
        let page = MessagePage { limit: QUEUE_LIMIT, descending: false, after: None };
        let queued = self
            .store
            .message_list(loaded.task.organization, loaded.task.id, &filter, &page)
            .await?;
        let dropped = queued.into_iter().filter(|message| loaded.is_dropped_by_cancel(message));
        Ok(dropped
            .map(|mut message| {
                message.processed_at = Some(now);
                message.error = Some(reason.to_owned());
                message.revision += 1;
                message.updated_at = now;
                let message = construct_wire::convert::message(&message);
                construct_wire::record::new("message.updated", Payload::Message(message), None)
            })
            .collect())
    }

    /// The event of a task's new title.
    async fn title_event(
        &self,
        loaded: &LoadedTask,
        title: String,
        before: usize,
        now: Timestamp,
    ) -> Result<NewEvent, Error> {
        let mut task = self.store.task_get(loaded.task.organization, loaded.task.id).await?;
        task.title = title;
        task.state.titled = true;
        task.event_sequence = loaded.event_sequence + before as u64 + 1;
        task.revision += 1;
        task.updated_at = now;
        Ok(construct_wire::record::new(
            "task.updated",
            Payload::Task(Box::new(construct_wire::convert::task(&task))),
            None,
        ))
    }

    /// Performs an effect. `reported` says whether the worker of the step's scripts has reported
    /// their result. Returns a result when the effect cannot be performed as configured, which ends
    /// the step.
    async fn perform(
        &self,
        loaded: &LoadedTask,
        now: &Task,
        effect: &Effect,
        inputs: &CommandInputs,
        reported: bool,
        pending_result: &mut PendingResult,
    ) -> Option<StepResult> {
        let task = loaded.task.id;
        let failed = |step: StepId, error: command::Error| {
            let (class, message, retry_at) =
                (error.class(), Chain(&error).to_string(), error.retry_at());
            let failure = Failure { class, message, retry_at, attempts: 0 };
            Some(StepResult { step, round: round_of(now, step), outcome: Outcome::Failed(failure) })
        };
        let model = subject::ModelInvoke::new(subject::Pool::model_default(), task);
        match effect {
            Effect::InvokeModel(step) | Effect::Compact(step) | Effect::ExecuteCode(step)
                if self.has_pending_result(effect, step, task, pending_result).await =>
            {
                None
            }
            Effect::InvokeModel(step) => match self.build_answer(loaded, step, inputs).await {
                Ok(invoke) => self.dispatch(loaded, Queue::Model, step.id, &model, &invoke).await,
                Err(error) => failed(step.id, error),
            },
            Effect::Compact(step) => match command::build_compaction(loaded, now, step, inputs) {
                Ok(invoke) => self.dispatch(loaded, Queue::Model, step.id, &model, &invoke).await,
                Err(error) => failed(step.id, error),
            },
            Effect::MakeTitle(step) => {
                let command = self.limiter.unsent(loaded.task.organization, &Queue::Model, task);
                let until =
                    command.map_or_else(|| clock::now() + decide::MODEL_TIMEOUT, |work| work.until);
                match command::build_title(loaded, *step, until, inputs) {
                    Ok(invoke) => {
                        let refused =
                            self.dispatch(loaded, Queue::Model, *step, &model, &invoke).await;
                        // It is not requested again: if it could not be sent, its slot is released.
                        if self
                            .limiter
                            .unsent(loaded.task.organization, &Queue::Model, task)
                            .is_some()
                        {
                            self.limiter.release(
                                loaded.task.organization,
                                &Queue::Model,
                                task,
                                *step,
                            );
                        }
                        refused
                    }
                    Err(error) => failed(*step, error),
                }
            }
            Effect::ExecuteCode(step) => {
                match command::build_execution(
                    loaded,
                    now,
                    step,
                    inputs,
                    self.token_keys.as_deref(),
                ) {
                    Ok(execute) => {
                        let execute = mesh::CodeExecute {
                            may_have_been_sent: may_have_been_sent(step),
                            ..execute
                        };
                        let code = subject::CodeExecute::new(command::pool(loaded), task);
                        self.dispatch(
                            loaded,
                            Queue::Code(command::pool(loaded)),
                            step.id,
                            &code,
                            &execute,
                        )
                        .await
                        .map(|result| StepResult { round: step.round, ..result })
                    }
                    Err(error) => failed(step.id, error),
                }
            }
            Effect::CancelModel(step, reason) => {
                self.broadcast_cancel(subject::Service::Providers, task, *step, reason).await;
                if let Some(uncalled) = self.cancel_untaken_call(now, *step).await {
                    return Some(uncalled);
                }
                // A call whose worker is gone must not cost money later.
                if let Err(error) = self.bus.withdraw(&model, *step).await {
                    tracing::warn!(%error, "an unwanted model call could not be withdrawn");
                }
                // A worker that has started it reports its usage.
                if loaded.cost_inputs.is_some()
                    && let Err(error) =
                        self.store.step_abandon(*step, clock::now() + USAGE_REPORT_TIMEOUT).await
                {
                    tracing::warn!(%error, "the reservation of a call is not released early");
                }
                None
            }
            Effect::CancelCode(step, reason) => {
                self.broadcast_cancel(subject::Service::Interpreter, task, *step, reason).await;
                // Also cancels model calls of its scripts, and of programs that work for the task.
                self.broadcast_cancel(subject::Service::Providers, task, *step, reason).await;
                self.cancel_unstarted_scripts(now, *step, reason).await
            }
            Effect::EndCode(step) => {
                self.end_code(loaded, *step, reported);
                None
            }
        }
    }

    async fn build_answer(
        &self,
        loaded: &LoadedTask,
        step: &Step,
        inputs: &CommandInputs,
    ) -> Result<mesh::ModelInvoke, command::Error> {
        let pool = command::pool(loaded);
        match self.catalog.get(&pool, &loaded.workspace).await {
            Ok(catalog) => command::build_answer(loaded, step, inputs, &catalog),
            Err(source) => Err(command::Error::NoCatalog { pool, source }),
        }
    }

    /// Publishes a command to its work queue. A lost command is noticed when the task checks its
    /// step. One that can never be queued ends the step.
    async fn dispatch<A>(
        &self,
        loaded: &LoadedTask,
        queue: Queue,
        step: StepId,
        address: &A,
        command: &A::Message,
    ) -> Option<StepResult>
    where
        A: subject::Command,
    {
        let Err(error) = self.bus.publish_once(address, command).await else {
            self.limiter.mark_sent(loaded.task.organization, &queue, loaded.task.id, step);
            return None;
        };
        if error.is_retryable() {
            tracing::warn!(%error, "a command could not be queued; retrying");
            return None;
        }
        let class = match error {
            publish::Error::TooLarge { .. } => FailureClass::ContextTooLong,
            _ => FailureClass::Configuration,
        };
        let failure =
            Failure { class, message: Chain(&error).to_string(), retry_at: None, attempts: 0 };
        Some(StepResult { step, round: 0, outcome: Outcome::Failed(failure) })
    }

    async fn purge_task(&self, loaded: &LoadedTask) -> Result<NextAction, Error> {
        if let Some(step) = &loaded.task.step {
            for service in [subject::Service::Providers, subject::Service::Interpreter] {
                self.broadcast_cancel(service, loaded.task.id, step.id, "the task is deleted")
                    .await;
            }
            let address = subject::ModelInvoke::new(subject::Pool::model_default(), loaded.task.id);
            if let Err(error) = self.bus.withdraw(&address, step.id).await {
                tracing::warn!(%error, "a model call of a deleted task could not be withdrawn");
            }
            self.bus
                .journal()
                .close(step.id)
                .await
                .map_err(|error| Error::Unavailable(error.into()))?;
            self.end_code(loaded, step.id, false);
        }
        self.purge_tree(loaded).await?;
        Ok(NextAction::Deleted)
    }
}

/// Whether an effect is a command to a worker, and so needs inputs.
fn is_command(effect: &Effect) -> bool {
    match effect {
        Effect::InvokeModel(_)
        | Effect::Compact(_)
        | Effect::ExecuteCode(_)
        | Effect::MakeTitle(_) => true,
        Effect::CancelModel(..) | Effect::CancelCode(..) | Effect::EndCode(_) => false,
    }
}

/// The current round of a step.
fn round_of(task: &Task, step: StepId) -> u32 {
    task.step.as_ref().filter(|now| now.id == step).map_or(0, |now| now.round)
}

/// The approval requests of a decision.
fn approval_requests(loaded: &LoadedTask, decision: &Decision) -> Vec<NewApproval> {
    let Some(step) = &loaded.task.step else { return Vec::new() };
    let requests = decision.approval_requests.iter().map(|request| NewApproval {
        id: ApprovalId::from_uuid(Uuid::now_v7()),
        step: step.id,
        request: request.clone(),
        expires_at: step.approvals_expire_at(),
    });
    requests.collect()
}

fn turn_error(decision: &Decision) -> Option<String> {
    use construct_domain::task::TurnOutcome;
    match decision.ended.as_ref()?.outcome {
        TurnOutcome::Completed => None,
        TurnOutcome::Failed
        | TurnOutcome::MaxTurns
        | TurnOutcome::Cancelled
        | TurnOutcome::Interrupted => {
            decision.task.last_error.as_ref().map(|error| error.message.clone())
        }
    }
}

fn count_tool_uses(decision: &Decision) -> BTreeMap<String, i64> {
    let mut uses = BTreeMap::new();
    for message in &decision.appended {
        for block in &message.blocks {
            if let Block::CodeInterpreterResult(result) = block {
                for tool in &result.tool_uses {
                    *uses.entry(tool.name.clone()).or_default() += 1;
                }
            }
        }
    }
    uses
}

/// New ids and jitter for a decision. The time in a step's id is compared with the start of the
/// journals' retention, so it does not come from this machine's clock (ADR 40).
fn new_entropy(now: Timestamp) -> Entropy {
    Entropy {
        step: StepId::from_uuid(id::new_at(now)),
        title_step: StepId::from_uuid(Uuid::now_v7()),
        messages: [MessageId::from_uuid(Uuid::now_v7()), MessageId::from_uuid(Uuid::now_v7())],
        // The low bits of a version 7 UUID are random.
        jitter: (Uuid::now_v7().as_u128() & 0xFFFF) as f64 / 65536.0,
    }
}
