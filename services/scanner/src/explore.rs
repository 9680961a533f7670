//! The exploration: a task of the mesh, which the scanner asks, follows, and ends, with the token
//! of the scan and nothing else.

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

/// How soon a task is looked at, which takes longer the longer it has been at it, and the longest
/// such pause.
const LOOK_MIN: Duration = Duration::from_secs(1);
const LOOK_MAX: Duration = Duration::from_secs(5);
/// Messages of the model that are read at a time.
const ANSWERS: i32 = 10;
/// So many times: each of three questions may be answered by 200 messages.
const PAGES: usize = 60;
/// Earlier answers that are looked at again.
const EARLIER: usize = 10;

/// What the scanner speaks to the task with.
fn token(shared: &Shared, scan: &Scan) -> Result<SecretString, Error> {
    let sealed = scan
        .token
        .as_ref()
        .ok_or_else(|| Error::Failed("the scan has no token any more".to_owned()))?;
    let opened = shared.keyring.open(&scan.id.to_string(), sealed);
    let bytes = opened.map_err(Error::from_seal_error)?;
    let text = std::str::from_utf8(bytes.expose_secret());
    Ok(SecretString::from(
        text.map_err(|_| Error::Failed("the scan's token cannot be read".to_owned()))?,
    ))
}

/// Asks the task, unless that is done, and looks how it is doing. Gives when somebody has to go on:
/// nobody is at the scan while its task is, which may take as long as a model likes.
pub(crate) async fn explore(work: &mut Work<'_>) -> Result<Timestamp, Error> {
    let token = token(work.shared, &work.scan)?;
    if work.scan.message.is_empty() {
        ask(work, &token).await?;
        return Ok(next_look(&work.scan));
    }
    let message = message(work, &token).await?;
    let task = task(work, &token).await?;
    let status = task.status.unwrap_or_default();
    let cost = status.usage.as_ref().map_or(0, |usage| usage.cost_pico_usd);
    let made: i64 = status.tool_uses.values().sum();
    let suspended = status.phase() == v1::TaskPhase::Suspended;
    let waits =
        if suspended { "its task is suspended: it goes on when somebody resumes it" } else { "" };
    let told = work.shared.store.scan_tool_calls(&work.scan).await?;
    if cost != work.scan.cost_pico_usd || made > told || waits != work.scan.reason {
        work.scan.cost_pico_usd = cost;
        let kind = if suspended { "waiting" } else { "progress" };
        waits.clone_into(&mut work.scan.reason);
        let mut progress = scan_event(kind, waits);
        progress.tool_calls = made;
        work.save(ScanChanges { events: vec![progress], ..ScanChanges::default() }).await?;
    }
    let status = message.status.unwrap_or_default();
    if status.processed_at.is_none() {
        return Ok(next_look(&work.scan));
    }
    let words = match ended(&status) {
        None => "the model has answered".to_owned(),
        // What held of the answers before is not lost with the one that does not come.
        Some(why) if work.scan.repairs > 0 => why,
        Some(why) => return Err(Error::Failed(why)),
    };
    work.enter_phase(ScanPhase::Checking, words, ScanChanges::default()).await?;
    // That is work, for which others may wait as well.
    Ok(clock::now())
}

/// When a task is looked at again.
fn next_look(scan: &Scan) -> Timestamp {
    let now = clock::now();
    let waited = Duration::try_from(now.duration_since(scan.phase_since)).unwrap_or_default();
    (now + (waited / 10).clamp(LOOK_MIN, LOOK_MAX)).min(scan.deadline)
}

/// Asks the task.
async fn ask(work: &mut Work<'_>, token: &SecretString) -> Result<(), Error> {
    let text = if work.scan.repairs == 0 {
        prompt::first(&work.scan, &work.shared.store.scan_brief(&work.scan).await?)
    } else {
        work.scan.request.clone()
    };
    let block = v1::Block { block: Some(block::Block::Text(v1::Text { text })) };
    let spec = v1::MessageSpec {
        task: work.scan.task.clone(),
        blocks: vec![block],
        ..v1::MessageSpec::default()
    };
    // However often it is asked, the task is asked once.
    let idempotency_key = format!("scan.{}.{}", work.scan.id, work.scan.repairs);
    let request = v1::CreateMessageRequest { spec: Some(spec), idempotency_key };
    let request = work.shared.gateway.request(token, request)?;
    let message =
        call(work.shared.gateway.messages().create_message(request)).await.map_err(gone)?;
    work.scan.message = message.metadata.unwrap_or_default().id;
    work.save(ScanChanges::default()).await
}

