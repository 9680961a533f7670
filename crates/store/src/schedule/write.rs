//! Writes of users on schedules.

use construct_domain::{
    AgentId, ScheduleId, TaskId,
    schedule::{MissedRunPolicy, Timing},
};
use jiff::Timestamp;

use crate::{
    Error, NewSchedule, Schedule, ScheduleChanges, ScheduleTarget, Store, Write, WriteOutcome,
    WriteOutput,
    schedule::{ENTITY, select},
    text,
    time::sql_option,
    write::{Writer, begin},
};

impl Store {
    /// Creates a schedule.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] when the name is taken, [`Error::NotFound`] when the target does
    /// not exist; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn schedule_create(
        &self,
        write: &Write,
        new: NewSchedule,
        render: impl FnOnce(&Schedule) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Schedule>, Error> {
        let mut writer = begin!(self, write);
        let (task, agent) = match new.target {
            ScheduleTarget::Task(task) => (Some(task), None),
            ScheduleTarget::Agent(agent) => (None, Some(agent)),
        };
        if let Some(task) = task {
            sqlx::query_scalar!(
                "SELECT id FROM tasks WHERE organization_id = $1 AND id = $2 AND deleted_at IS NULL",
                writer.organization(),
                task.uuid(),
            )
            .fetch_optional(&mut *writer.transaction)
            .await?
            .ok_or(Error::NotFound { what: crate::task::ENTITY })?;
        }
        let (at, cron, zone) = timing_columns(&new.timing);
        sqlx::query!(
            "INSERT INTO schedules
                 (id, organization_id, name, task_id, agent_id, content, interrupts, title, workspace, run_at, cron, time_zone, missed,
                  next_run, created_at, updated_at, api_key_id)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $15, $16)",
            new.id.uuid(),
            writer.organization(),
            new.name,
            task.map(TaskId::uuid) as _,
            agent.map(AgentId::uuid) as _,
            text::json(&new.content)?,
            new.interrupts,
            &*text::clean(&new.title),
            &*text::clean(&new.workspace),
            sql_option(at) as _,
            cron as _,
            zone,
            new.missed.as_str(),
            sql_option(new.next_run) as _,
            writer.now() as _,
            writer.key() as _,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let entity = schedule_reload(&mut writer, new.id).await?;
        writer.finish(entity, render).await
    }

    /// Changes a schedule.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::AlreadyExists`], [`Error::Conflict`] when the revision is not
    /// the expected one.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn schedule_update(
        &self,
        write: &Write,
        id: ScheduleId,
        expected_revision: Option<i64>,
        changes: ScheduleChanges,
        render: impl FnOnce(&Schedule) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Schedule>, Error> {
        let mut writer = begin!(self, write);
        let content = changes.content.as_ref().map(text::json).transpose()?;
        let (timing, next) =
            changes.timing.map_or((None, None), |(timing, next)| (Some(timing), next));
        let (at, cron, zone) = timing.as_ref().map_or((None, None, ""), timing_columns);
        let done = sqlx::query!(
            "UPDATE schedules SET
                 name = coalesce($5, name),
                 content = coalesce($6, content),
                 missed = coalesce($7, missed),
                 run_at = CASE WHEN $8 THEN $9 ELSE run_at END,
                 cron = CASE WHEN $8 THEN $10 ELSE cron END,
                 time_zone = CASE WHEN $8 THEN $11 ELSE time_zone END,
                 next_run = CASE WHEN $8 THEN $12 ELSE next_run END,
                 api_key_id = $13,
                 revision = revision + 1,
                 updated_at = $4
             WHERE organization_id = $1 AND id = $2 AND ($3::bigint IS NULL OR revision = $3)",
            writer.organization(),
            id.uuid(),
            expected_revision,
            writer.now(),
            changes.name,
            content,
            changes.missed.map(MissedRunPolicy::as_str),
            timing.is_some(),
            sql_option(at) as _,
            cron as _,
            zone,
            sql_option(next) as _,
            writer.key() as _,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let entity = schedule_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish(entity, render).await
    }

    /// Pauses a schedule, or resumes it with the run `next`, which was computed from revision
    /// `read` of the schedule. No effect if it already is in that state.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Conflict`] when it changed since it was read; the errors of
    /// every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn schedule_pause(
        &self,
        write: &Write,
        id: ScheduleId,
        paused: bool,
        next: Option<Timestamp>,
        read: Option<i64>,
        render: impl FnOnce(&Schedule) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Schedule>, Error> {
        let mut writer = begin!(self, write);
        let done = sqlx::query!(
            "UPDATE schedules SET
                 paused = $3, next_run = CASE WHEN $3 THEN next_run ELSE $4 END, revision = revision + 1, updated_at = $5
             WHERE organization_id = $1 AND id = $2 AND paused <> $3 AND ($6::bigint IS NULL OR revision = $6)",
            writer.organization(),
            id.uuid(),
            paused,
            sql_option(next) as _,
            writer.now(),
            read as _,
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = schedule_reload(&mut writer, id).await?;
        if done.rows_affected() == 0 && entity.paused != paused {
            return Err(Error::Conflict);
        }
        if done.rows_affected() == 0 {
            return writer.finish_unchanged(entity, render).await;
        }
        writer.finish(entity, render).await
    }

    /// Deletes a schedule with its run history. The entity in the result is the schedule before the
    /// deletion.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn schedule_delete(
        &self,
        write: &Write,
        id: ScheduleId,
        render: impl FnOnce(&Schedule) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Schedule>, Error> {
        let mut writer = begin!(self, write);
        let entity = schedule_reload(&mut writer, id).await?;
        let done = sqlx::query!(
            "DELETE FROM schedules WHERE organization_id = $1 AND id = $2",
            writer.organization(),
            id.uuid()
        )
        .execute(&mut *writer.transaction)
        .await?;
        if done.rows_affected() == 0 {
            return Err(Error::NotFound { what: ENTITY });
        }
        writer.finish(entity, render).await
    }
}

fn timing_columns(timing: &Timing) -> (Option<Timestamp>, Option<&str>, &str) {
    match timing {
        Timing::At(at) => (Some(*at), None, "UTC"),
        Timing::Cron { pattern, time_zone } => (None, Some(pattern), time_zone),
    }
}

async fn schedule_reload(writer: &mut Writer<'_>, id: ScheduleId) -> Result<Schedule, Error> {
    select!(["WHERE s.organization_id = $1 AND s.id = $2"], writer.organization(), id.uuid())
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
}
