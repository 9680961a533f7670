//! How soon a thousand subscribers of one gateway are told what happens in the tasks they watch,
//! and what those who do not listen change for the others. Floor: the same messages from one NATS
//! client to as many subscriptions of others, with nothing in between.

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

/// Subscribers, a connection for each [`SHARED`] of them.
const SUBSCRIBERS: usize = 1_000;
/// Subscriptions of one connection.
const SHARED: usize = 20;
/// Tasks that they watch, each the same number of them.
const TASKS: usize = 20;
/// Pieces of an answer in a second: a fast model's.
const PACE: u32 = 20;
/// Subscribers that never read what they are sent.
const STALLED: usize = 20;
/// Bytes that such a one's connection takes before it is read: some five events.
const WINDOW: u32 = 1024;

/// Measures while nobody stalls, while some do, and the floor.
pub(crate) async fn measure(duration: Duration) -> anyhow::Result<Figures> {
    let nats = std::env::var("CONSTRUCT_NATS_URL")
        .context("CONSTRUCT_NATS_URL is not set; use ./dev bench events")?;
    let (home, workspace) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let services = Services::start(home.path(), workspace.path()).await?;
    let channel = Channel::from_shared(services.gateway.clone())?.connect().await?;
    // Four characters a token, and a piece a token.
    let pieces = usize::try_from(duration.as_secs() * u64::from(PACE))?;
    let text = "word".repeat(pieces);
    let script = serde_json::json!([{"text": text, "tokens_per_second": PACE}]);
    scripted_agent(&channel, "talker", &script).await?;

    let mut all = watched(&services.gateway, &channel, 0).await?;
    let mut beside = watched(&services.gateway, &channel, STALLED).await?;
    let mut bare = bare(&nats, all.len() / SUBSCRIBERS, duration).await?;
    let told = all.len() as f64 / duration.as_secs_f64();
    let rows = vec![
        Row::millis("told of an event, p50", percentile(&mut all, 0.5))
            .floor(percentile(&mut bare, 0.5)),
        Row::millis("told of an event, p99", percentile(&mut all, 0.99))
            .floor(percentile(&mut bare, 0.99)),
        Row::millis(
            format!("the same with {STALLED} more that do not read, p50"),
            percentile(&mut beside, 0.5),
        ),
        Row::millis(
            format!("the same with {STALLED} more that do not read, p99"),
            percentile(&mut beside, 0.99),
        ),
        Row::new("events told", "1/s", told),
    ];
    let what = format!(
        "{SUBSCRIBERS} subscribers of one gateway over {} connections watch {TASKS} tasks whose models say {PACE} words a second for {} s. \
         From the event's time to its being read. Floor: as many messages from one NATS client to as many subscriptions, bare.",
        SUBSCRIBERS / SHARED,
        duration.as_secs()
    );
    Ok(Figures { bench: "events", what, rows })
}

/// How long it took each subscriber to be told of each piece of text. Fails when somebody misses
/// one.
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
    // Held, and never read: the little that their connections take is there soon, and all else is
    // the gateway's to deal with.
    let mut deaf = Vec::new();
    for number in 0..stalled {
        let connection = Channel::from_shared(gateway.to_owned())?
            .initial_stream_window_size(WINDOW)
            .connect()
            .await?;
        deaf.push(subscribe(&connection, &tasks[number % TASKS]).await?);
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
            events.message().await?.context("the task's creation is not told")?;
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
            "of one task somebody was told {first} pieces and somebody else {count}"
        );
    }
    drop(deaf);
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

/// The same number of messages to the same number of subscriptions, over as many connections.
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
