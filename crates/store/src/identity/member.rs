//! Members of an organization.

use construct_domain::{OrganizationId, UserId, access::Role};
use jiff::Timestamp;
use uuid::Uuid;

use super::{list_by_time, parse_role};
use crate::{
    Cursor, Error, Key, Page, Store, Write, WriteOutcome, WriteOutput,
    write::{Writer, begin},
};

const ENTITY: &str = "member";

/// A user in an organization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The organization.
    pub organization: OrganizationId,
    /// The user.
    pub user: UserId,
    /// Their name; may be empty.
    pub name: String,
    /// Their address; may be empty.
    pub email: String,
    /// Their role.
    pub role: Role,
    /// Incremented by every change.
    pub revision: i64,
    /// When they became a member.
    pub created_at: Timestamp,
    /// When their role last changed.
    pub updated_at: Timestamp,
}

impl Member {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.user.uuid(), &self.name, self.created_at, self.updated_at)
    }
}

struct Row {
    organization_id: Uuid,
    user_id: Uuid,
    name: String,
    email: String,
    role: String,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for Member {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            organization: OrganizationId::from_uuid(row.organization_id),
            user: UserId::from_uuid(row.user_id),
            name: row.name,
            email: row.email,
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
            r#"SELECT m.organization_id, m.user_id, u.name, u.email, m.role, m.revision, m.created_at, m.updated_at
             FROM members m JOIN users u ON u.id = m.user_id WHERE "# $(+ $tail)+,
            $($argument),*
        )
    };
}

impl Store {
    /// A page of an organization's members, by time.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn member_list(
        &self,
        organization: OrganizationId,
        page: &Page,
    ) -> Result<Vec<Member>, Error> {
        let rows = list_by_time!(
            self,
            select,
            "m.organization_id = $1",
            "m.created_at",
            "m.user_id",
            page,
            [organization.uuid()],
            ("2", "3", "4")
        );
        rows.into_iter().map(Member::try_from).collect()
    }

    /// Changes the role of a member. `by` is the caller's role, which limits the roles that the
    /// caller can grant and revoke.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InsufficientRole`], [`Error::LastOwner`], [`Error::Conflict`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn member_update(
        &self,
        write: &Write,
        (user, to): (UserId, Role),
        by: Role,
        expected_revision: Option<i64>,
        render: impl FnOnce(&Member) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Member>, Error> {
        let mut writer = begin!(self, write);
        let member = member_check_change(&mut writer, user, Some(to), by).await?;
        if expected_revision.is_some_and(|expected| expected != member.revision) {
            return Err(Error::Conflict);
        }
        sqlx::query!(
            "UPDATE members SET role = $3, revision = revision + 1, updated_at = $4 WHERE organization_id = $1 AND user_id = $2",
            writer.organization(),
            user.uuid(),
            to.as_str(),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = member_reload(&mut writer, user).await?;
        writer.finish_unchanged(entity, render).await
    }

    /// Removes a member, and revokes the keys and codes that act for them. The entity in the result
    /// is the member before the removal.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::InsufficientRole`], [`Error::LastOwner`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn member_remove(
        &self,
        write: &Write,
        user: UserId,
        by: Role,
        render: impl FnOnce(&Member) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Member>, Error> {
        let mut writer = begin!(self, write);
        let entity = member_check_change(&mut writer, user, None, by).await?;
        sqlx::query!(
            "DELETE FROM members WHERE organization_id = $1 AND user_id = $2",
            writer.organization(),
            user.uuid(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        sqlx::query!(
            "DELETE FROM setup_codes WHERE organization_id = $1 AND user_id = $2",
            writer.organization(),
            user.uuid(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        // A later invitation must not revive the old keys.
        sqlx::query!(
            "UPDATE api_keys SET revoked_at = $3 WHERE organization_id = $1 AND user_id = $2 AND revoked_at IS NULL",
            writer.organization(),
            user.uuid(),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        writer.finish_unchanged(entity, render).await
    }
}

/// Returns the member if the change is allowed. Locks all owners in one order, so that two of them
/// cannot remove each other.
async fn member_check_change(
    writer: &mut Writer<'_>,
    user: UserId,
    to: Option<Role>,
    by: Role,
) -> Result<Member, Error> {
    let owners = sqlx::query_scalar!(
        "SELECT user_id FROM members WHERE organization_id = $1 AND role = 'owner' ORDER BY user_id FOR UPDATE",
        writer.organization(),
    )
    .fetch_all(&mut *writer.transaction)
    .await?;
    let member = member_reload(writer, user).await?;
    if member.role > by || to > Some(by) {
        return Err(Error::InsufficientRole);
    }
    // In local mode the operator is owner of their organization without a look into the database.
    // The database must agree.
    let operator = (writer.organization(), user) == (OrganizationId::LOCAL.uuid(), UserId::LOCAL);
    if to != Some(Role::Owner) && (operator || owners == [user.uuid()]) {
        return Err(Error::LastOwner);
    }
    Ok(member)
}

async fn member_reload(writer: &mut Writer<'_>, user: UserId) -> Result<Member, Error> {
    select!(["m.organization_id = $1 AND m.user_id = $2"], writer.organization(), user.uuid())
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
}
