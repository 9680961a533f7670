//! One connection: whether its client is authenticated, and whether it reads.

use std::{
    collections::HashMap,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use super::{Account, Holder, Limit, LimitReached, Permit, UNREAD_TIMEOUT};

/// How long a connection without an authenticated client may be idle.
const NEW_CONNECTION_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The connections of a port. Clones share the limits.
///
/// A connection is new until credentials are accepted on it. New connections have their own small
/// limit, so that clients without credentials cannot use up the connections of others.
#[derive(Debug, Clone)]
pub(crate) struct Connections {
    unauthenticated: Limit,
    known: Limit,
}

impl Connections {
    pub(crate) const fn new(unauthenticated: Limit, known: Limit) -> Self {
        Self { unauthenticated, known }
    }

    /// Acquires a slot for a connection from a network.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn accept(&self, network: Holder) -> Result<Arc<Connection>, LimitReached> {
        let permit = self.unauthenticated.acquire(network, 1)?;
        let slot = Slot { network, known: self.known.clone(), permit, is_known: false };
        Ok(Arc::new(Connection { state: Mutex::new(State { slot: Some(slot), ..State::new() }) }))
    }
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None`: the connection is not counted.
    slot: Option<Slot>,
    /// Requests and responses in progress.
    in_progress: usize,
    idle_since: Instant,
    next_answer: u64,
    /// Responses that wait for their client to read, with the start of the wait.
    unread: HashMap<u64, Instant>,
}

impl State {
    fn new() -> Self {
        Self {
            slot: None,
            in_progress: 0,
            idle_since: Instant::now(),
            next_answer: 0,
            unread: HashMap::new(),
        }
    }
}

#[derive(Debug)]
struct Slot {
    network: Holder,
    known: Limit,
    permit: Permit,
    is_known: bool,
}

impl Connection {
    /// A connection without a limit, such as that of a process of the same user.
    pub(crate) fn uncounted() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::new()) })
    }

    /// Records that credentials were accepted: the connection is no longer new. It stays new while
    /// the limit for authenticated ones is reached.
    pub(crate) fn identify(&self) {
        if let Some(slot) = &mut self.state().slot
            && !slot.is_known
            && let Ok(permit) = slot.known.acquire(slot.network, 1)
        {
            slot.permit = permit;
            slot.is_known = true;
        }
    }

    /// Counts a request until the returned value is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> InProgress {
        self.state().in_progress += 1;
        InProgress(Arc::clone(self))
    }

    /// Tracks a response until it and all its parts are dropped.
    pub(crate) fn answer(self: &Arc<Self>, account: &Account) -> Arc<Answer> {
        let in_progress = self.begin();
        let mut state = self.state();
        let id = state.next_answer;
        state.next_answer += 1;
        state.unread.insert(id, Instant::now());
        drop(state);
        Arc::new(Answer {
            in_progress,
            id,
            state: Mutex::new(AnswerState { permit: account.answer(0), is_waiting: false }),
        })
    }

    /// Why the connection must be closed, if it must.
    pub(crate) fn misuse(&self) -> Option<&'static str> {
        let state = self.state();
        if state.unread.values().any(|since| since.elapsed() >= UNREAD_TIMEOUT) {
            return Some("the client does not read its responses");
        }
        let is_new = state.slot.as_ref().is_some_and(|slot| !slot.is_known);
        if is_new
            && state.in_progress == 0
            && state.idle_since.elapsed() >= NEW_CONNECTION_IDLE_TIMEOUT
        {
            return Some("the client is not authenticated and idle");
        }
        None
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request or response in progress on a connection, until it is dropped.
#[derive(Debug)]
pub(crate) struct InProgress(Arc<Connection>);

impl Drop for InProgress {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.in_progress -= 1;
        state.idle_since = Instant::now();
    }
}

/// A response on its way to a client: its bytes in memory, and since when the client has not read.
#[derive(Debug)]
pub(crate) struct Answer {
    in_progress: InProgress,
    id: u64,
    state: Mutex<AnswerState>,
}

#[derive(Debug)]
struct AnswerState {
    permit: Permit,
    /// There is nothing more to send at the moment.
    is_waiting: bool,
}

impl Answer {
    /// Charges for more bytes.
    pub(crate) fn add(&self, bytes: usize) {
        let mut state = self.state();
        state.is_waiting = false;
        state.permit.add(bytes);
        self.read_at(Some(Instant::now()));
    }

    /// Records that there is nothing more to send at the moment: the client need not read.
    pub(crate) fn wait(&self) {
        let mut state = self.state();
        state.is_waiting = true;
        if state.permit.amount() == 0 {
            self.read_at(None);
        }
    }

    /// A part of the charged bytes, for the connection. Dropping it, when the client has read it,
    /// returns the bytes.
    pub(crate) fn part(self: &Arc<Self>, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Part { bytes, answer: Arc::clone(self) })
    }

    fn release(&self, bytes: usize) {
        let mut state = self.state();
        state.permit.shrink(bytes);
        self.read_at((!state.is_waiting || state.permit.amount() > 0).then(Instant::now));
    }

    fn read_at(&self, time: Option<Instant>) {
        let mut state = self.in_progress.0.state();
        match time {
            Some(time) => _ = state.unread.insert(self.id, time),
            None => _ = state.unread.remove(&self.id),
        }
    }

    fn state(&self) -> MutexGuard<'_, AnswerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.read_at(None);
    }
}

struct Part {
    bytes: Bytes,
    answer: Arc<Answer>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let bytes = mem::take(&mut self.bytes);
        self.answer.release(bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use construct_domain::OrganizationId;
    use uuid::Uuid;

    use super::*;
    use crate::{Config, limit::Capacity};

    fn connections(unauthenticated: usize) -> Connections {
        Connections::new(Limit::new(unauthenticated, unauthenticated), Limit::new(1, 1))
    }

    fn network() -> Holder {
        Holder::network(Some(IpAddr::from([192, 0, 2, 1])))
    }

    /// An authenticated connection, a response on it, and the limits that it is charged to.
    fn answer() -> (Arc<Connection>, Arc<Answer>, Arc<Capacity>) {
        let (connection, capacity) =
            (Connection::uncounted(), Arc::new(Capacity::new(&Config::default())));
        let account =
            Account::new(Arc::clone(&capacity), Arc::clone(&connection), Holder::Shared, false);
        account
            .identify(OrganizationId::from_uuid(Uuid::from_u128(1)))
            .expect("no unread responses");
        let answer = connection.answer(&account);
        (connection, answer, capacity)
    }

    async fn pass(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn authenticated_connection_frees_its_slot() {
        let connections = connections(1);
        let first = connections.accept(network()).expect("a slot");
        assert!(connections.accept(network()).is_err());
        first.identify();
        let second = connections.accept(network()).expect("a free slot");
        // The limit for authenticated connections is reached: it stays new.
        second.identify();
        assert!(connections.accept(network()).is_err());
        drop(first);
        second.identify();
        assert!(connections.accept(network()).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn new_connection_is_closed_when_idle() {
        let connection = connections(1).accept(network()).expect("a slot");
        pass(29).await;
        assert_eq!(connection.misuse(), None);
        let in_progress = connection.begin();
        pass(60).await;
        assert_eq!(connection.misuse(), None, "it waits for a response");
        drop(in_progress);
        pass(30).await;
        assert!(connection.misuse().is_some());
        connection.identify();
        assert_eq!(connection.misuse(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn unread_response_is_charged_and_closes_the_connection() {
        let (connection, answer, capacity) = answer();
        answer.add(25 << 20);
        let parts = [
            answer.part(Bytes::from(vec![0; 15 << 20])),
            answer.part(Bytes::from(vec![0; 10 << 20])),
        ];
        let organization = Holder::Organization(OrganizationId::from_uuid(Uuid::from_u128(1)));
        assert!(
            capacity.answers.has_room(organization, 1).is_err(),
            "the organization exceeds its maximum"
        );
        let [first, second] = parts;
        pass(29).await;
        drop(first);
        assert!(capacity.answers.has_room(organization, 1).is_ok());
        pass(29).await;
        assert_eq!(connection.misuse(), None, "the client reads slowly");
        // An empty queue is no excuse for unread bytes.
        answer.wait();
        pass(1).await;
        assert!(connection.misuse().is_some());
        drop(second);
        assert_eq!(connection.misuse(), None, "everything is read, and there is nothing to send");
        pass(600).await;
        assert_eq!(connection.misuse(), None);
        drop(answer);
        assert_eq!(capacity.answers.table().total, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn unfetched_response_closes_the_connection() {
        let (connection, answer, _) = answer();
        pass(30).await;
        assert!(connection.misuse().is_some());
        // Parts outlive their response.
        answer.add(1);
        let part = answer.part(Bytes::from_static(b"x"));
        drop(answer);
        pass(30).await;
        assert!(connection.misuse().is_some());
        drop(part);
        assert_eq!(connection.misuse(), None);
    }
}
