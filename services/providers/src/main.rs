//! The providers: the only service that talks to model vendors.

use std::process::ExitCode;

fn main() -> ExitCode {
    construct_runtime::main("providers", construct_providers::run)
}
