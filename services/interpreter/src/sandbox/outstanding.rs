//! How much a guest may have under way.

use std::collections::HashSet;

use wasmtime::{Error, Result};

/// Most calls that were started and whose ends the guest has not taken. It starts no more at once
/// and lets further ones wait (`MAX_RUNNING` in its `prelude/tools.js`), so that only a guest in
/// which a script has taken over the engine gets here. For each the host holds the arguments or the
/// result, which the guest's own memory doesn't bound.
const MAX_CALLS: usize = 64;
/// Most timers likewise. The guest refuses more than 1,000 (`MAX_TIMERS`), but counts them before
/// it takes the delay for a number, which may run code of the script that sets further ones: a few
/// hundred, since each is nested in the one before.
const MAX_TIMERS: usize = 4096;

/// The calls and timers that were started and whose ends the guest has not taken, by number.
#[derive(Debug, Default)]
pub(super) struct Outstanding {
    calls: HashSet<u32>,
    timers: HashSet<u32>,
}

impl Outstanding {
    /// A call is started; `Err` ends the run.
    pub(super) fn start_call(&mut self, number: u32) -> Result<()> {
        start(&mut self.calls, number, MAX_CALLS, "calls")
    }

    /// A timer is started; `Err` ends the run.
    pub(super) fn start_timer(&mut self, number: u32) -> Result<()> {
        start(&mut self.timers, number, MAX_TIMERS, "timers")
    }

    /// Whether this is a timer. If so, it is none any more.
    pub(super) fn cancel(&mut self, number: u32) -> bool {
        self.timers.remove(&number)
    }

    /// The guest takes the end of a call or timer.
    pub(super) fn end(&mut self, number: u32) {
        self.calls.remove(&number);
        self.timers.remove(&number);
    }
}

fn start(numbers: &mut HashSet<u32>, number: u32, most: usize, what: &str) -> Result<()> {
    if numbers.len() >= most {
        return Err(Error::msg(format!("the guest starts more than {most} {what} at once")));
    }
    numbers.insert(number);
    Ok(())
}
