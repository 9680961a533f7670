//! The frame of every write of the gateway: one transaction changes rows, stores the event that
//! describes the change, and stores the response under the request's idempotency key.

use jiff::Timestamp;
use serde_json::Value;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use construct_domain::{ApiKeyId, OrganizationId, TaskId};

use crate::{
    Audit, Error, NewEvent, Store, StoredEvent, audit,
    event::{to_i64, to_u64},
    time,
};

pub(crate) const ORGANIZATION: &str = "organization";

/// The context of a write.
#[derive(Debug, Clone)]
pub struct Write {
    /// The organization that the caller writes in.
    pub organization: OrganizationId,
    /// The time of the change.
    pub now: Timestamp,
    /// None: every call is executed.
    pub idempotency: Option<Idempotency>,
    /// The audit entry that is stored with the change. A repeated write stores none.
    pub audit: Option<Audit>,
    /// The API key that the write counts for; none: the caller used none.
    pub key: Option<ApiKeyId>,
}

/// The identity of a request.
#[derive(Debug, Clone)]
pub struct Idempotency {
    /// Chosen by the client, unique in its organization.
    pub key: String,
    /// The called method.
    pub method: &'static str,
    /// SHA-256 of the request.
    pub request_hash: [u8; 32],
}

impl Write {
    /// A write without idempotency key, audit entry and API key.
    pub fn new(organization: OrganizationId, now: Timestamp) -> Self {
        Self { organization, now, idempotency: None, audit: None, key: None }
    }

    /// The stored form of an event of this write.
    pub(crate) fn to_stored_event(
        &self,
        stream: Uuid,
        sequence: u64,
        event: NewEvent,
    ) -> StoredEvent {
        StoredEvent {
            organization: self.organization,
            stream,
            sequence,
            kind: event.kind,
            payload: event.payload,
            step: event.step,
            created_at: time::micros(self.now),
        }
    }
}

/// What the caller derives from a changed entity: the event for subscribers, and the response.
#[derive(Debug, Clone)]
pub struct WriteOutput {
    /// The event that is stored with the change. Not stored when nothing changed.
    pub event: NewEvent,
    /// The encoded response, stored for repeated requests. Not stored when the request has no
    /// idempotency key.
    pub response: Vec<u8>,
}

/// The outcome of a write.
#[derive(Debug, Clone, PartialEq)]
pub enum WriteOutcome<T> {
    /// This call executed the write.
    Applied {
        /// The entity after the write; before it, if it was deleted.
        entity: T,
        /// The stored event, to be published. None when nothing changed.
        event: Option<StoredEvent>,
    },
    /// An earlier call with the same key executed the write.
    Repeated {
        /// The response of that call.
        response: Vec<u8>,
    },
}

/// No audit entries, for statements that can take some.
pub(crate) fn no_entries() -> Value {
    Value::Array(Vec::new())
}

/// The start of a write.
pub(crate) enum WriteStart<'w> {
    New(Writer<'w>),
    Repeated(Vec<u8>),
}

/// Begins a write. Returns from the calling function when the request is a repeated one.
macro_rules! begin {
    ($store:expr, $write:expr) => {
        match $store.write_begin($write).await? {
            crate::write::WriteStart::New(writer) => writer,
            crate::write::WriteStart::Repeated(response) => {
                return Ok(crate::WriteOutcome::Repeated { response })
            }
        }
    };
}
pub(crate) use begin;

/// The transaction of a write. Dropping it unfinished rolls it back, which releases the idempotency
/// key.
pub(crate) struct Writer<'w> {
    pub(crate) transaction: Transaction<'static, Postgres>,
    write: &'w Write,
    /// Whether an earlier statement stored the audit entry.
    audited: bool,
}

