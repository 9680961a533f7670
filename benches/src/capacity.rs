//! Resource needs of an installation: the memory of each process when idle and while tasks use a
//! slow model, and the processor time per task and process. For docs/operations.md, "Sizes".

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use construct_proto::v1::{
    self, message_service_client::MessageServiceClient, task_service_client::TaskServiceClient,
};
use sqlx::{Connection as _, PgConnection};
use tonic::transport::Channel;

use crate::{
    figures::{Figures, Row},
    mesh::Mesh,
    services::{Services, scripted_agent},
};

/// Concurrent tasks. The model is called for as many as `reconciler_model_calls` and
/// `providers_concurrency` allow; the others wait.
const CONCURRENT_TASKS: usize = 1_000;
/// The delay of that model: until all tasks have started and the memory was measured.
const MODEL_DELAY: Duration = Duration::from_secs(120);
/// Timeout for starting all tasks.
const START_TIMEOUT: Duration = Duration::from_secs(100);
/// Tasks before the measurements, which fill caches and pools.
const WARMUP_TASKS: usize = 300;
/// The kernel's unit of processor time (`sysconf(_SC_CLK_TCK)` on Linux).
const TICK: Duration = Duration::from_millis(10);

/// Measures memory, then the cost of tasks.
pub(crate) async fn measure(concurrency: usize, duration: Duration) -> anyhow::Result<Figures> {
    let setting = |name: &str| {
        std::env::var(name).with_context(|| format!("{name} is not set; use ./dev bench capacity"))
    };
    let (database, nats) = (setting("CONSTRUCT_DATABASE_URL")?, setting("CONSTRUCT_NATS_URL")?);
    let (home, workspace) = (tempfile::tempdir()?, tempfile::tempdir()?);
    fs::write(workspace.path().join("notes.txt"), "one\ntwo\nthree\n")?;
    let services = Services::start(home.path(), workspace.path()).await?;
    let mut processes = Processes {
        services: services.pids(),
        nats: nats_pid(&nats)?,
        database: PgConnection::connect(&database).await?,
    };
    let mesh =
        Mesh::prepare(&services.gateway, workspace.path().to_string_lossy().into_owned()).await?;
    mesh.serial(WARMUP_TASKS).await?;
    let idle = processes.memory().await?;

    let (before, began) = (processes.processor().await?, Instant::now());
    let rate = mesh.saturated(concurrency, duration).await?;
    let tasks = rate * began.elapsed().as_secs_f64();
    let after = processes.processor().await?;
    let baseline = processes.memory().await?;

    start_waiting_tasks(&services.gateway).await?;
    let waiting = processes.memory().await?;

    let mut rows = vec![Row::new("tasks at saturation", "1/s", rate)];
    for (name, bytes) in &idle {
        rows.push(Row::new(
            format!("memory after {WARMUP_TASKS} tasks: {name}"),
            "MiB",
            mebibytes(*bytes),
        ));
    }
    for (name, bytes) in &waiting {
        let more = bytes.saturating_sub(baseline.get(name).copied().unwrap_or_default());
        rows.push(Row::new(
            format!("additional memory with {CONCURRENT_TASKS} tasks: {name}"),
            "MiB",
            mebibytes(more),
        ));
    }
    let mut all = 0.0;
    for (name, spent) in &after {
        let spent =
            spent.saturating_sub(before.get(name).copied().unwrap_or_default()).as_secs_f64() * 1e3
                / tasks;
        all += spent;
        rows.push(Row::new(format!("processor time of a task: {name}"), "ms", spent));
    }
    rows.push(Row::new("processor time of a task: all", "ms", all));
    let what = format!(
        "the task of `mesh` (model call, one script with three tool calls, model call), {concurrency} at once for {} s; then {CONCURRENT_TASKS} tasks with a model \
         that takes {} s, called for as many as reconciler_model_calls and \
         providers_concurrency allow. One process of each service.",
        duration.as_secs(),
        MODEL_DELAY.as_secs()
    );
    Ok(Figures { bench: "capacity", what, rows })
}

