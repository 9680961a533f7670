//! When a script is taken to be what its processes die of.

/// So many processes may die in a row without having got the scripts any further.
const FRUITLESS: u32 = 5;

/// So many may die in all, however far they got: a script that kills each process a call later
/// would go on for as many calls as a script may make.
const IN_ALL: u32 = 25;

/// Processes that had taken an execution over and neither ended it nor handed it back: they died.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Deaths {
    in_all: u32,
    /// Since one of them made a call that none had made before.
    fruitless: u32,
}

impl Deaths {
    /// A process takes the execution over. It is dead, unless the journal says otherwise later.
    pub(super) fn opened(&mut self) {
        self.in_all += 1;
        self.fruitless += 1;
    }

    /// It has handed the execution back.
    pub(super) fn released(&mut self) {
        self.in_all = self.in_all.saturating_sub(1);
        self.fruitless = self.fruitless.saturating_sub(1);
    }

    /// It made a call that is new.
    pub(super) fn got_further(&mut self) {
        self.fruitless = 0;
    }

    /// Why the execution is given up, once it is.
    pub(crate) fn too_many(self) -> Option<String> {
        if self.fruitless >= FRUITLESS {
            let deaths = self.fruitless;
            return Some(format!(
                "{deaths} processes in a row died while they ran it, and it is given up"
            ));
        }
        (self.in_all >= IN_ALL).then(|| {
            format!("{} processes died while they ran it, and it is given up", self.in_all)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_die_in_a_row_are_enough_only_when_none_of_them_got_further() {
        let (mut stuck, mut moving) = (Deaths::default(), Deaths::default());
        for _ in 0..FRUITLESS {
            assert_eq!(stuck.too_many(), None);
            stuck.opened();
            moving.opened();
            moving.got_further();
        }
        assert!(
            stuck.too_many().is_some_and(|reason| reason.starts_with("5 processes in a row died"))
        );
        assert_eq!(moving.too_many(), None);
        for _ in FRUITLESS..IN_ALL {
            assert_eq!(moving.too_many(), None);
            moving.opened();
            moving.got_further();
        }
        assert!(moving.too_many().is_some_and(|reason| reason.starts_with("25 processes died")));
    }

    #[test]
    fn a_process_that_hands_back_has_not_died() {
        let mut deaths = Deaths::default();
        for _ in 0..2 * IN_ALL {
            deaths.opened();
            deaths.released();
        }
        assert_eq!(deaths, Deaths::default());
    }
}
