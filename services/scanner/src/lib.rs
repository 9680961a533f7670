//! The scanner: from a repository to candidates for tools.
//!
//! - [`repository`] is its eyes: it fetches a repository at an exact commit, lays it down where
//!   nothing can leave, takes the secrets out of it, and says what is in it, before any model reads
//!   a line.
//! - A scan is a row (`scan.rs`). Whoever holds its lease goes on from the phase it is in; a
//!   command on the mesh, or the sweep, says that there is one. Nothing is kept in memory that
//!   another process would miss.
//! - A task of the mesh explores the files (`explore.rs`), made by the gateway for this scan: it
//!   can read, and nothing else. The scanner speaks to it, and to nothing else, with the scan's own
//!   token.
//! - What the model proposes is checked against the files (`candidate.rs`) before it is written
//!   down.
//!
//! Deliberately absent: decisions about the task, and any table but those of scans.

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

/// The argument that makes the process list the symbols of sources: it reads them from its input,
/// and can do nothing else.
pub const OUTLINE: &str = "outline";