async fn message(work: &Work<'_>, token: &SecretString) -> Result<v1::Message, Error> {
    let request = v1::GetMessageRequest { message: work.scan.message.clone() };
    let request = work.shared.gateway.request(token, request)?;
    call(work.shared.gateway.messages().get_message(request)).await.map_err(gone)
}

async fn task(work: &Work<'_>, token: &SecretString) -> Result<v1::Task, Error> {
    let request = v1::GetTaskRequest { task: work.scan.task.clone() };
    let request = work.shared.gateway.request(token, request)?;
    call(work.shared.gateway.tasks().get_task(request)).await.map_err(gone)
}

/// What it means when the gateway knows nothing of the task, or of what it was asked.
fn gone(status: Status) -> Error {
    match status.code() {
        Code::NotFound => Error::Failed("the task that explores was deleted".to_owned()),
        _ => status.into(),
    }
}

/// Why nothing more comes of a question, when its turn has ended otherwise than with an answer.
fn ended(status: &v1::MessageStatus) -> Option<String> {
    (!status.error.is_empty()).then(|| format!("the exploration has ended: {}", status.error))
}

/// What the model said last.
pub(crate) struct Answer {
    pub(crate) text: String,
    /// Why its turn has ended without an answer, if it has.
    pub(crate) ended: Option<String>,
}

/// What the model said last.
pub(crate) async fn answer(work: &Work<'_>) -> Result<Answer, Error> {
    let token = token(work.shared, &work.scan)?;
    let status = message(work, &token).await?.status.unwrap_or_default();
    let (found, _) = said(work, &token, status.position, String::new()).await?;
    let text = found.into_iter().find(|text| !text.trim().is_empty()).unwrap_or_default();
    Ok(Answer { text, ended: ended(&status) })
}

/// Whatever the model has said so far that may be an answer, the last one first.
pub(crate) async fn answers(work: &Work<'_>) -> Result<Vec<String>, Error> {
    let token = token(work.shared, &work.scan)?;
    let (mut all, mut page) = (Vec::new(), String::new());
    for _ in 0..PAGES {
        let (found, next) = said(work, &token, 0, page).await?;
        all.extend(found.into_iter().filter(|text| text.contains("\"candidates\"")));
        all.truncate(EARLIER);
        if next.is_empty() || all.len() == EARLIER {
            break;
        }
        page = next;
    }
    Ok(all)
}

/// A page of what the model has said after a message, the last one first, and how the next page is
/// named.
async fn said(
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
        page_size: ANSWERS,
        page_token: page,
        order_by: "position desc".to_owned(),
    };
    let request = v1::ListMessagesRequest {
        task: work.scan.task.clone(),
        page: Some(page),
        filter: Some(filter),
    };
    let request = work.shared.gateway.request(token, request)?;
    let found = call(work.shared.gateway.messages().list_messages(request)).await?;
    let text = |message: &v1::Message| {
        let blocks = message.spec.iter().flat_map(|spec| &spec.blocks);
        let texts = blocks.filter_map(|block| match &block.block {
            Some(block::Block::Text(text)) => Some(text.text.as_str()),
            _ => None,
        });
        texts.collect::<Vec<_>>().join("\n")
    };
    Ok((found.messages.iter().map(text).collect(), found.page.unwrap_or_default().next_page_token))
}

/// Ends what the task does.
pub(crate) async fn cancel(work: &Work<'_>, why: &str) -> Result<(), Error> {
    if !matches!(work.scan.phase, ScanPhase::Exploring | ScanPhase::Checking) {
        return Ok(());
    }
    let token = token(work.shared, &work.scan)?;
    let request = v1::CancelTaskRequest {
        task: work.scan.task.clone(),
        reason: why.chars().take(1000).collect(),
        idempotency_key: format!("scan.{}.cancel", work.scan.id),
    };
    let request = work.shared.gateway.request(&token, request)?;
    match call(work.shared.gateway.tasks().cancel_task(request)).await {
        Err(status) if status.code() != Code::NotFound => Err(status.into()),
        _ => Ok(()),
    }
}
