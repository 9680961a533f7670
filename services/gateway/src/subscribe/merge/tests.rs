use proptest::prelude::*;

use super::*;

const DELIVERY: u64 = 1 << 32;

fn record(sequence: u64, step: u64) -> Event {
    Event { sequence, step, ..Event::default() }
}

fn progress(step: u64, index: u64) -> Event {
    Event { step, index, ..Event::default() }
}

fn live(event: Event) -> LiveItem {
    LiveItem::Event(Arc::new(event))
}

/// A model of a stream: all its events in order, how many have happened, and one subscriber.
struct World {
    log: Vec<Event>,
    happened: usize,
    /// Items that the subscriber has not received yet.
    live: VecDeque<LiveItem>,
    merge: Merge,
    seen: Vec<Event>,
    has_progress: bool,
    /// Whether the publication of a record that progress follows can be lost.
    loses_beginnings: bool,
    /// How often retained progress was read.
    reads: usize,
    /// How often the head was read.
    heads: usize,
}

impl World {
    fn new(log: Vec<Event>) -> Self {
        Self {
            log,
            happened: 0,
            live: VecDeque::new(),
            merge: Merge::resume(Cursor::BEGINNING, true),
            seen: Vec::new(),
            has_progress: true,
            loses_beginnings: true,
            reads: 0,
            heads: 0,
        }
    }

    fn records(&self) -> impl Iterator<Item = &Event> {
        self.log[..self.happened].iter().filter(|event| event.sequence > 0)
    }

    fn head(&self) -> u64 {
        self.records().last().map_or(0, |event| event.sequence)
    }

    /// The next event happens; the live subscriber receives it or not.
    fn happen(&mut self, fate: u8) {
        let Some(event) = self.log.get(self.happened).cloned() else { return };
        self.happened += 1;
        let next = self.log.get(self.happened);
        let noticeable = if event.sequence > 0 {
            self.loses_beginnings || next.is_none_or(|next| next.sequence > 0)
        } else {
            // A loss of the last progress of a step could not be noticed, unless with a broken
            // connection.
            next.is_some_and(|next| next.sequence == 0 && next.step == event.step)
        };
        match fate % 6 {
            0 if noticeable => {}
            0 | 1 => self.live.push_back(LiveItem::Lost),
            2 => self.live.extend([live(event.clone()), live(event)]),
            _ => self.live.push_back(live(event)),
        }
    }

    /// The subscriber performs one action. False when it waits for a live item.
    fn step(&mut self) -> bool {
        match self.merge.next_action() {
            Action::Emit(event, cursor) => {
                self.seen.push(Event { cursor: cursor.to_string(), ..Arc::unwrap_or_clone(event) });
            }
            Action::ReadHead => {
                self.heads += 1;
                self.merge.on_head(self.head()).expect("the cursor is ours");
            }
            Action::ReadProgress(after) => {
                self.reads += 1;
                let after = after.map_or((0, 0), |after| (after.step, after.index));
                let found = self.log[..self.happened].iter().filter(|event| event.sequence == 0);
                let mut found: Vec<Event> =
                    found.filter(|event| (event.step, event.index) > after).cloned().collect();
                found.sort_by_key(|event| (event.step, event.index));
                self.merge.on_progress(found);
            }
            Action::ReadRecords(after) => {
                let page = self
                    .records()
                    .filter(|event| event.sequence > after)
                    .take(2)
                    .cloned()
                    .collect();
                self.merge.on_records(page);
            }
            Action::ReceiveLive => match self.live.pop_front() {
                Some(live) => self.merge.on_live(live),
                None => return false,
            },
        }
        true
    }

    /// The task was read after listening began: its head, and whether it has had a step. Without a
    /// step there is no progress yet.
    fn read_task(&mut self) {
        self.merge.on_head(self.head()).expect("the cursor is ours");
        if self.log[..self.happened].iter().all(|event| event.step == 0) {
            self.merge.on_progress(Vec::new());
        }
    }

    /// The client reconnects with its last cursor. Items on their way to it are lost.
    fn reconnect(&mut self) {
        let cursor = self.seen.last().map_or(Ok(Cursor::BEGINNING), |event| event.cursor.parse());
        self.live.clear();
        self.merge = Merge::resume(cursor.expect("an issued cursor"), self.has_progress);
        if self.has_progress {
            self.read_task();
        }
    }

