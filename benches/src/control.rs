//! How fast a control action takes effect on a running task: from the API call to the event that
//! reports it, received by a client that follows the task. A turn is reported as cancelled when its
//! worker has confirmed that it stopped, or can no longer act.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use construct_proto::v1::{
    self, event::Payload, event_service_client::EventServiceClient,
    message_service_client::MessageServiceClient, task_service_client::TaskServiceClient,
};
use serde_json::json;
use tonic::{Streaming, transport::Channel};

use crate::{
    figures::{Figures, Row, percentile},
    floor::Floor,
    services::{Services, scripted_agent},
};

/// Tasks of each kind and action, per round.
const TASKS: usize = 20;
/// Connections of the floor.
const CONNECTIONS: u32 = 2;
/// A person acts only after noticing that the task is running.
const REACTION_TIME: Duration = Duration::from_millis(150);

/// The actions: end the turn, suspend the task, resume it, interrupt the turn with another message.
const ACTIONS: [&str; 4] = ["cancel", "suspend", "resume", "interrupt"];

/// The kinds of work: a name, the script of the model, and the event type that shows that the work
/// has started.
fn kinds_of_work() -> [(&'static str, serde_json::Value, &'static str); 4] {
    let script = |code: &str| json!([{ "code": code }, { "text": "done" }]);
    [
        (
            "a streaming model",
            json!([{ "text": "word ".repeat(4_000), "tokens_per_second": 20 }]),
            "message.delta",
        ),
        ("a computing script", script("list_files('.'); for (;;) {}"), "tool.result"),
        ("a script waiting for a command", script("execute_command('sleep 60')"), "tool.called"),
        (
            "a script waiting for a timer",
            script("list_files('.'); await new Promise((done) => setTimeout(done, 60000))"),
            "tool.result",
        ),
    ]
}

/// Measures in `rounds` rounds, alternating with the floor, because the machine's speed drifts.
pub(crate) async fn measure(rounds: usize) -> anyhow::Result<Figures> {
    let setting = |name: &str| {
        std::env::var(name).with_context(|| format!("{name} is not set; use ./dev bench control"))
    };
    let (database, nats) = (setting("CONSTRUCT_DATABASE_URL")?, setting("CONSTRUCT_NATS_URL")?);
    let (home, workspace) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let floor = Floor::prepare(&database, &nats, CONNECTIONS).await?;
    let services = Services::start(home.path(), workspace.path()).await?;
    let channel = Channel::from_shared(services.gateway.clone())?.connect().await?;
    let workspace = workspace.path().to_string_lossy().into_owned();

    let (mut times, mut bare) =
        (vec![[const { Vec::new() }; ACTIONS.len()]; kinds_of_work().len()], Vec::new());
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        bare.extend(floor.cancels(TASKS).await?);
        for (index, (_, turns, sign)) in kinds_of_work().iter().enumerate() {
            let agent = format!("control-{index}");
            if round == 0 {
                scripted_agent(&channel, &agent, &json!({ "turns": turns })).await?;
            }
            let [cancelled, suspended, resumed, interrupted] = &mut times[index];
            for _ in 0..TASKS {
                let mut task = Task::start(&channel, &agent, &workspace, sign).await?;
                cancelled.push(task.cancel().await?);
                let mut task = Task::start(&channel, &agent, &workspace, sign).await?;
                suspended.push(task.suspend().await?);
                resumed.push(task.resume().await?);
                task.end().await?;
                let mut task = Task::start(&channel, &agent, &workspace, sign).await?;
                interrupted.push(task.interrupt().await?);
                task.end().await?;
            }
        }
    }
    let mut rows = Vec::new();
    for (index, action) in ACTIONS.iter().enumerate() {
        for ((name, ..), times) in kinds_of_work().iter().zip(&mut times) {
            for (which, share) in [("p50", 0.5), ("p99", 0.99)] {
                let row = Row::millis(
                    format!("{action} {name}, {which}"),
                    percentile(&mut times[index], share),
                );
                rows.push(row.floor(percentile(&mut bare, share)));
            }
        }
    }
    let what = format!(
        "{} tasks of each kind, one after the other: from the call to the event that reports it. Floor: the 3 commits and 2 messages through \
         work queues of a cancel, bare.",
        rounds * TASKS
    );
    Ok(Figures { bench: "control", what, rows })
}

