//! How many commands of one organization stand in a work queue at a time: what is beyond that waits
//! here, as ids, and its task is looked at when it is its turn.
//!
//! A work queue is served in the order in which commands came. An organization that put a thousand
//! of them there would have everybody else's wait behind them; so each has so many places, and a
//! command is sent only with one. A command that is withheld needs no care: it follows from the
//! task's row, and is asked for again whenever that is looked at.
//!
//! A place that is never given back would be an organization that stands still, so nobody has to
//! think of giving one back. Whatever is found or left in a task's row is told to
//! [`Window::settle`], which takes the places that the row does not want; every way on which a step
//! ends goes through the row. What no look can see has rules of its own: a task that is gone or put
//! aside is forgotten, one of another process's partition has no place, one that was asked for by a
//! decision that is not committed is given back by its [`Ticket`], and a place whose step's
//! deadline is past is given to who waits.
//!
//! Bounds: places of each organization in each queue; [`WAITING`] ids of all together, of which no
//! organization may have more than half in one queue. What is beyond them asks again when its task
//! is looked at anyway.

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

use crate::{metrics, share::Share, supervisor};

/// Commands that wait, of all organizations.
const WAITING: usize = 100_000;
/// How long after its step's deadline a place is somebody else's. By then the step was ended,
/// wherever anybody looks at its task.
const GRACE: SignedDuration = SignedDuration::from_secs(60);

/// What is known of a step's command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    /// It has no place, so it is not in its queue.
    Waits {
        /// The organization's places that are taken.
        held: usize,
        /// The organization's commands that get a place before it.
        before: usize,
    },
    /// It may be in its queue.
    Goes,
}

/// A work queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Queue {
    /// Of model calls.
    Model,
    /// Of a pool's scripts.
    Code(Pool),
}

/// What a command is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) step: StepId,
    pub(crate) round: u32,
    /// The step's deadline.
    pub(crate) until: Timestamp,
}

/// Places of each organization in each queue; 0: any number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) model_calls: usize,
    /// Of each pool.
    pub(crate) scripts: usize,
}

/// The places of the process. Clones are the same places.
#[derive(Debug, Clone)]
pub(crate) struct Window(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limits: Limits,
    /// The partitions of the process: commands of other tasks are not counted, because nobody here
    /// would see what becomes of them.
    share: watch::Receiver<Share>,
    state: Mutex<State>,
    called: Notify,
}

#[derive(Debug, Default)]
struct State {
    lanes: HashMap<(OrganizationId, Queue), Lane>,
    /// Tasks that got a place after they had waited, and are to be looked at.
    called: Vec<Called>,
    /// Counts who begins to wait.
    turns: u64,
}

/// One organization's in one queue. A task has at most one command in a queue (ADR 5), and so one
/// place: a later step takes it over.
#[derive(Debug, Default)]
struct Lane {
    held: HashMap<TaskId, Held>,
    waiting: HashMap<TaskId, Waits>,
    order: BTreeMap<u64, TaskId>,
}

#[derive(Debug)]
struct Held {
    work: Work,
    /// Whether the command has left. One that waited has not when it gets its place.
    sent: bool,
}

#[derive(Debug)]
struct Waits {
    work: Work,
    turn: u64,
    trace: Context,
}

#[derive(Debug)]
struct Called {
    organization: OrganizationId,
    task: TaskId,
    trace: Context,
}

/// The answer to who asks for a place. What was asked for is given back with it, unless it is
/// [kept](Ticket::keep).
#[must_use = "the place is given back with the ticket"]
#[derive(Debug)]
pub(crate) struct Ticket {
    goes: bool,
    new: Option<(Window, OrganizationId, Queue, TaskId, Work)>,
}

impl Ticket {
    /// Whether the command may be sent. One that may not waits; its task is looked at when it may.
    pub(crate) const fn goes(&self) -> bool {
        self.goes
    }

    /// What it was asked for is committed.
    pub(crate) fn keep(mut self) {
        self.new = None;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some((window, organization, queue, task, work)) = self.new.take() {
            window.give_back(organization, &queue, task, work.step);
        }
    }
}

impl Work {
    fn is(&self, other: &Self) -> bool {
        self.step == other.step && self.round == other.round
    }

    /// The step of a task that a worker may have, and its queue.
    pub(crate) fn of(task: &Task, pool: &Pool) -> Option<(Queue, Self)> {
        let (turn, step) = (task.turn.as_ref()?, task.step.as_ref()?);
        let until = match step.state {
            StepState::InFlight { deadline } | StepState::Cancelling { deadline } => deadline,
            StepState::Backoff { .. } | StepState::Parked { .. } => return None,
        };
        let queue = match turn.stage {
            Stage::Model | Stage::Compact { .. } => Queue::Model,
            Stage::Code { .. } => Queue::Code(pool.clone()),
        };
        Some((queue, Self { step: step.id, round: step.round, until }))
    }
}

impl Window {
    pub(crate) fn new(limits: Limits, share: watch::Receiver<Share>) -> Self {
        Self(Arc::new(Inner { limits, share, state: Mutex::default(), called: Notify::new() }))
    }