/// Starts tasks with a slow model, and waits until all of them are in progress.
async fn start_waiting_tasks(gateway: &str) -> anyhow::Result<()> {
    let channel = Channel::from_shared(gateway.to_owned())?.connect().await?;
    let delay = u64::try_from(MODEL_DELAY.as_millis())?;
    scripted_agent(&channel, "slow", &serde_json::json!([{"text": "done", "delay_ms": delay}]))
        .await?;
    for _ in 0..CONCURRENT_TASKS {
        let spec = v1::TaskSpec {
            agent: "slow".to_owned(),
            title: "bench".to_owned(),
            ..Default::default()
        };
        let request = v1::CreateTaskRequest { spec: Some(spec), ..Default::default() };
        let task = TaskServiceClient::new(channel.clone()).create_task(request).await?.into_inner();
        let text =
            v1::Block { block: Some(v1::block::Block::Text(v1::Text { text: "go".to_owned() })) };
        let task = task.metadata.context("a task without metadata")?.id;
        let spec = v1::MessageSpec { task, blocks: vec![text], ..Default::default() };
        let request = v1::CreateMessageRequest { spec: Some(spec), ..Default::default() };
        MessageServiceClient::new(channel.clone()).create_message(request).await?;
    }
    let began = Instant::now();
    loop {
        let tasks_in_progress = tasks_in_progress(&channel).await?;
        if tasks_in_progress >= CONCURRENT_TASKS {
            return Ok(());
        }
        ensure!(
            began.elapsed() < START_TIMEOUT,
            "only {tasks_in_progress} of {CONCURRENT_TASKS} tasks have started"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn tasks_in_progress(channel: &Channel) -> anyhow::Result<usize> {
    let mut client = v1::diagnosis_service_client::DiagnosisServiceClient::new(channel.clone());
    let overview = client.get_overview(v1::GetOverviewRequest {}).await?.into_inner();
    let asking = overview.tasks.iter().filter(|task| task.phase() == v1::TaskPhase::InvokeModel);
    Ok(usize::try_from(asking.map(|task| task.count).sum::<i64>())?)
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / (1024.0 * 1024.0)
}

/// The measured processes.
struct Processes {
    services: Vec<(String, u32)>,
    nats: u32,
    database: PgConnection,
}

impl Processes {
    async fn processes(&mut self) -> anyhow::Result<Vec<(String, u32)>> {
        let backends: Vec<i32> =
            sqlx::query_scalar("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
                .fetch_all(&mut self.database)
                .await?;
        let mut all = self.services.clone();
        all.push(("nats".to_owned(), self.nats));
        for backend in backends {
            all.push(("postgresql".to_owned(), u32::try_from(backend)?));
        }
        Ok(all)
    }

    /// Each process's own bytes, without the memory that PostgreSQL's processes share.
    async fn memory(&mut self) -> anyhow::Result<BTreeMap<String, u64>> {
        let mut sums = BTreeMap::new();
        for (name, pid) in self.processes().await? {
            // The process may have ended meanwhile.
            let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
            let field = |wanted: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(wanted));
                line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok())
                    .unwrap_or_default()
            };
            *sums.entry(name).or_default() += (field("RssAnon:") + field("RssFile:")) * 1024;
        }
        Ok(sums)
    }

    /// Processor time since the start of the processes.
    async fn processor(&mut self) -> anyhow::Result<BTreeMap<String, Duration>> {
        let mut sums: BTreeMap<String, Duration> = BTreeMap::new();
        for (name, pid) in self.processes().await? {
            let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
            let fields: Vec<&str> =
                stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
            let ticks = |field: usize| {
                fields.get(field).and_then(|text| text.parse::<u32>().ok()).unwrap_or_default()
            };
            *sums.entry(name).or_default() += TICK * (ticks(11) + ticks(12));
        }
        Ok(sums)
    }
}

/// The process id of the NATS server at this address: the one whose configuration names the port.
fn nats_pid(url: &str) -> anyhow::Result<u32> {
    let port = url.rsplit(':').next().unwrap_or_default().trim_end_matches('/');
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let read = |file: &str| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
        if read("comm").trim() != "nats-server" {
            continue;
        }
        let arguments = read("cmdline");
        let configured =
            arguments.split('\0').filter_map(|argument| fs::read_to_string(argument).ok());
        if configured.into_iter().any(|text| text.contains(&format!(":{port}\n"))) {
            return Ok(pid);
        }
    }
    anyhow::bail!("no nats-server of this machine is configured for port {port}")
}
