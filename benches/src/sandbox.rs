//! The sandbox beside native QuickJS, which isolates nothing, and beside Node.

use std::{
    collections::BTreeMap,
    path::Path,
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

/// The work that only needs a processor.
const PROGRAMS: [(&str, &str); 4] = [
    ("fib(27)", include_str!("programs/fib.js")),
    ("JSON, 100 KB × 20", include_str!("programs/json.js")),
    ("sort 100,000 numbers", include_str!("programs/sort.js")),
    ("regular expressions, 380 KB", include_str!("programs/regex.js")),
];
/// Two hundred lines of TypeScript with most of what its types can be.
const TYPESCRIPT: &str = include_str!("programs/types.ts");
/// Host calls of one run when their round trip is measured.
const CALLS: u32 = 5_000;
/// A host call without arguments, and one with arguments by name; beside each, the same in native QuickJS.
const ROUND_TRIPS: [(&str, &str, &str); 2] = [
    ("host call, there and back", "pwd()", "noop(i)"),
    (
        "host call with two arguments",
        "create_file({path: 'a/b/c.txt', content: 'x'})",
        "noop({path: 'a/b/c.txt', content: 'x'})",
    ),
];
/// Instances that wait in a host call when their memory is measured.
const PARKED: usize = 200;
/// How long throughput is measured for in each round.
const SUSTAINED: Duration = Duration::from_secs(3);

/// Measures in `rounds` rounds, alternating, because the machine's speed drifts.
pub(crate) async fn measure(rounds: usize) -> anyhow::Result<Figures> {
    let folder = tempfile::tempdir()?;
    let cache = folder.path().join("cache");
    let engine = tokio::task::spawn_blocking(move || Engine::new(&cache, EngineConfig::default())).await??;
    let sandbox = Arc::new(Sandbox { engine, host: Tools::new() });
    let peer = Node::find(folder.path()).await?;

    let (mut fresh, mut bare, mut node) = (Vec::new(), Vec::new(), Vec::new());
    let mut calls = [(Duration::MAX, Duration::MAX); ROUND_TRIPS.len()];
    let mut stripping = Vec::new();
    let mut programs = [Times::default(); PROGRAMS.len()];
    let mut sustained: f64 = 0.0;
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        fresh.extend(sandbox.fresh(1_000).await?);
        bare.extend(native::fresh(200)?);
        for ((_, ours, bare), best) in ROUND_TRIPS.iter().zip(&mut calls) {
            *best = (best.0.min(sandbox.call(ours).await?), best.1.min(native::call(bare, CALLS)?));
        }
        stripping.extend(sandbox.stripping(100).await?);
        for ((_, source), times) in PROGRAMS.iter().zip(&mut programs) {
            times.ours = shorter(times.ours, sandbox.timed(source).await?);
            times.native = shorter(times.native, native::timed(source)?);
        }
        if let Some(peer) = &peer {
            let measured = peer.measure().await?;
            node.extend(measured.fresh.into_iter().map(Duration::from_nanos));
            for (path, times) in peer.programs.iter().zip(&mut programs) {
                let nanos = measured.programs.get(path).copied().context("Node left a program out")?;
                times.node = shorter(times.node, Duration::from_nanos(nanos));
            }
        }
        sustained = sustained.max(sandbox.sustained().await?);
    }
    let parked = sandbox.parked().await?;

    let mut node_at = |share| (!node.is_empty()).then(|| percentile(&mut node, share));
    let mut rows = vec![
        Row::micros("fresh sandbox, 1+1, drop: p50", percentile(&mut fresh, 0.5))
            .floor(percentile(&mut bare, 0.5))
            .peer(node_at(0.5)),
        Row::micros("fresh sandbox, 1+1, drop: p99", percentile(&mut fresh, 0.99))
            .floor(percentile(&mut bare, 0.99))
            .peer(node_at(0.99)),
    ];
    for ((name, ..), (ours, bare)) in ROUND_TRIPS.iter().zip(calls) {
        rows.push(Row::micros(*name, ours).floor(bare));
    }
    rows.extend([
        Row::millis("TypeScript, 200 lines to JavaScript: p50", percentile(&mut stripping, 0.5)),
        Row::new("runs with one host call, all cores", "1/s", sustained),
        Row::new("memory of a parked instance", "KiB", parked),
    ]);
    for ((name, _), times) in PROGRAMS.iter().zip(&programs) {
        let ours = times.ours.context("no round was measured")?;
        rows.push(Row::millis(*name, ours).floor(times.native.unwrap_or_default()).peer(times.node));
    }
    let peer = peer.as_ref().map_or("none, Node is not installed", |_| "Node's vm in a warm process (not a boundary)");
    let what = format!(
        "Scripts in the sandbox, in {rounds} rounds; programs and the host call: the shortest. Floor: native QuickJS of the same \
         version, a new runtime and context each, without any isolation. Peer: {peer}."
    );
    Ok(Figures { bench: "sandbox", what, rows })
}

