//! The scanner's side of scans: leases and progress.

use std::time::Duration;

use construct_domain::{OrganizationId, ScanConnectionId, ScanId};
use jiff::Timestamp;

use super::{NewCandidate, Scan, ScanConnection, ScanEvent, scans};
use crate::{Error, Store, text, time};

/// An event of a scan, to store with the change it describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewScanEvent {
    /// `phase`, `progress`, …
    pub kind: &'static str,
    /// Shown to people.
    pub message: String,
    /// Tool calls of the exploration so far.
    pub tool_calls: i64,
}

/// What is stored together with a scan.
#[derive(Debug, Clone, Default)]
pub struct ScanChanges {
    /// Its new events.
    pub events: Vec<NewScanEvent>,
    /// The description of the repository for the model, once it is known.
    pub brief: Option<String>,
    /// The manifest of the files, once it is known.
    pub manifest: Option<String>,
    /// New candidates.
    pub candidates: Vec<NewCandidate>,
    /// Whether to release the lease.
    pub release: bool,
}

/// The result of extending a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseState {
    /// The lease was extended.
    Held,
    /// The lease was extended, and the scan's cancel was requested.
    CancelRequested,
    /// Another process has taken the lease.
    Lost,
}

impl Store {
    /// Claims due scans with work to do, for the duration of the lease.
    ///
    /// The order is fair between organizations: the first scan of each, then the second of each,
    /// including those that are leased. Between organizations, one that is not in `served` comes
    /// first, then one that is earlier in it.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scans_claim(
        &self,
        limit: i64,
        served: &[OrganizationId],
        lease: Duration,
        now: Timestamp,
    ) -> Result<Vec<Scan>, Error> {
        let served: Vec<_> = served.iter().map(|organization| organization.uuid()).collect();
        let rows = scans!(
            ["WITH open AS (
                  SELECT organization_id, id, next_wake, leased_until > $1 AS held FROM scans
                  WHERE next_wake IS NOT NULL AND (next_wake <= $1 OR leased_until > $1)
                      AND cancel_requested_at IS NULL AND deadline > $1 AND (phase <> 'exploring' OR message = '')
              ), fair AS (
                  SELECT organization_id, id, held,
                      row_number() OVER (PARTITION BY organization_id ORDER BY held DESC, next_wake, id) AS turn FROM open
              ), due AS (
                  SELECT d.organization_id, d.id FROM scans d JOIN fair f ON f.organization_id = d.organization_id AND f.id = d.id
                  WHERE NOT f.held AND d.next_wake <= $1 AND d.leased_until <= $1
                  ORDER BY f.turn, coalesce(array_position($4::uuid[], d.organization_id), 0), d.next_wake
                  LIMIT $3 FOR UPDATE OF d SKIP LOCKED
              )
              UPDATE scans s SET lease = s.lease + 1, leased_until = $2 FROM due
              WHERE s.organization_id = due.organization_id AND s.id = due.id RETURNING"],
            [""],
            time::sql(now) as _,
            time::sql(now + lease) as _,
            limit,
            &served,
        );
        rows.fetch_all(&self.pool).await?.into_iter().map(TryInto::try_into).collect()
    }

    /// Claims scans that only poll their task or must be ended, for the duration of the lease.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scans_claim_waiting(
        &self,
        limit: i64,
        lease: Duration,
        now: Timestamp,
    ) -> Result<Vec<Scan>, Error> {
        let rows = scans!(
            ["UPDATE scans s SET lease = s.lease + 1, leased_until = $2
              FROM (SELECT organization_id, id FROM scans
                    WHERE next_wake <= $1 AND leased_until <= $1
                        AND (cancel_requested_at IS NOT NULL OR deadline <= $1 OR (phase = 'exploring' AND message <> ''))
                    ORDER BY next_wake LIMIT $3 FOR UPDATE SKIP LOCKED) due
              WHERE s.organization_id = due.organization_id AND s.id = due.id RETURNING"],
            [""],
            time::sql(now) as _,
            time::sql(now + lease) as _,
            limit,
        );
        rows.fetch_all(&self.pool).await?.into_iter().map(TryInto::try_into).collect()
    }

    /// Releases the lease of a scan, which is due again at `wake`.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another process has the lease, or the scan is over.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_release(
        &self,
        scan: &Scan,
        wake: Timestamp,
        now: Timestamp,
    ) -> Result<(), Error> {
        let done = sqlx::query!(
            // A new lease number, so that a late extension of the old lease fails.
            "UPDATE scans SET lease = lease + 1, leased_until = $5, failures = 0,
                 -- What is asked for meanwhile is not slept over.
                 next_wake = CASE WHEN cancel_requested_at IS NOT NULL THEN least($4::timestamptz, $5) ELSE $4::timestamptz END
             WHERE organization_id = $1 AND id = $2 AND lease = $3 AND next_wake IS NOT NULL",
            scan.organization.uuid(),
            scan.id.uuid(),
            scan.lease,
            time::sql(wake) as _,
            time::sql(now) as _,
        );
        match done.execute(&self.pool).await?.rows_affected() {
            0 => Err(Error::Conflict),
            _ => Ok(()),
        }
    }

    /// The reported number of tool calls of a scan's exploration.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_tool_calls(&self, scan: &Scan) -> Result<i64, Error> {
        let most = sqlx::query_scalar!(
            r#"SELECT coalesce(max(tool_calls), 0) AS "most!" FROM scan_events WHERE organization_id = $1 AND scan_id = $2"#,
            scan.organization.uuid(),
            scan.id.uuid(),
        );
        Ok(most.fetch_one(&self.pool).await?)
    }

    /// Extends the lease of a scan.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_extend_lease(
        &self,
        scan: &Scan,
        until: Timestamp,
    ) -> Result<LeaseState, Error> {
        let cancel = sqlx::query_scalar!(
            r#"UPDATE scans SET leased_until = $4 WHERE organization_id = $1 AND id = $2 AND lease = $3
             RETURNING cancel_requested_at IS NOT NULL AS "cancel!""#,
            scan.organization.uuid(),
            scan.id.uuid(),
            scan.lease,
            time::sql(until) as _,
        );
        Ok(match cancel.fetch_optional(&self.pool).await? {
            None => LeaseState::Lost,
            Some(true) => LeaseState::CancelRequested,
            Some(false) => LeaseState::Held,
        })
    }

    /// Stores the progress of a scan with its events. Returns the stored events.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another process has the lease, or the scan is over. Nothing was
    /// written.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_save(
        &self,
        scan: &mut Scan,
        changes: &ScanChanges,
        now: Timestamp,
    ) -> Result<Vec<ScanEvent>, Error> {
        let mut transaction = self.pool.begin().await?;
        let (organization, id) = (scan.organization.uuid(), scan.id.uuid());
        let count = i64::try_from(changes.events.len()).map_err(Error::internal)?;
        let over = scan.phase.is_over();
        let saved = sqlx::query!(
            r#"UPDATE scans SET phase = $4, phase_since = $5, reason = $6,
                 -- What is asked for meanwhile is not slept over.
                 next_wake = CASE WHEN $24 THEN NULL WHEN cancel_requested_at IS NOT NULL THEN least($7::timestamptz, $8) ELSE $7::timestamptz END,
                 failures = $9, commit_id = $10, repairs = $11, request = $12, message = $13, files = $14, files_skipped = $15,
                 secrets_masked = $16, candidates = $17, refused = $18, cost_pico_usd = $19, brief = coalesce($20, brief),
                 event_sequence = event_sequence + $21, leased_until = CASE WHEN $22 THEN $8::timestamptz ELSE leased_until END,
                 ended_at = $23,
                 token_key_id = CASE WHEN $24 THEN NULL ELSE token_key_id END,
                 token_nonce = CASE WHEN $24 THEN NULL ELSE token_nonce END,
                 token_ciphertext = CASE WHEN $24 THEN NULL ELSE token_ciphertext END,
                 revision = revision + 1, updated_at = $8
             WHERE organization_id = $1 AND id = $2 AND lease = $3 AND next_wake IS NOT NULL RETURNING event_sequence, revision"#,
            organization,
            id,
            scan.lease,
            scan.phase.as_str(),
            time::sql(scan.phase_since) as _,
            &*text::clean(&scan.reason),
            time::sql_option(scan.next_wake) as _,
            time::sql(now) as _,
            scan.failures,
            &*text::clean(&scan.commit),
            scan.repairs,
            &*text::clean(&scan.request),
            scan.message,
            scan.files,
            scan.files_skipped,
            scan.secrets_masked,
            scan.candidates,
            scan.refused,
            scan.cost_pico_usd,
            text::clean_option(changes.brief.as_deref()),
            count,
            changes.release,
            time::sql_option(scan.ended_at) as _,
            over,
        )
        .fetch_optional(&mut *transaction)
        .await?
        .ok_or(Error::Conflict)?;
        let mut events = Vec::with_capacity(changes.events.len());
        for (sequence, event) in (saved.event_sequence - count + 1..).zip(&changes.events) {
            let event = ScanEvent {
                sequence,
                kind: event.kind.to_owned(),
                phase: scan.phase,
                message: text::clean(&event.message).into_owned(),
                files: scan.files,
                candidates: scan.candidates,
                cost_pico_usd: scan.cost_pico_usd,
                tool_calls: event.tool_calls,
                created_at: time::micros(now),
            };
            sqlx::query!(
                "INSERT INTO scan_events (organization_id, scan_id, sequence, kind, phase, message, files, candidates,
                     cost_pico_usd, tool_calls, created_at)
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
                organization,
                id,
                event.sequence,
                event.kind,
                event.phase.as_str(),
                event.message,
                event.files,
                event.candidates,
                event.cost_pico_usd,
                event.tool_calls,
                time::sql(now) as _,
            )
            .execute(&mut *transaction)
            .await?;
            events.push(event);
        }
        if let Some(manifest) = &changes.manifest {
            sqlx::query!(
                "INSERT INTO scan_manifests (organization_id, scan_id, manifest) VALUES ($1, $2, $3)
                 ON CONFLICT (organization_id, scan_id) DO UPDATE SET manifest = $3",
                organization,
                id,
                &*text::clean(manifest),
            )
            .execute(&mut *transaction)
            .await?;
        }
        for candidate in &changes.candidates {
            sqlx::query!(
                "INSERT INTO scan_candidates (id, organization_id, scan_id, name, content, score, created_at, updated_at)
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $7)",
                candidate.id.uuid(),
                organization,
                id,
                candidate.name,
                text::json(&candidate.content)?,
                candidate.score,
                time::sql(now) as _,
            )
            .execute(&mut *transaction)
            .await
            .map_err(Error::from_write)?;
        }
        transaction.commit().await?;
        (scan.event_sequence, scan.revision) = (saved.event_sequence, saved.revision);
        Ok(events)
    }

    /// The description of a scan's repository for the model.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_brief(&self, scan: &Scan) -> Result<String, Error> {
        let brief = sqlx::query_scalar!(
            "SELECT brief FROM scans WHERE organization_id = $1 AND id = $2",
            scan.organization.uuid(),
            scan.id.uuid(),
        );
        brief.fetch_optional(&self.pool).await?.ok_or(Error::NotFound { what: super::ENTITY })
    }

    /// The connection to a scan's repository.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn scan_connection_get(
        &self,
        organization: OrganizationId,
        id: ScanConnectionId,
    ) -> Result<ScanConnection, Error> {
        self.scan_connection_find(organization, &id.to_string()).await
    }

    /// Scans that ended before a time and still have files, with their uploaded archives.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scans_to_clean(
        &self,
        before: Timestamp,
        limit: i64,
    ) -> Result<Vec<(ScanId, Option<String>)>, Error> {
        let ended = sqlx::query!(
            "SELECT id, archive FROM scans WHERE ended_at <= $1 AND cleaned_at IS NULL ORDER BY ended_at LIMIT $2",
            time::sql(before) as _,
            limit,
        );
        Ok(ended
            .fetch_all(&self.pool)
            .await?
            .into_iter()
            .map(|row| (ScanId::from_uuid(row.id), row.archive))
            .collect())
    }

    /// Records that a scan's files were removed.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scan_mark_cleaned(&self, id: ScanId, now: Timestamp) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE scans SET cleaned_at = $2 WHERE id = $1",
            id.uuid(),
            time::sql(now) as _
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Those of these scans that may still need their files: all that are not cleaned up.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn scans_with_files(&self, ids: &[ScanId]) -> Result<Vec<ScanId>, Error> {
        let ids: Vec<_> = ids.iter().map(|id| id.uuid()).collect();
        let found = sqlx::query_scalar!(
            "SELECT id FROM scans WHERE id = ANY($1) AND cleaned_at IS NULL",
            &ids
        );
        Ok(found.fetch_all(&self.pool).await?.into_iter().map(ScanId::from_uuid).collect())
    }
}
