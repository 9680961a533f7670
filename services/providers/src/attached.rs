//! Files of messages. What a model is shown of them is read from where all services have it, before
//! a vendor is asked; what it is not shown is named to it in words, with the way in which a script
//! gets it.
//!
//! Bounds: of one call [`PER_CALL`] bytes are shown, those of the newest files, with what stands in
//! the messages themselves; of all calls of the process together as many as the configuration says,
//! and a call for which there is no room waits for the others.

use std::{path::PathBuf, sync::Arc};

use bytes::Bytes;
use construct_bus::files::{self, Sha256};
use construct_domain::{OrganizationId, message::Shown};
use construct_proto::{
    mesh::v1::ChatMessage,
    v1::{self, Attachment, Text, block::Block},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{failure::Failure, transcript::notice_text};

/// Bytes of attachments that are shown in one call at most, before they are encoded. Larger
/// requests are refused by most vendors.
pub(crate) const PER_CALL: u64 = 20 << 20;

/// What room is counted in.
const UNIT: u64 = 1 << 10;

/// Where the files are, and the room for them in this process.
#[derive(Debug, Clone)]
pub(crate) struct Attached {
    files: files::Store,
    room: Arc<Semaphore>,
    /// All of it, in units.
    capacity: u32,
}

/// Held as long as a call needs what it shows.
#[derive(Debug)]
pub(crate) struct Room {
    _permit: OwnedSemaphorePermit,
}

/// What becomes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Shown,
    Named(Why),
}

/// Why a model is not shown a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Kind,
    TooLarge,
    /// Newer ones have the room.
    Older,
    Gone,
    Damaged,
    /// It says that it is text and is not.
    NoText,
}

impl Attached {
    /// Of the files in this folder, as many bytes at once.
    pub(crate) fn open(folder: impl Into<PathBuf>, bytes: u64) -> Result<Self, files::Error> {
        let capacity = u32::try_from(bytes / UNIT).unwrap_or(u32::MAX).max(1);
        Ok(Self {
            files: files::Store::open(folder)?,
            room: Arc::new(Semaphore::new(capacity as usize)),
            capacity,
        })
    }

    /// The messages of a call with their files shown or named. `scripts`: whether the model can
    /// have a script save one.
    ///
    /// # Errors
    /// When the storage fails, which passes.
    pub(crate) async fn show(
        &self,
        organization: &str,
        mut messages: Vec<ChatMessage>,
        scripts: bool,
    ) -> Result<(Vec<ChatMessage>, Option<Room>), Failure> {
        let (fates, bytes) = plan(&messages);
        if fates.is_empty() {
            return Ok((messages, None));
        }
        let organization: OrganizationId = organization
            .parse()
            .map_err(|_| Failure::internal("the command names no organization"))?;
        let room = if bytes > 0 { Some(self.room(bytes).await?) } else { None };
        let mut fates = fates.into_iter().rev();
        for message in &mut messages {
            let mut blocks = Vec::with_capacity(message.blocks.len());
            for block in std::mem::take(&mut message.blocks) {
                match block.block {
                    Some(Block::Attachment(attachment)) if !attachment.file.is_empty() => {
                        let fate = fates.next().unwrap_or(Fate::Named(Why::Older));
                        let shown = self.content(organization, attachment, fate, scripts).await?;
                        blocks.extend(
                            shown.into_iter().map(|block| v1::Block { block: Some(block) }),
                        );
                    }
                    block => blocks.push(v1::Block { block }),
                }
            }
            message.blocks = blocks;
        }
        Ok((messages, room))
    }

    async fn room(&self, bytes: u64) -> Result<Room, Failure> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).min(self.capacity);
        let permit = Arc::clone(&self.room).acquire_many_owned(units).await;
        let permit =
            permit.map_err(|_| Failure::internal("there is no room for files any more"))?;
        Ok(Room { _permit: permit })
    }

    /// A file as the model is told of it.
    async fn content(
        &self,
        organization: OrganizationId,
        attachment: Attachment,
        fate: Fate,
        scripts: bool,
    ) -> Result<Vec<Block>, Failure> {
        let why = match fate {
            Fate::Named(why) => why,
            Fate::Shown => match self.read(organization, &attachment).await? {
                Ok(content) => {
                    let notice = notice(&attachment, None, scripts);
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
        Ok(vec![notice(&attachment, Some(why), scripts)])
    }

    async fn read(
        &self,
        organization: OrganizationId,
        attachment: &Attachment,
    ) -> Result<Result<Bytes, Why>, Failure> {
        let Ok(sha256) = attachment.sha256.parse::<Sha256>() else { return Ok(Err(Why::Damaged)) };
        match self.files.get(organization, &sha256, size(attachment)).await {
            Ok(content)
                if Shown::of(&attachment.media_type, size(attachment)) == Shown::Text
                    && !is_text(&content) =>
            {
                Ok(Err(Why::NoText))
            }
            Ok(content) => Ok(Ok(content)),
            Err(files::Error::Missing) => Ok(Err(Why::Gone)),
            Err(files::Error::Corrupt | files::Error::TooLarge(_)) => Ok(Err(Why::Damaged)),
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
fn plan(messages: &[ChatMessage]) -> (Vec<Fate>, u64) {
    let blocks = messages.iter().rev().flat_map(|message| message.blocks.iter().rev());
    let mut left = PER_CALL;
    let mut bytes = 0;
    let mut fates = Vec::new();
    for block in blocks {
        let Some(Block::Attachment(attachment)) = &block.block else { continue };
        if attachment.file.is_empty() {
            left = left.saturating_sub(attachment.data.len() as u64);
            continue;
        }
        let size = size(attachment);
        fates.push(match Shown::of(&attachment.media_type, size) {
            Shown::Named => Fate::Named(Why::Kind),
            Shown::TooLarge => Fate::Named(Why::TooLarge),
            Shown::Image | Shown::Document | Shown::Text if size > left => Fate::Named(Why::Older),
            Shown::Image | Shown::Document | Shown::Text => {
                left -= size;
                bytes += size;
                Fate::Shown
            }
        });
    }
    (fates, bytes)
}

fn size(attachment: &Attachment) -> u64 {
    u64::try_from(attachment.size).unwrap_or_default()
}

fn is_text(content: &[u8]) -> bool {
    std::str::from_utf8(content).is_ok_and(|text| !text.contains('\0'))
}

/// What a model is told of a file: all that it needs to get it, and why it is not shown, if it is
/// not.
fn notice(attachment: &Attachment, why: Option<Why>, scripts: bool) -> Block {
    // Whoever named the file must not seem to be the system.
    let name: String = attachment.name.chars().filter(|c| !matches!(c, '<' | '>' | '"')).collect();
    let name = if name.is_empty() { "a file without a name" } else { &name };
    let Attachment { media_type, size, sha256, file, .. } = attachment;
    let file_is = format!("{name} ({media_type}, {size} bytes, sha256:{sha256})");
    let mut words = match why {
        None => format!("The user attached the file that follows: {file_is}."),
        Some(why) => {
            let why = match why {
                Why::Kind => "Files of this kind cannot be shown.",
                Why::TooLarge => "It is too large to be shown.",
                Why::Older => "Newer files have taken the room that there is.",
                Why::Gone => "It was deleted after that.",
                Why::Damaged => "It is damaged where it is kept.",
                Why::NoText => "It is not UTF-8 text.",
            };
            format!("The user attached a file that is not shown to you: {file_is}. {why}")
        }
    };
    if scripts && !matches!(why, Some(Why::Gone | Why::Damaged)) {
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
