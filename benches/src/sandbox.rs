//! The sandbox compared with native QuickJS, which has no isolation, and with Node.

use std::{
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use construct_interpreter::sandbox::{
    Engine, EngineConfig, Host, HostCall, Limits, Outcome, Status, ToolError, ToolTable,
};
use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use crate::figures::{Figures, Row, percentile};

/// Compute-only programs.
const PROGRAMS: [(&str, &str); 4] = [
    ("fib(27)", include_str!("programs/fib.js")),
    ("JSON, 100 KB × 20", include_str!("programs/json.js")),
    ("sort 100,000 numbers", include_str!("programs/sort.js")),
    ("regular expressions, 380 KB", include_str!("programs/regex.js")),
];
/// Two hundred lines of TypeScript with most kinds of types.
const TYPESCRIPT: &str = include_str!("programs/types.ts");
/// Runs of each program per round.
const PROGRAM_RUNS: usize = 10;
/// Host calls per run for measuring their round trip. A sample is the mean of one run.
const CALLS: u32 = 1_000;
/// Runs of each host call per round.
const CALL_RUNS: usize = 40;
/// A host call without arguments, and one with named arguments; with each, the equivalent in native
/// QuickJS and Node.
const ROUND_TRIPS: [(&str, &str, &str); 2] = [
    ("host call round trip", "pwd()", "noop(i)"),
    (
        "host call with two arguments",
        "create_file({path: 'a/b/c.txt', content: 'x'})",
        "noop({path: 'a/b/c.txt', content: 'x'})",
    ),
];
/// Instances waiting in a host call for the memory measurement.
const WAITING_INSTANCES: usize = 200;
/// Duration of the throughput measurement per round.
const THROUGHPUT_DURATION: Duration = Duration::from_secs(2);

/// Measures in `rounds` alternating rounds, because the machine's speed drifts.
pub(crate) async fn measure(rounds: usize) -> anyhow::Result<Figures> {
    ensure!(rounds > 0, "at least one round is required");
    let folder = tempfile::tempdir()?;
    let cache = folder.path().join("cache");
    let engine =
        tokio::task::spawn_blocking(move || Engine::new(&cache, EngineConfig::default())).await??;
    let sandbox = Arc::new(Sandbox { engine, host: Tools::new() });
    let node = node_is_installed().await;

    let mut fresh = Samples::default();
    let mut calls: [Samples; ROUND_TRIPS.len()] = Default::default();
    let mut stripping = Vec::new();
    let mut programs: [Samples; PROGRAMS.len()] = Default::default();
    let mut throughput: f64 = 0.0;
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        fresh.ours.extend(sandbox.fresh(1_000).await?);
        fresh.native.extend(native::fresh(200)?);
        for ((_, ours, bare), samples) in ROUND_TRIPS.iter().zip(&mut calls) {
            for _ in 0..CALL_RUNS {
                samples.ours.push(sandbox.call(ours).await?);
                samples.native.push(native::call(bare, CALLS)?);
            }
        }
        stripping.extend(sandbox.stripping(100).await?);
        for ((_, source), samples) in PROGRAMS.iter().zip(&mut programs) {
            for _ in 0..PROGRAM_RUNS {
                samples.ours.push(sandbox.timed(source).await?);
                samples.native.push(native::timed(source)?);
            }
        }
        if node {
            let times = NodeTimes::measure().await?;
            fresh.node.extend(times.fresh.into_iter().map(Duration::from_nanos));
            for (times, samples) in times.calls.into_iter().zip(&mut calls) {
                samples
                    .node
                    .extend(times.into_iter().map(|whole| Duration::from_nanos(whole) / CALLS));
            }
            for (times, samples) in times.programs.into_iter().zip(&mut programs) {
                samples.node.extend(times.into_iter().map(Duration::from_nanos));
            }
        }
        throughput = throughput.max(sandbox.throughput().await?);
    }
    let waiting = sandbox.waiting().await?;

    let mut rows = Vec::from(fresh.rows("fresh sandbox, 1+1, drop", Row::micros));
    for ((name, ..), samples) in ROUND_TRIPS.iter().zip(&mut calls) {
        rows.extend(samples.rows(&format!("{name}, of {CALLS} in a row"), Row::micros));
    }
    rows.extend([
        Row::millis("TypeScript, 200 lines to JavaScript: p50", percentile(&mut stripping, 0.5)),
        Row::new("runs with one host call, all cores", "1/s", throughput),
        Row::new("memory of a waiting instance", "KiB", waiting),
    ]);
    for ((name, _), samples) in PROGRAMS.iter().zip(&mut programs) {
        rows.extend(samples.rows(name, Row::millis));
    }
    let peer = if node {
        "Node's vm in a warm process (not a boundary), a new context each, its host calls through JSON as well"
    } else {
        "none, Node is not installed"
    };
    let what = format!(
        "Scripts in the sandbox, in {rounds} rounds. Of a host call a sample is the mean of {CALLS} calls in one run, and there are {} samples; of a \
         program it is one run, and there are {}: the p99 of fewer than a hundred is the longest. Floor: native QuickJS of the same version, a new runtime \
         and context each, without any isolation, its host calls through JSON. Peer: {peer}.",
        rounds * CALL_RUNS,
        rounds * PROGRAM_RUNS,
    );
    Ok(Figures { bench: "sandbox", what, rows })
}

