//! Detects scripts that crash the processes that run them.

/// Maximum number of consecutive crashes without a new call of the scripts.
const MAX_CRASHES_WITHOUT_PROGRESS: u32 = 5;

/// Maximum number of crashes in total. A script that crashes each process one call later would
/// otherwise continue for as many calls as a script may make.
const MAX_CRASHES: u32 = 25;

/// Processes that took an execution over and neither ended nor released it: they crashed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CrashCount {
    total: u32,
    /// Crashes since the last new call.
    without_progress: u32,
}

impl CrashCount {
    /// Counts a process that takes the execution over. It has crashed, unless the journal says
    /// otherwise later.
    pub(super) fn opened(&mut self) {
        self.total += 1;
        self.without_progress += 1;
    }

    /// Uncounts a process that handed the execution back.
    pub(super) fn released(&mut self) {
        self.total = self.total.saturating_sub(1);
        self.without_progress = self.without_progress.saturating_sub(1);
    }

    /// Notes that a process made a new call.
    pub(super) fn note_progress(&mut self) {
        self.without_progress = 0;
    }

    /// The reason to give the execution up, if it crashed too often.
    pub(crate) fn give_up_reason(self) -> Option<String> {
        if self.without_progress >= MAX_CRASHES_WITHOUT_PROGRESS {
            let crashes = self.without_progress;
            return Some(format!(
                "{crashes} processes in a row crashed while they ran it, and it was given up"
            ));
        }
        (self.total >= MAX_CRASHES).then(|| {
            format!("{} processes crashed while they ran it, and it was given up", self.total)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crashes_in_a_row_give_up_only_without_progress() {
        let (mut stuck, mut moving) = (CrashCount::default(), CrashCount::default());
        for _ in 0..MAX_CRASHES_WITHOUT_PROGRESS {
            assert_eq!(stuck.give_up_reason(), None);
            stuck.opened();
            moving.opened();
            moving.note_progress();
        }
        assert!(
            stuck
                .give_up_reason()
                .is_some_and(|reason| reason.starts_with("5 processes in a row crashed"))
        );
        assert_eq!(moving.give_up_reason(), None);
        for _ in MAX_CRASHES_WITHOUT_PROGRESS..MAX_CRASHES {
            assert_eq!(moving.give_up_reason(), None);
            moving.opened();
            moving.note_progress();
        }
        assert!(
            moving
                .give_up_reason()
                .is_some_and(|reason| reason.starts_with("25 processes crashed"))
        );
    }

    #[test]
    fn released_execution_is_no_crash() {
        let mut crashes = CrashCount::default();
        for _ in 0..2 * MAX_CRASHES {
            crashes.opened();
            crashes.released();
        }
        assert_eq!(crashes, CrashCount::default());
    }
}
