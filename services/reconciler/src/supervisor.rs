//! Holds the actors: starts one when something comes for a task that has none, and ends it when the task is idle.
//!
//! Starting, handing on and ending all happen here, one after the other, so that nothing is ever handed to an actor
//! that is about to end.

use std::{collections::HashMap, sync::Arc};

use construct_bus::Receipt;
use construct_domain::TaskId;
use construct_proto::mesh::v1::StepResult;
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::Semaphore;

use crate::{
    activation::Activator,
    actor::{self, TaskActor},
};

/// What the supervisor is told.
#[derive(Debug)]
pub(crate) enum Msg {
    /// Something came from the mesh for a task. Bounded by the consumers: each hands over only so many unsettled receipts.
    Deliver { task: TaskId, result: Option<Box<StepResult>>, receipt: Box<Receipt> },
    /// An actor has nothing to do and has taken so many messages.
    Idle { task: TaskId, taken: u64, actor: ActorId },
    /// Nothing comes any more: finish what was handed over, then end.
    Drain,
}

#[derive(Debug)]
pub(crate) struct Args {
    pub(crate) activator: Arc<Activator>,
    pub(crate) slots: Arc<Semaphore>,
}

#[derive(Debug)]
struct Child {
    actor: ActorRef<actor::Msg>,
    /// Messages handed to it.
    given: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    args: Args,
    children: HashMap<TaskId, Child>,
    tasks: HashMap<ActorId, TaskId>,
}

pub(crate) struct Supervisor;

impl Actor for Supervisor {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, _: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        Ok(State { args, children: HashMap::new(), tasks: HashMap::new() })
    }

    async fn handle(&self, myself: ActorRef<Msg>, message: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        match message {
            Msg::Deliver { task, result, receipt } => {
                if !state.children.contains_key(&task) {
                    let args = actor::Args {
                        task,
                        activator: Arc::clone(&state.args.activator),
                        slots: Arc::clone(&state.args.slots),
                        supervisor: myself.clone(),
                    };
                    let (actor, _) = myself.spawn_linked(None, TaskActor, args).await?;
                    state.tasks.insert(actor.get_id(), task);
                    state.children.insert(task, Child { actor, given: 0 });
                }
                if let Some(child) = state.children.get_mut(&task) {
                    child.given += 1;
                    // When the actor has just died, the receipt is dropped and the message comes again.
                    let _ = child.actor.cast(actor::Msg::Look { result, receipt });
                }
            }
            Msg::Idle { task, taken, actor } => {
                let idle = |child: &Child| child.actor.get_id() == actor && child.given == taken;
                if state.children.get(&task).is_some_and(idle) {
                    state.tasks.remove(&actor);
                    if let Some(child) = state.children.remove(&task) {
                        child.actor.stop(None);
                    }
                }
            }
            Msg::Drain => {
                myself.drain_children_and_wait(None).await;
                myself.stop(None);
            }
        }
        Ok(())
    }

    /// A child's end is not ours (which is ractor's default): what it held unsettled comes again, to a new actor.
    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<Msg>,
        event: SupervisionEvent,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let (id, error) = match &event {
            SupervisionEvent::ActorTerminated(actor, ..) => (actor.get_id(), None),
            SupervisionEvent::ActorFailed(actor, error) => (actor.get_id(), Some(error)),
            _ => return Ok(()),
        };
        if let Some(task) = state.tasks.remove(&id) {
            state.children.remove(&task);
            if let Some(error) = error {
                tracing::error!(%task, %error, "a task's actor failed; its messages come again");
            }
        }
        Ok(())
    }
}
