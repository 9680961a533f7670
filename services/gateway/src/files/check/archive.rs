//! Archives are unpacked into nothing, while what comes out is counted.

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
    DEPTH, ENTRIES, HEAD, Spool, Stop, refused,
    sniff::{Kind, sniff},
    zip::Directory,
};
use crate::validate::thousands;

const BUFFER: usize = 64 * 1024;
const BLOCK: u64 = 512;

/// How much may still come out of a file, over all archives in it.
pub(super) struct Budget {
    bytes: Cell<u64>,
    entries: Cell<u64>,
    most: u64,
    until: Instant,
}

impl Budget {
    pub(super) fn new(most: u64, until: Instant) -> Self {
        Self { bytes: Cell::new(most), entries: Cell::new(ENTRIES), most, until }
    }

    fn take(&self, bytes: u64) -> io::Result<()> {
        match self.bytes.get().checked_sub(bytes) {
            Some(left) => self.bytes.set(left),
            None => {
                let most = thousands(usize::try_from(self.most).unwrap_or(usize::MAX));
                return Err(Refusal::error(format!(
                    "what is in the archive has more than {most} bytes, unpacked"
                )));
            }
        }
        if Instant::now() > self.until {
            return Err(Refusal::error("looking through the archive takes too long"));
        }
        Ok(())
    }

    fn entry(&self) -> io::Result<()> {
        let left = self.entries.get().checked_sub(1);
        self.entries.set(left.ok_or_else(|| {
            Refusal::error(format!(
                "the archive has more than {} entries",
                thousands(ENTRIES as usize)
            ))
        })?);
        self.take(0)
    }
}

/// Why nothing more is read, as readers pass it on.
#[derive(Debug)]
struct Refusal(String);

impl Refusal {
    fn error(words: impl Into<String>) -> io::Error {
        io::Error::other(Self(words.into()))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// What an error says to who uploaded the file, if it is about the file.
pub(super) fn refusal(error: &io::Error) -> Option<String> {
    let ours = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<Refusal>())
        .map(|refusal| refusal.0.clone());
    ours.or_else(|| match error.kind() {
        // What the unpackers say, and what is shorter than it should be.
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof => {
            Some("the archive is damaged".to_owned())
        }
        _ => None,
    })
}

/// Counts what is read.
struct Counted<'b, R> {
    inner: R,
    budget: &'b Budget,
    read: u64,
}

impl<'b, R> Counted<'b, R> {
    fn new(inner: R, budget: &'b Budget) -> Self {
        Self { inner, budget, read: 0 }
    }
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.read += read as u64;
        self.budget.take(read as u64)?;
        Ok(read)
    }
}

/// A part of a file.
struct Slice<'f> {
    file: &'f File,
    at: u64,
    end: u64,
}

impl Read for Slice<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.end - self.at).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.file.read_at(&mut buffer[..most], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// Looks through a ZIP archive that is within `depth` others.
pub(super) fn zip(
    file: &File,
    directory: &Directory,
    budget: &Budget,
    spool: &Spool,
    depth: u32,
) -> Result<(), Stop> {
    for entry in &directory.entries {
        budget.entry()?;
        if !entry.is_readable {
            budget.take(entry.size)?;
            continue;
        }
        let packed = Slice { file, at: entry.begins, end: entry.begins + entry.packed };
        let read = if entry.is_deflated {
            let unpacked = DeflateDecoder::new_with_buf(packed, vec![0; BUFFER]);
            let mut counted = BufReader::with_capacity(BUFFER, Counted::new(unpacked, budget));
            walk(&mut counted, budget, spool, depth + 1)?;
            counted.get_ref().read
        } else {
            let mut counted = BufReader::with_capacity(BUFFER, Counted::new(packed, budget));
            walk(&mut counted, budget, spool, depth + 1)?;
            counted.get_ref().read
        };
        if read != entry.size {
            return refused("an entry of the archive has another size than it says");
        }
    }
    Ok(())
}

/// Reads something to its end, and looks through it if it is an archive. What it unpacks is read
/// through `budget`; what it is itself was.
pub(super) fn walk(
    reader: &mut dyn BufRead,
    budget: &Budget,
    spool: &Spool,
    depth: u32,
) -> Result<(), Stop> {
    let mut head = Vec::with_capacity(HEAD);
    (&mut *reader).take(HEAD as u64).read_to_end(&mut head)?;
    let kind = sniff(&head);
    let mut whole = io::Cursor::new(head).chain(reader);
    if matches!(kind, Some(Kind::Zip | Kind::Gzip | Kind::Tar)) && depth >= DEPTH {
        return refused(format!("there are archives within archives, more than {DEPTH} deep"));
    }
    match kind {
        Some(Kind::Zip) => {
            let (file, size) = spooled(&mut whole, spool)?;
            match Directory::find(&file, size)? {
                Some(directory) => zip(&file, &directory, budget, spool, depth)?,
                None => return refused("an archive within the archive has no directory"),
            }
        }
        Some(Kind::Gzip) => {
            let mut unpacked = BufReader::with_capacity(
                BUFFER,
                Counted::new(MultiGzDecoder::new(&mut whole), budget),
            );
            walk(&mut unpacked, budget, spool, depth + 1)?;
        }
        Some(Kind::Tar) => tar(&mut whole, budget, spool, depth)?,
        _ => {}
    }
    drain(&mut whole)
}

/// A tar archive: blocks of 512 bytes, of which the first of each entry says how long that is.
fn tar(reader: &mut dyn BufRead, budget: &Budget, spool: &Spool, depth: u32) -> Result<(), Stop> {
    loop {
        let mut header = [0; BLOCK as usize];
        match reader.read_exact(&mut header) {
            Ok(()) => {}
            // Some end without the empty blocks.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        if header.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        budget.entry()?;
        let Some(size) = length(&header[124..136]) else {
            return refused("the archive is damaged");
        };
        let mut entry = BufReader::with_capacity(BUFFER, (&mut *reader).take(size));
        walk(&mut entry, budget, spool, depth + 1)?;
        let padding = (BLOCK - size % BLOCK) % BLOCK;
        io::copy(&mut (&mut *reader).take(padding), &mut io::sink())?;
    }
}

/// A number of a tar's header: in octal digits, or, when its first bit is set, in binary.
fn length(field: &[u8]) -> Option<u64> {
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

/// Writes something into a nameless file, because a ZIP is read from its end.
fn spooled(reader: &mut dyn Read, spool: &Spool) -> Result<(File, u64), Stop> {
    let mut file = tempfile::tempfile_in(&spool.folder).map_err(Stop::Failed)?;
    let mut buffer = vec![0; BUFFER];
    let mut size = 0;
    loop {
        let read = reader.read(&mut buffer)?;
        if read == 0 {
            return Ok((file, size));
        }
        size += read as u64;
        if size > spool.most {
            return refused("an archive within the archive is larger than a file may be");
        }
        // Of the disk, not of the file.
        file.write_all(&buffer[..read]).map_err(Stop::Failed)?;
    }
}

fn drain(reader: &mut dyn Read) -> Result<(), Stop> {
    let mut buffer = vec![0; BUFFER];
    while reader.read(&mut buffer)? > 0 {}
    Ok(())
}
