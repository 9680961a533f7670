//! Organizations: the tenants.

use construct_domain::{OrganizationId, UserId, access::Role};
use jiff::Timestamp;
use uuid::Uuid;

use super::{NewSetupCode, key::setup_code_insert, list_by_time, parse_role};
use crate::{
    Cursor, Error, Key, Page, Store, Write, WriteOutcome, WriteOutput, text,
    write::{WriteStart, Writer, begin, write_begin_in},
};

const ENTITY: &str = "organization";

/// An organization, as one of its members sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Organization {
    /// Its id.
    pub id: OrganizationId,
    /// Its kind.
    pub kind: OrganizationKind,
    /// Shown to people.
    pub name: String,
    /// Unique in the installation.
    pub slug: String,
    /// The URL of its picture, or empty.
    pub avatar_url: String,
    /// The caller's role in it.
    pub role: Role,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// The kind of an organization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrganizationKind {
    /// Belongs to one user, created at their first sign-in.
    Personal,
    /// Belongs to several users.
    Team,
}

/// An organization to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewOrganization {
    /// Its id.
    pub id: OrganizationId,
    /// Shown to people.
    pub name: String,
    /// Unique in the installation.
    pub slug: String,
    /// The URL of its picture, or empty.
    pub avatar_url: String,
    /// Its first owner.
    pub owner: UserId,
}

/// Changes to an organization. `None` leaves a field as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OrganizationChanges {
    /// Shown to people.
    pub name: Option<String>,
    /// Unique in the installation.
    pub slug: Option<String>,
    /// The URL of its picture, or empty.
    pub avatar_url: Option<String>,
}

impl Organization {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), &self.slug, self.created_at, self.updated_at)
    }
}

struct Row {
    id: Uuid,
    kind: String,
    name: String,
    slug: String,
    avatar_url: String,
    role: String,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for Organization {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: OrganizationId::from_uuid(row.id),
            kind: if row.kind == "personal" {
                OrganizationKind::Personal
            } else {
                OrganizationKind::Team
            },
            name: row.name,
            slug: row.slug,
            avatar_url: row.avatar_url,
            role: parse_role(&row.role)?,
            revision: row.revision,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}

macro_rules! select {
    ([$($tail:literal)+], $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            r#"SELECT o.id, o.kind, o.name, o.slug, o.avatar_url, m.role, o.revision, o.created_at, o.updated_at
             FROM organizations o JOIN members m ON m.organization_id = o.id
             WHERE o.deleted_at IS NULL AND "# $(+ $tail)+,
            $($argument),*
        )
    };
}

