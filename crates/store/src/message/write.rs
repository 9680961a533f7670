//! Writes of users: send messages, and change or delete queued ones.
//!
//! Each write locks the task's row first. So the messages of one task are accepted one after
//! another, and a commit of the reconciler is entirely before or entirely after each write.

use jiff::Timestamp;
use serde_json::Value;
use sqlx::{PgConnection, PgExecutor};

use construct_domain::{
    ApiKeyId, MessageId, TaskId,
    message::{Content, Source},
    money::{Usage, tokens_of_content},
};

use crate::{
    Error, NewEvent, NewUserMessage, QUEUE_LIMIT, Store, StoredMessage, Write, WriteOutcome,
    WriteOutput,
    event::{to_i64, to_u64},
    message::{ENTITY, select},
    text, time,
    write::{Writer, begin, no_entries},
};

impl Store {
    /// Accepts a user's message. Messages are answered in the order of acceptance, interrupting
    /// ones first. The entity that `render` receives has no arrival yet: the statement that also
    /// stores the event assigns it.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the task does not exist, [`Error::QueueFull`]; the errors of every
    /// write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn message_create(
        &self,
        write: &Write,
        new: NewUserMessage,
        render: impl FnOnce(&StoredMessage) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredMessage>, Error> {
        let content = text::json(&new.content)?;
        let entity = accepted_message(write, new, 0, content.clone())?;
        let WriteOutput { event, response } = render(&entity);
        if write.idempotency.is_none() {
            let audit =
                write.audit.as_ref().map_or(Ok(no_entries()), |audit| audit.rows(&response))?;
            let written = insert(&self.pool, write, entity, content, event, audit).await?;
            if let Some(audit) = &write.audit {
                audit.mark_written();
            }
            return Ok(written);
        }
        let mut writer = begin!(self, write);
        // The audit entry is stored together with the response.
        let written =
            insert(&mut *writer.transaction, write, entity, content, event, no_entries()).await?;
        writer.commit(&response).await?;
        Ok(written)
    }

    /// Changes the content of a queued message.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotQueued`], [`Error::Conflict`] when the revision is not the
    /// expected one.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn message_update(
        &self,
        write: &Write,
        id: MessageId,
        expected_revision: Option<i64>,
        content: Content,
        render: impl FnOnce(&StoredMessage) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredMessage>, Error> {
        let mut writer = begin!(self, write);
        let (task, sequence) = message_lock(&mut writer, id).await?;
        let before = message_get_queued(&mut writer, id).await?;
        if expected_revision.is_some_and(|revision| revision != before.revision) {
            return Err(Error::Conflict);
        }
        let tokens = tokens_of_content(&content);
        let content = text::json(&content)?;
        sqlx::query!(
            "UPDATE messages SET content = $2, estimated_tokens = $4, revision = revision + 1, updated_at = $3 WHERE id = $1",
            id.uuid(),
            content,
            writer.now(),
            tokens,
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = StoredMessage {
            content: serde_json::from_value(content).map_err(Error::internal)?,
            revision: before.revision + 1,
            updated_at: time::micros(write.now),
            ..before
        };
        writer.finish_on_task(task, sequence, entity, render).await
    }

    /// Deletes a queued message. The entity in the result is the message before the deletion.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotQueued`]; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn message_delete(
        &self,
        write: &Write,
        id: MessageId,
        render: impl FnOnce(&StoredMessage) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredMessage>, Error> {
        let mut writer = begin!(self, write);
        let (task, sequence) = message_lock(&mut writer, id).await?;
        let entity = message_get_queued(&mut writer, id).await?;
        sqlx::query!("DELETE FROM messages WHERE id = $1", id.uuid())
            .execute(&mut *writer.transaction)
            .await?;
        writer.finish_on_task(task, sequence, entity, render).await
    }
}

/// Accepts a message within a transaction.
pub(crate) async fn message_insert(
    connection: &mut PgConnection,
    write: &Write,
    new: NewUserMessage,
    event_of: fn(&StoredMessage) -> NewEvent,
) -> Result<WriteOutcome<StoredMessage>, Error> {
    let content = text::json(&new.content)?;
    let entity = accepted_message(write, new, 0, content.clone())?;
    let event = event_of(&entity);
    insert(connection, write, entity, content, event, no_entries()).await
}

/// The entity that an insert creates.
pub(super) fn accepted_message(
    write: &Write,
    new: NewUserMessage,
    arrival: i64,
    content: Value,
) -> Result<StoredMessage, Error> {
    let now: Timestamp = time::micros(write.now);
    Ok(StoredMessage {
        id: new.id,
        organization: write.organization,
        task: new.task,
        arrival,
        position: None,
        source: Source::User,
        content: serde_json::from_value(content).map_err(Error::internal)?,
        agent: None,
        processed_at: None,
        error: None,
        interrupts: new.interrupts,
        superseded_at: None,
        replaces: None,
        usage: Usage::default(),
        step: None,
        revision: 1,
        created_at: now,
        updated_at: now,
    })
}

/// Stores a message with its event in one statement: one round trip, all or nothing.
///
/// Two races are accepted, because every message would pay for the locks. A message that is
/// accepted while its organization is being deleted is still answered. Concurrent messages do not
/// count each other, so the queue can exceed its limit by the number of connections.
async fn insert(
    executor: impl PgExecutor<'_>,
    write: &Write,
    entity: StoredMessage,
    content: Value,
    event: NewEvent,
    audit: Value,
) -> Result<WriteOutcome<StoredMessage>, Error> {
    let done = sqlx::query!(
        r#"WITH task AS (
               UPDATE tasks t SET
                   intents = t.intents + 1,
                   intent_at = CASE WHEN t.intents > t.intents_seen THEN t.intent_at ELSE $3 END,
                   event_sequence = t.event_sequence + 1,
                   revision = t.revision + 1,
                   asked_key_id = $13,
                   updated_at = $3
               WHERE t.organization_id = $1 AND t.id = $2 AND t.deleted_at IS NULL
                 AND (SELECT count(*) FROM messages q
                      WHERE q.task_id = t.id AND q.position IS NULL AND q.processed_at IS NULL) < $7
               RETURNING t.id, t.organization_id, t.intents, t.event_sequence
           ), message AS (
               INSERT INTO messages
                   (id, organization_id, task_id, arrival, source, content, estimated_tokens, interrupts, created_at, updated_at)
               SELECT $4, task.organization_id, task.id, task.intents, 'user', $5, $6, $11, $3, $3 FROM task
           ), recorded AS (
               INSERT INTO events (organization_id, stream_id, sequence, type, payload, step, created_at)
               SELECT task.organization_id, task.id, task.event_sequence, $8, $9, $10, $3 FROM task
           ), audited AS (
               INSERT INTO audit_entries SELECT entry.* FROM task, jsonb_populate_recordset(NULL::audit_entries, $12) AS entry
               ON CONFLICT ON CONSTRAINT audit_entries_pkey DO NOTHING
           )
           SELECT task.intents AS "arrival?", task.event_sequence AS "sequence?"
           FROM tasks there LEFT JOIN task ON true
           WHERE there.organization_id = $1 AND there.id = $2 AND there.deleted_at IS NULL"#,
        write.organization.uuid(),
        entity.task.uuid(),
        time::sql(write.now) as _,
        entity.id.uuid(),
        content,
        tokens_of_content(&entity.content),
        i64::from(QUEUE_LIMIT),
        event.kind,
        event.payload,
        event.step.map(to_i64) as _,
        entity.interrupts,
        audit,
        write.key.map(ApiKeyId::uuid) as _,
    )
    .fetch_optional(executor)
    .await
    .map_err(Error::from_write)?
    .ok_or(Error::NotFound { what: crate::task::ENTITY })?;
    let (Some(arrival), Some(sequence)) = (done.arrival, done.sequence) else {
        return Err(Error::QueueFull { limit: QUEUE_LIMIT });
    };
    let event = write.to_stored_event(entity.task.uuid(), to_u64(sequence), event);
    Ok(WriteOutcome::Applied { entity: StoredMessage { arrival, ..entity }, event: Some(event) })
}

