//! What is looked at before anybody gets a file: whether it is what it says, and whether it is one
//! of those that are small until somebody opens them.
//!
//! Bounds, per file:
//! - Archives (ZIP and what is made of it, gzip, tar within it; each within each other up to
//!   [`DEPTH`] times) are unpacked into nothing, while bytes are counted: all levels together give
//!   at most [`RATIO`] times the file's size, or [`FREE`] if that is more, and never more than
//!   [`MOST`]. At most [`ENTRIES`] entries. What is compressed in another way, or encrypted, counts
//!   as it says it is.
//! - A ZIP's entries don't overlap, and have as many bytes as they say.
//! - Pictures have at most [`PIXELS`].
//! - All of it takes [`TIME`] at most. Memory: some buffers, and 24 bytes for each entry of a ZIP.
//!   A ZIP within an archive is unpacked to a nameless file beside the upload, of no more bytes
//!   than an upload may have.
//!
//! Not looked at: what documents do to those who open them (XML entities, macros, scripts of a
//! PDF), and other archives (7z, RAR, bzip2, xz, zstd), which nothing of ours opens.

mod archive;
mod sniff;
mod zip;

use std::{
    fs::File,
    io::{self, BufReader, Read as _, Seek as _},
    path::PathBuf,
    time::Duration,
};

use construct_bus::files::Assembled;
use tokio::time::Instant;

use self::archive::Budget;
use crate::validate::thousands;

/// Archives within archives.
const DEPTH: u32 = 4;
/// Times the file's size.
const RATIO: u64 = 100;
/// Bytes that anything may have unpacked.
const FREE: u64 = 16 * 1024 * 1024;
/// Bytes that nothing may have more of, unpacked.
const MOST: u64 = 4 * 1024 * 1024 * 1024;
const ENTRIES: u64 = 100_000;
const PIXELS: u64 = 100_000_000;
const TIME: Duration = Duration::from_secs(60);
/// Bytes that tell what something is.
const HEAD: usize = 512;

/// Why a file is not looked through to its end.
#[derive(Debug)]
pub(super) enum Stop {
    /// It is not taken; in words for who uploaded it.
    Refused(String),
    /// It cannot be read.
    Failed(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        match archive::refusal(&error) {
            Some(words) => Self::Refused(words),
            None => Self::Failed(error),
        }
    }
}

fn refused<T>(words: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Refused(words.into()))
}

/// Looks through what was uploaded, and says what it is: what the client says, or what it looks
/// like where the client says nothing.
pub(super) async fn look(
    whole: Assembled,
    declared: String,
    spool: Spool,
) -> Result<(Assembled, Result<String, Stop>), tokio::task::JoinError> {
    tokio::task::spawn_blocking(move || {
        let looked =
            whole.open().map_err(Stop::from).and_then(|file| look_at(&file, &declared, &spool));
        (whole, looked)
    })
    .await
}

/// Where what has to be read twice is kept meanwhile.
#[derive(Debug, Clone)]
pub(super) struct Spool {
    pub(super) folder: PathBuf,
    /// Bytes at most.
    pub(super) most: u64,
}

fn look_at(file: &File, declared: &str, spool: &Spool) -> Result<String, Stop> {
    let size = file.metadata()?.len();
    let mut head = Vec::with_capacity(HEAD);
    let mut reader = file;
    reader.rewind()?;
    reader.by_ref().take(HEAD as u64).read_to_end(&mut head)?;
    let found = sniff::sniff(&head);
    if !sniff::agree(declared, found) {
        let is = found.map_or("something else", |found| found.media_type());
        return refused(format!("it says that it is {declared}, and looks like {is}"));
    }
    if found.is_some_and(sniff::Kind::is_picture) {
        reader.rewind()?;
        picture(BufReader::new(file))?;
    }
    let budget = Budget::new(MOST.min(FREE.max(size.saturating_mul(RATIO))), Instant::now() + TIME);
    match zip::Directory::find(file, size)? {
        // A ZIP may begin with anything: a program that unpacks itself, a picture.
        Some(directory) => archive::zip(file, &directory, &budget, spool, 0)?,
        None if found == Some(sniff::Kind::Zip) => {
            return refused("it begins as a ZIP archive, and has no directory");
        }
        None => {}
    }
    if matches!(found, Some(sniff::Kind::Gzip | sniff::Kind::Tar)) {
        reader.rewind()?;
        archive::walk(&mut BufReader::new(file), &budget, spool, 0)?;
    }
    let told = found.map_or("application/octet-stream", |found| found.media_type());
    Ok(if declared.is_empty() { told } else { declared }.to_owned())
}

fn picture(reader: BufReader<&File>) -> Result<(), Stop> {
    let Ok(size) = imagesize::reader_size(reader) else {
        return refused("the picture does not say how large it is");
    };
    let pixels = (size.width as u64).saturating_mul(size.height as u64);
    if pixels > PIXELS {
        let (width, height, most) =
            (size.width, size.height, usize::try_from(PIXELS).unwrap_or(usize::MAX));
        return refused(format!(
            "the picture has {width} × {height} pixels; {} are the most",
            thousands(most)
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
