//! How fast a thousand subscribers of one gateway receive the events of their tasks, and the effect
//! of subscribers that do not read on the others. Floor: the same messages from one NATS client to
//! as many subscriptions, without a gateway.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use construct_proto::v1::{
    self, event::Payload, event_service_client::EventServiceClient,
    message_service_client::MessageServiceClient, task_service_client::TaskServiceClient,
};
use futures::StreamExt as _;
use jiff::Timestamp;
use tokio::task::JoinSet;
use tonic::transport::Channel;

use crate::{
    figures::{Figures, Row, percentile},
    floor,
    services::{Services, scripted_agent},
};

/// Subscribers; each connection has [`SHARED`] of them.
const SUBSCRIBERS: usize = 1_000;
/// Subscriptions per connection.
const SHARED: usize = 20;
/// Tasks, each with the same number of subscribers.
const TASKS: usize = 20;
/// Deltas of an answer per second: a fast model's.
const TOKENS_PER_SECOND: u32 = 20;
/// Subscribers that never read.
const STALLED: usize = 20;
/// Bytes that such a connection accepts before it is read: about five events.
const WINDOW: u32 = 1024;

/// Measures without and with stalled subscribers, and the floor.
pub(crate) async fn measure(duration: Duration) -> anyhow::Result<Figures> {
    let nats = std::env::var("CONSTRUCT_NATS_URL")
        .context("CONSTRUCT_NATS_URL is not set; use ./dev bench events")?;
    let (home, workspace) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let services = Services::start(home.path(), workspace.path()).await?;
    let channel = Channel::from_shared(services.gateway.clone())?.connect().await?;
    // A token has four characters, and a delta has one token.
    let deltas = usize::try_from(duration.as_secs() * u64::from(TOKENS_PER_SECOND))?;
    let text = "word".repeat(deltas);
    let script = serde_json::json!([{"text": text, "tokens_per_second": TOKENS_PER_SECOND}]);
    scripted_agent(&channel, "talker", &script).await?;

    let mut all = watched(&services.gateway, &channel, 0).await?;
    let mut with_stalled = watched(&services.gateway, &channel, STALLED).await?;
    let mut bare = bare(&nats, all.len() / SUBSCRIBERS, duration).await?;
    let told = all.len() as f64 / duration.as_secs_f64();
    let rows = vec![
        Row::millis("delivery of an event, p50", percentile(&mut all, 0.5))
            .floor(percentile(&mut bare, 0.5)),
        Row::millis("delivery of an event, p99", percentile(&mut all, 0.99))
            .floor(percentile(&mut bare, 0.99)),
        Row::millis(
            format!("the same with {STALLED} additional stalled subscribers, p50"),
            percentile(&mut with_stalled, 0.5),
        ),
        Row::millis(
            format!("the same with {STALLED} additional stalled subscribers, p99"),
            percentile(&mut with_stalled, 0.99),
        ),
        Row::new("delivered events", "1/s", told),
    ];
    let what = format!(
        "{SUBSCRIBERS} subscribers of one gateway over {} connections watch {TASKS} tasks whose models say {TOKENS_PER_SECOND} words a second for {} s. \
         From the event's time until it is read. Floor: as many messages from one NATS client to as many subscriptions, bare.",
        SUBSCRIBERS / SHARED,
        duration.as_secs()
    );
    Ok(Figures { bench: "events", what, rows })
}