/// Locks the task of the message for a change of its queue, and counts the event. Increments the
/// version too: a concurrent commit may depend on the message, and its content may be read beside
/// the commit.
async fn message_lock(writer: &mut Writer<'_>, id: MessageId) -> Result<(TaskId, u64), Error> {
    let task = sqlx::query!(
        "UPDATE tasks t SET
             intents = t.intents + 1,
             intent_at = CASE WHEN t.intents > t.intents_seen THEN t.intent_at ELSE $3 END,
             version = t.version + 1,
             -- Without the message it may be at rest.
             parent_due_at = CASE WHEN t.parent_id IS NOT NULL THEN $3 ELSE t.parent_due_at END,
             event_sequence = t.event_sequence + 1,
             revision = t.revision + 1,
             updated_at = $3
         FROM messages m
         WHERE m.organization_id = $1 AND m.id = $2 AND t.organization_id = $1 AND t.id = m.task_id AND t.deleted_at IS NULL
         RETURNING t.id, t.event_sequence",
        writer.organization(),
        id.uuid(),
        writer.now(),
    )
    .fetch_optional(&mut *writer.transaction)
    .await?
    .ok_or(Error::NotFound { what: ENTITY })?;
    Ok((TaskId::from_uuid(task.id), to_u64(task.event_sequence)))
}

/// The message, if it is still queued. Call after locking its task, so that it cannot change
/// between read and write.
async fn message_get_queued(
    writer: &mut Writer<'_>,
    id: MessageId,
) -> Result<StoredMessage, Error> {
    let message = message_by_id(writer, id).await?;
    if message.position.is_some() || message.processed_at.is_some() {
        Err(Error::NotQueued)
    } else {
        Ok(message)
    }
}

/// The message, within a write.
pub(crate) async fn message_by_id(
    writer: &mut Writer<'_>,
    id: MessageId,
) -> Result<StoredMessage, Error> {
    select!(["WHERE m.organization_id = $1 AND m.id = $2"], writer.organization(), id.uuid())
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
}
