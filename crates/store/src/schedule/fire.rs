//! Creates the runs of due schedules, with their messages, tasks and history, in one transaction.

use construct_domain::{
    ApiKeyId, MessageId, OrganizationId, ScheduleId, TaskId,
    message::Source,
    money::{Usage, tokens_of_content},
    schedule::{InvalidTiming, Plan},
};
use jiff::Timestamp;
use sqlx::{Acquire as _, PgConnection, Postgres, Transaction};
use uuid::Uuid;

use crate::{
    Error, NewEvent, QUEUE_LIMIT, Schedule, ScheduleTarget, Store, StoredEvent, StoredMessage,
    StoredTask,
    event::{to_i64, to_u64},
    schedule::{RUN_HISTORY_LIMIT, RunOutcome, quota_check::exhausted_quota, select},
    task::write::task_read,
    text,
    time::{micros, sql, sql_option},
};

/// The result of firing one schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct FiredSchedule {
    /// The schedule before its runs.
    pub schedule: Schedule,
    /// The stored events, to be published.
    pub events: Vec<StoredEvent>,
    /// Tasks with a new message, to be reconciled.
    pub tasks: Vec<TaskId>,
    /// The errors of failed runs.
    pub failures: Vec<String>,
}

/// A position among the due schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DueSchedule {
    /// When the schedule is due.
    pub at: Timestamp,
    /// The schedule.
    pub schedule: ScheduleId,
}

/// The events of what a run creates.
#[derive(Debug, Clone, Copy)]
pub struct RunEvents {
    /// The event of a created task.
    pub task: fn(&StoredTask) -> NewEvent,
    /// The event of an accepted message.
    pub message: fn(&StoredMessage) -> NewEvent,
}

impl Store {
    /// Creates the runs of the first due schedule after `after`. None when no unlocked schedule is
    /// due. `after` is set to this schedule, also when it failed, so that the next call continues
    /// with the others.
    ///
    /// # Exactly once
    ///
    /// The row is locked until the commit, and other processes skip it. Each run has its own row
    /// that identifies it. So it is created once, whatever crashes. A run whose message is not
    /// accepted, or that exceeds a quota, is recorded as failed and not retried.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: the schedule stays due. An unreadable schedule is stopped, with that
    /// as its last error.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn schedule_fire(
        &self,
        now: Timestamp,
        run_events: RunEvents,
        after: &mut Option<DueSchedule>,
    ) -> Result<Option<FiredSchedule>, Error> {
        let now = micros(now);
        let mut transaction = self.pool.begin().await?;
        let row = select!(
            ["WHERE s.next_run <= $1 AND NOT s.paused AND ($2::timestamptz IS NULL OR (s.next_run, s.id) > ($2, $3))
               AND EXISTS (SELECT 1 FROM organizations o WHERE o.id = s.organization_id AND o.deleted_at IS NULL)
               ORDER BY s.next_run, s.id LIMIT 1 FOR UPDATE OF s SKIP LOCKED"],
            sql(now) as _,
            sql_option(after.map(|after| after.at)) as _,
            after.map(|after| after.schedule.uuid()) as _,
        );
        let Some(row) = row.fetch_optional(&mut *transaction).await? else { return Ok(None) };
        let id = row.id;
        *after = row
            .next_run
            .map(|at| DueSchedule { at: at.into(), schedule: ScheduleId::from_uuid(id) });
        let schedule: Schedule = match row.try_into() {
            Ok(schedule) => schedule,
            // It would stay the first due schedule, and block all others.
            Err(error) => {
                let error: Error = error;
                tracing::error!(schedule = %id, error = &error as &dyn std::error::Error, "schedule is unreadable; stopping it");
                sqlx::query!(
                    "UPDATE schedules SET next_run = NULL, last_error = $2, revision = revision + 1, updated_at = $3 WHERE id = $1",
                    id,
                    error.to_string(),
                    sql(now) as _,
                )
                .execute(&mut *transaction)
                .await?;
                transaction.commit().await?;
                return Ok(None);
            }
        };
        let mut fired =
            FiredSchedule { events: Vec::new(), tasks: Vec::new(), failures: Vec::new(), schedule };
        let due = fired.schedule.next_run.unwrap_or(now);
        let plan = match fired.schedule.timing.plan(fired.schedule.missed, due, now) {
            Ok(plan) => plan,
            // It was valid when it was stored, so a time zone has been removed. A person must fix
            // it.
            Err(error @ (InvalidTiming::Pattern(_) | InvalidTiming::TimeZone(_))) => {
                fired.failures.push(error.to_string());
                Plan { first_skipped: Some(due), ..Plan::default() }
            }
        };
        if let Some(first) = plan.first_skipped {
            record_run(&mut transaction, &fired.schedule, first, RunOutcome::PassedOver, None, now)
                .await?;
        }
        for run in &plan.runs {
            create_run(&mut transaction, &mut fired, *run, now, run_events).await?;
        }
        sqlx::query!(
            "UPDATE schedules SET
                 next_run = $2, last_run = coalesce($3, last_run), last_error = $4, revision = revision + 1, updated_at = $5
             WHERE id = $1",
            fired.schedule.id.uuid(),
            sql_option(plan.next) as _,
            sql_option(plan.runs.last().copied()) as _,
            text::clean_option(fired.failures.last().map(String::as_str)) as _,
            sql(now) as _,
        )
        .execute(&mut *transaction)
        .await?;
        sqlx::query!(
            "DELETE FROM schedule_runs r WHERE r.schedule_id = $1 AND r.due < (
                 SELECT n.due FROM schedule_runs n WHERE n.schedule_id = $1 ORDER BY n.due DESC OFFSET $2 LIMIT 1
             )",
            fired.schedule.id.uuid(),
            i64::from(RUN_HISTORY_LIMIT) - 1,
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(Some(fired))
    }
}

