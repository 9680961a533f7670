//! Tasks, messages and subscriptions.

use construct_domain::{FileId, MessageId, OrganizationId, TaskId, message::Source, task::Phase};
use construct_proto::v1::{
    Attachment, Block, CancelTaskRequest, CreateMessageRequest, CreateTaskRequest,
    EditMessageRequest, ForkTaskRequest, ListMessagesRequest, ListTasksRequest, MessagePriority,
    MessageSource, MessageSpec, RewindTaskRequest, SubscribeRequest, TaskPhase, TaskSpec,
    UpdateMessageRequest, UpdateTaskRequest, block,
};
use construct_store::{Cursor, MessageCursor};
use jiff::Timestamp;
use tonic::Status;

use super::{
    entities::{MAX_TURNS, compute},
    policies::policy,
};
use crate::{
    convert,
    page::{Column, Page},
    subscribe::{cursor, glob::Globs},
    validate::{Violations, thousands},
};

pub(super) const TITLE_CHARS: usize = 200;
/// Facts that are pinned to a task. They are a part of the prompt of every model call, and paid for
/// with each.
pub(super) const FACTS: usize = 32;
/// Of one of them.
pub(super) const FACT_CHARS: usize = 2000;
/// Of all of them together.
pub(super) const FACTS_CHARS: usize = 16_000;
pub(super) const WORKSPACE_BYTES: usize = 4096;
pub(super) const REASON_CHARS: usize = 1024;
/// Of all blocks of a message together. Larger inputs belong into files of the workspace.
pub(super) const MESSAGE_BYTES: usize = 1024 * 1024;
/// Of all attachments of a message together, before they are encoded. A message is stored, and sent
/// to the model with every later call of its task; together with its text it has to fit into one
/// request.
pub(super) const ATTACHED_BYTES: usize = 2 * 1024 * 1024;
pub(super) const ATTACHMENT_NAME_CHARS: usize = 256;
/// What may be attached besides `text/...`: what at least one vendor takes, or can be given to any
/// as text.
pub(super) const MEDIA_TYPES: [&str; 8] = [
    "image/png",
    "image/jpeg",
    "image/gif",
    "image/webp",
    "application/pdf",
    "application/json",
    "application/xml",
    "application/yaml",
];
const TEXTUAL: [&str; 3] = ["application/json", "application/xml", "application/yaml"];
pub(super) const BLOCKS: usize = 256;
pub(super) const GLOBS: usize = 32;
pub(super) const GLOB_BYTES: usize = 128;

pub(crate) fn create_task(request: &CreateTaskRequest, pools: &[String]) -> Result<(), Status> {
    let mut violations = Violations::new();
    let default = TaskSpec::default();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.as_ref().unwrap_or(&default);
    violations.reference("spec.agent", &spec.agent, "an agent");
    workspace(&mut violations, "spec.workspace", &spec.workspace);
    title(&mut violations, "spec.title", &spec.title);
    violations.range("spec.max_turns", spec.max_turns, 0..=MAX_TURNS);
    policy(&mut violations, "spec.policy", &spec.policy);
    pinned(&mut violations, "spec.pinned", &spec.pinned);
    compute(&mut violations, "spec.compute", &spec.compute, pools);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

pub(crate) fn update_task(request: &UpdateTaskRequest) -> Result<TaskId, Status> {
    let mut violations = Violations::new();
    let task = violations.id("task", &request.task);
    if let Some(agent) = &request.agent {
        violations.reference("agent", agent, "an agent");
    }
    title(&mut violations, "title", request.title());
    violations.range("max_turns", request.max_turns(), 0..=MAX_TURNS);
    if let Some(replacement) = &request.policy {
        policy(&mut violations, "policy.rules", &replacement.rules);
    }
    if let Some(replacement) = &request.pinned {
        pinned(&mut violations, "pinned.facts", &replacement.facts);
    }
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, task)
}

