//! Files attached to messages. A message names them by id, and stores their metadata of that
//! moment. Workers find the content by the metadata alone; a file that is deleted later is gone for
//! them too.

use std::collections::{BTreeSet, HashMap};

use construct_bus::files::Sha256;
use construct_domain::{FileId, access::Scope, message::Content};
use construct_proto::v1::{self, block::Block};
use construct_store::{Error, File, FileState};
use tonic::Status;
use uuid::Uuid;

use crate::{
    api::{CallerContext, ReferenceResolver},
    convert, status,
    validate::Violations,
};

impl CallerContext {
    /// Resolves the files of a message's blocks. If one is missing, the id of the written entity
    /// becomes one that exists nowhere, so that a repeated request still gets its first response.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when a file is missing or not ready; `PERMISSION_DENIED` for callers who
    /// may not read files.
    pub(crate) async fn content<I>(
        &self,
        field: &str,
        mut blocks: Vec<v1::Block>,
        resolver: &mut ReferenceResolver,
        id: I,
        nil_id: fn(Uuid) -> I,
    ) -> Result<(I, Content), Status> {
        let file_ids =
            attachments(&mut blocks).filter_map(|(_, attachment)| attachment.file.parse().ok());
        let file_ids: BTreeSet<FileId> = file_ids.collect();
        if file_ids.is_empty() {
            return Ok((id, convert::to_content(blocks)));
        }
        // The response shows the file.
        if !Scope::FilesRead.is_within(&self.caller().scopes) {
            return Err(Status::permission_denied(
                "attaching files requires the scope `files:read`",
            ));
        }
        let mut found = HashMap::new();
        for id in file_ids {
            match self.store().file_get(self.organization(), id).await {
                Ok(file) if file.state == FileState::Ready => {
                    _ = found.insert(id.to_string(), file)
                }
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(status::from_store(error)),
            }
        }
        let mut violations = Violations::new();
        for (index, attachment) in attachments(&mut blocks) {
            let Some(file) = found.get(&attachment.file) else {
                violations.add(
                    format!("{field}[{index}].attachment.file"),
                    "does not exist in this organization or is not ready",
                );
                continue;
            };
            let is_other =
                !attachment.media_type.is_empty() && attachment.media_type != file.media_type;
            violations.require(
                !is_other,
                &format!("{field}[{index}].attachment.media_type"),
                || format!("must be empty or `{}`, which is the file's", file.media_type),
            );
            fill_attachment(attachment, file);
        }
        match violations.finish() {
            Ok(()) => Ok((id, convert::to_content(blocks))),
            Err(reason) => Ok((resolver.reject(reason, nil_id)?, Content::default())),
        }
    }
}

/// The attachments that name a file, with the indexes of their blocks.
fn attachments(blocks: &mut [v1::Block]) -> impl Iterator<Item = (usize, &mut v1::Attachment)> {
    blocks.iter_mut().enumerate().filter_map(|(index, block)| match &mut block.block {
        Some(Block::Attachment(attachment)) if !attachment.file.is_empty() => {
            Some((index, attachment))
        }
        _ => None,
    })
}

fn fill_attachment(attachment: &mut v1::Attachment, file: &File) {
    if attachment.name.is_empty() {
        attachment.name.clone_from(&file.name);
    }
    attachment.media_type.clone_from(&file.media_type);
    attachment.sha256 =
        file.sha256.map(|digest| Sha256::from_bytes(digest).to_string()).unwrap_or_default();
    attachment.size = file.size;
}
