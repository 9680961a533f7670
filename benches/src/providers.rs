//! The cost of calling a model through Construct: over the proxy and over the mesh, beside direct
//! calls and other proxies.

mod http;
mod peers;

use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use construct_bus::{Bus, ConnectOptions, ConsumeOptions, Consumer, TaskMessage, subject};
use construct_domain::{OrganizationId, StepId, TaskId, partition};
use construct_proto::{mesh::v1 as mesh, v1};
use construct_runtime::{Common, ModelToken};
use jiff::Timestamp;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::{
    http::{Target, saturated, serial},
    peers::Peer,
};
use crate::{
    figures::{Figures, Row, percentile},
    mesh::{Plan, median},
    services::{Service, free_port},
};

/// Concurrent connections or commands for the throughput.
const CONNECTIONS: usize = 32;
/// How long sequential calls are measured in each round.
const SERIAL: Duration = Duration::from_secs(2);

/// The measurements of one path.
#[derive(Debug, Default)]
struct Costs {
    whole: Vec<Duration>,
    first: Vec<Duration>,
    rates: Vec<f64>,
}

impl Costs {
    async fn add(
        &mut self,
        target: &Target,
        streams: bool,
        duration: Duration,
    ) -> anyhow::Result<()> {
        self.whole.extend(serial(target, false, SERIAL).await?);
        if streams {
            self.first.extend(serial(target, true, SERIAL).await?);
        }
        self.rates.push(saturated(target, CONNECTIONS, duration).await?);
        Ok(())
    }

    fn total(&mut self, share: f64) -> Duration {
        percentile(&mut self.whole, share)
    }

    fn first(&mut self) -> Duration {
        percentile(&mut self.first, 0.5)
    }

    fn rate(&mut self) -> f64 {
        median(&mut self.rates)
    }
}

/// Measures in alternating rounds, because the machine's speed drifts.
pub(crate) async fn measure(plan: &Plan) -> anyhow::Result<Figures> {
    let setting = |name: &str| {
        std::env::var(name).with_context(|| format!("{name} is not set; use ./dev bench providers"))
    };
    let work = tempfile::tempdir()?;
    let upstream = http::upstream().await?;
    let nats = setting("CONSTRUCT_NATS_URL")?;
    let bus =
        Bus::connect(&nats, ConnectOptions::new("bench").blobs(work.path().join("data/blobs")))
            .await?;
    bus.ensure_topology().await?;
    let stop = CancellationToken::new();
    let _stopping = stop.clone().drop_guard();
    answer(&bus, upstream, &stop);

    let listen = format!("127.0.0.1:{}", free_port()?);
    let _service =
        Service::start("providers", work.path(), &[("CONSTRUCT_PROVIDERS_PROXY_LISTEN", &listen)])
            .await?;
    let common = Common {
        token_key_file: Some(PathBuf::from(setting("CONSTRUCT_TOKEN_KEY_FILE")?)),
        ..Common::default()
    };
    let keys = common.token_keys()?.context("there is no key for tokens")?;
    let token = ModelToken {
        id: Uuid::now_v7().to_string(),
        organization: OrganizationId::LOCAL.to_string(),
        task: String::new(),
        key: String::new(),
        models: vec!["m".to_owned()],
        budget_pico_usd: 0,
        expires_at: Timestamp::now() + Duration::from_secs(3600),
    };
    let bearer = format!("Bearer {}", token.sign(&keys).expose());
    let chat = |address, headers| Target {
        address,
        path: "/v1/chat/completions".to_owned(),
        headers,
        model: "m".to_owned(),
    };
    let ours = chat(listen.parse::<SocketAddr>()?, vec![("authorization".to_owned(), bearer)]);
    let direct = chat(upstream, Vec::new());
    let folder = std::env::var("CONSTRUCT_BENCH_PEERS").map(PathBuf::from).unwrap_or_default();
    let peers = peers::start(&folder, work.path(), upstream).await;

    let mut mesh = MeshPath::prepare(&bus, upstream);
    // The first calls fill caches and connection pools on all sides.
    for target in [&ours, &direct].into_iter().chain(peers.iter().map(|peer| &peer.target)) {
        saturated(target, CONNECTIONS, Duration::from_secs(2)).await?;
    }
    mesh.serial(Duration::from_millis(500)).await?;
    mesh.saturated(Duration::from_millis(500)).await?;

    let (mut our_costs, mut direct_costs) = (Costs::default(), Costs::default());
    let mut peers: Vec<_> = peers.into_iter().map(|peer| (peer, Costs::default())).collect();
    let mut over_mesh = Costs::default();
    for round in 0..plan.rounds {
        eprintln!("round {} of {}", round + 1, plan.rounds);
        direct_costs.add(&direct, true, plan.duration / 2).await?;
        our_costs.add(&ours, true, plan.duration / 2).await?;
        for (peer, mut costs) in std::mem::take(&mut peers) {
            match costs.add(&peer.target, peer.streams, plan.duration / 2).await {
                Ok(()) => peers.push((peer, costs)),
                Err(error) => eprintln!("{} failed and is skipped: {error:#}", peer.name),
            }
        }
        over_mesh.whole.extend(mesh.serial(SERIAL).await?);
        over_mesh.rates.push(mesh.saturated(plan.duration / 2).await?);
    }
    let rows = rows(&mut our_costs, &mut direct_costs, &mut peers, &mut over_mesh);
    let what = format!(
        "a call of an instant Chat Completions server: one connection for {} s, then {CONNECTIONS} for {} s, in each of {} rounds. Floor: \
         direct calls. Our model has prices, so that money is reserved and reported. Over the mesh: from publishing the \
         command to the result, one after the other and then with {CONNECTIONS} commands in flight, each of its own task.",
        SERIAL.as_secs(),
        (plan.duration / 2).as_secs(),
        plan.rounds
    );
    Ok(Figures { bench: "providers", what, rows })
}

