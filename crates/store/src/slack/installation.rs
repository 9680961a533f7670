//! Slack workspaces with the app, and pending installations.

use construct_domain::OrganizationId;
use jiff::Timestamp;
use uuid::Uuid;

use crate::{Error, SealedSecret, Store, text, time};

/// A workspace that has, or had, the app.
#[derive(Debug, Clone, PartialEq)]
pub struct Installation {
    /// The workspace.
    pub team: String,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The workspace's name.
    pub team_name: String,
    /// The app's bot user.
    pub bot_user: String,
    /// The user who installed it.
    pub installed_by: String,
    /// The default agent.
    pub agent: String,
    /// The bot token and its refresh token, sealed for [`Installation::record`]. None after the app
    /// was removed.
    pub tokens: Option<SealedSecret>,
    /// When the token must be renewed.
    pub expires_at: Option<Timestamp>,
    /// Incremented with every new token.
    pub revision: i64,
}

impl Installation {
    /// The record that the tokens of a workspace are sealed for.
    pub fn record(team: &str) -> String {
        format!("slack_{team}")
    }
}

/// A new or repeated installation of the app in a workspace.
#[derive(Debug, Clone, PartialEq)]
pub struct NewInstallation {
    /// The workspace.
    pub team: String,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The workspace's name.
    pub team_name: String,
    /// The app.
    pub app: String,
    /// The app's bot user.
    pub bot_user: String,
    /// The user who installed it.
    pub installed_by: String,
    /// The default agent.
    pub agent: String,
    /// The scopes of the token.
    pub scopes: String,
    /// The bot token and its refresh token, sealed for [`Installation::record`].
    pub tokens: SealedSecret,
    /// When the token must be renewed.
    pub expires_at: Option<Timestamp>,
}

/// A pending installation.
#[derive(Debug, Clone, PartialEq)]
pub struct NewInstallState {
    /// SHA-256 of the OAuth state.
    pub state: [u8; 32],
    /// The organization that the workspace will belong to.
    pub organization: OrganizationId,
    /// The default agent.
    pub agent: String,
    /// The deadline for using it.
    pub expires_at: Timestamp,
}

struct Row {
    team: String,
    organization_id: Uuid,
    team_name: String,
    bot_user: String,
    installed_by: String,
    agent: String,
    key_id: Option<String>,
    key_nonce: Option<Vec<u8>>,
    key_ciphertext: Option<Vec<u8>>,
    expires_at: Option<jiff_sqlx::Timestamp>,
    revision: i64,
}

impl From<Row> for Installation {
    fn from(row: Row) -> Self {
        let tokens = match (row.key_id, row.key_nonce, row.key_ciphertext) {
            (Some(key_id), Some(nonce), Some(ciphertext)) => {
                Some(SealedSecret { key_id, nonce, ciphertext })
            }
            _ => None,
        };
        Self {
            team: row.team,
            organization: OrganizationId::from_uuid(row.organization_id),
            team_name: row.team_name,
            bot_user: row.bot_user,
            installed_by: row.installed_by,
            agent: row.agent,
            tokens,
            expires_at: time::from_sql_option(row.expires_at),
            revision: row.revision,
        }
    }
}

