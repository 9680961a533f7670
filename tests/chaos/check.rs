//! The invariants that hold after a trial.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use construct_bus::topology::Stream;
use construct_proto::v1::{self, TaskPhase, event::Payload};
use construct_tests::{
    client::{TURN_TIMEOUT, id},
    mesh::Mesh,
    recorder::check_order,
    transcript::{Transcript, results, source, status, text},
    wait::until,
};

use crate::load::{BUDGET_EXHAUSTED, EFFECTS, Job, Kind};

/// The prefixes of the errors of messages that their users withdrew, by a cancel or a rewind.
const WITHDRAWN: [&str; 2] = ["cancelled", "the conversation was rewound"];

/// Why a message may fail when a dependency is away for longer than the retries last. Work that was
/// abandoned because workers died is the only failure of our own; any other is a defect.
fn may_fail(job: &Job, error: &v1::TaskError) -> bool {
    match error.code.as_str() {
        "BUDGET_EXHAUSTED" => job.budget().is_some(),
        "TRANSIENT" | "OVERLOADED" | "DEADLINE_EXCEEDED" => true,
        "INTERNAL" => error.message.contains("workers were lost, or not heard of"),
        _ => false,
    }
}

/// The outcome of a trial.
#[derive(Debug, Default)]
pub(crate) struct Report {
    messages: usize,
    effects: usize,
    unknown: usize,
    failed: usize,
    /// Messages that the tight budget ended, which is no failure.
    stopped: usize,
    /// Messages that their users withdrew before the answer, which is no failure either.
    withdrawn: usize,
    subtasks: usize,
    calls: i64,
}

impl Report {
    /// Side effects of unknown outcome, and failed messages.
    pub(crate) const fn interrupted(&self) -> usize {
        self.unknown + self.failed
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { messages, effects, unknown, failed, stopped, withdrawn, subtasks, calls } = self;
        write!(
            f,
            "{messages} messages, {subtasks} subtasks, {calls} calls out of a tight budget, {effects} side effects, {unknown} of unknown outcome, {failed} messages failed \
             with a reason, {stopped} were stopped by the budget, {withdrawn} withdrawn"
        )
    }
}

/// Panics with every broken promise.
pub(crate) async fn check(mesh: &Mesh, jobs: &[Job]) -> Report {
    let mut report = Report::default();
    // No faults are injected any more, so that everything works.
    futures::future::join_all(jobs.iter().map(last_message)).await;
    for job in jobs {
        check_conversation(mesh, job, &mut report).await;
    }
    // Chaos may interrupt some of them. If it is every tenth, there is another cause.
    let few = |of: usize| of / 10 + 3;
    assert!(
        report.failed <= few(report.messages) && report.unknown <= few(report.effects),
        "too many were interrupted: {report}"
    );
    check_queues_empty(mesh).await;
    let forgotten = mesh.database.stuck_tasks().await.unwrap();
    assert!(forgotten.is_empty(), "no wake is planned for them: {forgotten:?}");
    report
}

/// Sends one more message to a job, which must be answered.
async fn last_message(job: &Job) {
    if let Some(budget) = job.budget() {
        budget.raise(job).await;
    }
    let text = "last".to_owned();
    let task = job.conversation.ask(&text).await.status.unwrap();
    assert_eq!(task.last_outcome(), v1::TurnOutcome::Completed, "{:?}", task.last_error);
    job.said.lock().unwrap().push(text);
}

async fn check_conversation(mesh: &Mesh, job: &Job, report: &mut Report) {
    let task = job.conversation.wait_until_idle().await.status.unwrap();
    let transcript = job.conversation.full_transcript().await;
    let said = job.said.lock().unwrap().clone();
    let said = placed(job, &said, &transcript);
    // Every message once and in order, each answered, and every script with its result.
    transcript.check(&said);
    report.messages += transcript
        .messages
        .iter()
        .filter(|message| source(message) == v1::MessageSource::User)
        .count();
    for message in &transcript.messages {
        let error = status(message).error;
        let ended = match &job.kind {
            Kind::Delegates(_) if error.contains(BUDGET_EXHAUSTED) => &mut report.stopped,
            Kind::Fickle if WITHDRAWN.iter().any(|words| error.starts_with(words)) => {
                &mut report.withdrawn
            }
            _ => &mut report.failed,
        };
        *ended += usize::from(!error.is_empty());
    }
    check_effects(&mesh.host_path(&job.folder), &said, &transcript, report);
    if job.budget().is_some() {
        let spent =
            task.usage.unwrap_or_default().cost_pico_usd + check_subtasks(job, report).await;
        check_money(job, spent, report).await;
    }
    // Subscribers have seen the same, without gap or duplicate.
    let events = job.recorder.wait_for_sequence(task.event_sequence).await;
    check_order(&events);
    for turn in events.iter().filter_map(|event| match &event.payload {
        Some(Payload::TurnCompleted(turn)) => Some(turn),
        _ => None,
    }) {
        let fits = turn.outcome() == v1::TurnOutcome::Completed
            || turn.outcome() == v1::TurnOutcome::Cancelled && matches!(job.kind, Kind::Fickle)
            || turn.error.as_ref().is_some_and(|error| may_fail(job, error));
        assert!(fits, "chaos is no reason for this: {turn:?}");
    }
    let why = job.conversation.explain().await.unwrap();
    assert_eq!(why.phase(), TaskPhase::AwaitInput, "{why:?}");
    assert!(why.waiting_for.contains("a message from a user"), "{why:?}");
}

