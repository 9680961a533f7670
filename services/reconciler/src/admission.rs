//! Where wakes wait until their task may be looked at: so many of each organization at a time, the
//! rest as ids.
//!
//! A wake carries nothing that is not in PostgreSQL, so it is acknowledged as soon as it is here:
//! an organization that floods the queue does not keep the wakes of others in JetStream behind its
//! own, and has no more actors than it can have looks under way. What is lost with the process is
//! found by whoever takes the partition over. Bounds: `at_once` looks of each organization;
//! [`WAITING`] ids of all together, of which no organization may have more than half. A wake beyond
//! them is dropped, and the sweep finds its task.

use std::collections::{HashMap, VecDeque};

use construct_domain::{OrganizationId, TaskId};
use opentelemetry::Context;

use crate::assignment::PartitionAssignment;

/// Tasks that wait, of all organizations.
const MAX_WAITING: usize = 100_000;

/// Who waits, and who is looked at.
#[derive(Debug)]
pub(crate) struct AdmissionQueue {
    organizations: HashMap<OrganizationId, OrganizationQueue>,
    waiting: usize,
    max_concurrent: usize,
}

/// One organization's.
#[derive(Debug, Default)]
struct OrganizationQueue {
    /// Tasks that are looked at, with the trace of a wake that came meanwhile: they must be looked
    /// at once more.
    under_way: HashMap<TaskId, Option<Context>>,
    queue: VecDeque<TaskId>,
    /// The traces of those in the queue.
    queued: HashMap<TaskId, Context>,
}

/// What becomes of a wake.
#[derive(Debug)]
pub(crate) enum Admission {
    /// The task is to be looked at now; [`Gate::done`] must follow.
    Admitted(Context),
    /// It will be, or is just being.
    Queued,
    /// There is no room: the sweep finds the task later.
    Dropped,
}

impl AdmissionQueue {
    pub(crate) fn new(max_concurrent: usize) -> Self {
        Self { organizations: HashMap::new(), waiting: 0, max_concurrent }
    }

    /// Takes in a wake. One that the sweep made says nothing about a task that is just being looked
    /// at.
    pub(crate) fn admit(
        &mut self,
        organization: OrganizationId,
        task: TaskId,
        trace: Context,
        swept: bool,
    ) -> Admission {
        let lane = self.organizations.entry(organization).or_default();
        if let Some(again) = lane.under_way.get_mut(&task) {
            if !swept {
                *again = Some(trace);
            }
            return Admission::Queued;
        }
        if lane.queued.contains_key(&task) {
            return Admission::Queued;
        }
        if lane.under_way.len() < self.max_concurrent {
            lane.under_way.insert(task, None);
            return Admission::Admitted(trace);
        }
        if self.waiting >= MAX_WAITING || lane.queue.len() >= MAX_WAITING / 2 {
            return Admission::Dropped;
        }
        self.waiting += 1;
        lane.queue.push_back(task);
        lane.queued.insert(task, trace);
        Admission::Queued
    }

    /// A look is over. Gives the task of the same organization that is to be looked at next.
    pub(crate) fn finish(
        &mut self,
        organization: OrganizationId,
        task: TaskId,
    ) -> Option<(TaskId, Context)> {
        let lane = self.organizations.get_mut(&organization)?;
        if let Some(trace) = lane.under_way.remove(&task)? {
            // Behind the others, so that a busy task does not keep them out.
            self.waiting += 1;
            lane.queue.push_back(task);
            lane.queued.insert(task, trace);
        }
        let next = lane.queue.pop_front().and_then(|next| lane.queued.remove_entry(&next));
        match &next {
            Some((next, _)) => {
                self.waiting -= 1;
                lane.under_way.insert(*next, None);
            }
            None if lane.under_way.is_empty() => {
                self.organizations.remove(&organization);
            }
            None => {}
        }
        next
    }

