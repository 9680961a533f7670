//! Files that go with a message. What is small and of a kind that models take stands in the message
//! itself; everything else is uploaded first, and the message names it.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use construct_proto::v1::{Attachment, Block, Text, block};

use crate::{
    entity::file::upload::{self, Wanted, name},
    failure::Failure,
    gateway::{Gateway, idempotency_key},
};

/// Bytes that a message takes in all.
const ROOM: u64 = 2 << 20;

#[derive(Debug, Default, clap::Args)]
pub(crate) struct AttachArgs {
    /// A file for the model: it is shown PNG, JPEG, GIF, WebP, PDF and text, and has scripts look
    /// into other kinds and what is large. Can be given several times; also the id of a file that
    /// was uploaded.
    #[arg(long, value_name = "FILE")]
    attach: Vec<PathBuf>,
}

impl AttachArgs {
    /// The files as blocks of a message.
    ///
    /// # Errors
    /// When one cannot be read, or the gateway does not take it.
    pub(crate) async fn blocks(&self, gateway: &Gateway) -> Result<Vec<Block>, Failure> {
        let mut room = ROOM;
        let mut blocks = Vec::with_capacity(self.attach.len());
        for path in &self.attach {
            let attachment = match uploaded(path) {
                Some(file) => Attachment { file, ..Attachment::default() },
                None => match small(path, room)? {
                    Some(attachment) => attachment,
                    None => {
                        Attachment { file: upload(gateway, path).await?, ..Attachment::default() }
                    }
                },
            };
            room -= attachment.data.len() as u64;
            blocks.push(Block { block: Some(block::Block::Attachment(attachment)) });
        }
        Ok(blocks)
    }
}

/// Words, and what goes with them.
pub(crate) fn message(text: String, attached: &[Block]) -> Vec<Block> {
    let words = Block { block: Some(block::Block::Text(Text { text })) };
    std::iter::once(words).chain(attached.iter().cloned()).collect()
}

/// The id of an uploaded file, if it is one and no file here has that name.
fn uploaded(path: &Path) -> Option<String> {
    let text = path.to_str()?;
    let is_id = text.strip_prefix("file_").is_some_and(|id| uuid::Uuid::parse_str(id).is_ok());
    (is_id && !path.exists()).then(|| text.to_owned())
}

/// A file that a message takes, read; none of one that is to be uploaded.
fn small(path: &Path, room: u64) -> Result<Option<Attachment>, Failure> {
    let wrong = |error: std::io::Error| unreadable(path, &error);
    let found = path.metadata().map_err(wrong)?;
    if found.is_dir() {
        return Err(wrong(ErrorKind::IsADirectory.into()));
    }
    if found.len() == 0 || found.len() > room {
        return Ok(None);
    }
    let data = std::fs::read(path).map_err(wrong)?;
    let is_text = std::str::from_utf8(&data).is_ok_and(|text| !text.contains('\0'));
    let media_type = match kind(path) {
        Some(kind) if is_text || !is_textual(kind) => kind,
        None if is_text => "text/plain",
        _ => return Ok(None),
    };
    // It may have grown since it was looked at.
    let fits = !data.is_empty() && data.len() as u64 <= room;
    let (media_type, name) = (media_type.to_owned(), name(path));
    Ok(fits.then(|| Attachment { media_type, name, data, ..Attachment::default() }))
}

/// What kind of file it is, as far as its name tells.
fn kind(path: &Path) -> Option<&'static str> {
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

fn is_textual(kind: &str) -> bool {
    !(kind.starts_with("image/") || kind == "application/pdf")
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::usage(format!("{}: {error}", path.display()))
}

async fn upload(gateway: &Gateway, path: &Path) -> Result<String, Failure> {
    let media_type = kind(path).unwrap_or_default().to_owned();
    let wanted = Wanted { path, name: name(path), media_type, new: false };
    let file = upload::upload(gateway, wanted, idempotency_key()).await?;
    Ok(file.metadata.map(|metadata| metadata.id).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_of_kinds_that_models_take_stand_in_the_message() {
        let folder = tempfile::tempdir().expect("a folder");
        let read = |name: &str, content: &[u8], room: u64| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).expect("written");
            small(&path, room)
                .expect("it can be read")
                .map(|shown| (shown.media_type, shown.name, shown.data))
        };
        let shown = |kind: &str, name: &str, data: &[u8]| {
            Some((kind.to_owned(), name.to_owned(), data.to_vec()))
        };
        assert_eq!(read("a.PNG", b"\x89PNG", ROOM), shown("image/png", "a.PNG", b"\x89PNG"));
        assert_eq!(read("t.csv", b"1;2", 3), shown("text/csv", "t.csv", b"1;2"));
        assert_eq!(
            read("main.rs", b"fn main() {}", ROOM),
            shown("text/plain", "main.rs", b"fn main() {}")
        );
        // All of these are uploaded.
        assert_eq!(read("t.csv", b"1;23", 3), None);
        assert_eq!(read("a.zip", b"PK\x03\x04\xFF", ROOM), None);
        assert_eq!(read("latin.csv", b"caf\xe9", ROOM), None);
        assert_eq!(read("nul.txt", b"a\0b", ROOM), None);
        assert_eq!(read("empty.txt", b"", ROOM), None);
        assert!(
            small(folder.path(), ROOM).is_err()
                && small(&folder.path().join("none"), ROOM).is_err()
        );
    }

    #[test]
    fn ids_are_told_from_names() {
        let id = "file_01890a5d-ac96-774b-bcce-b302099a8057";
        assert_eq!(uploaded(Path::new(id)).as_deref(), Some(id));
        for name in ["file_1", "a.png", "./file_01890a5d-ac96-774b-bcce-b302099a8057"] {
            assert_eq!(uploaded(Path::new(name)), None, "{name}");
        }
    }
}
