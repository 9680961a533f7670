//! Finding deleted tasks.

use construct_proto::mesh::v1 as mesh;

use super::{Address, Invalid, Question, tokens::ROOT, tokens::Tokens};

/// The most tasks in one question.
pub const MAX_CENSUS_TASKS: usize = 1_000;

/// Asks any reconciler which tasks are deleted; the answer is a `TasksGone`.
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
                "too many tasks in one question",
                census.task_ids.len().to_string(),
            ));
        }
        Ok(())
    }
}

impl Question for Census {
    type Answer = mesh::DeletedTasks;

    const GROUP: Option<&'static str> = Some("census");
}
