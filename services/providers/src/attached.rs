//! Files of messages. What a model is shown of them is read from where all services have it, before
//! a vendor is asked; what it is not shown is named to it in words, with the way in which a script
//! gets it.
//!
//! Bounds: of one call [`MAX_BYTES_PER_CALL`] bytes are shown, those of the newest files, with what stands in
//! the messages themselves; of all calls of the process together as many as the configuration says,
//! and a call for which there is no room waits for the others.

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

/// Bytes of attachments that are shown in one call at most, before they are encoded. Larger
/// requests are refused by most vendors.
pub(crate) const MAX_BYTES_PER_CALL: u64 = 20 << 20;

/// What room is counted in.
const BYTES_PER_UNIT: u64 = 1 << 10;

/// Where the files are, and the room for them in this process.
#[derive(Debug, Clone)]
pub(crate) struct Attachments {
    files: files::Store,
    available: Arc<Semaphore>,
    /// All of it, in units.
    capacity: u32,
}

/// Held as long as a call needs what it shows.
#[derive(Debug)]
pub(crate) struct BytesPermit {
    _permit: OwnedSemaphorePermit,
}

/// What becomes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileDecision {
    Include,
    Omit(OmissionReason),
}

/// Why a model is not shown a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OmissionReason {
    UnsupportedType,
    TooLarge,
    /// Newer ones have the room.
    NoSpace,
    Deleted,
    Corrupt,
    /// It says that it is text and is not.
    NotText,
}

impl Attachments {
    /// Of the files in this folder, as many bytes at once.
    pub(crate) fn open(folder: impl Into<PathBuf>, bytes: u64) -> Result<Self, files::Error> {
        let capacity = u32::try_from(bytes / BYTES_PER_UNIT).unwrap_or(u32::MAX).max(1);
        Ok(Self {
            files: files::Store::open(folder)?,
            available: Arc::new(Semaphore::new(capacity as usize)),
            capacity,
        })
    }

    /// The messages of a call with their files shown or named. `scripts`: whether the model can
    /// have a script save one.
    ///
    /// # Errors
    /// When the storage fails, which passes.
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
                        let decision = decisions.next().unwrap_or(FileDecision::Omit(OmissionReason::NoSpace));
                        let shown = self.file_blocks(organization, attachment, decision, scripts).await?;
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
        let units = u32::try_from(bytes.div_ceil(BYTES_PER_UNIT)).unwrap_or(u32::MAX).min(self.capacity);
        let permit = Arc::clone(&self.available).acquire_many_owned(units).await;
        let permit =
            permit.map_err(|_| Failure::internal("there is no room for files any more"))?;
        Ok(BytesPermit { _permit: permit })
    }

    /// A file as the model is told of it.
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
        let Ok(sha256) = attachment.sha256.parse::<Sha256>() else { return Ok(Err(OmissionReason::Corrupt)) };
        match self.files.get(organization, &sha256, file_size(attachment)).await {
            Ok(content)
                if Presentation::for_file(&attachment.media_type, file_size(attachment)) == Presentation::Text
                    && !is_text(&content) =>
            {
                Ok(Err(OmissionReason::NotText))
            }
            Ok(content) => Ok(Ok(content)),
            Err(files::Error::Missing) => Ok(Err(OmissionReason::Deleted)),
            Err(files::Error::Corrupt | files::Error::TooLarge(_)) => Ok(Err(OmissionReason::Corrupt)),
            Err(
                error @ (files::Error::Folder(_)
                | files::Error::Storage(_)
                | files::Error::Interrupted(_)),
            ) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "the files of a message cannot be read");
                // It counts as a call that was made, so that a storage which stays away ends the
                // turn.
                Err(Failure {
                    tries: 1,
                    ..Failure::transient("an attached file cannot be read at the moment")
                })
            }
        }
    }
}

/// What becomes of the files, the newest first, and how many bytes are to be read.
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
            Presentation::Image | Presentation::Document | Presentation::Text if size > left => FileDecision::Omit(OmissionReason::NoSpace),
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

/// What a model is told of a file: all that it needs to get it, and why it is not shown, if it is
/// not.
fn file_notice(attachment: &Attachment, why: Option<OmissionReason>, scripts: bool) -> Block {
    // Whoever named the file must not seem to be the system.
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
