//! The messages of tasks: the queue, and the transcript it feeds.

mod edit;
pub(crate) mod write;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use construct_domain::{
    AgentId, MessageId, OrganizationId, StepId, TaskId,
    message::{Attachment, Content, Source},
    money::Usage,
};

use crate::{Error, Store, time::from_sql_option};

pub(crate) use write::message_by_id;

pub(crate) const ENTITY: &str = "message";

/// Maximum length of a task's message queue. Further messages are refused with
/// [`Error::QueueFull`]. A task answers one message at a time, so a longer queue only means a
/// longer wait, and each message costs memory in every list.
pub const QUEUE_LIMIT: u32 = 1_000;

/// A stored message.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredMessage {
    /// Its id.
    pub id: MessageId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The task.
    pub task: TaskId,
    /// Its position in the queue; 0 for messages of the reconciler.
    pub arrival: i64,
    /// Its position in the transcript, from 1. None while it is queued, and if it was dropped.
    pub position: Option<i64>,
    /// The sender.
    pub source: Source,
    /// The content.
    pub content: Content,
    /// The agent that wrote it.
    pub agent: Option<AgentId>,
    /// Of a user message: when its turn ended, or when it was dropped.
    pub processed_at: Option<Timestamp>,
    /// Why its turn failed.
    pub error: Option<String>,
    /// Whether it interrupts the running turn instead of waiting for its end.
    pub interrupts: bool,
    /// When it was superseded. It keeps its position, and prompts no longer contain it.
    pub superseded_at: Option<Timestamp>,
    /// The message that it replaces.
    pub replaces: Option<MessageId>,
    /// Usage of the model call that wrote it.
    pub usage: Usage,
    /// The step whose result it is.
    pub step: Option<StepId>,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was accepted or written.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

impl StoredMessage {
    /// Its position in a list.
    pub fn cursor(&self) -> MessageCursor {
        MessageCursor { position: self.position, arrival: self.arrival }
    }
}

/// A user's message to accept.
#[derive(Debug, Clone, PartialEq)]
pub struct NewUserMessage {
    /// Its id.
    pub id: MessageId,
    /// The task.
    pub task: TaskId,
    /// The content.
    pub content: Content,
    /// Whether it interrupts the running turn instead of waiting for its end.
    pub interrupts: bool,
}

/// Filter for a list of messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MessageFilter {
    /// From this source only.
    pub source: Option<Source>,
    /// Only with a greater position, or without one; 0: all.
    pub after_position: i64,
    /// Whether to include superseded messages.
    pub superseded: bool,
}

/// A part of a list of messages. The order is that of the transcript, then messages without a
/// position in the order of their arrival.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessagePage {
    /// Messages at most.
    pub limit: u32,
    /// Newest first.
    pub descending: bool,
    /// The last message of the previous page; none for the first page.
    pub after: Option<MessageCursor>,
}

/// A position in a list of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageCursor {
    /// [`StoredMessage::position`].
    pub position: Option<i64>,
    /// [`StoredMessage::arrival`].
    pub arrival: i64,
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    task_id: Uuid,
    arrival: i64,
    position: Option<i64>,
    source: String,
    content: Value,
    agent_id: Option<Uuid>,
    processed_at: Option<jiff_sqlx::Timestamp>,
    error: Option<String>,
    interrupts: bool,
    superseded_at: Option<jiff_sqlx::Timestamp>,
    replaces: Option<Uuid>,
    input_tokens: i64,
    output_tokens: i64,
    cache_read_tokens: i64,
    cache_write_tokens: i64,
    thinking_tokens: i64,
    cost_pico_usd: i64,
    step_id: Option<Uuid>,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for StoredMessage {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: MessageId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            task: TaskId::from_uuid(row.task_id),
            arrival: row.arrival,
            position: row.position,
            source: Source::parse(&row.source)
                .ok_or_else(|| Error::internal(format!("unknown source `{}`", row.source)))?,
            content: serde_json::from_value(row.content).map_err(Error::internal)?,
            agent: row.agent_id.map(AgentId::from_uuid),
            processed_at: from_sql_option(row.processed_at),
            error: row.error,
            interrupts: row.interrupts,
            superseded_at: from_sql_option(row.superseded_at),
            replaces: row.replaces.map(MessageId::from_uuid),
            usage: Usage {
                input_tokens: row.input_tokens,
                output_tokens: row.output_tokens,
                cache_read_tokens: row.cache_read_tokens,
                cache_write_tokens: row.cache_write_tokens,
                thinking_tokens: row.thinking_tokens,
                cost_pico_usd: row.cost_pico_usd,
            },
            step: row.step_id.map(StepId::from_uuid),
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            crate::message::Row,
            "SELECT m.id, m.organization_id, m.task_id, m.arrival, m.position, m.source, m.content, m.agent_id, m.processed_at,
                    m.error, m.interrupts, m.superseded_at, m.replaces, m.input_tokens, m.output_tokens, m.cache_read_tokens, m.cache_write_tokens, m.thinking_tokens, m.cost_pico_usd,
                    m.step_id, m.revision, m.created_at, m.updated_at
             FROM messages m " $(+ $tail)+,
            $($argument),*
        )
    };
}
use select;

