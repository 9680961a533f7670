use std::sync::atomic::AtomicBool;

use anyhow::anyhow;
use tokio::sync::oneshot;

use super::*;

/// Longer than any test takes: a lifecycle that does not end fails the test with the names of its
/// tasks.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// A grace period that no test reaches.
const LONG_GRACE: Duration = Duration::from_secs(600);

async fn run_to_end(lifecycle: &Lifecycle) -> Outcome {
    time::timeout(TEST_TIMEOUT, lifecycle.run_until_stopped(async { Ok(()) }))
        .await
        .unwrap_or_else(|_| panic!("still running: {:?}", lifecycle.names()))
}

/// A correct essential task: it lives until draining.
fn spawn_obedient(lifecycle: &Lifecycle, name: &'static str) {
    let draining = lifecycle.draining();
    lifecycle.spawn(name, async move {
        draining.cancelled().await;
        anyhow::Ok(())
    });
}

/// Records that the task that owns it was dropped.
struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn first_signal_drains_and_finished_work_is_a_clean_stop() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    spawn_obedient(&lifecycle, "intake");
    let finished = Arc::new(AtomicBool::new(false));
    let (draining, done) = (lifecycle.draining(), Arc::clone(&finished));
    lifecycle.spawn_job("request", async move {
        draining.cancelled().await;
        tokio::task::yield_now().await;
        done.store(true, Ordering::SeqCst);
    });
    lifecycle.on_signal("SIGTERM");
    let outcome = run_to_end(&lifecycle).await;
    assert!(outcome.failure.is_none() && outcome.cut_off.is_empty(), "{outcome:?}");
    assert!(finished.load(Ordering::SeqCst), "the job was not waited for");
    assert!(!lifecycle.hard_stop().is_cancelled());
    assert_eq!(outcome.exit_code(), ExitCode::SUCCESS);
}

#[tokio::test]
async fn second_signal_drops_running_tasks_and_names_them() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    let dropped = Arc::new(AtomicBool::new(false));
    let flag = Flag(Arc::clone(&dropped));
    lifecycle.spawn("stubborn", async move {
        let _flag = flag;
        std::future::pending::<anyhow::Result<()>>().await
    });
    lifecycle.on_signal("SIGTERM");
    lifecycle.on_signal("SIGINT");
    let outcome = run_to_end(&lifecycle).await;
    assert!(outcome.cut_off.contains(&"stubborn".to_owned()), "{outcome:?}");
    assert!(dropped.load(Ordering::SeqCst));
    assert_eq!(outcome.exit_code(), ExitCode::from(3));
}

#[tokio::test]
async fn grace_period_ends_in_a_hard_stop() {
    let lifecycle = Lifecycle::new(Duration::from_millis(20));
    spawn_obedient(&lifecycle, "obedient");
    lifecycle.spawn("stubborn", std::future::pending::<anyhow::Result<()>>());
    lifecycle.stop("test");
    let outcome = run_to_end(&lifecycle).await;
    assert_eq!(outcome.cut_off, ["stubborn"]);
    assert!(outcome.failure.is_none());
}

#[tokio::test]
async fn task_that_never_yields_does_not_block_the_exit() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let lifecycle = Lifecycle::new(Duration::from_millis(20));
    let (release, held) = std::sync::mpsc::channel::<()>();
    let (entered, is_in) = oneshot::channel();
    let stuck = lifecycle.clone();
    runtime.spawn(async move {
        stuck.spawn_job("stuck", async move {
            let _ = entered.send(());
            let _ = held.recv();
        });
    });
    is_in.await.unwrap();
    lifecycle.stop("test");
    let outcome = run_to_end(&lifecycle).await;
    assert_eq!(outcome.cut_off, ["stuck"]);
    drop(release);
    runtime.shutdown_background();
}

