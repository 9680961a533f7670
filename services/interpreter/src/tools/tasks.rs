//! `tasks.…`: other tasks that scripts create, send messages to and wait for.
//!
//! The interpreter has no data about tasks: it asks a reconciler, which handles the same call
//! idempotently. So these calls may be repeated after a crash. A waiting call is not an open
//! request: see [`AwaitOutcome`].

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use construct_bus::{Bus, subject};
use construct_domain::subtask::MAX_WAIT;
use construct_proto::mesh::v1::{
    StepRef, SubtaskRequest, SubtaskResponse, SubtaskState,
    subtask_request::{Await, ListSubtasks, Operation, Send, Spawn},
};
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::definition::{Definition, Effect, Permission, Provider, limits, result_limit};
use super::error::ToolError;
use super::kind::{Kind, NAMES, optional, required};
use super::output::{Field, Output, field, optional_field};
use super::subject::PolicySubject;

/// Time limit of one question; it is asked again after that.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(3);
/// Delay before it is asked again.
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// Longest message, in bytes.
const MAX_MESSAGE_BYTES: usize = 256 << 10;
/// Pico US dollars (10⁻¹²) in a dollar.
const PICO_PER_UNIT: f64 = 1e12;

const MESSAGE: Kind = Kind::Text { min_bytes: 1, max_bytes: MAX_MESSAGE_BYTES };
const ID: Kind = Kind::Text { min_bytes: 1, max_bytes: 64 };
const AGENT: Kind = Kind::Text { min_bytes: 1, max_bytes: 128 };

const STATE: &[Field] = &[
    field("task", Output::Text, "Its id."),
    field("agent", Output::Text, "The name of its agent."),
    field("title", Output::Text, "Its title; may be empty."),
    field(
        "status",
        Output::OneOf(&[
            "running",
            "suspended",
            "completed",
            "failed",
            "cancelled",
            "max_turns",
            "interrupted",
            "deleted",
        ]),
        "Whether it is working, or how its last turn ended.",
    ),
    field("answer", Output::Text, "The final answer of its agent, if it has completed."),
    optional_field("error", Output::Text, "Why it did not complete."),
    field("cost", Output::Number, "Its cost, including its own subtasks, in US dollars."),
    optional_field("note", Output::Text, "How much of a long answer is omitted."),
];

const NO_AGENT: (&str, &str) = ("AgentNotFound", "when there is no such agent.");
const NOT_A_SUBTASK: (&str, &str) =
    ("NotASubtask", "when this task has not spawned such a subtask.");
const QUEUE_FULL: (&str, &str) = ("QueueFull", "when too many messages are queued there.");

pub(super) const SPAWN: Definition = Definition {
    name: "tasks.spawn",
    aliases: &[],
    summary: "Creates a subtask: another agent, or your own, works on a message in a separate conversation. Costs money.",
    description: "Returns at once; tasks.await returns the answer. Subtasks run concurrently. They only know the message.",
    parameters: &[
        required("message", MESSAGE, "Everything the subtask has to know."),
        optional("agent", AGENT, "your own", "Name of the agent."),
        optional(
            "title",
            Kind::Text { min_bytes: 0, max_bytes: 200 },
            "generated from the conversation",
            "A short title for people.",
        ),
        optional(
            "budget",
            Kind::Number { min: 0.000_001, max: 1_000_000.0 },
            "what your own task has left",
            "US dollars that it and its own subtasks may spend.",
        ),
    ],
    output: Output::Object(&[field("task", Output::Text, "The id of the subtask.")]),
    base_tool: None,
    example: "tasks.spawn({ message: \"Summarize …\", agent: \"reader\", budget: 0.5 })",
    errors: &[
        NO_AGENT,
        ("TooManySubtasks", "when this task, or its tree, has too many."),
        ("TooDeep", "when subtasks are nested too deeply."),
    ],
    effect: Effect::External,
    permission: Permission::Tasks,
    subject: agent_of,
    provider: Provider::Host,
    limits: result_limit(1),
};

