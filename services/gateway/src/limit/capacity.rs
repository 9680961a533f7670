//! How much a gateway holds at the same time: every limit that requests and answers share, with its
//! size.
//!
//! Together they keep a gateway below 512 MiB, which is what the chart gives it
//! (`tests/e2e/flood.rs` measures it). The limits of connections are with the ports:
//! [`crate::tls::accept`] and [`crate::protocols::operator`].

use std::time::Duration;

use super::Limit;
use crate::Config;

const MIB: usize = 1024 * 1024;

/// How long a client may leave an answer unread. Then its connection is closed.
pub(crate) const UNREAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a request's body may pause. How long all of it may take follows from the call's
/// deadline.
pub(super) const BODY_PAUSE: Duration = Duration::from_secs(10);
/// How long the whole body of an anonymous request may take, from the end of its headers on.
pub(super) const ANONYMOUS_BODY_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of an anonymous request's body. The largest is a question about many methods to gRPC's
/// reflection.
pub(super) const ANONYMOUS_BODY: usize = 8 * 1024;
/// Bytes that a request with a body is charged at least: what the connection keeps for it.
pub(super) const SMALLEST_BODY: usize = 4 * 1024;

/// Anonymous requests from the end of their headers until their answer begins: those of methods
/// that need no credentials, and those for what is no method.
const ANONYMOUS: usize = 512;
const ANONYMOUS_EACH: usize = 64;
/// Streams that need no credentials and have no end: the health of a service, and reflection.
const PUBLIC_STREAMS: usize = 1024;
const PUBLIC_STREAMS_EACH: usize = 64;
/// Credentials that are looked up and were not accepted lately: each takes a query, or a question
/// to the issuer.
const LOGINS: usize = 256;
const LOGINS_EACH: usize = 32;
/// Requests of other protocols than gRPC while they are translated and answered. Each may be in
/// memory in several forms. A request counts from when its body is there; a stream no longer than
/// until it begins.
const TRANSCODED: usize = 256;
const TRANSCODED_EACH: usize = 64;
/// Bytes of request bodies that are in memory, complete or not.
const BODIES: usize = 96 * MIB;
const BODIES_EACH: usize = 32 * MIB;
/// Bytes of answers that wait until a client reads them.
const ANSWERS: usize = 96 * MIB;
const ANSWERS_EACH: usize = 24 * MIB;
/// The same of anonymous requests.
const ANONYMOUS_ANSWERS: usize = 32 * MIB;
const ANONYMOUS_ANSWERS_EACH: usize = 8 * MIB;

/// The limits of a gateway. `EACH` is what one organization has at most, or of what is anonymous,
/// one network.
#[derive(Debug)]
pub(crate) struct Capacity {
    /// Calls that are worked on (`gateway_max_requests`). One organization has half of them.
    pub(crate) requests: Limit,
    /// Subscriptions (`gateway_max_subscriptions`). One organization has half of them.
    pub(crate) subscriptions: Limit,
    pub(crate) logins: Limit,
    pub(crate) public_streams: Limit,
    pub(crate) answers: Limit,
    pub(super) anonymous: Limit,
    pub(super) transcoded: Limit,
    pub(super) bodies: Limit,
    pub(super) anonymous_answers: Limit,
}

impl Capacity {
    pub(crate) fn new(config: &Config) -> Self {
        let half = |total: usize| Limit::new(total, total.div_ceil(2));
        Self {
            requests: half(config.gateway_max_requests),
            subscriptions: half(config.gateway_max_subscriptions),
            logins: Limit::new(LOGINS, LOGINS_EACH),
            public_streams: Limit::new(PUBLIC_STREAMS, PUBLIC_STREAMS_EACH),
            answers: Limit::new(ANSWERS, ANSWERS_EACH),
            anonymous: Limit::new(ANONYMOUS, ANONYMOUS_EACH),
            transcoded: Limit::new(TRANSCODED, TRANSCODED_EACH),
            bodies: Limit::new(BODIES, BODIES_EACH),
            anonymous_answers: Limit::new(ANONYMOUS_ANSWERS, ANONYMOUS_ANSWERS_EACH),
        }
    }
}
