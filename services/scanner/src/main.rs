//! The scanner's process.

use std::process::ExitCode;

use construct_scanner::{OUTLINE, repository::outline_child};

fn main() -> ExitCode {
    // The parsers of untrusted sources run in their own process, which reads no configuration.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == OUTLINE) {
        return outline_child();
    }
    construct_runtime::main("scanner", construct_scanner::run)
}
