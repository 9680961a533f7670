//! Candidates that scans propose, their review, and their hand-over to become Tools.

use construct_domain::{CandidateId, HandOverId, OrganizationId, ScanId};
use jiff::Timestamp;
use serde_json::Value;
use uuid::Uuid;

use super::{CandidateState, ENTITY as SCAN, Scan, intent::scan_reload, scans};
use crate::{Error, Store, Write, WriteOutcome, WriteOutput, text, time, write::begin};

const ENTITY: &str = "candidate";

/// Candidates that are listed or handed over at once.
const MAX_CANDIDATES: i64 = 200;

/// A checked candidate to store.
#[derive(Debug, Clone, PartialEq)]
pub struct NewCandidate {
    /// Its id.
    pub id: CandidateId,
    /// Unique in the scan.
    pub name: String,
    /// Its suitability as a Tool, 0 to 100.
    pub score: i32,
    /// Replaces all of it.
    pub content: Value,
}

/// A candidate.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Its id.
    pub id: CandidateId,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The scan that proposes it.
    pub scan: ScanId,
    /// Its state.
    pub state: CandidateState,
    /// Replaces all of it.
    pub content: Value,
    /// Whether a person edited it.
    pub edited: bool,
    /// The last reviewer; empty before the first review.
    pub reviewed_by: String,
    /// When it was last reviewed.
    pub reviewed_at: Option<Timestamp>,
    /// The hand-over that it is part of.
    pub hand_over: Option<HandOverId>,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was proposed.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// A review of a candidate.
#[derive(Debug, Clone, PartialEq)]
pub struct Review {
    /// The new state; none: unchanged.
    pub state: Option<CandidateState>,
    /// The new name, score and content; none: unchanged.
    pub content: Option<(String, i32, Value)>,
    /// The reviewer.
    pub by: String,
}

/// The result of a hand-over request.
#[derive(Debug, Clone, PartialEq)]
pub struct HandOverResult {
    /// None when there was nothing to hand over.
    pub id: Option<HandOverId>,
    /// The scan.
    pub scan: Scan,
    /// The candidates that were handed over.
    pub candidates: Vec<Candidate>,
}

