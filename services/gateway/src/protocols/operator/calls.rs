//! Calls of the gRPC services for one connection.

use std::sync::{Arc, Mutex, PoisonError};

use construct_domain::OrganizationId;
use construct_proto::v1;
use prost::Message;
use serde_json::Value;
use tonic::{
    Status,
    codegen::http::{HeaderMap, HeaderName, HeaderValue, Request, header, request::Parts},
    transport::server::TcpConnectInfo,
};

use super::answer;
use crate::{
    audit::origin::Protocol,
    deadline::Deadline,
    identity::peer::{ForwardedClient, Peer},
    limit::{Account, connection::Connection},
    protocols::{
        ProtocolLayer, Shared, TIMEOUT,
        call::{self, Answers, Call},
        methods::Method,
        outbound::ALWAYS_ALLOWED_BYTES,
    },
    quotas::QuotaStates,
    subscribe::cursor::Cursor,
};

/// Makes calls on behalf of the client of a connection.
#[derive(Clone)]
pub(super) struct Calls {
    shared: Arc<Shared>,
    caller: Parts,
    /// The account that the connection is charged to.
    account: Account,
    /// The caller's remaining quotas as of the last response.
    remaining_quotas: Arc<Mutex<QuotaStates>>,
}

impl Calls {
    pub(super) fn new(protocols: &ProtocolLayer) -> Self {
        let mut caller = Request::new(()).into_parts().0;
        caller.extensions.insert(Protocol::Operator);
        let shared = Arc::clone(&protocols.shared);
        let account = Account::new(
            Arc::clone(shared.api.capacity()),
            Connection::uncounted(),
            Peer::Unknown.into(),
            false,
        );
        Self { shared, caller, account, remaining_quotas: Arc::default() }
    }

    /// Sets the peer of the connection. Each connection reports its own remaining quotas.
    pub(super) fn with_peer(mut self, peer: TcpConnectInfo) -> Self {
        self.remaining_quotas = Arc::default();
        self.caller.extensions.insert(peer);
        self
    }

    /// Charges an accepted connection and its client from now on. To be called once the peer is
    /// known.
    pub(super) fn charge(&mut self, connection: Arc<Connection>) {
        let (peer, capacity) = (
            Peer::from_extensions(&self.caller.extensions),
            Arc::clone(self.shared.api.capacity()),
        );
        self.account = Account::new(capacity, connection, peer.into(), false);
        self.caller.extensions.insert(self.account.clone());
        // A local peer is authenticated at once.
        if !self.caller.headers.contains_key(header::AUTHORIZATION)
            && self.shared.api.gate().trusts(peer)
        {
            // There is room, because nothing was sent yet. Otherwise its calls are refused.
            _ = self.account.identify(OrganizationId::LOCAL);
        }
    }

    pub(super) fn account(&self) -> &Account {
        &self.account
    }

    /// Adopts the headers of a WebSocket request that identify the caller. Returns the client that
    /// a trusted proxy names.
    pub(super) fn adopt_headers(&mut self, headers: &HeaderMap) -> Option<ForwardedClient> {
        self.caller.extensions.insert(Protocol::WebSocket);
        let client = self.shared.proxies.client(&self.caller.extensions, headers);
        if let Some(client) = client {
            self.caller.extensions.insert(client);
        }
        for name in [
            header::AUTHORIZATION,
            header::USER_AGENT,
            HeaderName::from_static("x-organization-id"),
        ] {
            if let Some(value) = headers.get(&name) {
                self.caller.headers.insert(name, value.clone());
            }
        }
        client
    }

    /// Makes later calls with a key, and for an organization.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` when the key has characters that no key has.
    pub(super) fn identify(&mut self, key: &str, organization: Option<&str>) -> Result<(), Status> {
        let value = |text: &str| {
            let value = HeaderValue::from_str(text);
            value.map_err(|_| Status::unauthenticated("invalid key or organization"))
        };
        let mut key = value(&format!("Bearer {key}"))?;
        key.set_sensitive(true);
        let organization = organization.map(value).transpose()?;
        // Other callers must not see the remaining quotas.
        self.remaining_quotas = Arc::default();
        self.caller.headers.insert(header::AUTHORIZATION, key);
        match organization {
            Some(organization) => self.caller.headers.insert("x-organization-id", organization),
            // The organization of an earlier log-in does not apply.
            None => self.caller.headers.remove("x-organization-id"),
        };
        Ok(())
    }

