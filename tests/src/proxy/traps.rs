//! Points at which a proxy stops all traffic.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{oneshot, watch};

use super::{End, Mode, frames};

/// The pieces so far, and the points to stop at. A piece is the content of one read: one message,
/// several, or a part of one.
#[derive(Debug, Default)]
pub(super) struct Traps {
    from_client: u64,
    from_server: u64,
    pub(super) piece: Option<PieceTrap>,
    pub(super) text: Option<TextTrap>,
    pub(super) message: Option<MessageTrap>,
}

/// Stops at a piece.
#[derive(Debug)]
pub(super) struct PieceTrap {
    pub(super) end: End,
    pub(super) at: u64,
    pub(super) catch: Catch,
}

/// Stops at a client's piece that contains a text.
#[derive(Debug)]
pub(super) struct TextTrap {
    pub(super) moment: Moment,
    pub(super) text: String,
    /// A text that an earlier piece has to contain; none: it has passed.
    pub(super) after: Option<String>,
    /// The connection of that piece; only this one counts from then on.
    pub(super) on: Option<u64>,
    /// The connection of the matching piece, if it came.
    pub(super) matched_on: Option<u64>,
    pub(super) catch: Catch,
}

/// Stops at a client's message.
#[derive(Debug)]
pub(super) struct MessageTrap {
    pub(super) moment: Moment,
    /// The prefix of its subject.
    pub(super) subject: String,
    /// The prefix of the subject of a required earlier message; none: it has passed.
    pub(super) after: Option<String>,
    /// The number of messages still to come, including this one.
    pub(super) left: u64,
    /// The reply subject of the message that came.
    pub(super) answer: Option<String>,
    pub(super) catch: Catch,
}

/// A moment in the life of what a client sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// It does not arrive.
    Sent,
    /// It arrives, and the answer to it does not.
    Answered,
}

/// The action of a trap.
#[derive(Debug)]
pub(super) struct Catch {
    pub(super) holds: Vec<Arc<watch::Sender<Mode>>>,
    pub(super) sprung: oneshot::Sender<()>,
}

impl Catch {
    fn spring(self) {
        for mode in &self.holds {
            mode.send_replace(Mode::Held);
        }
        // The receiver may be gone.
        let _ = self.sprung.send(());
    }
}

impl Traps {
    pub(super) fn piece_count_mut(&mut self, end: End) -> &mut u64 {
        match end {
            End::Client => &mut self.from_client,
            End::Server => &mut self.from_server,
        }
    }

    /// Counts and inspects a piece before it passes.
    fn note(&mut self, (end, connection): (End, u64), piece: &[u8]) {
        *self.piece_count_mut(end) += 1;
        let count = *self.piece_count_mut(end);
        if let Some(trap) = self.piece.take_if(|trap| trap.end == end && trap.at <= count) {
            trap.catch.spring();
        }
        if let Some(trap) = self.text.take_if(|trap| trap.springs_at(end, connection, piece)) {
            trap.catch.spring();
        }
    }

    /// Inspects a message before it passes; true when it must not pass.
    fn stops(&mut self, end: End, message: &[u8]) -> bool {
        let Some((subject, reply)) = frames::address(message) else { return false };
        let stops = self.message.take_if(|trap| match end {
            End::Server => trap.answer.as_deref() == Some(subject),
            End::Client => trap.springs_at(subject, reply),
        });
        let stopped = stops.is_some();
        if let Some(trap) = stops {
            trap.catch.spring();
        }
        stopped
    }
}

impl TextTrap {
    /// Whether the trap springs at a piece.
    fn springs_at(&mut self, end: End, connection: u64, piece: &[u8]) -> bool {
        match end {
            End::Server => self.matched_on == Some(connection),
            End::Client
                if self.matched_on.is_some() || self.on.is_some_and(|on| on != connection) =>
            {
                false
            }
            End::Client => {
                let has =
                    |text: &str| piece.windows(text.len()).any(|part| part == text.as_bytes());
                if let Some(after) = &self.after {
                    if has(after) {
                        (self.after, self.on) = (None, Some(connection));
                    }
                    return false;
                }
                let said = has(&self.text);
                self.matched_on = said.then_some(connection);
                said && self.moment == Moment::Sent
            }
        }
    }
}

impl MessageTrap {
    /// Whether the trap springs at a client's message.
    fn springs_at(&mut self, subject: &str, reply: Option<&str>) -> bool {
        if let Some(after) = &self.after {
            if subject.starts_with(after.as_str()) {
                self.after = None;
            }
            return false;
        }
        if self.left == 0 || !subject.starts_with(&self.subject) {
            return false;
        }
        self.left -= 1;
        if self.left > 0 {
            return false;
        }
        self.answer = reply.map(str::to_owned);
        self.moment == Moment::Sent
    }
}

/// One direction of a connection, as traps see it.
#[derive(Debug)]
pub(super) struct TrapObserver {
    pub(super) traps: Arc<Mutex<Traps>>,
    pub(super) end: End,
    pub(super) connection: u64,
}

impl TrapObserver {
    /// Counts a piece before it is passed on.
    pub(super) fn note(&self, piece: &[u8]) {
        lock(&self.traps).note((self.end, self.connection), piece);
    }

