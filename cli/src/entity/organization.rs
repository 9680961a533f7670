//! `construct organization`: organizations.

use clap::{Args, Subcommand};
use construct_proto::v1::{
    CreateOrganizationRequest, DeleteOrganizationRequest, GetOrganizationRequest,
    ListOrganizationsRequest, Organization, OrganizationKind, OrganizationSpec, Role,
    UpdateOrganizationRequest,
};
use jiff::Timestamp;

use super::{ChangeArgs, WriteArgs, age, id, metadata_details};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, Format, OutputArgs},
    page::ListArgs,
};

#[derive(Debug, Subcommand)]
pub(crate) enum OrganizationCommand {
    /// Create an organization as its owner. Select it with --organization ID.
    Create(Create),
    /// Show an organization.
    Get {
        /// Slug or id. Default: the current organization.
        #[arg(default_value = "", hide_default_value = true)]
        reference: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List your organizations.
    List {
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Change the given fields of the current organization.
    Update(Update),
    /// Delete the current organization with everything in it. Operators can delete any
    /// organization.
    Delete {
        /// The slug or id.
        reference: String,
        /// Confirm the deletion, which cannot be undone.
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// Unique in the installation: lower-case letters, digits, `.`, `_` and `-`.
    slug: String,
    /// The display name. Default: the slug.
    #[arg(long)]
    name: Option<String>,
    /// The URL of its picture.
    #[arg(long, value_name = "URL", default_value = "", hide_default_value = true)]
    avatar_url: String,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Update {
    /// The slug or id.
    reference: String,
    #[arg(long)]
    name: Option<String>,
    #[arg(long)]
    slug: Option<String>,
    #[arg(long, value_name = "URL")]
    avatar_url: Option<String>,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl OrganizationCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => args.run(gateway).await,
            Self::Get { reference, output } => {
                let request = GetOrganizationRequest { organization: reference };
                output.entity(&call(gateway.organizations().get_organization(request)).await?)
            }
            Self::List { list, output } => {
                let listed = list
                    .collect(|page| async move {
                        let request = ListOrganizationsRequest { page: Some(page) };
                        let response = call(gateway.organizations().list_organizations(request)).await?;
                        Ok((response.organizations, response.page))
                    })
                    .await?;
                output.list(&listed)
            }
            Self::Update(args) => {
                let request = UpdateOrganizationRequest {
                    organization: args.reference,
                    name: args.name,
                    slug: args.slug,
                    avatar_url: args.avatar_url,
                    revision: args.change.revision,
                    idempotency_key: args.change.write.key(),
                };
                args.output.entity(&call(gateway.organizations().update_organization(request)).await?)
            }
            Self::Delete { reference, yes: false, .. } => Err(Failure::usage(format!(
                "this deletes everything in {reference}: agents, tasks, messages, secrets, keys, costs"
            ))
            .hint("confirm with --yes")),
            Self::Delete { reference, yes: true, write, output } => {
                let request =
                    DeleteOrganizationRequest { organization: reference.clone(), idempotency_key: write.key() };
                call(gateway.organizations().delete_organization(request)).await?;
                output.deleted("organization", &reference)
            }
        }
    }
}

impl Create {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let name = self.name.unwrap_or_else(|| self.slug.clone());
        let spec = OrganizationSpec { name, slug: self.slug, avatar_url: self.avatar_url };
        let request =
            CreateOrganizationRequest { spec: Some(spec), idempotency_key: self.write.key() };
        let response = call(gateway.organizations().create_organization(request)).await?;
        if self.output.format() != Format::Table {
            return self.output.message("construct.v1.CreateOrganizationResponse", &response, "");
        }
        if let Some(code) = &response.setup_code {
            eprintln!(
                "your key is for another organization; exchange this code for a key of the new one: {}",
                code.code
            );
            eprintln!("  construct key exchange");
        }
        self.output.entity(&response.organization.unwrap_or_default())
    }
}

/// The name of a role.
pub(super) fn role(role: Role) -> String {
    role.as_str_name().trim_start_matches("ROLE_").to_lowercase()
}

/// Parses a role.
///
/// # Errors
/// A message for people.
pub(super) fn parse_role(text: &str) -> Result<Role, String> {
    let role = Role::from_str_name(&format!("ROLE_{}", text.to_uppercase()))
        .filter(|role| *role != Role::Unspecified);
    role.ok_or_else(|| "write viewer, member, admin or owner".to_owned())
}

impl Entity for Organization {
    const NAME: &'static str = "construct.v1.Organization";
    const PLURAL: &'static str = "organizations";
    const COLUMNS: &'static [&'static str] = &["SLUG", "NAME", "KIND", "ROLE", "AGE", "ID"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let (spec, status) =
            (self.spec.clone().unwrap_or_default(), self.status.unwrap_or_default());
        let kind = if status.kind() == OrganizationKind::Personal { "personal" } else { "team" };
        let metadata = self.metadata.as_ref();
        vec![
            spec.slug,
            spec.name,
            kind.to_owned(),
            role(status.role()),
            age(metadata, now),
            id(metadata),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let (spec, status) =
            (self.spec.clone().unwrap_or_default(), self.status.unwrap_or_default());
        let kind = if status.kind() == OrganizationKind::Personal { "personal" } else { "team" };
        let mut details = vec![
            ("slug", spec.slug),
            ("name", spec.name),
            ("id", id(self.metadata.as_ref())),
            ("kind", kind.to_owned()),
            ("your role", role(status.role())),
            ("avatar", spec.avatar_url),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}
