//! The one table of streams and consumers, and its application to the server.

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

/// How long a message may stay unacknowledged before another process gets it. Short, because a live
/// process reports progress several times within it ([`KEEP_ALIVE`]), and a dead one should not
/// delay a task: redelivery included, this takes less than three seconds.
pub const ACK_WAIT: Duration = Duration::from_secs(2);

/// How often a worker reports progress.
pub const KEEP_ALIVE: Duration = Duration::from_millis(400);

/// How long a stream remembers `Nats-Msg-Id`s. Longer than all retries of one publish call.
pub const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);

const MIB: i64 = 1024 * 1024;
const HOUR: Duration = Duration::from_secs(60 * 60);

/// A stream of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Scripts to run.
    Code,
    /// Dead letters.
    DeadLetters,
    /// Live text.
    Deltas,
    /// Records and progress of tasks and entities.
    Events,
    /// Host calls of executions.
    Journal,
    /// Model calls to make.
    Model,
    /// Scans of repositories to continue.
    Scan,
    /// Deliveries from Slack.
    Slack,
    /// Spending reports of calls outside a turn.
    Spending,
    /// Wakes and results of tasks.
    Task,
    /// Tools to create.
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

/// When a stream removes a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retention {
    /// When it is acknowledged.
    WorkQueue,
    /// When it is too old or the stream too large.
    Limits,
}

/// What happens to a message when the stream is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenFull {
    /// The publisher is refused and retries.
    Refuse,
    /// The oldest messages are removed.
    DropOldest,
}

/// One row of the table of streams. All are stored on disk.
#[derive(Debug, Clone, Copy)]
pub struct StreamRow {
    /// The stream.
    pub stream: Stream,
    /// The subjects it listens to.
    pub subject: &'static str,
    /// When it removes a message.
    pub retention: Retention,
    /// The maximum age of a message. Zero: unlimited.
    pub max_age: Duration,
    /// The most bytes on disk, which the server reserves when it creates the stream.
    pub max_bytes: i64,
    /// What happens at `max_bytes`.
    pub when_full: WhenFull,
    /// The reason for this configuration.
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
        why: "a lost result costs a model call; refused publishers keep theirs and retry",
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
        why: "an unrecorded report is unknown spending; a refused publisher keeps its report and retries",
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
        why: "it carries ids only; the row of a scan shows that it is due",
    },
    StreamRow {
        stream: Stream::Tool,
        subject: "construct.v1.cmd.tool.>",
        retention: Retention::WorkQueue,
        max_age: Duration::ZERO,
        max_bytes: 64 * MIB,
        when_full: WhenFull::Refuse,
        why: "the row of the hand-over has a refused request, which is published again",
    },
    StreamRow {
        stream: Stream::Events,
        subject: "construct.v1.evt.>",
        retention: Retention::Limits,
        max_age: HOUR.saturating_mul(24 * 7),
        max_bytes: 512 * MIB,
        when_full: WhenFull::DropOldest,
        why: "records are in PostgreSQL as well; a week suffices for investigating a problem",
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
        why: "kept for longer than a script waits for approvals, because it continues from here; dropping the oldest would silently let a side effect run twice; a refused entry stops the call before it starts",
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

/// One row of the table of consumers: durable, pulled, explicitly acknowledged, redelivered without
/// limit. (Messages that cannot be decoded are terminated; everything else is worth another
/// attempt.)
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerRow {
    /// Its name at the server.
    pub durable: String,
    /// The stream it takes from.
    pub stream: Stream,
    /// The filter of its messages. Rows of one stream never overlap.
    pub filter: String,
    /// The most delivered and unsettled messages of all workers together. Further ones wait at the
    /// server.
    pub max_ack_pending: i64,
    /// The reason for this configuration.
    pub why: &'static str,
}

/// The table of consumers, with the standard pools.
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

/// The consumer of a partition's wakes and results.
pub fn task_consumer(partition: u16) -> ConsumerRow {
    let partition = partition_token(partition);
    ConsumerRow {
        durable: format!("task-p{partition}"),
        stream: Stream::Task,
        filter: format!("construct.v1.cmd.task.*.{partition}.*"),
        max_ack_pending: 1024,
        why: "one per partition, so that a reconciler consumes only its own tasks; the bound is per partition",
    }
}

/// The consumer of a pool's model calls.
pub fn model_consumer(pool: &Pool) -> ConsumerRow {
    ConsumerRow {
        durable: format!("model-{pool}"),
        stream: Stream::Model,
        filter: format!("construct.v1.cmd.model.invoke.{pool}.*"),
        max_ack_pending: 4096,
        why: "shared by all providers of the pool; each bounds itself by how much it pulls",
    }
}

/// The consumer of spending reports.
pub fn spending_consumer() -> ConsumerRow {
    ConsumerRow {
        durable: "spending".to_owned(),
        stream: Stream::Spending,
        filter: "construct.v1.cmd.spending.*".to_owned(),
        max_ack_pending: 1024,
        why: "shared by all reconcilers; each records the reports it takes",
    }
}

/// The consumer of deliveries from Slack.
pub fn slack_consumer() -> ConsumerRow {
    ConsumerRow {
        durable: "slack".to_owned(),
        stream: Stream::Slack,
        filter: "construct.v1.cmd.slack.*.*".to_owned(),
        max_ack_pending: 1024,
        why: "shared by all processes of the Slack service; each stores a delivery before it acknowledges it",
    }
}

/// The consumer of scans to continue.
pub fn scan_consumer() -> ConsumerRow {
    ConsumerRow {
        durable: "scan".to_owned(),
        stream: Stream::Scan,
        filter: "construct.v1.cmd.scan.run.*.*".to_owned(),
        max_ack_pending: 1024,
        why: "shared by all scanners; each bounds itself by how much it pulls",
    }
}

/// The consumer of tools to create.
pub fn tool_consumer() -> ConsumerRow {
    ConsumerRow {
        durable: "tool-create".to_owned(),
        stream: Stream::Tool,
        filter: "construct.v1.cmd.tool.create.*".to_owned(),
        max_ack_pending: 256,
        why: "exists before anything consumes from it, so that requests wait",
    }
}

/// The consumer of a pool's scripts.
pub fn code_consumer(pool: &Pool) -> ConsumerRow {
    ConsumerRow {
        durable: format!("code-{pool}"),
        stream: Stream::Code,
        filter: format!("construct.v1.cmd.code.execute.{pool}.*"),
        max_ack_pending: 4096,
        why: "shared by all interpreters of the pool; each bounds itself by how much it pulls",
    }
}
