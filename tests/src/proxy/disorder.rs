//! Delayed, reordered and duplicated messages in one direction of a connection.

use std::{collections::BTreeMap, io, mem};

use tokio::time::{Instant, sleep_until};

use super::{
    End,
    frames::{Frames, Kind},
};
use crate::random::Random;

/// Whether nothing may pass from this message on.
pub(super) type Stops<'a> = &'a (dyn Fn(&[u8]) -> bool + Sync);

/// The parts of a piece that pass now and later.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Released {
    pub(super) at_once: Vec<u8>,
    /// From the first message on that may not pass yet.
    pub(super) stopped: Vec<u8>,
}

/// One of so many messages is late.
const LATE_ONE_IN: u64 = 4;
/// The bounds of its delay in milliseconds.
const MIN_DELAY_MS: u64 = 5;
const MAX_DELAY_MS: u64 = 500;
/// One of so many messages of the server is duplicated. A client's are not: it marks its own
/// retransmissions as such.
const DUPLICATE_ONE_IN: u64 = 8;

/// The state of one direction.
#[derive(Debug)]
pub(super) struct Disorder {
    frames: Frames,
    from: End,
    connection: u64,
    /// The part of the current frame that has not been passed on.
    begun: Vec<u8>,
    /// Whether a part of that frame was passed on: nothing may come before its end.
    partially_sent: bool,
    /// Delayed messages by the time at which they pass.
    late: BTreeMap<(Instant, u64), Vec<u8>>,
    count: u64,
    /// The seed that selects messages.
    seed: Option<u64>,
    random: Random,
}

impl Disorder {
    /// The direction from `from` of the connection with this number.
    pub(super) fn new(connection: u64, from: End) -> Self {
        Self {
            frames: Frames::default(),
            from,
            connection,
            begun: Vec::new(),
            partially_sent: false,
            late: BTreeMap::new(),
            count: 0,
            seed: None,
            random: Random::new(0),
        }
    }

    /// The output for a piece: all of it, unless there is a seed, or messages have to be inspected
    /// and one of them `stops`.
    ///
    /// # Errors
    /// When the input is not NATS' protocol.
    pub(super) fn pass(
        &mut self,
        mut piece: &[u8],
        seed: Option<u64>,
        stops: Option<Stops<'_>>,
    ) -> io::Result<Released> {
        if let Some(chosen) = seed
            && seed != self.seed
        {
            let direction = 2 * self.connection + u64::from(self.from == End::Server);
            (self.seed, self.random) = (seed, Random::new(chosen ^ direction));
        }
        let mut passed = Released::default();
        while !piece.is_empty() {
            let (length, kind) = self.frames.next(piece)?;
            self.begun.extend_from_slice(&piece[..length]);
            piece = &piece[length..];
            let Some(kind) = kind else { break };
            let mut frame = mem::take(&mut self.begun);
            let whole = !mem::replace(&mut self.partially_sent, false) && kind == Kind::Message;
            if !passed.stopped.is_empty() || whole && stops.is_some_and(|stops| stops(&frame)) {
                passed.stopped.append(&mut frame);
            } else if !whole || seed.is_none() || !self.hold_back(&frame) {
                passed.at_once.append(&mut frame);
            }
        }
        if self.partially_sent || seed.is_none() && stops.is_none() {
            self.partially_sent |= !self.begun.is_empty();
            passed.at_once.append(&mut self.begun);
        }
        Ok(passed)
    }

    /// Whether a message is delayed. It may also be duplicated; the duplicate is always late.
    fn hold_back(&mut self, frame: &[u8]) -> bool {
        if self.from == End::Server && self.random.next_below(DUPLICATE_ONE_IN) == 0 {
            self.delay(frame);
        }
        let late = self.random.next_below(LATE_ONE_IN) == 0;
        if late {
            self.delay(frame);
        }
        late
    }

