//! `construct schedule`: messages sent at given times.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use construct_proto::v1::{
    Block, CreateScheduleRequest, DeleteScheduleRequest, GetScheduleRequest,
    ListScheduleRunsRequest, ListSchedulesRequest, MessagePriority, MissedRuns,
    PauseScheduleRequest, ResumeScheduleRequest, Schedule, ScheduleRun, ScheduleRunOutcome,
    ScheduleSpec, Text, UpdateScheduleRequest, block, list_schedules_request::Filter,
};
use jiff::Timestamp;

use super::{ChangeArgs, WriteArgs, id, metadata_details, read_stdin};
use crate::{
    exec,
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, OutputArgs},
    page::{ListArgs, Page},
    text::{clip, one_line},
    time,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MissedRunPolicy {
    /// Skip them.
    Skip,
    /// Make one run for all missed runs.
    Once,
    /// Make each run, at most the newest 100.
    All,
}

impl From<MissedRunPolicy> for MissedRuns {
    fn from(missed: MissedRunPolicy) -> Self {
        match missed {
            MissedRunPolicy::Skip => Self::Skip,
            MissedRunPolicy::Once => Self::Once,
            MissedRunPolicy::All => Self::All,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum ScheduleCommand {
    /// Create a schedule that sends a message to a task, or to an agent in a new task each time.
    Create(Create),
    /// Show a schedule.
    Get(One),
    /// List schedules.
    List(List),
    /// Change the given fields of a schedule.
    Update(Update),
    /// Delete a schedule and the records of its runs.
    Delete(Write),
    /// Pause a schedule.
    Pause(Write),
    /// Resume a paused schedule.
    Resume(Write),
    /// List the newest runs of a schedule.
    Runs(One),
}

#[derive(Debug, Args)]
pub(crate) struct One {
    /// Name or id.
    schedule: String,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Write {
    /// Name or id.
    schedule: String,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("target").required(true), group = ArgGroup::new("when").required(true))]
pub(crate) struct Create {
    /// Lowercase letters, digits, `.`, `_` and `-`.
    name: String,
    /// The message. `-`, or no argument, reads it from standard input.
    text: Option<String>,
    /// The task to send the message to.
    #[arg(long, group = "target")]
    task: Option<String>,
    /// The agent; each run creates a new task.
    #[arg(long, group = "target")]
    agent: Option<String>,
    /// Run once at this time, e.g. 2026-12-24T18:00:00+01:00.
    #[arg(long, value_name = "TIME", group = "when")]
    at: Option<Timestamp>,
    /// Run repeatedly: minute, hour, day of the month, month, day of the week, e.g. '0 9 * *
    /// MON-FRI'.
    #[arg(long, value_name = "PATTERN", group = "when")]
    cron: Option<String>,
    /// The time zone of the pattern, e.g. Europe/Berlin. Default: UTC.
    #[arg(
        long,
        value_name = "ZONE",
        conflicts_with = "at",
        default_value = "",
        hide_default_value = true
    )]
    time_zone: String,
    /// How to handle missed runs.
    #[arg(long, value_enum, default_value_t = MissedRunPolicy::Once)]
    missed: MissedRunPolicy,
    /// Interrupt the running turn.
    #[arg(long)]
    interrupt: bool,
    /// The title of new tasks. Default: made from the conversation.
    #[arg(long, conflicts_with = "task", default_value = "", hide_default_value = true)]
    title: String,
    /// The directory for all new tasks. Default: a new empty one for each.
    #[arg(long, value_name = "DIR", conflicts_with = "task")]
    workspace: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only schedules whose name starts with this.
    #[arg(long, value_name = "PREFIX", default_value = "", hide_default_value = true)]
    name_prefix: String,
    /// Only schedules for this task.
    #[arg(long, default_value = "", hide_default_value = true)]
    task: String,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Update {
    /// Name or id.
    schedule: String,
    /// The new name.
    #[arg(long)]
    name: Option<String>,
    /// The new message.
    #[arg(long)]
    text: Option<String>,
    /// Run once at this time.
    #[arg(long, value_name = "TIME", conflicts_with = "cron")]
    at: Option<Timestamp>,
    /// Run repeatedly by this pattern.
    #[arg(long, value_name = "PATTERN")]
    cron: Option<String>,
    /// The time zone of the pattern.
    #[arg(long, value_name = "ZONE")]
    time_zone: Option<String>,
    /// How to handle missed runs.
    #[arg(long, value_enum)]
    missed: Option<MissedRunPolicy>,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl ScheduleCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => args.run(gateway).await,
            Self::Get(One { schedule, output }) => output.entity(
                &call(gateway.schedules().get_schedule(GetScheduleRequest { schedule })).await?,
            ),
            Self::List(args) => args.run(gateway).await,
            Self::Update(args) => args.run(gateway).await,
            Self::Delete(Write { schedule, write, output }) => {
                let request = DeleteScheduleRequest {
                    schedule: schedule.clone(),
                    idempotency_key: write.key(),
                };
                call(gateway.schedules().delete_schedule(request)).await?;
                output.deleted("schedule", &schedule)
            }
            Self::Pause(Write { schedule, write, output }) => {
                let request = PauseScheduleRequest { schedule, idempotency_key: write.key() };
                output.entity(&call(gateway.schedules().pause_schedule(request)).await?)
            }
            Self::Resume(Write { schedule, write, output }) => {
                let request = ResumeScheduleRequest { schedule, idempotency_key: write.key() };
                output.entity(&call(gateway.schedules().resume_schedule(request)).await?)
            }
            Self::Runs(One { schedule, output }) => {
                let request = ListScheduleRunsRequest { schedule };
                let items = call(gateway.schedules().list_schedule_runs(request)).await?.runs;
                output.list(&Page { items, next_page_token: String::new() })
            }
        }
    }
}

