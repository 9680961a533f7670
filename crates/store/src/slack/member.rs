//! Links between Slack users and Construct users.

use construct_domain::OrganizationId;
use jiff::Timestamp;
use uuid::Uuid;

use crate::{Error, SealedSecret, Store, text, time};

/// A Slack user who is linked to a Construct user.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// The workspace.
    pub team: String,
    /// Their Slack user id.
    pub slack_user: String,
    /// The organization that the key gives access to.
    pub organization: OrganizationId,
    /// Their Construct user id (`user_…`).
    pub user: String,
    /// Their name in Construct.
    pub name: String,
    /// Their API key, sealed for [`Member::record`].
    pub key: SealedSecret,
}

impl Member {
    /// The record that a member's key is sealed for.
    pub fn record(team: &str, slack_user: &str) -> String {
        format!("slack_{team}_{slack_user}")
    }
}

struct Row {
    team: String,
    slack_user: String,
    organization_id: Uuid,
    user_id: String,
    name: String,
    key_id: String,
    key_nonce: Vec<u8>,
    key_ciphertext: Vec<u8>,
}

impl From<Row> for Member {
    fn from(row: Row) -> Self {
        Self {
            team: row.team,
            slack_user: row.slack_user,
            organization: OrganizationId::from_uuid(row.organization_id),
            user: row.user_id,
            name: row.name,
            key: SealedSecret {
                key_id: row.key_id,
                nonce: row.key_nonce,
                ciphertext: row.key_ciphertext,
            },
        }
    }
}

impl Store {
    /// The link of a Slack user; none when they are not linked.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_member(
        &self,
        team: &str,
        slack_user: &str,
    ) -> Result<Option<Member>, Error> {
        let row = sqlx::query_as!(
            Row,
            "SELECT team, slack_user, organization_id, user_id, name, key_id, key_nonce, key_ciphertext
             FROM slack_members WHERE team = $1 AND slack_user = $2",
            team,
            slack_user,
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(row.map(Member::from))
    }

    /// Stores the link of a Slack user, replacing an earlier one.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_member_put(&self, member: &Member, now: Timestamp) -> Result<(), Error> {
        sqlx::query!(
            "INSERT INTO slack_members (team, slack_user, organization_id, user_id, name, key_id, key_nonce, key_ciphertext, linked_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
             ON CONFLICT (team, slack_user) DO UPDATE SET organization_id = $3, user_id = $4, name = $5, key_id = $6,
                 key_nonce = $7, key_ciphertext = $8, linked_at = $9",
            member.team,
            member.slack_user,
            member.organization.uuid(),
            member.user,
            text::clean(&member.name).into_owned(),
            member.key.key_id,
            member.key.nonce,
            member.key.ciphertext,
            time::sql(now) as _,
        )
        .execute(&self.pool)
        .await
        .map_err(Error::from_write)?;
        Ok(())
    }

    /// Deletes the link of a Slack user. Returns whether there was one.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_member_remove(&self, team: &str, slack_user: &str) -> Result<bool, Error> {
        let done = sqlx::query!(
            "DELETE FROM slack_members WHERE team = $1 AND slack_user = $2",
            team,
            slack_user
        )
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() > 0)
    }

    /// Members whose keys are sealed with another key than this one, at most `limit`.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_members_sealed_with_other_keys(
        &self,
        key_id: &str,
        limit: i64,
    ) -> Result<Vec<Member>, Error> {
        let rows = sqlx::query_as!(
            Row,
            "SELECT team, slack_user, organization_id, user_id, name, key_id, key_nonce, key_ciphertext
             FROM slack_members WHERE key_id <> $1 ORDER BY team, slack_user LIMIT $2",
            key_id,
            limit,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(Member::from).collect())
    }

    /// Replaces the sealed form of a member's key, unless the key changed meanwhile. Returns
    /// whether it did.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_member_reseal(
        &self,
        member: &Member,
        sealed: &SealedSecret,
    ) -> Result<bool, Error> {
        let done = sqlx::query!(
            "UPDATE slack_members SET key_id = $4, key_nonce = $5, key_ciphertext = $6
             WHERE team = $1 AND slack_user = $2 AND key_nonce = $3",
            member.team,
            member.slack_user,
            member.key.nonce,
            sealed.key_id,
            sealed.nonce,
            sealed.ciphertext,
        )
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() == 1)
    }
}
