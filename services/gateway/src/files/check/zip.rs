//! The directory of a ZIP archive: its entries and their positions. It is at the end, and programs
//! that extract the archive use it.

use std::{
    fs::File,
    io::{self, BufReader, Read as _, Seek as _, SeekFrom},
    os::unix::fs::FileExt as _,
};

use super::{MAX_ENTRIES, Stop, refuse};
use crate::validate::thousands;

/// Maximum length of the comment after the directory.
const MAX_COMMENT_BYTES: u64 = 0xFFFF;
const END_SIGNATURE: &[u8] = b"PK\x05\x06";
const END_BYTES: usize = 22;
const END_64_SIGNATURE: &[u8] = b"PK\x06\x06";
const LOCATOR_64_SIGNATURE: &[u8] = b"PK\x06\x07";
const ENTRY_SIGNATURE: &[u8] = b"PK\x01\x02";
const LOCAL_SIGNATURE: &[u8] = b"PK\x03\x04";
const DIGITAL_SIGNATURE: &[u8] = b"PK\x05\x05";

/// The entries of an archive. They overlap neither each other nor the directory.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) entries: Vec<Entry>,
}

/// An entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    /// Offset of its content.
    pub(super) start: u64,
    /// Compressed size of its content.
    pub(super) compressed_size: u64,
    /// Declared size after decompression.
    pub(super) size: u64,
    pub(super) is_deflated: bool,
    /// Whether it can be read: neither encrypted nor compressed with an unsupported method.
    pub(super) is_readable: bool,
}

/// The position of the directory.
struct End {
    entries: u64,
    start: u64,
    /// Bytes before the archive, which its offsets do not include.
    before: u64,
    /// Offset of the end of the directory.
    end_offset: u64,
}

impl Directory {
    /// Reads the directory of an archive. `None` if there is none.
    pub(super) fn find(file: &File, size: u64) -> Result<Option<Self>, Stop> {
        let Some(end) = End::find(file, size)? else { return Ok(None) };
        if end.entries > MAX_ENTRIES {
            let (has, max) =
                (usize::try_from(end.entries).unwrap_or(usize::MAX), MAX_ENTRIES as usize);
            return refuse(format!(
                "the archive has {} entries; the maximum is {}",
                thousands(has),
                thousands(max)
            ));
        }
        let mut reader = BufReader::new(file);
        reader.seek(SeekFrom::Start(end.start))?;
        let mut reader = reader.take(end.end_offset - end.start);
        let mut entries = Vec::new();
        // The offsets of each entry: of its header, and of its end.
        let mut ranges = Vec::new();
        for _ in 0..end.entries {
            let mut fixed = [0; 46];
            if reader.read_exact(&mut fixed).is_err() || !fixed.starts_with(ENTRY_SIGNATURE) {
                return refuse("the directory of the archive is damaged");
            }
            let mut rest = vec![
                0;
                usize::from(u16_at(&fixed, 28))
                    + usize::from(u16_at(&fixed, 30))
                    + usize::from(u16_at(&fixed, 32))
            ];
            if reader.read_exact(&mut rest).is_err() {
                return refuse("the directory of the archive is damaged");
            }
            let name = usize::from(u16_at(&fixed, 28));
            let extra = &rest[name..name + usize::from(u16_at(&fixed, 30))];
            let [mut size, mut compressed_size, mut local] =
                [24, 20, 42].map(|at| u64::from(u32_at(&fixed, at)));
            read_zip64_values(extra, [&mut size, &mut compressed_size, &mut local]);
            let at = local.saturating_add(end.before);
            let mut header = [0; 30];
            if file.read_exact_at(&mut header, at).is_err() || !header.starts_with(LOCAL_SIGNATURE)
            {
                return refuse("an entry of the archive is not where its directory says");
            }
            let start = at + 30 + u64::from(u16_at(&header, 26)) + u64::from(u16_at(&header, 28));
            let end_offset = start.saturating_add(compressed_size);
            if end_offset > end.start {
                return refuse("an entry of the archive goes beyond its end");
            }
            let (flags, method) = (u16_at(&fixed, 8), u16_at(&fixed, 10));
            let is_readable = flags & 1 == 0 && matches!(method, 0 | 8);
            entries.push(Entry {
                start,
                compressed_size,
                size,
                is_deflated: method == 8,
                is_readable,
            });
            ranges.push((at, end_offset));
        }
        // Programs that extract read the directory to its end, whatever the number of entries. A
        // signature may follow it.
        let mut rest = [0; 4];
        if reader.read(&mut rest)? > 0 && rest != *DIGITAL_SIGNATURE {
            return refuse("the archive has more entries than declared");
        }
        ranges.sort_unstable();
        if ranges.windows(2).any(|two| two[0].1 > two[1].0) {
            return refuse("entries of the archive overlap");
        }
        Ok(Some(Self { entries }))
    }
}

