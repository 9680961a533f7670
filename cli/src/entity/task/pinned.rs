//! Facts that are pinned to a task.

use construct_proto::v1::{GetTaskRequest, PinnedFacts, Task, UpdateTaskRequest};
use tonic::Code;

use crate::{
    failure::Failure,
    gateway::{Gateway, bounded, call, idempotency_key},
};

/// How often a change is made anew because somebody else has changed the task meanwhile, as
/// everything does that goes on in it.
const TRIES: u32 = 20;

/// Pins a fact, unless it is pinned already.
///
/// # Errors
/// What the gateway fails with.
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

/// Takes a fact away.
///
/// # Errors
/// When it is not pinned; what the gateway fails with.
pub(super) async fn unpin(gateway: &Gateway, task: &str, fact: &str) -> Result<Task, Failure> {
    let mut named: Option<String> = None;
    change(gateway, task, |facts| {
        // A number says which fact as they stood first: others may have taken one away meanwhile,
        // perhaps this one.
        let found = match &named {
            Some(named) => facts.iter().position(|pinned| pinned == named),
            None => Some(place(facts, fact).ok_or_else(|| {
                Failure::failed(format!("nothing is pinned as {fact}"))
                    .hint("construct task get says what is pinned")
            })?),
        };
        if let Some(place) = found {
            named = Some(facts.remove(place));
        }
        Ok(found.is_some())
    })
    .await
}

/// What is pinned, with the numbers by which it can be taken away.
pub(super) fn words(facts: &[String]) -> String {
    let numbered = facts
        .iter()
        .zip(1_u32..)
        .map(|(fact, number)| format!("{number}. {}", fact.replace('\n', "\n   ")));
    numbered.collect::<Vec<_>>().join("\n")
}

/// The place of a fact, by its words or its number.
fn place(facts: &[String], fact: &str) -> Option<usize> {
    let by_number =
        || fact.parse::<usize>().ok()?.checked_sub(1).filter(|place| *place < facts.len());
    facts.iter().position(|pinned| pinned == fact).or_else(by_number)
}

/// Changes what is pinned to the task as it is at that moment. False: it is fine as it is.
async fn change(
    gateway: &Gateway,
    id: &str,
    mut change: impl FnMut(&mut Vec<String>) -> Result<bool, Failure>,
) -> Result<Task, Failure> {
    let mut tries = 0;
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
        tries += 1;
        match bounded(gateway.tasks().update_task(request)).await {
            Err(status) if status.code() == Code::Aborted && tries < TRIES => {}
            done => return Ok(done?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fact_is_named_by_its_words_or_its_number() {
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
            assert_eq!(place(&facts, fact), expected, "{fact}");
        }
        assert_eq!(place(&facts, "rains"), None);
        assert_eq!(words(&facts), "1. It rains.\n2. 1\n3. Port 8080\n   is taken.");
    }
}