    /// Asks for a place, or again for one that was asked for before.
    pub(crate) fn ask(
        &self,
        organization: OrganizationId,
        queue: Queue,
        task: TaskId,
        work: Work,
        now: Timestamp,
    ) -> Ticket {
        let limit = self.limit(&queue);
        let mut state = self.state();
        if limit == 0 || !self.is_ours(task) {
            return Ticket { goes: true, new: None };
        }
        let room = state.waiting(None) < WAITING;
        let State { lanes, called, turns } = &mut *state;
        let lane = lanes.entry((organization, queue.clone())).or_default();
        let mut new = true;
        if let Some(held) = lane.held.get_mut(&task) {
            new = !held.work.is(&work);
            if new {
                *held = Held { work, sent: false };
            }
        } else if let Some(waits) = lane.waiting.get_mut(&task) {
            new = !waits.work.is(&work);
            waits.work = work;
        } else if room && lane.waiting.len() < WAITING / 2 {
            *turns += 1;
            lane.order.insert(*turns, task);
            let trace = tracing::Span::current().context();
            lane.waiting.insert(task, Waits { work, turn: *turns, trace });
        }
        lane.advance(organization, limit, now, called);
        let goes = lane.held.contains_key(&task);
        if goes {
            // It knows.
            called.retain(|called| called.task != task);
        }
        self.tell(&state);
        Ticket { goes, new: new.then(|| (self.clone(), organization, queue, task, work)) }
    }

    /// Takes the places of a task that its row does not want, and gives them to who waits.
    pub(crate) fn settle(&self, task: &Task, pool: &Pool, now: Timestamp) {
        let current = Work::of(task, pool).map(|(_, work)| work);
        let may_begin =
            matches!(task.step.as_ref().map(|step| &step.state), Some(StepState::InFlight { .. }));
        let wanted = |work: &Work, sent: bool| {
            // A step that was told to stop may still be worked on, but must not be begun.
            task.title_step == Some(work.step)
                || current.is_some_and(|current| current.is(work) && (sent || may_begin))
        };
        let mut state = self.state();
        for queue in [Queue::Model, Queue::Code(pool.clone())] {
            let limit = self.limit(&queue);
            let State { lanes, called, .. } = &mut *state;
            let key = (task.organization, queue);
            let Some(lane) = lanes.get_mut(&key) else { continue };
            lane.remove_unless(task.id, wanted);
            lane.advance(task.organization, limit, now, called);
            if lane.is_empty() {
                lanes.remove(&key);
            }
        }
        self.tell(&state);
    }

    /// Whether nothing is known of a step that a worker may have, as after its partition came from
    /// another process.
    pub(crate) fn is_news(
        &self,
        organization: OrganizationId,
        queue: &Queue,
        task: TaskId,
        work: &Work,
    ) -> bool {
        if self.limit(queue) == 0 || !self.is_ours(task) {
            return false;
        }
        let state = self.state();
        let Some(lane) = state.lanes.get(&(organization, queue.clone())) else { return true };
        let known = |known: &Work| known.is(work);
        !lane.held.get(&task).is_some_and(|held| known(&held.work))
            && !lane.waiting.get(&task).is_some_and(|waits| known(&waits.work))
    }

    /// What is known of the command of a step, for people who ask; none of a task that another
    /// process looks after.
    pub(crate) fn find(
        &self,
        organization: OrganizationId,
        queue: &Queue,
        task: TaskId,
        step: StepId,
    ) -> Option<Known> {
        if !self.is_ours(task) {
            return None;
        }
        let state = self.state();
        let Some(lane) = state.lanes.get(&(organization, queue.clone())) else {
            return Some(Known::Goes);
        };
        let waits = lane.waiting.get(&task).filter(|waits| waits.work.step == step);
        Some(waits.map_or(Known::Goes, |waits| Known::Waits {
            held: lane.held.len(),
            before: lane.order.range(..waits.turn).count(),
        }))
    }

    /// Counts a command that stands in the queue, whoever sent it, also beyond the bound.
    pub(crate) fn count(
        &self,
        organization: OrganizationId,
        queue: Queue,
        task: TaskId,
        work: Work,
    ) {
        let mut state = self.state();
        if self.limit(&queue) == 0 || !self.is_ours(task) {
            return;
        }
        let lane = state.lanes.entry((organization, queue)).or_default();
        lane.remove_unless(task, |_, _| false);
        lane.held.insert(task, Held { work, sent: true });
        self.tell(&state);
    }

    /// The command of this task that got its place after it had waited, or could not be sent, and
    /// is to be sent now.
    pub(crate) fn due(
        &self,
        organization: OrganizationId,
        queue: &Queue,
        task: TaskId,
    ) -> Option<Work> {
        let state = self.state();
        let held = state.lanes.get(&(organization, queue.clone()))?.held.get(&task)?;
        (!held.sent).then_some(held.work)
    }

