//! The sandbox: runs one script of a model in a fresh Wasm instance with QuickJS inside.
//!
//! A run has no ambient authority. It reaches the tools that its [`Host`] declares, a clock, timers
//! and random numbers, all provided by the host, and nothing else. Every call is numbered when the
//! script makes it, so that a host can answer the calls of a replayed script from a journal.
//!
//! The guest is booted at build time (see `guest/README.md`), compiled once per machine and
//! wasmtime version, and instantiated copy-on-write for every run. No instance serves two runs.
//!
//! TypeScript is accepted wherever JavaScript is. A second guest, in its own instance, strips the
//! types from sources that do not parse as JavaScript; each line keeps its place.
//!
//! `guest/README.md` describes the environment of a script and its value. When a script ends, calls
//! and timers that it did not wait for are dropped, and the outcome's notes say so.

mod cache;
mod drive;
mod engine;
mod host;
mod imports;
mod limits;
mod meter;
mod outcome;
mod outstanding;
mod ticker;
mod typescript;

#[cfg(test)]
mod tests;

pub use engine::{Engine, EngineConfig, Error};
pub use host::{Host, HostCall, IMPORT, Parameter, Tool, ToolError, ToolTable};
pub use limits::Limits;
pub use outcome::{Limit, Outcome, Status, Value};
pub use typescript::StripError;