pub(super) const AWAIT: Definition = Definition {
    name: "tasks.await",
    aliases: &[],
    summary: "Waits until subtasks have ended their turns, for days if necessary, and returns their results.",
    description: "One id returns one result, a list of ids returns the results in the same order. Check status before you use the answer.",
    parameters: &[
        required("tasks", NAMES, "Ids returned by tasks.spawn."),
        optional(
            "timeout_seconds",
            Kind::Integer { min: 0, max: MAX_WAIT.as_secs() },
            "7 days",
            "After this time it returns the current state, with status running.",
        ),
    ],
    output: Output::OneOrMore(&Output::Object(STATE)),
    base_tool: None,
    example: "tasks.await([first.task, second.task], { timeout_seconds: 3600 })",
    errors: &[NOT_A_SUBTASK],
    effect: Effect::Read,
    permission: Permission::Tasks,
    subject: ids_of,
    provider: Provider::Host,
    limits: limits(MAX_WAIT.as_secs(), 512),
};

pub(super) const SEND: Definition = Definition {
    name: "tasks.send",
    aliases: &[],
    summary: "Sends another message to a subtask; it answers after its current work.",
    description: "",
    parameters: &[
        required("task", ID, "The id of the subtask."),
        required("message", MESSAGE, "The message."),
    ],
    output: Output::Nothing,
    base_tool: None,
    example: "tasks.send(first.task, \"Also look at the tests.\")",
    errors: &[NOT_A_SUBTASK, QUEUE_FULL],
    effect: Effect::External,
    permission: Permission::Tasks,
    subject: id_of,
    provider: Provider::Host,
    limits: result_limit(1),
};

pub(super) const PARENT: Definition = Definition {
    name: "tasks.parent",
    aliases: &[],
    summary: "In a subtask: sends a message to the parent task, which receives it after its turn.",
    description: "Your answer is delivered automatically; use this for what cannot wait until then.",
    parameters: &[required("message", MESSAGE, "The message.")],
    output: Output::Nothing,
    base_tool: None,
    example: "tasks.parent(\"The input is incomplete; I continue without …\")",
    errors: &[("NoParent", "when this task is not a subtask."), QUEUE_FULL],
    effect: Effect::External,
    permission: Permission::Tasks,
    subject: no_agent,
    provider: Provider::Host,
    limits: result_limit(1),
};

pub(super) const HAND_OFF: Definition = Definition {
    name: "tasks.hand_off",
    aliases: &[],
    summary: "Hands this conversation over to another agent, from the end of your script on.",
    description: "The other agent sees the whole conversation.",
    parameters: &[
        required("agent", AGENT, "Name of the agent."),
        optional("message", MESSAGE, "none", "Additional information for the agent."),
    ],
    output: Output::Nothing,
    base_tool: None,
    example: "tasks.hand_off(\"lawyer\", \"The user asks about the contract.\")",
    errors: &[NO_AGENT],
    effect: Effect::External,
    permission: Permission::Tasks,
    subject: agent_of,
    provider: Provider::Host,
    limits: result_limit(1),
};

pub(super) const LIST: Definition = Definition {
    name: "tasks.list",
    aliases: &[],
    summary: "Returns all subtasks of this task with their state, oldest first.",
    description: "",
    parameters: &[],
    output: Output::List(&Output::Object(STATE)),
    base_tool: None,
    example: "tasks.list()",
    errors: &[],
    effect: Effect::Read,
    permission: Permission::Tasks,
    subject: no_agent,
    provider: Provider::Host,
    limits: result_limit(512),
};

fn agent_of(args: &Value) -> PolicySubject {
    PolicySubject::Agent(args["agent"].as_str().unwrap_or_default().to_owned())
}

fn id_of(args: &Value) -> PolicySubject {
    PolicySubject::Name(format!("task:{}", args["task"].as_str().unwrap_or_default()))
}