impl Store {
    /// An organization of a user, by id or slug.
    ///
    /// # Errors
    /// [`Error::NotFound`], also when the user is no member.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn organization_find(
        &self,
        user: UserId,
        slug_or_id: &str,
    ) -> Result<Organization, Error> {
        let id = slug_or_id.parse::<OrganizationId>().ok().map(OrganizationId::uuid);
        select!(["m.user_id = $1 AND (o.id = $2 OR o.slug = $3)"], user.uuid(), id as _, slug_or_id)
            .fetch_optional(&self.pool)
            .await?
            .ok_or(Error::NotFound { what: ENTITY })?
            .try_into()
    }

    /// A page of a user's organizations, by time.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn organization_list(
        &self,
        user: UserId,
        page: &Page,
    ) -> Result<Vec<Organization>, Error> {
        let rows = list_by_time!(
            self,
            select,
            "m.user_id = $1",
            "o.created_at",
            "o.id",
            page,
            [user.uuid()],
            ("2", "3", "4")
        );
        rows.into_iter().map(Organization::try_from).collect()
    }

    /// Creates a team organization with its first owner. The write and its idempotency key belong
    /// to the organization that the caller works in. A setup `code` gives access to a program that
    /// has no other credential. `limit` is the number of organizations that the owner may own.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] when the slug is taken; [`Error::TooManyOrganizations`]; the errors
    /// of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn organization_create(
        &self,
        write: &Write,
        new: NewOrganization,
        code: Option<&NewSetupCode>,
        limit: Option<u32>,
        render: impl FnOnce(&Organization) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Organization>, Error> {
        let mut writer = begin!(self, write);
        if let Some(limit) = limit {
            // Of two concurrent calls the second counts the organization of the first.
            sqlx::query!("SELECT FROM users WHERE id = $1 FOR NO KEY UPDATE", new.owner.uuid())
                .fetch_optional(&mut *writer.transaction)
                .await?;
            let owned = sqlx::query_scalar!(
                r#"SELECT count(*) AS "owned!" FROM members m JOIN organizations o ON o.id = m.organization_id
                   WHERE m.user_id = $1 AND m.role = 'owner' AND o.kind = 'team' AND o.deleted_at IS NULL"#,
                new.owner.uuid(),
            )
            .fetch_one(&mut *writer.transaction)
            .await?;
            if owned >= i64::from(limit) {
                return Err(Error::TooManyOrganizations { limit });
            }
        }
        sqlx::query!(
            "INSERT INTO organizations (id, name, slug, avatar_url, created_at, updated_at) VALUES ($1, $2, $3, $4, $5, $5)",
            new.id.uuid(),
            &*text::clean(&new.name),
            new.slug,
            new.avatar_url,
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        sqlx::query!(
            "INSERT INTO members (organization_id, user_id, role, created_at, updated_at) VALUES ($1, $2, 'owner', $3, $3)",
            new.id.uuid(),
            new.owner.uuid(),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        if let Some(code) = code {
            setup_code_insert(&mut writer, new.id, code).await?;
        }
        let entity = organization_reload(&mut writer, new.id, new.owner).await?;
        writer.finish_unchanged(entity, render).await
    }

    /// Changes the organization of the write. Returned as `user`, one of its members, sees it.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::AlreadyExists`], [`Error::Conflict`] when the revision is not
    /// the expected one.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn organization_update(
        &self,
        write: &Write,
        user: UserId,
        expected_revision: Option<i64>,
        changes: OrganizationChanges,
        render: impl FnOnce(&Organization) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Organization>, Error> {
        let mut writer = begin!(self, write);
        let done = sqlx::query!(
            "UPDATE organizations SET
                 name = coalesce($4, name), slug = coalesce($5, slug), avatar_url = coalesce($6, avatar_url),
                 revision = revision + 1, updated_at = $3
             WHERE id = $1 AND deleted_at IS NULL AND ($2::bigint IS NULL OR revision = $2)",
            writer.organization(),
            expected_revision,
            writer.now(),
            text::clean_option(changes.name.as_deref()),
            changes.slug,
            changes.avatar_url,
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let entity = organization_reload(&mut writer, write.organization, user).await?;
        if done.rows_affected() == 0 {
            return Err(Error::Conflict);
        }
        writer.finish_unchanged(entity, render).await
    }

    /// The id of the organization with this slug or id, for the operator. Includes deleted
    /// organizations that are not erased yet.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn organization_resolve(&self, slug_or_id: &str) -> Result<OrganizationId, Error> {
        let id = slug_or_id.parse::<OrganizationId>().ok().map(OrganizationId::uuid);
        sqlx::query_scalar!(
            "SELECT id FROM organizations WHERE (id = $1 OR slug = $2) AND erasing_since IS NULL",
            id as _,
            slug_or_id,
        )
        .fetch_optional(&self.pool)
        .await?
        .map(OrganizationId::from_uuid)
        .ok_or(Error::NotFound { what: ENTITY })
    }

    /// Deletes an organization. From then on nobody has access and nothing new starts in it. Its
    /// schedules, keys and invitations are deleted, and its slug is free.
    /// [`Store::organization_erase`] removes the rest. The write belongs to the organization
    /// itself, or to the operator's.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::PermanentOrganization`] for a personal one and the operator's.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn organization_delete(
        &self,
        write: &Write,
        target: OrganizationId,
        render: impl FnOnce(&Organization) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Organization>, Error> {
        let mut transaction = self.pool.begin().await?;
        // Locked exclusively before the write takes its shared lock. Otherwise two concurrent
        // deletes would each wait for the other's shared lock.
        sqlx::query_scalar!("SELECT id FROM organizations WHERE id = $1 FOR UPDATE", target.uuid())
            .fetch_optional(&mut *transaction)
            .await?;
        let mut writer = match write_begin_in(transaction, write).await? {
            WriteStart::New(writer) => writer,
            WriteStart::Repeated(response) => return Ok(WriteOutcome::Repeated { response }),
        };
        let row = sqlx::query_as!(
            Row,
            r#"SELECT o.id, o.kind, o.name, o.slug, o.avatar_url, 'owner' AS "role!", o.revision, o.created_at, o.updated_at
               FROM organizations o WHERE o.id = $1 AND o.erasing_since IS NULL"#,
            target.uuid(),
        );
        let entity: Organization = row
            .fetch_optional(&mut *writer.transaction)
            .await?
            .ok_or(Error::NotFound { what: ENTITY })?
            .try_into()?;
        if entity.kind == OrganizationKind::Personal || entity.id == OrganizationId::LOCAL {
            return Err(Error::PermanentOrganization);
        }
        sqlx::query!("DELETE FROM schedules WHERE organization_id = $1", target.uuid())
            .execute(&mut *writer.transaction)
            .await?;
        sqlx::query!("DELETE FROM setup_codes WHERE organization_id = $1", target.uuid())
            .execute(&mut *writer.transaction)
            .await?;
        sqlx::query!(
            "UPDATE api_keys SET revoked_at = $2 WHERE organization_id = $1 AND revoked_at IS NULL",
            target.uuid(),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        sqlx::query!(
            "UPDATE invitations SET state = 'revoked', revision = revision + 1, updated_at = $2
             WHERE organization_id = $1 AND state = 'pending'",
            target.uuid(),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        sqlx::query!(
            "UPDATE organizations SET deleted_at = coalesce(deleted_at, $2), updated_at = $2, revision = revision + 1, slug = id::text,
                 erasing_since = $2, erasing_looked_at = $2
             WHERE id = $1",
            target.uuid(),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        writer.finish_unchanged(entity, render).await
    }
}

async fn organization_reload(
    writer: &mut Writer<'_>,
    id: OrganizationId,
    user: UserId,
) -> Result<Organization, Error> {
    select!(["o.id = $1 AND m.user_id = $2"], id.uuid(), user.uuid())
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
}
