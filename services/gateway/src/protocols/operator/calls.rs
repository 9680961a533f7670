//! The gRPC services, for one connection.

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
    identity::peer::{Forwarded, Peer},
    limit::{Account, connection::Connection},
    protocols::{
        ProtocolLayer, Shared, TIMEOUT,
        call::{self, Answers, Call},
        methods::Method,
        outbound::SMALL,
    },
    quotas::Metered,
    subscribe::cursor::Cursor,
};

/// Calls on behalf of whoever is at the other end of a connection.
#[derive(Clone)]
pub(super) struct Calls {
    shared: Arc<Shared>,
    caller: Parts,
    /// Whom the connection is charged to.
    account: Account,
    /// What was left of the caller's quotas when something was answered last.
    left: Arc<Mutex<Metered>>,
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
        Self { shared, caller, account, left: Arc::default() }
    }

    /// Says where the connection comes from. What is left is told on each connection as it was
    /// there.
    pub(super) fn with_peer(mut self, peer: TcpConnectInfo) -> Self {
        self.left = Arc::default();
        self.caller.extensions.insert(peer);
        self
    }

    /// Charges a connection that was accepted, and whoever is at its other end, from now on. To be
    /// called when it is known where it comes from.
    pub(super) fn charge(&mut self, connection: Arc<Connection>) {
        let (peer, capacity) =
            (Peer::of(&self.caller.extensions), Arc::clone(self.shared.api.capacity()));
        self.account = Account::new(capacity, connection, peer.into(), false);
        self.caller.extensions.insert(self.account.clone());
        // Whoever is on this machine is known at once.
        if !self.caller.headers.contains_key(header::AUTHORIZATION)
            && self.shared.api.gate().trusts(peer)
        {
            // Has room: nothing was sent yet. If not, its calls are refused.
            _ = self.account.identify(OrganizationId::LOCAL);
        }
    }

    pub(super) fn account(&self) -> &Account {
        &self.account
    }

    /// Takes over what the request for a WebSocket said of its caller. Tells for whom it is, when a
    /// trusted proxy passes it on.
    pub(super) fn identify_as(&mut self, headers: &HeaderMap) -> Option<Forwarded> {
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

    /// From now on calls are made with a key, and for an organization.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` when the key has characters that no key has.
    pub(super) fn identify(&mut self, key: &str, organization: Option<&str>) -> Result<(), Status> {
        let value = |text: &str| {
            let value = HeaderValue::from_str(text);
            value.map_err(|_| Status::unauthenticated("this is not a key, or not an organization"))
        };
        let mut key = value(&format!("Bearer {key}"))?;
        key.set_sensitive(true);
        let organization = organization.map(value).transpose()?;
        // What is left to another caller is not theirs to know.
        self.left = Arc::default();
        self.caller.headers.insert(header::AUTHORIZATION, key);
        match organization {
            Some(organization) => self.caller.headers.insert("x-organization-id", organization),
            // One of an earlier log-in is not this one's.
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

    /// The same, and whether the answer was given before: then nothing was done this time.
    pub(super) async fn write<A: Message + Default>(
        &self,
        method: &'static str,
        request: &impl Message,
    ) -> Result<(A, bool), Status> {
        let (method, deadline) = (self.method(method)?, Deadline::new(None, TIMEOUT));
        let (head, message) = (self.head(deadline), request.encode_to_vec());
        let call = Call { method, head: &head };
        let reply = deadline.begin(call.unary(self.shared.services()?, &message)).await?;
        self.note(reply.metered);
        if reply.message.len() > SMALL {
            self.account.check_answer(reply.message.len())?;
        }
        let answer = A::decode(reply.message);
        let answer =
            answer.map_err(|error| crate::status::internal("an answer cannot be read", &error))?;
        Ok((answer, reply.repeated))
    }

    /// What happens in a task. Without a cursor: from now on, also what the caller does next.
    pub(super) async fn subscribe(&self, task: &str, cursor: &str) -> Result<Watch, Status> {
        let request = v1::SubscribeRequest {
            task: task.to_owned(),
            cursor: cursor.to_owned(),
            types: Vec::new(),
        };
        let body = call::one(&request.encode_to_vec());
        let (method, deadline) =
            (self.method("EventService/Subscribe")?, Deadline::new(None, TIMEOUT));
        let head = self.head(deadline);
        let call = Call { method, head: &head };
        let mut answers = deadline.begin(call.open(self.shared.services()?, body)).await?;
        self.note(std::mem::take(&mut answers.metered));
        Ok(Watch { answers, told: None })
    }

    /// What happens in a task behind a cursor. The step in which that stands is seen from its
    /// beginning: how its pieces go on depends on those before.
    pub(super) async fn resume(&self, task: &str, cursor: &str) -> Result<Watch, Status> {
        // What is no cursor is refused as it stands.
        let told = cursor.parse::<Cursor>().ok();
        let from =
            told.map_or_else(|| cursor.to_owned(), |told| Cursor { index: 0, ..told }.to_string());
        Ok(Watch { told, ..self.subscribe(task, &from).await? })
    }

    /// Says in a line what is left of the caller's quotas.
    pub(super) fn tell_left(&self, line: &mut Value) {
        answer::tell_left(line, &self.left.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn note(&self, metered: Metered) {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = metered;
    }

    fn method(&self, method: &'static str) -> Result<&Method, Status> {
        let found = self.shared.methods.get(&format!("/construct.v1.{method}"));
        found.ok_or_else(|| Status::unimplemented("there is no such method"))
    }

    /// Who calls, and until when that must be answered.
    fn head(&self, deadline: Deadline) -> Parts {
        let mut head = self.caller.clone();
        head.extensions.insert(deadline);
        head
    }
}

/// The events of a task.
pub(super) struct Watch {
    answers: Answers,
    /// Up to where the client has them.
    told: Option<Cursor>,
}

impl Watch {
    /// The next event; none when there will be no more.
    pub(super) async fn next(&mut self) -> Result<Option<v1::Event>, Status> {
        let Some(message) = self.answers.next().await? else { return Ok(None) };
        let event = v1::Event::decode(message);
        let mut event =
            event.map_err(|error| crate::status::internal("an event cannot be read", &error))?;
        if let Some(told) = &self.told
            && let Ok(mut cursor) = event.cursor.parse::<Cursor>()
            && told.is_past(cursor.step, cursor.index)
        {
            // A record that comes before what is seen once more: who goes on behind it has that all
            // the same.
            (cursor.step, cursor.index) = (told.step, told.index);
            event.cursor = cursor.to_string();
        }
        Ok(Some(event))
    }

    /// Whether the client has an event already.
    pub(super) fn has_told(&self, event: &v1::Event) -> bool {
        event.sequence == 0 && self.told.is_some_and(|told| told.is_past(event.step, event.index))
    }
}
