//! The entities: their commands, and how each is shown.

pub(crate) mod agent;
pub(crate) mod approval;
pub(crate) mod audit;
pub(crate) mod budget;
pub(crate) mod file;
pub(crate) mod invitation;
pub(crate) mod key;
pub(crate) mod member;
pub(crate) mod message;
pub(crate) mod model;
pub(crate) mod model_provider;
pub(crate) mod organization;
pub(crate) mod quota;
pub(crate) mod scan;
pub(crate) mod schedule;
pub(crate) mod secret;
pub(crate) mod state;
pub(crate) mod task;
pub(crate) mod token;
mod watching;

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

use construct_proto::v1::Metadata;
use jiff::Timestamp;

use crate::{failure::Failure, gateway, time};

/// What every write takes.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct WriteArgs {
    /// Makes a repeated call one write; made up when not given.
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
}

impl WriteArgs {
    fn key(&self) -> String {
        self.idempotency_key.clone().unwrap_or_else(gateway::idempotency_key)
    }
}

/// What every change takes.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ChangeArgs {
    /// Refuse unless it still has this revision.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    revision: i64,
    #[command(flatten)]
    write: WriteArgs,
}

/// A file's text; `-` is standard input.
///
/// # Errors
/// When it can't be read.
pub(crate) fn read_text(path: &Path) -> Result<String, Failure> {
    if path == Path::new("-") {
        return read_stdin();
    }
    fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("{} cannot be read: {error}", path.display())))
}

/// All of standard input.
///
/// # Errors
/// When it can't be read.
fn read_stdin() -> Result<String, Failure> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text)?;
    Ok(text)
}

fn id(metadata: Option<&Metadata>) -> String {
    metadata.map(|metadata| metadata.id.clone()).unwrap_or_default()
}

fn age(metadata: Option<&Metadata>, now: Timestamp) -> String {
    let created = metadata.and_then(|metadata| time::read(metadata.created_at.as_ref()));
    created.map(|created| time::distance(created, now)).unwrap_or_default()
}

/// What is shown of the metadata below everything else.
fn metadata_details(metadata: Option<&Metadata>, now: Timestamp) -> Vec<(&'static str, String)> {
    let Some(metadata) = metadata else { return Vec::new() };
    let at = |time: Option<&prost_types::Timestamp>| {
        time::read(time)
            .map(|at| format!("{} ({})", time::local(at), time::relative(at, now)))
            .unwrap_or_default()
    };
    vec![
        ("created", at(metadata.created_at.as_ref())),
        ("updated", at(metadata.updated_at.as_ref())),
        ("revision", metadata.revision.to_string()),
    ]
}

/// A number, unless it is 0 and so says nothing.
fn unless_zero(n: impl Into<i128>) -> String {
    match n.into() {
        0 => String::new(),
        n => crate::words::thousands(n),
    }
}