/// A hand-over of candidates.
#[derive(Debug, Clone, PartialEq)]
pub struct HandOver {
    /// Its id.
    pub id: HandOverId,
    /// Their scan.
    pub scan: Scan,
    /// The candidates.
    pub candidates: Vec<Candidate>,
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    scan_id: Uuid,
    state: String,
    content: Value,
    edited: bool,
    reviewed_by: String,
    reviewed_at: Option<jiff_sqlx::Timestamp>,
    hand_over_id: Option<Uuid>,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for Candidate {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: CandidateId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            scan: ScanId::from_uuid(row.scan_id),
            state: CandidateState::from_column(&row.state)?,
            content: row.content,
            edited: row.edited,
            reviewed_by: row.reviewed_by,
            reviewed_at: time::from_sql_option(row.reviewed_at),
            hand_over: row.hand_over_id.map(HandOverId::from_uuid),
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

macro_rules! candidates {
    ([$($head:literal)*], [$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            "" $(+ $head)* + " c.id, c.organization_id, c.scan_id, c.state, c.content, c.edited, c.reviewed_by, c.reviewed_at,
                 c.hand_over_id, c.revision, c.created_at, c.updated_at " $(+ $tail)+,
            $($argument),*
        )
    };
}

impl Store {
    /// The candidates of a scan, best first.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the scan does not exist.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn candidate_list(
        &self,
        organization: OrganizationId,
        scan: ScanId,
        state: Option<CandidateState>,
    ) -> Result<Vec<Candidate>, Error> {
        self.scan_get(organization, scan).await?;
        let rows = candidates!(
            ["SELECT"],
            ["FROM scan_candidates c WHERE c.organization_id = $1 AND c.scan_id = $2 AND ($3::text IS NULL OR c.state = $3)
              ORDER BY c.score DESC, c.name LIMIT $4"],
            organization.uuid(),
            scan.uuid(),
            state.map(CandidateState::as_str),
            MAX_CANDIDATES,
        );
        rows.fetch_all(&self.pool).await?.into_iter().map(TryInto::try_into).collect()
    }

    /// A candidate.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn candidate_get(
        &self,
        organization: OrganizationId,
        id: CandidateId,
    ) -> Result<Candidate, Error> {
        candidates!(
            ["SELECT"],
            ["FROM scan_candidates c WHERE c.organization_id = $1 AND c.id = $2"],
            organization.uuid(),
            id.uuid()
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
    }

    /// Reviews a candidate: changes its state or content.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Conflict`] when the revision is not the expected one,
    /// [`Error::HandedOver`], [`Error::AlreadyExists`] when another candidate of the scan has the
    /// name.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn candidate_review(
        &self,
        write: &Write,
        id: CandidateId,
        expected_revision: Option<i64>,
        review: Review,
        render: impl FnOnce(&Candidate) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Candidate>, Error> {
        let mut writer = begin!(self, write);
        let (organization, now) = (writer.organization(), writer.now());
        let found: Candidate = candidates!(
            ["SELECT"],
            ["FROM scan_candidates c WHERE c.organization_id = $1 AND c.id = $2 FOR UPDATE"],
            organization,
            id.uuid()
        )
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()?;
        if expected_revision.is_some_and(|expected| expected != found.revision) {
            return Err(Error::Conflict);
        }
        if found.state == CandidateState::HandedOver {
            return Err(Error::HandedOver);
        }
        let (name, score, content) = match review.content {
            Some((name, score, content)) => (Some(name), Some(score), Some(text::json(&content)?)),
            None => (None, None, None),
        };
        let row = candidates!(
            ["UPDATE scan_candidates c SET state = coalesce($3, c.state), name = coalesce($4, c.name), score = coalesce($5, c.score),
                  content = coalesce($6, c.content), edited = c.edited OR $6 IS NOT NULL, reviewed_by = $7, reviewed_at = $8,
                  revision = c.revision + 1, updated_at = $8
              WHERE c.organization_id = $1 AND c.id = $2 RETURNING"],
            [""],
            organization,
            id.uuid(),
            review.state.map(CandidateState::as_str),
            name,
            score,
            content,
            review.by,
            now as _,
        );
        let entity =
            row.fetch_one(&mut *writer.transaction).await.map_err(Error::from_write)?.try_into()?;
        let response = render(&entity).response;
        writer.commit(&response).await?;
        Ok(WriteOutcome::Applied { entity, event: None })
    }

    /// Hands over accepted candidates of a scan, all or those in `named`, except those handed over
    /// before. The hand-over is published until [`Store::hand_over_mark_published`].
    ///
    /// # Errors
    /// [`Error::NotFound`] when the scan does not exist or has no such candidate;
    /// [`Error::NotAccepted`] when a named candidate is not accepted.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn candidates_hand_over(
        &self,
        write: &Write,
        scan: ScanId,
        named: &[CandidateId],
        by: &str,
        render: impl FnOnce(&HandOverResult) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<HandOverResult>, Error> {
        let mut writer = begin!(self, write);
        let (organization, now) = (writer.organization(), writer.now());
        let scan = scan_reload(&mut writer, scan).await?;
        let named: Vec<Uuid> = named.iter().map(|id| id.uuid()).collect();
        // The candidates to hand over. Of two concurrent requests the second finds none.
        let rows = candidates!(
            ["SELECT"],
            ["FROM scan_candidates c
              WHERE c.organization_id = $1 AND c.scan_id = $2 AND (cardinality($3::uuid[]) = 0 OR c.id = ANY($3))
              ORDER BY c.score DESC, c.name LIMIT $4 FOR UPDATE"],
            organization,
            scan.id.uuid(),
            &named,
            MAX_CANDIDATES,
        );
        let found: Vec<Candidate> = rows
            .fetch_all(&mut *writer.transaction)
            .await?
            .into_iter()
            .map(TryInto::try_into)
            .collect::<Result<_, Error>>()?;
        if named.iter().any(|id| found.iter().all(|candidate| candidate.id.uuid() != *id)) {
            return Err(Error::NotFound { what: ENTITY });
        }
        let undecided =
            |state| matches!(state, CandidateState::Proposed | CandidateState::Rejected);
        if !named.is_empty() && found.iter().any(|candidate| undecided(candidate.state)) {
            return Err(Error::NotAccepted);
        }
        let going: Vec<Uuid> = found
            .iter()
            .filter(|candidate| candidate.state == CandidateState::Accepted)
            .map(|candidate| candidate.id.uuid())
            .collect();
        let mut entity = HandOverResult { id: None, scan, candidates: Vec::new() };
        if !going.is_empty() {
            let id = HandOverId::from_uuid(Uuid::now_v7());
            sqlx::query!(
                "INSERT INTO scan_hand_overs (id, organization_id, scan_id, created_by, created_at) VALUES ($1, $2, $3, $4, $5)",
                id.uuid(),
                organization,
                entity.scan.id.uuid(),
                by,
                now as _,
            )
            .execute(&mut *writer.transaction)
            .await?;
            let rows = candidates!(
                ["UPDATE scan_candidates c SET state = 'handed_over', hand_over_id = $3, revision = c.revision + 1, updated_at = $4
                  WHERE c.organization_id = $1 AND c.id = ANY($2) RETURNING"],
                [""],
                organization,
                &going,
                id.uuid(),
                now as _,
            );
            let rows = rows.fetch_all(&mut *writer.transaction).await?;
            entity.id = Some(id);
            entity.candidates =
                rows.into_iter().map(TryInto::try_into).collect::<Result<_, Error>>()?;
        }
        let response = render(&entity).response;
        writer.commit(&response).await?;
        Ok(WriteOutcome::Applied { entity, event: None })
    }

    /// Hand-overs from before a time that are not published yet.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn hand_overs_unpublished(
        &self,
        before: Timestamp,
        limit: i64,
    ) -> Result<Vec<HandOver>, Error> {
        let rows = sqlx::query!(
            "SELECT id, organization_id, scan_id FROM scan_hand_overs WHERE told_at IS NULL AND created_at < $1
             ORDER BY created_at LIMIT $2",
            time::sql(before) as _,
            limit,
        );
        let mut hand_overs = Vec::new();
        for row in rows.fetch_all(&self.pool).await? {
            let scan = scans!(
                ["SELECT"],
                ["FROM scans s WHERE s.organization_id = $1 AND s.id = $2"],
                row.organization_id,
                row.scan_id
            );
            let scan = scan
                .fetch_optional(&self.pool)
                .await?
                .ok_or(Error::NotFound { what: SCAN })?
                .try_into()?;
            let candidates = candidates!(
                ["SELECT"],
                [
                    "FROM scan_candidates c WHERE c.organization_id = $1 AND c.hand_over_id = $2 ORDER BY c.score DESC, c.name"
                ],
                row.organization_id,
                row.id,
            );
            let candidates =
                candidates.fetch_all(&self.pool).await?.into_iter().map(TryInto::try_into);
            let candidates = candidates.collect::<Result<_, Error>>()?;
            hand_overs.push(HandOver { id: HandOverId::from_uuid(row.id), scan, candidates });
        }
        Ok(hand_overs)
    }

    /// Records that a hand-over was published.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn hand_over_mark_published(
        &self,
        id: HandOverId,
        now: Timestamp,
    ) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE scan_hand_overs SET told_at = $2 WHERE id = $1 AND told_at IS NULL",
            id.uuid(),
            time::sql(now) as _
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}
