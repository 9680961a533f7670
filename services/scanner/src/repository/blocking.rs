//! Work on files, on a thread where that is allowed, which stops when nobody waits for it any more.

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

/// Does work on another thread. What it is given turns false when this future is dropped.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
) -> io::Result<T> {
    let wanted = Arc::new(AtomicBool::new(true));
    let _stop = StopOnDrop(Arc::clone(&wanted));
    tokio::task::spawn_blocking(move || work(&wanted)).await.map_err(io::Error::other)
}

/// Fails when nobody waits any more.
pub(super) fn go_on(wanted: &AtomicBool) -> io::Result<()> {
    if wanted.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Interrupted, "nobody waits for it any more"))
}