/// A task and its event stream.
struct Task {
    channel: Channel,
    id: String,
    events: Streaming<v1::Event>,
}

impl Task {
    /// Starts a task and waits for an event of the type `sign`, which shows that it is running.
    async fn start(
        channel: &Channel,
        agent: &str,
        workspace: &str,
        sign: &str,
    ) -> anyhow::Result<Self> {
        let spec = v1::TaskSpec {
            agent: agent.to_owned(),
            workspace: workspace.to_owned(),
            title: "bench".to_owned(),
            ..Default::default()
        };
        let request = v1::CreateTaskRequest { spec: Some(spec), ..Default::default() };
        let task = TaskServiceClient::new(channel.clone()).create_task(request).await?.into_inner();
        let id = task.metadata.context("a task without metadata")?.id;
        let types = [sign, "turn.completed", "task.phase_changed"].map(str::to_owned).to_vec();
        let subscribe = v1::SubscribeRequest { task: id.clone(), cursor: "0".to_owned(), types };
        let events =
            EventServiceClient::new(channel.clone()).subscribe(subscribe).await?.into_inner();
        let mut task = Self { channel: channel.clone(), id, events };
        task.send_message(v1::MessagePriority::AfterTurn).await?;
        while task.event().await?.r#type != sign {}
        tokio::time::sleep(REACTION_TIME).await;
        Ok(task)
    }

    async fn event(&mut self) -> anyhow::Result<v1::Event> {
        self.events.message().await?.context("the events ended")
    }

    async fn send_message(&self, priority: v1::MessagePriority) -> anyhow::Result<()> {
        let text =
            v1::Block { block: Some(v1::block::Block::Text(v1::Text { text: "go".to_owned() })) };
        let (task, priority) = (self.id.clone(), priority.into());
        let spec = v1::MessageSpec { task, blocks: vec![text], priority };
        let request = v1::CreateMessageRequest { spec: Some(spec), ..Default::default() };
        MessageServiceClient::new(self.channel.clone()).create_message(request).await?;
        Ok(())
    }

    async fn cancel(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let request = v1::CancelTaskRequest { task: self.id.clone(), ..Default::default() };
        TaskServiceClient::new(self.channel.clone()).cancel_task(request).await?;
        self.turn_ends(v1::TurnOutcome::Cancelled).await?;
        Ok(began.elapsed())
    }

    /// Deletes the task, so that it does not affect later ones.
    async fn end(self) -> anyhow::Result<()> {
        let request = v1::DeleteTaskRequest { task: self.id, ..Default::default() };
        TaskServiceClient::new(self.channel).delete_task(request).await?;
        tokio::time::sleep(REACTION_TIME).await;
        Ok(())
    }

    async fn interrupt(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        self.send_message(v1::MessagePriority::Interrupt).await?;
        self.turn_ends(v1::TurnOutcome::Interrupted).await?;
        Ok(began.elapsed())
    }

    async fn suspend(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let request = v1::SuspendTaskRequest { task: self.id.clone(), ..Default::default() };
        TaskServiceClient::new(self.channel.clone()).suspend_task(request).await?;
        self.phase_is(|phase| phase == v1::TaskPhase::Suspended).await?;
        Ok(began.elapsed())
    }

    async fn resume(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let request = v1::ResumeTaskRequest { task: self.id.clone(), ..Default::default() };
        TaskServiceClient::new(self.channel.clone()).resume_task(request).await?;
        self.phase_is(|phase| phase != v1::TaskPhase::Suspended).await?;
        Ok(began.elapsed())
    }

    async fn turn_ends(&mut self, expected: v1::TurnOutcome) -> anyhow::Result<()> {
        loop {
            if let Some(Payload::TurnCompleted(completed)) = self.event().await?.payload {
                let outcome = completed.outcome();
                ensure!(outcome == expected, "the turn ended with another outcome: {outcome:?}");
                return Ok(());
            }
        }
    }

    async fn phase_is(&mut self, expected: impl Fn(v1::TaskPhase) -> bool) -> anyhow::Result<()> {
        loop {
            match self.event().await?.payload {
                Some(Payload::PhaseChanged(changed)) if expected(changed.phase()) => return Ok(()),
                Some(Payload::TurnCompleted(completed)) => bail!("the turn ended: {completed:?}"),
                _ => {}
            }
        }
    }
}