impl Store {
    /// The installation in a workspace.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_installation(&self, team: &str) -> Result<Installation, Error> {
        sqlx::query_as!(
            Row,
            "SELECT team, organization_id, team_name, bot_user, installed_by, agent, key_id, key_nonce, key_ciphertext,
                    expires_at, revision
             FROM slack_installations WHERE team = $1",
            team,
        )
        .fetch_optional(&self.pool)
        .await?
        .map(Installation::from)
        .ok_or(Error::NotFound { what: "Slack installation" })
    }

    /// Installations whose tokens are sealed with another key than this one.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_sealed_with_other_keys(
        &self,
        key_id: &str,
    ) -> Result<Vec<Installation>, Error> {
        let rows = sqlx::query_as!(
            Row,
            "SELECT team, organization_id, team_name, bot_user, installed_by, agent, key_id, key_nonce, key_ciphertext,
                    expires_at, revision
             FROM slack_installations WHERE key_id <> $1",
            key_id,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(Installation::from).collect())
    }

    /// Stores an installation. Replaces an existing one of the same organization. False, and
    /// nothing is changed, when the workspace belongs to another organization: the owner changes
    /// only after the app was removed. The data of the former owner (tasks of threads, members,
    /// permissions) is then deleted.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_install(
        &self,
        new: &NewInstallation,
        now: Timestamp,
    ) -> Result<bool, Error> {
        let mut transaction = self.pool.begin().await?;
        let before = sqlx::query_scalar!(
            "SELECT organization_id FROM slack_installations WHERE team = $1 FOR UPDATE",
            new.team
        )
        .fetch_optional(&mut *transaction)
        .await?;
        let done = sqlx::query!(
            "INSERT INTO slack_installations (team, organization_id, team_name, app, bot_user, installed_by, agent, scopes,
                 key_id, key_nonce, key_ciphertext, expires_at, installed_at, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $13, $13)
             ON CONFLICT (team) DO UPDATE SET organization_id = $2, team_name = $3, app = $4, bot_user = $5, installed_by = $6,
                 agent = $7, scopes = $8, key_id = $9, key_nonce = $10, key_ciphertext = $11, expires_at = $12,
                 revision = slack_installations.revision + 1, installed_at = $13, updated_at = $13
             WHERE slack_installations.organization_id = $2 OR slack_installations.key_id IS NULL",
            new.team,
            new.organization.uuid(),
            text::clean(&new.team_name).into_owned(),
            new.app,
            new.bot_user,
            new.installed_by,
            text::clean(&new.agent).into_owned(),
            new.scopes,
            new.tokens.key_id,
            new.tokens.nonce,
            new.tokens.ciphertext,
            time::sql_option(new.expires_at) as _,
            time::sql(now) as _,
        )
        .execute(&mut *transaction)
        .await
        .map_err(Error::from_write)?;
        if done.rows_affected() == 0 {
            return Ok(false);
        }
        // Without a row there may be data of an erased organization.
        if before != Some(new.organization.uuid()) {
            sqlx::query!(
                "UPDATE slack_threads SET organization_id = $2, task = NULL, generation = generation + 1 WHERE team = $1",
                new.team,
                new.organization.uuid(),
            )
            .execute(&mut *transaction)
            .await?;
            sqlx::query!("DELETE FROM slack_members WHERE team = $1", new.team)
                .execute(&mut *transaction)
                .await?;
            // Permissions refer to agents by name, and another organization may use the same names.
            sqlx::query!("DELETE FROM slack_grants WHERE team = $1", new.team)
                .execute(&mut *transaction)
                .await?;
        }
        transaction.commit().await?;
        Ok(true)
    }

    /// Replaces the tokens if the revision is still `revision`. Returns whether it did.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_tokens_replace(
        &self,
        team: &str,
        revision: i64,
        tokens: &SealedSecret,
        expires_at: Option<Timestamp>,
        now: Timestamp,
    ) -> Result<bool, Error> {
        let done = sqlx::query!(
            "UPDATE slack_installations SET key_id = $3, key_nonce = $4, key_ciphertext = $5, expires_at = $6,
                 revision = revision + 1, updated_at = $7
             WHERE team = $1 AND revision = $2",
            team,
            revision,
            tokens.key_id,
            tokens.nonce,
            tokens.ciphertext,
            time::sql_option(expires_at) as _,
            time::sql(now) as _,
        )
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Handles the removal of the app at that time: deletes the tokens, members and mentions'
    /// contents of the workspace, and ends unfinished mentions. False, and nothing is changed, when
    /// the app was installed again since then.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_uninstall(
        &self,
        team: &str,
        at: Timestamp,
        now: Timestamp,
    ) -> Result<bool, Error> {
        let mut transaction = self.pool.begin().await?;
        let done = sqlx::query!(
            "UPDATE slack_installations SET key_id = NULL, key_nonce = NULL, key_ciphertext = NULL, expires_at = NULL,
                 revision = revision + 1, updated_at = $3
             WHERE team = $1 AND installed_at <= $2",
            team,
            time::sql(at) as _,
            time::sql(now) as _,
        )
        .execute(&mut *transaction)
        .await?;
        if done.rows_affected() == 0 {
            return Ok(false);
        }
        // Processes that work on one of them notice by the lease.
        sqlx::query!(
            "UPDATE slack_mentions SET event = 'null'::jsonb, request = NULL, error = NULL, lease = lease + 1, next_look = NULL,
                 state = CASE WHEN next_look IS NULL OR state = 'answered' THEN state ELSE 'failed' END, updated_at = $2
             WHERE team = $1",
            team,
            time::sql(now) as _,
        )
        .execute(&mut *transaction)
        .await?;
        sqlx::query!("DELETE FROM slack_members WHERE team = $1", team)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(true)
    }

    /// Stores a pending installation, and deletes expired ones.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_state_put(
        &self,
        new: &NewInstallState,
        now: Timestamp,
    ) -> Result<(), Error> {
        sqlx::query!("DELETE FROM slack_states WHERE expires_at < $1", time::sql(now) as _)
            .execute(&self.pool)
            .await?;
        sqlx::query!(
            "INSERT INTO slack_states (state, organization_id, agent, expires_at) VALUES ($1, $2, $3, $4)",
            new.state.as_slice(),
            new.organization.uuid(),
            text::clean(&new.agent).into_owned(),
            time::sql(new.expires_at) as _,
        )
        .execute(&self.pool)
        .await
        .map_err(Error::from_write)?;
        Ok(())
    }

    /// Consumes a state, once. Returns the organization and the default agent of the installation.
    ///
    /// # Errors
    /// [`Error::NotFound`] when it does not exist, was consumed before, or has expired.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_state_consume(
        &self,
        state: &[u8; 32],
        now: Timestamp,
    ) -> Result<(OrganizationId, String), Error> {
        let row = sqlx::query!(
            "DELETE FROM slack_states WHERE state = $1 RETURNING organization_id, agent, expires_at > $2 AS \"valid!\"",
            state.as_slice(),
            time::sql(now) as _,
        )
        .fetch_optional(&self.pool)
        .await?;
        row.filter(|row| row.valid)
            .map(|row| (OrganizationId::from_uuid(row.organization_id), row.agent))
            .ok_or(Error::NotFound { what: "installation" })
    }
}
