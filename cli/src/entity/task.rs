//! Tasks.

mod pinned;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use construct_proto::v1::{
    CancelTaskRequest, CreateTaskRequest, DeleteTaskRequest, ForkTaskRequest, GetTaskRequest,
    ListTasksRequest, ResumeTaskRequest, RetryTaskRequest, RewindTaskRequest, SubtaskTotals,
    SuspendTaskRequest, Task, TaskPhase, TaskSpec, TaskStatus, TurnOutcome, UpdateTaskRequest,
    list_tasks_request::Filter,
};
use jiff::Timestamp;

use super::{ChangeArgs, WriteArgs, age, budget, id, metadata_details, unless_zero};
use crate::{
    agents, exec,
    failure::Failure,
    gateway::{Gateway, call},
    money::{self, Limit},
    output::{Entity, OutputArgs},
    page::ListArgs,
    policy::{self, PolicyArgs},
    render::{self, phase_name},
    text::{clip, count, thousands},
    time,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Phase {
    AwaitInput,
    InvokeModel,
    ExecuteTools,
    AwaitApproval,
    AwaitSubtasks,
    Suspended,
}

impl From<Phase> for TaskPhase {
    fn from(phase: Phase) -> Self {
        match phase {
            Phase::AwaitInput => Self::AwaitInput,
            Phase::InvokeModel => Self::InvokeModel,
            Phase::ExecuteTools => Self::ExecuteTools,
            Phase::AwaitApproval => Self::AwaitApproval,
            Phase::AwaitSubtasks => Self::AwaitSubtasks,
            Phase::Suspended => Self::Suspended,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum TaskCommand {
    /// Create a task without a message.
    Create(Create),
    /// Show a task.
    Get(One),
    /// List tasks.
    List(List),
    /// Change the given fields of a task.
    Update(Update),
    /// Stop the running turn, and delete the task with its messages.
    Delete {
        #[command(flatten)]
        write: Write,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Suspend the task until it is resumed.
    Suspend {
        #[command(flatten)]
        write: Write,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Resume a suspended task.
    Resume {
        #[command(flatten)]
        write: Write,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Continue a turn that failed or reached its limit of model calls, or reconcile a quarantined
    /// task again.
    Retry {
        #[command(flatten)]
        write: Write,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Cancel the running turn, and drop queued messages.
    Cancel {
        #[command(flatten)]
        write: Write,
        /// The reason, recorded in the transcript.
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Rewind the task to before a message: it and all later messages are superseded.
    Rewind {
        #[command(flatten)]
        write: Write,
        /// The message's id.
        message: String,
        /// Keep the message itself, and supersede only later ones.
        #[arg(long)]
        keep: bool,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Fork: create a task with a copy of the messages up to a message.
    Fork(Fork),
    /// Pin a fact: it is part of every prompt from the next model call on.
    Pin {
        /// The task's id.
        task: String,
        /// The fact.
        text: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Unpin a fact.
    Unpin {
        /// The task's id.
        task: String,
        /// The fact, or its number as `task get` shows it.
        #[arg(value_name = "N|TEXT")]
        fact: String,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Fork {
    /// The id of the task to copy.
    task: String,
    /// The id of the last message to copy.
    message: String,
    /// The title. Default: that of the copied task.
    #[arg(long, default_value = "", hide_default_value = true)]
    title: String,
    /// The directory the new task works in. Default: a new empty one.
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct One {
    /// The task's id.
    task: String,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Write {
    /// The task's id.
    task: String,
    #[command(flatten)]
    write: WriteArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// The agent. Default: CONSTRUCT_AGENT, or the only agent.
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    /// The directory the agent works in. Default: a new empty one.
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    /// The title. Default: made from the conversation.
    #[arg(long, default_value = "", hide_default_value = true)]
    title: String,
    /// The maximum model calls per turn. Default: the agent's.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    max_turns: u32,
    /// The compute pool of the task's scripts: cpu-2, cpu-4, cpu-8, or another pool of the
    /// installation. Default: the agent's.
    #[arg(long, value_name = "POOL", default_value = "", hide_default_value = true)]
    compute: String,
    /// A spending limit in dollars, e.g. 5, 2/day or 0.50/call. Default period: total.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_limit)]
    budget: Option<Limit>,
    /// A pinned fact: part of every prompt. Repeatable.
    #[arg(long, value_name = "TEXT")]
    pin: Vec<String>,
    #[command(flatten)]
    policy: PolicyArgs,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only tasks of this agent.
    #[arg(long, default_value = "", hide_default_value = true)]
    agent: String,
    /// Only tasks in this phase.
    #[arg(long, value_enum)]
    phase: Option<Phase>,
    /// Only tasks that work in this directory.
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    /// Only tasks created since: a time, or how long ago (2h, 7d).
    #[arg(long, value_name = "TIME", value_parser = time::parse_past)]
    created_after: Option<Timestamp>,
    /// Only tasks created before: a time, or how long ago.
    #[arg(long, value_name = "TIME", value_parser = time::parse_past)]
    created_before: Option<Timestamp>,
    /// Only subtasks of this task.
    #[arg(long, value_name = "TASK", default_value = "", hide_default_value = true)]
    parent: String,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Update {
    /// The task's id.
    task: String,
    /// The new agent, from the next model call on.
    #[arg(long)]
    agent: Option<String>,
    #[arg(long)]
    title: Option<String>,
    /// The maximum model calls per turn.
    #[arg(long, value_name = "N")]
    max_turns: Option<u32>,
    #[command(flatten)]
    policy: PolicyArgs,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl TaskCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => args.run(gateway).await,
            Self::Get(One { task, output }) => {
                output.entity(&call(gateway.tasks().get_task(GetTaskRequest { task })).await?)
            }
            Self::List(args) => args.run(gateway).await,
            Self::Update(args) => args.run(gateway).await,
            Self::Delete { write, output } => {
                let request = DeleteTaskRequest {
                    task: write.task.clone(),
                    idempotency_key: write.write.key(),
                };
                call(gateway.tasks().delete_task(request)).await?;
                output.deleted("task", &write.task)
            }
            Self::Suspend { write, output } => {
                let request =
                    SuspendTaskRequest { idempotency_key: write.write.key(), task: write.task };
                output.entity(&call(gateway.tasks().suspend_task(request)).await?)
            }
            Self::Resume { write, output } => {
                let request =
                    ResumeTaskRequest { idempotency_key: write.write.key(), task: write.task };
                output.entity(&call(gateway.tasks().resume_task(request)).await?)
            }
            Self::Retry { write, output } => {
                let request =
                    RetryTaskRequest { idempotency_key: write.write.key(), task: write.task };
                output.entity(&call(gateway.recovery().retry_task(request)).await?)
            }
            Self::Cancel { write, reason, output } => {
                let request = CancelTaskRequest {
                    idempotency_key: write.write.key(),
                    task: write.task,
                    reason,
                };
                output.entity(&call(gateway.tasks().cancel_task(request)).await?)
            }
            Self::Rewind { write, message, keep, output } => {
                let idempotency_key = write.write.key();
                let request =
                    RewindTaskRequest { task: write.task, message, keep, idempotency_key };
                output.entity(&call(gateway.tasks().rewind_task(request)).await?)
            }
            Self::Fork(args) => {
                let request = ForkTaskRequest {
                    task: args.task,
                    message: args.message,
                    title: args.title,
                    workspace: args
                        .workspace
                        .as_deref()
                        .map(exec::workspace)
                        .transpose()?
                        .unwrap_or_default(),
                    idempotency_key: args.write.key(),
                };
                args.output.entity(&call(gateway.tasks().fork_task(request)).await?)
            }
            Self::Pin { task, text, output } => {
                output.entity(&pinned::pin(gateway, &task, &text).await?)
            }
            Self::Unpin { task, fact, output } => {
                output.entity(&pinned::unpin(gateway, &task, &fact).await?)
            }
        }
    }
}

impl Create {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let spec = TaskSpec {
            agent: agents::choose(gateway, self.agent).await?,
            workspace: self
                .workspace
                .as_deref()
                .map(exec::workspace)
                .transpose()?
                .unwrap_or_default(),
            title: self.title,
            max_turns: self.max_turns,
            policy: self.policy.read()?.unwrap_or_default().rules,
            compute: self.compute,
            pinned: self.pin,
        };
        let request = CreateTaskRequest { spec: Some(spec), idempotency_key: self.write.key() };
        let task = call(gateway.tasks().create_task(request)).await?;
        budget::create(gateway, budget::Owner::Task(&id(task.metadata.as_ref())), self.budget)
            .await?;
        self.output.entity(&task)
    }
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let filter = Filter {
            agent: self.agent,
            phase: self.phase.map_or(TaskPhase::Unspecified, TaskPhase::from).into(),
            workspace: self
                .workspace
                .as_deref()
                .map(exec::workspace)
                .transpose()?
                .unwrap_or_default(),
            created_after: self.created_after.map(time::write),
            created_before: self.created_before.map(time::write),
            parent: self.parent,
        };
        let listed = self
            .list
            .collect(|page| {
                let request = ListTasksRequest { page: Some(page), filter: Some(filter.clone()) };
                async move {
                    let response = call(gateway.tasks().list_tasks(request)).await?;
                    Ok((response.tasks, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

impl Update {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let request = UpdateTaskRequest {
            task: self.task,
            agent: self.agent,
            title: self.title,
            max_turns: self.max_turns,
            policy: self.policy.read()?,
            pinned: None,
            revision: self.change.revision,
            idempotency_key: self.change.write.key(),
        };
        self.output.entity(&call(gateway.tasks().update_task(request)).await?)
    }
}

fn outcome_name(outcome: TurnOutcome) -> &'static str {
    match outcome {
        TurnOutcome::Completed => "completed",
        TurnOutcome::Failed => "failed",
        TurnOutcome::Cancelled => "cancelled",
        TurnOutcome::Interrupted => "interrupted",
        TurnOutcome::MaxTurns => "limit of model calls reached",
        TurnOutcome::Unspecified => "",
    }
}

/// How much of the model's context the conversation fills.
fn describe_context(status: &TaskStatus) -> String {
    let (tokens, room) = (status.context_tokens, status.context_limit);
    if tokens == 0 || room == 0 {
        return String::new();
    }
    let compacted = match status.compacted_through {
        0 => String::new(),
        through => format!(", summarized up to message {through}"),
    };
    format!("{tokens} of {room} tokens ({} %){compacted}", tokens.saturating_mul(100) / room)
}

/// The totals of all subtasks of a task.
fn describe_subtasks(totals: &SubtaskTotals) -> String {
    let tasks = count(totals.count, "task");
    format!("{tasks}, {} active, {}", thousands(totals.active), money::cost(totals.cost_pico_usd))
}

impl Entity for Task {
    const NAME: &'static str = "construct.v1.Task";
    const PLURAL: &'static str = "tasks";
    const COLUMNS: &'static [&'static str] =
        &["ID", "AGENT", "PHASE", "LAST", "MESSAGES", "COST", "AGE", "TITLE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        vec![
            id(self.metadata.as_ref()),
            spec.agent,
            phase_name(status.phase()).to_owned(),
            outcome_name(status.last_outcome()).to_owned(),
            status.message_count.to_string(),
            money::cost(status.usage.unwrap_or_default().cost_pico_usd),
            age(self.metadata.as_ref(), now),
            clip(&spec.title, 60),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        let since = time::read(status.phase_since.as_ref())
            .map(|at| format!(", since {}", time::relative(at, now)));
        let pending = if status.desired_phase() == TaskPhase::Suspended
            && status.phase() != TaskPhase::Suspended
        {
            " (being suspended)"
        } else {
            ""
        };
        let mut tools: Vec<_> = status.tool_uses.iter().collect();
        tools.sort();
        let tools =
            tools.into_iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(", ");
        let error =
            status.last_error.as_ref().map(|error| format!("{}: {}", error.code, error.message));
        let mut details = vec![
            ("id", id(self.metadata.as_ref())),
            ("title", spec.title),
            ("agent", spec.agent),
            ("workspace", spec.workspace),
            ("max turns", unless_zero(spec.max_turns)),
            ("compute", spec.compute),
            (
                "phase",
                format!("{}{}{pending}", phase_name(status.phase()), since.unwrap_or_default()),
            ),
            ("last turn", outcome_name(status.last_outcome()).to_owned()),
            ("last error", error.unwrap_or_default()),
            ("messages", status.message_count.to_string()),
            ("queued", unless_zero(status.queued_count)),
            ("usage", render::usage(&status.usage.unwrap_or_default())),
            ("context", describe_context(&status)),
            ("tools", tools),
            ("policy", policy::describe(&spec.policy)),
            ("pinned", pinned::numbered_list(&spec.pinned)),
            ("parent", status.parent.clone()),
            ("subtasks", status.subtasks.join(", ")),
            (
                "subtask totals",
                status.subtask_totals.as_deref().map(describe_subtasks).unwrap_or_default(),
            ),
            (
                "forked from",
                status
                    .forked_from
                    .map(|from| format!("{}, up to {}", from.task, from.message))
                    .unwrap_or_default(),
            ),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}
