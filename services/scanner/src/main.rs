//! The scanner's process.

use std::process::ExitCode;

use construct_scanner::{OUTLINE, repository::outline_child};

fn main() -> ExitCode {
    // What parses the sources of strangers is a process of its own, which reads no configuration.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == OUTLINE) {
        return outline_child();
    }
    construct_runtime::main("scanner", construct_scanner::run)
}
