//! CPU time of a run.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// What the host does in less time counts as the script's own: two looks at the thread's clock,
/// which the kernel has to be asked for, would take as long as most calls. As many calls as a
/// script may make by default, all of this length, use up a fiftieth of its time.
const SHORT: Duration = Duration::from_micros(20);

/// CPU time of a run: that of the thread while the run is being polled, less what was spent in the
/// host's futures meanwhile.
///
/// The thread's clock stands still while other threads have the processor, so that a busy machine
/// doesn't use up a script's time.
#[derive(Debug, Default)]
pub(super) struct Meter {
    spent: Duration,
    /// The poll under way.
    poll: Option<Poll>,
}

#[derive(Debug)]
struct Poll {
    /// When the thread's clock was last looked at, and what it showed.
    looked: (Instant, Duration),
    /// CPU time of the script from the beginning of the poll to that look.
    own: Duration,
}

impl Poll {
    /// Looks at the thread's clock again. Of what the thread has done since it was last looked at,
    /// at most `own` was the script's.
    fn look(&mut self, own: Duration) {
        let now = (Instant::now(), thread_time());
        let done = now.1.saturating_sub(self.looked.1);
        self.own += done.min(own);
        self.looked = now;
    }
}

impl Meter {
    /// A poll of the run begins.
    pub(super) fn enter(&mut self) {
        self.poll = Some(Poll { looked: (Instant::now(), thread_time()), own: Duration::ZERO });
    }

    /// The poll ends.
    pub(super) fn leave(&mut self) {
        self.spent = self.cpu();
        self.poll = None;
    }

    /// Of the poll under way, what the thread has done since `began` was the host's.
    ///
    /// Its clock was last looked at some time before, at most a tick of the epoch. What passed from
    /// there to `began` is taken for the script's, though others may have had a part of it; what
    /// passed since is not taken for the host's, because others may have had that: the script must
    /// not gain by it.
    pub(super) fn exclude_since(&mut self, began: Instant) {
        if began.elapsed() < SHORT {
            return;
        }
        if let Some(poll) = &mut self.poll {
            poll.look(began.saturating_duration_since(poll.looked.0));
        }
    }

    /// The run's CPU time until now.
    pub(super) fn cpu(&mut self) -> Duration {
        let own = self.poll.as_mut().map_or(Duration::ZERO, |poll| {
            poll.look(Duration::MAX);
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
    fn what_the_host_computes_is_not_the_scripts() {
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
    fn what_passes_in_the_host_and_what_it_does_in_moments_take_nothing_off_the_scripts_time() {
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