fn rows(
    ours: &mut Costs,
    direct: &mut Costs,
    peers: &mut [(Peer, Costs)],
    over_mesh: &mut Costs,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
        let floor = direct.total(share);
        rows.push(
            Row::millis(format!("a complete response, {name}"), ours.total(share)).floor(floor),
        );
        rows.push(Row::millis(
            format!("added by the proxy, {name}"),
            ours.total(share).saturating_sub(floor),
        ));
    }
    let floor = direct.first();
    rows.push(Row::millis("a stream's first text, p50", ours.first()).floor(floor));
    rows.push(Row::millis("added to it by the proxy, p50", ours.first().saturating_sub(floor)));
    rows.push(
        Row::new(format!("calls over {CONNECTIONS} connections"), "1/s", ours.rate())
            .floor_value(direct.rate()),
    );
    for (peer, costs) in peers {
        let name = peer.name;
        let mut beside = |figure: &str, share: f64, ours: &mut Costs| {
            Row::millis(format!("{figure} (peer: {name})"), ours.total(share))
                .peer(Some(costs.total(share)))
        };
        rows.push(beside("a complete response, p50", 0.5, ours));
        rows.push(beside("a complete response, p99", 0.99, ours));
        let first = peer.streams.then(|| costs.first());
        rows.push(
            Row::millis(format!("a stream's first text, p50 (peer: {name})"), ours.first())
                .peer(first),
        );
        let rate = Row::new(
            format!("calls over {CONNECTIONS} connections (peer: {name})"),
            "1/s",
            ours.rate(),
        );
        rows.push(Row { peer: Some(costs.rate()), ..rate });
    }
    for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
        let floor = direct.total(share);
        rows.push(
            Row::millis(format!("over the mesh, {name}"), over_mesh.total(share)).floor(floor),
        );
        rows.push(Row::millis(
            format!("added by the mesh, {name}"),
            over_mesh.total(share).saturating_sub(floor),
        ));
    }
    let rate =
        Row::new(format!("calls with {CONNECTIONS} commands in flight"), "1/s", over_mesh.rate());
    rows.push(rate.floor_value(direct.rate()));
    rows
}

fn provider(upstream: SocketAddr) -> (mesh::Provider, mesh::ModelTarget) {
    let provider = mesh::Provider {
        id: "provider_bench".to_owned(),
        r#type: v1::ModelProviderType::Openai.into(),
        base_url: format!("http://{upstream}/v1"),
        ..mesh::Provider::default()
    };
    let prices = v1::Prices { input: 1_000_000, output: 4_000_000, ..v1::Prices::default() };
    let model = mesh::ModelTarget {
        id: "model_bench".to_owned(),
        vendor_model: "m".to_owned(),
        context_window: 128_000,
        max_output_tokens: 4_096,
        prices: Some(prices),
        ..mesh::ModelTarget::default()
    };
    (provider, model)
}

/// Answers like a reconciler, and accepts the reports.
fn answer(bus: &Bus, upstream: SocketAddr, stop: &CancellationToken) {
    let (models, budgets) = (bus.clone(), bus.clone());
    let (one, other) = (stop.clone(), stop.clone());
    tokio::spawn(async move {
        let found = |_| async move {
            let (provider, model) = provider(upstream);
            Some(mesh::ResolvedModel {
                provider: Some(provider),
                model: Some(model),
                ..mesh::ResolvedModel::default()
            })
        };
        models.answer(&subject::Models, one, found).await
    });
    tokio::spawn(async move {
        budgets
            .answer(&subject::Budgets, other, |_| async { Some(mesh::BudgetReserved::default()) })
            .await
    });
}

