//! The lower bound of a task: its commits and messages, performed directly by one process.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use async_nats::jetstream::{self, consumer::pull, stream::RetentionPolicy};
use futures::StreamExt as _;
use sqlx::{PgPool, postgres::PgPoolOptions};

/// Messages of a two-turn task that one process publishes and another consumes: the wake, and the
/// commands and results of two model calls and one execution.
const HOPS: usize = 7;
/// Entries of the execution's journal: its opening and three read-only calls.
const JOURNAL: usize = 4;
/// Commits: the message, and the reconciler's decisions (the turn starts, the script starts, the
/// model is called again, the turn ends).
const COMMITS: usize = 5;
/// Commits of a cancel: the intent, and the reconciler's decisions on the intent and on the
/// worker's result.
const CANCEL_COMMITS: usize = 3;
/// The wake and the step's result.
const CANCEL_HOPS: usize = 2;
/// The content of a message and a row.
const PAYLOAD: &[u8] = &[b'x'; 1024];

/// The clients of the floor.
#[derive(Debug, Clone)]
pub(crate) struct Floor {
    pool: PgPool,
    jetstream: jetstream::Context,
    journal: String,
    hop: String,
}

impl Floor {
    /// Connects, and creates a table and two streams.
    pub(crate) async fn prepare(
        database: &str,
        nats: &str,
        connections: u32,
    ) -> anyhow::Result<Self> {
        let pool = PgPoolOptions::new().max_connections(connections).connect(database).await?;
        sqlx::raw_sql(
            "DROP TABLE IF EXISTS bench_floor; CREATE TABLE bench_floor (id bigserial PRIMARY KEY, body bytea NOT NULL)",
        )
        .execute(&pool)
        .await?;
        let jetstream = jetstream::new(connect(nats).await?);
        for (name, retention) in
            [("BENCH_HOP", RetentionPolicy::WorkQueue), ("BENCH_JOURNAL", RetentionPolicy::Limits)]
        {
            let _ = jetstream.delete_stream(name).await;
            let config = jetstream::stream::Config {
                name: name.to_owned(),
                subjects: vec![format!("{}.>", name.to_lowercase())],
                retention,
                ..Default::default()
            };
            jetstream.create_stream(config).await.context("the floor's stream cannot be made")?;
        }
        Ok(Self {
            pool,
            jetstream,
            journal: "bench_journal".to_owned(),
            hop: "bench_hop".to_owned(),
        })
    }

    /// The duration of each task, one after another.
    pub(crate) async fn serial(&self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let mut lane = self.lane("serial").await?;
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let began = Instant::now();
            lane.task().await?;
            times.push(began.elapsed());
        }
        Ok(times)
    }

    /// The duration of each cancel, one after another.
    pub(crate) async fn cancels(&self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let mut lane = self.lane("cancels").await?;
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let began = Instant::now();
            lane.hops(CANCEL_HOPS, CANCEL_COMMITS).await?;
            times.push(began.elapsed());
        }
        Ok(times)
    }

    /// Tasks per second with `concurrency` at once, including the creation and the subscription of
    /// each.
    pub(crate) async fn saturated(
        &self,
        concurrency: usize,
        duration: Duration,
    ) -> anyhow::Result<f64> {
        let mut lanes = Vec::new();
        for number in 0..concurrency {
            lanes.push(self.lane(&format!("lane{number}")).await?);
        }
        let began = Instant::now();
        let mut running = tokio::task::JoinSet::new();
        for mut lane in lanes {
            running.spawn(async move {
                let mut done = 0_usize;
                while began.elapsed() < duration {
                    lane.begin().await?;
                    lane.task().await?;
                    done += 1;
                }
                anyhow::Ok(done)
            });
        }
        let mut done = 0;
        while let Some(lane) = running.join_next().await {
            done += lane??;
        }
        Ok(done as f64 / began.elapsed().as_secs_f64())
    }

    async fn lane(&self, name: &str) -> anyhow::Result<Lane> {
        let subject = format!("{}.{name}", self.hop);
        let stream = self.jetstream.get_stream("BENCH_HOP").await?;
        let config = pull::Config {
            durable_name: Some(name.to_owned()),
            filter_subject: subject.clone(),
            ..Default::default()
        };
        let consumer = stream.get_or_create_consumer(name, config).await?;
        let messages = consumer.stream().max_messages_per_batch(16).messages().await?;
        Ok(Lane { floor: self.clone(), subject, messages })
    }
}

/// The client does not use a login in the address. `./dev bench` generates passwords of hexadecimal
/// digits, which need no decoding.
pub(crate) async fn connect(nats: &str) -> anyhow::Result<async_nats::Client> {
    let address: async_nats::ServerAddr = nats.parse()?;
    let options = match (address.username(), address.password()) {
        (Some(user), Some(password)) => {
            async_nats::ConnectOptions::with_user_and_password(user.to_owned(), password.to_owned())
        }
        _ => async_nats::ConnectOptions::new(),
    };
    Ok(options.connect(address).await?)
}

/// Runs tasks one after another.
struct Lane {
    floor: Floor,
    subject: String,
    messages: pull::Stream,
}

impl Lane {
    /// The cost of creating and following a task: a commit, an event, and the query for missed
    /// events.
    async fn begin(&self) -> anyhow::Result<()> {
        self.commit().await?;
        self.floor
            .jetstream
            .publish(format!("{}.entry", self.floor.journal), PAYLOAD.into())
            .await?
            .await?;
        sqlx::query("SELECT body FROM bench_floor ORDER BY id DESC LIMIT 1")
            .fetch_one(&self.floor.pool)
            .await?;
        Ok(())
    }

    async fn task(&mut self) -> anyhow::Result<()> {
        for _ in 0..JOURNAL {
            self.floor
                .jetstream
                .publish(format!("{}.entry", self.floor.journal), PAYLOAD.into())
                .await?
                .await?;
        }
        self.hops(HOPS, COMMITS).await
    }

    async fn hops(&mut self, hops: usize, mut commits: usize) -> anyhow::Result<()> {
        for hop in 0..hops {
            // The message's commit comes before the wake, and each of the reconciler's after a
            // received message.
            if hop % 2 == 0 && commits > 0 {
                self.commit().await?;
                commits -= 1;
            }
            let published =
                self.floor.jetstream.publish(self.subject.clone(), PAYLOAD.into()).await?;
            published.await?;
            let message = self.messages.next().await.context("the floor's consumer ended")??;
            message.ack().await.map_err(anyhow::Error::msg)?;
        }
        for _ in 0..commits {
            self.commit().await?;
        }
        Ok(())
    }

    async fn commit(&self) -> anyhow::Result<()> {
        sqlx::query("INSERT INTO bench_floor (body) VALUES ($1)")
            .bind(PAYLOAD)
            .execute(&self.floor.pool)
            .await?;
        Ok(())
    }
}
