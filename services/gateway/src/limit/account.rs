//! What one request is charged for, and whom.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use construct_domain::OrganizationId;
use tonic::Status;

use super::{
    Capacity, Holder, Limit, Share,
    capacity::{ANONYMOUS_BODY, ANONYMOUS_BODY_TIMEOUT, BODY_PAUSE, SMALLEST_BODY},
    connection::Connection,
};
use crate::status;

/// The account of one request, or of one connection of the operator protocol. Goes with the request
/// among its extensions; clones are the same. Until it is known who calls, the network is charged.
#[derive(Clone)]
pub(crate) struct Account(Arc<Inner>);

struct Inner {
    capacity: Arc<Capacity>,
    connection: Arc<Connection>,
    network: Holder,
    /// The request is a stream without an end.
    is_endless: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    organization: Option<OrganizationId>,
    anonymous: Option<Share>,
    /// Bytes of the body that have come.
    received: usize,
    body: Option<Share>,
}

/// How long a request's body may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyTimeout {
    None,
    /// From the request's beginning to the end of the body.
    Total(Duration),
    /// From one part of it to the next.
    Pause(Duration),
}

impl Account {
    pub(crate) fn new(
        capacity: Arc<Capacity>,
        connection: Arc<Connection>,
        network: Holder,
        is_endless: bool,
    ) -> Self {
        Self(Arc::new(Inner { capacity, connection, network, is_endless, state: Mutex::default() }))
    }

    /// Whom the request is charged to.
    pub(crate) fn holder(&self) -> Holder {
        self.state().organization.map_or(self.0.network, Holder::Organization)
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.0.connection
    }

    /// Charges an organization from now on: its credentials were accepted.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when it leaves too many answers unread.
    pub(crate) fn identify(&self, organization: OrganizationId) -> Result<(), Status> {
        let mut state = self.state();
        state.organization = Some(organization);
        state.anonymous = None;
        drop(state);
        self.0.connection.identify();
        let holder = Holder::Organization(organization);
        self.0
            .capacity
            .answers
            .has_room(holder, 1)
            .map_err(|full| full.status("answers that are not read"))
    }

    /// Counts an anonymous request until [`Account::release`]. To be called before its body is
    /// read.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when there are too many.
    pub(crate) fn enter_anonymous(&self) -> Result<(), Status> {
        let mut state = self.state();
        if state.organization.is_none() && state.anonymous.is_none() {
            let share = self.0.capacity.anonymous.take(self.0.network, 1);
            state.anonymous =
                Some(share.map_err(|full| full.status("requests without credentials"))?);
        }
        Ok(())
    }

    /// A place for a request whose body is there and has to be translated. An anonymous request has
    /// one already.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when there are too many.
    pub(crate) fn transcode(&self) -> Result<Option<Share>, Status> {
        let Some(organization) = self.state().organization else { return Ok(None) };
        let share = self.0.capacity.transcoded.take(Holder::Organization(organization), 1);
        share.map(Some).map_err(|full| full.status("requests"))
    }

    /// Charges for bytes of the request's body that have come.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when the body is larger than it may be, or there is no room for it.
    pub(crate) fn receive(&self, bytes: usize) -> Result<(), Status> {
        let mut guard = self.state();
        let state = &mut *guard;
        state.received += bytes;
        let Some(organization) = state.organization else {
            // There are few such requests, so that their bodies need not be counted together. The
            // messages of an endless stream are limited one by one, where they are decoded.
            let fits = self.0.is_endless || state.received <= ANONYMOUS_BODY;
            return if fits { Ok(()) } else { Err(status::too_large(ANONYMOUS_BODY)) };
        };
        let charged = match &mut state.body {
            Some(share) => share.grow(bytes),
            body @ None => {
                let holder = Holder::Organization(organization);
                self.0
                    .capacity
                    .bodies
                    .take(holder, bytes.max(SMALLEST_BODY))
                    .map(|share| *body = Some(share))
            }
        };
        charged.map_err(|full| full.status("request bodies"))
    }

    /// Gives back bytes of the body that are not held any more.
    pub(crate) fn consume(&self, bytes: usize) {
        let mut state = self.state();
        state.received = state.received.saturating_sub(bytes);
        if let Some(share) = &mut state.body {
            share.shrink(bytes);
        }
    }

    pub(crate) fn body_timeout(&self) -> BodyTimeout {
        match self.state().organization {
            _ if self.0.is_endless => BodyTimeout::None,
            None => BodyTimeout::Total(ANONYMOUS_BODY_TIMEOUT),
            Some(_) => BodyTimeout::Pause(BODY_PAUSE),
        }
    }

    /// Charges for bytes of an answer that are there.
    pub(crate) fn answer(&self, bytes: usize) -> Share {
        self.answers().charge(self.holder(), bytes)
    }

    /// Waits until there is room for so many bytes of answers. Whoever calls this limits how long.
    pub(crate) async fn wait_for_answer(&self, bytes: usize) -> Share {
        self.answers().wait(self.holder(), bytes).await
    }

    /// Whether there is room for so many bytes of answers.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(crate) fn check_answer(&self, bytes: usize) -> Result<(), Status> {
        let room = self.answers().has_room(self.holder(), bytes);
        room.map_err(|full| full.status("answers that are not read"))
    }

    fn answers(&self) -> &Limit {
        match self.state().organization {
            Some(_) => &self.0.capacity.answers,
            None => &self.0.capacity.anonymous_answers,
        }
    }

    /// The request is answered: what it was given is free.
    pub(crate) fn release(&self) {
        let mut state = self.state();
        state.anonymous = None;
        state.body = None;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Account").field("holder", &self.holder()).finish_non_exhaustive()
    }
}
