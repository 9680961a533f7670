//! Decompresses archives without storing the output, and counts it.

use std::{
    cell::Cell,
    fmt,
    fs::File,
    io::{self, BufRead, BufReader, Read, Write as _},
    os::unix::fs::FileExt as _,
};

use flate2::{bufread::MultiGzDecoder, read::DeflateDecoder};
use tokio::time::Instant;

use super::{
    HEAD_BYTES, MAX_DEPTH, MAX_ENTRIES, Spool, Stop, refuse,
    sniff::{Kind, sniff},
    zip::Directory,
};
use crate::validate::thousands;

const BUFFER_BYTES: usize = 64 * 1024;
const BLOCK_BYTES: u64 = 512;

/// The remaining budget of a file, over all archives in it.
pub(super) struct Budget {
    bytes: Cell<u64>,
    entries: Cell<u64>,
    max: u64,
    deadline: Instant,
}

impl Budget {
    pub(super) fn new(max: u64, deadline: Instant) -> Self {
        Self { bytes: Cell::new(max), entries: Cell::new(MAX_ENTRIES), max, deadline }
    }

    fn take(&self, bytes: u64) -> io::Result<()> {
        match self.bytes.get().checked_sub(bytes) {
            Some(left) => self.bytes.set(left),
            None => {
                let max = thousands(usize::try_from(self.max).unwrap_or(usize::MAX));
                return Err(Refusal::error(format!(
                    "the archive has more than {max} bytes when decompressed"
                )));
            }
        }
        if Instant::now() > self.deadline {
            return Err(Refusal::error("checking the archive takes too long"));
        }
        Ok(())
    }

    fn take_entry(&self) -> io::Result<()> {
        let left = self.entries.get().checked_sub(1);
        self.entries.set(left.ok_or_else(|| {
            Refusal::error(format!(
                "the archive has more than {} entries",
                thousands(MAX_ENTRIES as usize)
            ))
        })?);
        self.take(0)
    }
}

/// A refusal that readers pass on as an error.
#[derive(Debug)]
struct Refusal(String);

impl Refusal {
    fn error(reason: impl Into<String>) -> io::Error {
        io::Error::other(Self(reason.into()))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// Returns the reason for the uploader, if an error concerns the file.
pub(super) fn refusal(error: &io::Error) -> Option<String> {
    let own = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<Refusal>())
        .map(|refusal| refusal.0.clone());
    own.or_else(|| match error.kind() {
        // Errors of the decompressors, and truncated content.
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof => {
            Some("the archive is damaged".to_owned())
        }
        _ => None,
    })
}

/// Counts the bytes read.
struct CountingReader<'b, R> {
    inner: R,
    budget: &'b Budget,
    read: u64,
}

impl<'b, R> CountingReader<'b, R> {
    fn new(inner: R, budget: &'b Budget) -> Self {
        Self { inner, budget, read: 0 }
    }
}

impl<R: Read> Read for CountingReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.read += read as u64;
        self.budget.take(read as u64)?;
        Ok(read)
    }
}

/// A range of a file.
struct FileRange<'f> {
    file: &'f File,
    at: u64,
    end: u64,
}