    /// Forgets those that wait and that another replica takes care of.
    pub(crate) fn retain_assigned(&mut self, share: PartitionAssignment) {
        for lane in self.organizations.values_mut() {
            lane.queue.retain(|task| share.contains_task(*task));
            lane.queued.retain(|task, _| share.contains_task(*task));
        }
        self.organizations.retain(|_, lane| !(lane.queue.is_empty() && lane.under_way.is_empty()));
        self.waiting = self.organizations.values().map(|lane| lane.queue.len()).sum();
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn organization(n: u128) -> OrganizationId {
        OrganizationId::from_uuid(Uuid::from_u128(n))
    }

    fn task(n: u128) -> TaskId {
        TaskId::from_uuid(Uuid::from_u128(n))
    }

    fn wake(gate: &mut AdmissionQueue, of: u128, n: u128) -> char {
        match gate.admit(organization(of), task(n), Context::new(), false) {
            Admission::Admitted(_) => 'l',
            Admission::Queued => 'w',
            Admission::Dropped => 'd',
        }
    }

    fn done(gate: &mut AdmissionQueue, of: u128, n: u128) -> Option<TaskId> {
        gate.finish(organization(of), task(n)).map(|(task, _)| task)
    }

    #[test]
    fn an_organization_has_so_many_looks_at_once_and_leaves_those_of_others_alone() {
        let mut gate = AdmissionQueue::new(2);
        assert_eq!((1..=4).map(|n| wake(&mut gate, 1, n)).collect::<String>(), "llww");
        assert_eq!(wake(&mut gate, 2, 9), 'l');
        assert_eq!(done(&mut gate, 1, 2), Some(task(3)));
        assert_eq!(done(&mut gate, 1, 1), Some(task(4)));
        assert_eq!(done(&mut gate, 1, 3), None);
        assert_eq!(done(&mut gate, 1, 4), None);
        assert_eq!(done(&mut gate, 2, 9), None);
        assert!(gate.organizations.is_empty() && gate.waiting == 0);
    }

    #[test]
    fn a_task_that_is_woken_while_it_is_looked_at_is_looked_at_once_more_behind_the_others() {
        let mut gate = AdmissionQueue::new(1);
        assert_eq!((1..=2).map(|n| wake(&mut gate, 1, n)).collect::<String>(), "lw");
        assert_eq!([wake(&mut gate, 1, 1), wake(&mut gate, 1, 1)], ['w', 'w']);
        assert_eq!(done(&mut gate, 1, 1), Some(task(2)));
        assert_eq!(done(&mut gate, 1, 2), Some(task(1)));
        assert_eq!(done(&mut gate, 1, 1), None);
    }

    #[test]
    fn what_the_sweep_finds_while_it_is_looked_at_is_not_looked_at_again() {
        let mut gate = AdmissionQueue::new(1);
        assert_eq!(wake(&mut gate, 1, 1), 'l');
        assert!(matches!(
            gate.admit(organization(1), task(1), Context::new(), true),
            Admission::Queued
        ));
        assert_eq!(done(&mut gate, 1, 1), None);
    }

    #[test]
    fn a_flood_is_bounded_and_leaves_room_for_others() {
        let mut gate = AdmissionQueue::new(1);
        for n in 1..=MAX_WAITING as u128 / 2 + 1 {
            assert_ne!(wake(&mut gate, 1, n), 'd');
        }
        assert_eq!(wake(&mut gate, 1, 0), 'd');
        assert_eq!([wake(&mut gate, 2, 1), wake(&mut gate, 2, 2)], ['l', 'w']);
    }

    #[test]
    fn who_waits_in_a_partition_that_was_handed_over_is_forgotten() {
        let mut gate = AdmissionQueue::new(1);
        for n in 1..=20 {
            wake(&mut gate, 1, n);
        }
        let share: PartitionAssignment =
            [construct_domain::partition::for_task(task(7))].into_iter().collect();
        gate.retain_assigned(share);
        // The one under way is let finish.
        let mut seen = Vec::new();
        let mut last = 1;
        while let Some(next) = gate.finish(organization(1), task(last)) {
            last = next.0.uuid().as_u128();
            seen.push(next.0);
        }
        assert!(
            seen.contains(&task(7)) && seen.iter().all(|task| share.contains_task(*task)),
            "{seen:?}"
        );
    }
}