/// Creates one run, or records its failure.
async fn create_run(
    transaction: &mut Transaction<'static, Postgres>,
    fired: &mut FiredSchedule,
    due: Timestamp,
    now: Timestamp,
    run_events: RunEvents,
) -> Result<(), Error> {
    let schedule = &fired.schedule;
    // Recorded first: if the run exists, there is nothing to do.
    if !record_run(transaction, schedule, due, RunOutcome::Sent, None, now).await? {
        return Ok(());
    }
    if let Some(reason) = exhausted_quota(transaction, schedule, now).await? {
        record_failure(transaction, schedule, due, &reason).await?;
        fired.failures.push(reason);
        return Ok(());
    }
    let mut part = transaction.begin().await?;
    match send_message(&mut part, schedule, now, run_events).await {
        Ok(sent) => {
            sqlx::query!(
                "UPDATE schedule_runs SET task_id = $3, message_id = $4 WHERE schedule_id = $1 AND due = $2",
                schedule.id.uuid(),
                sql(due) as _,
                sent.task.uuid(),
                sent.message.uuid(),
            )
            .execute(&mut *part)
            .await?;
            part.commit().await?;
            fired.events.extend(sent.events);
            fired.tasks.push(sent.task);
        }
        Err(error) if error.is_retryable() => return Err(error),
        Err(error) => {
            part.rollback().await?;
            let reason = error.to_string();
            record_failure(transaction, schedule, due, &reason).await?;
            fired.failures.push(reason);
        }
    }
    Ok(())
}