/// A request that only names a task, with an idempotency key (empty for a read).
pub(crate) fn task_intent(task: &str, idempotency_key: &str) -> Result<TaskId, Status> {
    let mut violations = Violations::new();
    let task = violations.id("task", task);
    violations.idempotency_key(idempotency_key);
    checked(violations, task)
}

pub(crate) fn cancel_task(request: &CancelTaskRequest) -> Result<TaskId, Status> {
    let mut violations = Violations::new();
    let task = violations.id("task", &request.task);
    violations.chars("reason", &request.reason, REASON_CHARS);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, task)
}

pub(crate) fn rewind_task(request: &RewindTaskRequest) -> Result<(TaskId, MessageId), Status> {
    let mut violations = Violations::new();
    let task = violations.id("task", &request.task);
    let message = violations.id("message", &request.message);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, task.zip(message))
}

pub(crate) fn fork_task(request: &ForkTaskRequest) -> Result<(TaskId, MessageId), Status> {
    let mut violations = Violations::new();
    let task = violations.id("task", &request.task);
    let message = violations.id("message", &request.message);
    title(&mut violations, "title", &request.title);
    workspace(&mut violations, "workspace", &request.workspace);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, task.zip(message))
}

/// What a list of tasks is filtered by, but for the agent, which has to be looked up.
pub(crate) struct TaskFilter {
    pub(crate) phase: Option<Phase>,
    pub(crate) created_after: Option<Timestamp>,
    pub(crate) created_before: Option<Timestamp>,
    pub(crate) parent: Option<TaskId>,
}

pub(crate) fn list_tasks(
    organization: OrganizationId,
    request: &ListTasksRequest,
) -> Result<(Page<Cursor>, TaskFilter), Status> {
    let mut violations = Violations::new();
    let filter = request.filter.clone().unwrap_or_default();
    if !filter.agent.is_empty() {
        violations.reference("filter.agent", &filter.agent, "an agent");
    }
    let phase = TaskPhase::try_from(filter.phase);
    violations.require(phase.is_ok(), "filter.phase", || "is not a known phase".into());
    workspace(&mut violations, "filter.workspace", &filter.workspace);
    let created_after =
        timestamp(&mut violations, "filter.created_after", filter.created_after.as_ref());
    let created_before =
        timestamp(&mut violations, "filter.created_before", filter.created_before.as_ref());
    let parent = if filter.parent.is_empty() {
        None
    } else {
        violations.id("filter.parent", &filter.parent)
    };
    let orders = [Column::CreatedAt, Column::UpdatedAt];
    let page = Page::read(
        request.page.as_ref(),
        "ListTasks",
        organization,
        &filter,
        &orders,
        &mut violations,
    );
    let phase = phase.ok().and_then(convert::to_phase);
    violations
        .finish()
        .map(|()| (page, TaskFilter { phase, created_after, created_before, parent }))
}

pub(super) fn workspace(violations: &mut Violations, field: &str, path: &str) {
    if path.is_empty() {
        return;
    }
    violations.bytes(field, path, WORKSPACE_BYTES);
    violations
        .require(path.starts_with('/'), field, || "must be an absolute path, or empty".into());
    violations.require(!path.split('/').any(|part| part == ".."), field, || {
        "must not contain `..`".into()
    });
}

pub(super) fn title(violations: &mut Violations, field: &str, title: &str) {
    violations.chars(field, title, TITLE_CHARS);
    violations.one_line(field, title);
}

/// Facts that are pinned to a task.
fn pinned(violations: &mut Violations, field: &str, facts: &[String]) {
    violations.require(facts.len() <= FACTS, field, || {
        format!("must have at most {FACTS} entries, has {}", facts.len())
    });
    let mut chars = 0_usize;
    for (index, fact) in facts.iter().take(FACTS).enumerate() {
        let field = format!("{field}[{index}]");
        violations.require(!fact.trim().is_empty(), &field, || "must not be blank".into());
        violations.chars(&field, fact, FACT_CHARS);
        chars += fact.chars().count();
    }
    violations.require(chars <= FACTS_CHARS, field, || {
        format!(
            "must have at most {} characters together, has {}",
            thousands(FACTS_CHARS),
            thousands(chars)
        )
    });
}

