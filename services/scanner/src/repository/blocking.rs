//! Blocking file work on another thread, which stops when its future is dropped.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Runs work on another thread. The flag turns false when this future is dropped.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
) -> io::Result<T> {
    let wanted = Arc::new(AtomicBool::new(true));
    let _stop = StopOnDrop(Arc::clone(&wanted));
    tokio::task::spawn_blocking(move || work(&wanted)).await.map_err(io::Error::other)
}

/// Fails when the future was dropped.
pub(super) fn ensure_wanted(wanted: &AtomicBool) -> io::Result<()> {
    if wanted.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Interrupted, "the caller no longer waits"))
}
