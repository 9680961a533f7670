//! Where a call comes from, as the trail says it.

use construct_domain::{ApiKeyId, AuditEntryId, OrganizationId, UserId};
use construct_runtime::clock;
use construct_store::AuditEntry;
use opentelemetry::trace::TraceContextExt as _;
use tonic::{
    Code,
    codegen::http::{HeaderValue, Request, header},
};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use uuid::Uuid;

use crate::{caller::Caller, identity::peer::Peer};

/// What the client calls a request.
const REQUEST_ID: &str = "x-request-id";
/// Characters that are kept of what a client says of itself.
const LONGEST: usize = 200;

/// How a call came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Protocol {
    Grpc,
    GrpcWeb,
    Connect,
    Rest,
    /// Server-sent events.
    Sse,
    /// The operator protocol's lines as they are.
    Operator,
    /// The same over a WebSocket.
    WebSocket,
}

impl Protocol {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::GrpcWeb => "grpc-web",
            Self::Connect => "connect",
            Self::Rest => "rest",
            Self::Sse => "sse",
            Self::Operator => "operator",
            Self::WebSocket => "websocket",
        }
    }

    /// Whether it speaks the operator protocol.
    pub(crate) const fn is_operator(self) -> bool {
        matches!(self, Self::Operator | Self::WebSocket)
    }
}

/// Who is known to call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Known {
    pub(crate) organization: OrganizationId,
    pub(crate) user: UserId,
    pub(crate) key: Option<ApiKeyId>,
}

impl From<&Caller> for Known {
    fn from(caller: &Caller) -> Self {
        Self { organization: caller.organization, user: caller.user, key: caller.key }
    }
}

/// What a request says of where it comes from. Texts are made of it only when there is an entry to
/// write.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) protocol: Protocol,
    pub(crate) peer: Peer,
    user_agent: Option<HeaderValue>,
    request_id: Option<HeaderValue>,
}

impl Origin {
    pub(crate) fn of<B>(request: &Request<B>) -> Self {
        let (headers, extensions) = (request.headers(), request.extensions());
        Self {
            // A protocol says who it is; what comes straight to the services is gRPC.
            protocol: extensions.get::<Protocol>().copied().unwrap_or(Protocol::Grpc),
            peer: Peer::of(extensions),
            user_agent: headers.get(header::USER_AGENT).cloned(),
            request_id: headers.get(REQUEST_ID).cloned(),
        }
    }

    /// An entry for one call that begins now. What nobody is known to have done is in the
    /// operator's trail.
    pub(crate) fn entry(&self, method: &str, known: Option<Known>, code: Code) -> AuditEntry {
        AuditEntry {
            id: AuditEntryId::from_uuid(Uuid::now_v7()),
            organization: known.map_or(OrganizationId::LOCAL, |known| known.organization),
            user: known.map(|known| known.user),
            api_key: known.and_then(|known| known.key),
            method: method.to_owned(),
            protocol: self.protocol.as_str().to_owned(),
            peer: self.peer.to_string(),
            user_agent: text(self.user_agent.as_ref()),
            objects: Vec::new(),
            code: number(code),
            count: 1,
            request_id: text(self.request_id.as_ref()),
            trace_id: trace(),
            created_at: clock::now(),
        }
    }
}

/// A code as entries have it.
pub(crate) fn number(code: Code) -> u8 {
    // There are 17.
    u8::try_from(i32::from(code)).unwrap_or(2)
}

/// What a header says, as far as it is shown.
fn text(value: Option<&HeaderValue>) -> String {
    let value = value.and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.chars().take(LONGEST).collect()
}

/// The trace that the current span belongs to, where one is recorded.
fn trace() -> String {
    let context = tracing::Span::current().context();
    let context = context.span().span_context().clone();
    if context.is_valid() { context.trace_id().to_string() } else { String::new() }
}
