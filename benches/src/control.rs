//! How soon a person's word takes effect on a task that is at work: from the call of the API to the
//! event that says so, by a client that follows the task. A turn is said to be cancelled when its
//! worker has said that it stopped, or can do nothing any more.

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

/// Tasks of each kind and word, per round.
const TASKS: usize = 20;
/// Connections the floor may use.
const CONNECTIONS: u32 = 2;
/// Whoever stops something has seen that it is under way, and thought about it.
const UNDER_WAY: Duration = Duration::from_millis(150);

/// What it is told: the turn ends, the task rests, it goes on, another message ends the turn.
const WORDS: [&str; 4] = ["cancel", "suspend", "resume", "interrupt"];

/// What a task is doing: its name, the script of the model, and the type of event that says that it
/// does it.
fn works() -> [(&'static str, serde_json::Value, &'static str); 4] {
    let script = |code: &str| json!([{ "code": code }, { "text": "done" }]);
    [
        (
            "a model that speaks",
            json!([{ "text": "word ".repeat(4_000), "tokens_per_second": 20 }]),
            "message.delta",
        ),
        ("a script that computes", script("list_files('.'); for (;;) {}"), "tool.result"),
        ("a script that waits for a command", script("execute_command('sleep 60')"), "tool.called"),
        (
            "a script that waits for a timer",
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
        (vec![[const { Vec::new() }; WORDS.len()]; works().len()], Vec::new());
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        bare.extend(floor.cancels(TASKS).await?);
        for (number, (_, turns, sign)) in works().iter().enumerate() {
            let agent = format!("control-{number}");
            if round == 0 {
                scripted_agent(&channel, &agent, &json!({ "turns": turns })).await?;
            }
            let [cancelled, suspended, resumed, interrupted] = &mut times[number];
            for _ in 0..TASKS {
                let mut task = Task::at_work(&channel, &agent, &workspace, sign).await?;
                cancelled.push(task.cancel().await?);
                let mut task = Task::at_work(&channel, &agent, &workspace, sign).await?;
                suspended.push(task.suspend().await?);
                resumed.push(task.resume().await?);
                task.end().await?;
                let mut task = Task::at_work(&channel, &agent, &workspace, sign).await?;
                interrupted.push(task.interrupt().await?);
                task.end().await?;
            }
        }
    }
    let mut rows = Vec::new();
    for (number, word) in WORDS.iter().enumerate() {
        for ((name, ..), times) in works().iter().zip(&mut times) {
            for (which, share) in [("p50", 0.5), ("p99", 0.99)] {
                let row = Row::millis(
                    format!("{word} {name}, {which}"),
                    percentile(&mut times[number], share),
                );
                rows.push(row.floor(percentile(&mut bare, share)));
            }
        }
    }
    let what = format!(
        "{} tasks of each kind, one after the other: from the call to the event that tells of it. Floor: the 3 commits and 2 messages through \
         work queues of a cancel, bare.",
        rounds * TASKS
    );
    Ok(Figures { bench: "control", what, rows })
}

/// A task whose events are followed.
struct Task {
    channel: Channel,
    id: String,
    events: Streaming<v1::Event>,
}

impl Task {
    /// Begins one and waits until an event of the type `sign` says that it is at work.
    async fn at_work(
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
        task.say(v1::MessagePriority::AfterTurn).await?;
        while task.event().await?.r#type != sign {}
        tokio::time::sleep(UNDER_WAY).await;
        Ok(task)
    }

    async fn event(&mut self) -> anyhow::Result<v1::Event> {
        self.events.message().await?.context("the events ended")
    }

    async fn say(&self, priority: v1::MessagePriority) -> anyhow::Result<()> {
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

    /// Leaves nothing of it for the tasks after it, whatever it is at.
    async fn end(self) -> anyhow::Result<()> {
        let request = v1::DeleteTaskRequest { task: self.id, ..Default::default() };
        TaskServiceClient::new(self.channel).delete_task(request).await?;
        tokio::time::sleep(UNDER_WAY).await;
        Ok(())
    }

    async fn interrupt(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        self.say(v1::MessagePriority::Interrupt).await?;
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
                ensure!(outcome == expected, "the turn ended otherwise: {outcome:?}");
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
