//! The commands of each entity, and how entities are printed.

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
mod watch_stream;

use std::{
    fs,
    io::{self, Read as _},
    path::Path,
};

use construct_proto::v1::Metadata;
use jiff::Timestamp;

use crate::{failure::Failure, gateway, time};

/// Options of every write.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct WriteArgs {
    /// Makes a repeated request have one effect; random by default.
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
}

impl WriteArgs {
    fn key(&self) -> String {
        self.idempotency_key.clone().unwrap_or_else(gateway::idempotency_key)
    }
}

/// Options of every change.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ChangeArgs {
    /// Refuse the change unless the entity has this revision.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    revision: i64,
    #[command(flatten)]
    write: WriteArgs,
}

/// Reads a text file; `-` is standard input.
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

/// Reads all of standard input.
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

/// The details of the metadata, printed last.
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

/// The number as text; empty for 0.
fn unless_zero(n: impl Into<i128>) -> String {
    match n.into() {
        0 => String::new(),
        n => crate::text::thousands(n),
    }
}
