//! Blocking work on its own threads.

/// Runs blocking work on a blocking thread; `None` when it panicked.
///
/// Work that could not start because the process is ending never completes: not having run is no
/// outcome. The caller must neither record it as one nor act upon it.
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
    fn work_not_started_at_process_end_has_no_outcome() {
        let dying = Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
        let handle = dying.handle().clone();
        dying.shutdown_background();
        let _inside = handle.enter();
        let refused = spawn_blocking(|| ()).now_or_never().expect("it resolves at once");
        assert!(refused.is_err_and(|error| error.is_cancelled()), "no further work starts");
        assert_eq!(Box::pin(blocking(|| ())).now_or_never(), None, "it has no outcome");
    }

    #[tokio::test]
    async fn panicking_work_returns_none() {
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