pub(super) fn timestamp(
    violations: &mut Violations,
    field: &str,
    time: Option<&prost_types::Timestamp>,
) -> Option<Timestamp> {
    let time = time?;
    let read = (0..1_000_000_000)
        .contains(&time.nanos)
        .then(|| Timestamp::new(time.seconds, time.nanos).ok())
        .flatten();
    violations.require(read.is_some(), field, || "is not a valid time".into());
    read
}

pub(crate) fn create_message(request: &CreateMessageRequest) -> Result<TaskId, Status> {
    let mut violations = Violations::new();
    let default = MessageSpec::default();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.as_ref().unwrap_or(&default);
    let task = violations.id("spec.task", &spec.task);
    blocks(&mut violations, "spec.blocks", &spec.blocks);
    let priority = MessagePriority::try_from(spec.priority);
    violations.require(priority.is_ok(), "spec.priority", || "is not a known priority".into());
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, task)
}

pub(crate) fn update_message(request: &UpdateMessageRequest) -> Result<MessageId, Status> {
    let mut violations = Violations::new();
    let message = violations.id("message", &request.message);
    blocks(&mut violations, "blocks", &request.blocks);
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, message)
}

pub(crate) fn edit_message(request: &EditMessageRequest) -> Result<MessageId, Status> {
    let mut violations = Violations::new();
    let message = violations.id("message", &request.message);
    blocks(&mut violations, "blocks", &request.blocks);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, message)
}

/// A request that only names a message, with an idempotency key (empty for a read).
pub(crate) fn change_message(message: &str, idempotency_key: &str) -> Result<MessageId, Status> {
    let mut violations = Violations::new();
    let message = violations.id("message", message);
    violations.idempotency_key(idempotency_key);
    checked(violations, message)
}

/// Users write text and show images and files. Calls and results come from the model and the
/// interpreter only: a user who could write them could make the model believe that something was
/// done.
pub(super) fn blocks(violations: &mut Violations, field: &str, blocks: &[Block]) {
    violations.require(blocks.len() <= BLOCKS, field, || {
        format!("must have at most {BLOCKS} blocks, has {}", blocks.len())
    });
    let (mut bytes, mut attached, mut said) = (0_usize, 0_usize, false);
    for (index, block) in blocks.iter().take(BLOCKS).enumerate() {
        match &block.block {
            Some(block::Block::Text(text)) => {
                bytes += text.text.len();
                said |= !text.text.trim().is_empty();
                violations.no_nul(&format!("{field}[{index}].text"), &text.text);
            }
            Some(block::Block::Attachment(shown)) => {
                attached += shown.data.len();
                said = true;
                attachment(violations, &format!("{field}[{index}].attachment"), shown);
            }
            Some(_) => {
                violations.add(
                    format!("{field}[{index}]"),
                    "must be text or an attachment: users send nothing else",
                );
            }
            None => violations.add(format!("{field}[{index}]"), "is empty"),
        }
    }
    violations
        .require(said, field, || "must contain text that is not blank, or an attachment".into());
    violations.require(attached <= ATTACHED_BYTES, field, || {
        let (most, has) = (thousands(ATTACHED_BYTES), thousands(attached));
        format!("must have at most {most} bytes of attachments together, has {has}")
    });
    violations.require(bytes <= MESSAGE_BYTES, field, || {
        format!(
            "must have at most {} bytes of text together, has {}",
            thousands(MESSAGE_BYTES),
            thousands(bytes)
        )
    });
}