    /// The command of a step has left.
    pub(crate) fn sent(
        &self,
        organization: OrganizationId,
        queue: &Queue,
        task: TaskId,
        step: StepId,
    ) {
        let mut state = self.state();
        let lane = state.lanes.get_mut(&(organization, queue.clone()));
        if let Some(held) =
            lane.and_then(|lane| lane.held.get_mut(&task)).filter(|held| held.work.step == step)
        {
            held.sent = true;
        }
    }

    /// The command of a step is not sent, nor asked for again.
    pub(crate) fn give_back(
        &self,
        organization: OrganizationId,
        queue: &Queue,
        task: TaskId,
        step: StepId,
    ) {
        let mut state = self.state();
        let State { lanes, called, .. } = &mut *state;
        if let Some(lane) = lanes.get_mut(&(organization, queue.clone())) {
            lane.remove_unless(task, |work, _| work.step != step);
            lane.advance(organization, self.limit(queue), clock::now(), called);
        }
        self.tell(&state);
    }

    /// A task is gone, or nobody looks at it any more.
    pub(crate) fn forget(&self, task: TaskId) {
        self.in_all_lanes(|lane| lane.remove_unless(task, |_, _| false));
    }

    /// Forgets the tasks that another process takes care of.
    pub(crate) fn keep_own(&self) {
        let share = *self.0.share.borrow();
        self.in_all_lanes(|lane| {
            let known = lane.held.keys().chain(lane.waiting.keys());
            let gone: Vec<TaskId> = known.filter(|task| !share.has_task(**task)).copied().collect();
            gone.into_iter().for_each(|task| lane.remove_unless(task, |_, _| false));
        });
    }

    /// Has the tasks looked at whose turn it is, until told to stop.
    pub(crate) async fn call(
        self,
        supervisor: ActorRef<supervisor::Msg>,
        stop: CancellationToken,
    ) -> Result<(), Infallible> {
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = self.0.called.notified() => {}
            }
            let called = std::mem::take(&mut self.state().called);
            for Called { organization, task, trace } in called {
                // One that is lost here is sent when its step is looked at again.
                let _ = supervisor.cast(supervisor::Msg::Wake {
                    task,
                    organization,
                    trace,
                    swept: false,
                });
            }
        }
    }

    fn in_all_lanes(&self, mut change: impl FnMut(&mut Lane)) {
        let mut state = self.state();
        let State { lanes, called, .. } = &mut *state;
        lanes.retain(|(organization, queue), lane| {
            change(lane);
            lane.advance(*organization, self.limit(queue), clock::now(), called);
            !lane.is_empty()
        });
        self.tell(&state);
    }

    fn limit(&self, queue: &Queue) -> usize {
        match queue {
            Queue::Model => self.0.limits.model_calls,
            Queue::Code(_) => self.0.limits.scripts,
        }
    }

    /// Whether this process looks after the task.
    pub(crate) fn is_ours(&self, task: TaskId) -> bool {
        self.0.share.borrow().has_task(task)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets who is called, and whoever watches, know of a change.
    fn tell(&self, state: &State) {
        metrics::withheld(state.waiting(Some(true)), state.waiting(Some(false)));
        if !state.called.is_empty() {
            self.0.called.notify_one();
        }
    }
}

impl State {
    /// How many commands wait: model calls, scripts, or both.
    fn waiting(&self, model: Option<bool>) -> usize {
        let wanted = |queue: &Queue| model.is_none_or(|model| model == (*queue == Queue::Model));
        self.lanes
            .iter()
            .filter(|((_, queue), _)| wanted(queue))
            .map(|(_, lane)| lane.waiting.len())
            .sum()
    }
}

impl Lane {
    /// Gives the places that are free to who waits longest.
    fn advance(
        &mut self,
        organization: OrganizationId,
        limit: usize,
        now: Timestamp,
        called: &mut Vec<Called>,
    ) {
        if self.held.len() >= limit && !self.order.is_empty() {
            self.held.retain(|_, held| now.duration_since(held.work.until) < GRACE);
        }
        while self.held.len() < limit {
            let Some((_, task)) = self.order.pop_first() else { return };
            let Some(Waits { work, trace, .. }) = self.waiting.remove(&task) else { continue };
            // A step that is over needs none.
            if work.until > now {
                self.held.insert(task, Held { work, sent: false });
                called.push(Called { organization, task, trace });
            }
        }
    }

    /// Removes a task's place, or ends its waiting, unless `stays` says otherwise, which is told
    /// whether the command may be in the queue.
    fn remove_unless(&mut self, task: TaskId, stays: impl Fn(&Work, bool) -> bool) {
        if self.held.get(&task).is_some_and(|held| !stays(&held.work, held.sent)) {
            self.held.remove(&task);
        }
        if self.waiting.get(&task).is_some_and(|waits| !stays(&waits.work, false))
            && let Some(waits) = self.waiting.remove(&task)
        {
            self.order.remove(&waits.turn);
        }
    }

    fn is_empty(&self) -> bool {
        self.held.is_empty() && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests;
