//! Documents as they change.

use std::time::Duration;

use clap::Args;
use construct_proto::v1::{StateEvent, WatchStatesRequest};

use super::ScopeArgs;
use crate::{
    failure::{Failure, may_pass},
    gateway::Gateway,
    json,
    output::{Format, OutputArgs, print},
    words::{printable, thousands},
};

/// The pause before a lost connection is tried again, and how often in a row.
const PAUSE: Duration = Duration::from_millis(500);
const TRIES: u32 = 120;

#[derive(Debug, Args)]
pub(crate) struct Watch {
    /// Only these documents; when none is given, all.
    names: Vec<String>,
    /// Tell only what the client has not got that has this cursor (with -o json, events have one).
    #[arg(long, default_value = "", hide_default_value = true)]
    cursor: String,
    #[command(flatten)]
    scope: ScopeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Watch {
    /// Prints until interrupted.
    pub(super) async fn run(mut self, gateway: &Gateway) -> Result<(), Failure> {
        let mut tries = 0;
        loop {
            let request = WatchStatesRequest {
                states: self.names.clone(),
                shared: self.scope.shared,
                cursor: self.cursor.clone(),
            };
            let lost = match gateway.states().watch_states(request).await {
                Err(status) => Some(status),
                Ok(stream) => {
                    let mut events = stream.into_inner();
                    loop {
                        match events.message().await {
                            Ok(Some(event)) => {
                                tries = 0;
                                event.cursor.clone_into(&mut self.cursor);
                                self.print(&event)?;
                            }
                            // The gateway wants to know again who this is.
                            Ok(None) => break None,
                            Err(status) => break Some(status),
                        }
                    }
                }
            };
            match lost {
                Some(status) if tries >= TRIES || !may_pass(&status) => return Err(status.into()),
                _ => {
                    tries += 1;
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    /// An event as a line.
    fn print(&self, event: &StateEvent) -> Result<(), Failure> {
        if self.output.format() != Format::Table {
            return print(&format!("{}\n", json::message("construct.v1.StateEvent", event)));
        }
        let state = event.state.clone().unwrap_or_default();
        let what = if state.deleted { "is deleted".to_owned() } else { format!("{} bytes", thousands(state.bytes)) };
        print(&printable(&format!("{}  version {}  {what}  by {}\n", state.name, state.version, state.updated_by)))
    }
}
