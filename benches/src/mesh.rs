//! A two-turn task through the whole mesh, beside its bare commits and messages.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use construct_proto::v1::{
    self, event::Payload, event_service_client::EventServiceClient,
    message_service_client::MessageServiceClient, task_service_client::TaskServiceClient,
};
use tonic::transport::Channel;

use crate::{
    figures::{Figures, Row, percentile},
    floor::Floor,
    services::{Services, scripted_agent},
};

/// The extent of the measurements.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) serial: usize,
    pub(crate) concurrency: usize,
    pub(crate) duration: Duration,
    pub(crate) rounds: usize,
}

/// Connections of the floor: as many as gateway and reconciler together.
const CONNECTIONS: u32 = 36;

/// Measures latency and throughput, alternating between the mesh and the floor.
pub(crate) async fn measure(plan: &Plan) -> anyhow::Result<Figures> {
    let setting = |name: &str| {
        std::env::var(name).with_context(|| format!("{name} is not set; use ./dev bench mesh"))
    };
    let (database, nats) = (setting("CONSTRUCT_DATABASE_URL")?, setting("CONSTRUCT_NATS_URL")?);
    let (home, workspace) = (tempfile::tempdir()?, tempfile::tempdir()?);
    std::fs::write(workspace.path().join("notes.txt"), "one\ntwo\nthree\n")?;

    let floor = Floor::prepare(&database, &nats, CONNECTIONS).await?;
    let services = Services::start(home.path(), workspace.path()).await?;
    let mesh =
        Mesh::prepare(&services.gateway, workspace.path().to_string_lossy().into_owned()).await?;
    // The first tasks fill caches and connection pools on both sides.
    mesh.serial(20).await?;
    floor.serial(20).await?;

    let (mut ours, mut bare, mut our_rates, mut bare_rates) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..plan.rounds {
        eprintln!("round {} of {}", round + 1, plan.rounds);
        ours.extend(mesh.serial(plan.serial / plan.rounds).await?);
        bare.extend(floor.serial(plan.serial / plan.rounds).await?);
        our_rates.push(mesh.saturated(plan.concurrency, plan.duration).await?);
        bare_rates.push(floor.saturated(plan.concurrency, plan.duration).await?);
    }
    let rows = vec![
        Row::millis("two-turn task, p50", percentile(&mut ours, 0.5))
            .floor(percentile(&mut bare, 0.5)),
        Row::millis("two-turn task, p99", percentile(&mut ours, 0.99))
            .floor(percentile(&mut bare, 0.99)),
        Row::new("tasks at saturation", "1/s", median(&mut our_rates))
            .floor_value(median(&mut bare_rates)),
    ];
    let what = format!(
        "model call, one script with three tool calls, model call; {} tasks one after the other, {} at once for {} s in each of \
         {} rounds (median). Floor: the same 5 commits, 7 messages through work queues and 4 journal entries, bare. At saturation \
         each task is begun and followed within the time as well, and the floor has a commit, an event and a query more for it.",
        ours.len(),
        plan.concurrency,
        plan.duration.as_secs(),
        plan.rounds
    );
    Ok(Figures { bench: "mesh", what, rows })
}

pub(crate) fn median(rates: &mut [f64]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or_default()
}

/// A client whose agent runs the script of the task.
#[derive(Debug, Clone)]
pub(crate) struct Mesh {
    channel: Channel,
    workspace: String,
}

impl Mesh {
    pub(crate) async fn prepare(gateway: &str, workspace: String) -> anyhow::Result<Self> {
        let channel = Channel::from_shared(gateway.to_owned())?.connect().await?;
        let name = format!("bench-{}", std::process::id());
        let script = serde_json::json!({"count": "since_user", "turns": [
            {"code": "const a = read_file('notes.txt'); const b = list_files('.'); const c = grep('two', '.'); \
                      print(a.length, b.length, c.matches.length);"},
            {"text": "done"},
        ]});
        scripted_agent(&channel, &name, &script).await?;
        Ok(Self { channel, workspace })
    }

    pub(crate) async fn serial(&self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            times.push(self.task().await?);
        }
        Ok(times)
    }

    /// Tasks per second with `concurrency` at once. Includes the creation and the subscription of
    /// each, as the floor does.
    pub(crate) async fn saturated(
        &self,
        concurrency: usize,
        duration: Duration,
    ) -> anyhow::Result<f64> {
        let began = Instant::now();
        let done = std::sync::Arc::new(AtomicUsize::new(0));
        let mut running = tokio::task::JoinSet::new();
        for _ in 0..concurrency {
            let (mesh, done) = (self.clone(), std::sync::Arc::clone(&done));
            running.spawn(async move {
                while began.elapsed() < duration {
                    mesh.task().await?;
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

    /// From sending the message to receiving the end of its turn, for a client that follows the
    /// task.
    async fn task(&self) -> anyhow::Result<Duration> {
        let spec = v1::TaskSpec {
            agent: format!("bench-{}", std::process::id()),
            workspace: self.workspace.clone(),
            title: "bench".to_owned(),
            ..Default::default()
        };
        let request = v1::CreateTaskRequest { spec: Some(spec), ..Default::default() };
        let task =
            TaskServiceClient::new(self.channel.clone()).create_task(request).await?.into_inner();
        let task = task.metadata.context("a task without metadata")?.id;
        let subscribe = v1::SubscribeRequest {
            task: task.clone(),
            cursor: "0".to_owned(),
            types: vec!["task.created".to_owned(), "turn.completed".to_owned()],
        };
        let mut events =
            EventServiceClient::new(self.channel.clone()).subscribe(subscribe).await?.into_inner();
        // A client subscribes to a task before it sends a message.
        events.message().await?.context("the event of the task's creation is missing")?;
        let text =
            v1::Block { block: Some(v1::block::Block::Text(v1::Text { text: "go".to_owned() })) };
        let spec = v1::MessageSpec { task, blocks: vec![text], ..Default::default() };
        let request = v1::CreateMessageRequest { spec: Some(spec), ..Default::default() };
        let began = Instant::now();
        MessageServiceClient::new(self.channel.clone()).create_message(request).await?;
        loop {
            let event = events.message().await?.context("the events ended")?;
            if let Some(Payload::TurnCompleted(completed)) = event.payload {
                ensure!(
                    completed.outcome() == v1::TurnOutcome::Completed && completed.turns == 2,
                    "the turn failed: {completed:?}"
                );
                return Ok(began.elapsed());
            }
        }
    }
}
