//! The audit trail (docs/adr/0032-audit.md). Entries are appended and read. A function of the
//! database removes old entries; a trigger refuses every other change.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use construct_domain::{ApiKeyId, AuditEntryId, OrganizationId, UserId};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{
    Cursor, Error, Key, Page, Store,
    identity::list_by_time,
    text,
    time::{self, sql_option},
};

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditEntry {
    /// Its id. An entry with an existing id is not written again.
    pub id: AuditEntryId,
    /// The organization whose trail it is in.
    pub organization: OrganizationId,
    /// The user who acted; none: unknown.
    pub user: Option<UserId>,
    /// The presented API key.
    pub api_key: Option<ApiKeyId>,
    /// The called method, as `TaskService/CreateTask`; empty: several.
    pub method: String,
    /// The protocol of the call.
    pub protocol: String,
    /// The address of the peer.
    pub peer: String,
    /// The user agent that the client sent.
    pub user_agent: String,
    /// The affected objects: ids and names.
    pub objects: Vec<String>,
    /// gRPC's code.
    pub code: u8,
    /// The number of calls it stands for; at least one.
    pub count: u64,
    /// The client's id of the request; may be empty.
    pub request_id: String,
    /// In hexadecimal; may be empty.
    pub trace_id: String,
    /// When the call began.
    pub created_at: Timestamp,
}

impl AuditEntry {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), "", self.created_at, self.created_at)
    }
}

/// The audit entry of a write. It is stored in the write's transaction, so that neither exists
/// without the other.
#[derive(Debug, Clone)]
pub struct Audit {
    /// The entry as far as it is known before the call ends.
    pub entry: AuditEntry,
    /// Extracts the objects of a response, given the called method. They are added to the entry's
    /// objects.
    pub response_objects: fn(&str, &[u8]) -> Vec<String>,
    /// Set when the entry is stored.
    pub written: Arc<AtomicBool>,
}

impl Audit {
    /// The entry with the objects of this response.
    fn with_response(&self, response: &[u8]) -> AuditEntry {
        let mut entry = self.entry.clone();
        for object in (self.response_objects)(&entry.method, response) {
            if !entry.objects.contains(&object) {
                entry.objects.push(object);
            }
        }
        entry
    }

    pub(crate) fn rows(&self, response: &[u8]) -> Result<Value, Error> {
        rows(&[self.with_response(response)])
    }

    pub(crate) fn mark_written(&self) {
        self.written.store(true, Ordering::Release);
    }
}

/// Filter for a list of audit entries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Earliest time, inclusive.
    pub since: Option<Timestamp>,
    /// Latest time, exclusive.
    pub until: Option<Timestamp>,
    /// Only of this user.
    pub user: Option<UserId>,
    /// Only of this API key.
    pub api_key: Option<ApiKeyId>,
    /// A pattern of `LIKE`.
    pub method: Option<String>,
    /// Only with this object.
    pub object: Option<String>,
    /// gRPC's code.
    pub code: Option<u8>,
}

/// An entry as the database reads it from JSON: one parameter for any number of entries, so that a
/// statement with another purpose can take none or one.
#[derive(Serialize)]
struct InsertRow<'a> {
    id: Uuid,
    organization_id: Uuid,
    user_id: Option<Uuid>,
    api_key_id: Option<Uuid>,
    method: &'a str,
    face: &'a str,
    peer: &'a str,
    user_agent: &'a str,
    objects: &'a [String],
    code: u8,
    count: u64,
    request_id: &'a str,
    trace_id: &'a str,
    created_at: Timestamp,
}

impl<'a> From<&'a AuditEntry> for InsertRow<'a> {
    fn from(entry: &'a AuditEntry) -> Self {
        Self {
            id: entry.id.uuid(),
            organization_id: entry.organization.uuid(),
            user_id: entry.user.map(UserId::uuid),
            api_key_id: entry.api_key.map(ApiKeyId::uuid),
            method: &entry.method,
            face: &entry.protocol,
            peer: &entry.peer,
            user_agent: &entry.user_agent,
            objects: &entry.objects,
            code: entry.code,
            count: entry.count,
            request_id: &entry.request_id,
            trace_id: &entry.trace_id,
            created_at: time::micros(entry.created_at),
        }
    }
}