    /// Whether messages have to be inspected.
    pub(super) fn is_set(&self) -> bool {
        lock(&self.traps).message.is_some()
    }

    /// Inspects a message before it passes; true when it must not pass.
    pub(super) fn stops(&self, message: &[u8]) -> bool {
        lock(&self.traps).stops(self.end, message)
    }
}

pub(super) fn lock(traps: &Mutex<Traps>) -> MutexGuard<'_, Traps> {
    traps.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn catch() -> (Catch, oneshot::Receiver<()>, Arc<watch::Sender<Mode>>) {
        let (sprung, sprung_receiver) = oneshot::channel();
        let mode = Arc::new(watch::Sender::new(Mode::Open));
        (Catch { holds: vec![Arc::clone(&mode)], sprung }, sprung_receiver, mode)
    }

    /// What a client sends and receives, in order, until the trap springs; returns how much passed.
    fn passed(moment: Moment, after: Option<&str>, nth: u64) -> usize {
        let said: [(End, &[u8]); 7] = [
            (End::Client, b"HPUB a.x inbox.1 12 12\r\nNATS/1.0\r\n\r\n\r\n"),
            (End::Client, b"PUB b.x 0\r\n\r\n"),
            (End::Server, b"MSG inbox.1 7 2\r\n{}\r\n"),
            (End::Client, b"PUB a.y inbox.2 0\r\n\r\n"),
            (End::Client, b"PUB c.x inbox.3 0\r\n\r\n"),
            (End::Server, b"MSG inbox.3 7 2\r\n{}\r\n"),
            (End::Server, b"HMSG inbox.2 7 12 12\r\nNATS/1.0\r\n\r\n\r\n"),
        ];
        let (catch, mut sprung_receiver, mode) = catch();
        let (subject, after) = ("a.".to_owned(), after.map(str::to_owned));
        let trap = MessageTrap { moment, subject, after, left: nth, answer: None, catch };
        let mut traps = Traps { message: Some(trap), ..Traps::default() };
        let passed = said.iter().take_while(|(end, message)| !traps.stops(*end, message)).count();
        let is_sprung = passed < said.len();
        assert_eq!(sprung_receiver.try_recv().is_ok(), is_sprung);
        assert_eq!(*mode.borrow() == Mode::Held, is_sprung);
        passed
    }

    #[test]
    fn trap_stops_at_named_message_or_its_answer() {
        assert_eq!(passed(Moment::Sent, None, 1), 0);
        assert_eq!(passed(Moment::Answered, None, 1), 2);
        assert_eq!(passed(Moment::Sent, None, 2), 3);
        assert_eq!(passed(Moment::Answered, None, 2), 6);
        assert_eq!(passed(Moment::Sent, None, 3), 7);
    }

    #[test]
    fn trap_waits_for_its_required_predecessor() {
        assert_eq!(passed(Moment::Sent, Some("b."), 1), 3);
        assert_eq!(passed(Moment::Answered, Some("b."), 1), 6);
        assert_eq!(passed(Moment::Sent, Some("c."), 1), 7);
    }

    /// The number of pieces of several clients and a server that pass before the trap for this text
    /// springs.
    fn passed_before(
        text: (&str, Option<&str>),
        moment: Moment,
        said: &[((End, u64), &[u8])],
    ) -> Option<usize> {
        let (catch, mut sprung_receiver, mode) = catch();
        let (text, after) = (text.0.to_owned(), text.1.map(str::to_owned));
        let trap = TextTrap { moment, text, after, on: None, matched_on: None, catch };
        let mut traps = Traps { text: Some(trap), ..Traps::default() };
        let stopped = said.iter().position(|(direction, piece)| {
            traps.note(*direction, piece);
            *mode.borrow() == Mode::Held
        });
        assert_eq!(sprung_receiver.try_recv().is_ok(), stopped.is_some());
        stopped
    }

    #[test]
    fn text_trap_stops_at_its_piece_or_at_the_servers_answer() {
        let said: [((End, u64), &[u8]); 5] = [
            ((End::Client, 1), b"Q BEGIN"),
            ((End::Server, 1), b"C COMMIT"),
            ((End::Client, 1), b"Q COMMIT\0"),
            ((End::Server, 2), b"C"),
            ((End::Server, 1), b"C"),
        ];
        assert_eq!(passed_before(("COMMIT", None), Moment::Sent, &said), Some(2));
        assert_eq!(passed_before(("COMMIT", None), Moment::Answered, &said), Some(4));
    }

    #[test]
    fn text_trap_waits_for_predecessor_on_the_same_connection() {
        let said: [((End, u64), &[u8]); 6] = [
            ((End::Client, 1), b"Q COMMIT"),
            ((End::Client, 2), b"B a message"),
            ((End::Client, 1), b"Q COMMIT"),
            ((End::Server, 2), b"C"),
            ((End::Client, 2), b"Q COMMIT"),
            ((End::Server, 2), b"C"),
        ];
        let commit = ("COMMIT", Some("a message"));
        assert_eq!(passed_before(commit, Moment::Sent, &said), Some(4));
        assert_eq!(passed_before(commit, Moment::Answered, &said), Some(5));
        assert_eq!(passed_before(("COMMIT", Some("another")), Moment::Sent, &said), None);
    }
}
