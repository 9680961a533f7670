//! One connection: whether its client is known, and whether it reads.

use std::{
    collections::HashMap,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use super::{Account, Full, Holder, Limit, Share, UNREAD_TIMEOUT};

/// How long a connection may be idle whose client is not known.
const NEWCOMER_TIMEOUT: Duration = Duration::from_secs(30);

/// The connections of a port. Clones share the limits.
///
/// A connection is a newcomer until credentials were accepted on it. There are few places for
/// newcomers, so that who has no credentials cannot take those of others.
#[derive(Debug, Clone)]
pub(crate) struct Connections {
    newcomers: Limit,
    known: Limit,
}

impl Connections {
    pub(crate) const fn new(newcomers: Limit, known: Limit) -> Self {
        Self { newcomers, known }
    }

    /// Takes a place for a connection from a network.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn accept(&self, network: Holder) -> Result<Arc<Connection>, Full> {
        let share = self.newcomers.take(network, 1)?;
        let seat = Seat { network, known: self.known.clone(), share, is_known: false };
        Ok(Arc::new(Connection { state: Mutex::new(State { seat: Some(seat), ..State::new() }) }))
    }
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Connection {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None: it is not counted.
    seat: Option<Seat>,
    /// Requests and answers under way.
    running: usize,
    idle_since: Instant,
    next_answer: u64,
    /// Answers whose client has to read before they go on, and since when.
    unread: HashMap<u64, Instant>,
}

impl State {
    fn new() -> Self {
        Self {
            seat: None,
            running: 0,
            idle_since: Instant::now(),
            next_answer: 0,
            unread: HashMap::new(),
        }
    }
}

#[derive(Debug)]
struct Seat {
    network: Holder,
    known: Limit,
    share: Share,
    is_known: bool,
}

impl Connection {
    /// A connection that no limit counts, as that of a process of the same user.
    pub(crate) fn uncounted() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::new()) })
    }

    /// Credentials were accepted: the connection is no newcomer any more. It stays one while there
    /// is no room.
    pub(crate) fn identify(&self) {
        if let Some(seat) = &mut self.state().seat
            && !seat.is_known
            && let Ok(share) = seat.known.take(seat.network, 1)
        {
            seat.share = share;
            seat.is_known = true;
        }
    }

    /// Counts a request until this is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> Running {
        self.state().running += 1;
        Running(Arc::clone(self))
    }

    /// Follows an answer until it is dropped, and all that was handed out of it.
    pub(crate) fn answer(self: &Arc<Self>, account: &Account) -> Arc<Answer> {
        let running = self.begin();
        let mut state = self.state();
        let id = state.next_answer;
        state.next_answer += 1;
        state.unread.insert(id, Instant::now());
        drop(state);
        Arc::new(Answer {
            running,
            id,
            held: Mutex::new(Held { share: account.answer(0), is_waiting: false }),
        })
    }

    /// Why the connection has to be closed, if it has to.
    pub(crate) fn misuse(&self) -> Option<&'static str> {
        let state = self.state();
        if state.unread.values().any(|since| since.elapsed() >= UNREAD_TIMEOUT) {
            return Some("the client does not read its answers");
        }
        let is_newcomer = state.seat.as_ref().is_some_and(|seat| !seat.is_known);
        if is_newcomer && state.running == 0 && state.idle_since.elapsed() >= NEWCOMER_TIMEOUT {
            return Some("the client is not known and asks for nothing");
        }
        None
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Something under way on a connection, until it is dropped.
#[derive(Debug)]
pub(crate) struct Running(Arc<Connection>);

impl Drop for Running {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.running -= 1;
        state.idle_since = Instant::now();
    }
}

/// An answer on its way to a client: how much of it is in memory, and since when the client has not
/// read of it.
#[derive(Debug)]
pub(crate) struct Answer {
    running: Running,
    id: u64,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    share: Share,
    /// There is nothing more to send at the moment.
    is_waiting: bool,
}

impl Answer {
    /// More of it is there.
    pub(crate) fn add(&self, bytes: usize) {
        let mut held = self.held();
        held.is_waiting = false;
        held.share.add(bytes);
        self.read_at(Some(Instant::now()));
    }