/// The sent messages that have a position in the transcript: all but those that were dropped before
/// their turn and say so.
fn placed<'a>(job: &Job, said: &'a [String], transcript: &Transcript) -> Vec<&'a str> {
    let mut dropped = BTreeSet::new();
    for message in transcript.unplaced_messages() {
        let (text, status) = (text(message), status(message));
        let is_withdrawn = WITHDRAWN.iter().any(|words| status.error.starts_with(words));
        let fits =
            matches!(job.kind, Kind::Fickle) && is_withdrawn && status.processed_at.is_some();
        assert!(fits && said.contains(&text), "a message was lost:\n{}", transcript.show());
        assert!(dropped.insert(text), "a message is there twice:\n{}", transcript.show());
    }
    said.iter().map(String::as_str).filter(|text| !dropped.contains(*text)).collect()
}

/// The usage of a task and its subtasks equals the ledger and the charges of their budget, and
/// nothing stays reserved.
async fn check_money(job: &Job, spent: i64, report: &mut Report) {
    let Some(budget) = job.budget() else { return };
    let (client, limit) = (job.conversation.client(), *budget.limit.lock().unwrap());
    let request = v1::GetBudgetRequest { budget: budget.id.clone() };
    // For an abandoned call whose worker died, money stays reserved for two minutes.
    let seen = until("nothing to be reserved", TURN_TIMEOUT, async || {
        let seen = client
            .budgets()
            .get_budget(request.clone())
            .await
            .unwrap()
            .into_inner()
            .status
            .unwrap();
        if seen.reserved_pico_usd == 0 { Ok(seen) } else { Err(seen) }
    })
    .await;
    let request = v1::GetCostsRequest {
        task: job.conversation.id().to_owned(),
        ..v1::GetCostsRequest::default()
    };
    let costs = client.budgets().get_costs(request).await.unwrap().into_inner().total.unwrap();
    let ledger = costs.usage.unwrap_or_default().cost_pico_usd;
    assert_eq!(seen.spent_pico_usd, ledger, "the budget, and the ledger");
    assert_eq!(spent, ledger, "the tasks, and the ledger");
    assert!(spent > 0 && spent <= limit, "{spent} of {limit}");
    report.calls += costs.calls;
}

/// Each subtask was created once, with one answered message, and none is still active. Returns
/// their cost.
async fn check_subtasks(job: &Job, report: &mut Report) -> i64 {
    let client = job.conversation.client();
    let filter = v1::list_tasks_request::Filter {
        parent: job.conversation.id().to_owned(),
        ..Default::default()
    };
    let page = v1::PageRequest { page_size: 100, ..v1::PageRequest::default() };
    let request = v1::ListTasksRequest { page: Some(page), filter: Some(filter) };
    let begun = client.tasks().list_tasks(request).await.unwrap().into_inner().tasks;
    let (mut titles, mut cost) = (BTreeSet::new(), 0);
    for task in &begun {
        let title = task.spec.as_ref().map(|spec| spec.title.clone()).unwrap_or_default();
        assert!(titles.insert(title.clone()), "a subtask was begun twice: {title}");
        let subtask = client.conversation(&id(task.metadata.as_ref()));
        cost +=
            subtask.wait_until_idle().await.status.unwrap().usage.unwrap_or_default().cost_pico_usd;
        let transcript = subtask.transcript().await;
        assert_eq!(
            transcript.from_source(v1::MessageSource::User).len(),
            1,
            "{}",
            transcript.show()
        );
        let first = transcript
            .from_source(v1::MessageSource::User)
            .first()
            .map(|message| text(message))
            .unwrap_or_default();
        transcript.check(&[&first]);
    }
    report.subtasks += begun.len();
    cost
}

