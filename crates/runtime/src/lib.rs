//! What every service needs around its work: configuration, telemetry, lifecycle, health.
//!
//! A service's `main.rs` is one call of [`main`]; its work is a function `run(config, &context)`
//! that starts everything and returns. From there on the phases of [`lifecycle`] hold: run until
//! told to stop, stop the intake, finish or hand back, flush telemetry, exit.

pub mod address;
pub mod clock;
pub mod config;
mod context;
mod entry;
pub mod health;
pub mod lifecycle;
pub mod master_key;
pub mod metrics;
pub mod model_token;
pub mod retry;
pub mod scan_token;
mod signed;
pub mod telemetry;

pub use config::{Common, ServiceConfig};
pub use context::Context;
pub use entry::{main, main_with_arguments};
pub use health::{Latch, Readiness};
pub use lifecycle::{Lifecycle, Stopping};
pub use master_key::{MasterKey, MasterKeys, OpenError};
pub use model_token::ModelToken;
pub use scan_token::ScanToken;
