//! Panics as log lines.

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    panic, thread,
};

use tracing::field::display;

/// Logs every panic of the process instead of writing plain text to standard error. Includes a
/// backtrace when `RUST_BACKTRACE` is set.
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
