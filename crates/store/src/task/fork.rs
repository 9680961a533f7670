//! Forks: new tasks that begin with a copy of another task's transcript.

use construct_domain::{
    MessageId, TaskId,
    message::{self, Block, CodeCall, CodeResult, Content, code_calls},
    money::tokens_of_content,
};
use uuid::Uuid;

use crate::{
    Error, Store, StoredMessage, StoredTask, Write, WriteOutcome, WriteOutput,
    task::{
        rewind::{message_in_transcript, position},
        write::task_reload,
    },
    text,
    write::{Writer, begin},
};

/// A fork to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewFork {
    /// The new task's id.
    pub id: TaskId,
    /// The task that is copied.
    pub source: TaskId,
    /// The last copied message; with the results of its scripts, if it has any.
    pub message: MessageId,
    /// Empty: the title of the source.
    pub title: String,
    /// The directory its tools may access; empty: a directory of its own.
    pub workspace: String,
    /// The message after the copied ones if the new task has another workspace: its id and content.
    pub workspace_notice: (MessageId, Content),
}

impl Store {
    /// Creates a task whose transcript is that of another one up to a message. The copies have new
    /// ids. Superseded messages are left out, and so are the costs of the model calls, which stay
    /// with the source. The fork has the same agent, limits, policy, pinned facts and pool, and its
    /// own budgets with the same limits.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::NotInTranscript`]; those of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_fork(
        &self,
        write: &Write,
        new: NewFork,
        render: impl FnOnce(&StoredTask) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<StoredTask>, Error> {
        let mut writer = begin!(self, write);
        // The lock on the task keeps its transcript unchanged during the copy.
        let (source, message) = message_in_transcript(&mut writer, new.message).await?;
        if source != new.source {
            return Err(Error::NotFound { what: crate::message::ENTITY });
        }
        let end = message::cut_position(position(&message)?, &message.content.blocks, true);
        let is_elsewhere = task_copy(&mut writer, &new).await?;
        let mut copied = messages_copy(&mut writer, &new, end).await?;
        if let Some(results) = unknown_results(&mut writer, &new, &message).await? {
            copied += 1;
            message_append(&mut writer, &new, copied, Uuid::now_v7(), &results).await?;
        }
        if is_elsewhere {
            let (notice, content) = &new.workspace_notice;
            message_append(&mut writer, &new, copied + 1, notice.uuid(), content).await?;
        }
        compactions_copy(&mut writer, &new, end).await?;
        sqlx::query!(
            "UPDATE tasks SET
                 last_position = (SELECT max(m.position) FROM messages m WHERE m.task_id = $1),
                 compacted_through = coalesce((SELECT max(c.through) FROM compactions c WHERE c.task_id = $1), 0),
                 transcript_tokens = transcript_size($1, 9223372036854775807)
             WHERE id = $1",
            new.id.uuid(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        budgets_copy(&mut writer, &new).await?;
        let entity = task_reload(&mut writer, new.id).await?;
        writer.finish_on_task(new.id, entity.event_sequence, entity, render).await
    }
}

/// Results for scripts that are still running or suspended at the fork: vendors refuse calls
/// without results.
async fn unknown_results(
    writer: &mut Writer<'_>,
    new: &NewFork,
    last: &StoredMessage,
) -> Result<Option<Content>, Error> {
    let unknown = |call: &CodeCall| {
        Block::CodeInterpreterResult(CodeResult {
            id: call.id.clone(),
            error:
                "the conversation was copied while this script ran; here it is unknown what it did"
                    .to_owned(),
            ..CodeResult::default()
        })
    };
    let blocks: Vec<Block> = code_calls(&last.content.blocks).map(unknown).collect();
    if blocks.is_empty() {
        return Ok(None);
    }
    let ended = sqlx::query_scalar!(
        r#"SELECT EXISTS (SELECT FROM messages WHERE task_id = $1 AND position = $2) AS "ended!""#,
        new.source.uuid(),
        position(last)? + 1,
    )
    .fetch_one(&mut *writer.transaction)
    .await?;
    Ok((!ended).then_some(Content { blocks }))
}

/// Appends a system message to the copied transcript.
async fn message_append(
    writer: &mut Writer<'_>,
    new: &NewFork,
    position: i64,
    id: Uuid,
    content: &Content,
) -> Result<(), Error> {
    sqlx::query!(
        "INSERT INTO messages
             (id, organization_id, task_id, arrival, position, source, content, estimated_tokens, processed_at, created_at, updated_at)
         VALUES ($1, $2, $3, 0, $4, 'system', $5, $6, $7, $7, $7)",
        id,
        writer.organization(),
        new.id.uuid(),
        position,
        text::json(content)?,
        tokens_of_content(content),
        writer.now() as _,
    )
    .execute(&mut *writer.transaction)
    .await
    .map_err(Error::from_write)?;
    Ok(())
}

/// Copies the task. Returns whether the fork has another workspace than its source. A directory of
/// its own is always another one.
async fn task_copy(writer: &mut Writer<'_>, new: &NewFork) -> Result<bool, Error> {
    sqlx::query_scalar!(
        r#"INSERT INTO tasks
             (id, organization_id, agent_id, workspace, title, titled, max_turns_override, policy, compute, phase_since,
              event_sequence, created_at, updated_at, root_id, forked_from, forked_from_message, context_scale, api_key_id, asked_key_id,
              pinned)
         SELECT $2, o.organization_id, o.agent_id, $4, CASE WHEN $5 = '' THEN o.title ELSE $5 END, o.titled OR $5 <> '',
                o.max_turns_override, o.policy, o.compute, $7, 1, $7, $7, $2, o.id, $6, o.context_scale, $8, $8, o.pinned
         FROM tasks o WHERE o.organization_id = $1 AND o.id = $3
         RETURNING workspace = '' OR workspace <> (SELECT o.workspace FROM tasks o WHERE o.id = $3) AS "elsewhere!""#,
        writer.organization(),
        new.id.uuid(),
        new.source.uuid(),
        &*text::clean(&new.workspace),
        &*text::clean(&new.title),
        new.message.uuid(),
        writer.now() as _,
        writer.key() as _,
    )
    .fetch_one(&mut *writer.transaction)
    .await
    .map_err(Error::from_write)
}

/// Copies the messages before `end`, and returns their number.
async fn messages_copy(writer: &mut Writer<'_>, new: &NewFork, end: i64) -> Result<i64, Error> {
    let count = sqlx::query_scalar!(
        r#"SELECT count(*) AS "count!" FROM messages WHERE task_id = $1 AND position < $2 AND superseded_at IS NULL"#,
        new.source.uuid(),
        end,
    )
    .fetch_one(&mut *writer.transaction)
    .await?;
    let ids: Vec<Uuid> = (0..count).map(|_| Uuid::now_v7()).collect();
    sqlx::query!(
        "INSERT INTO messages
             (id, organization_id, task_id, arrival, position, source, content, agent_id, processed_at, error, estimated_tokens,
              created_at, updated_at)
         SELECT n.id, o.organization_id, $2, 0, o.place, o.source, o.content, o.agent_id, coalesce(o.processed_at, $4), o.error,
                o.estimated_tokens, o.created_at, $4
         FROM (
             SELECT m.*, row_number() OVER (ORDER BY m.position) AS place FROM messages m
             WHERE m.task_id = $1 AND m.position < $3 AND m.superseded_at IS NULL
         ) AS o
         JOIN unnest($5::uuid[]) WITH ORDINALITY AS n (id, place) ON n.place = o.place",
        new.source.uuid(),
        new.id.uuid(),
        end,
        writer.now() as _,
        &ids,
    )
    .execute(&mut *writer.transaction)
    .await
    .map_err(Error::from_write)?;
    Ok(count)
}

/// Copies the compactions before `end`. Their positions are those of the fork, which has no
/// superseded messages.
async fn compactions_copy(writer: &mut Writer<'_>, new: &NewFork, end: i64) -> Result<(), Error> {
    sqlx::query!(
        "WITH places AS (
             SELECT m.position, row_number() OVER (ORDER BY m.position) AS place FROM messages m
             WHERE m.task_id = $1 AND m.position < $3 AND m.superseded_at IS NULL
         )
         INSERT INTO compactions
             (task_id, organization_id, through, kept, content, estimated_tokens, replaced_tokens, summary, created_at)
         SELECT $2, c.organization_id, (SELECT max(p.place) FROM places p WHERE p.position <= c.through),
                ARRAY(SELECT p.place FROM places p WHERE p.position = ANY (c.kept) ORDER BY p.place),
                c.content, c.estimated_tokens, c.replaced_tokens, c.summary, c.created_at
         FROM compactions c WHERE c.task_id = $1 AND c.through < $3",
        new.source.uuid(),
        new.id.uuid(),
        end,
    )
    .execute(&mut *writer.transaction)
    .await
    .map_err(Error::from_write)?;
    Ok(())
}

/// Copies the budgets: a fork may spend as much as its source. Budgets that cover both still cover
/// both.
async fn budgets_copy(writer: &mut Writer<'_>, new: &NewFork) -> Result<(), Error> {
    let periods =
        sqlx::query_scalar!("SELECT period FROM budgets WHERE task_id = $1", new.source.uuid())
            .fetch_all(&mut *writer.transaction)
            .await?;
    let ids: Vec<Uuid> = periods.iter().map(|_| Uuid::now_v7()).collect();
    sqlx::query!(
        "INSERT INTO budgets (id, organization_id, task_id, period, limit_pico_usd, window_start, counted_at, created_at, updated_at)
         SELECT n.id, b.organization_id, $2, b.period, b.limit_pico_usd, budgets_window(b.period, $3), $3, $3, $3
         FROM budgets b JOIN unnest($4::uuid[], $5::text[]) AS n (id, period) ON n.period = b.period
         WHERE b.task_id = $1",
        new.source.uuid(),
        new.id.uuid(),
        writer.now() as _,
        &ids,
        &periods,
    )
    .execute(&mut *writer.transaction)
    .await
    .map_err(Error::from_write)?;
    Ok(())
}