impl Store {
    /// Opens the transaction and claims the idempotency key. The organization must not be deleted,
    /// and cannot be deleted before the transaction ends.
    ///
    /// Of two requests with the same key the second waits here until the first has ended. It then
    /// repeats the response of the first, or executes if the first failed.
    pub(crate) async fn write_begin<'w>(&self, write: &'w Write) -> Result<WriteStart<'w>, Error> {
        write_begin_in(self.pool.begin().await?, write).await
    }

    /// The response of an earlier write with the same key, for callers that check before they
    /// prepare anything. None: there is none yet. A concurrent one is detected when the write
    /// begins.
    ///
    /// # Errors
    /// [`Error::IdempotencyMismatch`] when the key was used for another request.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn idempotent_response(&self, write: &Write) -> Result<Option<Vec<u8>>, Error> {
        let Some(Idempotency { key, method, request_hash }) = &write.idempotency else {
            return Ok(None);
        };
        let first = sqlx::query!(
            "SELECT method, request_hash, response FROM idempotency_keys WHERE organization_id = $1 AND key = $2",
            write.organization.uuid(),
            key,
        );
        match first.fetch_optional(&self.pool).await? {
            None => Ok(None),
            Some(first) if first.method == *method && first.request_hash == request_hash => {
                Ok(Some(first.response))
            }
            Some(_) => Err(Error::IdempotencyMismatch),
        }
    }

    /// Deletes the responses of requests from before a time. Returns their number.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn idempotency_expire(&self, before: Timestamp) -> Result<u64, Error> {
        let done =
            sqlx::query!("DELETE FROM idempotency_keys WHERE created_at < $1", time::sql(before))
                .execute(&self.pool)
                .await?;
        Ok(done.rows_affected())
    }
}

/// [`Store::write_begin`] in a transaction that has executed other statements before.
pub(crate) async fn write_begin_in<'w>(
    mut transaction: Transaction<'static, Postgres>,
    write: &'w Write,
) -> Result<WriteStart<'w>, Error> {
    let Some(Idempotency { key, method, request_hash }) = &write.idempotency else {
        sqlx::query_scalar!(
            "SELECT id FROM organizations WHERE id = $1 AND deleted_at IS NULL FOR KEY SHARE",
            write.organization.uuid(),
        )
        .fetch_optional(&mut *transaction)
        .await?
        .ok_or(Error::NotFound { what: ORGANIZATION })?;
        return Ok(WriteStart::New(Writer { transaction, write, audited: false }));
    };
    let taken = sqlx::query!(
        "INSERT INTO idempotency_keys (organization_id, key, method, request_hash, response, created_at)
         SELECT o.id, $2, $3, $4, '', $5 FROM organizations o WHERE o.id = $1 AND o.deleted_at IS NULL FOR KEY SHARE
         ON CONFLICT ON CONSTRAINT idempotency_keys_pkey DO NOTHING",
        write.organization.uuid(),
        key,
        method,
        request_hash.as_slice(),
        time::sql(write.now),
    )
    .execute(&mut *transaction)
    .await
    .map_err(Error::from_write)?;
    if taken.rows_affected() == 1 {
        return Ok(WriteStart::New(Writer { transaction, write, audited: false }));
    }
    let first = sqlx::query!(
        "SELECT method, request_hash, response FROM idempotency_keys WHERE organization_id = $1 AND key = $2",
        write.organization.uuid(),
        key,
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let Some(first) = first else {
        let closed = sqlx::query_scalar!(
            r#"SELECT NOT EXISTS (SELECT 1 FROM organizations WHERE id = $1 AND deleted_at IS NULL) AS "closed!""#,
            write.organization.uuid(),
        )
        .fetch_one(&mut *transaction)
        .await?;
        return Err(if closed {
            Error::NotFound { what: ORGANIZATION }
        } else {
            // The key expired between the two statements; the client can retry.
            Error::Unavailable("the idempotency key has just expired".into())
        });
    };
    transaction.rollback().await?;
    if first.method == *method && first.request_hash == request_hash {
        Ok(WriteStart::Repeated(first.response))
    } else {
        Err(Error::IdempotencyMismatch)
    }
}

