//! What every service needs besides its work: configuration, telemetry, lifecycle, health.
//!
//! A service's `main.rs` is one call of [`main`]. Its work is a function `run(config, &context)`
//! that starts everything and returns. Then the phases of [`lifecycle`] follow: run until stopped,
//! stop the intake, finish or hand back work, flush telemetry, exit.

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