/// No effect happened twice, and none is missing without a report.
fn check_effects(folder: &Path, said: &[&str], transcript: &Transcript, report: &mut Report) {
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    let log = std::fs::read_to_string(folder.join("effects.log")).unwrap_or_default();
    for line in log.lines() {
        *times.entry(line.to_owned()).or_default() += 1;
    }
    if let Ok(made) = std::fs::read_dir(folder.join("made")) {
        for file in made {
            *times.entry(file.unwrap().file_name().into_string().unwrap()).or_default() += 1;
        }
    }
    let twice: Vec<_> = times.iter().filter(|(_, times)| **times > 1).collect();
    assert!(twice.is_empty(), "effects happened twice: {twice:?}\n{}", transcript.show());
    report.effects += times.len();
    for (message, turn) in said.iter().zip(turns(transcript)) {
        let results: Vec<_> = turn.iter().flat_map(|message| results(message)).collect();
        let expected = (1..=EFFECTS).map(|n| format!("{message}.{n}"));
        let missing: BTreeSet<String> =
            expected.filter(|effect| !times.contains_key(effect)).collect();
        let listed = |what: &str| {
            results.iter().find_map(|result| {
                let (_, list) = result.output.split_once(&format!("{what} of {message}: "))?;
                let list: Vec<usize> = serde_json::from_str(list.split_once('.')?.0).ok()?;
                Some(list.into_iter().map(|n| format!("{message}.{n}")).collect::<BTreeSet<_>>())
            })
        };
        match listed("unknown") {
            Some(unknown) => {
                report.unknown += unknown.len();
                let unpaid = listed("unpaid").unwrap_or_default();
                let silent: Vec<_> = missing
                    .iter()
                    .filter(|one| !unknown.contains(*one) && !unpaid.contains(*one))
                    .collect();
                assert!(
                    silent.is_empty(),
                    "effects are missing without a word: {silent:?}\n{}",
                    transcript.show()
                );
            }
            // The script did not reach its end: then its result or the message says why, and not
            // those of another message.
            None => {
                let report = results.iter().any(|result| !result.error.is_empty())
                    || turn.iter().any(|message| !status(message).error.is_empty());
                assert!(
                    report,
                    "the script of {message} has no result, and nobody says why\n{}",
                    transcript.show()
                );
            }
        }
    }
}

/// Each user message with the messages up to the next one.
fn turns(transcript: &Transcript) -> Vec<Vec<&v1::Message>> {
    let mut turns: Vec<Vec<&v1::Message>> = Vec::new();
    for message in transcript.placed_messages() {
        if source(message) == v1::MessageSource::User {
            turns.push(Vec::new());
        }
        if let Some(turn) = turns.last_mut() {
            turn.push(message);
        }
    }
    turns
}

/// No message waits for a consumer, and none was undecodable.
async fn check_queues_empty(mesh: &Mesh) {
    until("the queues to be empty", TURN_TIMEOUT, async || {
        let mut left = BTreeMap::new();
        for stream in [Stream::Task, Stream::Model, Stream::Code] {
            let waiting = mesh.nats.pending_messages(stream).await;
            if waiting > 0 {
                left.insert(stream.name(), waiting);
            }
        }
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    for stream in [Stream::Task, Stream::Model, Stream::Code] {
        let held = mesh.nats.message_count(stream).await;
        if held > 0 {
            // NATS 2.9 keeps messages that it had not removed when it was killed; the task's next
            // command replaces them.
            println!("{}: {held} messages that were acknowledged are still held", stream.name());
        }
    }
    let letters = mesh.bus().await.dead_letters(0, 100).await.unwrap();
    assert_eq!(letters, [], "messages could not be understood");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(position: i64, source: v1::MessageSource, block: v1::block::Block) -> v1::Message {
        let (status, block) = (
            v1::MessageStatus { position, source: source.into(), ..Default::default() },
            Some(block),
        );
        let spec = v1::MessageSpec { blocks: vec![v1::Block { block }], ..Default::default() };
        v1::Message { spec: Some(spec), status: Some(status), ..Default::default() }
    }

    fn result(output: &str, error: &str) -> v1::block::Block {
        let (output, error) = (output.to_owned(), error.to_owned());
        v1::block::Block::CodeInterpreterResult(v1::CodeInterpreterResult {
            output,
            error,
            ..Default::default()
        })
    }

    #[test]
    #[should_panic(expected = "the script of m0 has no result")]
    fn status_of_one_message_excuses_no_other_message() {
        let said = |text: &str| v1::block::Block::Text(v1::Text { text: text.to_owned() });
        let transcript = Transcript::new(vec![
            message(1, v1::MessageSource::User, said("m0")),
            message(2, v1::MessageSource::System, result("it did something else", "")),
            message(3, v1::MessageSource::User, said("m1")),
            message(4, v1::MessageSource::System, result("", "it was stopped")),
        ]);
        check_effects(Path::new("/nowhere"), &["m0", "m1"], &transcript, &mut Report::default());
    }
}
