//! Tasks.

mod pinned;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use construct_proto::v1::{
    CancelTaskRequest, CreateTaskRequest, DeleteTaskRequest, ForkTaskRequest, GetTaskRequest,
    ListTasksRequest, ResumeTaskRequest, RetryTaskRequest, RewindTaskRequest, SuspendTaskRequest,
    Task, TaskPhase, TaskSpec, TaskStatus, SubtaskTotals, TurnOutcome, UpdateTaskRequest,
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
    time,
    words::{clip, count, thousands},
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
    /// Begin a conversation, without a message yet.
    Create(Create),
    /// Show one.
    Get(One),
    /// List them.
    List(List),
    /// Change one: only what is given.
    Update(Update),
    /// Stop what runs, and delete the task with its messages.
    Delete {
        #[command(flatten)]
        write: Write,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Stop what runs, and start nothing until the task is resumed.
    Suspend {
        #[command(flatten)]
        write: Write,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Go on with a suspended task.
    Resume {
        #[command(flatten)]
        write: Write,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Have a turn gone on with that has failed, or came to its limit of model calls; or look again
    /// at a task that was put aside because looking at it failed each time.
    Retry {
        #[command(flatten)]
        write: Write,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// End the turn that runs, and drop the messages that wait.
    Cancel {
        #[command(flatten)]
        write: Write,
        /// Why; stands in the transcript.
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Stop what runs, and put a message and everything after it aside; the task then awaits input.
    Rewind {
        #[command(flatten)]
        write: Write,
        /// The message's id.
        message: String,
        /// Keep the message itself, and put aside only what follows it.
        #[arg(long)]
        keep: bool,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Begin another task with a copy of the conversation up to a message.
    Fork(Fork),
    /// Pin a fact, which the model is told from its next call on, however long the conversation
    /// gets.
    Pin {
        /// The task's id.
        task: String,
        /// The fact.
        text: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Take a pinned fact away.
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
    /// That of the task when not given.
    #[arg(long, default_value = "", hide_default_value = true)]
    title: String,
    /// The directory the new task works in. Without it the task gets an empty one of its own.
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
    /// Which agent. When not given: CONSTRUCT_AGENT, or the only one there is.
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    /// The directory the agent works in. Without it the task gets an empty one of its own.
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    /// Made from the conversation when not given.
    #[arg(long, default_value = "", hide_default_value = true)]
    title: String,
    /// Model calls one message may cause; the agent's limit when not given.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    max_turns: u32,
    /// Where its scripts run, for as long as it lives: cpu-2, cpu-4, cpu-8, or another pool of the
    /// installation; the agent's when not given.
    #[arg(long, value_name = "POOL", default_value = "", hide_default_value = true)]
    compute: String,
    /// Dollars it may spend in all, or as 2/day or 0.50/call.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_limit)]
    budget: Option<Limit>,
    /// A fact that the model is told in every call, however long the conversation gets. Can be
    /// given several times.
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
    /// Only those of this agent.
    #[arg(long, default_value = "", hide_default_value = true)]
    agent: String,
    /// Only those in this phase.
    #[arg(long, value_enum)]
    phase: Option<Phase>,
    /// Only those that work in this directory.
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    /// Only those made since: a time, or how long ago (2h, 7d).
    #[arg(long, value_name = "TIME", value_parser = time::parse_past)]
    created_after: Option<Timestamp>,
    /// Only those made before.
    #[arg(long, value_name = "TIME", value_parser = time::parse_past)]
    created_before: Option<Timestamp>,
    /// Only the subtasks of this task.
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
    /// Another agent; it answers from the next model call on.
    #[arg(long)]
    agent: Option<String>,
    #[arg(long)]
    title: Option<String>,
    /// Model calls one message may cause.
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
    /// What the gateway fails with.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => args.run(gateway).await,
            Self::Get(One { task, output }) => {
                output.one(&call(gateway.tasks().get_task(GetTaskRequest { task })).await?)
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
                output.one(&call(gateway.tasks().suspend_task(request)).await?)
            }
            Self::Resume { write, output } => {
                let request =
                    ResumeTaskRequest { idempotency_key: write.write.key(), task: write.task };
                output.one(&call(gateway.tasks().resume_task(request)).await?)
            }
            Self::Retry { write, output } => {
                let request =
                    RetryTaskRequest { idempotency_key: write.write.key(), task: write.task };
                output.one(&call(gateway.recovery().retry_task(request)).await?)
            }
            Self::Cancel { write, reason, output } => {
                let request = CancelTaskRequest {
                    idempotency_key: write.write.key(),
                    task: write.task,
                    reason,
                };
                output.one(&call(gateway.tasks().cancel_task(request)).await?)
            }
            Self::Rewind { write, message, keep, output } => {
                let idempotency_key = write.write.key();
                let request =
                    RewindTaskRequest { task: write.task, message, keep, idempotency_key };
                output.one(&call(gateway.tasks().rewind_task(request)).await?)
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
                args.output.one(&call(gateway.tasks().fork_task(request)).await?)
            }
            Self::Pin { task, text, output } => {
                output.one(&pinned::pin(gateway, &task, &text).await?)
            }
            Self::Unpin { task, fact, output } => {
                output.one(&pinned::unpin(gateway, &task, &fact).await?)
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
        budget::make(gateway, budget::Of::Task(&id(task.metadata.as_ref())), self.budget).await?;
        self.output.one(&task)
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
        self.output.one(&call(gateway.tasks().update_task(request)).await?)
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

/// How far the conversation fills its model.
fn context(status: &TaskStatus) -> String {
    let (tokens, room) = (status.context_tokens, status.context_limit);
    if tokens == 0 || room == 0 {
        return String::new();
    }
    let compacted = match status.compacted_through {
        0 => String::new(),
        through => format!(", summed up to message {through}"),
    };
    format!("{tokens} of {room} tokens ({} %){compacted}", tokens.saturating_mul(100) / room)
}

/// What everything below a task comes to.
fn below(below: &SubtaskTotals) -> String {
    let tasks = count(below.count, "task");
    format!("{tasks}, {} at work, {}", thousands(below.active), money::cost(below.cost_pico_usd))
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
        let wanted = if status.desired_phase() == TaskPhase::Suspended
            && status.phase() != TaskPhase::Suspended
        {
            " (about to be suspended)"
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
                format!("{}{}{wanted}", phase_name(status.phase()), since.unwrap_or_default()),
            ),
            ("last turn", outcome_name(status.last_outcome()).to_owned()),
            ("last error", error.unwrap_or_default()),
            ("messages", status.message_count.to_string()),
            ("queued", unless_zero(status.queued_count)),
            ("usage", render::usage(&status.usage.unwrap_or_default())),
            ("context", context(&status)),
            ("tools", tools),
            ("policy", policy::words(&spec.policy)),
            ("pinned", pinned::words(&spec.pinned)),
            ("parent", status.parent.clone()),
            ("subtasks", status.subtasks.join(", ")),
            ("below", status.subtask_totals.as_deref().map(below).unwrap_or_default()),
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
