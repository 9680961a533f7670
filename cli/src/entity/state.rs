//! `construct state`: JSON documents that clients store, such as settings.

mod folder;
mod watch;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use construct_proto::v1::{
    DeleteStateRequest, GetStateRequest, ListStateVersionsRequest, ListStatesRequest,
    PutStateRequest, State,
};
use jiff::Timestamp;

use super::{WriteArgs, read_text};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, Format, OutputArgs, print},
    page::Page,
    text::thousands,
    time,
};

#[derive(Debug, Subcommand)]
pub(crate) enum StateCommand {
    /// List documents.
    List {
        #[command(flatten)]
        scope: ScopeArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Print the content of a document, or all fields with -o json.
    Get {
        /// settings, storage, pinned, designs, project-settings, skill-states, hook-states or
        /// mcp-states.
        name: String,
        /// An earlier stored version.
        // Not `version`: that is the global option.
        #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
        at_version: i64,
        #[command(flatten)]
        scope: ScopeArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Create or replace a document.
    Put(PutArgs),
    /// Delete a document.
    Delete(Delete),
    /// List the stored versions of a document.
    Versions {
        /// The name, as for get.
        name: String,
        #[command(flatten)]
        scope: ScopeArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Restore an earlier version.
    Restore(Restore),
    /// Print the current documents and changes as they happen. With -o json, one JSON object per
    /// line, with the content.
    Watch(watch::Watch),
    /// Write all documents into a folder as NAME.json, readable only by you.
    Export(folder::Export),
    /// Import documents from a folder with NAME.json, such as an operator's data folder.
    Import(folder::Import),
}

/// The owner of documents.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct ScopeArgs {
    /// The organization's documents instead of your own.
    #[arg(long)]
    shared: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PutArgs {
    /// The name, as for get.
    name: String,
    /// The file with the content. `-`, or no argument, reads it from standard input.
    file: Option<PathBuf>,
    /// Refuse unless the current version is this; 0: no document.
    #[arg(long, value_name = "N")]
    expected_version: Option<i64>,
    #[command(flatten)]
    scope: ScopeArgs,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Delete {
    /// The name, as for get.
    name: String,
    /// Refuse unless the current version is this.
    #[arg(long, value_name = "N")]
    expected_version: Option<i64>,
    /// Delete all earlier versions as well.
    #[arg(long)]
    forget: bool,
    #[command(flatten)]
    scope: ScopeArgs,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Restore {
    /// The name, as for get.
    name: String,
    /// The version, as `versions` lists it.
    #[arg(value_name = "VERSION")]
    target: i64,
    /// Refuse unless the current version is this; 0: deleted.
    #[arg(long, value_name = "N")]
    expected_version: Option<i64>,
    #[command(flatten)]
    scope: ScopeArgs,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl StateCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::List { scope, output } => {
                let items = list(gateway, scope).await?;
                output.list(&Page { items, next_page_token: String::new() })
            }
            Self::Get { name, at_version, scope, output } => {
                let state = get(gateway, scope, &name, at_version).await?;
                match output.format() {
                    Format::Table => print(&with_line_break(state.json)),
                    Format::Json | Format::Yaml => output.entity(&state),
                }
            }
            Self::Put(args) => args.run(gateway).await,
            Self::Delete(args) => args.run(gateway).await,
            Self::Versions { name, scope, output } => {
                let request = ListStateVersionsRequest { state: name, shared: scope.shared };
                let items = call(gateway.states().list_state_versions(request)).await?.versions;
                output.list(&Page { items, next_page_token: String::new() })
            }
            Self::Restore(args) => args.run(gateway).await,
            Self::Watch(args) => args.run(gateway).await,
            Self::Export(args) => args.run(gateway).await,
            Self::Import(args) => args.run(gateway).await,
        }
    }
}

impl PutArgs {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let json = read_text(&self.file.unwrap_or_else(|| PathBuf::from("-")))?;
        let request = PutStateRequest {
            state: self.name,
            shared: self.scope.shared,
            json,
            expected_version: self.expected_version,
            idempotency_key: self.write.key(),
            ..PutStateRequest::default()
        };
        self.output.entity(&call(gateway.states().put_state(request)).await?)
    }
}

impl Delete {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let request = DeleteStateRequest {
            state: self.name.clone(),
            shared: self.scope.shared,
            expected_version: self.expected_version,
            forget: self.forget,
            idempotency_key: self.write.key(),
        };
        call(gateway.states().delete_state(request)).await?;
        self.output.deleted("state", &self.name)
    }
}

impl Restore {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        if self.target <= 0 {
            return Err(Failure::usage(
                "versions start at 1; list them with: construct state versions NAME",
            ));
        }
        // The request does not depend on the current document, so a retry is identical.
        let request = PutStateRequest {
            state: self.name,
            shared: self.scope.shared,
            restore: self.target,
            expected_version: self.expected_version,
            idempotency_key: self.write.key(),
            ..PutStateRequest::default()
        };
        self.output.entity(&call(gateway.states().put_state(request)).await?)
    }
}

async fn list(gateway: &Gateway, scope: ScopeArgs) -> Result<Vec<State>, Failure> {
    Ok(call(gateway.states().list_states(ListStatesRequest { shared: scope.shared })).await?.states)
}

async fn get(
    gateway: &Gateway,
    scope: ScopeArgs,
    name: &str,
    version: i64,
) -> Result<State, Failure> {
    let request = GetStateRequest { state: name.to_owned(), shared: scope.shared, version };
    call(gateway.states().get_state(request)).await
}

fn with_line_break(mut text: String) -> String {
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

impl Entity for State {
    const NAME: &'static str = "construct.v1.State";
    const PLURAL: &'static str = "states";
    const COLUMNS: &'static [&'static str] = &["NAME", "VERSION", "BYTES", "BY", "UPDATED"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        vec![
            self.name.clone(),
            self.version.to_string(),
            thousands(self.bytes),
            self.updated_by.clone(),
            time::read(self.updated_at.as_ref())
                .map(|at| time::relative(at, now))
                .unwrap_or_default(),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let at = |at| format!("{} ({})", time::local(at), time::relative(at, now));
        vec![
            ("name", self.name.clone()),
            ("owner", (if self.shared { "the organization" } else { "you" }).to_owned()),
            ("version", self.version.to_string()),
            ("bytes", thousands(self.bytes)),
            ("updated by", self.updated_by.clone()),
            ("updated", time::read(self.updated_at.as_ref()).map(at).unwrap_or_default()),
        ]
    }
}
