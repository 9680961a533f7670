//! CPU time of a run.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Shorter work of the host counts as the script's own: two reads of the thread's clock are system
/// calls, and would take as long as most calls. The default maximum of calls, all of this length,
/// uses up a fiftieth of a script's time.
const MIN_EXCLUDED_TIME: Duration = Duration::from_micros(20);

/// CPU time of a run: that of the thread while the run is polled, less the time in the host's
/// futures meanwhile.
///
/// The thread's clock stops while other threads have the processor, so that a busy machine does not
/// use up a script's time.
#[derive(Debug, Default)]
pub(super) struct Meter {
    spent: Duration,
    /// The poll under way.
    poll: Option<Poll>,
}

#[derive(Debug)]
struct Poll {
    /// The time of the last sample of the thread's clock, and its value.
    sampled: (Instant, Duration),
    /// CPU time of the script from the start of the poll to that sample.
    own: Duration,
}

impl Poll {
    /// Samples the thread's clock. At most `own` of the time since the last sample was the
    /// script's.
    fn sample(&mut self, own: Duration) {
        let now = (Instant::now(), thread_time());
        let done = now.1.saturating_sub(self.sampled.1);
        self.own += done.min(own);
        self.sampled = now;
    }
}

impl Meter {
    /// Starts a poll of the run.
    pub(super) fn enter(&mut self) {
        self.poll = Some(Poll { sampled: (Instant::now(), thread_time()), own: Duration::ZERO });
    }

    /// Ends the poll.
    pub(super) fn leave(&mut self) {
        self.spent = self.cpu();
        self.poll = None;
    }

    /// Excludes the thread's time since `began` from the poll under way: it was the host's.
    ///
    /// The last sample is somewhat older, at most a tick of the epoch. The time from it to `began`
    /// counts as the script's, though others may have used a part of it. The time since `began`
    /// does not count fully as the host's, because others may have used it: the script must not
    /// gain by that.
    pub(super) fn exclude_since(&mut self, began: Instant) {
        if began.elapsed() < MIN_EXCLUDED_TIME {
            return;
        }
        if let Some(poll) = &mut self.poll {
            poll.sample(began.saturating_duration_since(poll.sampled.0));
        }
    }

    /// The run's CPU time until now.
    pub(super) fn cpu(&mut self) -> Duration {
        let own = self.poll.as_mut().map_or(Duration::ZERO, |poll| {
            poll.sample(Duration::MAX);
            poll.own
        });
        self.spent + own
    }
}

/// The thread's clock.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compute(time: Duration) {
        let until = thread_time() + time;
        while thread_time() < until {}
    }

    #[test]
    fn host_time_is_excluded_from_the_script() {
        let mut meter = Meter::default();
        meter.enter();
        let began = Instant::now();
        compute(Duration::from_millis(200));
        meter.exclude_since(began);
        assert!(meter.cpu() < Duration::from_millis(100), "{meter:?}");
        compute(Duration::from_millis(20));
        meter.leave();
        assert!((20..120).contains(&meter.cpu().as_millis()), "{meter:?}");
    }

    #[test]
    fn waits_and_short_host_work_do_not_reduce_script_time() {
        let mut meter = Meter::default();
        for _ in 0..10 {
            meter.enter();
            compute(Duration::from_millis(2));
            let began = Instant::now();
            std::thread::sleep(Duration::from_millis(5));
            meter.exclude_since(began);
            compute(Duration::from_millis(2));
            meter.exclude_since(Instant::now());
            meter.leave();
        }
        assert!(meter.cpu() >= Duration::from_millis(40), "{meter:?}");
    }
}
