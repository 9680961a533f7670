//! What a write tells others, and what it answers.

use construct_proto::v1::{Deleted, event::Payload};
use construct_store::WriteOutput;
use construct_wire::record;
pub(crate) use construct_wire::record::read;
use prost::Message;

/// An event of a write and the answer kept for its idempotency key.
pub(crate) fn write_output(kind: &str, payload: Payload, response: &impl Message) -> WriteOutput {
    WriteOutput { event: record::new(kind, payload, None), response: response.encode_to_vec() }
}

/// What a deletion tells others; its answer is empty.
pub(crate) fn deletion_output(kind: &str, id: impl ToString) -> WriteOutput {
    write_output(kind, Payload::Deleted(Deleted { id: id.to_string() }), &())
}
