//! Editing: a message replaces an earlier one.

use construct_domain::{
    MessageId,
    message::{Content, Source},
    money::tokens_of_content,
};

use crate::{
    Error, NewUserMessage, Store, StoredMessage, Write, WriteOutcome, WriteOutput,
    event::to_u64,
    message::write::accepted_message,
    task::rewind::{message_in_transcript, position},
    text,
    write::begin,
};

impl Store {
    /// Requests a rewind to before a user's message, and accepts another message, with the id
    /// `new`, in its place. These are two consecutive intents: the rewind drops the messages that
    /// were queued before, and not the new one.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotInTranscript`], also for a message that is not a user's;
    /// the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn message_edit(
        &self,
        write: &Write,
        id: MessageId,
        new: MessageId,
        content: Content,
        render: impl FnOnce(&StoredMessage) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredMessage>, Error> {
        let mut writer = begin!(self, write);
        let (task, before) = message_in_transcript(&mut writer, id).await?;
        if before.source != Source::User {
            return Err(Error::NotInTranscript);
        }
        let from = position(&before)?;
        let row = sqlx::query!(
            "UPDATE tasks SET
                 rewind_from = least(rewind_from, $3),
                 rewind_intent = intents + 1,
                 intents = intents + 2,
                 intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $4 END,
                 event_sequence = event_sequence + 1,
                 revision = revision + 1,
                 asked_key_id = $5,
                 updated_at = $4
             WHERE organization_id = $1 AND id = $2
             RETURNING intents, event_sequence",
            writer.organization(),
            task.uuid(),
            from,
            writer.now(),
            writer.key(),
        )
        .fetch_one(&mut *writer.transaction)
        .await?;
        let json = text::json(&content)?;
        sqlx::query!(
            "INSERT INTO messages
                 (id, organization_id, task_id, arrival, source, content, estimated_tokens, replaces, created_at, updated_at)
             VALUES ($1, $2, $3, $4, 'user', $5, $6, $7, $8, $8)",
            new.uuid(),
            writer.organization(),
            task.uuid(),
            row.intents,
            json,
            tokens_of_content(&content),
            id.uuid(),
            writer.now() as _,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let new = NewUserMessage { id: new, task, content, interrupts: false };
        let entity = StoredMessage {
            replaces: Some(id),
            ..accepted_message(write, new, row.intents, json)?
        };
        writer.finish_on_task(task, to_u64(row.event_sequence), entity, render).await
    }
}
