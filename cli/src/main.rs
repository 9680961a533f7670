//! The construct command: the reference client, and the mesh on a laptop.
//!
//! It shows and asks; everything that decides anything is behind the gateway.

mod cli;

mod conversation;
mod costs;
mod daemon;
mod dead;
mod doctor;
mod entity;
mod events;
mod exec;
mod login;
mod mesh;
mod tap;
mod top;
mod usage;
mod whoami;
mod why;

mod agents;
mod attach;
mod console;
mod context;
mod failure;
mod follow;
mod gateway;
mod hidden;
mod json;
mod keyring;
mod money;
mod output;
mod page;
mod policy;
mod render;
mod tally;
mod time;
mod words;

#[cfg(test)]
mod fake;

use std::process::ExitCode;

use clap::Parser as _;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    let done = Box::pin(cli.run()).await;
    login::finish().await;
    match done {
        Ok(exit) => exit.into(),
        Err(failure) => {
            failure.report();
            failure.exit().into()
        }
    }
}
