//! Queues wakes until their task may be reconciled: a limited number per organization runs at a
//! time, the rest waits as ids.
//!
//! A wake contains nothing that is not in PostgreSQL, so it is acknowledged as soon as it is queued
//! here. So an organization that floods the queue does not hold up the wakes of others in
//! JetStream, and has no more actors than it can have running reconciles. What is lost with the
//! process is found by the process that takes over the partition.
//!
//! Bounds: `max_concurrent` reconciles per organization; [`MAX_WAITING`] ids in total, of which an
//! organization may have half. A wake beyond that is dropped, and the sweep finds its task.

use std::collections::{HashMap, VecDeque};

use construct_domain::{OrganizationId, TaskId};
use opentelemetry::Context;

use crate::assignment::PartitionAssignment;

/// Maximum number of waiting tasks of all organizations.
const MAX_WAITING: usize = 100_000;

/// Waiting tasks, and tasks being reconciled.
#[derive(Debug)]
pub(crate) struct AdmissionQueue {
    organizations: HashMap<OrganizationId, OrganizationQueue>,
    waiting: usize,
    max_concurrent: usize,
}

/// The tasks of one organization.
#[derive(Debug, Default)]
struct OrganizationQueue {
    /// Tasks being reconciled, with the trace of a wake that came meanwhile: those must be
    /// reconciled again.
    running: HashMap<TaskId, Option<Context>>,
    queue: VecDeque<TaskId>,
    /// The traces of the waiting tasks.
    queued: HashMap<TaskId, Context>,
}

/// What happens to a wake.
#[derive(Debug)]
pub(crate) enum Admission {
    /// The task must be reconciled now; [`AdmissionQueue::finish`] must follow.
    Admitted(Context),
    /// The task waits, or is being reconciled.
    Queued,
    /// The queue is full: the sweep finds the task later.
    Dropped,
}

impl AdmissionQueue {
    pub(crate) fn new(max_concurrent: usize) -> Self {
        Self { organizations: HashMap::new(), waiting: 0, max_concurrent }
    }

    /// Admits or queues a wake. A wake of the sweep says nothing new about a task that is being
    /// reconciled.
    pub(crate) fn admit(
        &mut self,
        organization: OrganizationId,
        task: TaskId,
        trace: Context,
        swept: bool,
    ) -> Admission {
        let organization_queue = self.organizations.entry(organization).or_default();
        if let Some(again) = organization_queue.running.get_mut(&task) {
            if !swept {
                *again = Some(trace);
            }
            return Admission::Queued;
        }
        if organization_queue.queued.contains_key(&task) {
            return Admission::Queued;
        }
        if organization_queue.running.len() < self.max_concurrent {
            organization_queue.running.insert(task, None);
            return Admission::Admitted(trace);
        }
        if self.waiting >= MAX_WAITING || organization_queue.queue.len() >= MAX_WAITING / 2 {
            return Admission::Dropped;
        }
        self.waiting += 1;
        organization_queue.queue.push_back(task);
        organization_queue.queued.insert(task, trace);
        Admission::Queued
    }

    /// Ends a reconcile. Returns the next task of the organization to reconcile.
    pub(crate) fn finish(
        &mut self,
        organization: OrganizationId,
        task: TaskId,
    ) -> Option<(TaskId, Context)> {
        let organization_queue = self.organizations.get_mut(&organization)?;
        if let Some(trace) = organization_queue.running.remove(&task)? {
            // Behind the others, so that a busy task does not delay them.
            self.waiting += 1;
            organization_queue.queue.push_back(task);
            organization_queue.queued.insert(task, trace);
        }
        let next = organization_queue
            .queue
            .pop_front()
            .and_then(|next| organization_queue.queued.remove_entry(&next));
        match &next {
            Some((next, _)) => {
                self.waiting -= 1;
                organization_queue.running.insert(*next, None);
            }
            None if organization_queue.running.is_empty() => {
                self.organizations.remove(&organization);
            }
            None => {}
        }
        next
    }

