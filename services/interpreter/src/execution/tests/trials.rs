//! Scripts with fifty side effects, whose processes are killed at random moments, repeat none of
//! them, and report truthfully what became of each.
//!
//! `CONSTRUCT_TRIALS` sets the number of trials, `CONSTRUCT_SEED` the first seed; a failed trial is
//! repeated with its seed alone. The seed fixes all decisions, but not the speed of the machine.

mod check;
mod process;
mod remote;
mod script;

use std::{panic::AssertUnwindSafe, sync::Arc, thread};

use futures::{FutureExt as _, StreamExt as _};

use super::*;
use check::Check;
use process::Process;
use remote::Remote;
use script::{EFFECTS, Shape};

/// Default number of trials.
const DEFAULT_TRIALS: u64 = 12;
/// Number of concurrent trials.
const CONCURRENT_TRIALS: usize = 2;
/// Maximum number of deliveries that are refused because the previous process was still writing.
const MAX_FENCED: u32 = 20;

/// Totals over all trials.
#[derive(Debug, Default, Clone, Copy)]
struct TrialCounts {
    trials: u64,
    kills: u64,
    stopped: u64,
    effects: u64,
    unknown: u64,
    unknown_and_done: u64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequential_script_repeats_nothing() {
    trials(Shape::Sequential).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_script_repeats_nothing() {
    trials(Shape::Concurrent).await;
}

async fn trials(shape: Shape) {
    let number = |name| std::env::var(name).ok().map(|value| value.parse::<u64>().expect(name));
    let seed = number("CONSTRUCT_SEED");
    let first = seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    let count =
        number("CONSTRUCT_TRIALS").unwrap_or(if seed.is_some() { 1 } else { DEFAULT_TRIALS });
    let nats = NatsServer::start().await;
    let surroundings = Arc::new(Surroundings {
        bus: nats.bus().await,
        url: nats.url().to_owned(),
        blobs: nats.blobs(),
        egress: Egress::new(&[Ipv4Addr::LOCALHOST.into()]).expect("made"),
        sandbox: crate::command::tests::sandbox().await,
    });
    let began = std::time::Instant::now();
    let trials = futures::stream::iter(first..first + count).map(|seed| {
        let surroundings = Arc::clone(&surroundings);
        let trial = async move { Trial::begin(surroundings, shape, seed).await.run().await };
        async move { (seed, AssertUnwindSafe(tokio::spawn(trial)).catch_unwind().await) }
    });
    let mut trials = trials.buffer_unordered(CONCURRENT_TRIALS);
    let mut counts = TrialCounts::default();
    while let Some((seed, trial)) = trials.next().await {
        let Ok(Ok(one)) = trial else {
            panic!("a trial failed; repeat it with CONSTRUCT_SEED={seed}")
        };
        counts.trials += 1;
        counts.kills += one.kills;
        counts.stopped += one.stopped;
        counts.effects += one.effects;
        counts.unknown += one.unknown;
        counts.unknown_and_done += one.unknown_and_done;
        if counts.trials % 100 == 0 {
            println!("{shape:?}: {counts:?} after {:?}", began.elapsed());
        }
    }
    println!("{shape:?}: {counts:?} after {:?}; seeds {first}..{}", began.elapsed(), first + count);
}

/// Shared state of trials: everything outside of a process that outlives it.
struct Surroundings {
    bus: Bus,
    url: String,
    blobs: PathBuf,
    egress: Egress,
    sandbox: CommandSandbox,
}

/// One script that is killed several times.
struct Trial {
    surroundings: Arc<Surroundings>,
    shape: Shape,
    random: fastrand::Rng,
    folder: tempfile::TempDir,
    remote: Remote,
    command: CodeExecute,
    deliveries: u32,
    /// Threads of killed processes that are still ending.
    dying: Vec<thread::JoinHandle<()>>,
}

impl Trial {
    async fn begin(surroundings: Arc<Surroundings>, shape: Shape, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let folder = folder();
        let remote = Remote::start(&folder.path().join("work"), shape, random.fork()).await;
        let command = command(folder.path(), &[&shape.script(remote.url())]);
        Self {
            surroundings,
            shape,
            random,
            folder,
            remote,
            command,
            deliveries: 0,
            dying: Vec::new(),
        }
    }

    async fn run(mut self) -> TrialCounts {
        let kills = self.random.u32(1..=4);
        for left in (1..=kills).rev() {
            let mut process = self.deliver();
            tokio::select! {
                // Its outcome is lost: the process died before it could report.
                _ = process.end() => {}
                () = self.random_moment(left + 1) => {}
            }
            self.dying.push(process.kill());
        }
        let report = self.run_last_delivery().await;
        for dying in self.dying.drain(..) {
            tokio::task::spawn_blocking(|| dying.join())
                .await
                .expect("joined")
                .expect("a process that was killed ends");
        }
        self.remote.wait_until_idle().await;
        let check = Check {
            work: self.folder.path().join("work"),
            shape: self.shape,
            kills,
            report,
            effects: self.remote.effects(),
        };
        let mut counts = check.check();
        counts.kills = kills.into();
        self.surroundings.bus.journal().close(self.step()).await.expect("closed");
        counts
    }

    /// Runs the last delivery, which ends by itself or is canceled. Returns the report.
    async fn run_last_delivery(&mut self) -> CodeInterpreterResult {
        let is_stopped = self.random.u8(..5) == 0;
        let mut fenced = 0;
        loop {
            let mut process = self.deliver();
            let end = if is_stopped {
                let executor = process.wait_until_ready().await;
                tokio::select! {
                    end = process.end() => end,
                    () = self.random_moment(1) => {
                        executor.running.cancel(self.step(), "enough");
                        process.end().await
                    }
                }
            } else {
                process.end().await
            };
            self.dying.push(process.kill());
            match end {
                ExecutionEnd::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted {
                    mut results,
                })) => {
                    let report = results.remove(0);
                    assert_eq!(
                        self.run_after_completion().await,
                        report,
                        "a completed script reports the same again"
                    );
                    return report;
                }
                ExecutionEnd::Outcome(step_result::Outcome::Cancelled(Cancelled {
                    mut results,
                    ..
                })) => {
                    return results.remove(0);
                }
                ExecutionEnd::Outcome(other) => panic!("the script should complete: {other:?}"),
                // A killed process wrote its last entry after this one had read the journal.
                ExecutionEnd::Fenced if fenced < MAX_FENCED => fenced += 1,
                ExecutionEnd::Fenced => panic!("the execution is always fenced"),
                ExecutionEnd::HandBack(why) => panic!("the execution was handed back: {why}"),
                ExecutionEnd::Obsolete => panic!("the execution is obsolete"),
            }
        }
    }

