//! Work on threads where it may block.

/// Does the work on such a thread; `None` when it panicked.
///
/// Work that was not begun because the process is ending never ends: that it was not done is no
/// outcome of it, and whoever waits must neither write it down as one nor act upon it.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Some(done),
        Err(error) if error.is_cancelled() => std::future::pending().await,
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use tokio::{runtime::Builder, task::spawn_blocking};

    use super::*;

    #[test]
    fn work_that_was_not_begun_when_the_process_ended_has_not_failed() {
        let dying = Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
        let handle = dying.handle().clone();
        dying.shutdown_background();
        let _inside = handle.enter();
        let refused = spawn_blocking(|| ()).now_or_never().expect("it is known at once");
        assert!(refused.is_err_and(|error| error.is_cancelled()), "no more work is begun");
        assert_eq!(Box::pin(blocking(|| ())).now_or_never(), None, "it has no outcome");
    }

    #[tokio::test]
    async fn work_that_panics_is_told_from_work_that_is_done() {
        assert_eq!(blocking(|| 1).await, Some(1));
        assert_eq!(
            blocking(|| if std::hint::black_box(true) {
                panic!("on purpose")
            })
            .await,
            None
        );
    }
}