    fn delay(&mut self, frame: &[u8]) {
        let due = Instant::now() + self.random.millis(MIN_DELAY_MS, MAX_DELAY_MS + 1);
        self.count += 1;
        self.late.insert((due, self.count), frame.to_vec());
    }

    /// Returns when a delayed message can pass.
    pub(super) async fn due(&self) {
        match self.late.first_key_value() {
            Some(((due, _), _)) if !self.partially_sent => sleep_until(*due).await,
            // Wait for more input.
            _ => std::future::pending().await,
        }
    }

    /// The delayed messages that are due.
    pub(super) fn take_due(&mut self) -> Vec<u8> {
        let (now, mut taken) = (Instant::now(), Vec::new());
        while let Some(first) = self.late.first_entry()
            && first.key().0 <= now
        {
            taken.append(&mut first.remove());
        }
        taken
    }

    /// All delayed messages and the incomplete frame, at the end of the input.
    pub(super) fn take_all(&mut self) -> Vec<u8> {
        let late = mem::take(&mut self.late).into_values();
        let mut taken = if self.partially_sent { Vec::new() } else { late.flatten().collect() };
        taken.append(&mut self.begun);
        taken
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use super::*;

    const MESSAGES: usize = 200;

    impl Disorder {
        /// The output of a piece that is not inspected.
        fn passed(&mut self, piece: &[u8], seed: Option<u64>) -> Vec<u8> {
            let Released { at_once, stopped } = self.pass(piece, seed, None).unwrap();
            assert!(stopped.is_empty());
            at_once
        }
    }

    fn message(n: usize) -> Vec<u8> {
        let payload = format!("MSG\r\n{n}");
        format!("MSG a.b 7 {}\r\n{payload}\r\n", payload.len()).into_bytes()
    }

    /// The numbers of the messages in some output, in order.
    fn numbers(passed: &[u8]) -> Vec<usize> {
        let text = std::str::from_utf8(passed).unwrap();
        let payloads = text
            .split("MSG a.b 7 ")
            .skip(1)
            .map(|frame| frame.trim_end().rsplit('\n').next().unwrap());
        payloads.map(|number| number.parse::<usize>().unwrap()).collect()
    }

    /// The output for messages that arrive one per millisecond.
    async fn passed(
        disorder: &mut Disorder,
        messages: std::ops::Range<usize>,
        seed: Option<u64>,
    ) -> Vec<u8> {
        let mut passed = Vec::new();
        for n in messages {
            passed.append(&mut disorder.passed(&message(n), seed));
            tokio::time::advance(Duration::from_millis(1)).await;
            passed.append(&mut disorder.take_due());
        }
        passed
    }

    #[tokio::test(start_paused = true)]
    async fn server_messages_are_reordered_and_repeated_without_loss() {
        let mut disorder = Disorder::new(1, End::Server);
        let mut all = passed(&mut disorder, 0..MESSAGES, Some(7)).await;
        while !disorder.late.is_empty() {
            disorder.due().await;
            all.append(&mut disorder.take_due());
        }
        let numbers = numbers(&all);
        assert!(!numbers.is_sorted(), "{numbers:?}");
        assert_eq!(
            numbers.iter().copied().collect::<BTreeSet<_>>(),
            (0..MESSAGES).collect::<BTreeSet<_>>()
        );
        let twice = numbers.len() - MESSAGES;
        assert!((1..MESSAGES / 4).contains(&twice), "{twice} came twice");
    }

    #[tokio::test(start_paused = true)]
    async fn client_messages_are_reordered_without_repeats() {
        let mut disorder = Disorder::new(1, End::Client);
        let mut all = passed(&mut disorder, 0..MESSAGES, Some(7)).await;
        all.append(&mut disorder.take_all());
        let mut numbers = numbers(&all);
        assert!(!numbers.is_sorted(), "{numbers:?}");
        numbers.sort_unstable();
        assert_eq!(numbers, (0..MESSAGES).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn disorder_is_reproducible_and_differs_by_connection() {
        let order = async |connection: u64, seed: u64| {
            let mut disorder = Disorder::new(connection, End::Server);
            numbers(&passed(&mut disorder, 0..MESSAGES, Some(seed)).await)
        };
        assert_eq!(order(1, 7).await, order(1, 7).await);
        assert_ne!(order(1, 7).await, order(1, 8).await);
        assert_ne!(order(1, 7).await, order(2, 7).await);
    }

    #[tokio::test(start_paused = true)]
    async fn without_seed_any_split_passes_at_once() {
        let all: Vec<u8> = (0..3).flat_map(message).collect();
        for at in 0..all.len() {
            let mut disorder = Disorder::new(1, End::Server);
            let (before, behind) = all.split_at(at);
            assert_eq!(disorder.passed(before, None), before);
            assert_eq!(disorder.passed(behind, None), behind);
            assert!(disorder.late.is_empty() && disorder.take_all().is_empty());
        }
    }

    /// A disturbance starts and ends at any byte.
    #[tokio::test(start_paused = true)]
    async fn frames_stay_whole_when_disorder_begins_and_ends() {
        let all: Vec<u8> = (0..20).flat_map(message).collect();
        for at in 0..all.len() {
            for (first, second) in [(None, Some(7)), (Some(7), None)] {
                let mut disorder = Disorder::new(1, End::Client);
                let (before, behind) = all.split_at(at);
                let mut passed = disorder.passed(before, first);
                passed.append(&mut disorder.passed(behind, second));
                passed.append(&mut disorder.take_all());
                let mut numbers = numbers(&passed);
                numbers.sort_unstable();
                assert_eq!(numbers, (0..20).collect::<Vec<_>>(), "split at {at}");
            }
        }
    }

    /// A message that is late when the disorder ends does not split a frame.
    #[tokio::test(start_paused = true)]
    async fn late_frame_waits_for_the_end_of_another() {
        let mut disorder = Disorder::new(1, End::Client);
        passed(&mut disorder, 0..MESSAGES, Some(7)).await;
        assert!(!disorder.late.is_empty());
        let last = message(MESSAGES);
        disorder.passed(&last[..9], None);
        let waited = tokio::time::timeout(Duration::from_secs(2), disorder.due()).await;
        assert!(waited.is_err(), "it would have come behind the beginning of a frame");
        disorder.passed(&last[9..], None);
        disorder.due().await;
        assert!(!disorder.take_due().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn stopped_stream_passes_nothing_from_the_message_on() {
        let all: Vec<u8> = (0..4).flat_map(message).collect();
        let (third, stops) = (message(2), |frame: &[u8]| frame == message(2));
        for at in 0..3 * third.len() {
            let mut disorder = Disorder::new(1, End::Client);
            let (before, behind) = all.split_at(at);
            let first = disorder.pass(before, None, Some(&stops)).unwrap();
            let second = disorder.pass(behind, None, Some(&stops)).unwrap();
            assert_eq!(
                [first.at_once, second.at_once].concat(),
                [message(0), message(1)].concat(),
                "split at {at}"
            );
            assert_eq!(
                [first.stopped, second.stopped].concat(),
                [message(2), message(3)].concat(),
                "split at {at}"
            );
        }
        // A frame that has been sent in part continues.
        let mut disorder = Disorder::new(1, End::Client);
        let (before, behind) = third.split_at(5);
        assert_eq!(disorder.passed(before, None), before);
        let rest = disorder.pass(behind, None, Some(&stops)).unwrap();
        assert_eq!(rest.at_once, behind);
        assert!(rest.stopped.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn control_frames_are_never_delayed() {
        let mut disorder = Disorder::new(1, End::Server);
        for _ in 0..MESSAGES {
            for word in ["PING\r\n", "+OK\r\n", "-ERR 'MSG a.b 7 5'\r\n", "INFO {}\r\n"] {
                assert_eq!(disorder.passed(word.as_bytes(), Some(7)), word.as_bytes());
            }
        }
        assert!(disorder.late.is_empty());
    }
}
