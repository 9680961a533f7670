//! The limits of a gateway on requests and responses, with their sizes.
//!
//! Together they keep a gateway below 512 MiB, the memory limit in the chart (`tests/e2e/flood.rs`
//! measures it). The limits of connections are with the ports: [`crate::tls::accept`] and
//! [`crate::protocols::operator`].

use std::time::Duration;

use super::Limit;
use crate::Config;

const MIB: usize = 1024 * 1024;

/// How long a client may leave a response unread before its connection is closed.
pub(crate) const UNREAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time between two parts of a request's body. The deadline of the call limits the whole
/// body.
pub(super) const BODY_PART_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the whole body of an anonymous request, from the end of its headers.
pub(super) const ANONYMOUS_BODY_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum size of an anonymous request's body in bytes. The largest are reflection queries about
/// many methods.
pub(super) const MAX_ANONYMOUS_BODY_BYTES: usize = 8 * 1024;
/// Minimum charge of a request with a body in bytes: the buffers of its connection.
pub(super) const MIN_BODY_CHARGE_BYTES: usize = 4 * 1024;

/// Anonymous requests from the end of their headers until the start of their response: those of
/// public methods, and those without a method.
const ANONYMOUS: usize = 512;
const ANONYMOUS_EACH: usize = 64;
/// Public streams without an end: the health of a service, and reflection.
const PUBLIC_STREAMS: usize = 1024;
const PUBLIC_STREAMS_EACH: usize = 64;
/// Credentials that are checked and were not accepted recently: each needs a query, or a request to
/// the issuer.
const LOGINS: usize = 256;
const LOGINS_EACH: usize = 32;
/// Requests of other protocols than gRPC while they are transcoded. Each may be in memory in
/// several forms. A request counts from the end of its body; a stream only until it starts.
const TRANSCODED: usize = 256;
const TRANSCODED_EACH: usize = 64;
/// Bytes of request bodies in memory, complete or not.
const BODIES: usize = 96 * MIB;
const BODIES_EACH: usize = 32 * MIB;
/// Bytes of responses that wait for their client to read them.
const ANSWERS: usize = 96 * MIB;
const ANSWERS_EACH: usize = 24 * MIB;
/// The same for anonymous requests.
const ANONYMOUS_ANSWERS: usize = 32 * MIB;
const ANONYMOUS_ANSWERS_EACH: usize = 8 * MIB;

/// The limits of a gateway. `EACH` is the maximum of one organization or, for anonymous requests,
/// of one network.
#[derive(Debug)]
pub(crate) struct Capacity {
    /// Calls in progress (`gateway_max_requests`). One organization may use half of them.
    pub(crate) requests: Limit,
    /// Subscriptions (`gateway_max_subscriptions`). One organization may use half of them.
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
