//! Reads the entries of a zip archive. It states everything twice; an archive with contradictions
//! is refused.

use std::{
    fs::File,
    io::{BufReader, Read as _, Seek as _, SeekFrom},
};

use zip::{CompressionMethod, ZipArchive, read::ZipReadOptions, result::ZipError};

use super::{Limit, SnapshotError, unpack::EntryWriter};
use crate::repository::SkipReason;

/// The signature of an entry in the central directory.
const DIRECTORY_ENTRY: &[u8; 4] = b"PK\x01\x02";
/// The end of the length fields in such an entry.
const LENGTHS_END: usize = 34;
/// Bytes of the central directory: each name may be short, but its extra data up to 64 KiB.
const MAX_DIRECTORY_BYTES: u64 = 64 << 20;
/// The type bits of a Unix mode.
const FILE_TYPE_MASK: u32 = 0o170_000;

/// Passes all entries to `writer`.
pub(super) fn read_entries(
    mut packed: File,
    writer: &mut EntryWriter<'_>,
) -> Result<(), SnapshotError> {
    // The library reads the whole directory into memory, so its size is determined first.
    let (entries, bytes) = directory_size(&mut packed)?;
    if entries > writer.limits().entries || bytes > MAX_DIRECTORY_BYTES {
        return Err(SnapshotError::exceeded(Limit::Entries, b""));
    }
    let mut archive = ZipArchive::new(BufReader::new(packed)).map_err(malformed)?;
    if archive.has_duplicate_names() {
        return Err(SnapshotError::hostile("two entries have the same name", b""));
    }
    if archive.has_overlapping_files().map_err(malformed)? {
        return Err(SnapshotError::hostile("two entries share their bytes", b""));
    }
    for index in 0..archive.len() {
        let raw = archive.by_index_raw(index).map_err(malformed)?;
        let name = raw.name_raw().to_vec();
        writer.begin_entry(&name)?;
        let readable = !raw.encrypted()
            && matches!(raw.compression(), CompressionMethod::Stored | CompressionMethod::Deflated);
        let mode = raw.unix_mode().unwrap_or(0);
        drop(raw);
        if name.ends_with(b"/") {
            writer.add_folder(&name)?;
            continue;
        }
        match mode & FILE_TYPE_MASK {
            0 | 0o100_000 => {}
            0o120_000 => {
                writer.skip(SkipReason::Symlink, &name);
                continue;
            }
            0o040_000 => {
                writer.add_folder(&name)?;
                continue;
            }
            _ => {
                writer.skip(SkipReason::Special, &name);
                continue;
            }
        }
        if !readable {
            writer.skip(SkipReason::Unreadable, &name);
            continue;
        }
        let options = ZipReadOptions::new().enforce_header_consistency(true);
        let mut entry = archive.by_index_with_options(index, options).map_err(malformed)?;
        let size = entry.size();
        writer.add_file(&name, size, mode & 0o111 != 0, &mut entry)?;
    }
    Ok(())
}

/// Upper bounds for the entries and the bytes of the central directory.
fn directory_size(packed: &mut File) -> Result<(u64, u64), SnapshotError> {
    let (mut entries, mut bytes, mut chunk, mut kept) = (0, 0, vec![0; 1 << 20], 0);
    loop {
        let read = packed.read(&mut chunk[kept..])?;
        if read == 0 {
            packed.seek(SeekFrom::Start(0))?;
            return Ok((entries, bytes));
        }
        let end = kept + read;
        for entry in
            chunk[..end].windows(LENGTHS_END).filter(|bytes| bytes.starts_with(DIRECTORY_ENTRY))
        {
            // The lengths of the name, the extra data and the comment.
            let lengths =
                [28, 30, 32].map(|at| u64::from(u16::from_le_bytes([entry[at], entry[at + 1]])));
            entries += 1;
            bytes += 46 + lengths.iter().sum::<u64>();
        }
        // An entry may span two chunks. Keeping one byte less than the window avoids counting it
        // twice.
        kept = end.min(LENGTHS_END - 1);
        chunk.copy_within(end - kept..end, 0);
    }
}

fn malformed(error: ZipError) -> SnapshotError {
    SnapshotError::malformed(error)
}
