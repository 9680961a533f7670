//! Limits the commands of one organization in a work queue. Further commands wait here, as ids, and
//! their task is reconciled when it is their turn.
//!
//! # Why
//!
//! A work queue is served in the order of arrival. An organization that put a thousand commands
//! there would delay those of all others. So each organization has a number of slots, and a command
//! is sent only with one. A waiting command needs no care: it follows from the task's row, and
//! every reconcile requests it again.
//!
//! # How slots are released
//!
//! A leaked slot would starve an organization, so no caller has to release one. Every way in which
//! a step ends goes through the task's row. After each load and commit,
//! [`InFlightLimiter::release_unneeded`] releases the slots that the row no longer needs. Other
//! rules cover what no reconcile sees:
//!
//! - A task that is deleted or quarantined is forgotten.
//! - A task of another process's partition has no slot.
//! - A slot of a decision that is not committed is released by its [`Permit`].
//! - A slot whose step is past its deadline is given to the next waiting command.
//!
//! # Bounds
//!
//! Each organization has its slots in each queue. At most [`MAX_WAITING`] ids wait in total, of
//! which an organization may have half in one queue. A command beyond that is requested again by a
//! later reconcile.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use construct_bus::Pool;
use construct_domain::{
    OrganizationId, StepId, TaskId,
    task::{Stage, StepState, Task},
};
use construct_runtime::clock;
use jiff::{SignedDuration, Timestamp};
use opentelemetry::Context;
use ractor::ActorRef;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::{assignment::PartitionAssignment, metrics, supervisor};

/// Maximum number of waiting commands of all organizations.
const MAX_WAITING: usize = 100_000;
/// Time after its step's deadline when a slot is reused. By then every reconcile has ended the
/// step.
const SLOT_GRACE_PERIOD: SignedDuration = SignedDuration::from_secs(60);

/// Where a step's command is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommandState {
    /// It has no slot, so it is not in its work queue.
    Queued {
        /// The organization's occupied slots.
        in_flight: usize,
        /// The organization's commands that get a slot before it.
        ahead: usize,
    },
    /// It may be in its work queue.
    MayBeSent,
}

/// A work queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Queue {
    /// Model calls.
    Model,
    /// Scripts of a pool.
    Code(Pool),
}

/// Identifies a step's command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CommandRef {
    pub(crate) step: StepId,
    pub(crate) round: u32,
    /// The step's deadline.
    pub(crate) until: Timestamp,
}

/// Slots of each organization in each queue; 0: unlimited.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InFlightLimits {
    pub(crate) model_calls: usize,
    /// For each pool.
    pub(crate) scripts: usize,
}

/// The slots of the process. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct InFlightLimiter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limits: InFlightLimits,
    /// The partitions of the process. Commands of other tasks are not counted, because this process
    /// would not see what happens to them.
    assignment: watch::Receiver<PartitionAssignment>,
    state: Mutex<State>,
    ready: Notify,
}

#[derive(Debug, Default)]
struct State {
    slots: HashMap<(OrganizationId, Queue), OrganizationSlots>,
    /// Tasks that got a slot after waiting, and must be reconciled.
    ready: Vec<ReadyTask>,
    /// Number of the newest waiting command.
    last_turn: u64,
}

/// The slots of one organization in one queue. A task has at most one command in a queue (ADR 5),
/// and so one slot: a later step takes it over.
#[derive(Debug, Default)]
struct OrganizationSlots {
    occupied: HashMap<TaskId, OccupiedSlot>,
    waiting: HashMap<TaskId, WaitingCommand>,
    order: BTreeMap<u64, TaskId>,
}

#[derive(Debug)]
struct OccupiedSlot {
    command: CommandRef,
    /// Whether the command was sent. One that waited is sent after it gets its slot.
    sent: bool,
}

#[derive(Debug)]
struct WaitingCommand {
    command: CommandRef,
    turn: u64,
    trace: Context,
}

#[derive(Debug)]
struct ReadyTask {
    organization: OrganizationId,
    task: TaskId,
    trace: Context,
}

/// The result of acquiring a slot. A new slot is released with the permit, unless it is
/// [committed](Permit::commit).
#[must_use = "the slot is released when the permit is dropped"]
#[derive(Debug)]
pub(crate) struct Permit {
    granted: bool,
    new: Option<(InFlightLimiter, OrganizationId, Queue, TaskId, CommandRef)>,
}

