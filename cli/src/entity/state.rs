//! Documents that clients keep: settings and the like, as JSON.

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
    page::Listed,
    time,
    words::thousands,
};

#[derive(Debug, Subcommand)]
pub(crate) enum StateCommand {
    /// List the documents that there are.
    List {
        #[command(flatten)]
        scope: ScopeArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Print one: what it says, or with -o json everything about it.
    Get {
        /// settings, storage, pinned, designs, project-settings, skill-states, hook-states or
        /// mcp-states.
        name: String,
        /// An earlier version that is kept.
        // Not called like the option that every command has.
        #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
        at_version: i64,
        #[command(flatten)]
        scope: ScopeArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Put one: make it, or put another in its place.
    Put(Put),
    /// Delete one.
    Delete(Delete),
    /// List the versions of one that are kept.
    Versions {
        /// As for get.
        name: String,
        #[command(flatten)]
        scope: ScopeArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Put an earlier version in the place of the present one.
    Restore(Restore),
    /// Print changes as they happen, beginning with what there is; with -o json a line of JSON
    /// each, with what the document says.
    Watch(watch::Watch),
    /// Write all of them into a folder, as NAME.json, for yourself only to read.
    Export(folder::Export),
    /// Put what stands in a folder as NAME.json, such as the data folder of an operator.
    Import(folder::Import),
}

/// Whose documents.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct ScopeArgs {
    /// The organization's, instead of your own.
    #[arg(long)]
    shared: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Put {
    /// As for get.
    name: String,
    /// The file with it; `-`, or nothing, reads it from standard input.
    file: Option<PathBuf>,
    /// Refuse unless it has this version now; 0: unless there is none.
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
    /// As for get.
    name: String,
    /// Refuse unless it has this version now.
    #[arg(long, value_name = "N")]
    expected_version: Option<i64>,
    /// Keep no earlier version either.
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
    /// As for get.
    name: String,
    /// Which one, as versions lists them.
    #[arg(value_name = "VERSION")]
    earlier: i64,
    /// Refuse unless it has this version now; 0: unless it is deleted.
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
    /// What the gateway fails with.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::List { scope, output } => {
                let items = list(gateway, scope).await?;
                output.list(&Listed { items, next_page_token: String::new() })
            }
            Self::Get { name, at_version, scope, output } => {
                let state = get(gateway, scope, &name, at_version).await?;
                match output.format() {
                    Format::Table => print(&with_line_break(state.json)),
                    Format::Json | Format::Yaml => output.one(&state),
                }
            }
            Self::Put(args) => args.run(gateway).await,
            Self::Delete(args) => args.run(gateway).await,
            Self::Versions { name, scope, output } => {
                let request = ListStateVersionsRequest { state: name, shared: scope.shared };
                let items = call(gateway.states().list_state_versions(request)).await?.versions;
                output.list(&Listed { items, next_page_token: String::new() })
            }
            Self::Restore(args) => args.run(gateway).await,
            Self::Watch(args) => args.run(gateway).await,
            Self::Export(args) => args.run(gateway).await,
            Self::Import(args) => args.run(gateway).await,
        }
    }
}

impl Put {
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
        self.output.one(&call(gateway.states().put_state(request)).await?)
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
        if self.earlier <= 0 {
            return Err(Failure::usage(
                "versions are 1, 2, 3, …: construct state versions NAME lists them",
            ));
        }
        // Nothing of what there is goes into the request, so that one that is sent again is the
        // same.
        let request = PutStateRequest {
            state: self.name,
            shared: self.scope.shared,
            restore: self.earlier,
            expected_version: self.expected_version,
            idempotency_key: self.write.key(),
            ..PutStateRequest::default()
        };
        self.output.one(&call(gateway.states().put_state(request)).await?)
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
            ("of", (if self.shared { "the organization" } else { "yourself" }).to_owned()),
            ("version", self.version.to_string()),
            ("bytes", thousands(self.bytes)),
            ("by", self.updated_by.clone()),
            ("updated", time::read(self.updated_at.as_ref()).map(at).unwrap_or_default()),
        ]
    }
}
