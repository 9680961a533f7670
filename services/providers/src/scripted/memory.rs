//! How often each turn has been tried.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
};

/// Turns remembered at most; the oldest is forgotten first, and would fail anew.
const MAX_TURNS: usize = 10_000;

/// AttemptCounts tries per turn of a task. Lives as long as the process: after a restart a fault begins
/// anew.
#[derive(Debug, Default)]
pub(crate) struct AttemptCounter(Mutex<AttemptCounts>);

#[derive(Debug, Default)]
struct AttemptCounts {
    tries: HashMap<String, u32>,
    order: VecDeque<String>,
}

impl AttemptCounter {
    /// AttemptCounts a try of the turn `key`, and says the how manieth it is, from 1.
    pub(crate) fn count(&self, key: String) -> u32 {
        // Counting cannot panic in between, so that the counts behind a poisoned lock are whole.
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !counts.tries.contains_key(&key) {
            if counts.order.len() >= MAX_TURNS
                && let Some(oldest) = counts.order.pop_front()
            {
                counts.tries.remove(&oldest);
            }
            counts.order.push_back(key.clone());
        }
        let tries = counts.tries.entry(key).or_default();
        *tries = tries.saturating_add(1);
        *tries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_counted_separately_and_oldest_is_evicted() {
        let memory = AttemptCounter::default();
        assert_eq!(
            [memory.count("a".into()), memory.count("a".into()), memory.count("b".into())],
            [1, 2, 1]
        );
        for n in 0..MAX_TURNS {
            memory.count(n.to_string());
        }
        assert_eq!(memory.count("a".into()), 1);
    }
}