    fn run(&mut self, script: &[(u8, u8)]) {
        for &(what, fate) in script {
            match what % 8 {
                0..=2 => self.happen(fate),
                3..=5 => _ = self.step(),
                6 if fate < 32 => self.reconnect(),
                6 if fate < 64 => {
                    self.live.clear();
                    self.live.push_back(LiveItem::Lost);
                }
                6 if fate < 128 => self.live.push_back(LiveItem::Head(self.head())),
                _ => while self.step() {},
            }
        }
        while self.happened < self.log.len() {
            self.happen(5);
        }
        self.live.push_back(LiveItem::Head(self.head()));
        while self.step() {}
    }

    fn seen_marks(&self) -> Vec<Mark> {
        self.seen.iter().map(Mark::from_event).collect()
    }
}

fn marks(log: &[Event]) -> Vec<Mark> {
    log.iter().map(Mark::from_event).collect()
}

/// Steps: records before the step, progress of the first attempt, progress of a second one, whether
/// a record ends it, and how many records without a step are between its progress.
type Steps = Vec<(u8, u8, u8, bool, u8)>;

fn log(steps: &Steps) -> Vec<Event> {
    let mut log: Vec<Event> = Vec::new();
    let mut sequence = 0;
    let mut next = |step| {
        sequence += 1;
        record(sequence, step)
    };
    for (step, &(before, first, second, ends, between)) in (1..).zip(steps) {
        log.extend((0..before).map(|_| next(0)));
        log.extend((0..u64::from(first)).map(|n| progress(step, DELIVERY + n)));
        log.extend((0..between).map(|_| next(0)));
        log.extend((0..u64::from(second)).map(|n| progress(step, 2 * DELIVERY + n)));
        log.push(next(if ends { step } else { 0 }));
    }
    log
}

