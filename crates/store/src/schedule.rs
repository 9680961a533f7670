//! Schedules: messages that are sent at given times. [`fire`] creates the runs of due schedules.

mod fire;
mod quota_check;
mod write;

use jiff::Timestamp;
use serde_json::Value;
use uuid::Uuid;

use construct_domain::{
    AgentId, ApiKeyId, MessageId, OrganizationId, ScheduleId, TaskId,
    message::Content,
    schedule::{MissedRunPolicy, Timing},
};

use crate::{Cursor, Error, Key, Page, Store, time::from_sql_option};

pub use fire::{DueSchedule, FiredSchedule, RunEvents};

const ENTITY: &str = "schedule";

/// Runs that are kept per schedule. Older ones are deleted.
pub const RUN_HISTORY_LIMIT: u32 = 100;

/// A schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// Its id.
    pub id: ScheduleId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// Unique in the organization.
    pub name: String,
    /// The target of the message.
    pub target: ScheduleTarget,
    /// The name of the target agent; empty for a task.
    pub agent_name: String,
    /// The content of the message.
    pub content: Content,
    /// Whether the message interrupts the running turn instead of waiting for its end.
    pub interrupts: bool,
    /// For the tasks that it creates.
    pub title: String,
    /// For the tasks that it creates.
    pub workspace: String,
    /// Its timing.
    pub timing: Timing,
    /// The policy for missed runs.
    pub missed: MissedRunPolicy,
    /// Whether a person paused it.
    pub paused: bool,
    /// The next run; none: there are no further runs.
    pub next_run: Option<Timestamp>,
    /// The due time of the last run.
    pub last_run: Option<Timestamp>,
    /// Why the last run failed.
    pub last_error: Option<String>,
    /// The API key that its runs count for: the one that created or last changed it.
    pub key: Option<ApiKeyId>,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed, or a run was created.
    pub updated_at: Timestamp,
}

/// The target of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduleTarget {
    /// A task, which receives every message.
    Task(TaskId),
    /// An agent. Each run creates a task.
    Agent(AgentId),
}

/// A schedule to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewSchedule {
    /// Its id.
    pub id: ScheduleId,
    /// Unique in the organization.
    pub name: String,
    /// Its target.
    pub target: ScheduleTarget,
    /// The content of the message.
    pub content: Content,
    /// Whether the message interrupts the running turn instead of waiting for its end.
    pub interrupts: bool,
    /// For the tasks that it creates.
    pub title: String,
    /// For the tasks that it creates.
    pub workspace: String,
    /// Its timing.
    pub timing: Timing,
    /// The policy for missed runs.
    pub missed: MissedRunPolicy,
    /// The first run.
    pub next_run: Option<Timestamp>,
}

/// Changes to a schedule. `None` leaves a field as it is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScheduleChanges {
    /// Unique in the organization.
    pub name: Option<String>,
    /// The content of the message.
    pub content: Option<Content>,
    /// The timing, and the next run that results from it.
    pub timing: Option<(Timing, Option<Timestamp>)>,
    /// The policy for missed runs.
    pub missed: Option<MissedRunPolicy>,
}

/// Filter for a list of schedules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScheduleFilter {
    /// Prefix of the name.
    pub name_prefix: String,
    /// Of this task only.
    pub task: Option<TaskId>,
}

/// A run of a schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScheduleRun {
    /// Its due time.
    pub due: Timestamp,
    /// Its outcome.
    pub outcome: RunOutcome,
    /// The task that received the message.
    pub task: Option<TaskId>,
    /// The message.
    pub message: Option<MessageId>,
    /// Why it failed.
    pub error: Option<String>,
    /// When it was recorded.
    pub created_at: Timestamp,
}

/// A run of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunOutcome {
    /// Its message was accepted.
    Sent,
    /// It was missed and skipped.
    PassedOver,
    /// Its message could not be accepted.
    Failed,
}

impl RunOutcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Sent => "sent",
            Self::PassedOver => "passed_over",
            Self::Failed => "failed",
        }
    }

    fn parse(text: &str) -> Result<Self, Error> {
        [Self::Sent, Self::PassedOver, Self::Failed]
            .into_iter()
            .find(|outcome| outcome.as_str() == text)
            .ok_or_else(|| Error::internal(format!("unknown outcome `{text}`")))
    }
}