impl Permit {
    /// Whether the command may be sent. Otherwise it waits, and its task is reconciled when it may.
    pub(crate) const fn is_granted(&self) -> bool {
        self.granted
    }

    /// Keeps the slot, because its decision is committed.
    pub(crate) fn commit(mut self) {
        self.new = None;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some((limiter, organization, queue, task, command)) = self.new.take() {
            limiter.release(organization, &queue, task, command.step);
        }
    }
}

impl CommandRef {
    fn is_same(&self, other: &Self) -> bool {
        self.step == other.step && self.round == other.round
    }

    /// The step of a task that a worker may have, and its queue.
    pub(crate) fn for_task(task: &Task, pool: &Pool) -> Option<(Queue, Self)> {
        let (turn, step) = (task.turn.as_ref()?, task.step.as_ref()?);
        let until = match step.state {
            StepState::InFlight { deadline } | StepState::Cancelling { deadline } => deadline,
            StepState::Backoff { .. } | StepState::Suspended { .. } => return None,
        };
        let queue = match turn.stage {
            Stage::Model | Stage::Compact { .. } => Queue::Model,
            Stage::Code { .. } => Queue::Code(pool.clone()),
        };
        Some((queue, Self { step: step.id, round: step.round, until }))
    }
}

impl InFlightLimiter {
    pub(crate) fn new(
        limits: InFlightLimits,
        assignment: watch::Receiver<PartitionAssignment>,
    ) -> Self {
        Self(Arc::new(Inner { limits, assignment, state: Mutex::default(), ready: Notify::new() }))
    }

    /// Acquires a slot, or again one that was acquired before.
    pub(crate) fn acquire(
        &self,
        organization: OrganizationId,
        queue: Queue,
        task: TaskId,
        command: CommandRef,
        now: Timestamp,
    ) -> Permit {
        let limit = self.limit(&queue);
        let mut state = self.state();
        if limit == 0 || !self.is_assigned(task) {
            return Permit { granted: true, new: None };
        }
        let room = state.count_waiting(None) < MAX_WAITING;
        let State { slots, ready, last_turn } = &mut *state;
        let queue_slots = slots.entry((organization, queue.clone())).or_default();
        let mut new = true;
        if let Some(occupied) = queue_slots.occupied.get_mut(&task) {
            new = !occupied.command.is_same(&command);
            if new {
                *occupied = OccupiedSlot { command, sent: false };
            }
        } else if let Some(waiter) = queue_slots.waiting.get_mut(&task) {
            new = !waiter.command.is_same(&command);
            waiter.command = command;
        } else if room && queue_slots.waiting.len() < MAX_WAITING / 2 {
            *last_turn += 1;
            queue_slots.order.insert(*last_turn, task);
            let trace = tracing::Span::current().context();
            queue_slots.waiting.insert(task, WaitingCommand { command, turn: *last_turn, trace });
        }
        queue_slots.advance(organization, limit, now, ready);
        let granted = queue_slots.occupied.contains_key(&task);
        if granted {
            // The caller knows.
            ready.retain(|ready| ready.task != task);
        }
        self.publish_state(&state);
        Permit { granted, new: new.then(|| (self.clone(), organization, queue, task, command)) }
    }

    /// Releases the slots of a task that its row does not need, for those that wait.
    pub(crate) fn release_unneeded(&self, task: &Task, pool: &Pool, now: Timestamp) {
        let current = CommandRef::for_task(task, pool).map(|(_, command)| command);
        let may_begin =
            matches!(task.step.as_ref().map(|step| &step.state), Some(StepState::InFlight { .. }));
        let is_needed = |command: &CommandRef, sent: bool| {
            // A stopping step may still be running, but must not be started.
            task.title_step == Some(command.step)
                || current.is_some_and(|current| current.is_same(command) && (sent || may_begin))
        };
        let mut state = self.state();
        for queue in [Queue::Model, Queue::Code(pool.clone())] {
            let limit = self.limit(&queue);
            let State { slots, ready, .. } = &mut *state;
            let key = (task.organization, queue);
            let Some(queue_slots) = slots.get_mut(&key) else { continue };
            queue_slots.remove_unless(task.id, is_needed);
            queue_slots.advance(task.organization, limit, now, ready);
            if queue_slots.is_empty() {
                slots.remove(&key);
            }
        }
        self.publish_state(&state);
    }

