//! The invariants after a trial.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
};

use construct_proto::v1::CodeInterpreterResult;
use serde::Deserialize;

use super::{
    TrialCounts,
    remote::Effects,
    script::{CREATED_FOLDER, EFFECTS, Kind, LOG_FILE, Shape, kind},
};

/// A finished trial.
pub(super) struct Check {
    pub(super) work: PathBuf,
    pub(super) shape: Shape,
    pub(super) kills: u32,
    /// The report for the model.
    pub(super) report: CodeInterpreterResult,
    /// The requests that the server received.
    pub(super) effects: Effects,
}

/// The script's value.
#[derive(Debug, Deserialize)]
struct Account {
    /// The text that each effect should carry.
    notes: BTreeMap<u32, String>,
    /// The reply of each ended effect.
    replies: BTreeMap<u32, String>,
    /// Effects whose outcome was reported as unknown.
    unknown: BTreeSet<u32>,
    /// The order of their ends, and the first of each group.
    order: Vec<serde_json::Value>,
}

/// The reported outcome of an effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EffectOutcome {
    Done,
    Unknown,
    NotStarted,
}

impl Check {
    /// Asserts the invariants and returns the counts.
    pub(super) fn check(&self) -> TrialCounts {
        let occurrences = self.occurrences();
        let twice: Vec<_> = occurrences.iter().filter(|(_, times)| **times > 1).collect();
        assert!(twice.is_empty(), "effects happened more than once: {twice:?}\n{:?}", self.report);
        let outcomes = if self.report.error.is_empty() {
            self.completed_outcomes()
        } else {
            self.canceled_outcomes()
        };
        let mut counts = TrialCounts {
            stopped: u64::from(!self.report.error.is_empty()),
            ..TrialCounts::default()
        };
        for (number, outcome) in (1..=EFFECTS).zip(outcomes) {
            let times = occurrences.get(&number).copied().unwrap_or(0);
            match (outcome, times) {
                (EffectOutcome::Done, 1) => {}
                (EffectOutcome::Unknown, 0 | 1) => {
                    counts.unknown += 1;
                    counts.unknown_and_done += times;
                }
                (EffectOutcome::NotStarted, 0) => {}
                _ => panic!(
                    "effect {number} is reported as {outcome:?}, and happened {times} times\n{:?}",
                    self.report
                ),
            }
            counts.effects += times;
        }
        // Each kill, and the cancellation, can interrupt as many effects as are under way.
        let most = u64::from((self.kills + 1) * self.shape.concurrency());
        assert!(
            counts.unknown <= most,
            "{} of at most {most} are unknown\n{:?}",
            counts.unknown,
            self.report
        );
        counts
    }

    /// How often each effect happened.
    fn occurrences(&self) -> HashMap<u32, u64> {
        let mut occurrences = HashMap::new();
        let log = std::fs::read_to_string(self.work.join(LOG_FILE)).unwrap_or_default();
        for line in log.lines() {
            *occurrences.entry(line.parse().expect("a number")).or_default() += 1;
        }
        if let Ok(made) = std::fs::read_dir(self.work.join(CREATED_FOLDER)) {
            for file in made {
                let name = file.expect("an entry").file_name();
                // A file that is still being written has another name.
                if let Ok(number) = name.to_string_lossy().parse() {
                    *occurrences.entry(number).or_default() += 1;
                }
            }
        }
        occurrences
    }

    /// Outcomes of a script that completed.
    fn completed_outcomes(&self) -> Vec<EffectOutcome> {
        let account: Account = serde_json::from_str(&self.report.output)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.report));
        for (number, effects) in &self.effects {
            for effect in effects {
                // A killed process may have made it: all of them knew the same.
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
                    assert!(self.effects.contains_key(number), "{number} was never requested")
                }
                Kind::Command => assert_eq!(reply, &account.notes[number]),
                Kind::File => assert_eq!(reply, "created", "{number} was written before"),
            }
        }
        let ended = account.order.iter().filter(|entry| entry.is_number()).count();
        assert_eq!(ended, EFFECTS as usize, "{account:?}");
        let failed = self.report.tool_uses.iter().filter(|tool| !tool.succeeded).count();
        assert_eq!(failed, account.unknown.len(), "{:?}", self.report.tool_uses);
        (1..=EFFECTS)
            .map(|number| {
                match (account.unknown.contains(&number), account.replies.contains_key(&number)) {
                    (true, false) => EffectOutcome::Unknown,
                    (false, true) => EffectOutcome::Done,
                    both => panic!("effect {number} is {both:?}: {account:?}"),
                }
            })
            .collect()
    }

    /// Outcomes of a canceled script: its report says which calls ended, and which may have had an
    /// effect.
    fn canceled_outcomes(&self) -> Vec<EffectOutcome> {
        let text = self.report.error.strip_prefix("Stopped: enough.\n");
        let Some(text) = text else {
            assert_eq!(self.report.error, "NotRun: enough. The script did nothing.");
            return vec![EffectOutcome::NotStarted; EFFECTS as usize];
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
                (true, false) => EffectOutcome::Done,
                (false, true) => EffectOutcome::Unknown,
                (false, false) => EffectOutcome::NotStarted,
                (true, true) => panic!("call {call} is reported as both: {text}"),
            })
            .collect()
    }
}
