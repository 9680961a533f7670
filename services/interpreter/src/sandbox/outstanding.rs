//! Limits the calls and timers that a guest may have under way.

use std::collections::HashSet;

use wasmtime::{Error, Result};

/// Maximum number of started calls whose ends the guest has not taken. The guest starts no more at
/// once and queues further ones (`MAX_RUNNING` in its `prelude/tools.js`). Only a guest whose
/// engine a script has taken over exceeds this. For each call the host holds the arguments or the
/// result, which the guest's own memory does not bound.
const MAX_CALLS: usize = 64;
/// Maximum number of timers. The guest refuses more than 1,000 (`MAX_TIMERS`), but counts them
/// before it converts the delay to a number. That may run code of the script that sets further
/// timers: a few hundred, since each is nested in the previous one.
const MAX_TIMERS: usize = 4096;

/// The calls and timers that were started and whose ends the guest has not taken, by number.
#[derive(Debug, Default)]
pub(super) struct Outstanding {
    calls: HashSet<u32>,
    timers: HashSet<u32>,
}

impl Outstanding {
    /// Starts a call. `Err` ends the run.
    pub(super) fn start_call(&mut self, number: u32) -> Result<()> {
        start(&mut self.calls, number, MAX_CALLS, "calls")
    }

    /// Starts a timer. `Err` ends the run.
    pub(super) fn start_timer(&mut self, number: u32) -> Result<()> {
        start(&mut self.timers, number, MAX_TIMERS, "timers")
    }

    /// Removes a timer. Returns whether the number was a timer.
    pub(super) fn cancel(&mut self, number: u32) -> bool {
        self.timers.remove(&number)
    }

    /// Removes a call or timer whose end the guest has taken.
    pub(super) fn end(&mut self, number: u32) {
        self.calls.remove(&number);
        self.timers.remove(&number);
    }
}

fn start(numbers: &mut HashSet<u32>, number: u32, max: usize, kind: &str) -> Result<()> {
    if numbers.len() >= max {
        return Err(Error::msg(format!("the guest starts more than {max} {kind} at once")));
    }
    numbers.insert(number);
    Ok(())
}
