//! Which reconcilers live, as one of them sees it. Without a clock: time is counted in one's own
//! beats that came back, so that nobody seems dead to a process that does not hear anything at all.

use std::collections::BTreeMap;

use construct_domain::partition;
use construct_proto::mesh::v1::ReconcilerBeat;

use crate::assignment::PartitionAssignment;

/// So many of one's own beats came back without a word of another process: it is dead.
const MAX_MISSED_BEATS: u32 = 4;
/// So often a process that was taken for dead must be heard before it counts again. Otherwise one
/// that is barely alive would have partitions moved to it and away again all the time.
const PROBATION_BEATS: u32 = 4;
/// So many beats later a process that was taken for dead is a stranger again.
const FORGET_AFTER_BEATS: u32 = 240;

/// The members.
#[derive(Debug)]
pub(crate) struct Members {
    instance: String,
    process: String,
    peers: BTreeMap<String, Peer>,
}

#[derive(Debug)]
struct Peer {
    process: String,
    /// Own beats since it was heard.
    missed: u32,
    /// How often it must be heard until it counts.
    probation: u32,
}

/// Whose beat was heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BeatSource {
    Own,
    Peer,
}

impl Members {
    pub(crate) fn new(instance: String, process: String) -> Self {
        Self { instance, process, peers: BTreeMap::new() }
    }

    /// Takes in a beat. One's own is counted by [`Members::beat`], as often as time has passed.
    pub(crate) fn record_beat(&mut self, beat: &ReconcilerBeat) -> BeatSource {
        if beat.instance == self.instance {
            // An earlier process of this instance has nothing to say any more.
            return if beat.process == self.process { BeatSource::Own } else { BeatSource::Peer };
        }
        if beat.leaves {
            // Of two processes of one instance, the end of the first is not the end of the second.
            if self.peers.get(&beat.instance).is_some_and(|peer| peer.process == beat.process) {
                self.peers.remove(&beat.instance);
            }
            return BeatSource::Peer;
        }
        let peer = self.peers.entry(beat.instance.clone()).or_insert_with(|| Peer {
            process: beat.process.clone(),
            missed: 0,
            probation: 0,
        });
        if peer.process != beat.process {
            peer.process.clone_from(&beat.process);
            peer.probation = 0;
        }
        peer.missed = 0;
        peer.probation = peer.probation.saturating_sub(1);
        BeatSource::Peer
    }

    /// One's own beat has come back, an interval after the one before it.
    pub(crate) fn count_own_beat(&mut self) {
        for peer in self.peers.values_mut() {
            peer.missed = peer.missed.saturating_add(1);
            if peer.missed >= MAX_MISSED_BEATS {
                peer.probation = PROBATION_BEATS;
            }
        }
        self.peers.retain(|_, peer| peer.missed < FORGET_AFTER_BEATS);
    }

    /// Who lives, oneself included.
    pub(crate) fn live_instances(&self) -> Vec<&str> {
        let live = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.missed < MAX_MISSED_BEATS && peer.probation == 0);
        let mut live: Vec<&str> = live.map(|(instance, _)| instance.as_str()).collect();
        live.push(&self.instance);
        live.sort_unstable();
        live
    }

    /// One's own share of the partitions.
    pub(crate) fn assignment(&self) -> PartitionAssignment {
        let owners = partition::owners(&self.live_instances());
        let own = (0..).zip(owners).filter(|(_, owner)| *owner == self.instance);
        own.map(|(partition, _)| partition).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members() -> Members {
        Members::new("a".to_owned(), "1".to_owned())
    }

    fn beat(instance: &str, process: &str) -> ReconcilerBeat {
        ReconcilerBeat {
            instance: instance.to_owned(),
            process: process.to_owned(),
            ..ReconcilerBeat::default()
        }
    }

    fn leave(instance: &str, process: &str) -> ReconcilerBeat {
        ReconcilerBeat { leaves: true, ..beat(instance, process) }
    }

    #[test]
    fn alone_it_has_everything_and_two_have_half_each() {
        let (mut a, mut b) = (members(), Members::new("b".to_owned(), "2".to_owned()));
        assert_eq!(a.assignment(), PartitionAssignment::all());
        assert_eq!(a.record_beat(&beat("b", "2")), BeatSource::Peer);
        assert_eq!(b.record_beat(&beat("a", "1")), BeatSource::Peer);
        assert_eq!(a.assignment().intersection(b.assignment()), PartitionAssignment::EMPTY);
        assert_eq!(a.assignment().union(b.assignment()), PartitionAssignment::all());
        assert_eq!(a.assignment().partitions().count(), 8);
    }

    #[test]
    fn who_is_not_heard_for_some_own_beats_is_dead_and_who_leaves_at_once() {
        let mut a = members();
        a.record_beat(&beat("b", "2"));
        a.record_beat(&beat("c", "3"));
        for _ in 1..MAX_MISSED_BEATS {
            a.count_own_beat();
        }
        assert_eq!(a.live_instances(), ["a", "b", "c"]);
        a.record_beat(&beat("c", "3"));
        a.count_own_beat();
        assert_eq!(a.live_instances(), ["a", "c"]);
        a.record_beat(&leave("c", "3"));
        assert_eq!(a.assignment(), PartitionAssignment::all());
    }

    #[test]
    fn a_process_that_hears_nothing_not_even_itself_takes_nobody_for_dead() {
        let mut a = members();
        a.record_beat(&beat("b", "2"));
        let share = a.assignment();
        // Its own beats do not come back: nothing is counted, however long that takes. Then
        // everybody is heard again.
        a.count_own_beat();
        assert_eq!(a.record_beat(&beat("a", "1")), BeatSource::Own);
        assert_eq!(a.assignment(), share);
    }

    #[test]
    fn one_that_fell_silent_counts_again_when_it_was_heard_for_a_while() {
        let mut a = members();
        a.record_beat(&beat("b", "2"));
        for _ in 0..MAX_MISSED_BEATS {
            a.count_own_beat();
        }
        for _ in 1..PROBATION_BEATS {
            a.record_beat(&beat("b", "2"));
            a.count_own_beat();
            assert_eq!(a.live_instances(), ["a"], "it is barely alive");
        }
        a.record_beat(&beat("b", "2"));
        assert_eq!(a.live_instances(), ["a", "b"]);
    }

    #[test]
    fn a_new_process_of_a_dead_instance_counts_at_once_and_the_old_ones_end_does_not_concern_it() {
        let mut a = members();
        a.record_beat(&beat("b", "2"));
        for _ in 0..MAX_MISSED_BEATS {
            a.count_own_beat();
        }
        a.record_beat(&beat("b", "3"));
        assert_eq!(a.live_instances(), ["a", "b"]);
        a.record_beat(&leave("b", "2"));
        assert_eq!(a.live_instances(), ["a", "b"]);
    }
}