/// Durations in the sandbox, in native QuickJS, and in Node if installed.
#[derive(Debug, Default)]
struct Samples {
    ours: Vec<Duration>,
    native: Vec<Duration>,
    node: Vec<Duration>,
}

impl Samples {
    /// Their p50 and p99 as rows.
    fn rows(&mut self, name: &str, row: fn(String, Duration) -> Row) -> [Row; 2] {
        [("p50", 0.5), ("p99", 0.99)].map(|(title, share)| {
            let node = (!self.node.is_empty()).then(|| percentile(&mut self.node, share));
            row(format!("{name}: {title}"), percentile(&mut self.ours, share))
                .floor(percentile(&mut self.native, share))
                .peer(node)
        })
    }
}

struct Sandbox {
    engine: Engine,
    host: Tools,
}

impl Sandbox {
    async fn run(&self, script: &str) -> anyhow::Result<Outcome> {
        let limits =
            Limits { host_calls: u32::MAX, cpu: Duration::from_secs(60), ..Limits::default() };
        let outcome = self.engine.run(script, &self.host, &limits, CancellationToken::new()).await;
        ensure!(
            matches!(outcome.status, Status::Completed { .. }),
            "the script failed: {:?}",
            outcome.status
        );
        Ok(outcome)
    }

    async fn timed(&self, script: &str) -> anyhow::Result<Duration> {
        let began = Instant::now();
        self.run(script).await?;
        Ok(began.elapsed())
    }

    async fn fresh(&self, count: usize) -> anyhow::Result<Vec<Duration>> {
        for _ in 0..count / 10 {
            self.run("1+1").await?;
        }
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            times.push(self.timed("1+1").await?);
        }
        Ok(times)
    }

    /// The additional time of one immediate call.
    async fn call(&self, call: &str) -> anyhow::Result<Duration> {
        let whole = self.timed(&format!("for (let i = 0; i < {CALLS}; i++) {call};")).await?;
        let rest = self.timed(&format!("for (let i = 0; i < {CALLS}; i++) i;")).await?;
        Ok(whole.saturating_sub(rest) / CALLS)
    }

    /// The duration of type stripping, each time in a fresh parser instance.
    async fn stripping(&self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let began = Instant::now();
            let javascript = self.engine.strip_types(TYPESCRIPT).await?;
            times.push(began.elapsed());
            ensure!(javascript.lines().count() == TYPESCRIPT.lines().count(), "lines have moved");
        }
        Ok(times)
    }

    async fn throughput(self: &Arc<Self>) -> anyhow::Result<f64> {
        let (began, done) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
        let mut running = tokio::task::JoinSet::new();
        for _ in 0..std::thread::available_parallelism()?.get() {
            let (sandbox, done) = (Arc::clone(self), Arc::clone(&done));
            running.spawn(async move {
                while began.elapsed() < THROUGHPUT_DURATION {
                    sandbox.run("pwd()").await?;
                    done.fetch_add(1, Relaxed);
                }
                anyhow::Ok(())
            });
        }
        while let Some(ended) = running.join_next().await {
            ended??;
        }
        Ok(done.load(Relaxed) as f64 / began.elapsed().as_secs_f64())
    }

    /// Memory in KiB of an instance that waits in a host call, including everything the host keeps
    /// for it (its task, its stack, the call): its share of the process's memory, with shared pages
    /// counted once.
    async fn waiting(self: &Arc<Self>) -> anyhow::Result<f64> {
        let before = proportional_kib()?;
        let mut running = tokio::task::JoinSet::new();
        for _ in 0..WAITING_INSTANCES {
            let sandbox = Arc::clone(self);
            running.spawn(async move {
                sandbox.run("const text = 'x'.repeat(100); read_file(text);").await.map(drop)
            });
        }
        while self.host.waiting.load(Relaxed) < WAITING_INSTANCES {
            tokio::task::yield_now().await;
        }
        let each = (proportional_kib()? - before) / WAITING_INSTANCES as f64;
        self.host.release.cancel();
        while let Some(ended) = running.join_next().await {
            ended??;
        }
        Ok(each)
    }
}

