//! Panics as log lines.

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    panic, thread,
};

use tracing::field::display;

/// Logs every panic of the process, in place of the text that would go to standard error and be no
/// log line. A back-trace is included when `RUST_BACKTRACE` asks for it.
pub(super) fn install() {
    panic::set_hook(Box::new(|info| {
        let message = info.payload_as_str().unwrap_or("a value that is not text");
        let location = info.location().map(ToString::to_string).unwrap_or_default();
        let backtrace = Backtrace::capture();
        let backtrace =
            (backtrace.status() == BacktraceStatus::Captured).then(|| display(backtrace));
        let thread = thread::current();
        tracing::error!(
            location,
            thread = thread.name().unwrap_or("unnamed"),
            backtrace,
            "panic: {message}"
        );
    }));
}
