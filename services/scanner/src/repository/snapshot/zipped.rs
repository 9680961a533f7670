//! The entries of a zip archive. It says everything twice, so that it can lie; where the two
//! disagree it is refused.

use std::{
    fs::File,
    io::{BufReader, Read as _, Seek as _, SeekFrom},
};

use zip::{CompressionMethod, ZipArchive, read::ZipReadOptions, result::ZipError};

use super::{Limit, SnapshotError, unpack::Writer};
use crate::repository::Skip;

/// What each entry of the directory at the archive's end begins with.
const DIRECTORY_ENTRY: &[u8; 4] = b"PK\x01\x02";
/// How far into such an entry its lengths stand.
const LENGTHS: usize = 34;
/// Bytes of a directory: each name may be short, and what stands beside it 64 KiB.
const MAX_DIRECTORY: u64 = 64 << 20;
/// The type bits of a Unix mode.
const KIND: u32 = 0o170_000;

/// Hands all entries to `writer`.
pub(super) fn entries(mut packed: File, writer: &mut Writer<'_>) -> Result<(), SnapshotError> {
    // The library reads the whole directory into memory; how long that can be is found out before.
    let (entries, bytes) = directory(&mut packed)?;
    if entries > writer.limits().entries || bytes > MAX_DIRECTORY {
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
        writer.begin(&name)?;
        let readable = !raw.encrypted()
            && matches!(raw.compression(), CompressionMethod::Stored | CompressionMethod::Deflated);
        let mode = raw.unix_mode().unwrap_or(0);
        drop(raw);
        if name.ends_with(b"/") {
            writer.folder(&name)?;
            continue;
        }
        match mode & KIND {
            0 | 0o100_000 => {}
            0o120_000 => {
                writer.skip(Skip::Symlink, &name);
                continue;
            }
            0o040_000 => {
                writer.folder(&name)?;
                continue;
            }
            _ => {
                writer.skip(Skip::Special, &name);
                continue;
            }
        }
        if !readable {
            writer.skip(Skip::Unreadable, &name);
            continue;
        }
        let options = ZipReadOptions::new().enforce_header_consistency(true);
        let mut entry = archive.by_index_with_options(index, options).map_err(malformed)?;
        let size = entry.size();
        writer.file(&name, size, mode & 0o111 != 0, &mut entry)?;
    }
    Ok(())
}

/// At most how many entries the archive's directory has, and how many bytes.
fn directory(packed: &mut File) -> Result<(u64, u64), SnapshotError> {
    let (mut entries, mut bytes, mut chunk, mut kept) = (0, 0, vec![0; 1 << 20], 0);
    loop {
        let read = packed.read(&mut chunk[kept..])?;
        if read == 0 {
            packed.seek(SeekFrom::Start(0))?;
            return Ok((entries, bytes));
        }
        let end = kept + read;
        for entry in
            chunk[..end].windows(LENGTHS).filter(|bytes| bytes.starts_with(DIRECTORY_ENTRY))
        {
            // Of the name, what else there is, and the comment.
            let lengths =
                [28, 30, 32].map(|at| u64::from(u16::from_le_bytes([entry[at], entry[at + 1]])));
            entries += 1;
            bytes += 46 + lengths.iter().sum::<u64>();
        }
        // One may lie across two chunks; one byte less than what is looked at is too few to be
        // counted twice.
        kept = end.min(LENGTHS - 1);
        chunk.copy_within(end - kept..end, 0);
    }
}

fn malformed(error: ZipError) -> SnapshotError {
    SnapshotError::malformed(error)
}
