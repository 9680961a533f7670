//! The origin of a call, for its audit entry.

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

/// The client's id of a request.
const REQUEST_ID: &str = "x-request-id";
/// Maximum characters of a header in an entry.
const MAX_HEADER_CHARS: usize = 200;

/// The protocol of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Protocol {
    Grpc,
    GrpcWeb,
    Connect,
    Rest,
    /// Server-sent events.
    Sse,
    /// The lines of the operator protocol.
    Operator,
    /// The operator protocol over a WebSocket.
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

    /// Whether it is the operator protocol.
    pub(crate) const fn is_operator(self) -> bool {
        matches!(self, Self::Operator | Self::WebSocket)
    }
}

/// An identified caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CallerIdentity {
    pub(crate) organization: OrganizationId,
    pub(crate) user: UserId,
    pub(crate) key: Option<ApiKeyId>,
}

impl From<&Caller> for CallerIdentity {
    fn from(caller: &Caller) -> Self {
        Self { organization: caller.organization, user: caller.user, key: caller.key }
    }
}

/// The origin of a request. It is formatted only when there is an entry to write.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) protocol: Protocol,
    pub(crate) peer: Peer,
    user_agent: Option<HeaderValue>,
    request_id: Option<HeaderValue>,
}

impl Origin {
    pub(crate) fn from_request<B>(request: &Request<B>) -> Self {
        let (headers, extensions) = (request.headers(), request.extensions());
        Self {
            // Protocols set themselves; requests that reach the services directly are gRPC.
            protocol: extensions.get::<Protocol>().copied().unwrap_or(Protocol::Grpc),
            peer: Peer::from_extensions(extensions),
            user_agent: headers.get(header::USER_AGENT).cloned(),
            request_id: headers.get(REQUEST_ID).cloned(),
        }
    }

    /// Creates an entry for one call that starts now. Calls of unknown callers belong to the
    /// operator's organization.
    pub(crate) fn entry(
        &self,
        method: &str,
        known: Option<CallerIdentity>,
        code: Code,
    ) -> AuditEntry {
        AuditEntry {
            id: AuditEntryId::from_uuid(Uuid::now_v7()),
            organization: known.map_or(OrganizationId::LOCAL, |known| known.organization),
            user: known.map(|known| known.user),
            api_key: known.and_then(|known| known.key),
            method: method.to_owned(),
            protocol: self.protocol.as_str().to_owned(),
            peer: self.peer.to_string(),
            user_agent: header_text(self.user_agent.as_ref()),
            objects: Vec::new(),
            code: code_number(code),
            count: 1,
            request_id: header_text(self.request_id.as_ref()),
            trace_id: trace_id(),
            created_at: clock::now(),
        }
    }
}

/// The number of a code in entries.
pub(crate) fn code_number(code: Code) -> u8 {
    // There are 17 codes.
    u8::try_from(i32::from(code)).unwrap_or(2)
}

/// The text of a header, truncated.
fn header_text(value: Option<&HeaderValue>) -> String {
    let value = value.and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.chars().take(MAX_HEADER_CHARS).collect()
}

/// The trace of the current span, if it is sampled.
fn trace_id() -> String {
    let context = tracing::Span::current().context();
    let context = context.span().span_context().clone();
    if context.is_valid() { context.trace_id().to_string() } else { String::new() }
}
