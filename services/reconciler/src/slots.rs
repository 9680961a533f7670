//! Limits the concurrent reconciles of the process, fairly between organizations: every
//! organization with waiting tasks gets a slot in turn, however many wait.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use construct_domain::OrganizationId;
use tokio::sync::oneshot;

/// The slots of the process. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Slots(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    free: usize,
    /// Organizations with waiting tasks, the next one first.
    turns: VecDeque<OrganizationId>,
    waiting: HashMap<OrganizationId, VecDeque<oneshot::Sender<Slot>>>,
}

/// A slot. When it is dropped, the next waiting task gets it.
#[derive(Debug)]
pub(crate) struct Slot(Option<Slots>);

impl Slots {
    pub(crate) fn new(count: usize) -> Self {
        Self(Arc::new(Mutex::new(State {
            free: count,
            turns: VecDeque::new(),
            waiting: HashMap::new(),
        })))
    }

    /// Returns a slot if one is free. Then nothing waits.
    pub(crate) fn try_acquire(&self) -> Option<Slot> {
        let mut state = self.state();
        state.free = state.free.checked_sub(1)?;
        Some(Slot(Some(self.clone())))
    }

    /// Waits for the organization's turn. Cancel-safe.
    pub(crate) async fn acquire(&self, organization: OrganizationId) -> Slot {
        let receiver = {
            let mut state = self.state();
            if let Some(free) = state.free.checked_sub(1) {
                state.free = free;
                return Slot(Some(self.clone()));
            }
            let (sender, receiver) = oneshot::channel();
            let State { turns, waiting, .. } = &mut *state;
            let queue = waiting.entry(organization).or_default();
            if queue.is_empty() {
                turns.push_back(organization);
            }
            queue.push_back(sender);
            receiver
        };
        // The sender is dropped only with all slots, and a slot in use keeps them alive.
        match receiver.await {
            Ok(slot) => slot,
            Err(_) => std::future::pending().await,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a returned slot to the next waiting task.
    fn hand_over(&self) {
        let mut state = self.state();
        while let Some(organization) = state.turns.pop_front() {
            let Some(queue) = state.waiting.get_mut(&organization) else { continue };
            let next = queue.pop_front();
            if queue.is_empty() {
                state.waiting.remove(&organization);
            } else {
                state.turns.push_back(organization);
            }
            let Some(next) = next else { continue };
            match next.send(Slot(Some(self.clone()))) {
                Ok(()) => return,
                // The waiting task is gone. The slot must not be returned by its own drop, which
                // would lock again.
                Err(mut slot) => slot.0 = None,
            }
        }
        state.free += 1;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(slots) = self.0.take() {
            slots.hand_over();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use uuid::Uuid;

    use super::*;

    fn organization(n: u128) -> OrganizationId {
        OrganizationId::from_uuid(Uuid::from_u128(n))
    }

    #[tokio::test]
    async fn flood_of_one_organization_delays_another_by_one_turn() {
        let slots = Slots::new(1);
        let mut slot_in_use = Some(slots.acquire(organization(1)).await);
        let order = Arc::new(Mutex::new(Vec::new()));
        let wait = |n: u128| {
            let (slots, order) = (slots.clone(), Arc::clone(&order));
            let mut receiver = Box::pin(async move {
                let slot = slots.acquire(organization(n)).await;
                order.lock().expect("not poisoned").push(n);
                drop(slot);
            });
            // It is queued when it is first polled.
            assert!(receiver.as_mut().now_or_never().is_none());
            receiver
        };
        let flood: Vec<_> = (0..100).map(|_| wait(1)).collect();
        let others = vec![wait(2), wait(3), wait(2)];
        drop(slot_in_use.take());
        futures::future::join_all(flood.into_iter().chain(others)).await;
        let order = order.lock().expect("not poisoned");
        assert_eq!(order.len(), 103);
        assert_eq!(order[..6], [1, 2, 3, 1, 2, 1]);
    }

    #[tokio::test]
    async fn cancelled_acquire_does_not_leak_a_slot() {
        let slots = Slots::new(1);
        let slot_in_use = slots.try_acquire().expect("free");
        assert!(slots.try_acquire().is_none());
        let mut cancelled = Box::pin(slots.acquire(organization(1)));
        assert!(cancelled.as_mut().now_or_never().is_none());
        let mut remaining = Box::pin(slots.acquire(organization(2)));
        assert!(remaining.as_mut().now_or_never().is_none());
        drop(cancelled);
        drop(slot_in_use);
        let slot = remaining.now_or_never().expect("the remaining task gets the slot");
        // A slot that was handed to a waiting task that then gives up is returned too.
        let mut cancelled = Box::pin(slots.acquire(organization(1)));
        assert!(cancelled.as_mut().now_or_never().is_none());
        drop(slot);
        drop(cancelled);
        assert!(slots.try_acquire().is_some());
    }
}
