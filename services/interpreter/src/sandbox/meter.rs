//! CPU time of a run.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time of a run: that of the thread while the run is being polled, less what was spent in the host's futures meanwhile.
///
/// The thread's clock stands still while other threads have the processor, so that a busy machine doesn't use up a script's time.
#[derive(Debug, Default)]
pub(super) struct Meter {
    spent: Duration,
    /// The thread's clock when the poll under way began.
    entered: Option<Duration>,
    /// CPU time of the host's futures since then.
    hosted: Duration,
}

impl Meter {
    /// A poll of the run begins.
    pub(super) fn enter(&mut self) {
        self.entered = Some(thread_time());
        self.hosted = Duration::ZERO;
    }

    /// The poll ends.
    pub(super) fn leave(&mut self) {
        self.spent = self.cpu();
        self.entered = None;
    }

    /// Of the poll under way, what the thread has done since its clock showed `began` was the host's. Measured by the same clock as everything
    /// else: were it the time that has passed, what others had of the processor would be taken off the script's own time.
    pub(super) fn exclude_since(&mut self, began: Duration) {
        self.hosted += thread_time().saturating_sub(began);
    }

    /// The run's CPU time until now.
    pub(super) fn cpu(&self) -> Duration {
        match self.entered {
            Some(entered) => self.spent + thread_time().saturating_sub(entered).saturating_sub(self.hosted),
            None => self.spent,
        }
    }
}

/// The thread's clock.
pub(super) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}
