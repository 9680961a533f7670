//! The account of one request: its holder and its permits.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use construct_domain::OrganizationId;
use tonic::Status;

use super::{
    Capacity, Holder, Limit, Permit,
    capacity::{
        ANONYMOUS_BODY_TIMEOUT, BODY_PART_TIMEOUT, MAX_ANONYMOUS_BODY_BYTES, MIN_BODY_CHARGE_BYTES,
    },
    connection::Connection,
};
use crate::status;

/// The account of one request, or of one connection of the operator protocol. A request extension;
/// clones share it. Until the caller is authenticated, its network is charged.
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
    anonymous: Option<Permit>,
    /// Bytes received of the body.
    received: usize,
    body: Option<Permit>,
}

/// The timeout of a request's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyTimeout {
    None,
    /// From the start of the request to the end of the body.
    Total(Duration),
    /// From one part of the body to the next.
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

    /// The holder that the request is charged to.
    pub(crate) fn holder(&self) -> Holder {
        self.state().organization.map_or(self.0.network, Holder::Organization)
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.0.connection
    }

    /// Charges an authenticated organization from now on.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when it has too many unread responses.
    pub(crate) fn identify(&self, organization: OrganizationId) -> Result<(), Status> {
        let mut state = self.state();
        state.organization = Some(organization);
        state.anonymous = None;
        drop(state);
        self.0.connection.identify();
        let holder = Holder::Organization(organization);
        self.0.capacity.answers.has_room(holder, 1).map_err(|full| full.status("unread responses"))
    }

    /// Counts an anonymous request until [`Account::release`]. Called before its body is read.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when there are too many.
    pub(crate) fn enter_anonymous(&self) -> Result<(), Status> {
        let mut state = self.state();
        if state.organization.is_none() && state.anonymous.is_none() {
            let permit = self.0.capacity.anonymous.acquire(self.0.network, 1);
            state.anonymous =
                Some(permit.map_err(|full| full.status("requests without credentials"))?);
        }
        Ok(())
    }

    /// Acquires a permit for a request with a complete body that must be transcoded. An anonymous
    /// request has a permit already.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when there are too many.
    pub(crate) fn transcode(&self) -> Result<Option<Permit>, Status> {
        let Some(organization) = self.state().organization else { return Ok(None) };
        let permit = self.0.capacity.transcoded.acquire(Holder::Organization(organization), 1);
        permit.map(Some).map_err(|full| full.status("requests"))
    }

    /// Charges for received bytes of the request's body.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when the body is too large, or the limit of bodies is reached.
    pub(crate) fn receive(&self, bytes: usize) -> Result<(), Status> {
        let mut guard = self.state();
        let state = &mut *guard;
        state.received += bytes;
        let Some(organization) = state.organization else {
            // The number of such requests is limited, so their bodies are not counted in total. The
            // messages of an endless stream are limited one by one by their decoder.
            let fits = self.0.is_endless || state.received <= MAX_ANONYMOUS_BODY_BYTES;
            return if fits { Ok(()) } else { Err(status::too_large(MAX_ANONYMOUS_BODY_BYTES)) };
        };
        let charged = match &mut state.body {
            Some(permit) => permit.grow(bytes),
            body @ None => {
                let holder = Holder::Organization(organization);
                self.0
                    .capacity
                    .bodies
                    .acquire(holder, bytes.max(MIN_BODY_CHARGE_BYTES))
                    .map(|permit| *body = Some(permit))
            }
        };
        charged.map_err(|full| full.status("request bodies"))
    }

    /// Returns bytes of the body that are no longer in memory.
    pub(crate) fn consume(&self, bytes: usize) {
        let mut state = self.state();
        state.received = state.received.saturating_sub(bytes);
        if let Some(permit) = &mut state.body {
            permit.shrink(bytes);
        }
    }

    pub(crate) fn body_timeout(&self) -> BodyTimeout {
        match self.state().organization {
            _ if self.0.is_endless => BodyTimeout::None,
            None => BodyTimeout::Total(ANONYMOUS_BODY_TIMEOUT),
            Some(_) => BodyTimeout::Pause(BODY_PART_TIMEOUT),
        }
    }

    /// Charges for bytes of a response in memory.
    pub(crate) fn answer(&self, bytes: usize) -> Permit {
        self.answers().charge(self.holder(), bytes)
    }

    /// Waits until this many bytes of responses can be charged. The caller sets a timeout.
    pub(crate) async fn wait_for_answer(&self, bytes: usize) -> Permit {
        self.answers().wait(self.holder(), bytes).await
    }

    /// Whether this many bytes of responses can be charged.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(crate) fn check_answer(&self, bytes: usize) -> Result<(), Status> {
        let room = self.answers().has_room(self.holder(), bytes);
        room.map_err(|full| full.status("unread responses"))
    }

    fn answers(&self) -> &Limit {
        match self.state().organization {
            Some(_) => &self.0.capacity.answers,
            None => &self.0.capacity.anonymous_answers,
        }
    }

    /// The response is complete: the permits of the request are returned.
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
