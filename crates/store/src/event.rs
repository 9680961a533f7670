//! Events, stored with the change they describe, in streams without gaps.

use jiff::Timestamp;
use uuid::Uuid;

use construct_domain::{OrganizationId, TaskId};

use crate::{Error, Store};

/// An event to store. Its stream assigns the sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEvent {
    /// `message.created`, …
    pub kind: String,
    /// The encoded event, opaque to the store.
    pub payload: Vec<u8>,
    /// Number of the step it ends, in its task, from 1.
    pub step: Option<u64>,
}

/// A stored event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredEvent {
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// Id of the task or organization whose stream it is in.
    pub stream: Uuid,
    /// Its position in the stream: 1, 2, 3, …
    pub sequence: u64,
    /// `message.created`, …
    pub kind: String,
    /// The encoded event.
    pub payload: Vec<u8>,
    /// Number of the step it ends, in its task, from 1.
    pub step: Option<u64>,
    /// When it happened.
    pub created_at: Timestamp,
}

/// A sequence of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream {
    organization: OrganizationId,
    id: Uuid,
}

impl Stream {
    /// The stream of a task.
    pub const fn task(organization: OrganizationId, task: TaskId) -> Self {
        Self { organization, id: task.uuid() }
    }

    /// The stream of an organization's agents, models and providers.
    pub const fn organization(organization: OrganizationId) -> Self {
        Self { organization, id: organization.uuid() }
    }

    /// Id of the task or organization.
    pub const fn id(self) -> Uuid {
        self.id
    }
}

/// A count that is never negative, from a column, which is always signed in PostgreSQL.
pub(crate) fn to_u64(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// The reverse of [`to_u64`], for counters that never reach the maximum.
pub(crate) fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Store {
    /// The events of a stream with a greater sequence, in order, at most `limit`. It ends early
    /// with the event whose payload reaches `bytes` together with those before it.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn events_after(
        &self,
        stream: Stream,
        sequence: u64,
        limit: u32,
        bytes: u64,
    ) -> Result<Vec<StoredEvent>, Error> {
        let rows = sqlx::query!(
            r#"SELECT sequence, kind, payload, step, created_at
               FROM (SELECT sequence, type AS kind, payload, step, created_at,
                            sum(octet_length(payload)) OVER (ORDER BY sequence) - octet_length(payload) AS before
                     FROM events
                     WHERE stream_id = $1 AND organization_id = $2 AND sequence > $3
                     ORDER BY sequence
                     LIMIT $4) page
               WHERE before < $5
               ORDER BY sequence"#,
            stream.id,
            stream.organization.uuid(),
            to_i64(sequence),
            i64::from(limit),
            to_i64(bytes),
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows
            .into_iter()
            .map(|row| StoredEvent {
                organization: stream.organization,
                stream: stream.id,
                sequence: to_u64(row.sequence),
                kind: row.kind,
                payload: row.payload,
                step: row.step.map(to_u64),
                created_at: row.created_at.into(),
            })
            .collect())
    }

    /// The sequence of the newest event of a stream, 0 when it has none.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn event_head(&self, stream: Stream) -> Result<u64, Error> {
        // A statement of its own: PostgreSQL plans that of `event_heads` each time, because a
        // generic plan for arrays of any length never looks as good.
        let head = sqlx::query_scalar!(
            "SELECT sequence FROM events WHERE stream_id = $1 AND organization_id = $2 ORDER BY sequence DESC LIMIT 1",
            stream.id,
            stream.organization.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(head.map_or(0, to_u64))
    }

    /// The sequence of the newest event of each stream, in the given order, with one query.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn event_heads(&self, streams: &[Stream]) -> Result<Vec<(Stream, u64)>, Error> {
        let ids: Vec<Uuid> = streams.iter().map(|stream| stream.id).collect();
        let organizations: Vec<Uuid> =
            streams.iter().map(|stream| stream.organization.uuid()).collect();
        // One descent into the primary key's index per stream, not a scan of the streams.
        let heads = sqlx::query_scalar!(
            r#"SELECT coalesce((
                   SELECT e.sequence FROM events e
                   WHERE e.stream_id = wanted.stream_id AND e.organization_id = wanted.organization_id
                   ORDER BY e.sequence DESC LIMIT 1
               ), 0) AS "head!"
               FROM unnest($1::uuid[], $2::uuid[]) WITH ORDINALITY AS wanted (stream_id, organization_id, number)
               ORDER BY wanted.number"#,
            &ids,
            &organizations,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(streams.iter().copied().zip(heads.into_iter().map(to_u64)).collect())
    }
}
