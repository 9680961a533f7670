//! What the same task costs at least: its commits and its messages, done bare by one process with
//! nothing in between.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use async_nats::jetstream::{self, consumer::pull, stream::RetentionPolicy};
use futures::StreamExt as _;
use sqlx::{PgPool, postgres::PgPoolOptions};

/// Messages of a two-turn task that one process publishes and another takes: the wake, and command
/// and result of two model calls and one execution.
const HOPS: usize = 7;
/// Entries of the execution's journal: its opening and three calls that only read.
const JOURNAL: usize = 4;
/// Commits: the message, and the reconciler's decisions (the turn begins, the script begins, the
/// model is asked again, the turn ends).
const COMMITS: usize = 5;
/// Of a cancel: what is asked for, and what the reconciler decides when it hears of that and when
/// it hears from the worker.
const CANCEL_COMMITS: usize = 3;
/// The wake, and what became of the step.
const CANCEL_HOPS: usize = 2;
/// What a message and a row hold.
const PAYLOAD: &[u8] = &[b'x'; 1024];

/// The bare clients.
#[derive(Debug, Clone)]
pub(crate) struct Floor {
    pool: PgPool,
    jetstream: jetstream::Context,
    journal: String,
    hop: String,
}

impl Floor {
    /// Connects, and makes a table and two streams of its own.
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

    /// The time of one task after another.
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

    /// The time of one cancel after another.
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

    /// Tasks per second with `concurrency` at once, each of which is begun and followed as well.
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

/// The client does not use what an address says of the user by itself. `./dev bench` makes
/// passwords of hexadecimal digits, which need no decoding.
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

/// One task after another.
struct Lane {
    floor: Floor,
    subject: String,
    messages: pull::Stream,
}

impl Lane {
    /// What it takes to begin a task and to follow it: its commit and its event, and the look for
    /// what a follower has missed.
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
            // The message's commit comes before the wake, and each of the reconciler's after what
            // it takes.
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
