//! Rewind of a task to before one of its messages: the intent. The reconciler performs it.

use construct_domain::{MessageId, TaskId, message};

use crate::{
    Error, Store, StoredMessage, StoredTask, Write, WriteOutcome, WriteOutput,
    message::message_by_id,
    task::write::task_reload,
    write::{Writer, begin},
};

/// The target of a rewind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rewind {
    /// The task.
    pub task: TaskId,
    /// The message.
    pub message: MessageId,
    /// Whether the message stays, and only later messages are superseded.
    pub keep: bool,
}

impl Store {
    /// Requests a rewind: supersede the transcript from a message on, end the running turn, and
    /// drop the messages that are queued now. A script and its result stay together.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotInTranscript`]; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_rewind(
        &self,
        write: &Write,
        rewind: Rewind,
        render: impl FnOnce(&StoredTask) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredTask>, Error> {
        let mut writer = begin!(self, write);
        let (task, message) = message_in_transcript(&mut writer, rewind.message).await?;
        if task != rewind.task {
            return Err(Error::NotFound { what: crate::message::ENTITY });
        }
        let from = message::cut_position(position(&message)?, &message.content.blocks, rewind.keep);
        sqlx::query!(
            "UPDATE tasks SET
                 rewind_from = least(rewind_from, $3),
                 rewind_intent = intents + 1,
                 intents = intents + 1,
                 intent_at = CASE WHEN intents > intents_seen THEN intent_at ELSE $4 END,
                 event_sequence = event_sequence + 1,
                 revision = revision + 1,
                 updated_at = $4
             WHERE organization_id = $1 AND id = $2",
            writer.organization(),
            task.uuid(),
            from,
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = task_reload(&mut writer, task).await?;
        writer.finish_on_task(task, entity.event_sequence, entity, render).await
    }
}

/// The position of a message in its transcript.
pub(crate) fn position(message: &StoredMessage) -> Result<i64, Error> {
    message.position.ok_or(Error::NotInTranscript)
}

/// Locks the task of a message and reads the message, which must be in the transcript and not about
/// to be superseded. Read after locking, so that it cannot be superseded between read and write.
pub(crate) async fn message_in_transcript(
    writer: &mut Writer<'_>,
    id: MessageId,
) -> Result<(TaskId, StoredMessage), Error> {
    let task = sqlx::query!(
        "SELECT t.id, t.rewind_from FROM tasks t JOIN messages m ON m.task_id = t.id
         WHERE m.organization_id = $1 AND m.id = $2 AND t.organization_id = $1 AND t.deleted_at IS NULL
         FOR NO KEY UPDATE OF t",
        writer.organization(),
        id.uuid(),
    )
    .fetch_optional(&mut *writer.transaction)
    .await?
    .ok_or(Error::NotFound { what: crate::message::ENTITY })?;
    let message = message_by_id(writer, id).await?;
    // Messages that a pending rewind supersedes count as superseded.
    let is_rewound = |position: i64| task.rewind_from.is_some_and(|from| from <= position);
    match message.position {
        Some(position) if message.superseded_at.is_none() && !is_rewound(position) => {
            Ok((TaskId::from_uuid(task.id), message))
        }
        _ => Err(Error::NotInTranscript),
    }
}
