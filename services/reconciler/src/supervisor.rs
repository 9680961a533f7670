//! Supervises the actors: starts one when a message arrives for a task without an actor, and ends
//! it when the task is idle or another replica owns it.
//!
//! Starting, sending and ending all happen here, one after the other. So no message is ever sent to
//! an actor that is about to end.

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

/// Messages to the supervisor.
#[derive(Debug)]
pub(crate) enum Msg {
    /// A worker has reported a result. Bounded by the consumers: each delivers only a limited
    /// number of unacknowledged messages.
    Deliver {
        task: TaskId,
        organization: OrganizationId,
        result: Box<StepResult>,
        receipt: Box<Receipt>,
    },
    /// A task should be reconciled. A lost message is harmless, because the sweep finds the task.
    /// Bounded by the admission queue.
    Wake { task: TaskId, organization: OrganizationId, trace: Context, swept: bool },
    /// A reconcile that a wake caused is over.
    Reconciled { task: TaskId, organization: OrganizationId },
    /// An actor is idle after this number of messages.
    Idle { task: TaskId, taken: u64, actor: ActorId },
    /// The partition assignment has changed.
    AssignmentChanged,
    /// No further messages arrive: finish the accepted ones, then end.
    Drain,
}

#[derive(Debug)]
pub(crate) struct Args {
    pub(crate) reconciler: Arc<Reconciler>,
    pub(crate) slots: Slots,
    /// Maximum number of concurrent reconciles of one organization that wakes cause. More than
    /// there are slots would be useless.
    pub(crate) max_concurrent: usize,
    pub(crate) assignment: watch::Receiver<PartitionAssignment>,
}

#[derive(Debug)]
struct Child {
    actor: ActorRef<actor::Msg>,
    organization: OrganizationId,
    /// Number of messages sent to it.
    sent: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    args: Args,
    admission: AdmissionQueue,
    children: HashMap<TaskId, Child>,
    tasks: HashMap<ActorId, TaskId>,
    /// How often a task's actor has crashed without a successful reconcile in between.
    crashes: HashMap<TaskId, u32>,
}

pub(crate) struct Supervisor;

impl Actor for Supervisor {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, _: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        let admission = AdmissionQueue::new(args.max_concurrent);
        Ok(State {
            args,
            admission,
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
                        tracing::debug!(%task, "too many tasks are queued; the sweep finds this one later")
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
                let assignment = *state.args.assignment.borrow();
                state.admission.retain_assigned(assignment);
                state.args.reconciler.limiter.retain_assigned();
                for (_, child) in
                    state.children.iter().filter(|(task, _)| !assignment.contains_task(**task))
                {
                    // After the messages it already has, which it finishes.
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

    /// The end of a child does not end the supervisor, which is ractor's default. Its
    /// unacknowledged messages are redelivered to a new actor.
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
                tracing::error!(%task, %error, "a task's actor failed; its messages are redelivered");
                let crashes = state.crashes.entry(task).or_default();
                *crashes += 1;
                if *crashes >= FAILURE_THRESHOLD {
                    state.crashes.remove(&task);
                    let (reconciler, reason) =
                        (Arc::clone(&state.args.reconciler), format!("its actor failed: {error}"));
                    let lifecycle = reconciler.lifecycle.clone();
                    lifecycle.spawn_job("quarantine", async move {
                        if let Some(intents) = reconciler.intents(task).await {
                            reconciler.quarantine(task, intents, &reason).await;
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
    /// Sends a message to a task's actor, which is started if necessary.
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
                reconciler: Arc::clone(&self.args.reconciler),
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
            // If the actor has just died, the receipt is dropped and its message redelivered.
            let _ = child.actor.cast(message);
        }
        Ok(())
    }

    /// Admits the task of the organization that has waited longest.
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
