//! The scanner: from a repository to candidates for Tools.
//!
//! - [`repository`] fetches a repository at an exact commit, unpacks it below a directory that
//!   nothing can leave, masks its secrets, and surveys it, before a model reads a line.
//! - A scan is a row (`scan.rs`). Whoever holds its lease continues from its phase. A command of
//!   the mesh, or the sweep, says that there is one. No state is kept in memory that another
//!   process would miss.
//! - A task of the mesh explores the files (`explore.rs`). The gateway creates it for this scan,
//!   and it can only read. The scanner talks to this task alone, with the scan's own token.
//! - Proposals of the model are checked against the files (`candidate.rs`) before they are stored.
//!
//! Deliberately absent: decisions about the task, and tables other than those of scans.

mod candidate;
mod cleanup;
mod config;
mod error;
mod explore;
mod gateway;
mod hosts;
mod listing;
mod metrics;
pub mod repository;
mod scan;
mod service;
mod shared;
mod work;

pub use config::Config;
pub use service::run;

/// The argument that starts the process as a parser: it lists the symbols of sources from its
/// standard input, and can do nothing else.
pub const OUTLINE: &str = "outline";
