//! Tasks, messages and subscriptions.

use construct_domain::{MessageId, TaskId};
use construct_proto::v1::{
    Attachment, Block, CreateMessageRequest, CreateTaskRequest, EditMessageRequest,
    SubscribeRequest, UpdateMessageRequest, UpdateTaskRequest, block,
};
use tonic::Status;

use super::{entities::check_compute, policies::check_policy};
use crate::{
    subscribe::{cursor, glob::Globs},
    validate::{Violations, id, optional_id, thousands},
};

/// Maximum characters of all pinned facts of a task. They are part of the prompt of every model
/// call, and cost money each time.
const FACTS_CHARS: usize = 16_000;
/// Maximum bytes of all text blocks of a message. Larger inputs belong into files of the workspace.
pub(super) const MESSAGE_BYTES: usize = 1024 * 1024;
/// Maximum bytes of all attachments of a message, before encoding. A message is stored, and sent to
/// the model with every later call of its task; with its text it must fit into one request.
pub(super) const ATTACHED_BYTES: usize = 2 * 1024 * 1024;
/// Accepted media types besides `text/...`: types that at least one vendor accepts, or that any
/// model can get as text.
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

pub(crate) fn create_task(request: &CreateTaskRequest, pools: &[String]) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    check_policy(&mut violations, "spec.policy", &spec.policy);
    check_pinned(&mut violations, "spec.pinned", &spec.pinned);
    check_compute(&mut violations, "spec.compute", &spec.compute, pools);
    violations.finish()
}

pub(crate) fn update_task(request: &UpdateTaskRequest) -> Result<TaskId, Status> {
    let mut violations = Violations::in_request(request);
    if let Some(replacement) = &request.policy {
        check_policy(&mut violations, "policy.rules", &replacement.rules);
    }
    if let Some(replacement) = &request.pinned {
        check_pinned(&mut violations, "pinned.facts", &replacement.facts);
    }
    violations.finish()?;
    id(&request.task)
}

fn check_pinned(violations: &mut Violations, field: &str, facts: &[String]) {
    let chars: usize = facts.iter().map(|fact| fact.chars().count()).sum();
    violations.require(chars <= FACTS_CHARS, field, || {
        format!(
            "must have at most {} characters in total, has {}",
            thousands(FACTS_CHARS),
            thousands(chars)
        )
    });
}

pub(crate) fn create_message(request: &CreateMessageRequest) -> Result<TaskId, Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    check_blocks(&mut violations, "spec.blocks", &spec.blocks);
    violations.finish()?;
    id(&spec.task)
}

pub(crate) fn update_message(request: &UpdateMessageRequest) -> Result<MessageId, Status> {
    let mut violations = Violations::in_request(request);
    check_blocks(&mut violations, "blocks", &request.blocks);
    violations.finish()?;
    id(&request.message)
}

pub(crate) fn edit_message(request: &EditMessageRequest) -> Result<MessageId, Status> {
    let mut violations = Violations::in_request(request);
    check_blocks(&mut violations, "blocks", &request.blocks);
    violations.finish()?;
    id(&request.message)
}

/// Checks that a user sends only text, images and files. Calls and results come from the model and
/// the interpreter only: otherwise a user could make the model believe that something was done.
pub(super) fn check_blocks(violations: &mut Violations, field: &str, blocks: &[Block]) {
    let (mut bytes, mut attached, mut has_content) = (0_usize, 0_usize, false);
    for (index, block) in blocks.iter().enumerate() {
        match &block.block {
            Some(block::Block::Text(text)) => {
                bytes += text.text.len();
                has_content |= !text.text.trim().is_empty();
            }
            Some(block::Block::Attachment(shown)) => {
                attached += shown.data.len();
                has_content = true;
                check_attachment(violations, &format!("{field}[{index}].attachment"), shown);
            }
            Some(_) => {
                violations.add(
                    format!("{field}[{index}]"),
                    "must be text or an attachment: users cannot send other blocks",
                );
            }
            None => violations.add(format!("{field}[{index}]"), "is empty"),
        }
    }
    violations.require(has_content, field, || {
        "must contain text that is not blank, or an attachment".into()
    });
    violations.require(attached <= ATTACHED_BYTES, field, || {
        let (max, has) = (thousands(ATTACHED_BYTES), thousands(attached));
        format!("must have at most {max} bytes of attachments in total, has {has}")
    });
    violations.require(bytes <= MESSAGE_BYTES, field, || {
        format!(
            "must have at most {} bytes of text in total, has {}",
            thousands(MESSAGE_BYTES),
            thousands(bytes)
        )
    });
}

fn check_attachment(violations: &mut Violations, field: &str, attachment: &Attachment) {
    let Attachment { media_type, data, file, .. } = attachment;
    if !file.is_empty() {
        // The type of the file is checked when the file is looked up.
        violations.require(data.is_empty(), &format!("{field}.data"), || {
            "must be empty when `file` is set".into()
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
    // Content that the model gets as text must be text.
    if text || (known && TEXTUAL.contains(&media_type.as_str())) {
        let readable = std::str::from_utf8(data).is_ok_and(|text| !text.contains('\0'));
        violations.require(readable, &format!("{field}.data"), || {
            "must be UTF-8 text without U+0000".into()
        });
    }
}

/// A parsed subscription request.
#[derive(Debug)]
pub(crate) struct SubscriptionRequest {
    /// `None`: the organization's entities.
    pub(crate) task: Option<TaskId>,
    /// `None`: from now on.
    pub(crate) cursor: Option<cursor::Cursor>,
    pub(crate) types: Globs,
}

pub(crate) fn subscribe(request: SubscribeRequest) -> Result<SubscriptionRequest, Status> {
    let mut violations = Violations::in_request(&request);
    let mut cursor = None;
    if !request.cursor.is_empty() {
        match request.cursor.parse() {
            Ok(read) => cursor = Some(read),
            Err(error @ cursor::Invalid) => violations.add("cursor", error.to_string()),
        }
    }
    violations.finish()?;
    Ok(SubscriptionRequest {
        task: optional_id(&request.task)?,
        cursor,
        types: Globs::new(request.types),
    })
}