impl Writer<'_> {
    pub(crate) fn organization(&self) -> Uuid {
        self.write.organization.uuid()
    }

    /// The API key that the write counts for.
    pub(crate) fn key(&self) -> Option<Uuid> {
        self.write.key.map(ApiKeyId::uuid)
    }

    pub(crate) fn now(&self) -> jiff_sqlx::Timestamp {
        time::sql(self.write.now)
    }

    /// Ends a write whose event belongs to the organization's stream. The stream's counter is
    /// incremented last, because every other write of the organization's entities waits for it
    /// until the commit.
    pub(crate) async fn finish<T>(
        mut self,
        entity: T,
        render: impl FnOnce(&T) -> WriteOutput,
    ) -> Result<WriteOutcome<T>, Error> {
        let WriteOutput { event, response } = render(&entity);
        // Part of a statement that runs anyway, which saves a round trip.
        let audit = self.audit(&response)?;
        let sequence = sqlx::query_scalar!(
            r#"WITH stream AS (
                   UPDATE organizations SET event_sequence = event_sequence + 1 WHERE id = $1 RETURNING id, event_sequence
               ), audit AS (
                   INSERT INTO audit_entries SELECT * FROM jsonb_populate_recordset(NULL::audit_entries, $6)
                   ON CONFLICT ON CONSTRAINT audit_entries_pkey DO NOTHING
               )
               INSERT INTO events (organization_id, stream_id, sequence, type, payload, step, created_at)
               SELECT id, id, event_sequence, $2, $3, $4, $5 FROM stream
               RETURNING sequence"#,
            self.organization(),
            event.kind,
            event.payload,
            event.step.map(to_i64),
            self.now() as _,
            audit,
        )
        .fetch_optional(&mut *self.transaction)
        .await?
        .ok_or(Error::NotFound { what: ORGANIZATION })?;
        let event = self.write.to_stored_event(self.organization(), to_u64(sequence), event);
        self.commit(&response).await?;
        Ok(WriteOutcome::Applied { entity, event: Some(event) })
    }

    /// Ends a write whose event has number `sequence` in the task's stream. The caller took the
    /// number from the task's row.
    pub(crate) async fn finish_on_task<T>(
        mut self,
        task: TaskId,
        sequence: u64,
        entity: T,
        render: impl FnOnce(&T) -> WriteOutput,
    ) -> Result<WriteOutcome<T>, Error> {
        let WriteOutput { event, response } = render(&entity);
        let audit = self.audit(&response)?;
        let event = self.write.to_stored_event(task.uuid(), sequence, event);
        sqlx::query!(
            "WITH audit AS (
                 INSERT INTO audit_entries SELECT * FROM jsonb_populate_recordset(NULL::audit_entries, $8)
                 ON CONFLICT ON CONSTRAINT audit_entries_pkey DO NOTHING
             )
             INSERT INTO events (organization_id, stream_id, sequence, type, payload, step, created_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7)",
            self.organization(),
            event.stream,
            to_i64(event.sequence),
            event.kind,
            event.payload,
            event.step.map(to_i64),
            self.now(),
            audit,
        )
        .execute(&mut *self.transaction)
        .await?;
        self.commit(&response).await?;
        Ok(WriteOutcome::Applied { entity, event: Some(event) })
    }

    /// Ends a write that changed nothing.
    pub(crate) async fn finish_unchanged<T>(
        self,
        entity: T,
        render: impl FnOnce(&T) -> WriteOutput,
    ) -> Result<WriteOutcome<T>, Error> {
        let response = render(&entity).response;
        self.commit(&response).await?;
        Ok(WriteOutcome::Applied { entity, event: None })
    }

    /// The audit entry of the write, as a statement parameter.
    fn audit(&mut self, response: &[u8]) -> Result<Value, Error> {
        self.audited = true;
        match &self.write.audit {
            Some(audit) => audit.rows(response),
            None => Ok(no_entries()),
        }
    }

    /// Commits, and stores the response for repeated requests.
    pub(crate) async fn commit(mut self, response: &[u8]) -> Result<(), Error> {
        let audit = if self.audited { no_entries() } else { self.audit(response)? };
        if let Some(Idempotency { key, .. }) = &self.write.idempotency {
            sqlx::query!(
                "WITH audit AS (
                     INSERT INTO audit_entries SELECT * FROM jsonb_populate_recordset(NULL::audit_entries, $4)
                     ON CONFLICT ON CONSTRAINT audit_entries_pkey DO NOTHING
                 )
                 UPDATE idempotency_keys SET response = $3 WHERE organization_id = $1 AND key = $2",
                self.organization(),
                key,
                response,
                audit,
            )
            .execute(&mut *self.transaction)
            .await?;
        } else if audit != no_entries() {
            audit::insert(&mut self.transaction, audit).await?;
        }
        self.transaction.commit().await?;
        if let Some(audit) = &self.write.audit {
            audit.mark_written();
        }
        Ok(())
    }
}
