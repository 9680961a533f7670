//! The one table of streams and consumers, and how it is brought about at the server.

mod ensure;
mod stuck_messages;

use std::time::Duration;

use construct_domain::partition;

pub use ensure::Error;
pub(crate) use ensure::{check_streams, ensure, ensure_consumer, find_consumer};
pub(crate) use stuck_messages::StuckMessages;
#[cfg(test)]
pub(crate) use stuck_messages::purge_first;

use crate::subject::{Pool, partition_token};

/// How long a message may stay unacknowledged before another process gets it. Short, because a
/// process that lives says so four times within it ([`KEEP_ALIVE`]), and one that died should not
/// keep a task waiting: with the moment it takes to go on, that is less than three seconds.
pub const ACK_WAIT: Duration = Duration::from_secs(2);

/// How often a working worker says that it lives.
pub const KEEP_ALIVE: Duration = Duration::from_millis(400);

/// How long a stream remembers `Nats-Msg-Id`s. Longer than any retry of one publish call.
pub const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);

const MIB: i64 = 1024 * 1024;
const HOUR: Duration = Duration::from_secs(60 * 60);

/// A stream of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Scripts to run.
    Code,
    /// What was given up.
    DeadLetters,
    /// Live text.
    Deltas,
    /// What happened.
    Events,
    /// Host calls of executions.
    Journal,
    /// Model calls to make.
    Model,
    /// Scans of repositories to go on with.
    Scan,
    /// What happened in Slack.
    Slack,
    /// What calls outside a turn have used.
    Spending,
    /// Wakes and results of tasks.
    Task,
    /// Tools to make.
    Tool,
}

impl Stream {
    /// Every stream, alphabetically.
    pub const ALL: [Self; 11] = [
        Self::Code,
        Self::DeadLetters,
        Self::Deltas,
        Self::Events,
        Self::Journal,
        Self::Model,
        Self::Scan,
        Self::Slack,
        Self::Spending,
        Self::Task,
        Self::Tool,
    ];

    /// Its name at the server.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Code => "CONSTRUCT_CODE",
            Self::DeadLetters => "CONSTRUCT_DEAD",
            Self::Deltas => "CONSTRUCT_DELTAS",
            Self::Events => "CONSTRUCT_EVENTS",
            Self::Journal => "CONSTRUCT_JOURNAL",
            Self::Model => "CONSTRUCT_MODEL",
            Self::Scan => "CONSTRUCT_SCAN",
            Self::Slack => "CONSTRUCT_SLACK",
            Self::Spending => "CONSTRUCT_SPENDING",
            Self::Task => "CONSTRUCT_TASK",
            Self::Tool => "CONSTRUCT_TOOL",
        }
    }
}

/// When a stream lets go of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retention {
    /// When it is acknowledged.
    WorkQueue,
    /// When it is too old or there is too much.
    Limits,
}

/// What happens to a message when the stream is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenFull {
    /// The publisher is refused, and tries again later.
    Refuse,
    /// The oldest messages go.
    DropOldest,
}

/// One row of the table of streams. All are kept on disk.
#[derive(Debug, Clone, Copy)]
pub struct StreamRow {
    /// Which stream.
    pub stream: Stream,
    /// What it listens to.
    pub subject: &'static str,
    /// When it lets go of a message.
    pub retention: Retention,
    /// The oldest a message becomes. Zero: any age.
    pub max_age: Duration,
    /// The most bytes on disk; reserved by the server when the stream is made.
    pub max_bytes: i64,
    /// What happens at `max_bytes`.
    pub when_full: WhenFull,
    /// Why it is so.
    pub why: &'static str,
}

/// The table of streams.
pub const fn streams() -> &'static [StreamRow] {
    STREAMS
}

const STREAMS: &[StreamRow] = &[
    StreamRow {
        stream: Stream::Task,
        subject: "construct.v1.cmd.task.>",
        retention: Retention::WorkQueue,
        max_age: Duration::ZERO,
        max_bytes: 256 * MIB,
        when_full: WhenFull::Refuse,
        why: "a lost result costs a model call; refused publishers keep theirs and try again",
    },
    StreamRow {
        stream: Stream::Model,
        subject: "construct.v1.cmd.model.>",
        retention: Retention::WorkQueue,
        max_age: Duration::ZERO,
        max_bytes: 128 * MIB,
        when_full: WhenFull::Refuse,
        why: "the reconciler derives a refused command again from the task's row",
    },
    StreamRow {
        stream: Stream::Code,
        subject: "construct.v1.cmd.code.>",
        retention: Retention::WorkQueue,
        max_age: Duration::ZERO,
        max_bytes: 128 * MIB,
        when_full: WhenFull::Refuse,
        why: "the reconciler derives a refused command again from the task's row",
    },
    StreamRow {
        stream: Stream::Spending,
        subject: "construct.v1.cmd.spending.>",
        retention: Retention::WorkQueue,
        max_age: Duration::ZERO,
        max_bytes: 64 * MIB,
        when_full: WhenFull::Refuse,
        why: "what is not booked is money nobody knows of; a refused publisher keeps its report and tries again",
    },
    StreamRow {
        stream: Stream::Slack,
        subject: "construct.v1.cmd.slack.>",
        retention: Retention::WorkQueue,
        max_age: Duration::ZERO,
        max_bytes: 64 * MIB,
        when_full: WhenFull::Refuse,
        why: "a refused delivery is not confirmed to Slack, which sends it again",
    },
    StreamRow {
        stream: Stream::Scan,
        subject: "construct.v1.cmd.scan.>",
        retention: Retention::WorkQueue,
        max_age: Duration::ZERO,
        max_bytes: 16 * MIB,
        when_full: WhenFull::Refuse,
        why: "it carries names only; a scan of which nobody was told is found in its row",
    },
    StreamRow {
        stream: Stream::Tool,
        subject: "construct.v1.cmd.tool.>",
        retention: Retention::WorkQueue,
        max_age: Duration::ZERO,
        max_bytes: 64 * MIB,
        when_full: WhenFull::Refuse,
        why: "what is refused stands in the row of the hand-over, and is told again",
    },
    StreamRow {
        stream: Stream::Events,
        subject: "construct.v1.evt.>",
        retention: Retention::Limits,
        max_age: HOUR.saturating_mul(24 * 7),
        max_bytes: 512 * MIB,
        when_full: WhenFull::DropOldest,
        why: "records are in PostgreSQL as well; a week is what people look back when they search for a cause",
    },
    StreamRow {
        stream: Stream::Deltas,
        subject: "construct.v1.delta.>",
        retention: Retention::Limits,
        max_age: HOUR,
        max_bytes: 256 * MIB,
        when_full: WhenFull::DropOldest,
        why: "live text is void once its message is complete; an hour covers the longest answer",
    },
    StreamRow {
        stream: Stream::Journal,
        subject: "construct.v1.journal.>",
        retention: Retention::Limits,
        max_age: HOUR.saturating_mul(24 * 28),
        max_bytes: 1024 * MIB,
        when_full: WhenFull::Refuse,
        why: "kept for longer than a script waits for people, because it goes on from here; dropping the oldest would silently let a side effect run twice; a refused entry stops the call before it starts",
    },
    StreamRow {
        stream: Stream::DeadLetters,
        subject: "construct.v1.dead.>",
        retention: Retention::Limits,
        max_age: HOUR.saturating_mul(24 * 30),
        max_bytes: 32 * MIB,
        when_full: WhenFull::DropOldest,
        why: "for people; a flood of broken messages must not stop the mesh",
    },
];