/// The path of a turn: a command through JetStream and its result.
struct MeshPath {
    bus: Bus,
    upstream: SocketAddr,
    /// All of one partition, so that their results arrive at one consumer. Each has one command at
    /// a time.
    tasks: Vec<TaskId>,
    results: Consumer<TaskMessage>,
    number: u64,
}

impl MeshPath {
    fn prepare(bus: &Bus, upstream: SocketAddr) -> Self {
        let ids = std::iter::repeat_with(|| TaskId::from_uuid(Uuid::now_v7()));
        let tasks: Vec<TaskId> =
            ids.filter(|task| partition::for_task(*task) == 0).take(CONNECTIONS).collect();
        let options = ConsumeOptions::new(2 * CONNECTIONS, CancellationToken::new());
        let results = bus.consume_tasks(0, options);
        Self { bus: bus.clone(), upstream, tasks, results, number: 0 }
    }

    async fn serial(&mut self, duration: Duration) -> anyhow::Result<Vec<Duration>> {
        let (mut times, began) = (Vec::new(), Instant::now());
        while began.elapsed() < duration {
            let began = Instant::now();
            self.call().await?;
            times.push(began.elapsed());
        }
        Ok(times)
    }

    /// Calls per second, with one command per task in flight.
    async fn saturated(&mut self, duration: Duration) -> anyhow::Result<f64> {
        let began = Instant::now();
        let mut sending = JoinSet::new();
        for task in self.tasks.clone() {
            let (_, sent) = self.send(task);
            sending.spawn(sent);
        }
        let (mut open, mut calls) = (self.tasks.len(), 0_u32);
        while open > 0 {
            let delivery = tokio::select! {
                Some(sent) = sending.join_next() => {
                    sent??;
                    continue;
                }
                delivery = self.results.next() => delivery.context("the results ended")?,
            };
            completed(&delivery.message)?;
            calls += 1;
            let next = (began.elapsed() < duration).then(|| self.send(delivery.task).1);
            open -= usize::from(next.is_none());
            sending.spawn(async move {
                delivery.receipt.ack().await;
                match next {
                    Some(next) => next.await,
                    None => Ok(()),
                }
            });
        }
        let rate = f64::from(calls) / began.elapsed().as_secs_f64();
        while let Some(sent) = sending.join_next().await {
            sent??;
        }
        Ok(rate)
    }

    async fn call(&mut self) -> anyhow::Result<()> {
        let (step, sent) = self.send(self.tasks[0]);
        sent.await?;
        let delivery = self.results.next().await.context("the results ended")?;
        delivery.receipt.ack().await;
        ensure!(completed(&delivery.message)? == step, "the result is that of another step");
        Ok(())
    }

    /// The next command of a task: its step, and the future that publishes it.
    fn send(
        &mut self,
        task: TaskId,
    ) -> (String, impl Future<Output = anyhow::Result<()>> + Send + use<>) {
        self.number += 1;
        let (provider, model) = provider(self.upstream);
        let text = v1::Block {
            block: Some(v1::block::Block::Text(v1::Text { text: "Say hello.".to_owned() })),
        };
        let message =
            mesh::ChatMessage { source: v1::MessageSource::User.into(), blocks: vec![text] };
        let step = StepId::from_uuid(Uuid::now_v7()).to_string();
        let command = mesh::ModelInvoke {
            step: Some(mesh::StepRef {
                organization_id: OrganizationId::LOCAL.to_string(),
                task_id: task.to_string(),
                step_id: step.clone(),
                number: self.number,
                ..mesh::StepRef::default()
            }),
            purpose: mesh::model_invoke::Purpose::Turn.into(),
            provider: Some(provider),
            model: Some(model),
            system: "Be brief.".to_owned(),
            messages: vec![message],
            ..mesh::ModelInvoke::default()
        };
        let address = subject::ModelInvoke::new(subject::Pool::model_default(), task);
        let bus = self.bus.clone();
        (step, async move {
            bus.publish_once(&address, &command).await?;
            Ok(())
        })
    }
}

/// The step of a result.
fn completed(message: &TaskMessage) -> anyhow::Result<&str> {
    let TaskMessage::Result(result) = message else { anyhow::bail!("not a result") };
    let completed = matches!(result.outcome, Some(mesh::step_result::Outcome::ModelCompleted(_)));
    ensure!(completed, "the call failed");
    Ok(result.step.as_ref().map_or("", |step| &step.step_id))
}