/// Entries as a statement parameter.
pub(crate) fn rows(entries: &[AuditEntry]) -> Result<Value, Error> {
    text::json(&entries.iter().map(InsertRow::from).collect::<Vec<_>>())
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    user_id: Option<Uuid>,
    api_key_id: Option<Uuid>,
    method: String,
    face: String,
    peer: String,
    user_agent: String,
    objects: Vec<String>,
    code: i16,
    count: i64,
    request_id: String,
    trace_id: String,
    created_at: Timestamp,
}

impl From<Row> for AuditEntry {
    fn from(row: Row) -> Self {
        Self {
            id: AuditEntryId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            user: row.user_id.map(UserId::from_uuid),
            api_key: row.api_key_id.map(ApiKeyId::from_uuid),
            method: row.method,
            protocol: row.face,
            peer: row.peer,
            user_agent: row.user_agent,
            objects: row.objects,
            // The table holds no other values.
            code: u8::try_from(row.code).unwrap_or_default(),
            count: row.count.unsigned_abs(),
            request_id: row.request_id,
            trace_id: row.trace_id,
            created_at: row.created_at,
        }
    }
}

macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            r#"SELECT a.id, a.organization_id, a.user_id, a.api_key_id, a.method, a.face, a.peer, a.user_agent, a.objects, a.code, a.count,
                    a.request_id, a.trace_id, a.created_at
             FROM audit_entries a WHERE "# $(+ $tail)+,
            $($argument),*
        )
    };
}

impl Store {
    /// Appends entries. Existing ones are left as they are.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn audit_append(&self, entries: &[AuditEntry]) -> Result<(), Error> {
        insert(&mut *self.pool.acquire().await?, rows(entries)?).await
    }

    /// A page of an organization's entries, by time.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn audit_list(
        &self,
        organization: OrganizationId,
        filter: &AuditFilter,
        page: &Page,
    ) -> Result<Vec<AuditEntry>, Error> {
        let rows = list_by_time!(
            self,
            select,
            "a.organization_id = $1 AND ($2::timestamptz IS NULL OR a.created_at >= $2) AND ($3::timestamptz IS NULL OR a.created_at < $3)
             AND ($4::uuid IS NULL OR a.user_id = $4) AND ($5::uuid IS NULL OR a.api_key_id = $5) AND ($6::text IS NULL OR a.method LIKE $6)
             AND ($7::text IS NULL OR $7 = ANY (a.objects)) AND ($8::smallint IS NULL OR a.code = $8)",
            "a.created_at",
            "a.id",
            page,
            [
                organization.uuid(),
                sql_option(filter.since) as _,
                sql_option(filter.until) as _,
                filter.user.map(UserId::uuid) as _,
                filter.api_key.map(ApiKeyId::uuid) as _,
                filter.method.as_deref() as _,
                filter.object.as_deref() as _,
                filter.code.map(i16::from) as _
            ],
            ("9", "10", "11")
        );
        Ok(rows.into_iter().map(AuditEntry::from).collect())
    }

    /// Removes up to `limit` entries from before a time, and returns their number. If it equals
    /// `limit`, there may be more. Entries younger than 30 days are never removed.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::Internal`] when the time is less than 30 days ago and there
    /// are entries to remove.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn audit_expire(&self, before: Timestamp, limit: u32) -> Result<u64, Error> {
        let removed = sqlx::query_scalar!(
            r#"SELECT audit_entries_expire($1, $2) AS "removed!""#,
            time::sql(before) as _,
            i64::from(limit),
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(removed.unsigned_abs())
    }
}

/// Stores entries in the current transaction of the connection.
pub(crate) async fn insert(connection: &mut PgConnection, rows: Value) -> Result<(), Error> {
    sqlx::query!(
        "INSERT INTO audit_entries SELECT * FROM jsonb_populate_recordset(NULL::audit_entries, $1)
         ON CONFLICT ON CONSTRAINT audit_entries_pkey DO NOTHING",
        rows,
    )
    .execute(connection)
    .await?;
    Ok(())
}
