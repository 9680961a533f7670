//! Streams that need no credentials and may stay open: the health of services, and reflection.

use tonic::{Status, body::Body, codegen::http::Request};

use crate::limit::{Capacity, Holder, Permit};

const STREAMS: [&str; 3] = [
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// Whether a request opens such a stream.
pub(super) fn is_stream(request: &Request<Body>) -> bool {
    STREAMS.contains(&request.uri().path())
}

/// A permit for a request that opens such a stream; `None` for any other request.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` when there are too many.
pub(super) fn acquire_permit(
    capacity: &Capacity,
    holder: Holder,
    request: &Request<Body>,
) -> Result<Option<Permit>, Status> {
    if !is_stream(request) {
        return Ok(None);
    }
    let share = capacity.public_streams.acquire(holder, 1);
    share.map(Some).map_err(|full| full.status("health and reflection streams"))
}
