//! What must be true after a trial.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
};

use construct_proto::v1::CodeInterpreterResult;
use serde::Deserialize;

use super::{
    Seen,
    remote::Effects,
    script::{EFFECTS, Kind, LOG, MADE, Shape, kind},
};

/// A trial that is over.
pub(super) struct Check {
    pub(super) work: PathBuf,
    pub(super) shape: Shape,
    pub(super) kills: u32,
    /// What the model is told.
    pub(super) told: CodeInterpreterResult,
    /// What the server has seen.
    pub(super) effects: Effects,
}

/// The script's value.
#[derive(Debug, Deserialize)]
struct Account {
    /// What each effect was to say.
    notes: BTreeMap<u32, String>,
    /// What each was answered that ended.
    replies: BTreeMap<u32, String>,
    /// Those whose outcome the script was told is unknown.
    unknown: BTreeSet<u32>,
    /// In which order they ended, and which one was first.
    order: Vec<serde_json::Value>,
}

/// What is said of an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Done,
    Unknown,
    NotStarted,
}

impl Check {
    /// Checks, and counts.
    pub(super) fn check(&self) -> Seen {
        let happened = self.happened();
        let twice: Vec<_> = happened.iter().filter(|(_, times)| **times > 1).collect();
        assert!(twice.is_empty(), "effects happened more than once: {twice:?}\n{:?}", self.told);
        let fates = if self.told.error.is_empty() { self.completed() } else { self.stopped() };
        let mut seen = Seen { stopped: u64::from(!self.told.error.is_empty()), ..Seen::default() };
        for (number, fate) in (1..=EFFECTS).zip(fates) {
            let times = happened.get(&number).copied().unwrap_or(0);
            match (fate, times) {
                (Fate::Done, 1) => {}
                (Fate::Unknown, 0 | 1) => {
                    seen.unknown += 1;
                    seen.unknown_and_done += times;
                }
                (Fate::NotStarted, 0) => {}
                _ => panic!(
                    "effect {number} is said to be {fate:?}, and happened {times} times\n{:?}",
                    self.told
                ),
            }
            seen.effects += times;
        }
        // Each kill, and the stop, can interrupt as many as are under way.
        let most = u64::from((self.kills + 1) * self.shape.at_once());
        assert!(
            seen.unknown <= most,
            "{} of at most {most} are unknown\n{:?}",
            seen.unknown,
            self.told
        );
        seen
    }

    /// How often each effect happened.
    fn happened(&self) -> HashMap<u32, u64> {
        let mut happened = HashMap::new();
        let log = std::fs::read_to_string(self.work.join(LOG)).unwrap_or_default();
        for line in log.lines() {
            *happened.entry(line.parse().expect("a number")).or_default() += 1;
        }
        if let Ok(made) = std::fs::read_dir(self.work.join(MADE)) {
            for file in made {
                let name = file.expect("an entry").file_name();
                // A file that is being written has another name.
                if let Ok(number) = name.to_string_lossy().parse() {
                    *happened.entry(number).or_default() += 1;
                }
            }
        }
        happened
    }

    /// The script came to its end.
    fn completed(&self) -> Vec<Fate> {
        let account: Account = serde_json::from_str(&self.told.output)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.told));
        for (number, effects) in &self.effects {
            for effect in effects {
                // It was made by a process that is dead, perhaps: all of them knew the same.
                assert_eq!(
                    &effect.note, &account.notes[number],
                    "another run of the script knew something else"
                );
                if let Some(reply) = account.replies.get(number) {
                    assert_eq!(&effect.reply, reply, "the script was told something else");
                }
            }
        }
        for (number, reply) in &account.replies {
            match kind(*number) {
                Kind::Request => {
                    assert!(self.effects.contains_key(number), "{number} was never asked for")
                }
                Kind::Command => assert_eq!(reply, &account.notes[number]),
                Kind::File => assert_eq!(reply, "created", "{number} was written before"),
            }
        }
        let ended = account.order.iter().filter(|entry| entry.is_number()).count();
        assert_eq!(ended, EFFECTS as usize, "{account:?}");
        let failed = self.told.tool_uses.iter().filter(|tool| !tool.succeeded).count();
        assert_eq!(failed, account.unknown.len(), "{:?}", self.told.tool_uses);
        (1..=EFFECTS)
            .map(|number| {
                match (account.unknown.contains(&number), account.replies.contains_key(&number)) {
                    (true, false) => Fate::Unknown,
                    (false, true) => Fate::Done,
                    both => panic!("effect {number} is {both:?}: {account:?}"),
                }
            })
            .collect()
    }

    /// The script was told to stop: the text says which calls had ended, and which may have been.
    fn stopped(&self) -> Vec<Fate> {
        let text = self.told.error.strip_prefix("Stopped: enough.\n");
        let Some(text) = text else {
            assert_eq!(self.told.error, "NotRun: enough. The script did nothing.");
            return vec![Fate::NotStarted; EFFECTS as usize];
        };
        let text = text.strip_prefix("Calls that had ended: ").expect("the account");
        let middle = ". Calls that were under way and may or may not have had their effect: ";
        let (ended, unknown) = text.split_once(middle).expect("the account");
        let [ended, unknown] = [ended, unknown].map(|list| -> BTreeSet<u32> {
            let list = list.trim_end_matches('.').split(", ").filter(|call| *call != "none");
            list.map(|call| {
                let (number, name) = call.split_once(' ').expect("number and name");
                assert!(!name.contains("failed"), "nothing fails here: {text}");
                number.trim_start_matches('#').parse().expect("a number")
            })
            .collect()
        });
        (1..=EFFECTS)
            .map(|number| self.shape.call(number))
            .map(|call| match (ended.contains(&call), unknown.contains(&call)) {
                (true, false) => Fate::Done,
                (false, true) => Fate::Unknown,
                (false, false) => Fate::NotStarted,
                (true, true) => panic!("call {call} is said to be both: {text}"),
            })
            .collect()
    }
}