fn steps(ends: BoxedStrategy<bool>, between: BoxedStrategy<u8>) -> impl Strategy<Value = Steps> {
    prop::collection::vec((0_u8..3, 0_u8..6, 0_u8..3, ends, between), 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn subscriber_sees_everything_once_and_in_order(
        steps in steps(Just(true).boxed(), Just(0).boxed()),
        script in prop::collection::vec((any::<u8>(), any::<u8>()), 0..200),
    ) {
        let log = log(&steps);
        let mut world = World::new(log.clone());
        world.loses_beginnings = false;
        world.run(&script);
        prop_assert_eq!(world.seen_marks(), marks(&log));
    }

    /// A record whose publication is lost, or that falls into a step, may be swapped with its
    /// progress. A step that no record ends is shown as late as possible. But each kind keeps its
    /// order, and nothing is missing or repeated.
    #[test]
    fn subscriber_sees_each_kind_once_whatever_steps_do(
        steps in steps(any::<bool>().boxed(), (0_u8..3).boxed()),
        script in prop::collection::vec((any::<u8>(), any::<u8>()), 0..200),
    ) {
        let log = log(&steps);
        let mut world = World::new(log.clone());
        world.run(&script);
        let split = |marks: Vec<Mark>| -> (Vec<Mark>, Vec<Mark>) {
            marks.into_iter().partition(|mark| matches!(mark, Mark::Record { .. }))
        };
        prop_assert_eq!(split(world.seen_marks()), split(marks(&log)));
    }

    #[test]
    fn entity_stream_has_only_records(
        count in 0_u64..20,
        script in prop::collection::vec((any::<u8>(), any::<u8>()), 0..100),
    ) {
        let log: Vec<Event> = (1..=count).map(|sequence| record(sequence, 0)).collect();
        let mut world = World::new(log.clone());
        world.has_progress = false;
        world.merge = Merge::resume(Cursor::BEGINNING, false);
        world.run(&script);
        prop_assert_eq!(world.seen_marks(), marks(&log));
    }
}

#[test]
fn subscription_from_now_shows_no_old_events() {
    let mut world = World::new(vec![
        record(1, 0),
        progress(1, DELIVERY),
        progress(1, DELIVERY + 1),
        record(2, 1),
        progress(2, DELIVERY),
    ]);
    world.merge = Merge::from_now(1, 1, true);
    for _ in 0..3 {
        world.happen(5);
    }
    world.live.clear();
    while world.step() {}
    assert_eq!(world.seen_marks(), []);
    // A broken connection must not show the old progress.
    world.live.push_back(LiveItem::Lost);
    world.happen(5);
    world.happen(5);
    while world.step() {}
    assert_eq!(
        world.seen_marks(),
        [Mark::Record { sequence: 2, step: 1 }, Mark::Progress { step: 2, index: DELIVERY }]
    );
}

#[test]
fn task_without_steps_needs_no_read_of_progress_or_head() {
    let log = vec![
        record(1, 0),
        record(2, 0),
        record(3, 0),
        progress(1, DELIVERY),
        record(4, 1),
        progress(2, DELIVERY),
    ];
    for (begun_between, cursor) in
        [(0, "0"), (2, "0"), (3, "0"), (4, "0"), (0, "2.1.0"), (2, "2.1.0"), (4, "2.1.0")]
    {
        let mut world = World::new(log.clone());
        world.merge = Merge::resume(cursor.parse().expect("a cursor"), true);
        world.happen(5);
        world.happen(5);
        world.live.clear();
        world.read_task();
        // The first step begins during the read of the records.
        for _ in 0..begun_between {
            world.happen(5);
        }
        if cursor == "0" {
            assert_eq!(world.merge.next_action(), Action::ReadRecords(0));
        }
        while world.step() {}
        assert!(world.merge.is_live());
        while world.happened < log.len() {
            world.happen(5);
            while world.step() {}
        }
        let skipped = if cursor == "0" { 0 } else { 2 };
        assert_eq!(
            (world.seen_marks(), world.reads, world.heads),
            (marks(&log[skipped..]), 0, 0),
            "{begun_between} {cursor}"
        );
    }
}

#[test]
fn subscription_from_now_to_stepless_task_is_live_at_once() {
    let mut world = World::new(vec![record(1, 0), record(2, 0), progress(1, DELIVERY)]);
    world.happen(5);
    world.live.clear();
    world.merge = Merge::from_now(1, 1, true);
    world.read_task();
    assert!(world.merge.is_live());
    world.happen(5);
    world.happen(5);
    while world.step() {}
    assert_eq!(
        world.seen_marks(),
        [Mark::Record { sequence: 2, step: 0 }, Mark::Progress { step: 1, index: DELIVERY }]
    );
}

#[test]
fn records_purged_during_a_read_are_not_awaited() {
    let mut merge = Merge::resume(Cursor::BEGINNING, true);
    merge.on_head(3).expect("the cursor is ours");
    merge.on_progress(Vec::new());
    assert_eq!(merge.next_action(), Action::ReadRecords(0));
    // Only the record of the deletion is left.
    merge.on_records(vec![record(4, 0)]);
    assert_eq!(merge.next_action(), Action::ReceiveLive);
    merge.on_live(live(record(4, 0)));
    let Action::Emit(event, cursor) = merge.next_action() else { panic!("the record is ready") };
    assert_eq!((event.sequence, cursor.to_string().as_str()), (4, "4.1.0"));
}

#[test]
fn cursor_beyond_the_head_is_refused() {
    let mut merge = Merge::resume(Cursor { sequence: 9, step: 1, index: 0 }, true);
    assert_eq!(merge.next_action(), Action::ReadHead);
    assert_eq!(merge.on_head(8), Err(CursorBeyondHead));
}

#[test]
fn progress_with_gaps_is_reread_only_once() {
    let mut world = World::new((0..10).map(|n| progress(1, DELIVERY + 7 * n)).collect());
    while world.step() {}
    world.reads = 0;
    for _ in 0..10 {
        world.happen(5);
        while world.step() {}
    }
    assert_eq!(world.seen_marks().len(), 10);
    assert_eq!(world.reads, 1);
}

#[test]
fn deleted_task_shows_its_last_record() {
    let mut merge = Merge::resume(Cursor { sequence: 3, step: 1, index: 0 }, true);
    merge.on_head(9).expect("the cursor is ours");
    merge.on_progress(Vec::new());
    merge.on_records(vec![record(9, 0)]);
    let Action::Emit(event, cursor) = merge.next_action() else { panic!("the record is ready") };
    assert_eq!((event.sequence, cursor.to_string().as_str()), (9, "9.1.0"));
}