/// Records a failed run.
async fn record_failure(
    connection: &mut PgConnection,
    schedule: &Schedule,
    due: Timestamp,
    reason: &str,
) -> Result<(), Error> {
    sqlx::query!(
        "UPDATE schedule_runs SET outcome = 'failed', error = $3 WHERE schedule_id = $1 AND due = $2",
        schedule.id.uuid(),
        sql(due) as _,
        reason,
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// Records a run. False when it was recorded before.
async fn record_run(
    connection: &mut PgConnection,
    schedule: &Schedule,
    due: Timestamp,
    outcome: RunOutcome,
    error: Option<&str>,
    now: Timestamp,
) -> Result<bool, Error> {
    let done = sqlx::query!(
        "INSERT INTO schedule_runs (schedule_id, due, outcome, error, created_at) VALUES ($1, $2, $3, $4, $5)
         ON CONFLICT ON CONSTRAINT schedule_runs_pkey DO NOTHING",
        schedule.id.uuid(),
        sql(due) as _,
        outcome.as_str(),
        error,
        sql(now) as _,
    )
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}

struct SentRun {
    task: TaskId,
    message: MessageId,
    events: Vec<StoredEvent>,
}

/// Accepts the message like a user's, for the target task or a new one.
async fn send_message(
    connection: &mut PgConnection,
    schedule: &Schedule,
    now: Timestamp,
    run_events: RunEvents,
) -> Result<SentRun, Error> {
    let (organization, key) = (schedule.organization, schedule.key.map(ApiKeyId::uuid));
    let mut events = Vec::new();
    let task = match schedule.target {
        ScheduleTarget::Task(task) => task,
        ScheduleTarget::Agent(agent) => {
            let id = TaskId::from_uuid(Uuid::now_v7());
            sqlx::query!(
                "INSERT INTO tasks
                     (id, organization_id, agent_id, workspace, title, titled, max_turns_override, policy, compute, phase_since,
                      event_sequence, created_at, updated_at, root_id, api_key_id, asked_key_id)
                 SELECT $1, $2, a.id, $4, $5, $5 <> '', 0, '[]', a.compute, $6, 1, $6, $6, $1, $7, $7
                 FROM agents a WHERE a.organization_id = $2 AND a.id = $3",
                id.uuid(),
                organization.uuid(),
                agent.uuid(),
                schedule.workspace,
                schedule.title,
                sql(now) as _,
                key as _,
            )
            .execute(&mut *connection)
            .await
            .map_err(Error::from_write)?;
            let stored = task_read(connection, organization.uuid(), id).await?;
            events.push(
                store_event(
                    connection,
                    organization,
                    id,
                    stored.event_sequence,
                    (run_events.task)(&stored),
                    now,
                )
                .await?,
            );
            id
        }
    };
    let row = sqlx::query!(
        "UPDATE tasks SET
             intents = intents + 1,
             intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $3 END,
             event_sequence = event_sequence + 1,
             revision = revision + 1,
             asked_key_id = $4,
             updated_at = $3
         WHERE organization_id = $1 AND id = $2 AND deleted_at IS NULL
         RETURNING intents, event_sequence,
             (SELECT count(*) FROM messages q WHERE q.task_id = $2 AND q.position IS NULL AND q.processed_at IS NULL) AS \"queued!\"",
        organization.uuid(),
        task.uuid(),
        sql(now) as _,
        key as _,
    )
    .fetch_optional(&mut *connection)
    .await?
    .ok_or(Error::NotFound { what: crate::task::ENTITY })?;
    if row.queued >= i64::from(QUEUE_LIMIT) {
        return Err(Error::QueueFull { limit: QUEUE_LIMIT });
    }
    let message = StoredMessage {
        id: MessageId::from_uuid(Uuid::now_v7()),
        organization,
        task,
        arrival: row.intents,
        position: None,
        source: Source::User,
        content: schedule.content.clone(),
        agent: None,
        processed_at: None,
        error: None,
        interrupts: schedule.interrupts,
        superseded_at: None,
        replaces: None,
        usage: Usage::default(),
        step: None,
        revision: 1,
        created_at: now,
        updated_at: now,
    };
    sqlx::query!(
        "INSERT INTO messages
             (id, organization_id, task_id, arrival, source, content, estimated_tokens, interrupts, created_at, updated_at)
         VALUES ($1, $2, $3, $4, 'user', $5, $6, $7, $8, $8)",
        message.id.uuid(),
        organization.uuid(),
        task.uuid(),
        message.arrival,
        text::json(&message.content)?,
        tokens_of_content(&message.content),
        message.interrupts,
        sql(now) as _,
    )
    .execute(&mut *connection)
    .await
    .map_err(Error::from_write)?;
    let sequence = to_u64(row.event_sequence);
    events.push(
        store_event(connection, organization, task, sequence, (run_events.message)(&message), now)
            .await?,
    );
    Ok(SentRun { task, message: message.id, events })
}

/// Stores an event of a task's stream.
async fn store_event(
    connection: &mut PgConnection,
    organization: OrganizationId,
    task: TaskId,
    sequence: u64,
    event: NewEvent,
    now: Timestamp,
) -> Result<StoredEvent, Error> {
    let NewEvent { kind, payload, step } = event;
    sqlx::query!(
        "INSERT INTO events (organization_id, stream_id, sequence, type, payload, created_at) VALUES ($1, $2, $3, $4, $5, $6)",
        organization.uuid(),
        task.uuid(),
        to_i64(sequence),
        kind,
        payload,
        sql(now) as _,
    )
    .execute(connection)
    .await?;
    Ok(StoredEvent {
        organization,
        stream: task.uuid(),
        sequence,
        kind,
        payload,
        step,
        created_at: now,
    })
}