impl Read for FileRange<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let max = usize::try_from(self.end - self.at).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.file.read_at(&mut buffer[..max], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// Checks a ZIP archive that is nested in `depth` others.
pub(super) fn check_zip(
    file: &File,
    directory: &Directory,
    budget: &Budget,
    spool: &Spool,
    depth: u32,
) -> Result<(), Stop> {
    for entry in &directory.entries {
        budget.take_entry()?;
        if !entry.is_readable {
            budget.take(entry.size)?;
            continue;
        }
        let compressed =
            FileRange { file, at: entry.start, end: entry.start + entry.compressed_size };
        let read = if entry.is_deflated {
            let unpacked = DeflateDecoder::new_with_buf(compressed, vec![0; BUFFER_BYTES]);
            let mut counted =
                BufReader::with_capacity(BUFFER_BYTES, CountingReader::new(unpacked, budget));
            check_content(&mut counted, budget, spool, depth + 1)?;
            counted.get_ref().read
        } else {
            let mut counted =
                BufReader::with_capacity(BUFFER_BYTES, CountingReader::new(compressed, budget));
            check_content(&mut counted, budget, spool, depth + 1)?;
            counted.get_ref().read
        };
        if read != entry.size {
            return refuse("an entry of the archive has another size than declared");
        }
    }
    Ok(())
}

/// Reads content to its end, and checks it if it is an archive. `budget` is charged for what it
/// decompresses; the content itself was charged before.
pub(super) fn check_content(
    reader: &mut dyn BufRead,
    budget: &Budget,
    spool: &Spool,
    depth: u32,
) -> Result<(), Stop> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    (&mut *reader).take(HEAD_BYTES as u64).read_to_end(&mut head)?;
    let kind = sniff(&head);
    let mut whole = io::Cursor::new(head).chain(reader);
    if matches!(kind, Some(Kind::Zip | Kind::Gzip | Kind::Tar)) && depth >= MAX_DEPTH {
        return refuse(format!("archives are nested more than {MAX_DEPTH} deep"));
    }
    match kind {
        Some(Kind::Zip) => {
            let (file, size) = spool_to_file(&mut whole, spool)?;
            match Directory::find(&file, size)? {
                Some(directory) => check_zip(&file, &directory, budget, spool, depth)?,
                None => return refuse("an archive within the archive has no directory"),
            }
        }
        Some(Kind::Gzip) => {
            let mut unpacked = BufReader::with_capacity(
                BUFFER_BYTES,
                CountingReader::new(MultiGzDecoder::new(&mut whole), budget),
            );
            check_content(&mut unpacked, budget, spool, depth + 1)?;
        }
        Some(Kind::Tar) => check_tar(&mut whole, budget, spool, depth)?,
        _ => {}
    }
    drain(&mut whole)
}

/// Checks a tar archive: blocks of 512 bytes; the first block of each entry has its size.
fn check_tar(
    reader: &mut dyn BufRead,
    budget: &Budget,
    spool: &Spool,
    depth: u32,
) -> Result<(), Stop> {
    loop {
        let mut header = [0; BLOCK_BYTES as usize];
        match reader.read_exact(&mut header) {
            Ok(()) => {}
            // Some archives end without the empty blocks.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        if header.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        budget.take_entry()?;
        let Some(size) = parse_size(&header[124..136]) else {
            return refuse("the archive is damaged");
        };
        let mut entry = BufReader::with_capacity(BUFFER_BYTES, (&mut *reader).take(size));
        check_content(&mut entry, budget, spool, depth + 1)?;
        let padding = (BLOCK_BYTES - size % BLOCK_BYTES) % BLOCK_BYTES;
        io::copy(&mut (&mut *reader).take(padding), &mut io::sink())?;
    }
}

/// Parses a number of a tar header: octal digits, or binary if its first bit is set.
fn parse_size(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let (high, low) = field.split_at(field.len() - 8);
        let fits = high[0] == 0x80 && high[1..].iter().all(|byte| *byte == 0);
        return fits.then(|| low.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)));
    }
    let digits: Vec<u8> = field.iter().copied().filter(|byte| !matches!(byte, 0 | b' ')).collect();
    digits.iter().try_fold(0_u64, |number, digit| match digit {
        b'0'..=b'7' => number.checked_mul(8)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

/// Writes content to an unnamed file, because a ZIP is read from its end.
fn spool_to_file(reader: &mut dyn Read, spool: &Spool) -> Result<(File, u64), Stop> {
    let mut file = tempfile::tempfile_in(&spool.folder).map_err(Stop::Failed)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut size = 0;
    loop {
        let read = reader.read(&mut buffer)?;
        if read == 0 {
            return Ok((file, size));
        }
        size += read as u64;
        if size > spool.max {
            return refuse("an archive within the archive is larger than a file may be");
        }
        // An error of the disk, not of the file.
        file.write_all(&buffer[..read]).map_err(Stop::Failed)?;
    }
}

fn drain(reader: &mut dyn Read) -> Result<(), Stop> {
    let mut buffer = vec![0; BUFFER_BYTES];
    while reader.read(&mut buffer)? > 0 {}
    Ok(())
}
