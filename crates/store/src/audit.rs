//! The audit trail: who did what (docs/adr/0032-audit.md). It is appended to and read; what is old
//! is removed by a function of the database, which refuses everything else.

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
    /// Its id. An entry with an id that is there already is not written again.
    pub id: AuditEntryId,
    /// Whose trail it is in.
    pub organization: OrganizationId,
    /// In whose name it was done; none: nobody that is known.
    pub user: Option<UserId>,
    /// The key that was presented.
    pub api_key: Option<ApiKeyId>,
    /// What was called, as `TaskService/CreateTask`; empty: several.
    pub method: String,
    /// How it came.
    pub protocol: String,
    /// Where it came from.
    pub peer: String,
    /// What the client calls itself.
    pub user_agent: String,
    /// What it was done to: ids and names.
    pub objects: Vec<String>,
    /// gRPC's code.
    pub code: u8,
    /// How many calls it stands for; at least one.
    pub count: u64,
    /// What the client calls the request; may be empty.
    pub request_id: String,
    /// In hexadecimal; may be empty.
    pub trace_id: String,
    /// When the call began.
    pub created_at: Timestamp,
}

impl AuditEntry {
    /// Its place in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), "", self.created_at, self.created_at)
    }
}

/// An entry that a write brings along: it is stored in the write's transaction, so that there is
/// neither without the other.
#[derive(Debug, Clone)]
pub struct Audit {
    /// What is known of the call before its end.
    pub entry: AuditEntry,
    /// What the call's answer names, by the method that was called: it is added to the entry's
    /// objects.
    pub response_objects: fn(&str, &[u8]) -> Vec<String>,
    /// Set when the entry is stored.
    pub written: Arc<AtomicBool>,
}

impl Audit {
    /// The entry, as it is when the call is answered like this.
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

/// Which entries are wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Of this time or later.
    pub since: Option<Timestamp>,
    /// Of before this time.
    pub until: Option<Timestamp>,
    /// Of this user.
    pub user: Option<UserId>,
    /// Of this key.
    pub api_key: Option<ApiKeyId>,
    /// A pattern of `LIKE`.
    pub method: Option<String>,
    /// Among the objects.
    pub object: Option<String>,
    /// gRPC's code.
    pub code: Option<u8>,
}

/// An entry as the database reads it out of JSON: one parameter, however many entries there are, so
/// that a statement that does something else as well can take none or one.
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

/// Entries, as statements take them.
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
            // The table has nothing else.
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
    /// Appends entries; those that are there already stay as they are.
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

    /// Removes entries of before a time, `limit` at most. Gives how many; as many as that: there
    /// may be more. What is younger than 30 days is not removed, whatever the time.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::Internal`] when the time is younger than that and there is
    /// something.
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

/// Stores entries within whatever the connection is in.
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
