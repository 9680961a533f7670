//! Reads the entries of a tar archive in gzip.
//!
//! The library reads headers. Long names and pax records are read here, because the library would
//! read them into memory at any length.

use std::io::{BufRead, Read};

use flate2::bufread::MultiGzDecoder;
use tar::EntryType;

use super::{SnapshotError, unpack::EntryWriter};
use crate::repository::SkipReason;

/// Bytes of names and records; longer ones are refused.
const MAX_EXTENSION_BYTES: u64 = 64 * 1024;

/// The extension headers of the next entry.
#[derive(Default)]
struct ExtensionHeaders {
    name: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
}

/// Passes all entries to `writer`.
pub(super) fn read_entries(
    packed: impl BufRead,
    writer: &mut EntryWriter<'_>,
) -> Result<(), SnapshotError> {
    let mut archive = tar::Archive::new(MultiGzDecoder::new(packed));
    let mut headers = ExtensionHeaders::default();
    for entry in archive.entries().map_err(SnapshotError::malformed)?.raw(true) {
        let mut entry = entry.map_err(SnapshotError::malformed)?;
        let header_name = entry.path_bytes().into_owned();
        writer.begin_entry(&header_name)?;
        writer.count_bytes(512, &header_name)?;
        let kind = entry.header().entry_type();
        match kind {
            EntryType::GNULongName => {
                let mut name = read_extension(&mut entry, writer)?;
                while name.last() == Some(&0) {
                    name.pop();
                }
                if headers.name.replace(name).is_some() {
                    return Err(SnapshotError::hostile("an entry is named twice", &header_name));
                }
                continue;
            }
            EntryType::GNULongLink => {
                read_extension(&mut entry, writer)?;
                continue;
            }
            EntryType::XHeader => {
                let records = read_extension(&mut entry, writer)?;
                parse_records(&records, &mut headers)?;
                continue;
            }
            EntryType::XGlobalHeader => {
                // GitHub writes the commit's id there. A name or size for all entries is not
                // legitimate.
                let records = read_extension(&mut entry, writer)?;
                let mut all = ExtensionHeaders::default();
                parse_records(&records, &mut all)?;
                if all.name.is_some() || all.size.is_some() || all.sparse {
                    return Err(SnapshotError::hostile(
                        "a global header names entries",
                        &header_name,
                    ));
                }
                continue;
            }
            _ => {}
        }
        let ExtensionHeaders { name, size: said_size, sparse } = std::mem::take(&mut headers);
        let name = name.unwrap_or(header_name);
        let size = entry.size();
        // Only files beyond 8 GiB need it, which are skipped. Some archivers always write it. A
        // different size would make readers disagree.
        if said_size.is_some_and(|headers| headers != size) {
            return Err(SnapshotError::hostile("a record overrides a size", &name));
        }
        match kind {
            EntryType::Directory => writer.add_folder(&name)?,
            // Old archives mark folders only by the trailing slash.
            EntryType::Regular | EntryType::Continuous if name.ends_with(b"/") => {
                writer.add_folder(&name)?
            }
            EntryType::Regular | EntryType::Continuous if !sparse => {
                let executable = entry.header().mode().is_ok_and(|mode| mode & 0o111 != 0);
                writer.add_file(&name, size, executable, &mut entry)?;
                continue;
            }
            EntryType::Symlink => writer.skip(SkipReason::Symlink, &name),
            EntryType::Link => writer.skip(SkipReason::Hardlink, &name),
            // Its map may continue after the header, where the next header would be read.
            EntryType::GNUSparse => return Err(SnapshotError::hostile("a file is sparse", &name)),
            _ => writer.skip(SkipReason::Special, &name),
        }
        writer.drain(&name, &mut entry)?;
    }
    if headers.name.is_some() {
        return Err(SnapshotError::malformed(
            "the archive ends after a header for an entry that is missing",
        ));
    }
    Ok(())
}

fn read_extension(
    entry: &mut impl Read,
    writer: &mut EntryWriter<'_>,
) -> Result<Vec<u8>, SnapshotError> {
    let mut content = Vec::new();
    entry
        .take(MAX_EXTENSION_BYTES + 1)
        .read_to_end(&mut content)
        .map_err(SnapshotError::malformed)?;
    writer.count_bytes(content.len() as u64, b"")?;
    if content.len() as u64 > MAX_EXTENSION_BYTES {
        return Err(SnapshotError::hostile("an extension header is too long", &content[..100]));
    }
    Ok(content)
}

/// Parses records `LENGTH KEY=VALUE` with a line ending. Values may contain line endings, so the
/// length counts.
fn parse_records(mut records: &[u8], headers: &mut ExtensionHeaders) -> Result<(), SnapshotError> {
    let malformed = || SnapshotError::malformed("an extension header is damaged");
    while records.first().is_some_and(|first| *first != 0) {
        let space = records.iter().take(20).position(|byte| *byte == b' ').ok_or_else(malformed)?;
        let length: usize = str::from_utf8(&records[..space])
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(malformed)?;
        let record = records
            .get(space + 1..length)
            .and_then(|record| record.strip_suffix(b"\n"))
            .ok_or_else(malformed)?;
        records = &records[length..];
        let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(malformed)?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        match key {
            b"path" => headers.name = Some(value.to_vec()),
            b"size" => {
                let size = str::from_utf8(value)
                    .ok()
                    .and_then(|text| text.parse().ok())
                    .ok_or_else(malformed)?;
                headers.size = Some(size);
            }
            key if key.starts_with(b"GNU.sparse.") => headers.sparse = true,
            _ => {}
        }
    }
    Ok(())
}