fn proportional_kib() -> anyhow::Result<f64> {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Pss:"))
        .context("the kernel reports no Pss")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

/// The product's tools by name. Each returns at once except `read_file`, which blocks the script.
struct Tools {
    table: ToolTable,
    waiting: AtomicUsize,
    release: CancellationToken,
}

impl Tools {
    fn new() -> Self {
        Self {
            table: construct_interpreter::tool_table(),
            waiting: AtomicUsize::new(0),
            release: CancellationToken::new(),
        }
    }
}

impl Host for Tools {
    fn declare(&self) -> &ToolTable {
        &self.table
    }

    fn call<'a>(&'a self, call: HostCall) -> BoxFuture<'a, Result<serde_json::Value, ToolError>> {
        Box::pin(async move {
            if call.name == "read_file" {
                self.waiting.fetch_add(1, Relaxed);
                self.release.cancelled().await;
            }
            Ok(serde_json::Value::Null)
        })
    }

    fn now(&self) -> jiff::Timestamp {
        jiff::Timestamp::UNIX_EPOCH
    }

    fn seed(&self) -> [u8; 32] {
        [7; 32]
    }
}

async fn node_is_installed() -> bool {
    let version =
        tokio::process::Command::new("node").arg("--version").stdout(Stdio::null()).status().await;
    version.is_ok_and(|status| status.success())
}

/// The peer's times in nanoseconds: of each fresh context, and of each run by host call and
/// program.
#[derive(serde::Deserialize)]
struct NodeTimes {
    fresh: Vec<u64>,
    calls: Vec<Vec<u64>>,
    programs: Vec<Vec<u64>>,
}

impl NodeTimes {
    async fn measure() -> anyhow::Result<Self> {
        let plan = serde_json::json!({
            "bodies": ROUND_TRIPS.map(|(_, _, bare)| bare),
            "calls": CALLS,
            "callRuns": CALL_RUNS,
            "programs": PROGRAMS.map(|(_, source)| source),
            "programRuns": PROGRAM_RUNS,
        });
        let node = tokio::process::Command::new("node")
            .args(["-e", include_str!("programs/node.js"), "--"])
            .arg(plan.to_string())
            .stderr(Stdio::inherit())
            .output()
            .await?;
        if !node.status.success() {
            bail!("Node failed: {}", node.status);
        }
        Ok(serde_json::from_slice(&node.stdout)?)
    }
}

/// Native QuickJS in this process.
mod native {
    use std::time::{Duration, Instant};

    use rquickjs::{Context, Ctx, Function, Runtime, Value};

    fn with<T>(work: impl FnOnce(&Ctx<'_>) -> rquickjs::Result<T>) -> rquickjs::Result<T> {
        let runtime = Runtime::new()?;
        Context::full(&runtime)?.with(|ctx| work(&ctx))
    }

    pub(super) fn fresh(count: usize) -> rquickjs::Result<Vec<Duration>> {
        let once = || {
            let began = Instant::now();
            with(|ctx| ctx.eval::<Value, _>("1+1").map(drop))?;
            Ok(began.elapsed())
        };
        (0..count).map(|_| once()).collect()
    }

    pub(super) fn timed(source: &str) -> rquickjs::Result<Duration> {
        with(|ctx| {
            let began = Instant::now();
            ctx.eval::<Value, _>(source)?;
            Ok(began.elapsed())
        })
    }

    /// The same round trip through JSON, into a function of this process.
    pub(super) fn call(call: &str, calls: u32) -> rquickjs::Result<Duration> {
        with(|ctx| {
            let answer = |arguments: String| -> String {
                let arguments: serde_json::Value =
                    serde_json::from_str(&arguments).unwrap_or_default();
                if arguments.is_null() { String::new() } else { "null".to_owned() }
            };
            ctx.globals().set("native", Function::new(ctx.clone(), answer)?)?;
            ctx.eval::<(), _>(
                "globalThis.noop = (value) => JSON.parse(native(JSON.stringify([value])));",
            )?;
            let timed = |body: &str| {
                let began = Instant::now();
                ctx.eval::<(), _>(format!("for (let i = 0; i < {calls}; i++) {body};"))?;
                rquickjs::Result::Ok(began.elapsed())
            };
            Ok(timed(call)?.saturating_sub(timed("i")?) / calls)
        })
    }
}
