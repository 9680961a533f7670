//! The providers: the only service that talks to model vendors.

use std::process::ExitCode;

use mimalloc::MiMalloc;

/// A fifth of what a call through the proxy costs went into the allocator of the C library
/// (docs/adr/0045-allocator.md).
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    construct_runtime::main("providers", construct_providers::run)
}
