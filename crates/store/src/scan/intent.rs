//! The gateway's side of scans: requests of users, and what they see.

use construct_domain::{OrganizationId, ScanConnectionId, ScanId};
use jiff::Timestamp;

use super::{ENTITY, Scan, ScanEvent, ScanKind, ScanLimits, ScanPhase, scans};
use crate::{
    Error, Key, Page, SealedSecret, Store, Write, WriteOutcome, WriteOutput, text, time,
    write::{Writer, begin},
};

/// Maximum number of unfinished scans of an organization.
pub const MAX_OPEN_SCANS: u32 = 20;

/// A scan to create.
#[derive(Debug, Clone, PartialEq)]
pub struct NewScan {
    /// Its id.
    pub id: ScanId,
    /// The source of its files.
    pub kind: ScanKind,
    /// `owner/name`, a path, or the name of an upload.
    pub location: String,
    /// Identifies the repository: the same for all its scans.
    pub repository: String,
    /// The connection to the repository, with its name.
    pub connection: Option<(ScanConnectionId, String)>,
    /// Where the uploaded archive is stored.
    pub archive: Option<String>,
    /// Branch, tag or commit; empty: the default branch.
    pub reference: String,
    /// Name of the exploring model.
    pub model: String,
    /// The budget of the exploration, in 10⁻¹² US dollars.
    pub budget_pico_usd: i64,
    /// Its limits.
    pub limits: ScanLimits,
    /// The creator.
    pub created_by: String,
    /// The exploring task.
    pub task: String,
    /// The token for that task, sealed for the scan's id.
    pub token: SealedSecret,
    /// Its deadline.
    pub deadline: Timestamp,
}

/// Filter for a list of scans.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScanFilter {
    /// Of this repository only; empty: all.
    pub repository: String,
}