    /// Forgets waiting tasks of other replicas' partitions.
    pub(crate) fn retain_assigned(&mut self, assignment: PartitionAssignment) {
        for organization_queue in self.organizations.values_mut() {
            organization_queue.queue.retain(|task| assignment.contains_task(*task));
            organization_queue.queued.retain(|task, _| assignment.contains_task(*task));
        }
        self.organizations.retain(|_, organization_queue| {
            !(organization_queue.queue.is_empty() && organization_queue.running.is_empty())
        });
        self.waiting = self
            .organizations
            .values()
            .map(|organization_queue| organization_queue.queue.len())
            .sum();
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

    fn wake(queue: &mut AdmissionQueue, of: u128, n: u128) -> char {
        match queue.admit(organization(of), task(n), Context::new(), false) {
            Admission::Admitted(_) => 'l',
            Admission::Queued => 'w',
            Admission::Dropped => 'd',
        }
    }

    fn finish(queue: &mut AdmissionQueue, of: u128, n: u128) -> Option<TaskId> {
        queue.finish(organization(of), task(n)).map(|(task, _)| task)
    }

    #[test]
    fn organizations_have_independent_concurrency_limits() {
        let mut queue = AdmissionQueue::new(2);
        assert_eq!((1..=4).map(|n| wake(&mut queue, 1, n)).collect::<String>(), "llww");
        assert_eq!(wake(&mut queue, 2, 9), 'l');
        assert_eq!(finish(&mut queue, 1, 2), Some(task(3)));
        assert_eq!(finish(&mut queue, 1, 1), Some(task(4)));
        assert_eq!(finish(&mut queue, 1, 3), None);
        assert_eq!(finish(&mut queue, 1, 4), None);
        assert_eq!(finish(&mut queue, 2, 9), None);
        assert!(queue.organizations.is_empty() && queue.waiting == 0);
    }

    #[test]
    fn task_woken_while_reconciling_is_requeued_at_the_end() {
        let mut queue = AdmissionQueue::new(1);
        assert_eq!((1..=2).map(|n| wake(&mut queue, 1, n)).collect::<String>(), "lw");
        assert_eq!([wake(&mut queue, 1, 1), wake(&mut queue, 1, 1)], ['w', 'w']);
        assert_eq!(finish(&mut queue, 1, 1), Some(task(2)));
        assert_eq!(finish(&mut queue, 1, 2), Some(task(1)));
        assert_eq!(finish(&mut queue, 1, 1), None);
    }

    #[test]
    fn sweep_does_not_requeue_task_being_reconciled() {
        let mut queue = AdmissionQueue::new(1);
        assert_eq!(wake(&mut queue, 1, 1), 'l');
        assert!(matches!(
            queue.admit(organization(1), task(1), Context::new(), true),
            Admission::Queued
        ));
        assert_eq!(finish(&mut queue, 1, 1), None);
    }

    #[test]
    fn flood_is_bounded_and_leaves_room_for_others() {
        let mut queue = AdmissionQueue::new(1);
        for n in 1..=MAX_WAITING as u128 / 2 + 1 {
            assert_ne!(wake(&mut queue, 1, n), 'd');
        }
        assert_eq!(wake(&mut queue, 1, 0), 'd');
        assert_eq!([wake(&mut queue, 2, 1), wake(&mut queue, 2, 2)], ['l', 'w']);
    }

    #[test]
    fn waiting_tasks_of_reassigned_partition_are_forgotten() {
        let mut queue = AdmissionQueue::new(1);
        for n in 1..=20 {
            wake(&mut queue, 1, n);
        }
        let assignment: PartitionAssignment =
            [construct_domain::partition::for_task(task(7))].into_iter().collect();
        queue.retain_assigned(assignment);
        // The running one is allowed to finish.
        let mut seen = Vec::new();
        let mut last = 1;
        while let Some(next) = queue.finish(organization(1), task(last)) {
            last = next.0.uuid().as_u128();
            seen.push(next.0);
        }
        assert!(
            seen.contains(&task(7)) && seen.iter().all(|task| assignment.contains_task(*task)),
            "{seen:?}"
        );
    }
}
