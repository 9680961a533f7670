//! Attachments of messages. Small files of types that models accept are part of the message. Other
//! files are uploaded first, and the message refers to them.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use construct_proto::v1::{Attachment, Block, Text, block};

use crate::{
    entity::file::upload::{self, FileUpload, file_name},
    failure::Failure,
    gateway::{Gateway, idempotency_key},
};

/// The maximum bytes of all attachments that are part of a message.
const MAX_INLINE_BYTES: u64 = 2 << 20;

#[derive(Debug, Default, clap::Args)]
pub(crate) struct AttachArgs {
    /// A file, or the id of an uploaded file. Repeatable. Models see PNG, JPEG, GIF, WebP, PDF and
    /// text; scripts read other types and large files.
    #[arg(long, value_name = "FILE")]
    attach: Vec<PathBuf>,
}

impl AttachArgs {
    /// The attachments as blocks of a message.
    ///
    /// # Errors
    /// When a file cannot be read, or the gateway refuses it.
    pub(crate) async fn blocks(&self, gateway: &Gateway) -> Result<Vec<Block>, Failure> {
        let mut remaining = MAX_INLINE_BYTES;
        let mut blocks = Vec::with_capacity(self.attach.len());
        for path in &self.attach {
            let attachment = match uploaded_id(path) {
                Some(file) => Attachment { file, ..Attachment::default() },
                None => match read_inline(path, remaining)? {
                    Some(attachment) => attachment,
                    None => {
                        Attachment { file: upload(gateway, path).await?, ..Attachment::default() }
                    }
                },
            };
            remaining -= attachment.data.len() as u64;
            blocks.push(Block { block: Some(block::Block::Attachment(attachment)) });
        }
        Ok(blocks)
    }
}

/// The blocks of a message: the text, then the attachments.
pub(crate) fn message(text: String, attached: &[Block]) -> Vec<Block> {
    let text = Block { block: Some(block::Block::Text(Text { text })) };
    std::iter::once(text).chain(attached.iter().cloned()).collect()
}

/// The argument as the id of an uploaded file, unless a local file has that name.
fn uploaded_id(path: &Path) -> Option<String> {
    let text = path.to_str()?;
    let is_id = text.strip_prefix("file_").is_some_and(|id| uuid::Uuid::parse_str(id).is_ok());
    (is_id && !path.exists()).then(|| text.to_owned())
}

/// Reads a file of at most `max_bytes` that can be part of a message. None for a file that must be
/// uploaded.
fn read_inline(path: &Path, max_bytes: u64) -> Result<Option<Attachment>, Failure> {
    let unreadable = |error: std::io::Error| unreadable(path, &error);
    let metadata = path.metadata().map_err(unreadable)?;
    if metadata.is_dir() {
        return Err(unreadable(ErrorKind::IsADirectory.into()));
    }
    if metadata.len() == 0 || metadata.len() > max_bytes {
        return Ok(None);
    }
    let data = std::fs::read(path).map_err(unreadable)?;
    let is_text = std::str::from_utf8(&data).is_ok_and(|text| !text.contains('\0'));
    let media_type = match media_type(path) {
        Some(media_type) if is_text || !is_textual(media_type) => media_type,
        None if is_text => "text/plain",
        _ => return Ok(None),
    };
    // The file may have grown since its size was read.
    let fits = !data.is_empty() && data.len() as u64 <= max_bytes;
    let (media_type, name) = (media_type.to_owned(), file_name(path));
    Ok(fits.then(|| Attachment { media_type, name, data, ..Attachment::default() }))
}

/// The media type by the file's extension.
fn media_type(path: &Path) -> Option<&'static str> {
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or_default()
        .to_ascii_lowercase();
    Some(match extension.as_str() {
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "pdf" => "application/pdf",
        "json" => "application/json",
        "xml" => "application/xml",
        "yaml" | "yml" => "application/yaml",
        "md" => "text/markdown",
        "csv" => "text/csv",
        "html" | "htm" => "text/html",
        _ => return None,
    })
}

fn is_textual(media_type: &str) -> bool {
    !(media_type.starts_with("image/") || media_type == "application/pdf")
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::usage(format!("{}: {error}", path.display()))
}

async fn upload(gateway: &Gateway, path: &Path) -> Result<String, Failure> {
    let media_type = media_type(path).unwrap_or_default().to_owned();
    let source = FileUpload { path, name: file_name(path), media_type, new: false };
    let file = upload::upload(gateway, source, idempotency_key()).await?;
    Ok(file.metadata.map(|metadata| metadata.id).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_of_accepted_types_are_inlined() {
        let folder = tempfile::tempdir().expect("a folder");
        let read = |name: &str, content: &[u8], max_bytes: u64| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).expect("written");
            read_inline(&path, max_bytes)
                .expect("readable")
                .map(|inline| (inline.media_type, inline.name, inline.data))
        };
        let inline = |media_type: &str, name: &str, data: &[u8]| {
            Some((media_type.to_owned(), name.to_owned(), data.to_vec()))
        };
        assert_eq!(
            read("a.PNG", b"\x89PNG", MAX_INLINE_BYTES),
            inline("image/png", "a.PNG", b"\x89PNG")
        );
        assert_eq!(read("t.csv", b"1;2", 3), inline("text/csv", "t.csv", b"1;2"));
        assert_eq!(
            read("main.rs", b"fn main() {}", MAX_INLINE_BYTES),
            inline("text/plain", "main.rs", b"fn main() {}")
        );
        // These are uploaded.
        assert_eq!(read("t.csv", b"1;23", 3), None);
        assert_eq!(read("a.zip", b"PK\x03\x04\xFF", MAX_INLINE_BYTES), None);
        assert_eq!(read("latin.csv", b"caf\xe9", MAX_INLINE_BYTES), None);
        assert_eq!(read("nul.txt", b"a\0b", MAX_INLINE_BYTES), None);
        assert_eq!(read("empty.txt", b"", MAX_INLINE_BYTES), None);
        assert!(
            read_inline(folder.path(), MAX_INLINE_BYTES).is_err()
                && read_inline(&folder.path().join("none"), MAX_INLINE_BYTES).is_err()
        );
    }

    #[test]
    fn file_ids_are_distinguished_from_paths() {
        let id = "file_01890a5d-ac96-774b-bcce-b302099a8057";
        assert_eq!(uploaded_id(Path::new(id)).as_deref(), Some(id));
        for name in ["file_1", "a.png", "./file_01890a5d-ac96-774b-bcce-b302099a8057"] {
            assert_eq!(uploaded_id(Path::new(name)), None, "{name}");
        }
    }
}
