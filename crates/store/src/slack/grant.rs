//! Permissions of Slack users.

use jiff::Timestamp;

use crate::{Error, Store, text, time};

/// The kind of permission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GrantKind {
    /// Ask an agent.
    Use,
    /// Decide about the approvals of an agent's calls.
    Approve,
}

impl GrantKind {
    /// The stored form.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Use => "use",
            Self::Approve => "approve",
        }
    }
}

/// A permission. Each of `channel`, `user` and `agent` that is empty means any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The workspace.
    pub team: String,
    /// The channel.
    pub channel: String,
    /// The user.
    pub user: String,
    /// The name of the agent.
    pub agent: String,
    /// The kind of permission.
    pub kind: GrantKind,
}

impl Grant {
    /// Whether it covers this channel, user and agent.
    pub fn covers(&self, channel: &str, user: &str, agent: &str) -> bool {
        let fits = |allowed: &str, asked: &str| allowed.is_empty() || allowed == asked;
        fits(&self.channel, channel) && fits(&self.user, user) && fits(&self.agent, agent)
    }
}

impl Store {
    /// The permissions of one kind in a workspace, at most 10,000.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_grants(&self, team: &str, kind: GrantKind) -> Result<Vec<Grant>, Error> {
        let rows = sqlx::query!(
            "SELECT channel, user_id, agent FROM slack_grants WHERE team = $1 AND may = $2
             ORDER BY agent, channel, user_id LIMIT 10000",
            team,
            kind.as_str(),
        )
        .fetch_all(&self.pool)
        .await?;
        let grant =
            |channel, user, agent| Grant { team: team.to_owned(), channel, user, agent, kind };
        Ok(rows.into_iter().map(|row| grant(row.channel, row.user_id, row.agent)).collect())
    }

    /// Grants a permission.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_grant(&self, grant: &Grant, by: &str, now: Timestamp) -> Result<(), Error> {
        sqlx::query!(
            "INSERT INTO slack_grants (team, channel, user_id, agent, may, created_by, created_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING",
            grant.team,
            grant.channel,
            grant.user,
            text::clean(&grant.agent).into_owned(),
            grant.kind.as_str(),
            by,
            time::sql(now),
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Revokes a permission. Returns whether there was one.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_grant_remove(&self, grant: &Grant) -> Result<bool, Error> {
        let done = sqlx::query!(
            "DELETE FROM slack_grants WHERE team = $1 AND channel = $2 AND user_id = $3 AND agent = $4 AND may = $5",
            grant.team,
            grant.channel,
            grant.user,
            grant.agent,
            grant.kind.as_str(),
        )
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() > 0)
    }
}
