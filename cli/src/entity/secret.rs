//! `construct secret`: secrets that scripts use without seeing them.

use clap::{Args, Subcommand};
use construct_proto::v1::{
    CreateSecretRequest, DeleteSecretRequest, GetSecretRequest, ListSecretsRequest, Secret,
    SecretBindings, SecretSpec, UpdateSecretRequest, list_secrets_request::Filter,
};
use jiff::Timestamp;

use super::{ChangeArgs, WriteArgs, age, id, metadata_details};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, OutputArgs},
    page::ListArgs,
    secret_input,
};

#[derive(Debug, Subcommand)]
pub(crate) enum SecretCommand {
    /// Create a secret. Prompts for the value, or reads it from standard input; it is never shown
    /// again.
    Create(Create),
    /// Show a secret without its value.
    Get {
        /// Name or id.
        secret: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List secrets.
    List(List),
    /// Change the given fields of a secret.
    Update(Update),
    /// Delete a secret that no agent may use.
    Delete {
        /// Name or id.
        secret: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

/// There is no argument for a value: every process of the machine can read command lines.
#[derive(Debug, Args)]
pub(crate) struct Create {
    /// Uppercase letters, digits and `_`.
    name: String,
    /// The purpose, which is shown to agents that may use it.
    #[arg(long, default_value = "", hide_default_value = true)]
    description: String,
    #[command(flatten)]
    bindings: Bindings,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only secrets whose name starts with this.
    #[arg(long, value_name = "PREFIX", default_value = "", hide_default_value = true)]
    name_prefix: String,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Update {
    /// Name or id.
    secret: String,
    /// The new name.
    #[arg(long)]
    name: Option<String>,
    #[arg(long)]
    description: Option<String>,
    /// Prompt for a new value, or read it from standard input. Required to add a host or a command.
    #[arg(long)]
    new_value: bool,
    #[command(flatten)]
    bindings: Bindings,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// The hosts and commands that may get the secret.
#[derive(Debug, Args)]
struct Bindings {
    /// A host that may get it in a header, e.g. `api.example.com` or `*.example.com`. Repeatable.
    #[arg(long = "host", value_name = "HOST")]
    hosts: Vec<String>,
    /// A program that may get it in its environment. Repeatable.
    #[arg(long = "command", value_name = "PROGRAM")]
    commands: Vec<String>,
}

impl Bindings {
    fn into_bindings(self) -> Option<SecretBindings> {
        let Self { hosts, commands } = self;
        (!(hosts.is_empty() && commands.is_empty())).then_some(SecretBindings { hosts, commands })
    }
}

impl SecretCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => args.run(gateway).await,
            Self::Get { secret, output } => output
                .entity(&call(gateway.secrets().get_secret(GetSecretRequest { secret })).await?),
            Self::List(args) => args.run(gateway).await,
            Self::Update(args) => args.run(gateway).await,
            Self::Delete { secret, write, output } => {
                let request =
                    DeleteSecretRequest { secret: secret.clone(), idempotency_key: write.key() };
                call(gateway.secrets().delete_secret(request)).await?;
                output.deleted("secret", &secret)
            }
        }
    }
}

impl Create {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let bindings = self.bindings.into_bindings();
        if bindings.is_none() {
            return Err(Failure::usage(
                "at least one --host HOST or --command PROGRAM is required",
            ));
        }
        let value = secret_input::read(&format!("value of {}: ", self.name))?;
        let spec = SecretSpec { name: self.name, description: self.description, value, bindings };
        let request = CreateSecretRequest { spec: Some(spec), idempotency_key: self.write.key() };
        self.output.entity(&call(gateway.secrets().create_secret(request)).await?)
    }
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let filter = Filter { name_prefix: self.name_prefix };
        let listed = self
            .list
            .collect(|page| {
                let request = ListSecretsRequest { page: Some(page), filter: Some(filter.clone()) };
                async move {
                    let response = call(gateway.secrets().list_secrets(request)).await?;
                    Ok((response.secrets, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

impl Update {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let value = if self.new_value {
            Some(secret_input::read(&format!("new value of {}: ", self.secret))?)
        } else {
            None
        };
        let request = UpdateSecretRequest {
            secret: self.secret,
            name: self.name,
            description: self.description,
            value,
            bindings: self.bindings.into_bindings(),
            revision: self.change.revision,
            idempotency_key: self.change.write.key(),
        };
        self.output.entity(&call(gateway.secrets().update_secret(request)).await?)
    }
}

impl Entity for Secret {
    const NAME: &'static str = "construct.v1.Secret";
    const PLURAL: &'static str = "secrets";
    const COLUMNS: &'static [&'static str] =
        &["NAME", "HOSTS", "COMMANDS", "AGENTS", "AGE", "DESCRIPTION"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        let bindings = spec.bindings.unwrap_or_default();
        let agents = self.status.as_ref().map_or(0, |status| status.agent_count);
        vec![
            spec.name,
            bindings.hosts.join(", "),
            bindings.commands.join(", "),
            agents.to_string(),
            age(self.metadata.as_ref(), now),
            spec.description,
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let bindings = spec.bindings.unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        let mut details = vec![
            ("name", spec.name),
            ("id", id(self.metadata.as_ref())),
            ("description", spec.description),
            ("value", format!("set, encrypted with {}", status.encryption_key_id)),
            ("hosts", bindings.hosts.join(", ")),
            ("commands", bindings.commands.join(", ")),
            ("agents", status.agent_count.to_string()),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}