/// One row of the table of consumers: durable, pulled, explicitly acknowledged, delivered again
/// without limit (what cannot be decoded is terminated, everything else is worth another try).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerRow {
    /// Its name at the server.
    pub durable: String,
    /// The stream it takes from.
    pub stream: Stream,
    /// Which of the stream's messages it gets; rows of one stream never overlap.
    pub filter: String,
    /// The most messages delivered and unsettled over all workers together; further ones wait at
    /// the server.
    pub max_ack_pending: i64,
    /// Why it is so.
    pub why: &'static str,
}

/// The table of consumers, with the pools that exist without anybody naming them.
pub fn consumers() -> Vec<ConsumerRow> {
    let tasks = (0..partition::COUNT).map(task_consumer);
    let codes = Pool::code_standard();
    tasks
        .chain([
            model_consumer(&Pool::model_default()),
            scan_consumer(),
            slack_consumer(),
            spending_consumer(),
            tool_consumer(),
        ])
        .chain(codes.iter().map(code_consumer))
        .collect()
}

/// The row of a partition's wakes and results.
pub fn task_consumer(partition: u16) -> ConsumerRow {
    let partition = partition_token(partition);
    ConsumerRow {
        durable: format!("task-p{partition}"),
        stream: Stream::Task,
        filter: format!("construct.v1.cmd.task.*.{partition}.*"),
        max_ack_pending: 1024,
        why: "one per partition, so that a reconciler takes only what is its own; the bound is per partition",
    }
}

/// The row of a pool's model calls.
pub fn model_consumer(pool: &Pool) -> ConsumerRow {
    ConsumerRow {
        durable: format!("model-{pool}"),
        stream: Stream::Model,
        filter: format!("construct.v1.cmd.model.invoke.{pool}.*"),
        max_ack_pending: 4096,
        why: "shared by all providers of the pool; each bounds itself by how much it pulls",
    }
}

/// The row of what calls outside a turn have used.
pub fn spending_consumer() -> ConsumerRow {
    ConsumerRow {
        durable: "spending".to_owned(),
        stream: Stream::Spending,
        filter: "construct.v1.cmd.spending.*".to_owned(),
        max_ack_pending: 1024,
        why: "shared by all reconcilers; each books what it takes",
    }
}

/// The row of what happened in Slack.
pub fn slack_consumer() -> ConsumerRow {
    ConsumerRow {
        durable: "slack".to_owned(),
        stream: Stream::Slack,
        filter: "construct.v1.cmd.slack.*.*".to_owned(),
        max_ack_pending: 1024,
        why: "shared by all processes of the Slack service; each writes down what it takes before it acknowledges",
    }
}

/// The row of scans to go on with.
pub fn scan_consumer() -> ConsumerRow {
    ConsumerRow {
        durable: "scan".to_owned(),
        stream: Stream::Scan,
        filter: "construct.v1.cmd.scan.run.*.*".to_owned(),
        max_ack_pending: 1024,
        why: "shared by all scanners; each bounds itself by how much it pulls",
    }
}

/// The row of tools to make.
pub fn tool_consumer() -> ConsumerRow {
    ConsumerRow {
        durable: "tool-create".to_owned(),
        stream: Stream::Tool,
        filter: "construct.v1.cmd.tool.create.*".to_owned(),
        max_ack_pending: 256,
        why: "there before anybody takes from it, so that what is handed over waits",
    }
}

/// The row of a pool's scripts.
pub fn code_consumer(pool: &Pool) -> ConsumerRow {
    ConsumerRow {
        durable: format!("code-{pool}"),
        stream: Stream::Code,
        filter: format!("construct.v1.cmd.code.execute.{pool}.*"),
        max_ack_pending: 4096,
        why: "shared by all interpreters of the pool; each bounds itself by how much it pulls",
    }
}
