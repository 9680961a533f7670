//! The events and responses of writes.

use construct_proto::v1::{Deleted, event::Payload};
use construct_store::WriteOutput;
use construct_wire::record;
pub(crate) use construct_wire::record::read;
use prost::Message;

/// The event of a write, and the response stored for its idempotency key.
pub(crate) fn write_output(kind: &str, payload: Payload, response: &impl Message) -> WriteOutput {
    WriteOutput { event: record::new(kind, payload, None), response: response.encode_to_vec() }
}

/// The event of a deletion; its response is empty.
pub(crate) fn deletion_output(kind: &str, id: impl ToString) -> WriteOutput {
    write_output(kind, Payload::Deleted(Deleted { id: id.to_string() }), &())
}
