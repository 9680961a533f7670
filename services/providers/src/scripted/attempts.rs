//! Counts the attempts of turns.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
};

/// Turns in memory at most; the oldest is dropped first, and would fail again.
const MAX_TURNS: usize = 10_000;

/// Counts attempts per turn of a task. Lives as long as the process: a restart resets the faults.
#[derive(Debug, Default)]
pub(crate) struct AttemptCounter(Mutex<AttemptCounts>);

#[derive(Debug, Default)]
struct AttemptCounts {
    tries: HashMap<String, u32>,
    order: VecDeque<String>,
}

impl AttemptCounter {
    /// Counts an attempt of the turn `key`, and returns its number, from 1.
    pub(crate) fn count(&self, key: String) -> u32 {
        // Counting cannot panic in between, so the counts behind a poisoned lock are consistent.
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