impl Schedule {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), &self.name, self.created_at, self.updated_at)
    }
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    name: String,
    task_id: Option<Uuid>,
    agent_id: Option<Uuid>,
    agent_name: String,
    content: Value,
    interrupts: bool,
    title: String,
    workspace: String,
    run_at: Option<jiff_sqlx::Timestamp>,
    cron: Option<String>,
    time_zone: String,
    missed: String,
    paused: bool,
    next_run: Option<jiff_sqlx::Timestamp>,
    last_run: Option<jiff_sqlx::Timestamp>,
    last_error: Option<String>,
    api_key_id: Option<Uuid>,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for Schedule {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        let target = match (row.task_id, row.agent_id) {
            (Some(task), _) => ScheduleTarget::Task(TaskId::from_uuid(task)),
            (None, Some(agent)) => ScheduleTarget::Agent(AgentId::from_uuid(agent)),
            (None, None) => return Err(Error::internal("a schedule has no target")),
        };
        let timing = match (from_sql_option(row.run_at), row.cron) {
            (Some(at), _) => Timing::At(at),
            (None, Some(pattern)) => Timing::Cron { pattern, time_zone: row.time_zone },
            (None, None) => return Err(Error::internal("a schedule has no timing")),
        };
        Ok(Self {
            id: ScheduleId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            name: row.name,
            target,
            agent_name: row.agent_name,
            content: serde_json::from_value(row.content).map_err(Error::internal)?,
            interrupts: row.interrupts,
            title: row.title,
            workspace: row.workspace,
            timing,
            missed: MissedRunPolicy::parse(&row.missed)
                .ok_or_else(|| Error::internal(format!("unknown policy `{}`", row.missed)))?,
            paused: row.paused,
            next_run: from_sql_option(row.next_run),
            last_run: from_sql_option(row.last_run),
            last_error: row.last_error,
            key: row.api_key_id.map(ApiKeyId::from_uuid),
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            crate::schedule::Row,
            r#"SELECT s.id, s.organization_id, s.name, s.task_id, s.agent_id, coalesce(a.name, '') AS "agent_name!", s.content, s.interrupts,
                    s.title, s.workspace, s.run_at, s.cron, s.time_zone, s.missed, s.paused, s.next_run, s.last_run, s.last_error,
                    s.api_key_id, s.revision, s.created_at, s.updated_at
             FROM schedules s
             LEFT JOIN agents a ON a.organization_id = s.organization_id AND a.id = s.agent_id "# $(+ $tail)+,
            $($argument),*
        )
    };
}
use select;

macro_rules! list {
    ($store:expr, $organization:expr, $filter:expr, $page:expr, $after:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $after?;
        select!(
            ["WHERE s.organization_id = $1 AND starts_with(s.name, $2) AND ($3::uuid IS NULL OR s.task_id = $3)
               AND (" $key ", s.id) " $comparison " ($4, $5)
             ORDER BY " $key $direction ", s.id" $direction " LIMIT $6"],
            $organization.uuid(),
            $filter.name_prefix,
            $filter.task.map(TaskId::uuid),
            value,
            id,
            $page.limit(),
        )
        .fetch_all(&$store.pool)
        .await?
    }};
}

impl Store {
    /// A schedule by id or name. No name has the form of an id.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn schedule_find(
        &self,
        organization: OrganizationId,
        name_or_id: &str,
    ) -> Result<Schedule, Error> {
        let id = name_or_id.parse::<ScheduleId>().ok().map(ScheduleId::uuid);
        select!(
            ["WHERE s.organization_id = $1 AND (s.id = $2 OR s.name = $3)"],
            organization.uuid(),
            id as _,
            name_or_id,
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// A page of schedules.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn schedule_list(
        &self,
        organization: OrganizationId,
        filter: &ScheduleFilter,
        page: &Page,
    ) -> Result<Vec<Schedule>, Error> {
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt, false) => {
                list!(self, organization, filter, page, page.after_time(), "s.created_at", ">", "")
            }
            (Key::CreatedAt, true) => {
                list!(
                    self,
                    organization,
                    filter,
                    page,
                    page.after_time(),
                    "s.created_at",
                    "<",
                    " DESC"
                )
            }
            (Key::UpdatedAt, false) => {
                list!(self, organization, filter, page, page.after_time(), "s.updated_at", ">", "")
            }
            (Key::UpdatedAt, true) => {
                list!(
                    self,
                    organization,
                    filter,
                    page,
                    page.after_time(),
                    "s.updated_at",
                    "<",
                    " DESC"
                )
            }
            (Key::Name, false) => {
                list!(self, organization, filter, page, page.after_name(), "s.name", ">", "")
            }
            (Key::Name, true) => {
                list!(self, organization, filter, page, page.after_name(), "s.name", "<", " DESC")
            }
        };
        rows.into_iter().map(TryInto::try_into).collect()
    }

    /// The latest runs of a schedule, newest first, at most [`RUN_HISTORY_LIMIT`].
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn schedule_runs(
        &self,
        organization: OrganizationId,
        schedule: ScheduleId,
    ) -> Result<Vec<ScheduleRun>, Error> {
        let rows = sqlx::query!(
            r#"SELECT r.due AS "due!: jiff_sqlx::Timestamp", r.outcome, r.task_id, r.message_id, r.error,
                      r.created_at AS "created_at!: jiff_sqlx::Timestamp"
               FROM schedule_runs r JOIN schedules s ON s.id = r.schedule_id
               WHERE s.organization_id = $3 AND r.schedule_id = $1 ORDER BY r.due DESC LIMIT $2"#,
            schedule.uuid(),
            i64::from(RUN_HISTORY_LIMIT),
            organization.uuid(),
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter()
            .map(|row| {
                Ok(ScheduleRun {
                    due: row.due.into(),
                    outcome: RunOutcome::parse(&row.outcome)?,
                    task: row.task_id.map(TaskId::from_uuid),
                    message: row.message_id.map(MessageId::from_uuid),
                    error: row.error,
                    created_at: row.created_at.into(),
                })
            })
            .collect()
    }
}
