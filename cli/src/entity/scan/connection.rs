//! `construct scan connection`: credentials for repository hosts.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use construct_proto::v1::{
    CreateScanConnectionRequest, DeleteScanConnectionRequest, GitHubApp, ListRepositoriesRequest,
    ListScanConnectionsRequest, ScanConnectionSpec, ScanHost, scan_connection_spec::Credential,
};

use crate::{
    entity::{WriteArgs, read_text},
    failure::Failure,
    gateway::{Gateway, call},
    output::OutputArgs,
    page::{ListArgs, Page},
    secret_input,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Host {
    Github,
    Gitlab,
}

#[derive(Debug, Subcommand)]
pub(super) enum ConnectionCommand {
    /// Create a connection to a repository host. Prompts for a token, or reads it from standard
    /// input; it is never shown again.
    Create(Create),
    /// List connections.
    List {
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Delete a connection that no scan uses.
    Delete {
        /// Name or id.
        connection: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List the repositories of a connection.
    Repositories {
        /// Name or id.
        connection: String,
        /// Only repositories of this organization or user.
        #[arg(long, default_value = "", hide_default_value = true)]
        owner: String,
        #[arg(long, default_value_t = 1)]
        page: u32,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(super) struct Create {
    /// Lowercase letters, digits, `.`, `_` and `-`.
    name: String,
    #[arg(long, value_enum, default_value_t = Host::Github)]
    host: Host,
    /// The API's address of a self-hosted server, e.g. <https://github.example.com/api/v3>.
    #[arg(long, value_name = "URL", default_value = "", hide_default_value = true)]
    base_url: String,
    /// Read the token from this file.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["app", "installation", "key_file"])]
    token_file: Option<PathBuf>,
    /// Authenticate as this GitHub App, by id, instead of with a token.
    #[arg(long, requires_all = ["installation", "key_file"])]
    app: Option<String>,
    /// The app's installation id.
    #[arg(long, value_name = "ID", requires = "app")]
    installation: Option<String>,
    /// The app's private key in GitHub's format.
    #[arg(long, value_name = "FILE", requires = "app")]
    key_file: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl ConnectionCommand {
    pub(super) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => args.run(gateway).await,
            Self::List { list, output } => {
                let listed = list.collect(|page| {
                    let request = ListScanConnectionsRequest { page: Some(page) };
                    async move {
                        let response = call(gateway.scans().list_scan_connections(request)).await?;
                        Ok((response.connections, response.page))
                    }
                });
                output.list(&listed.await?)
            }
            Self::Delete { connection, write, output } => {
                let request = DeleteScanConnectionRequest {
                    connection: connection.clone(),
                    idempotency_key: write.key(),
                };
                call(gateway.scans().delete_scan_connection(request)).await?;
                output.deleted("connection", &connection)
            }
            Self::Repositories { connection, owner, page, output } => {
                let request = ListRepositoriesRequest { connection, owner, page };
                let response = call(gateway.scans().list_repositories(request)).await?;
                if response.next_page > 0 {
                    eprintln!("there are more: --page {}", response.next_page);
                }
                output.list(&Page { items: response.repositories, next_page_token: String::new() })
            }
        }
    }
}

impl Create {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let credential = match (self.app, self.key_file, self.token_file) {
            (Some(app_id), Some(key), _) => {
                let installation_id = self.installation.unwrap_or_default();
                Credential::App(GitHubApp {
                    app_id,
                    installation_id,
                    private_key: read_text(&key)?,
                })
            }
            (_, _, Some(file)) => Credential::Token(read_text(&file)?.trim().to_owned()),
            _ => Credential::Token(
                secret_input::read(&format!("token of {}: ", self.name))?.trim().to_owned(),
            ),
        };
        let host = match self.host {
            Host::Github => ScanHost::Github,
            Host::Gitlab => ScanHost::Gitlab,
        };
        let spec = ScanConnectionSpec {
            name: self.name,
            host: host.into(),
            base_url: self.base_url,
            credential: Some(credential),
        };
        let request =
            CreateScanConnectionRequest { spec: Some(spec), idempotency_key: self.write.key() };
        self.output.entity(&call(gateway.scans().create_scan_connection(request)).await?)
    }
}
