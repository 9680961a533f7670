//! Documents that clients store. The content is opaque: it is stored as it was put.

use std::fmt;

use jiff::Timestamp;
use uuid::Uuid;

use construct_domain::{ApiKeyId, OrganizationId, UserId, state::VERSIONS_KEPT};

use crate::{
    Error, Store, Write, WriteOutcome, WriteOutput,
    time::from_sql_option,
    write::{Writer, begin},
};

const ENTITY: &str = "state";

/// One version of a document.
#[derive(Clone, PartialEq, Eq)]
pub struct State {
    /// The user it belongs to; none: the whole organization.
    pub owner: Option<UserId>,
    /// Its name.
    pub name: String,
    /// Incremented by every change.
    pub version: i64,
    /// The content, as it was put; empty if it is deleted or was not requested.
    pub json: String,
    /// Size of the content in bytes.
    pub bytes: i64,
    /// Whether this version is a deletion.
    pub is_deleted: bool,
    /// The author of this version.
    pub updated_by: String,
    /// When it was put; none: it was removed at an unknown time.
    pub updated_at: Option<Timestamp>,
}

/// Without the content, which may hold credentials.
impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, name, version, json: _, bytes, is_deleted, updated_by, updated_at } =
            self;
        f.debug_struct("State")
            .field("owner", owner)
            .field("name", name)
            .field("version", version)
            .field("bytes", bytes)
            .field("is_deleted", is_deleted)
            .field("updated_by", updated_by)
            .field("updated_at", updated_at)
            .finish_non_exhaustive()
    }
}

/// Identifies a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateRef<'a> {
    /// The user it belongs to; none: the whole organization.
    pub owner: Option<UserId>,
    /// Its name.
    pub name: &'a str,
}

/// The content to put.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum StateContent<'a> {
    /// This text.
    Text(&'a str),
    /// The content of this earlier version.
    Version(i64),
}

impl<'a> StateContent<'a> {
    fn parts(self) -> (Option<&'a str>, Option<i64>) {
        match self {
            Self::Text(json) => (Some(json), None),
            Self::Version(version) => (None, Some(version)),
        }
    }
}

/// The growth of storage by a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateGrowth {
    /// Bytes that the organization stores more, or less.
    pub bytes: i64,
    /// The same for the storage that counts for the API key. Versions that other keys have put keep
    /// counting for those keys when they are replaced, and free nothing for this key when they are
    /// dropped.
    pub bytes_of_key: i64,
}

struct Row {
    name: String,
    version: i64,
    json: Option<String>,
    bytes: Option<i32>,
    updated_by: String,
    updated_at: Option<jiff_sqlx::Timestamp>,
}

impl Row {
    fn into_state(self, owner: Option<UserId>) -> State {
        State {
            owner,
            name: self.name,
            version: self.version,
            json: self.json.unwrap_or_default(),
            bytes: self.bytes.unwrap_or_default().into(),
            is_deleted: self.bytes.is_none(),
            updated_by: self.updated_by,
            updated_at: from_sql_option(self.updated_at),
        }
    }
}

/// The current version of documents. `$json` selects the content, if requested.
macro_rules! current {
    ($json:literal, [$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            "SELECT s.name, s.version, " + $json + r#" AS "json?", octet_length(s.json) AS "bytes?", s.updated_by,
                 s.updated_at AS "updated_at?: jiff_sqlx::Timestamp"
             FROM states s "# $(+ $tail)+,
            $($argument),*
        )
    };
}

/// The versions of the document `$1`, `$2`, `$3` that have a content.
macro_rules! versions {
    ($json:literal, [$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            r#"SELECT s.name, v.version AS "version!", "# + $json + r#" AS "json?", octet_length(v.json) AS "bytes?",
                 v.updated_by AS "updated_by!", v.updated_at AS "updated_at?: jiff_sqlx::Timestamp"
             FROM states s CROSS JOIN LATERAL (
                 SELECT s.version, s.json, s.updated_by, s.updated_at
                 UNION ALL
                 SELECT e.version, e.json, e.updated_by, e.updated_at FROM state_versions e WHERE e.state_id = s.id) v
             WHERE s.organization_id = $1 AND s.owner = $2 AND s.name = $3 AND v.json IS NOT NULL "# $(+ $tail)+,
            $($argument),*
        )
    };
}