/// The delay of each text delta for each subscriber. Fails when a subscriber misses one.
async fn watched(
    gateway: &str,
    channel: &Channel,
    stalled: usize,
) -> anyhow::Result<Vec<Duration>> {
    let mut tasks = Vec::new();
    for _ in 0..TASKS {
        let spec = v1::TaskSpec {
            agent: "talker".to_owned(),
            title: "bench".to_owned(),
            ..Default::default()
        };
        let request = v1::CreateTaskRequest { spec: Some(spec), ..Default::default() };
        let task = TaskServiceClient::new(channel.clone()).create_task(request).await?.into_inner();
        tasks.push(task.metadata.context("a task without metadata")?.id);
    }
    // Kept open and never read. Their connections buffer little, and the gateway has to handle the
    // rest.
    let mut stalled_streams = Vec::new();
    for number in 0..stalled {
        let connection = Channel::from_shared(gateway.to_owned())?
            .initial_stream_window_size(WINDOW)
            .connect()
            .await?;
        stalled_streams.push(subscribe(&connection, &tasks[number % TASKS]).await?);
    }
    let times = Arc::new(Mutex::new(Vec::new()));
    let (mut connection, mut watching) = (None, JoinSet::new());
    let (ready, mut all_ready) = tokio::sync::mpsc::channel(SUBSCRIBERS);
    for number in 0..SUBSCRIBERS {
        let connection = match &connection {
            Some(connection) if number % SHARED != 0 => connection,
            _ => connection.insert(Channel::from_shared(gateway.to_owned())?.connect().await?),
        };
        let mut events = subscribe(connection, &tasks[number % TASKS]).await?;
        let (times, ready) = (Arc::clone(&times), ready.clone());
        watching.spawn(async move {
            events.message().await?.context("the event of the task's creation is missing")?;
            ready.send(()).await?;
            let mut own = Vec::new();
            loop {
                let event = events.message().await?.context("the events ended")?;
                match event.payload {
                    Some(Payload::MessageDelta(_)) => {
                        let time = event.time.context("an event without a time")?;
                        own.push(since(Timestamp::new(time.seconds, time.nanos)?));
                    }
                    Some(Payload::TurnCompleted(_)) => break,
                    _ => {}
                }
            }
            let told = own.len();
            times.lock().unwrap_or_else(PoisonError::into_inner).extend(own);
            anyhow::Ok((number % TASKS, told))
        });
    }
    for _ in 0..SUBSCRIBERS {
        all_ready.recv().await.context("a subscriber ended")?;
    }
    for task in tasks {
        let text =
            v1::Block { block: Some(v1::block::Block::Text(v1::Text { text: "go".to_owned() })) };
        let spec = v1::MessageSpec { task, blocks: vec![text], ..Default::default() };
        let request = v1::CreateMessageRequest { spec: Some(spec), ..Default::default() };
        MessageServiceClient::new(channel.clone()).create_message(request).await?;
    }
    let mut told = [None; TASKS];
    while let Some(ended) = watching.join_next().await {
        let (task, count) = ended??;
        let first = *told[task].get_or_insert(count);
        ensure!(
            count > 0 && count == first,
            "of one task somebody was told {first} deltas and somebody else {count}"
        );
    }
    drop(stalled_streams);
    let mut times = times.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(std::mem::take(&mut *times))
}

async fn subscribe(channel: &Channel, task: &str) -> anyhow::Result<tonic::Streaming<v1::Event>> {
    let request =
        v1::SubscribeRequest { task: task.to_owned(), cursor: "0".to_owned(), types: Vec::new() };
    Ok(EventServiceClient::new(channel.clone()).subscribe(request).await?.into_inner())
}

fn since(time: Timestamp) -> Duration {
    Duration::try_from(Timestamp::now().duration_since(time)).unwrap_or_default()
}

/// The same number of messages to the same number of subscriptions and connections.
async fn bare(nats: &str, messages: usize, duration: Duration) -> anyhow::Result<Vec<Duration>> {
    let began = Instant::now();
    let mut listening = JoinSet::new();
    let mut connection = None;
    for number in 0..SUBSCRIBERS {
        let client = match &connection {
            Some(client) if number % SHARED != 0 => client,
            _ => connection.insert(floor::connect(nats).await?),
        };
        let mut heard = client.subscribe(format!("bench_events.{}", number % TASKS)).await?;
        client.flush().await?;
        listening.spawn(async move {
            let mut own = Vec::with_capacity(messages);
            for _ in 0..messages {
                let message = heard.next().await.context("the floor's subscription ended")?;
                let sent = u64::from_be_bytes(
                    *message.payload.first_chunk().context("a message without a time")?,
                );
                own.push(began.elapsed().saturating_sub(Duration::from_nanos(sent)));
            }
            anyhow::Ok(own)
        });
    }
    let client = floor::connect(nats).await?;
    let mut ticks = tokio::time::interval(duration / u32::try_from(messages.max(1))?);
    for _ in 0..messages {
        ticks.tick().await;
        for task in 0..TASKS {
            let mut payload = vec![b'x'; 256];
            payload[..8].copy_from_slice(&u64::try_from(began.elapsed().as_nanos())?.to_be_bytes());
            client.publish(format!("bench_events.{task}"), payload.into()).await?;
        }
    }
    client.flush().await?;
    let mut times = Vec::new();
    while let Some(own) = listening.join_next().await {
        times.extend(own??);
    }
    Ok(times)
}
