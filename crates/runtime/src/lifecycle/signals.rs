//! The stop signals of the operating system.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Lifecycle;

/// Forwards SIGTERM and SIGINT to the lifecycle until the runtime shuts down.
///
/// # Errors
/// When the operating system refuses the handlers.
pub(crate) fn watch(lifecycle: &Lifecycle) -> io::Result<()> {
    for (kind, name) in [(SignalKind::terminate(), "SIGTERM"), (SignalKind::interrupt(), "SIGINT")]
    {
        let signals = signal(kind)?;
        tokio::spawn(forward(signals, name, lifecycle.clone()));
    }
    Ok(())
}

async fn forward(mut signals: Signal, name: &'static str, lifecycle: Lifecycle) {
    while signals.recv().await.is_some() {
        lifecycle.on_signal(name);
    }
}