    /// Calls `Service/Method` of `construct.v1`.
    pub(super) async fn unary<A: Message + Default>(
        &self,
        method: &'static str,
        request: &impl Message,
    ) -> Result<A, Status> {
        Ok(self.write(method, request).await?.0)
    }

    /// Like [`Self::unary`]; also returns whether the response is a stored one, so that this call
    /// did nothing.
    pub(super) async fn write<A: Message + Default>(
        &self,
        method: &'static str,
        request: &impl Message,
    ) -> Result<(A, bool), Status> {
        let (method, deadline) = (self.method(method)?, Deadline::new(None, TIMEOUT));
        let (head, message) = (self.head(deadline), request.encode_to_vec());
        let call = Call { method, head: &head };
        let reply = deadline.begin(call.unary(self.shared.services()?, &message)).await?;
        self.record_quotas(reply.metered);
        if reply.message.len() > ALWAYS_ALLOWED_BYTES {
            self.account.check_answer(reply.message.len())?;
        }
        let answer = A::decode(reply.message);
        let answer =
            answer.map_err(|error| crate::status::internal("an answer cannot be read", &error))?;
        Ok((answer, reply.repeated))
    }

    /// Subscribes to the events of a task. Without a cursor it begins now, and includes the
    /// caller's next actions.
    pub(super) async fn subscribe(&self, task: &str, cursor: &str) -> Result<Watch, Status> {
        let request = v1::SubscribeRequest {
            task: task.to_owned(),
            cursor: cursor.to_owned(),
            types: Vec::new(),
        };
        let body = call::unary_body(&request.encode_to_vec());
        let (method, deadline) =
            (self.method("EventService/Subscribe")?, Deadline::new(None, TIMEOUT));
        let head = self.head(deadline);
        let call = Call { method, head: &head };
        let mut answers = deadline.begin(call.open(self.shared.services()?, body)).await?;
        self.record_quotas(std::mem::take(&mut answers.metered));
        Ok(Watch { answers, delivered: None })
    }

    /// Resumes the events of a task after a cursor. The cursor's step is replayed from its
    /// beginning, because its pieces depend on the earlier ones.
    pub(super) async fn resume(&self, task: &str, cursor: &str) -> Result<Watch, Status> {
        // An invalid cursor is passed on, and refused by the service.
        let delivered = cursor.parse::<Cursor>().ok();
        let from = delivered.map_or_else(
            || cursor.to_owned(),
            |delivered| Cursor { index: 0, ..delivered }.to_string(),
        );
        Ok(Watch { delivered, ..self.subscribe(task, &from).await? })
    }

    /// Adds the caller's remaining quotas to a line.
    pub(super) fn add_quotas(&self, line: &mut Value) {
        answer::add_quotas(
            line,
            &self.remaining_quotas.lock().unwrap_or_else(PoisonError::into_inner),
        );
    }

    fn record_quotas(&self, metered: QuotaStates) {
        *self.remaining_quotas.lock().unwrap_or_else(PoisonError::into_inner) = metered;
    }

    fn method(&self, method: &'static str) -> Result<&Method, Status> {
        let descriptor = self.shared.methods.get(&format!("/construct.v1.{method}"));
        descriptor.ok_or_else(|| Status::unimplemented("unknown method"))
    }

    /// The head of a call: its caller and deadline.
    fn head(&self, deadline: Deadline) -> Parts {
        let mut head = self.caller.clone();
        head.extensions.insert(deadline);
        head
    }
}

/// The events of a task.
pub(super) struct Watch {
    answers: Answers,
    /// The position up to which the client has the events.
    delivered: Option<Cursor>,
}

impl Watch {
    /// The next event; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<v1::Event>, Status> {
        let Some(message) = self.answers.next().await? else { return Ok(None) };
        let event = v1::Event::decode(message);
        let mut event =
            event.map_err(|error| crate::status::internal("an event cannot be read", &error))?;
        if let Some(delivered) = &self.delivered
            && let Ok(mut cursor) = event.cursor.parse::<Cursor>()
            && delivered.is_past(cursor.step, cursor.index)
        {
            // A record before the replayed part keeps the client's position as its cursor: a client
            // that resumes after it has that part already.
            (cursor.step, cursor.index) = (delivered.step, delivered.index);
            event.cursor = cursor.to_string();
        }
        Ok(Some(event))
    }

    /// Whether the client already has an event.
    pub(super) fn is_delivered(&self, event: &v1::Event) -> bool {
        event.sequence == 0
            && self.delivered.is_some_and(|delivered| delivered.is_past(event.step, event.index))
    }
}
