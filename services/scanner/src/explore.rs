//! The exploration: the scanner sends prompts to a task of the mesh, polls it, and ends it, with
//! only the scan's token.

mod prompt;

use std::time::Duration;

use construct_proto::v1::{self, block};
use construct_runtime::clock;
use construct_store::scan::{Scan, ScanChanges, ScanPhase};
use jiff::Timestamp;
use secrecy::{ExposeSecret as _, SecretString};
use tonic::{Code, Status};

use crate::{
    error::Error,
    gateway::call,
    shared::Shared,
    work::{Work, scan_event},
};

/// The shortest and the longest poll interval of a task. It grows with the time that the task
/// takes.
const MIN_POLL_INTERVAL: Duration = Duration::from_secs(1);
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Messages of the model per page.
const ANSWER_PAGE_SIZE: i32 = 10;
/// Pages at most: each of three prompts may have 200 answers.
const MAX_ANSWER_PAGES: usize = 60;
/// Earlier answers that are checked again.
const MAX_EARLIER_ANSWERS: usize = 10;

/// Unseals the scan's token.
fn open_token(shared: &Shared, scan: &Scan) -> Result<SecretString, Error> {
    let sealed = scan
        .token
        .as_ref()
        .ok_or_else(|| Error::Failed("the scan no longer has a token".to_owned()))?;
    let opened = shared.keyring.open(&scan.id.to_string(), sealed);
    let bytes = opened.map_err(Error::from_seal_error)?;
    let text = std::str::from_utf8(bytes.expose_secret());
    Ok(SecretString::from(
        text.map_err(|_| Error::Failed("the scan's token cannot be read".to_owned()))?,
    ))
}

/// Sends the prompt, unless it was sent, and polls the task. Returns when to continue. No process
/// holds the scan while its task works, which may take as long as a model likes.
pub(crate) async fn explore(work: &mut Work<'_>) -> Result<Timestamp, Error> {
    let token = open_token(work.shared, &work.scan)?;
    if work.scan.message.is_empty() {
        send_prompt(work, &token).await?;
        return Ok(next_poll(&work.scan));
    }
    let message = get_message(work, &token).await?;
    let task = get_task(work, &token).await?;
    let status = task.status.unwrap_or_default();
    let cost = status.usage.as_ref().map_or(0, |usage| usage.cost_pico_usd);
    let tool_calls: i64 = status.tool_uses.values().sum();
    let suspended = status.phase() == v1::TaskPhase::Suspended;
    let reason =
        if suspended { "its task is suspended; it continues when the task is resumed" } else { "" };
    let recorded_calls = work.shared.store.scan_tool_calls(&work.scan).await?;
    if cost != work.scan.cost_pico_usd || tool_calls > recorded_calls || reason != work.scan.reason
    {
        work.scan.cost_pico_usd = cost;
        let kind = if suspended { "waiting" } else { "progress" };
        reason.clone_into(&mut work.scan.reason);
        let mut progress = scan_event(kind, reason);
        progress.tool_calls = tool_calls;
        work.save(ScanChanges { events: vec![progress], ..ScanChanges::default() }).await?;
    }
    let status = message.status.unwrap_or_default();
    if status.processed_at.is_none() {
        return Ok(next_poll(&work.scan));
    }
    let message = match turn_error(&status) {
        None => "the model answered".to_owned(),
        // Candidates of earlier answers are not lost with the failed one.
        Some(reason) if work.scan.repairs > 0 => reason,
        Some(reason) => return Err(Error::Failed(reason)),
    };
    work.enter_phase(ScanPhase::Checking, message, ScanChanges::default()).await?;
    // The check needs a work slot, for which others may wait as well.
    Ok(clock::now())
}

/// The time of the next poll.
fn next_poll(scan: &Scan) -> Timestamp {
    let now = clock::now();
    let waited = Duration::try_from(now.duration_since(scan.phase_since)).unwrap_or_default();
    (now + (waited / 10).clamp(MIN_POLL_INTERVAL, MAX_POLL_INTERVAL)).min(scan.deadline)
}

/// Sends the prompt to the task.
async fn send_prompt(work: &mut Work<'_>, token: &SecretString) -> Result<(), Error> {
    let text = if work.scan.repairs == 0 {
        prompt::initial_prompt(&work.scan, &work.shared.store.scan_brief(&work.scan).await?)
    } else {
        work.scan.request.clone()
    };
    let block = v1::Block { block: Some(block::Block::Text(v1::Text { text })) };
    let spec = v1::MessageSpec {
        task: work.scan.task.clone(),
        blocks: vec![block],
        ..v1::MessageSpec::default()
    };
    // Repeated sends result in one message.
    let idempotency_key = format!("scan.{}.{}", work.scan.id, work.scan.repairs);
    let request = v1::CreateMessageRequest { spec: Some(spec), idempotency_key };
    let request = work.shared.gateway.request(token, request)?;
    let message =
        call(work.shared.gateway.messages().create_message(request)).await.map_err(task_error)?;
    work.scan.message = message.metadata.unwrap_or_default().id;
    work.save(ScanChanges::default()).await
}

