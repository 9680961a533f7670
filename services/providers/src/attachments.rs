//! Files of messages.
//!
//! Before a vendor is called, the files that the model can see are read from the storage that all
//! services share. For the other files the model gets a notice with the reason, and with the call
//! by which a script gets the file.
//!
//! # Limits
//!
//! One call shows at most [`MAX_BYTES_PER_CALL`] bytes, those of the newest files, inline content
//! of the messages included. All calls of the process together show at most as many bytes as
//! configured; further calls wait.

use std::{path::PathBuf, sync::Arc};

use bytes::Bytes;
use construct_bus::files::{self, Sha256};
use construct_domain::{OrganizationId, message::Presentation};
use construct_proto::{
    mesh::v1::ChatMessage,
    v1::{self, Attachment, Text, block::Block},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{failure::Failure, transcript::notice_text};

/// Bytes of attachments that one call shows at most, before encoding. Most vendors reject larger
/// requests.
pub(crate) const MAX_BYTES_PER_CALL: u64 = 20 << 20;

/// The bytes of one semaphore permit.
const BYTES_PER_UNIT: u64 = 1 << 10;

/// The stored files, and the limit on their bytes in memory.
#[derive(Debug, Clone)]
pub(crate) struct Attachments {
    files: files::Store,
    available: Arc<Semaphore>,
    /// All permits of `available`.
    capacity: u32,
}

/// Holds the bytes of a call in flight.
#[derive(Debug)]
pub(crate) struct BytesPermit {
    _permit: OwnedSemaphorePermit,
}

/// What to do with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileDecision {
    Include,
    Omit(OmissionReason),
}

/// Why a file is not shown to the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OmissionReason {
    UnsupportedType,
    TooLarge,
    /// Newer files use up the limit.
    NoSpace,
    Deleted,
    Corrupt,
    /// It is declared as text but is not.
    NotText,
}

impl Attachments {
    /// Opens the files in `folder`, of which calls may hold `bytes` in memory.
    pub(crate) fn open(folder: impl Into<PathBuf>, bytes: u64) -> Result<Self, files::Error> {
        let capacity = u32::try_from(bytes / BYTES_PER_UNIT).unwrap_or(u32::MAX).max(1);
        Ok(Self {
            files: files::Store::open(folder)?,
            available: Arc::new(Semaphore::new(capacity as usize)),
            capacity,
        })
    }

    /// Replaces the files in the messages of a call by their content, or by a notice. `scripts`:
    /// whether the model can have a script save a file.
    ///
    /// # Errors
    /// When the storage fails, which is transient.
    pub(crate) async fn resolve(
        &self,
        organization: &str,
        mut messages: Vec<ChatMessage>,
        scripts: bool,
    ) -> Result<(Vec<ChatMessage>, Option<BytesPermit>), Failure> {
        let (decisions, bytes) = plan_files(&messages);
        if decisions.is_empty() {
            return Ok((messages, None));
        }
        let organization: OrganizationId = organization
            .parse()
            .map_err(|_| Failure::internal("the command names no organization"))?;
        let permit = if bytes > 0 { Some(self.acquire(bytes).await?) } else { None };
        let mut decisions = decisions.into_iter().rev();
        for message in &mut messages {
            let mut blocks = Vec::with_capacity(message.blocks.len());
            for block in std::mem::take(&mut message.blocks) {
                match block.block {
                    Some(Block::Attachment(attachment)) if !attachment.file.is_empty() => {
                        let decision =
                            decisions.next().unwrap_or(FileDecision::Omit(OmissionReason::NoSpace));
                        let shown =
                            self.file_blocks(organization, attachment, decision, scripts).await?;
                        blocks.extend(
                            shown.into_iter().map(|block| v1::Block { block: Some(block) }),
                        );
                    }
                    block => blocks.push(v1::Block { block }),
                }
            }
            message.blocks = blocks;
        }
        Ok((messages, permit))
    }

    async fn acquire(&self, bytes: u64) -> Result<BytesPermit, Failure> {
        let units =
            u32::try_from(bytes.div_ceil(BYTES_PER_UNIT)).unwrap_or(u32::MAX).min(self.capacity);
        let permit = Arc::clone(&self.available).acquire_many_owned(units).await;
        let permit =
            permit.map_err(|_| Failure::internal("there is no room for files any more"))?;
        Ok(BytesPermit { _permit: permit })
    }

    /// The blocks that stand for a file.
    async fn file_blocks(
        &self,
        organization: OrganizationId,
        attachment: Attachment,
        decision: FileDecision,
        scripts: bool,
    ) -> Result<Vec<Block>, Failure> {
        let why = match decision {
            FileDecision::Omit(why) => why,
            FileDecision::Include => match self.read_file(organization, &attachment).await? {
                Ok(content) => {
                    let notice = file_notice(&attachment, None, scripts);
                    let Attachment { media_type, name, .. } = attachment;
                    let data = content.into();
                    return Ok(vec![
                        notice,
                        Block::Attachment(Attachment {
                            media_type,
                            name,
                            data,
                            ..Attachment::default()
                        }),
                    ]);
                }
                Err(why) => why,
            },
        };
        Ok(vec![file_notice(&attachment, Some(why), scripts)])
    }

