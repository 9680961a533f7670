//! `construct state watch`: prints changes of documents.

use clap::Args;
use construct_proto::v1::{StateEvent, WatchStatesRequest};

use super::ScopeArgs;
use crate::{
    entity::watch_stream::{StreamEnd, follow},
    failure::Failure,
    gateway::Gateway,
    json,
    output::{Format, OutputArgs, print},
    text::{printable, thousands},
};

#[derive(Debug, Args)]
pub(crate) struct Watch {
    /// Only these documents. Default: all.
    names: Vec<String>,
    /// Continue after the event with this cursor (with -o json, events have one).
    #[arg(long, default_value = "", hide_default_value = true)]
    cursor: String,
    #[command(flatten)]
    scope: ScopeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Watch {
    /// Prints until interrupted.
    pub(super) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let (states, shared, output) = (self.names, self.scope.shared, self.output);
        let open = async |cursor: String| {
            let request = WatchStatesRequest { states: states.clone(), shared, cursor };
            gateway.states().watch_states(request).await
        };
        follow(self.cursor, StreamEnd::Reauthenticate, open, |event: StateEvent| {
            print_event(output, &event)?;
            Ok(event.cursor)
        })
        .await
    }
}

/// Prints an event as one line.
fn print_event(output: OutputArgs, event: &StateEvent) -> Result<(), Failure> {
    if output.format() != Format::Table {
        return print(&format!("{}\n", json::message("construct.v1.StateEvent", event)));
    }
    let state = event.state.clone().unwrap_or_default();
    let change = if state.deleted {
        "is deleted".to_owned()
    } else {
        format!("{} bytes", thousands(state.bytes))
    };
    let by = if state.updated_by.is_empty() {
        String::new()
    } else {
        format!("  by {}", state.updated_by)
    };
    print(&printable(&format!("{}  version {}  {change}{by}\n", state.name, state.version)))
}