fn ids_of(args: &Value) -> PolicySubject {
    let ids = args["tasks"].as_array().into_iter().flatten().filter_map(Value::as_str);
    PolicySubject::Name(format!("task:{}", ids.collect::<Vec<_>>().join(",")))
}

fn no_agent(_: &Value) -> PolicySubject {
    PolicySubject::Name(String::new())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SpawnArguments {
    message: String,
    #[serde(default)]
    agent: String,
    #[serde(default)]
    title: String,
    budget: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AwaitArguments {
    tasks: Vec<String>,
    timeout_seconds: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SendArguments {
    task: String,
    message: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ParentArguments {
    message: String,
}

/// The outcome of a waiting call.
#[derive(Clone, Debug, PartialEq)]
pub enum AwaitOutcome {
    /// The wait is over; the result of the call.
    Over(Value),
    /// Subtasks are working. The script is suspended, and asks again when it is resumed.
    Pending {
        /// Their ids.
        tasks: Vec<String>,
        /// When the wait times out.
        until: Timestamp,
    },
}

/// Access of the scripts of one step to other tasks. The default has none.
#[derive(Clone, Default)]
pub struct Subtasks {
    bus: Option<Bus>,
    organization: String,
    task: String,
    step: String,
}

impl fmt::Debug for Subtasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subtasks")
            .field("task", &self.task)
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

impl Subtasks {
    /// Access for the scripts of `step`.
    #[must_use]
    pub fn new(bus: Bus, step: &StepRef) -> Self {
        Self {
            bus: Some(bus),
            organization: step.organization_id.clone(),
            task: step.task_id.clone(),
            step: step.step_id.clone(),
        }
    }

    /// Executes every call except waiting ones.
    pub(super) async fn run(
        &self,
        tool: &'static Definition,
        arguments: Value,
        position: (u32, u32),
        cancel: &CancellationToken,
    ) -> Result<Value, ToolError> {
        let operation = match tool.name {
            "tasks.spawn" => {
                let SpawnArguments { message, agent, title, budget } =
                    super::parse(tool, arguments)?;
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "the definition bounds it to a million dollars"
                )]
                let budget_pico_usd = budget.map_or(0, |dollars| (dollars * PICO_PER_UNIT) as i64);
                Operation::Spawn(Spawn { agent, message, title, budget_pico_usd })
            }
            "tasks.send" => {
                let SendArguments { task, message } = super::parse(tool, arguments)?;
                Operation::Send(Send { task, message })
            }
            "tasks.parent" => {
                Operation::ParentMessage(super::parse::<ParentArguments>(tool, arguments)?.message)
            }
            "tasks.hand_off" => {
                Operation::HandOffAgent(arguments["agent"].as_str().unwrap_or_default().to_owned())
            }
            _ => return self.list(tool, position, cancel).await,
        };
        let answer = self.ask(tool, operation, position, cancel).await?;
        Ok(match tool.name {
            "tasks.spawn" => json!({"task": answer.spawned_task}),
            _ => Value::Null,
        })
    }

    /// All subtasks, page by page.
    async fn list(
        &self,
        tool: &Definition,
        position: (u32, u32),
        cancel: &CancellationToken,
    ) -> Result<Value, ToolError> {
        let (mut states, mut after) = (Vec::new(), String::new());
        loop {
            let page =
                self.ask(tool, Operation::List(ListSubtasks { after }), position, cancel).await?;
            after = page.tasks.last().map(|last| last.task.clone()).unwrap_or_default();
            states.extend(page.tasks.into_iter().map(state));
            if !page.has_more || after.is_empty() {
                return Ok(states.into());
            }
        }
    }

    /// Asks whether a wait is over. It began at the start of `time` and times out at its end at the
    /// latest.
    pub(super) async fn wait(
        &self,
        arguments: AwaitArguments,
        is_one: bool,
        time: Range<Timestamp>,
        position: (u32, u32),
        cancel: &CancellationToken,
    ) -> Result<AwaitOutcome, ToolError> {
        let AwaitArguments { tasks, timeout_seconds } = arguments;
        let timeout = timeout_seconds.map_or(MAX_WAIT, Duration::from_secs);
        let until = time.start.saturating_add(timeout).unwrap_or(Timestamp::MAX).min(time.end);
        let at =
            prost_types::Timestamp { seconds: until.as_second(), nanos: until.subsec_nanosecond() };
        let operation = Operation::Await(Await { tasks: tasks.clone(), until: Some(at) });
        let answer = self.ask(&AWAIT, operation, position, cancel).await?;
        if !answer.wait_ended {
            return Ok(AwaitOutcome::Pending { tasks, until });
        }
        let mut states = answer.tasks.into_iter().map(state);
        Ok(AwaitOutcome::Over(if is_one {
            states.next().unwrap_or_default()
        } else {
            states.collect()
        }))
    }

    /// Asks until there is an answer: the reconciler may be unavailable for a while, and questions
    /// are idempotent.
    async fn ask(
        &self,
        tool: &Definition,
        operation: Operation,
        (script, number): (u32, u32),
        cancel: &CancellationToken,
    ) -> Result<SubtaskResponse, ToolError> {
        let Some(bus) = &self.bus else {
            let message = format!("{}: other tasks are not available to scripts here.", tool.name);
            return Err(ToolError::new("TasksUnavailable", message));
        };
        let question = SubtaskRequest {
            organization_id: self.organization.clone(),
            task_id: self.task.clone(),
            step_id: self.step.clone(),
            script,
            number,
            operation: Some(operation),
        };
        let asking = async {
            loop {
                match bus.ask(&subject::Subtasks, &question, QUESTION_TIMEOUT).await {
                    Ok(answer) => return answer,
                    Err(error) => {
                        tracing::warn!(%error, tool = tool.name, "a question about tasks was not answered; retrying");
                        tokio::time::sleep(RETRY_DELAY).await;
                    }
                }
            }
        };
        let answer = tokio::select! {
            answer = asking => answer,
            () = cancel.cancelled() => return Err(ToolError::cancelled(tool.name)),
        };
        match answer.refusal {
            None => Ok(answer),
            Some(refused) => {
                // Definitions list these errors. Other errors of a newer reconciler keep only their
                // message.
                let known = [
                    "TaskOver",
                    "AgentNotFound",
                    "TooDeep",
                    "TooManySubtasks",
                    "NotASubtask",
                    "NoParent",
                    "QueueFull",
                ];
                let name =
                    known.into_iter().find(|name| *name == refused.name).unwrap_or("InternalError");
                Err(ToolError::new(name, format!("{}: {}", tool.name, refused.message)))
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "for a script that compares costs")]
fn state(state: SubtaskState) -> Value {
    let SubtaskState {
        task,
        agent,
        title,
        status,
        answer,
        error,
        cost_pico_usd,
        omitted_answer_bytes,
    } = state;
    let mut value = json!({
        "task": task,
        "agent": agent,
        "title": title,
        "status": status,
        "answer": answer,
        "cost": cost_pico_usd.max(0) as f64 / PICO_PER_UNIT,
    });
    if !error.is_empty() {
        value["error"] = error.into();
    }
    if omitted_answer_bytes > 0 {
        let note = format!(
            "The last {omitted_answer_bytes} bytes of the answer of {} are omitted.",
            value["task"]
        );
        value["note"] = note.into();
    }
    value
}

/// The message for the agent that takes over a conversation, from the arguments of the call.
#[must_use]
pub fn handed_off(arguments: &Value) -> String {
    let text = |name: &str| arguments[name].as_str().unwrap_or_default();
    let message = text("message");
    let colon = if message.is_empty() { "" } else { ": " };
    format!("the agent {} takes over this conversation{colon}{message}", text("agent"))
}