macro_rules! list {
    ($store:expr, $organization:expr, $task:expr, $filter:expr, $page:expr, $comparison:literal, $direction:literal) => {{
        let (position, arrival) = $page.after();
        select!(
            ["WHERE m.organization_id = $1 AND m.task_id = $2
               AND ($3::text IS NULL OR m.source = $3)
               AND (m.position IS NULL OR m.position > $4)
               AND ($8 OR m.superseded_at IS NULL)
               AND (coalesce(m.position, 9223372036854775807), m.arrival) " $comparison " ($5, $6)
             ORDER BY coalesce(m.position, 9223372036854775807)" $direction ", m.arrival" $direction " LIMIT $7"],
            $organization.uuid(),
            $task.uuid(),
            $filter.source.map(Source::as_str),
            $filter.after_position,
            position,
            arrival,
            i64::from($page.limit),
            $filter.superseded,
        )
        .fetch_all(&$store.pool)
        .await?
    }};
}

impl MessagePage {
    /// The position that the page begins after. In the order of the list, no position is the
    /// greatest.
    fn after(&self) -> (i64, i64) {
        match (self.after, self.descending) {
            (Some(MessageCursor { position, arrival }), _) => {
                (position.unwrap_or(i64::MAX), arrival)
            }
            (None, false) => (0, -1),
            (None, true) => (i64::MAX, i64::MAX),
        }
    }
}

impl Store {
    /// A message by id.
    ///
    /// # Errors
    /// [`Error::NotFound`], also for a message of a deleted task.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn message_get(
        &self,
        organization: OrganizationId,
        id: MessageId,
    ) -> Result<StoredMessage, Error> {
        select!(
            ["JOIN tasks t ON t.organization_id = m.organization_id AND t.id = m.task_id
             WHERE m.organization_id = $1 AND m.id = $2 AND t.deleted_at IS NULL"],
            organization.uuid(),
            id.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// A page of a task's messages.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the task does not exist.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn message_list(
        &self,
        organization: OrganizationId,
        task: TaskId,
        filter: &MessageFilter,
        page: &MessagePage,
    ) -> Result<Vec<StoredMessage>, Error> {
        sqlx::query_scalar!(
            "SELECT id FROM tasks WHERE organization_id = $1 AND id = $2 AND deleted_at IS NULL",
            organization.uuid(),
            task.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: crate::task::ENTITY })?;
        let rows = if page.descending {
            list!(self, organization, task, filter, page, "<", " DESC")
        } else {
            list!(self, organization, task, filter, page, ">", "")
        };
        rows.into_iter().map(TryInto::try_into).collect()
    }

    /// The transcript of a task up to a position: every message that is not superseded, in order,
    /// and then the message that is being admitted.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Internal`] when a message cannot be read.
    pub async fn transcript(
        &self,
        task: TaskId,
        until: i64,
        admitted: Option<MessageId>,
    ) -> Result<Vec<StoredMessage>, Error> {
        self.transcript_after(task, 0, &[], until, admitted).await
    }

    /// [`Store::transcript`] without the positions up to `after`, except for those in `kept`.
    ///
    /// # Errors
    /// The errors of [`Store::transcript`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn transcript_after(
        &self,
        task: TaskId,
        after: i64,
        kept: &[i64],
        until: i64,
        admitted: Option<MessageId>,
    ) -> Result<Vec<StoredMessage>, Error> {
        select!(
            ["WHERE m.task_id = $1 AND (m.position <= $2 AND (m.position > $4 OR m.position = ANY($5)) OR m.id = $3)
                AND m.superseded_at IS NULL
              ORDER BY m.position NULLS LAST"],
            task.uuid(),
            until,
            admitted.map(MessageId::uuid) as _,
            after,
            kept,
        )
        .fetch_all(&self.pool)
        .await?
        .into_iter()
        .map(TryInto::try_into)
        .collect()
    }

    /// The files that users attached to the transcript of a task: newest first, at most `limit`.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Internal`] when one cannot be read.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_files(&self, task: TaskId, limit: u32) -> Result<Vec<Attachment>, Error> {
        let attachments = sqlx::query_scalar!(
            r#"SELECT b.block->'payload' AS "attachment!"
               FROM messages m, jsonb_array_elements(m.content->'blocks') WITH ORDINALITY AS b(block, place)
               WHERE m.task_id = $1 AND m.source = 'user' AND m.position IS NOT NULL AND m.superseded_at IS NULL
                 AND b.block->>'kind' = 'attachment' AND b.block->'payload'->>'file' IS NOT NULL
               ORDER BY m.position DESC, b.place DESC LIMIT $2"#,
            task.uuid(),
            i64::from(limit),
        )
        .fetch_all(&self.pool)
        .await?;
        attachments
            .into_iter()
            .map(|attachment| serde_json::from_value(attachment).map_err(Error::internal))
            .collect()
    }
}