macro_rules! list {
    ($store:expr, $organization:expr, $filter:expr, $page:expr, $key:literal, $comparison:literal, $direction:literal) => {{
        let (value, id) = $page.after_time()?;
        scans!(
            ["SELECT"],
            ["FROM scans s WHERE s.organization_id = $1 AND ($2 = '' OR s.repository = $2)
                  AND (" $key ", s.id) " $comparison " ($3, $4)
              ORDER BY " $key $direction ", s.id" $direction " LIMIT $5"],
            $organization.uuid(),
            $filter.repository,
            value,
            id,
            $page.limit(),
        )
        .fetch_all(&$store.pool)
        .await?
    }};
}

impl Store {
    /// Creates a scan that is due now. Its first event has number 1.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the connection does not exist, [`Error::TooManyScans`]; the errors
    /// of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_create(
        &self,
        write: &Write,
        new: NewScan,
        render: impl FnOnce(&Scan) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Scan>, Error> {
        let mut writer = begin!(self, write);
        // Serializes concurrent calls, so that the count is exact.
        sqlx::query_scalar!(
            "SELECT id FROM organizations WHERE id = $1 FOR NO KEY UPDATE",
            writer.organization()
        )
        .fetch_one(&mut *writer.transaction)
        .await?;
        let open = sqlx::query_scalar!(
            r#"SELECT count(*) AS "open!" FROM scans WHERE organization_id = $1 AND next_wake IS NOT NULL"#,
            writer.organization(),
        )
        .fetch_one(&mut *writer.transaction)
        .await?;
        if open >= i64::from(MAX_OPEN_SCANS) {
            return Err(Error::TooManyScans { limit: MAX_OPEN_SCANS });
        }
        let (connection, connection_name) = new.connection.unzip();
        sqlx::query!(
            "INSERT INTO scans
                 (id, organization_id, kind, location, repository, connection_id, connection_name, archive, reference, model,
                  budget_pico_usd, max_bytes, max_files, max_turns, timeout_seconds, created_by, task, token_key_id, token_nonce,
                  token_ciphertext, deadline, phase_since, next_wake, leased_until, event_sequence, created_at, updated_at,
                  api_key_id)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21,
                     $22, $22, $22, 1, $22, $22, $23)",
            new.id.uuid(),
            writer.organization(),
            new.kind.as_str(),
            &*text::clean(&new.location),
            &*text::clean(&new.repository),
            connection.map(ScanConnectionId::uuid),
            connection_name.unwrap_or_default(),
            new.archive,
            &*text::clean(&new.reference),
            new.model,
            new.budget_pico_usd,
            new.limits.max_bytes,
            new.limits.max_files,
            new.limits.max_turns,
            new.limits.timeout_seconds,
            new.created_by,
            new.task,
            new.token.key_id,
            new.token.nonce,
            new.token.ciphertext,
            time::sql(new.deadline) as _,
            writer.now() as _,
            writer.key(),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        sqlx::query!(
            "INSERT INTO scan_events (organization_id, scan_id, sequence, kind, phase, message, files, candidates, cost_pico_usd,
                 tool_calls, created_at)
             VALUES ($1, $2, 1, 'phase', 'queued', '', 0, 0, 0, 0, $3)",
            writer.organization(),
            new.id.uuid(),
            writer.now() as _,
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = scan_reload(&mut writer, new.id).await?;
        let response = render(&entity).response;
        writer.commit(&response).await?;
        Ok(WriteOutcome::Applied { entity, event: None })
    }

    /// Checks whether another scan may be created, before anything is prepared for it.
    ///
    /// # Errors
    /// [`Error::TooManyScans`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_check_limit(&self, organization: OrganizationId) -> Result<(), Error> {
        let open = sqlx::query_scalar!(
            r#"SELECT count(*) AS "open!" FROM scans WHERE organization_id = $1 AND next_wake IS NOT NULL"#,
            organization.uuid(),
        );
        if open.fetch_one(&self.pool).await? < i64::from(MAX_OPEN_SCANS) {
            return Ok(());
        }
        Err(Error::TooManyScans { limit: MAX_OPEN_SCANS })
    }

    /// A scan.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_get(&self, organization: OrganizationId, id: ScanId) -> Result<Scan, Error> {
        scans!(
            ["SELECT"],
            ["FROM scans s WHERE s.organization_id = $1 AND s.id = $2"],
            organization.uuid(),
            id.uuid()
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// The creator of an unfinished scan. None when the scan is over or does not exist.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_open_creator(
        &self,
        organization: OrganizationId,
        id: ScanId,
    ) -> Result<Option<String>, Error> {
        let open = sqlx::query_scalar!(
            "SELECT s.created_by FROM scans s JOIN organizations o ON o.id = s.organization_id
             WHERE s.organization_id = $1 AND s.id = $2 AND s.next_wake IS NOT NULL AND o.deleted_at IS NULL",
            organization.uuid(),
            id.uuid(),
        );
        Ok(open.fetch_optional(&self.pool).await?)
    }

    /// A page of scans. They have no name: [`Key::Name`] is taken as [`Key::CreatedAt`].
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_list(
        &self,
        organization: OrganizationId,
        filter: &ScanFilter,
        page: &Page,
    ) -> Result<Vec<Scan>, Error> {
        let rows = match (page.order.key, page.order.descending) {
            (Key::CreatedAt | Key::Name, false) => {
                list!(self, organization, filter, page, "s.created_at", ">", "")
            }
            (Key::CreatedAt | Key::Name, true) => {
                list!(self, organization, filter, page, "s.created_at", "<", " DESC")
            }
            (Key::UpdatedAt, false) => {
                list!(self, organization, filter, page, "s.updated_at", ">", "")
            }
            (Key::UpdatedAt, true) => {
                list!(self, organization, filter, page, "s.updated_at", "<", " DESC")
            }
        };
        rows.into_iter().map(TryInto::try_into).collect()
    }

    /// The latest scan of each of these repositories, as pairs of repository and scan. Repositories
    /// without a scan are missing.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_latest(
        &self,
        organization: OrganizationId,
        repositories: &[String],
    ) -> Result<Vec<(String, ScanId)>, Error> {
        let rows = sqlx::query!(
            "SELECT DISTINCT ON (repository) repository, id FROM scans
             WHERE organization_id = $1 AND repository = ANY($2) ORDER BY repository, created_at DESC",
            organization.uuid(),
            repositories,
        );
        let rows = rows.fetch_all(&self.pool).await?;
        Ok(rows.into_iter().map(|row| (row.repository, ScanId::from_uuid(row.id))).collect())
    }

    /// Requests the cancel of a scan. No effect if it is over, or its cancel was requested before.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_cancel(
        &self,
        write: &Write,
        id: ScanId,
        reason: &str,
        render: impl FnOnce(&Scan) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Scan>, Error> {
        let mut writer = begin!(self, write);
        sqlx::query!(
            "UPDATE scans SET cancel_requested_at = $3, cancel_reason = $4, next_wake = $3, revision = revision + 1, updated_at = $3
             WHERE organization_id = $1 AND id = $2 AND next_wake IS NOT NULL AND cancel_requested_at IS NULL",
            writer.organization(),
            id.uuid(),
            writer.now() as _,
            &*text::clean(reason),
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = scan_reload(&mut writer, id).await?;
        let response = render(&entity).response;
        writer.commit(&response).await?;
        Ok(WriteOutcome::Applied { entity, event: None })
    }

    /// The events of a scan after a sequence.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_events(
        &self,
        organization: OrganizationId,
        id: ScanId,
        after: i64,
        limit: i64,
    ) -> Result<Vec<ScanEvent>, Error> {
        let rows = sqlx::query!(
            "SELECT sequence, kind, phase, message, files, candidates, cost_pico_usd, tool_calls, created_at
             FROM scan_events WHERE organization_id = $1 AND scan_id = $2 AND sequence > $3 ORDER BY sequence LIMIT $4",
            organization.uuid(),
            id.uuid(),
            after,
            limit,
        );
        let rows = rows.fetch_all(&self.pool).await?;
        let events = rows.into_iter().map(|row| {
            Ok(ScanEvent {
                sequence: row.sequence,
                kind: row.kind,
                phase: ScanPhase::from_column(&row.phase)?,
                message: row.message,
                files: row.files,
                candidates: row.candidates,
                cost_pico_usd: row.cost_pico_usd,
                tool_calls: row.tool_calls,
                created_at: row.created_at.into(),
            })
        });
        events.collect()
    }

    /// The manifest of a scan's files; empty before they are fetched.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_manifest(
        &self,
        organization: OrganizationId,
        id: ScanId,
    ) -> Result<String, Error> {
        let manifest = sqlx::query_scalar!(
            "SELECT manifest FROM scan_manifests WHERE organization_id = $1 AND scan_id = $2",
            organization.uuid(),
            id.uuid(),
        );
        Ok(manifest.fetch_optional(&self.pool).await?.unwrap_or_default())
    }
}

pub(super) async fn scan_reload(writer: &mut Writer<'_>, id: ScanId) -> Result<Scan, Error> {
    scans!(
        ["SELECT"],
        ["FROM scans s WHERE s.organization_id = $1 AND s.id = $2"],
        writer.organization(),
        id.uuid()
    )
    .fetch_optional(&mut *writer.transaction)
    .await?
    .ok_or(Error::NotFound { what: ENTITY })?
    .try_into()
}
