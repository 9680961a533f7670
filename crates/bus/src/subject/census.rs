//! Which tasks there are no longer.

use construct_proto::mesh::v1 as mesh;

use super::{Address, Invalid, Question, tokens::ROOT, tokens::Tokens};

/// Tasks that can be asked about at a time.
pub const MAX_CENSUS_TASKS: usize = 1_000;

/// Asks any one reconciler which tasks are gone for good; the answer is a `TasksGone`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Census;

impl Address for Census {
    type Message = mesh::TaskCensus;

    fn subject(&self) -> String {
        format!("{ROOT}.ctl.reconciler.census")
    }

    fn pattern() -> String {
        Self.subject()
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "ctl.reconciler")?;
        tokens.word("census")?;
        tokens.end()?;
        Ok(Self)
    }

    fn check(&self, census: &mesh::TaskCensus) -> Result<(), Invalid> {
        if census.task_ids.len() > MAX_CENSUS_TASKS {
            return Err(Invalid::new(
                "too many tasks are asked about at once",
                census.task_ids.len().to_string(),
            ));
        }
        Ok(())
    }
}

impl Question for Census {
    type Answer = mesh::TasksGone;

    const GROUP: Option<&'static str> = Some("census");
}