    /// Runs the completed script once more, as if its result was lost.
    async fn run_after_completion(&mut self) -> CodeInterpreterResult {
        let mut process = self.deliver();
        let end = process.end().await;
        self.dying.push(process.kill());
        match end {
            ExecutionEnd::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted {
                mut results,
            })) => results.remove(0),
            _ => panic!("the script completed before"),
        }
    }

    /// Delivers the command to a new process.
    fn deliver(&mut self) -> Process {
        self.deliveries += 1;
        Process::start(
            &self.surroundings,
            self.folder.path(),
            self.command.clone(),
            self.deliveries,
        )
    }

    /// Waits for a random moment in the life of a process, early enough to leave work for this many
    /// processes.
    async fn random_moment(&mut self, processes: u32) {
        if self.random.u8(..4) == 0 {
            // Anywhere, also before it starts and while the journal answers it.
            return sleep_precisely(Duration::from_micros(self.random.u64(..80_000))).await;
        }
        let left = EFFECTS.saturating_sub(self.remote.requests());
        let further = self.random.u32(0..=left * 2 / (processes + 1));
        // If the script ends earlier, something else ends this wait.
        self.remote.wait_for_requests(self.remote.requests() + further).await;
        sleep_precisely(Duration::from_micros(self.random.u64(..4_000))).await;
    }

    fn step(&self) -> StepId {
        let step = self.command.step.as_ref().expect("it names a step");
        step.step_id.parse().expect("a step's id")
    }
}

/// Waits more precisely than the runtime's timers, which have milliseconds.
async fn sleep_precisely(time: Duration) {
    let end = std::time::Instant::now() + time;
    tokio::time::sleep(time.saturating_sub(Duration::from_millis(3))).await;
    while std::time::Instant::now() < end {
        tokio::task::yield_now().await;
    }
}
