//! The actor of one task: looks at it one time after another, and wakes itself when the task says so.

use std::{sync::Arc, time::Duration};

use construct_bus::Receipt;
use construct_domain::TaskId;
use construct_proto::mesh::v1::StepResult;
use construct_runtime::telemetry::Chain;
use construct_store::LoadedTask;
use jiff::Timestamp;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::{sync::Semaphore, task::AbortHandle};

use crate::{
    activation::{Activator, Next},
    supervisor,
};

/// How long an actor with nothing to do stays, in case its task goes on at once.
const LINGER: Duration = Duration::from_secs(5);
/// How soon an activation that failed is tried again; doubles with each failure in a row.
const RETRY: Duration = Duration::from_secs(1);
/// The longest pause after a failure.
const LAST_RETRY: Duration = Duration::from_secs(60);
/// The longest one after a failure that passes by itself, such as a database that is away: people's messages must not wait once it is back.
const LAST_RETRY_PASSING: Duration = Duration::from_secs(5);
/// So many failures in a row are taken for lasting: until the pause is over, wakes are not looked into. Otherwise the
/// sweep, which finds the task due each time, would undo the pause.
const LASTING: u32 = 4;
/// An actor does not wait in memory longer than this: the sweep wakes the task.
const LONGEST_TIMER: Duration = Duration::from_secs(60);

/// Why to look.
#[derive(Debug)]
pub(crate) enum Msg {
    /// Something came from the mesh.
    Look {
        /// What a worker reported, if that is what came.
        result: Option<Box<StepResult>>,
        /// Acknowledged when the outcome is durable.
        receipt: Box<Receipt>,
    },
    /// The task wanted to be looked at now.
    Timer,
    /// Nothing came for a while.
    Linger,
}

/// What an actor is started with.
#[derive(Debug)]
pub(crate) struct Args {
    pub(crate) task: TaskId,
    pub(crate) activator: Arc<Activator>,
    /// Bounds the activations of the process; an actor waits its turn here.
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) supervisor: ActorRef<supervisor::Msg>,
}

#[derive(Debug)]
pub(crate) struct State {
    args: Args,
    /// Messages taken from the supervisor, so that it can tell whether one is still on its way.
    taken: u64,
    timer: Option<AbortHandle>,
    /// Activations in a row that failed.
    failures: u32,
    /// The task as the last activation left it. Held as long as the actor is, which is not long without anything to do.
    known: Option<Box<LoadedTask>>,
}

pub(crate) struct TaskActor;

impl Actor for TaskActor {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, _: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        Ok(State { args, taken: 0, timer: None, failures: 0, known: None })
    }

    async fn handle(&self, myself: ActorRef<Msg>, message: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        let (result, receipt) = match message {
            Msg::Look { result, receipt } => {
                state.taken += 1;
                if state.failures >= LASTING && result.is_none() {
                    receipt.ack().await;
                    return Ok(());
                }
                (result, Some(receipt))
            }
            Msg::Timer => (None, None),
            Msg::Linger => {
                let idle = supervisor::Msg::Idle { task: state.args.task, taken: state.taken, actor: myself.get_id() };
                state.args.supervisor.cast(idle)?;
                return Ok(());
            }
        };
        if let Some(timer) = state.timer.take() {
            timer.abort();
        }
        let after = look(&state.args, &mut state.known, result.map(|result| *result), receipt).await?;
        let (delay, next): (Duration, fn() -> Msg) = match after {
            After::Idle => (LINGER, || Msg::Linger),
            After::Timer(delay) if delay > LONGEST_TIMER => (LINGER, || Msg::Linger),
            After::Timer(delay) => (delay, || Msg::Timer),
            After::Failed { passing } => (pause(state.failures, passing), || Msg::Timer),
        };
        state.failures = if matches!(after, After::Failed { .. }) { state.failures.saturating_add(1) } else { 0 };
        state.timer = Some(myself.send_after(delay, next).abort_handle());
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<Msg>, state: &mut State) -> Result<(), ActorProcessingErr> {
        if let Some(timer) = state.timer.take() {
            timer.abort();
        }
        Ok(())
    }
}

enum After {
    Idle,
    Timer(Duration),
    Failed {
        /// Whether it passes without anybody's doing.
        passing: bool,
    },
}

/// The pause after a failure that followed on `before` others.
fn pause(before: u32, passing: bool) -> Duration {
    let longest = if passing { LAST_RETRY_PASSING } else { LAST_RETRY };
    RETRY.saturating_mul(2_u32.saturating_pow(before.min(16))).min(longest)
}

/// One activation, and the acknowledgement of what caused it. An error is not the actor's end: the message comes again,
/// and without one the timer does.
async fn look(
    args: &Args,
    known: &mut Option<Box<LoadedTask>>,
    result: Option<StepResult>,
    receipt: Option<Box<Receipt>>,
) -> Result<After, ActorProcessingErr> {
    let span = tracing::info_span!("reconciler.task.look", task = %args.task);
    if let Some(receipt) = &receipt {
        receipt.continue_trace(&span);
    }
    let reported = result.is_some();
    let _slot = match args.slots.try_acquire() {
        Ok(slot) => slot,
        Err(_) => {
            // While it waits its turn, what it holds must not be delivered again.
            let _waiting = receipt.as_ref().map(|receipt| receipt.keep_alive());
            args.slots.acquire().await?
        }
    };
    let activation = tracing::Instrument::instrument(args.activator.activate(args.task, result, known), span);
    match (activation.await, receipt) {
        (Ok(next), receipt) => {
            if let Some(receipt) = receipt {
                receipt.ack().await;
            }
            Ok(match next {
                Next::Idle | Next::Gone => After::Idle,
                Next::Wake(time) => {
                    let delay = time.duration_since(Timestamp::now());
                    After::Timer(Duration::try_from(delay).unwrap_or_default())
                }
            })
        }
        (Err(error), receipt) => {
            if error.is_retryable() {
                tracing::warn!(task = %args.task, error = %Chain(&error), "the task could not be looked at; it is tried again");
            } else {
                tracing::error!(task = %args.task, error = %Chain(&error), "the task could not be looked at; it is tried again");
            }
            match receipt {
                Some(receipt) if reported => receipt.nak(RETRY).await,
                // A wake says nothing that the timer and the sweep don't.
                Some(receipt) => receipt.ack().await,
                None => {}
            }
            Ok(After::Failed { passing: error.is_retryable() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_after_failures_double_to_a_minute_or_less_when_they_pass() {
        let pauses = |passing| [0, 1, 2, 5, 6, 7, u32::MAX].map(|before| pause(before, passing).as_secs());
        assert_eq!(pauses(false), [1, 2, 4, 32, 60, 60, 60]);
        assert_eq!(pauses(true), [1, 2, 4, 5, 5, 5, 5]);
    }
}
