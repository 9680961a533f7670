//! The directory of a ZIP archive: which entries there are, and where. It stands at the end, and is
//! what programs that unpack go by.

use std::{
    fs::File,
    io::{self, BufReader, Read as _, Seek as _, SeekFrom},
    os::unix::fs::FileExt as _,
};

use super::{ENTRIES, Stop, refused};
use crate::validate::thousands;

/// A comment can stand behind the end of the directory.
const COMMENT: u64 = 0xFFFF;
const END: &[u8] = b"PK\x05\x06";
const END_BYTES: usize = 22;
const END_64: &[u8] = b"PK\x06\x06";
const LOCATOR_64: &[u8] = b"PK\x06\x07";
const ENTRY: &[u8] = b"PK\x01\x02";
const LOCAL: &[u8] = b"PK\x03\x04";
const SIGNATURE: &[u8] = b"PK\x05\x05";

/// The entries of an archive. None overlaps another, or the directory.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) entries: Vec<Entry>,
}

/// One entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    /// Where its content begins.
    pub(super) begins: u64,
    /// How long that is.
    pub(super) packed: u64,
    /// How long it says that it is unpacked.
    pub(super) size: u64,
    pub(super) is_deflated: bool,
    /// It can be read: neither encrypted nor compressed in another way.
    pub(super) is_readable: bool,
}

/// Where the directory is.
struct End {
    entries: u64,
    begins: u64,
    /// How many bytes stand before the archive, which its offsets know nothing of.
    before: u64,
    /// Where the directory ends.
    ends: u64,
}

impl Directory {
    /// The directory of an archive. None: there is none.
    pub(super) fn find(file: &File, size: u64) -> Result<Option<Self>, Stop> {
        let Some(end) = End::find(file, size)? else { return Ok(None) };
        if end.entries > ENTRIES {
            let (has, most) =
                (usize::try_from(end.entries).unwrap_or(usize::MAX), ENTRIES as usize);
            return refused(format!(
                "the archive has {} entries; {} are the most",
                thousands(has),
                thousands(most)
            ));
        }
        let mut reader = BufReader::new(file);
        reader.seek(SeekFrom::Start(end.begins))?;
        let mut reader = reader.take(end.ends - end.begins);
        let mut entries = Vec::new();
        // Where each begins, with what stands before its content, and where it ends.
        let mut places = Vec::new();
        for _ in 0..end.entries {
            let mut fixed = [0; 46];
            if reader.read_exact(&mut fixed).is_err() || !fixed.starts_with(ENTRY) {
                return refused("the directory of the archive is damaged");
            }
            let mut rest = vec![
                0;
                usize::from(u16_at(&fixed, 28))
                    + usize::from(u16_at(&fixed, 30))
                    + usize::from(u16_at(&fixed, 32))
            ];
            if reader.read_exact(&mut rest).is_err() {
                return refused("the directory of the archive is damaged");
            }
            let name = usize::from(u16_at(&fixed, 28));
            let extra = &rest[name..name + usize::from(u16_at(&fixed, 30))];
            let [mut size, mut packed, mut local] =
                [24, 20, 42].map(|at| u64::from(u32_at(&fixed, at)));
            large(extra, [&mut size, &mut packed, &mut local]);
            let at = local.saturating_add(end.before);
            let mut header = [0; 30];
            if file.read_exact_at(&mut header, at).is_err() || !header.starts_with(LOCAL) {
                return refused("an entry of the archive is not where its directory says");
            }
            let begins = at + 30 + u64::from(u16_at(&header, 26)) + u64::from(u16_at(&header, 28));
            let ends = begins.saturating_add(packed);
            if ends > end.begins {
                return refused("an entry of the archive goes beyond its end");
            }
            let (flags, method) = (u16_at(&fixed, 8), u16_at(&fixed, 10));
            let is_readable = flags & 1 == 0 && matches!(method, 0 | 8);
            entries.push(Entry { begins, packed, size, is_deflated: method == 8, is_readable });
            places.push((at, ends));
        }
        // Programs that unpack go by the directory and not by the number of its entries. A
        // signature may stand at its end.
        let mut rest = [0; 4];
        if reader.read(&mut rest)? > 0 && rest != *SIGNATURE {
            return refused("the archive has more entries than it says");
        }
        places.sort_unstable();
        if places.windows(2).any(|two| two[0].1 > two[1].0) {
            return refused("entries of the archive overlap");
        }
        Ok(Some(Self { entries }))
    }
}

impl End {
    fn find(file: &File, size: u64) -> io::Result<Option<Self>> {
        let from = size.saturating_sub(COMMENT + END_BYTES as u64);
        let mut tail = vec![0; usize::try_from(size - from).unwrap_or_default()];
        file.read_exact_at(&mut tail, from)?;
        let last = tail.len().checked_sub(END_BYTES);
        // Programs look for the last one; what stands behind it is its comment.
        let found = last.and_then(|last| {
            (0..=last).rev().find(|at| {
                tail[*at..].starts_with(END)
                    && at + END_BYTES + usize::from(u16_at(&tail[*at..], 20)) <= tail.len()
            })
        });
        let Some(at) = found else { return Ok(None) };
        let here = from + at as u64;
        let end = &tail[at..];
        let mut entries = u64::from(u16_at(end, 10));
        let mut bytes = u64::from(u32_at(end, 12));
        let mut begins = u64::from(u32_at(end, 16));
        let mut ends = here;
        if let Some(large) = large_end(file, here)? {
            (entries, bytes, begins, ends) = large;
        }
        let Some(really) = ends.checked_sub(bytes) else { return Ok(None) };
        let Some(before) = really.checked_sub(begins) else { return Ok(None) };
        // Four bytes in the middle of something else.
        let mut first = [0; 4];
        if entries > 0 && (file.read_exact_at(&mut first, really).is_err() || first != *ENTRY) {
            return Ok(None);
        }
        Ok(Some(Self { entries, begins: really, before, ends }))
    }
}

/// Entries, bytes and beginning of a directory whose numbers are too large for the end of it, and
/// where it ends.
fn large_end(file: &File, end: u64) -> io::Result<Option<(u64, u64, u64, u64)>> {
    let Some(at) = end.checked_sub(20) else { return Ok(None) };
    let mut locator = [0; 20];
    file.read_exact_at(&mut locator, at)?;
    if !locator.starts_with(LOCATOR_64) {
        return Ok(None);
    }
    // It stands before the locator, wherever that says: something may stand before the archive.
    for at in [u64_at(&locator, 8), at.saturating_sub(56)] {
        let mut record = [0; 56];
        if file.read_exact_at(&mut record, at).is_ok() && record.starts_with(END_64) {
            return Ok(Some((u64_at(&record, 32), u64_at(&record, 40), u64_at(&record, 48), at)));
        }
    }
    Ok(None)
}

/// Numbers that are too large for their places stand in a field of their own, in the same order.
fn large(mut extra: &[u8], numbers: [&mut u64; 3]) {
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
