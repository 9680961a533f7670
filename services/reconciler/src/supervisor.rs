//! Holds the actors: starts one when something comes for a task that has none, and ends it when the
//! task is idle, or another replica's.
//!
//! Starting, handing on and ending all happen here, one after the other, so that nothing is ever
//! handed to an actor that is about to end.

use std::{collections::HashMap, sync::Arc};

use construct_bus::Receipt;
use construct_domain::{OrganizationId, TaskId};
use construct_proto::mesh::v1::StepResult;
use opentelemetry::Context;
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::watch;

use crate::{
    actor::{self, FAILURE_THRESHOLD, TaskActor},
    admission::{Admission, AdmissionQueue},
    assignment::PartitionAssignment,
    metrics,
    reconcile::Reconciler,
    slots::Slots,
};

/// What the supervisor is told.
#[derive(Debug)]
pub(crate) enum Msg {
    /// A worker has reported. Bounded by the consumers: each hands over only so many unsettled
    /// receipts.
    Deliver {
        task: TaskId,
        organization: OrganizationId,
        result: Box<StepResult>,
        receipt: Box<Receipt>,
    },
    /// A task is to be looked at; nothing is lost with this message, because the sweep would find
    /// the task. Bounded by the gate.
    Wake { task: TaskId, organization: OrganizationId, trace: Context, swept: bool },
    /// A look that a wake had caused is over.
    Reconciled { task: TaskId, organization: OrganizationId },
    /// An actor has nothing to do and has taken so many messages.
    Idle { task: TaskId, taken: u64, actor: ActorId },
    /// The share of the partitions is another one.
    AssignmentChanged,
    /// Nothing comes any more: finish what was handed over, then end.
    Drain,
}

#[derive(Debug)]
pub(crate) struct Args {
    pub(crate) activator: Arc<Reconciler>,
    pub(crate) slots: Slots,
    /// Looks that wakes of one organization may cause at a time: there is no use in more than there
    /// are slots.
    pub(crate) max_concurrent: usize,
    pub(crate) assignment: watch::Receiver<PartitionAssignment>,
}

#[derive(Debug)]
struct Child {
    actor: ActorRef<actor::Msg>,
    organization: OrganizationId,
    /// Messages handed to it.
    sent: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    args: Args,
    admission: AdmissionQueue,
    children: HashMap<TaskId, Child>,
    tasks: HashMap<ActorId, TaskId>,
    /// How often the actors of a task failed, with no look between that went well.
    crashes: HashMap<TaskId, u32>,
}

pub(crate) struct Supervisor;

impl Actor for Supervisor {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, _: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        let gate = AdmissionQueue::new(args.max_concurrent);
        Ok(State {
            args,
            admission: gate,
            children: HashMap::new(),
            tasks: HashMap::new(),
            crashes: HashMap::new(),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<Msg>,
        message: Msg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            Msg::Deliver { task, organization, result, receipt } => {
                state
                    .send_to_actor(
                        &myself,
                        organization,
                        task,
                        actor::Msg::Report { result, receipt },
                    )
                    .await?;
            }
            Msg::Wake { task, organization, trace, swept } => {
                match state.admission.admit(organization, task, trace, swept) {
                    Admission::Admitted(trace) => {
                        state
                            .send_to_actor(
                                &myself,
                                organization,
                                task,
                                actor::Msg::Reconcile { trace },
                            )
                            .await?
                    }
                    Admission::Queued => {}
                    Admission::Dropped => {
                        tracing::debug!(%task, "too many tasks wait; the sweep finds this one later")
                    }
                }
            }
            Msg::Reconciled { task, organization } => {
                state.crashes.remove(&task);
                state.finish_reconcile(&myself, organization, task).await?;
            }
            Msg::Idle { task, taken, actor } => {
                let idle = |child: &Child| child.actor.get_id() == actor && child.sent == taken;
                if state.children.get(&task).is_some_and(idle) {
                    state.tasks.remove(&actor);
                    if let Some(child) = state.children.remove(&task) {
                        child.actor.stop(None);
                    }
                    metrics::record_actors(state.children.len());
                }
            }
            Msg::AssignmentChanged => {
                let share = *state.args.assignment.borrow();
                state.admission.retain_assigned(share);
                state.args.activator.limiter.retain_assigned();
                for (_, child) in
                    state.children.iter().filter(|(task, _)| !share.contains_task(**task))
                {
                    // Behind what it was handed, which it finishes.
                    let _ = child.actor.cast(actor::Msg::Expire);
                }
            }
            Msg::Drain => {
                state.admission.retain_assigned(PartitionAssignment::EMPTY);
                myself.drain_children_and_wait(None).await;
                myself.stop(None);
            }
        }
        Ok(())
    }

    /// A child's end is not ours (which is ractor's default): what it held unsettled comes again,
    /// to a new actor.
    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Msg>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let (id, error) = match &event {
            SupervisionEvent::ActorTerminated(actor, ..) => (actor.get_id(), None),
            SupervisionEvent::ActorFailed(actor, error) => (actor.get_id(), Some(error)),
            _ => return Ok(()),
        };
        if let Some(task) = state.tasks.remove(&id) {
            let child = state.children.remove(&task);
            metrics::record_actors(state.children.len());
            if let Some(error) = error {
                tracing::error!(%task, %error, "a task's actor failed; its messages come again");
                let crashes = state.crashes.entry(task).or_default();
                *crashes += 1;
                if *crashes >= FAILURE_THRESHOLD {
                    state.crashes.remove(&task);
                    let (activator, reason) =
                        (Arc::clone(&state.args.activator), format!("its actor failed: {error}"));
                    let lifecycle = activator.lifecycle.clone();
                    lifecycle.spawn_job("park", async move {
                        if let Some(intents) = activator.intents(task).await {
                            activator.quarantine(task, intents, &reason).await;
                        }
                    });
                }
            }
            if let Some(child) = child {
                state.finish_reconcile(&myself, child.organization, task).await?;
            }
        }
        Ok(())
    }
}

impl State {
    /// Hands something to a task's actor, which is started unless it is there.
    async fn send_to_actor(
        &mut self,
        myself: &ActorRef<Msg>,
        organization: OrganizationId,
        task: TaskId,
        message: actor::Msg,
    ) -> Result<(), ActorProcessingErr> {
        if !self.children.contains_key(&task) {
            let args = actor::Args {
                task,
                organization,
                activator: Arc::clone(&self.args.activator),
                slots: self.args.slots.clone(),
                assignment: self.args.assignment.clone(),
                supervisor: myself.clone(),
            };
            let (actor, _) = myself.spawn_linked(None, TaskActor, args).await?;
            self.tasks.insert(actor.get_id(), task);
            self.children.insert(task, Child { actor, organization, sent: 0 });
            metrics::record_actors(self.children.len());
        }
        if let Some(child) = self.children.get_mut(&task) {
            child.sent += 1;
            // When the actor has just died, a receipt is dropped and its message comes again.
            let _ = child.actor.cast(message);
        }
        Ok(())
    }

    /// Lets in whoever of the organization waits longest.
    async fn finish_reconcile(
        &mut self,
        myself: &ActorRef<Msg>,
        organization: OrganizationId,
        task: TaskId,
    ) -> Result<(), ActorProcessingErr> {
        match self.admission.finish(organization, task) {
            Some((next, trace)) => {
                self.send_to_actor(myself, organization, next, actor::Msg::Reconcile { trace })
                    .await
            }
            None => Ok(()),
        }
    }
}
