//! Scripts of fifty side effects whose processes are killed at random moments repeat none of them,
//! and say truthfully what became of each.
//!
//! `CONSTRUCT_TRIALS` says how many trials there are, `CONSTRUCT_SEED` with which seed they begin:
//! a trial that failed is tried again with its seed alone. The seed fixes what is decided, and not
//! how fast the machine is.

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

/// How many trials there are when nothing else is said.
const TRIALS: u64 = 12;
/// How many run at the same time.
const AT_ONCE: usize = 2;
/// How often one more delivery may be refused because the process before it was still writing.
const FENCED: u32 = 20;

/// What was seen in all trials together.
#[derive(Debug, Default, Clone, Copy)]
struct Seen {
    trials: u64,
    kills: u64,
    stopped: u64,
    effects: u64,
    unknown: u64,
    unknown_and_done: u64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_script_that_does_one_thing_after_the_other_repeats_nothing() {
    trials(Shape::Sequential).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_script_that_does_five_things_at_a_time_repeats_nothing() {
    trials(Shape::Concurrent).await;
}

async fn trials(shape: Shape) {
    let number = |name| std::env::var(name).ok().map(|value| value.parse::<u64>().expect(name));
    let seed = number("CONSTRUCT_SEED");
    let first = seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    let count = number("CONSTRUCT_TRIALS").unwrap_or(if seed.is_some() { 1 } else { TRIALS });
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
    let mut trials = trials.buffer_unordered(AT_ONCE);
    let mut seen = Seen::default();
    while let Some((seed, trial)) = trials.next().await {
        let Ok(Ok(one)) = trial else {
            panic!("a trial failed; try it again with CONSTRUCT_SEED={seed}")
        };
        seen.trials += 1;
        seen.kills += one.kills;
        seen.stopped += one.stopped;
        seen.effects += one.effects;
        seen.unknown += one.unknown;
        seen.unknown_and_done += one.unknown_and_done;
        if seen.trials % 100 == 0 {
            println!("{shape:?}: {seen:?} after {:?}", began.elapsed());
        }
    }
    println!("{shape:?}: {seen:?} after {:?}; seeds {first}..{}", began.elapsed(), first + count);
}

/// What trials share: everything that is outside of a process and outlives it.
struct Surroundings {
    bus: Bus,
    url: String,
    blobs: PathBuf,
    egress: Egress,
    sandbox: CommandSandbox,
}

/// One script that is killed a few times.
struct Trial {
    surroundings: Arc<Surroundings>,
    shape: Shape,
    random: fastrand::Rng,
    folder: tempfile::TempDir,
    remote: Remote,
    command: CodeExecute,
    deliveries: u32,
    /// What is left of killed processes while it ends.
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

    async fn run(mut self) -> Seen {
        let kills = self.random.u32(1..=4);
        for left in (1..=kills).rev() {
            let mut process = self.deliver();
            tokio::select! {
                // Whatever it ended with is lost with it: it died before it could say so.
                _ = process.end() => {}
                () = self.moment(left + 1) => {}
            }
            self.dying.push(process.kill());
        }
        let told = self.last().await;
        for dying in self.dying.drain(..) {
            tokio::task::spawn_blocking(|| dying.join())
                .await
                .expect("joined")
                .expect("a process that was killed ends");
        }
        self.remote.is_idle().await;
        let check = Check {
            work: self.folder.path().join("work"),
            shape: self.shape,
            kills,
            told,
            effects: self.remote.effects(),
        };
        let mut seen = check.check();
        seen.kills = kills.into();
        self.surroundings.bus.journal().close(self.step()).await.expect("closed");
        seen
    }

    /// The delivery that is let end, or told to stop. Gives what the model is told.
    async fn last(&mut self) -> CodeInterpreterResult {
        let is_stopped = self.random.u8(..5) == 0;
        let mut fenced = 0;
        loop {
            let mut process = self.deliver();
            let end = if is_stopped {
                let executor = process.is_set_up().await;
                tokio::select! {
                    end = process.end() => end,
                    () = self.moment(1) => {
                        executor.running.cancel(self.step(), "enough");
                        process.end().await
                    }
                }
            } else {
                process.end().await
            };
            self.dying.push(process.kill());
            match end {
                End::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted {
                    mut results,
                })) => {
                    let told = results.remove(0);
                    assert_eq!(
                        self.again().await,
                        told,
                        "run again when all is done, a script says the same"
                    );
                    return told;
                }
                End::Outcome(step_result::Outcome::Cancelled(Cancelled {
                    mut results, ..
                })) => {
                    return results.remove(0);
                }
                End::Outcome(other) => panic!("it should complete: {other:?}"),
                // A process that was killed had written its last entry after this one had read the
                // journal.
                End::Fenced if fenced < FENCED => fenced += 1,
                End::Fenced => panic!("it is fenced for ever"),
                End::HandBack(why) => panic!("it is handed back: {why}"),
                End::Over => panic!("it is over"),
            }
        }
    }

    /// What the script says when its result was lost.
    async fn again(&mut self) -> CodeInterpreterResult {
        let mut process = self.deliver();
        let end = process.end().await;
        self.dying.push(process.kill());
        match end {
            End::Outcome(step_result::Outcome::CodeCompleted(CodeCompleted { mut results })) => {
                results.remove(0)
            }
            _ => panic!("it completed before"),
        }
    }

    /// The command comes to a new process.
    fn deliver(&mut self) -> Process {
        self.deliveries += 1;
        Process::start(
            &self.surroundings,
            self.folder.path(),
            self.command.clone(),
            self.deliveries,
        )
    }

    /// A moment in the life of a process, so early that about so many more find something to do.
    async fn moment(&mut self, processes: u32) {
        if self.random.u8(..4) == 0 {
            // Anywhere, also before it has begun and while it is answered from the journal.
            return spin(Duration::from_micros(self.random.u64(..80_000))).await;
        }
        let left = EFFECTS.saturating_sub(self.remote.requests());
        let further = self.random.u32(0..=left * 2 / (processes + 1));
        // Where it ends before that, something else ends the wait.
        self.remote.asked(self.remote.requests() + further).await;
        spin(Duration::from_micros(self.random.u64(..4_000))).await;
    }

    fn step(&self) -> StepId {
        let step = self.command.step.as_ref().expect("it names a step");
        step.step_id.parse().expect("a step's id")
    }
}

/// Lets time pass, more exactly than the runtime's timers, which are for milliseconds.
async fn spin(time: Duration) {
    let end = std::time::Instant::now() + time;
    tokio::time::sleep(time.saturating_sub(Duration::from_millis(3))).await;
    while std::time::Instant::now() < end {
        tokio::task::yield_now().await;
    }
}
