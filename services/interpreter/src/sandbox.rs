//! The sandbox: runs one script of a model in a fresh Wasm instance with QuickJS inside.
//!
//! A run has no ambient authority. It reaches the tools its [`Host`] declares, a clock, timers and
//! random numbers, all of which the host answers, and nothing else. Every call is numbered when the
//! script makes it, so that a host can answer the calls of a script that is run again from a
//! journal.
//!
//! The guest is booted while it is built (see `guest/README.md`), compiled once per machine and
//! wasmtime version, and instantiated copy-on-write for every run; no instance serves two runs.
//!
//! TypeScript is accepted wherever JavaScript is: what does not parse as JavaScript is stripped of
//! its types by a second guest, in an instance of its own, so that each line stays where it was.
//!
//! What a script is given and how its value comes about is described in `guest/README.md`. When it
//! ends, calls and timers that it didn't wait for are dropped, and the outcome's notes say so.

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
