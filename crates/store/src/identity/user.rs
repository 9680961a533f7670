//! Users, as identified by the issuer of their tokens.

use construct_domain::{AuditEntryId, OrganizationId, UserId, access::Role, id};
use jiff::Timestamp;

use super::parse_role;
use crate::{AuditEntry, Error, Store, audit, text, time};

/// A user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Their id.
    pub id: UserId,
    /// The issuer.
    pub issuer: String,
    /// The subject that the issuer assigned.
    pub subject: String,
    /// In lower case; may be empty.
    pub email: String,
    /// Whether the issuer has verified the address.
    pub email_verified: bool,
    /// May be empty.
    pub name: String,
}

/// The claims of an issuer about a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// The issuer.
    pub issuer: String,
    /// The subject that the issuer assigned.
    pub subject: String,
    /// In lower case; may be empty.
    pub email: String,
    /// Whether the issuer has verified the address.
    pub email_verified: bool,
    /// May be empty.
    pub name: String,
}

impl Store {
    /// Signs in an authenticated user: stores their profile, creates their personal organization
    /// the first time, and accepts the invitations for their address if it is verified. Writes
    /// nothing when nothing is new. `entry` is stored in the trail of each organization that they
    /// joined.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn user_sign_in(
        &self,
        profile: &Profile,
        entry: Option<AuditEntry>,
        now: Timestamp,
    ) -> Result<(UserId, OrganizationId), Error> {
        let stored = sqlx::query!(
            r#"SELECT u.id, o.id AS personal, u.email, u.email_verified, u.name,
                    (u.email_verified AND EXISTS (SELECT 1 FROM invitations i
                        WHERE i.email = u.email AND i.state = 'pending' AND i.expires_at > $3)) AS "invited!"
               FROM users u JOIN organizations o ON o.user_id = u.id
               WHERE u.issuer = $1 AND u.subject = $2"#,
            profile.issuer,
            profile.subject,
            time::sql(now) as _,
        )
        .fetch_optional(&self.pool)
        .await?;
        let mut profile = profile.clone();
        profile.name = text::clean(&profile.name).into_owned();
        // Missing claims keep their previous values: access tokens often have fewer claims than ID
        // tokens.
        if let Some(stored) = &stored {
            if profile.email.is_empty() {
                (profile.email, profile.email_verified) =
                    (stored.email.clone(), stored.email_verified);
            }
            if profile.name.is_empty() {
                profile.name.clone_from(&stored.name);
            }
        }
        if let Some(stored) = stored
            && !stored.invited
            && (stored.email.as_str(), stored.email_verified, stored.name.as_str())
                == (profile.email.as_str(), profile.email_verified, profile.name.as_str())
        {
            return Ok((UserId::from_uuid(stored.id), OrganizationId::from_uuid(stored.personal)));
        }
        let mut transaction = self.pool.begin().await?;
        let user = sqlx::query_scalar!(
            "INSERT INTO users (id, issuer, subject, email, email_verified, name, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $7)
             ON CONFLICT ON CONSTRAINT users_subject_key
                 DO UPDATE SET email = $4, email_verified = $5, name = $6, updated_at = $7
             RETURNING id",
            id::new_at(now),
            profile.issuer,
            profile.subject,
            profile.email,
            profile.email_verified,
            profile.name,
            time::sql(now),
        )
        .fetch_one(&mut *transaction)
        .await?;
        let mut joined = Vec::new();
        let personal = id::new_at(now);
        // Its slug is generated, so it cannot be taken.
        sqlx::query!(
            "INSERT INTO organizations (id, name, slug, kind, user_id, created_at, updated_at)
             VALUES ($1, $2, $3, 'personal', $4, $5, $5)
             ON CONFLICT (user_id) WHERE user_id IS NOT NULL DO NOTHING",
            personal,
            if profile.name.is_empty() { "personal" } else { &profile.name },
            format!("personal-{}", personal.simple()),
            user,
            time::sql(now),
        )
        .execute(&mut *transaction)
        .await?;
        let personal = sqlx::query_scalar!("SELECT id FROM organizations WHERE user_id = $1", user)
            .fetch_one(&mut *transaction)
            .await?;
        let own = sqlx::query_scalar!(
            "INSERT INTO members (organization_id, user_id, role, created_at, updated_at) VALUES ($1, $2, 'owner', $3, $3)
             ON CONFLICT ON CONSTRAINT members_pkey DO NOTHING
             RETURNING organization_id",
            personal,
            user,
            time::sql(now) as _,
        )
        .fetch_optional(&mut *transaction)
        .await?;
        joined.extend(own);
        if profile.email_verified && !profile.email.is_empty() {
            let accepted = sqlx::query_scalar!(
                "WITH accepted AS (
                     UPDATE invitations SET state = 'accepted', accepted_by = $1, revision = revision + 1, updated_at = $3
                     WHERE email = $2 AND state = 'pending' AND expires_at > $3
                     RETURNING organization_id, role
                 )
                 INSERT INTO members (organization_id, user_id, role, created_at, updated_at)
                 SELECT organization_id, $1, role, $3, $3 FROM accepted
                 ON CONFLICT ON CONSTRAINT members_pkey DO NOTHING
                 RETURNING organization_id",
                user,
                profile.email,
                time::sql(now) as _,
            )
            .fetch_all(&mut *transaction)
            .await?;
            joined.extend(accepted);
        }
        if let Some(entry) = entry {
            let entries = joined.into_iter().map(|organization| AuditEntry {
                id: AuditEntryId::from_uuid(id::new_at(now)),
                organization: OrganizationId::from_uuid(organization),
                user: Some(UserId::from_uuid(user)),
                objects: vec![UserId::from_uuid(user).to_string()],
                ..entry.clone()
            });
            audit::insert(&mut transaction, audit::rows(&entries.collect::<Vec<_>>())?).await?;
        }
        transaction.commit().await?;
        Ok((UserId::from_uuid(user), OrganizationId::from_uuid(personal)))
    }

    /// The role of a user in an organization; none when they are no member or it was deleted.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn user_role(
        &self,
        user: UserId,
        organization: OrganizationId,
    ) -> Result<Option<Role>, Error> {
        let word = sqlx::query_scalar!(
            "SELECT m.role FROM members m JOIN organizations o ON o.id = m.organization_id
             WHERE m.user_id = $1 AND m.organization_id = $2 AND o.deleted_at IS NULL",
            user.uuid(),
            organization.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?;
        word.map(|word| parse_role(&word)).transpose()
    }

    /// A user.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn user_get(&self, user: UserId) -> Result<User, Error> {
        let row = sqlx::query!(
            "SELECT issuer, subject, email, email_verified, name FROM users WHERE id = $1",
            user.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: "user" })?;
        Ok(User {
            id: user,
            issuer: row.issuer,
            subject: row.subject,
            email: row.email,
            email_verified: row.email_verified,
            name: row.name,
        })
    }
}