    /// There is nothing more to send at the moment: the client need not read.
    pub(crate) fn wait(&self) {
        let mut held = self.held();
        held.is_waiting = true;
        if held.share.amount() == 0 {
            self.read_at(None);
        }
    }

    /// A part of what was added, to be handed to the connection. It is free when the client has
    /// read it, which is when the part is dropped.
    pub(crate) fn part(self: &Arc<Self>, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Part { bytes, answer: Arc::clone(self) })
    }

    fn sent(&self, bytes: usize) {
        let mut held = self.held();
        held.share.shrink(bytes);
        self.read_at((!held.is_waiting || held.share.amount() > 0).then(Instant::now));
    }

    fn read_at(&self, time: Option<Instant>) {
        let mut state = self.running.0.state();
        match time {
            Some(time) => _ = state.unread.insert(self.id, time),
            None => _ = state.unread.remove(&self.id),
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.answer.sent(bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use construct_domain::OrganizationId;
    use uuid::Uuid;

    use super::*;
    use crate::{Config, limit::Capacity};

    fn connections(newcomers: usize) -> Connections {
        Connections::new(Limit::new(newcomers, newcomers), Limit::new(1, 1))
    }

    fn network() -> Holder {
        Holder::network(Some(IpAddr::from([192, 0, 2, 1])))
    }

    /// A connection of somebody who is known, an answer on it, and the limits that it is charged
    /// to.
    fn answer() -> (Arc<Connection>, Arc<Answer>, Arc<Capacity>) {
        let (connection, capacity) =
            (Connection::uncounted(), Arc::new(Capacity::new(&Config::default())));
        let account =
            Account::new(Arc::clone(&capacity), Arc::clone(&connection), Holder::Shared, false);
        account.identify(OrganizationId::from_uuid(Uuid::from_u128(1))).expect("nothing is unread");
        let answer = connection.answer(&account);
        (connection, answer, capacity)
    }

    async fn pass(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn known_connection_leaves_its_place_to_newcomers() {
        let connections = connections(1);
        let first = connections.accept(network()).expect("there is a place");
        assert!(connections.accept(network()).is_err());
        first.identify();
        let second = connections.accept(network()).expect("there is a place again");
        // There is no place for another one who is known: it stays where it is.
        second.identify();
        assert!(connections.accept(network()).is_err());
        drop(first);
        second.identify();
        assert!(connections.accept(network()).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn newcomer_may_be_idle_for_a_while_only() {
        let connection = connections(1).accept(network()).expect("there is a place");
        pass(29).await;
        assert_eq!(connection.misuse(), None);
        let running = connection.begin();
        pass(60).await;
        assert_eq!(connection.misuse(), None, "it waits for an answer");
        drop(running);
        pass(30).await;
        assert!(connection.misuse().is_some());
        connection.identify();
        assert_eq!(connection.misuse(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn answer_that_is_not_read_is_charged_and_ends_its_connection() {
        let (connection, answer, capacity) = answer();
        answer.add(25 << 20);
        let parts = [
            answer.part(Bytes::from(vec![0; 15 << 20])),
            answer.part(Bytes::from(vec![0; 10 << 20])),
        ];
        let organization = Holder::Organization(OrganizationId::from_uuid(Uuid::from_u128(1)));
        assert!(capacity.answers.has_room(organization, 1).is_err(), "it has more than its share");
        let [first, second] = parts;
        pass(29).await;
        drop(first);
        assert!(capacity.answers.has_room(organization, 1).is_ok());
        pass(29).await;
        assert_eq!(connection.misuse(), None, "it reads slowly");
        // That there is nothing more to send does not help.
        answer.wait();
        pass(1).await;
        assert!(connection.misuse().is_some());
        drop(second);
        assert_eq!(connection.misuse(), None, "all is read, and nothing to send");
        pass(600).await;
        assert_eq!(connection.misuse(), None);
        drop(answer);
        assert_eq!(capacity.answers.table().total, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn answer_that_nobody_fetches_ends_its_connection() {
        let (connection, answer, _) = answer();
        pass(30).await;
        assert!(connection.misuse().is_some());
        // What was handed out outlives its answer.
        answer.add(1);
        let part = answer.part(Bytes::from_static(b"x"));
        drop(answer);
        pass(30).await;
        assert!(connection.misuse().is_some());
        drop(part);
        assert_eq!(connection.misuse(), None);
    }
}
