//! The mesh: typed subjects, one table of streams and consumers, publishing, consuming. The only
//! user of async-nats.
//!
//! Guarantees:
//!
//! - Subject, stream, payload type and deduplication are one Rust type (module [`subject`]).
//! - Streams and consumers are declared in one table (module [`topology`]) and nowhere else.
//! - A payload above [`envelope::INLINE_LIMIT`] travels as a reference to a content-addressed blob,
//!   transparently for the caller.
//! - A message that cannot be decoded becomes a dead letter with the reason; it is not redelivered
//!   forever. If it is a command for a worker, its step fails at once, by a result made from its
//!   headers.
//! - What each service may publish and subscribe to is one table (module [`permissions`]), which
//!   the server enforces.
//! - Nothing here is the source of truth: losing any message costs latency only, because the
//!   reconciler's sweep finds the work again.
//!
//! Deliberately absent: key-value and object buckets (they fail against the oldest supported
//! server), exactly-once consumption (results are stored idempotently by step id instead), and any
//! retry of a step's *work*.

pub mod blob;
mod connect;
pub mod consume;
pub mod control;
pub mod dead_letter;
mod dispatch;
pub mod envelope;
pub mod event;
pub mod files;
mod forget;
pub mod history;
pub mod inspect;
pub mod journal;
mod membership;
mod message;
mod metrics;
pub mod permissions;
mod progress;
pub mod publish;
pub mod subject;
mod tap;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod topology;
mod updates;

pub use connect::{Bus, ConnectOptions, Connection, Tls};
pub use consume::{ConsumeOptions, Consumer, Delivery, KeepAlive, Receipt, TaskMessage};
pub use control::{request, subscribe};
pub use dispatch::Dispatch;
pub use event::{Position, Watch};
pub use history::{Bookmark, Replay};
pub use journal::Journal;
pub use message::Message;
pub use permissions::User;
pub use progress::{Progress, ProgressCount};
pub use publish::Ack;
pub use subject::{Address, Entity, EventType, Pool, Service};
pub use tap::RawMessage;

#[cfg(test)]
mod tests;