#[derive(Debug, Clone, Copy, Default)]
struct Times {
    ours: Option<Duration>,
    native: Option<Duration>,
    node: Option<Duration>,
}

fn shorter(best: Option<Duration>, next: Duration) -> Option<Duration> {
    Some(best.map_or(next, |best| best.min(next)))
}

struct Sandbox {
    engine: Engine,
    host: Tools,
}

impl Sandbox {
    async fn run(&self, script: &str) -> anyhow::Result<Outcome> {
        let limits = Limits { host_calls: u32::MAX, cpu: Duration::from_secs(60), ..Limits::default() };
        let outcome = self.engine.run(script, &self.host, &limits, CancellationToken::new()).await;
        ensure!(matches!(outcome.status, Status::Completed { .. }), "the script went wrong: {:?}", outcome.status);
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

    /// What one immediate call adds.
    async fn call(&self, call: &str) -> anyhow::Result<Duration> {
        let whole = self.timed(&format!("for (let i = 0; i < {CALLS}; i++) {call};")).await?;
        let rest = self.timed(&format!("for (let i = 0; i < {CALLS}; i++) i;")).await?;
        Ok(whole.saturating_sub(rest) / CALLS)
    }

    /// How long types take to go, in a fresh instance of the parser each.
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

    async fn sustained(self: &Arc<Self>) -> anyhow::Result<f64> {
        let (began, done) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
        let mut running = tokio::task::JoinSet::new();
        for _ in 0..std::thread::available_parallelism()?.get() {
            let (sandbox, done) = (Arc::clone(self), Arc::clone(&done));
            running.spawn(async move {
                while began.elapsed() < SUSTAINED {
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

    /// KiB that an instance needs which waits in a host call, with all that the host keeps for it (its task, its stack, the call): its share of the
    /// process's memory, pages that instances share counted once.
    async fn parked(self: &Arc<Self>) -> anyhow::Result<f64> {
        let before = proportional_kib()?;
        let mut running = tokio::task::JoinSet::new();
        for _ in 0..PARKED {
            let sandbox = Arc::clone(self);
            running.spawn(async move { sandbox.run("const text = 'x'.repeat(100); read_file(text);").await.map(drop) });
        }
        while self.host.parked.load(Relaxed) < PARKED {
            tokio::task::yield_now().await;
        }
        let each = (proportional_kib()? - before) / PARKED as f64;
        self.host.release.cancel();
        while let Some(ended) = running.join_next().await {
            ended??;
        }
        Ok(each)
    }
}

fn proportional_kib() -> anyhow::Result<f64> {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).context("the kernel tells no Pss")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

/// The product's tools in name, each of which answers at once, but `read_file`, which keeps the script waiting.
struct Tools {
    table: ToolTable,
    parked: AtomicUsize,
    release: CancellationToken,
}

impl Tools {
    fn new() -> Self {
        Self {
            table: construct_interpreter::tool_table(),
            parked: AtomicUsize::new(0),
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
                self.parked.fetch_add(1, Relaxed);
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

/// The peer's command, where Node is installed.
struct Node {
    programs: Vec<String>,
}

#[derive(serde::Deserialize)]
struct NodeTimes {
    fresh: Vec<u64>,
    programs: BTreeMap<String, u64>,
}

impl Node {
    async fn find(folder: &Path) -> anyhow::Result<Option<Self>> {
        let version = tokio::process::Command::new("node").arg("--version").stdout(Stdio::null()).status().await;
        if !version.is_ok_and(|status| status.success()) {
            return Ok(None);
        }
        let mut programs = Vec::new();
        for (index, (_, source)) in PROGRAMS.iter().enumerate() {
            let path = folder.join(format!("{index}.js"));
            std::fs::write(&path, source)?;
            programs.push(path.to_str().context("the temporary folder's name is not UTF-8")?.to_owned());
        }
        Ok(Some(Self { programs }))
    }

    async fn measure(&self) -> anyhow::Result<NodeTimes> {
        let node = tokio::process::Command::new("node")
            .args(["-e", include_str!("programs/node.js"), "--"])
            .args(&self.programs)
            .stderr(Stdio::inherit())
            .output()
            .await?;
        if !node.status.success() {
            bail!("Node failed: {}", node.status);
        }
        Ok(serde_json::from_slice(&node.stdout)?)
    }
}

/// QuickJS as it is, in this process.
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
                let arguments: serde_json::Value = serde_json::from_str(&arguments).unwrap_or_default();
                if arguments.is_null() { String::new() } else { "null".to_owned() }
            };
            ctx.globals().set("native", Function::new(ctx.clone(), answer)?)?;
            ctx.eval::<(), _>("globalThis.noop = (value) => JSON.parse(native(JSON.stringify([value])));")?;
            let timed = |body: &str| {
                let began = Instant::now();
                ctx.eval::<(), _>(format!("for (let i = 0; i < {calls}; i++) {body};"))?;
                rquickjs::Result::Ok(began.elapsed())
            };
            Ok(timed(call)?.saturating_sub(timed("i")?) / calls)
        })
    }
}
