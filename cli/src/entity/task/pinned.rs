//! Pinned facts of a task.

use construct_proto::v1::{GetTaskRequest, PinnedFacts, Task, UpdateTaskRequest};
use tonic::Code;

use crate::{
    failure::Failure,
    gateway::{Gateway, call, idempotency_key, with_timeout},
};

/// The maximum attempts after revision conflicts: every progress of a task changes it.
const MAX_ATTEMPTS: u32 = 20;

/// Pins a fact, unless it is pinned already.
///
/// # Errors
/// The error of the gateway.
pub(super) async fn pin(gateway: &Gateway, task: &str, fact: &str) -> Result<Task, Failure> {
    change(gateway, task, |facts| {
        let is_new = !facts.iter().any(|pinned| pinned == fact);
        if is_new {
            facts.push(fact.to_owned());
        }
        Ok(is_new)
    })
    .await
}

/// Unpins a fact.
///
/// # Errors
/// When it is not pinned, or the gateway fails.
pub(super) async fn unpin(gateway: &Gateway, task: &str, fact: &str) -> Result<Task, Failure> {
    let mut target: Option<String> = None;
    change(gateway, task, |facts| {
        // A number refers to the list as first read: others may have changed it since.
        let position = match &target {
            Some(target) => facts.iter().position(|pinned| pinned == target),
            None => Some(position(facts, fact).ok_or_else(|| {
                Failure::failed(format!("there is no pinned fact {fact}"))
                    .hint("construct task get lists pinned facts")
            })?),
        };
        if let Some(position) = position {
            target = Some(facts.remove(position));
        }
        Ok(position.is_some())
    })
    .await
}

/// The facts as a numbered list.
pub(super) fn numbered_list(facts: &[String]) -> String {
    let numbered = facts
        .iter()
        .zip(1_u32..)
        .map(|(fact, number)| format!("{number}. {}", fact.replace('\n', "\n   ")));
    numbered.collect::<Vec<_>>().join("\n")
}

/// The position of a fact, by its text or its number.
fn position(facts: &[String], fact: &str) -> Option<usize> {
    let by_number =
        || fact.parse::<usize>().ok()?.checked_sub(1).filter(|position| *position < facts.len());
    facts.iter().position(|pinned| pinned == fact).or_else(by_number)
}

/// Changes the pinned facts of the current task. `change` returns false when no change is needed.
async fn change(
    gateway: &Gateway,
    id: &str,
    mut change: impl FnMut(&mut Vec<String>) -> Result<bool, Failure>,
) -> Result<Task, Failure> {
    let mut attempts = 0;
    loop {
        let task = call(gateway.tasks().get_task(GetTaskRequest { task: id.to_owned() })).await?;
        let mut facts = task.spec.as_ref().map(|spec| spec.pinned.clone()).unwrap_or_default();
        if !change(&mut facts)? {
            return Ok(task);
        }
        let request = UpdateTaskRequest {
            task: id.to_owned(),
            pinned: Some(PinnedFacts { facts }),
            revision: task.metadata.as_ref().map_or(0, |metadata| metadata.revision),
            idempotency_key: idempotency_key(),
            ..UpdateTaskRequest::default()
        };
        attempts += 1;
        match with_timeout(gateway.tasks().update_task(request)).await {
            Err(status) if status.code() == Code::Aborted && attempts < MAX_ATTEMPTS => {}
            result => return Ok(result?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fact_is_selected_by_text_or_number() {
        let facts = ["It rains.", "1", "Port 8080\nis taken."].map(str::to_owned);
        let cases = [
            ("It rains.", Some(0)),
            ("1", Some(1)),
            ("2", Some(1)),
            ("3", Some(2)),
            ("0", None),
            ("4", None),
        ];
        for (fact, expected) in cases {
            assert_eq!(position(&facts, fact), expected, "{fact}");
        }
        assert_eq!(position(&facts, "rains"), None);
        assert_eq!(numbered_list(&facts), "1. It rains.\n2. 1\n3. Port 8080\n   is taken.");
    }
}
