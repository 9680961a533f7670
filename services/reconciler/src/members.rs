//! The live reconcilers, as one of them sees them. There is no clock: time is counted in the
//! process's own heartbeats that came back. So a process that receives nothing at all considers no
//! other dead.

use std::collections::BTreeMap;

use construct_domain::partition;
use construct_proto::mesh::v1::ReconcilerHeartbeat;

use crate::assignment::PartitionAssignment;

/// Own heartbeats without one of a peer, after which the peer is dead.
const MAX_MISSED_BEATS: u32 = 4;
/// Heartbeats that a dead peer must send before it counts again. Otherwise partitions would move
/// back and forth with a peer that is barely alive.
const PROBATION_BEATS: u32 = 4;
/// Own heartbeats after which a dead peer is forgotten.
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
    /// Own heartbeats since its last one.
    missed: u32,
    /// Heartbeats that it must still send before it counts.
    probation: u32,
}

/// The sender of a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BeatSource {
    Own,
    Peer,
}

impl Members {
    pub(crate) fn new(instance: String, process: String) -> Self {
        Self { instance, process, peers: BTreeMap::new() }
    }

    /// Records a heartbeat. Own ones are counted by [`Members::count_own_beat`], as often as time
    /// has passed.
    pub(crate) fn record_beat(&mut self, beat: &ReconcilerHeartbeat) -> BeatSource {
        if beat.instance == self.instance {
            // An earlier process of this instance is irrelevant.
            return if beat.process == self.process { BeatSource::Own } else { BeatSource::Peer };
        }
        if beat.leaving {
            // The end of an instance's earlier process is not the end of its current one.
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

    /// Counts an own heartbeat that came back, an interval after the previous one.
    pub(crate) fn count_own_beat(&mut self) {
        for peer in self.peers.values_mut() {
            peer.missed = peer.missed.saturating_add(1);
            if peer.missed >= MAX_MISSED_BEATS {
                peer.probation = PROBATION_BEATS;
            }
        }
        self.peers.retain(|_, peer| peer.missed < FORGET_AFTER_BEATS);
    }

    /// The live instances, including this one.
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

    /// The partitions of this instance.
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

    fn beat(instance: &str, process: &str) -> ReconcilerHeartbeat {
        ReconcilerHeartbeat {
            instance: instance.to_owned(),
            process: process.to_owned(),
            ..ReconcilerHeartbeat::default()
        }
    }

    fn leave(instance: &str, process: &str) -> ReconcilerHeartbeat {
        ReconcilerHeartbeat { leaving: true, ..beat(instance, process) }
    }

    #[test]
    fn single_member_owns_all_and_two_own_half_each() {
        let (mut a, mut b) = (members(), Members::new("b".to_owned(), "2".to_owned()));
        assert_eq!(a.assignment(), PartitionAssignment::all());
        assert_eq!(a.record_beat(&beat("b", "2")), BeatSource::Peer);
        assert_eq!(b.record_beat(&beat("a", "1")), BeatSource::Peer);
        assert_eq!(a.assignment().intersection(b.assignment()), PartitionAssignment::EMPTY);
        assert_eq!(a.assignment().union(b.assignment()), PartitionAssignment::all());
        assert_eq!(a.assignment().partitions().count(), 8);
    }

    #[test]
    fn silent_peer_dies_after_missed_beats_and_leaving_at_once() {
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
    fn isolated_process_considers_no_peer_dead() {
        let mut a = members();
        a.record_beat(&beat("b", "2"));
        let assignment = a.assignment();
        // Its own heartbeats do not come back: nothing is counted, however long that takes. Then
        // all peers are heard again.
        a.count_own_beat();
        assert_eq!(a.record_beat(&beat("a", "1")), BeatSource::Own);
        assert_eq!(a.assignment(), assignment);
    }

    #[test]
    fn silent_peer_counts_again_after_probation() {
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
    fn new_process_of_dead_instance_counts_at_once() {
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