    /// Whether nothing is known about the command of a step, as after its partition came from
    /// another process.
    pub(crate) fn is_unknown(
        &self,
        organization: OrganizationId,
        queue: &Queue,
        task: TaskId,
        command: &CommandRef,
    ) -> bool {
        if self.limit(queue) == 0 || !self.is_assigned(task) {
            return false;
        }
        let state = self.state();
        let Some(queue_slots) = state.slots.get(&(organization, queue.clone())) else {
            return true;
        };
        let is_command = |other: &CommandRef| other.is_same(command);
        !queue_slots.occupied.get(&task).is_some_and(|occupied| is_command(&occupied.command))
            && !queue_slots.waiting.get(&task).is_some_and(|waiter| is_command(&waiter.command))
    }

    /// Where the command of a step is, for diagnosis; `None` for a task of another process.
    pub(crate) fn command_state(
        &self,
        organization: OrganizationId,
        queue: &Queue,
        task: TaskId,
        step: StepId,
    ) -> Option<CommandState> {
        if !self.is_assigned(task) {
            return None;
        }
        let state = self.state();
        let Some(queue_slots) = state.slots.get(&(organization, queue.clone())) else {
            return Some(CommandState::MayBeSent);
        };
        let waiter = queue_slots.waiting.get(&task).filter(|waiter| waiter.command.step == step);
        Some(waiter.map_or(CommandState::MayBeSent, |waiter| CommandState::Queued {
            in_flight: queue_slots.occupied.len(),
            ahead: queue_slots.order.range(..waiter.turn).count(),
        }))
    }

    /// Counts a queued command, whoever sent it, also beyond the limit.
    pub(crate) fn record_queued(
        &self,
        organization: OrganizationId,
        queue: Queue,
        task: TaskId,
        command: CommandRef,
    ) {
        let mut state = self.state();
        if self.limit(&queue) == 0 || !self.is_assigned(task) {
            return;
        }
        let queue_slots = state.slots.entry((organization, queue)).or_default();
        queue_slots.remove_unless(task, |_, _| false);
        queue_slots.occupied.insert(task, OccupiedSlot { command, sent: true });
        self.publish_state(&state);
    }

    /// The command of this task that has a slot and was not sent yet: it waited, or could not be
    /// sent.
    pub(crate) fn unsent(
        &self,
        organization: OrganizationId,
        queue: &Queue,
        task: TaskId,
    ) -> Option<CommandRef> {
        let state = self.state();
        let occupied = state.slots.get(&(organization, queue.clone()))?.occupied.get(&task)?;
        (!occupied.sent).then_some(occupied.command)
    }

    /// Records that the command of a step was sent.
    pub(crate) fn mark_sent(
        &self,
        organization: OrganizationId,
        queue: &Queue,
        task: TaskId,
        step: StepId,
    ) {
        let mut state = self.state();
        let queue_slots = state.slots.get_mut(&(organization, queue.clone()));
        if let Some(occupied) = queue_slots
            .and_then(|queue_slots| queue_slots.occupied.get_mut(&task))
            .filter(|occupied| occupied.command.step == step)
        {
            occupied.sent = true;
        }
    }

    /// Releases the slot of a step whose command will not be sent.
    pub(crate) fn release(
        &self,
        organization: OrganizationId,
        queue: &Queue,
        task: TaskId,
        step: StepId,
    ) {
        let mut state = self.state();
        let State { slots, ready, .. } = &mut *state;
        if let Some(queue_slots) = slots.get_mut(&(organization, queue.clone())) {
            queue_slots.remove_unless(task, |command, _| command.step != step);
            queue_slots.advance(organization, self.limit(queue), clock::now(), ready);
        }
        self.publish_state(&state);
    }

    /// Forgets a task that is deleted or no longer reconciled.
    pub(crate) fn forget(&self, task: TaskId) {
        self.update_all(|queue_slots| queue_slots.remove_unless(task, |_, _| false));
    }