async fn get_message(work: &Work<'_>, token: &SecretString) -> Result<v1::Message, Error> {
    let request = v1::GetMessageRequest { message: work.scan.message.clone() };
    let request = work.shared.gateway.request(token, request)?;
    call(work.shared.gateway.messages().get_message(request)).await.map_err(task_error)
}

async fn get_task(work: &Work<'_>, token: &SecretString) -> Result<v1::Task, Error> {
    let request = v1::GetTaskRequest { task: work.scan.task.clone() };
    let request = work.shared.gateway.request(token, request)?;
    call(work.shared.gateway.tasks().get_task(request)).await.map_err(task_error)
}

/// Converts a status of the gateway about the task or a message.
fn task_error(status: Status) -> Error {
    match status.code() {
        Code::NotFound => Error::Failed("the task of the exploration was deleted".to_owned()),
        _ => status.into(),
    }
}

/// Why a turn ended without an answer.
fn turn_error(status: &v1::MessageStatus) -> Option<String> {
    (!status.error.is_empty()).then(|| format!("the exploration failed: {}", status.error))
}

/// The model's last answer.
pub(crate) struct Answer {
    pub(crate) text: String,
    /// Why the turn ended without an answer, if it did.
    pub(crate) turn_error: Option<String>,
}

/// The model's last answer.
pub(crate) async fn last_answer(work: &Work<'_>) -> Result<Answer, Error> {
    let token = open_token(work.shared, &work.scan)?;
    let status = get_message(work, &token).await?.status.unwrap_or_default();
    let (texts, _) = list_answers(work, &token, status.position, String::new()).await?;
    let text = texts.into_iter().find(|text| !text.trim().is_empty()).unwrap_or_default();
    Ok(Answer { text, turn_error: turn_error(&status) })
}

/// All messages of the model that may be an answer, the latest first.
pub(crate) async fn earlier_answers(work: &Work<'_>) -> Result<Vec<String>, Error> {
    let token = open_token(work.shared, &work.scan)?;
    let (mut all, mut page) = (Vec::new(), String::new());
    for _ in 0..MAX_ANSWER_PAGES {
        let (texts, next) = list_answers(work, &token, 0, page).await?;
        all.extend(texts.into_iter().filter(|text| text.contains("\"candidates\"")));
        all.truncate(MAX_EARLIER_ANSWERS);
        if next.is_empty() || all.len() == MAX_EARLIER_ANSWERS {
            break;
        }
        page = next;
    }
    Ok(all)
}

/// A page of the model's messages after a position, the latest first, and the token of the next
/// page.
async fn list_answers(
    work: &Work<'_>,
    token: &SecretString,
    after: i64,
    page: String,
) -> Result<(Vec<String>, String), Error> {
    let filter = v1::list_messages_request::Filter {
        source: v1::MessageSource::Assistant.into(),
        after_position: after,
        ..v1::list_messages_request::Filter::default()
    };
    let page = v1::PageRequest {
        page_size: ANSWER_PAGE_SIZE,
        page_token: page,
        order_by: "position desc".to_owned(),
    };
    let request = v1::ListMessagesRequest {
        task: work.scan.task.clone(),
        page: Some(page),
        filter: Some(filter),
    };
    let request = work.shared.gateway.request(token, request)?;
    let response = call(work.shared.gateway.messages().list_messages(request)).await?;
    let text = |message: &v1::Message| {
        let blocks = message.spec.iter().flat_map(|spec| &spec.blocks);
        let texts = blocks.filter_map(|block| match &block.block {
            Some(block::Block::Text(text)) => Some(text.text.as_str()),
            _ => None,
        });
        texts.collect::<Vec<_>>().join("\n")
    };
    let next_page = response.page.unwrap_or_default().next_page_token;
    Ok((response.messages.iter().map(text).collect(), next_page))
}

/// Cancels the task's work.
pub(crate) async fn cancel_task(work: &Work<'_>, reason: &str) -> Result<(), Error> {
    if !matches!(work.scan.phase, ScanPhase::Exploring | ScanPhase::Checking) {
        return Ok(());
    }
    let token = open_token(work.shared, &work.scan)?;
    let request = v1::CancelTaskRequest {
        task: work.scan.task.clone(),
        reason: reason.chars().take(1000).collect(),
        idempotency_key: format!("scan.{}.cancel", work.scan.id),
    };
    let request = work.shared.gateway.request(&token, request)?;
    match call(work.shared.gateway.tasks().cancel_task(request)).await {
        Err(status) if status.code() != Code::NotFound => Err(status.into()),
        _ => Ok(()),
    }
}