impl Create {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let text = match self.text {
            Some(text) if text != "-" => text,
            _ => read_stdin()?,
        };
        let priority =
            if self.interrupt { MessagePriority::Interrupt } else { MessagePriority::AfterTurn };
        let spec = ScheduleSpec {
            name: self.name,
            task: self.task.unwrap_or_default(),
            agent: self.agent.unwrap_or_default(),
            blocks: blocks(text),
            priority: priority.into(),
            title: self.title,
            workspace: self
                .workspace
                .as_deref()
                .map(exec::workspace)
                .transpose()?
                .unwrap_or_default(),
            at: self.at.map(time::write),
            cron: self.cron.unwrap_or_default(),
            time_zone: self.time_zone,
            missed_runs: MissedRuns::from(self.missed).into(),
        };
        let request = CreateScheduleRequest { spec: Some(spec), idempotency_key: self.write.key() };
        self.output.entity(&call(gateway.schedules().create_schedule(request)).await?)
    }
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let filter = Filter { name_prefix: self.name_prefix, task: self.task };
        let listed = self
            .list
            .collect(|page| {
                let request =
                    ListSchedulesRequest { page: Some(page), filter: Some(filter.clone()) };
                async move {
                    let response = call(gateway.schedules().list_schedules(request)).await?;
                    Ok((response.schedules, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

impl Update {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let request = UpdateScheduleRequest {
            schedule: self.schedule,
            name: self.name,
            blocks: self.text.map(blocks).unwrap_or_default(),
            at: self.at.map(time::write),
            cron: self.cron,
            time_zone: self.time_zone,
            missed_runs: self.missed.map_or(MissedRuns::Unspecified, MissedRuns::from).into(),
            revision: self.change.revision,
            idempotency_key: self.change.write.key(),
        };
        self.output.entity(&call(gateway.schedules().update_schedule(request)).await?)
    }
}

fn blocks(text: String) -> Vec<Block> {
    vec![Block { block: Some(block::Block::Text(Text { text })) }]
}

fn message_text(schedule: &ScheduleSpec) -> String {
    let texts = schedule.blocks.iter().filter_map(|block| match block.block.as_ref()? {
        block::Block::Text(text) => Some(text.text.as_str()),
        _ => None,
    });
    texts.collect::<Vec<_>>().join("\n")
}

fn when(spec: &ScheduleSpec) -> String {
    match time::read(spec.at.as_ref()) {
        Some(at) => time::local(at),
        None => format!("{} {}", spec.cron, spec.time_zone),
    }
}

fn next_run(schedule: &Schedule, now: Timestamp) -> String {
    let status = schedule.status.clone().unwrap_or_default();
    match time::read(status.next_run.as_ref()) {
        _ if status.paused => "paused".to_owned(),
        Some(at) => time::relative(at, now),
        None => "none".to_owned(),
    }
}

impl Entity for Schedule {
    const NAME: &'static str = "construct.v1.Schedule";
    const PLURAL: &'static str = "schedules";
    const COLUMNS: &'static [&'static str] = &["NAME", "FOR", "WHEN", "NEXT", "MESSAGE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        let (when, message) = (when(&spec), clip(&one_line(&message_text(&spec)), 60));
        let target = if spec.task.is_empty() { spec.agent } else { spec.task };
        vec![spec.name, target, when, next_run(self, now), message]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        let at = |time: Option<&prost_types::Timestamp>| {
            time::read(time)
                .map(|at| format!("{} ({})", time::local(at), time::relative(at, now)))
                .unwrap_or_default()
        };
        let missed_runs = match spec.missed_runs() {
            MissedRuns::Skip => "skipped",
            MissedRuns::Once | MissedRuns::Unspecified => "one run for all",
            MissedRuns::All => "each, at most the newest 100",
        };
        let mut details = vec![
            ("name", spec.name.clone()),
            ("id", id(self.metadata.as_ref())),
            ("task", spec.task.clone()),
            ("agent", spec.agent.clone()),
            ("when", when(&spec)),
            ("missed runs", missed_runs.to_owned()),
            (
                "next run",
                if status.paused { "paused".to_owned() } else { at(status.next_run.as_ref()) },
            ),
            ("last run", at(status.last_run.as_ref())),
            ("last error", status.last_error),
            ("title", spec.title.clone()),
            ("workspace", spec.workspace.clone()),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details.push(("message", message_text(&spec)));
        details
    }
}

fn outcome_name(outcome: ScheduleRunOutcome) -> &'static str {
    match outcome {
        ScheduleRunOutcome::Sent => "sent",
        ScheduleRunOutcome::Skipped => "skipped",
        ScheduleRunOutcome::Failed => "failed",
        ScheduleRunOutcome::Unspecified => "unknown",
    }
}

impl Entity for ScheduleRun {
    const NAME: &'static str = "construct.v1.ScheduleRun";
    const PLURAL: &'static str = "runs";
    const COLUMNS: &'static [&'static str] = &["DUE", "OUTCOME", "TASK", "MESSAGE", "ERROR"];

    fn row(&self, _: Timestamp) -> Vec<String> {
        let due = time::read(self.due.as_ref()).map(time::local).unwrap_or_default();
        vec![
            due,
            outcome_name(self.outcome()).to_owned(),
            self.task.clone(),
            self.message.clone(),
            self.error.clone(),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        Self::COLUMNS.iter().map(|column| column.to_owned()).zip(self.row(now)).collect()
    }
}
