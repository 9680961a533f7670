//! `construct invitation`: invitations to the current organization.

use std::time::Duration;

use clap::Subcommand;
use construct_proto::v1::{
    CreateInvitationRequest, Invitation, ListInvitationsRequest, RevokeInvitationRequest, Role,
};
use jiff::Timestamp;

use super::{
    WriteArgs, age, id, metadata_details,
    organization::{parse_role, role},
};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, OutputArgs},
    page::ListArgs,
    time,
};

#[derive(Debug, Subcommand)]
pub(crate) enum InvitationCommand {
    /// Invite an email address: the user who logs in with it becomes a member. No email is sent.
    Create {
        /// The email address of the log-in.
        email: String,
        /// The role: viewer, member, admin or owner.
        #[arg(long, default_value = "member", value_parser = parse_role)]
        role: Role,
        /// How long the invitation is valid, at most 90d.
        #[arg(long, value_name = "TIME", default_value = "14d", value_parser = time::parse_duration)]
        expires: Duration,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List invitations.
    List {
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Revoke an invitation.
    Revoke {
        /// The id of the invitation.
        invitation: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

impl InvitationCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create { email, role, expires, write, output } => {
                let request = CreateInvitationRequest {
                    email,
                    role: role.into(),
                    expires_in: prost_types::Duration::try_from(expires).ok(),
                    idempotency_key: write.key(),
                };
                output.entity(&call(gateway.organizations().create_invitation(request)).await?)
            }
            Self::List { list, output } => {
                let listed = list
                    .collect(|page| async move {
                        let request = ListInvitationsRequest { page: Some(page) };
                        let response =
                            call(gateway.organizations().list_invitations(request)).await?;
                        Ok((response.invitations, response.page))
                    })
                    .await?;
                output.list(&listed)
            }
            Self::Revoke { invitation, write, output } => {
                let request = RevokeInvitationRequest { invitation, idempotency_key: write.key() };
                output.entity(&call(gateway.organizations().revoke_invitation(request)).await?)
            }
        }
    }
}

fn state(invitation: &Invitation, now: Timestamp) -> String {
    let state =
        invitation.state().as_str_name().trim_start_matches("INVITATION_STATE_").to_lowercase();
    let expired = time::read(invitation.expires_at.as_ref()).is_some_and(|expires| expires <= now);
    if state == "pending" && expired { "expired".to_owned() } else { state }
}

impl Entity for Invitation {
    const NAME: &'static str = "construct.v1.Invitation";
    const PLURAL: &'static str = "invitations";
    const COLUMNS: &'static [&'static str] = &["EMAIL", "ROLE", "STATE", "AGE", "ID"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let metadata = self.metadata.as_ref();
        vec![
            self.email.clone(),
            role(self.role()),
            state(self, now),
            age(metadata, now),
            id(metadata),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let expires = time::read(self.expires_at.as_ref());
        let mut details = vec![
            ("email", self.email.clone()),
            ("id", id(self.metadata.as_ref())),
            ("role", role(self.role())),
            ("state", state(self, now)),
            ("invited by", self.invited_by.clone()),
            ("accepted by", self.accepted_by.clone()),
            (
                "expires",
                expires
                    .map(|at| format!("{} ({})", time::local(at), time::relative(at, now)))
                    .unwrap_or_default(),
            ),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}
