//! The construct command: the reference client of the API. It also runs the mesh on a laptop.
//!
//! It renders and sends requests. All decisions are made behind the gateway.

mod cli;

mod conversation;
mod costs;
mod daemon;
mod dead_letters;
mod doctor;
mod entity;
mod events;
mod exec;
mod explain;
mod login;
mod mesh;
mod tap;
mod top;
mod usage;
mod whoami;

mod agents;
mod attach;
mod console;
mod context;
mod event_follower;
mod failure;
mod gateway;
mod json;
mod keyring;
mod money;
mod output;
mod page;
mod policy;
mod render;
mod secret_input;
mod text;
mod time;
mod totals;

#[cfg(test)]
mod fake;

use std::process::ExitCode;

use clap::Parser as _;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    let result = Box::pin(cli.run()).await;
    login::finish().await;
    match result {
        Ok(exit) => exit.into(),
        Err(failure) => {
            failure.report();
            failure.exit().into()
        }
    }
}