fn attachment(violations: &mut Violations, field: &str, attachment: &Attachment) {
    let Attachment { media_type, name, data, file, .. } = attachment;
    violations.chars(&format!("{field}.name"), name, ATTACHMENT_NAME_CHARS);
    violations.one_line(&format!("{field}.name"), name);
    if !file.is_empty() {
        // What the file is, is known when it is looked up.
        let _: Option<FileId> = violations.id(&format!("{field}.file"), file);
        violations.require(data.is_empty(), &format!("{field}.data"), || {
            "must be empty when there is a file".into()
        });
        return;
    }
    let known = MEDIA_TYPES.contains(&media_type.as_str());
    let text = media_type.strip_prefix("text/").is_some_and(|rest| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'+');
        (1..=100).contains(&rest.len()) && rest.bytes().all(plain)
    });
    violations.require(known || text, &format!("{field}.media_type"), || {
        format!("must be `text/...` or one of {}", MEDIA_TYPES.join(", "))
    });
    violations.require(!data.is_empty(), &format!("{field}.data"), || "must not be empty".into());
    // What is given to the model as text has to be one.
    if text || (known && TEXTUAL.contains(&media_type.as_str())) {
        let readable = std::str::from_utf8(data).is_ok_and(|text| !text.contains('\0'));
        violations.require(readable, &format!("{field}.data"), || {
            "must be UTF-8 text without U+0000".into()
        });
    }
}

/// Returns the task, the page and the source to filter by.
pub(crate) fn list_messages(
    organization: OrganizationId,
    request: &ListMessagesRequest,
) -> Result<(TaskId, Page<MessageCursor>, Option<Source>), Status> {
    let mut violations = Violations::new();
    let task = violations.id("task", &request.task);
    let filter = request.filter.unwrap_or_default();
    let source = MessageSource::try_from(filter.source);
    violations.require(source.is_ok(), "filter.source", || "is not a known source".into());
    violations.require(filter.after_position >= 0, "filter.after_position", || {
        "must not be negative".into()
    });
    // The list is one task's, so the task is part of what a token belongs to.
    let scope =
        ListMessagesRequest { task: request.task.clone(), page: None, filter: request.filter };
    let page = Page::read(
        request.page.as_ref(),
        "ListMessages",
        organization,
        &scope,
        &[Column::Position],
        &mut violations,
    );
    let source = source.ok().and_then(convert::to_source);
    checked(violations, task).map(|task| (task, page, source))
}

/// What a subscriber asks for.
#[derive(Debug)]
pub(crate) struct Subscribe {
    /// None: the organization's entities.
    pub(crate) task: Option<TaskId>,
    /// None: from now on.
    pub(crate) cursor: Option<cursor::Cursor>,
    pub(crate) types: Globs,
}

pub(crate) fn subscribe(request: SubscribeRequest) -> Result<Subscribe, Status> {
    let mut violations = Violations::new();
    let task = if request.task.is_empty() { None } else { violations.id("task", &request.task) };
    let mut cursor = None;
    if !request.cursor.is_empty() {
        match request.cursor.parse() {
            Ok(read) => cursor = Some(read),
            Err(error @ cursor::Invalid) => violations.add("cursor", error.to_string()),
        }
    }
    let globs = request.types.len();
    violations.require(globs <= GLOBS, "types", || {
        format!("must have at most {GLOBS} entries, has {globs}")
    });
    for (index, glob) in request.types.iter().take(GLOBS).enumerate() {
        let known = |byte: u8| byte.is_ascii_lowercase() || matches!(byte, b'.' | b'_' | b'*');
        let fine = !glob.is_empty() && glob.len() <= GLOB_BYTES && glob.bytes().all(known);
        violations.require(fine, &format!("types[{index}]"), || {
            format!("must be 1 to {GLOB_BYTES} lower-case letters, `.`, `_` and `*`")
        });
    }
    violations.finish().map(|()| Subscribe { task, cursor, types: Globs::new(request.types) })
}

/// The id, when nothing is wrong.
pub(super) fn checked<T>(violations: Violations, id: Option<T>) -> Result<T, Status> {
    violations.finish()?;
    // An id that could not be read was reported above, so there is one.
    id.ok_or_else(|| Status::invalid_argument("an id is missing"))
}
