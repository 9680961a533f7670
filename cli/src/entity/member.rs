//! `construct member`: members of the current organization.

use clap::Subcommand;
use construct_proto::v1::{
    ListMembersRequest, Member, RemoveMemberRequest, Role, UpdateMemberRequest,
};
use jiff::Timestamp;

use super::{
    ChangeArgs, WriteArgs, age, id, metadata_details,
    organization::{parse_role, role},
};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, OutputArgs},
    page::ListArgs,
};

#[derive(Debug, Subcommand)]
pub(crate) enum MemberCommand {
    /// List members.
    List {
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Change the role of a member.
    Update {
        /// The user's id.
        user: String,
        /// The role: viewer, member, admin or owner.
        #[arg(long, value_parser = parse_role)]
        role: Role,
        #[command(flatten)]
        change: ChangeArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Remove a member, and revoke the member's API keys.
    Remove {
        /// The user's id.
        user: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

impl MemberCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::List { list, output } => {
                let listed = list
                    .collect(|page| async move {
                        let request = ListMembersRequest { page: Some(page) };
                        let response = call(gateway.organizations().list_members(request)).await?;
                        Ok((response.members, response.page))
                    })
                    .await?;
                output.list(&listed)
            }
            Self::Update { user, role, change, output } => {
                let request = UpdateMemberRequest {
                    user,
                    role: role.into(),
                    revision: change.revision,
                    idempotency_key: change.write.key(),
                };
                output.entity(&call(gateway.organizations().update_member(request)).await?)
            }
            Self::Remove { user, write, output } => {
                let request =
                    RemoveMemberRequest { user: user.clone(), idempotency_key: write.key() };
                call(gateway.organizations().remove_member(request)).await?;
                output.deleted("member", &user)
            }
        }
    }
}

impl Entity for Member {
    const NAME: &'static str = "construct.v1.Member";
    const PLURAL: &'static str = "members";
    const COLUMNS: &'static [&'static str] = &["NAME", "EMAIL", "ROLE", "AGE", "USER"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let metadata = self.metadata.as_ref();
        vec![
            self.name.clone(),
            self.email.clone(),
            role(self.role()),
            age(metadata, now),
            id(metadata),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let mut details = vec![
            ("name", self.name.clone()),
            ("email", self.email.clone()),
            ("user", id(self.metadata.as_ref())),
            ("role", role(self.role())),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}