/// The owner, as the column stores it.
fn owner_column(owner: Option<UserId>) -> Uuid {
    owner.map_or(Uuid::nil(), UserId::uuid)
}

impl Store {
    /// A document: its current version, or an earlier one.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn state_get(
        &self,
        organization: OrganizationId,
        state: StateRef<'_>,
        version: Option<i64>,
    ) -> Result<State, Error> {
        let owned = owner_column(state.owner);
        let row = match version {
            None => {
                current!(
                    "s.json",
                    ["WHERE s.organization_id = $1 AND s.owner = $2 AND s.name = $3 AND s.json IS NOT NULL"],
                    organization.uuid(),
                    owned,
                    state.name,
                )
                .fetch_optional(&self.pool)
                .await?
            }
            Some(version) => {
                versions!("v.json", ["AND v.version = $4"], organization.uuid(), owned, state.name, version)
                    .fetch_optional(&self.pool)
                    .await?
            }
        };
        row.map(|row| row.into_state(state.owner)).ok_or(Error::NotFound { what: ENTITY })
    }

    /// The existing documents, by name, without their content.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn state_list(
        &self,
        organization: OrganizationId,
        owner: Option<UserId>,
    ) -> Result<Vec<State>, Error> {
        let rows = current!(
            "NULL::text",
            ["WHERE s.organization_id = $1 AND s.owner = $2 AND s.json IS NOT NULL ORDER BY s.name"],
            organization.uuid(),
            owner_column(owner),
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(|row| row.into_state(owner)).collect())
    }

    /// The current and the earlier versions of a document, newest first, without their content.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn state_versions(
        &self,
        organization: OrganizationId,
        state: StateRef<'_>,
    ) -> Result<Vec<State>, Error> {
        let rows = versions!(
            "NULL::text",
            ["ORDER BY v.version DESC"],
            organization.uuid(),
            owner_column(state.owner),
            state.name,
        )
        .fetch_all(&self.pool)
        .await?;
        if rows.is_empty() {
            return Err(Error::NotFound { what: ENTITY });
        }
        Ok(rows.into_iter().map(|row| row.into_state(state.owner)).collect())
    }

    /// Those of these documents whose version differs from the known one, with their content. The
    /// deletion of a document with known version 0 is not reported. A document whose row is
    /// missing, because its owner was not a member for a while, has version 0.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn state_changes(
        &self,
        organization: OrganizationId,
        owner: Option<UserId>,
        known_versions: &[(&'static str, i64)],
    ) -> Result<Vec<State>, Error> {
        let (names, versions): (Vec<String>, Vec<i64>) =
            known_versions.iter().map(|(name, version)| ((*name).to_owned(), *version)).unzip();
        let rows = sqlx::query_as!(
            Row,
            r#"SELECT k.name AS "name!", coalesce(s.version, 0) AS "version!", s.json AS "json?", octet_length(s.json) AS "bytes?",
                   coalesce(s.updated_by, '') AS "updated_by!", s.updated_at AS "updated_at?: jiff_sqlx::Timestamp"
               FROM unnest($3::text[], $4::bigint[]) AS k (name, version)
               LEFT JOIN states s ON s.organization_id = $1 AND s.owner = $2 AND s.name = k.name
               WHERE s.version IS DISTINCT FROM k.version AND (s.json IS NOT NULL OR k.version > 0)
               ORDER BY k.name"#,
            organization.uuid(),
            owner_column(owner),
            &names,
            &versions,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(|row| row.into_state(owner)).collect())
    }

    /// How many more bytes would be stored after a put with this key: the new content, minus the
    /// earlier version that would be dropped. The replaced content stays, as an earlier version.
    /// Zero when the put would change nothing.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn state_growth(
        &self,
        organization: OrganizationId,
        state: StateRef<'_>,
        content: StateContent<'_>,
        key: Option<ApiKeyId>,
    ) -> Result<StateGrowth, Error> {
        let (json, version) = content.parts();
        let growth = sqlx::query_as!(
            StateGrowth,
            r#"SELECT coalesce(octet_length(added.json) - dropped.bytes, 0)::bigint AS "bytes!",
                   coalesce(octet_length(added.json) - dropped.bytes_of_key, 0)::bigint AS "bytes_of_key!"
               FROM (SELECT) AS once
               LEFT JOIN states s ON s.organization_id = $1 AND s.owner = $2 AND s.name = $3
               CROSS JOIN LATERAL (
                   SELECT coalesce($4, (SELECT v.json FROM state_versions v WHERE v.state_id = s.id AND v.version = $5)) AS json) AS put
               LEFT JOIN LATERAL (SELECT put.json) AS added ON s.json IS DISTINCT FROM put.json
               CROSS JOIN LATERAL (
                   SELECT coalesce(sum(octet_length(v.json)), 0) AS bytes,
                          coalesce(sum(octet_length(v.json)) FILTER (WHERE v.api_key_id = $7), 0) AS bytes_of_key
                   FROM (
                       SELECT e.json, e.api_key_id FROM state_versions e
                       WHERE e.state_id = s.id AND s.json IS NOT NULL ORDER BY e.version DESC OFFSET $6) AS v) AS dropped"#,
            organization.uuid(),
            owner_column(state.owner),
            state.name,
            json as _,
            version as _,
            i64::from(VERSIONS_KEPT) - 1,
            key.map(ApiKeyId::uuid),
        );
        Ok(growth.fetch_one(&self.pool).await?)
    }

    /// Creates or replaces a document. The replaced content is kept as an earlier version. The same
    /// text changes nothing.
    ///
    /// # Errors
    /// [`Error::VersionMismatch`] when the version is not the expected one (0: it must not exist);
    /// [`Error::NotFound`] when the owner is no longer a member, or the version to restore does not
    /// exist.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn state_put(
        &self,
        write: &Write,
        state: StateRef<'_>,
        (content, by): (StateContent<'_>, &str),
        expected: Option<i64>,
        render: impl FnOnce(&State) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<State>, Error> {
        let mut writer = begin!(self, write);
        // Of two concurrent creations, one waits here for the other.
        sqlx::query!(
            "INSERT INTO states (id, organization_id, owner, name, version, updated_by, updated_at)
             VALUES ($1, $2, $3, $4, 0, $5, $6)
             ON CONFLICT ON CONSTRAINT states_name_key DO NOTHING",
            Uuid::now_v7(),
            writer.organization(),
            owner_column(state.owner),
            state.name,
            by,
            writer.now() as _,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let locked = lock(&mut writer, state).await?.ok_or(Error::NotFound { what: ENTITY })?;
        locked.check_version(expected)?;
        let earlier;
        let json = match content {
            StateContent::Text(json) => json,
            StateContent::Version(version)
                if version == locked.version && locked.json.is_some() =>
            {
                locked.json.as_deref().unwrap_or_default()
            }
            StateContent::Version(version) => {
                earlier = locked
                    .archived_json(&mut writer, version)
                    .await?
                    .ok_or(Error::NotFound { what: ENTITY })?;
                &earlier
            }
        };
        if locked.json.as_deref() == Some(json) {
            let entity = reload(&mut writer, state).await?;
            return writer.finish_unchanged(entity, render).await;
        }
        locked.archive(&mut writer).await?;
        locked.write_version(&mut writer, Some(json), by).await?;
        let entity = reload(&mut writer, state).await?;
        writer.finish_unchanged(entity, render).await
    }

    /// Deletes a document. Its content is kept as an earlier version, unless `forget` deletes all
    /// versions. The entity in the result is the version of the deletion.
    ///
    /// # Errors
    /// [`Error::VersionMismatch`] when the version is not the expected one, [`Error::NotFound`]
    /// when there is nothing to delete.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn state_delete(
        &self,
        write: &Write,
        state: StateRef<'_>,
        (expected, forget): (Option<i64>, bool),
        by: &str,
        render: impl FnOnce(&State) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<State>, Error> {
        let mut writer = begin!(self, write);
        let locked = lock(&mut writer, state).await?.ok_or(Error::NotFound { what: ENTITY })?;
        locked.check_version(expected)?;
        let forgotten = if forget { locked.delete_versions(&mut writer).await? } else { 0 };
        if locked.json.is_some() {
            if !forget {
                locked.archive(&mut writer).await?;
            }
            locked.write_version(&mut writer, None, by).await?;
        } else if forgotten == 0 {
            return Err(Error::NotFound { what: ENTITY });
        }
        let entity = reload(&mut writer, state).await?;
        writer.finish_unchanged(entity, render).await
    }
}

/// A document, locked until the end of the write.
struct LockedDocument {
    id: Uuid,
    version: i64,
    json: Option<String>,
}

async fn lock(
    writer: &mut Writer<'_>,
    state: StateRef<'_>,
) -> Result<Option<LockedDocument>, Error> {
    Ok(sqlx::query_as!(
        LockedDocument,
        "SELECT id, version, json FROM states WHERE organization_id = $1 AND owner = $2 AND name = $3 FOR UPDATE",
        writer.organization(),
        owner_column(state.owner),
        state.name,
    )
    .fetch_optional(&mut *writer.transaction)
    .await?)
}

impl LockedDocument {
    /// Refuses an unexpected version. A deleted document has version 0.
    fn check_version(&self, expected: Option<i64>) -> Result<(), Error> {
        let current = if self.json.is_some() { self.version } else { 0 };
        if expected.is_some_and(|expected| expected != current) {
            Err(Error::VersionMismatch { current })
        } else {
            Ok(())
        }
    }

    /// Keeps the content as an earlier version, and drops the oldest versions.
    async fn archive(&self, writer: &mut Writer<'_>) -> Result<(), Error> {
        sqlx::query!(
            "INSERT INTO state_versions (organization_id, state_id, version, json, updated_by, updated_at, api_key_id)
             SELECT organization_id, id, version, json, updated_by, updated_at, api_key_id FROM states
             WHERE id = $1 AND json IS NOT NULL",
            self.id,
        )
        .execute(&mut *writer.transaction)
        .await?;
        sqlx::query!(
            "DELETE FROM state_versions WHERE state_id = $1 AND version NOT IN (
                 SELECT version FROM state_versions WHERE state_id = $1 ORDER BY version DESC LIMIT $2)",
            self.id,
            i64::from(VERSIONS_KEPT),
        )
        .execute(&mut *writer.transaction)
        .await?;
        Ok(())
    }

    /// The content of an earlier version.
    async fn archived_json(
        &self,
        writer: &mut Writer<'_>,
        version: i64,
    ) -> Result<Option<String>, Error> {
        let json = sqlx::query_scalar!(
            "SELECT json FROM state_versions WHERE state_id = $1 AND version = $2",
            self.id,
            version,
        );
        Ok(json.fetch_optional(&mut *writer.transaction).await?)
    }

    /// Deletes the earlier versions, and returns their number.
    async fn delete_versions(&self, writer: &mut Writer<'_>) -> Result<u64, Error> {
        let done = sqlx::query!("DELETE FROM state_versions WHERE state_id = $1", self.id)
            .execute(&mut *writer.transaction)
            .await?;
        Ok(done.rows_affected())
    }

    async fn write_version(
        &self,
        writer: &mut Writer<'_>,
        json: Option<&str>,
        by: &str,
    ) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE states SET version = version + 1, json = $2, updated_by = $3, updated_at = $4, api_key_id = $5 WHERE id = $1",
            self.id,
            json,
            by,
            writer.now(),
            json.and_then(|_| writer.key()),
        )
        .execute(&mut *writer.transaction)
        .await?;
        Ok(())
    }
}

/// The current row, deleted or not, without the content.
async fn reload(writer: &mut Writer<'_>, state: StateRef<'_>) -> Result<State, Error> {
    let row = current!(
        "NULL::text",
        ["WHERE s.organization_id = $1 AND s.owner = $2 AND s.name = $3"],
        writer.organization(),
        owner_column(state.owner),
        state.name,
    )
    .fetch_one(&mut *writer.transaction)
    .await?;
    Ok(row.into_state(state.owner))
}
