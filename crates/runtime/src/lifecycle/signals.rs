//! The stop signals of the operating system.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Lifecycle;

/// Hands SIGTERM and SIGINT to the lifecycle, from the moment this returns until the runtime is
/// shut down.
///
/// # Errors
/// The operating system refuses the handlers.
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