#[tokio::test]
async fn panic_of_essential_task_stops_the_process() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    spawn_obedient(&lifecycle, "neighbor");
    lifecycle.spawn("sweep", async {
        let cause = "row";
        assert!(cause.is_empty(), "lost a {cause}");
        anyhow::Ok(())
    });
    let outcome = run_to_end(&lifecycle).await;
    assert_eq!(outcome.exit_code(), ExitCode::FAILURE);
    assert_eq!(outcome.failure.unwrap().to_string(), "task `sweep` panicked: lost a row");
}

#[tokio::test]
async fn error_of_essential_task_is_reported_with_cause() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    lifecycle.spawn("consumer", async { Err(anyhow!("stream is gone")) });
    let failure = run_to_end(&lifecycle).await.failure.unwrap();
    assert_eq!(Chain(&failure).to_string(), "task `consumer` failed: stream is gone");
}

#[tokio::test]
async fn essential_task_ending_early_is_a_failure() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    lifecycle.spawn("listener", async { anyhow::Ok(()) });
    let failure = run_to_end(&lifecycle).await.failure.unwrap();
    assert_eq!(failure.to_string(), "task `listener` ended unexpectedly");
}

#[tokio::test]
async fn error_while_draining_is_no_failure() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    let draining = lifecycle.draining();
    lifecycle.spawn("consumer", async move {
        draining.cancelled().await;
        Err(anyhow!("connection closed"))
    });
    lifecycle.stop("test");
    let outcome = run_to_end(&lifecycle).await;
    assert!(outcome.failure.is_none(), "{outcome:?}");
}

#[tokio::test]
async fn panic_of_a_job_does_not_stop_the_process() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    let (sender, receiver) = oneshot::channel::<()>();
    lifecycle.spawn_job("request", async move {
        let _sender = sender;
        panic!("this request only");
    });
    receiver.await.unwrap_err();
    assert!(!lifecycle.is_draining());
    assert!(run_to_end(&lifecycle).await.failure.is_none());
}

#[tokio::test]
async fn process_ends_when_its_work_is_done() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    lifecycle.spawn_job("only job", async {});
    assert_eq!(run_to_end(&lifecycle).await.exit_code(), ExitCode::SUCCESS);
}

#[tokio::test]
async fn failed_start_stops_started_tasks() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    let start = async {
        spawn_obedient(&lifecycle, "grpc");
        Err(anyhow!("address in use"))
    };
    let outcome = time::timeout(TEST_TIMEOUT, lifecycle.run_until_stopped(start)).await.unwrap();
    assert_eq!(
        Chain(&outcome.failure.unwrap()).to_string(),
        "the service could not start: address in use"
    );
}

#[tokio::test]
async fn start_interrupted_by_a_signal_is_no_failure() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    lifecycle.on_signal("SIGTERM");
    let start = async { Err(anyhow::Error::from(Stopping).context("connecting to nats")) };
    let outcome = time::timeout(TEST_TIMEOUT, lifecycle.run_until_stopped(start)).await.unwrap();
    assert!(outcome.failure.is_none(), "{outcome:?}");
}

#[tokio::test]
async fn hanging_start_is_dropped_after_the_grace_period() {
    let lifecycle = Lifecycle::new(Duration::from_millis(20));
    lifecycle.stop("test");
    let outcome = time::timeout(TEST_TIMEOUT, lifecycle.run_until_stopped(std::future::pending()))
        .await
        .unwrap();
    assert_eq!(outcome.cut_off, ["start"]);
}

#[tokio::test]
async fn real_signal_reaches_the_lifecycle() {
    let lifecycle = Lifecycle::new(LONG_GRACE);
    watch_signals(&lifecycle).unwrap();
    spawn_obedient(&lifecycle, "intake");
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM)
        .unwrap();
    let outcome = run_to_end(&lifecycle).await;
    assert!(outcome.failure.is_none() && outcome.cut_off.is_empty(), "{outcome:?}");
}
