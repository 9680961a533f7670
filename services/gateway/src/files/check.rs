//! Checks a file before it can be used: whether it has the declared type, and whether it is a
//! decompression bomb.
//!
//! Limits per file:
//! - Archives (ZIP and formats based on it, gzip, tar within it; nested up to [`MAX_DEPTH`] levels)
//!   are decompressed without storing the output, and the bytes are counted. All levels together
//!   have at most [`MAX_RATIO`] times the file's size, or [`FREE_BYTES`] if that is more, and never
//!   more than [`MAX_BYTES`]. At most [`MAX_ENTRIES`] entries. Content with another compression, or
//!   encrypted content, counts with its declared size.
//! - The entries of a ZIP do not overlap, and have their declared size.
//! - Images have at most [`MAX_PIXELS`] pixels.
//! - The check takes at most [`TIMEOUT`]. Memory: some buffers, and 24 bytes for each entry of a
//!   ZIP. A ZIP within an archive is written to an unnamed file beside the upload, with at most the
//!   size of an upload.
//!
//! Not checked: what documents do to programs that open them (XML entities, macros, scripts of a
//! PDF), and other archives (7z, RAR, bzip2, xz, zstd), which no part of Construct opens.

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

/// Maximum nesting of archives.
const MAX_DEPTH: u32 = 4;
/// Maximum ratio of decompressed bytes to the file's size.
const MAX_RATIO: u64 = 100;
/// Decompressed bytes that are always allowed.
const FREE_BYTES: u64 = 16 * 1024 * 1024;
/// Maximum number of decompressed bytes.
const MAX_BYTES: u64 = 4 * 1024 * 1024 * 1024;
const MAX_ENTRIES: u64 = 100_000;
const MAX_PIXELS: u64 = 100_000_000;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Number of bytes for the detection of the type.
const HEAD_BYTES: usize = 512;

/// Why the check of a file ends early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The file is refused, with the reason for its uploader.
    Refused(String),
    /// The file cannot be read.
    Failed(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        match archive::refusal(&error) {
            Some(reason) => Self::Refused(reason),
            None => Self::Failed(error),
        }
    }
}

fn refuse<T>(reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Refused(reason.into()))
}

/// Checks an upload. Returns its media type: the declared one, or the detected one if none is
/// declared.
pub(super) async fn check_file(
    assembled: Assembled,
    declared: String,
    spool: Spool,
) -> Result<(Assembled, Result<String, Stop>), tokio::task::JoinError> {
    tokio::task::spawn_blocking(move || {
        let result =
            assembled.open().map_err(Stop::from).and_then(|file| check(&file, &declared, &spool));
        (assembled, result)
    })
    .await
}

/// Where content that must be read twice is stored.
#[derive(Debug, Clone)]
pub(super) struct Spool {
    pub(super) folder: PathBuf,
    /// Maximum bytes.
    pub(super) max: u64,
}

fn check(file: &File, declared: &str, spool: &Spool) -> Result<String, Stop> {
    let size = file.metadata()?.len();
    let mut head = Vec::with_capacity(HEAD_BYTES);
    let mut reader = file;
    reader.rewind()?;
    reader.by_ref().take(HEAD_BYTES as u64).read_to_end(&mut head)?;
    let found = sniff::sniff(&head);
    if !sniff::matches_declared(declared, found) {
        let actual = found.map_or("something else", |found| found.media_type());
        return refuse(format!("it is declared as {declared}, but looks like {actual}"));
    }
    if found.is_some_and(sniff::Kind::is_image) {
        reader.rewind()?;
        check_image(BufReader::new(file))?;
    }
    let budget = Budget::new(
        MAX_BYTES.min(FREE_BYTES.max(size.saturating_mul(MAX_RATIO))),
        Instant::now() + TIMEOUT,
    );
    match zip::Directory::find(file, size)? {
        // A ZIP may start with anything: a self-extracting program, an image.
        Some(directory) => archive::check_zip(file, &directory, &budget, spool, 0)?,
        None if found == Some(sniff::Kind::Zip) => {
            return refuse("it starts like a ZIP archive, but has no directory");
        }
        None => {}
    }
    if matches!(found, Some(sniff::Kind::Gzip | sniff::Kind::Tar)) {
        reader.rewind()?;
        archive::check_content(&mut BufReader::new(file), &budget, spool, 0)?;
    }
    let detected = found.map_or("application/octet-stream", |found| found.media_type());
    Ok(if declared.is_empty() { detected } else { declared }.to_owned())
}

fn check_image(reader: BufReader<&File>) -> Result<(), Stop> {
    let Ok(size) = imagesize::reader_size(reader) else {
        return refuse("the image has no size");
    };
    let pixels = (size.width as u64).saturating_mul(size.height as u64);
    if pixels > MAX_PIXELS {
        let (width, height, max) =
            (size.width, size.height, usize::try_from(MAX_PIXELS).unwrap_or(usize::MAX));
        return refuse(format!(
            "the image has {width} × {height} pixels; the maximum is {}",
            thousands(max)
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