    async fn read_file(
        &self,
        organization: OrganizationId,
        attachment: &Attachment,
    ) -> Result<Result<Bytes, OmissionReason>, Failure> {
        let Ok(sha256) = attachment.sha256.parse::<Sha256>() else {
            return Ok(Err(OmissionReason::Corrupt));
        };
        match self.files.get(organization, &sha256, file_size(attachment)).await {
            Ok(content)
                if Presentation::for_file(&attachment.media_type, file_size(attachment))
                    == Presentation::Text
                    && !is_text(&content) =>
            {
                Ok(Err(OmissionReason::NotText))
            }
            Ok(content) => Ok(Ok(content)),
            Err(files::Error::Missing) => Ok(Err(OmissionReason::Deleted)),
            Err(files::Error::Corrupt | files::Error::TooLarge(_)) => {
                Ok(Err(OmissionReason::Corrupt))
            }
            Err(
                error @ (files::Error::Folder(_)
                | files::Error::Storage(_)
                | files::Error::Interrupted(_)),
            ) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "the files of a message cannot be read");
                // Counts as a call, so that a permanently failing storage ends the turn.
                Err(Failure {
                    attempts: 1,
                    ..Failure::transient("an attached file cannot be read at the moment")
                })
            }
        }
    }
}

/// Decides about the files, the newest first, and sums up the bytes to read.
fn plan_files(messages: &[ChatMessage]) -> (Vec<FileDecision>, u64) {
    let blocks = messages.iter().rev().flat_map(|message| message.blocks.iter().rev());
    let mut left = MAX_BYTES_PER_CALL;
    let mut bytes = 0;
    let mut decisions = Vec::new();
    for block in blocks {
        let Some(Block::Attachment(attachment)) = &block.block else { continue };
        if attachment.file.is_empty() {
            left = left.saturating_sub(attachment.data.len() as u64);
            continue;
        }
        let size = file_size(attachment);
        decisions.push(match Presentation::for_file(&attachment.media_type, size) {
            Presentation::NameOnly => FileDecision::Omit(OmissionReason::UnsupportedType),
            Presentation::TooLarge => FileDecision::Omit(OmissionReason::TooLarge),
            Presentation::Image | Presentation::Document | Presentation::Text if size > left => {
                FileDecision::Omit(OmissionReason::NoSpace)
            }
            Presentation::Image | Presentation::Document | Presentation::Text => {
                left -= size;
                bytes += size;
                FileDecision::Include
            }
        });
    }
    (decisions, bytes)
}

fn file_size(attachment: &Attachment) -> u64 {
    u64::try_from(attachment.size).unwrap_or_default()
}

fn is_text(content: &[u8]) -> bool {
    std::str::from_utf8(content).is_ok_and(|text| !text.contains('\0'))
}

/// The notice about a file: how to get it, and why it is not shown, if it is not.
fn file_notice(attachment: &Attachment, why: Option<OmissionReason>, scripts: bool) -> Block {
    // The file name must not look like text of the system.
    let name: String = attachment.name.chars().filter(|c| !matches!(c, '<' | '>' | '"')).collect();
    let name = if name.is_empty() { "a file without a name" } else { &name };
    let Attachment { media_type, size, sha256, file, .. } = attachment;
    let file_is = format!("{name} ({media_type}, {size} bytes, sha256:{sha256})");
    let mut words = match why {
        None => format!("The user attached the file that follows: {file_is}."),
        Some(why) => {
            let why = match why {
                OmissionReason::UnsupportedType => "Files of this kind cannot be shown.",
                OmissionReason::TooLarge => "It is too large to be shown.",
                OmissionReason::NoSpace => "Newer files have taken the room that there is.",
                OmissionReason::Deleted => "It was deleted after that.",
                OmissionReason::Corrupt => "It is damaged where it is kept.",
                OmissionReason::NotText => "It is not UTF-8 text.",
            };
            format!("The user attached a file that is not shown to you: {file_is}. {why}")
        }
    };
    if scripts && !matches!(why, Some(OmissionReason::Deleted | OmissionReason::Corrupt)) {
        let path = attachment.name.rsplit(['/', '\\']).next().unwrap_or_default();
        let path: String = path.chars().filter(|c| !matches!(c, '<' | '>' | '"')).collect();
        let path = if path.is_empty() || path.starts_with('.') { "attached" } else { &path };
        words.push_str(&format!(
            " A script puts it into the workspace with save_file({file:?}, {path:?})."
        ));
    }
    Block::Text(Text { text: notice_text(&words) })
}

#[cfg(test)]
mod tests;
