//! Invitations by e-mail address. They are accepted at sign-in ([`Store::user_sign_in`]).

use construct_domain::{InvitationId, OrganizationId, UserId, access::Role};
use jiff::Timestamp;
use uuid::Uuid;

use super::{list_by_time, parse_role};
use crate::{
    Cursor, Error, Key, Page, Store, Write, WriteOutcome, WriteOutput,
    write::{Writer, begin},
};

const ENTITY: &str = "invitation";

/// An invitation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invitation {
    /// Its id.
    pub id: InvitationId,
    /// The inviting organization.
    pub organization: OrganizationId,
    /// The e-mail address, in lower case.
    pub email: String,
    /// The role of the new member.
    pub role: Role,
    /// Its state.
    pub state: InvitationState,
    /// The inviting user.
    pub invited_by: String,
    /// The user who accepted it.
    pub accepted_by: Option<UserId>,
    /// The deadline for accepting it.
    pub expires_at: Timestamp,
    /// Incremented by every change.
    pub revision: i64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
}

/// The state of an invitation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InvitationState {
    /// It can be accepted until it expires.
    Pending,
    /// It was accepted.
    Accepted,
    /// It was revoked.
    Revoked,
}

/// An invitation to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewInvitation {
    /// Its id.
    pub id: InvitationId,
    /// The e-mail address, in lower case.
    pub email: String,
    /// The role of the new member.
    pub role: Role,
    /// The inviting user.
    pub invited_by: String,
    /// The deadline for accepting it.
    pub expires_at: Timestamp,
}

impl Invitation {
    /// Its position in a list.
    pub fn cursor(&self, key: Key) -> Cursor {
        Cursor::new(key, self.id.uuid(), &self.email, self.created_at, self.updated_at)
    }
}

struct Row {
    id: Uuid,
    organization_id: Uuid,
    email: String,
    role: String,
    state: String,
    invited_by: String,
    accepted_by: Option<Uuid>,
    expires_at: Timestamp,
    revision: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

impl TryFrom<Row> for Invitation {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        Ok(Self {
            id: InvitationId::from_uuid(row.id),
            organization: OrganizationId::from_uuid(row.organization_id),
            email: row.email,
            role: parse_role(&row.role)?,
            state: match row.state.as_str() {
                "pending" => InvitationState::Pending,
                "accepted" => InvitationState::Accepted,
                _ => InvitationState::Revoked,
            },
            invited_by: row.invited_by,
            accepted_by: row.accepted_by.map(UserId::from_uuid),
            expires_at: row.expires_at,
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
            r#"SELECT i.id, i.organization_id, i.email, i.role, i.state, i.invited_by, i.accepted_by, i.expires_at, i.revision,
                    i.created_at, i.updated_at
             FROM invitations i WHERE "# $(+ $tail)+,
            $($argument),*
        )
    };
}

impl Store {
    /// A page of an organization's invitations, by time.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn invitation_list(
        &self,
        organization: OrganizationId,
        page: &Page,
    ) -> Result<Vec<Invitation>, Error> {
        let rows = list_by_time!(
            self,
            select,
            "i.organization_id = $1",
            "i.created_at",
            "i.id",
            page,
            [organization.uuid()],
            ("2", "3", "4")
        );
        rows.into_iter().map(Invitation::try_from).collect()
    }

    /// Invites an address. Replaces an expired invitation of the same address.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] while the address has a pending invitation; the errors of every
    /// write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn invitation_create(
        &self,
        write: &Write,
        new: NewInvitation,
        render: impl FnOnce(&Invitation) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Invitation>, Error> {
        let mut writer = begin!(self, write);
        sqlx::query!(
            "UPDATE invitations SET state = 'revoked', revision = revision + 1, updated_at = $3
             WHERE organization_id = $1 AND email = $2 AND state = 'pending' AND expires_at <= $3",
            writer.organization(),
            new.email,
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        sqlx::query!(
            "INSERT INTO invitations (id, organization_id, email, role, invited_by, expires_at, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $7)",
            new.id.uuid(),
            writer.organization(),
            new.email,
            new.role.as_str(),
            new.invited_by,
            crate::time::sql(new.expires_at),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await
        .map_err(Error::from_write)?;
        let entity = invitation_reload(&mut writer, new.id).await?;
        writer.finish_unchanged(entity, render).await
    }

    /// Revokes an invitation. No effect if it is no longer pending.
    ///
    /// # Errors
    /// [`Error::NotFound`]; the errors of every write.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn invitation_revoke(
        &self,
        write: &Write,
        id: InvitationId,
        render: impl FnOnce(&Invitation) -> WriteOutput + Send,
    ) -> Result<WriteOutcome<Invitation>, Error> {
        let mut writer = begin!(self, write);
        sqlx::query!(
            "UPDATE invitations SET state = 'revoked', revision = revision + 1, updated_at = $3
             WHERE organization_id = $1 AND id = $2 AND state = 'pending'",
            writer.organization(),
            id.uuid(),
            writer.now(),
        )
        .execute(&mut *writer.transaction)
        .await?;
        let entity = invitation_reload(&mut writer, id).await?;
        writer.finish_unchanged(entity, render).await
    }
}

async fn invitation_reload(writer: &mut Writer<'_>, id: InvitationId) -> Result<Invitation, Error> {
    select!(["i.organization_id = $1 AND i.id = $2"], writer.organization(), id.uuid())
        .fetch_optional(&mut *writer.transaction)
        .await?
        .ok_or(Error::NotFound { what: ENTITY })?
        .try_into()
}