impl End {
    fn find(file: &File, size: u64) -> io::Result<Option<Self>> {
        let from = size.saturating_sub(MAX_COMMENT_BYTES + END_BYTES as u64);
        let mut tail = vec![0; usize::try_from(size - from).unwrap_or_default()];
        file.read_exact_at(&mut tail, from)?;
        let last = tail.len().checked_sub(END_BYTES);
        // Programs look for the last end record; what follows is its comment.
        let found = last.and_then(|last| {
            (0..=last).rev().find(|at| {
                tail[*at..].starts_with(END_SIGNATURE)
                    && at + END_BYTES + usize::from(u16_at(&tail[*at..], 20)) <= tail.len()
            })
        });
        let Some(at) = found else { return Ok(None) };
        let here = from + at as u64;
        let end = &tail[at..];
        let mut entries = u64::from(u16_at(end, 10));
        let mut bytes = u64::from(u32_at(end, 12));
        let mut start = u64::from(u32_at(end, 16));
        let mut end_offset = here;
        if let Some(values) = read_zip64_end(file, here)? {
            (entries, bytes, start, end_offset) = values;
        }
        let Some(actual) = end_offset.checked_sub(bytes) else { return Ok(None) };
        let Some(before) = actual.checked_sub(start) else { return Ok(None) };
        // The four bytes are part of something else.
        let mut first = [0; 4];
        if entries > 0
            && (file.read_exact_at(&mut first, actual).is_err() || first != *ENTRY_SIGNATURE)
        {
            return Ok(None);
        }
        Ok(Some(Self { entries, start: actual, before, end_offset }))
    }
}

/// Reads the ZIP64 end record: number of entries, size and offset of the directory, and its end.
fn read_zip64_end(file: &File, end: u64) -> io::Result<Option<(u64, u64, u64, u64)>> {
    let Some(at) = end.checked_sub(20) else { return Ok(None) };
    let mut locator = [0; 20];
    file.read_exact_at(&mut locator, at)?;
    if !locator.starts_with(LOCATOR_64_SIGNATURE) {
        return Ok(None);
    }
    // The record is before the locator, whatever the locator says: data may precede the archive.
    for at in [u64_at(&locator, 8), at.saturating_sub(56)] {
        let mut record = [0; 56];
        if file.read_exact_at(&mut record, at).is_ok() && record.starts_with(END_64_SIGNATURE) {
            return Ok(Some((u64_at(&record, 32), u64_at(&record, 40), u64_at(&record, 48), at)));
        }
    }
    Ok(None)
}

/// Replaces values that are too large for their fields by those of the ZIP64 extra field, in the
/// same order.
fn read_zip64_values(mut extra: &[u8], numbers: [&mut u64; 3]) {
    while extra.len() >= 4 {
        let (id, length) = (u16_at(extra, 0), usize::from(u16_at(extra, 2)));
        let Some(mut field) = extra.get(4..4 + length) else { return };
        if id == 1 {
            for number in numbers.into_iter().filter(|number| **number == u64::from(u32::MAX)) {
                let Some(value) = field.get(..8) else { return };
                *number = u64_at(value, 0);
                field = &field[8..];
            }
            return;
        }
        extra = &extra[4 + length..];
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