    /// Forgets the tasks of partitions that another process owns.
    pub(crate) fn retain_assigned(&self) {
        let assignment = *self.0.assignment.borrow();
        self.update_all(|queue_slots| {
            let known = queue_slots.occupied.keys().chain(queue_slots.waiting.keys());
            let foreign: Vec<TaskId> =
                known.filter(|task| !assignment.contains_task(**task)).copied().collect();
            foreign.into_iter().for_each(|task| queue_slots.remove_unless(task, |_, _| false));
        });
    }

    /// Wakes the tasks whose turn it is, until stopped.
    pub(crate) async fn wake_ready_tasks(
        self,
        supervisor: ActorRef<supervisor::Msg>,
        stop: CancellationToken,
    ) -> Result<(), Infallible> {
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = self.0.ready.notified() => {}
            }
            let ready = std::mem::take(&mut self.state().ready);
            for ReadyTask { organization, task, trace } in ready {
                // A lost wake is harmless: the step's check sends the command.
                let _ = supervisor.cast(supervisor::Msg::Wake {
                    task,
                    organization,
                    trace,
                    swept: false,
                });
            }
        }
    }

    fn update_all(&self, mut change: impl FnMut(&mut OrganizationSlots)) {
        let mut state = self.state();
        let State { slots, ready, .. } = &mut *state;
        slots.retain(|(organization, queue), queue_slots| {
            change(queue_slots);
            queue_slots.advance(*organization, self.limit(queue), clock::now(), ready);
            !queue_slots.is_empty()
        });
        self.publish_state(&state);
    }

    fn limit(&self, queue: &Queue) -> usize {
        match queue {
            Queue::Model => self.0.limits.model_calls,
            Queue::Code(_) => self.0.limits.scripts,
        }
    }

    /// Whether this process owns the task's partition.
    pub(crate) fn is_assigned(&self, task: TaskId) -> bool {
        self.0.assignment.borrow().contains_task(task)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes the state: metrics, and a notification if tasks are ready.
    fn publish_state(&self, state: &State) {
        metrics::record_queued_commands(
            state.count_waiting(Some(true)),
            state.count_waiting(Some(false)),
        );
        if !state.ready.is_empty() {
            self.0.ready.notify_one();
        }
    }
}

impl State {
    /// Number of waiting commands: model calls, scripts, or both.
    fn count_waiting(&self, model: Option<bool>) -> usize {
        let is_counted =
            |queue: &Queue| model.is_none_or(|model| model == (*queue == Queue::Model));
        self.slots
            .iter()
            .filter(|((_, queue), _)| is_counted(queue))
            .map(|(_, queue_slots)| queue_slots.waiting.len())
            .sum()
    }
}

impl OrganizationSlots {
    /// Gives free slots to those that have waited longest.
    fn advance(
        &mut self,
        organization: OrganizationId,
        limit: usize,
        now: Timestamp,
        ready: &mut Vec<ReadyTask>,
    ) {
        if self.occupied.len() >= limit && !self.order.is_empty() {
            self.occupied.retain(|_, occupied| {
                now.duration_since(occupied.command.until) < SLOT_GRACE_PERIOD
            });
        }
        while self.occupied.len() < limit {
            let Some((_, task)) = self.order.pop_first() else { return };
            let Some(WaitingCommand { command, trace, .. }) = self.waiting.remove(&task) else {
                continue;
            };
            // A step that has ended needs no slot.
            if command.until > now {
                self.occupied.insert(task, OccupiedSlot { command, sent: false });
                ready.push(ReadyTask { organization, task, trace });
            }
        }
    }

    /// Removes a task's slot, or its place among the waiting, unless `stays` returns true. Its
    /// second argument is whether the command may be in the queue.
    fn remove_unless(&mut self, task: TaskId, stays: impl Fn(&CommandRef, bool) -> bool) {
        if self.occupied.get(&task).is_some_and(|occupied| !stays(&occupied.command, occupied.sent))
        {
            self.occupied.remove(&task);
        }
        if self.waiting.get(&task).is_some_and(|waiter| !stays(&waiter.command, false))
            && let Some(waiter) = self.waiting.remove(&task)
        {
            self.order.remove(&waiter.turn);
        }
    }

    fn is_empty(&self) -> bool {
        self.occupied.is_empty() && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests;
