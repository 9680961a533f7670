//! The entries of a tar archive in gzip.
//!
//! The library reads headers; long names and pax records are put together here, because it would
//! read them whole into memory, however long an archive says they are.

use std::io::{BufRead, Read};

use flate2::bufread::MultiGzDecoder;
use tar::EntryType;

use super::{SnapshotError, unpack::Writer};
use crate::repository::Skip;

/// Longer names and records are refused.
const MAX_EXTENSION: u64 = 64 * 1024;

/// What extension headers say of the entry after them.
#[derive(Default)]
struct Said {
    name: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
}

/// Hands all entries to `writer`.
pub(super) fn entries(packed: impl BufRead, writer: &mut Writer<'_>) -> Result<(), SnapshotError> {
    let mut archive = tar::Archive::new(MultiGzDecoder::new(packed));
    let mut said = Said::default();
    for entry in archive.entries().map_err(SnapshotError::malformed)?.raw(true) {
        let mut entry = entry.map_err(SnapshotError::malformed)?;
        let header_name = entry.path_bytes().into_owned();
        writer.begin(&header_name)?;
        writer.count(512, &header_name)?;
        let kind = entry.header().entry_type();
        match kind {
            EntryType::GNULongName => {
                let mut name = extension(&mut entry, writer)?;
                while name.last() == Some(&0) {
                    name.pop();
                }
                if said.name.replace(name).is_some() {
                    return Err(SnapshotError::hostile("an entry is named twice", &header_name));
                }
                continue;
            }
            EntryType::GNULongLink => {
                extension(&mut entry, writer)?;
                continue;
            }
            EntryType::XHeader => {
                let records = extension(&mut entry, writer)?;
                records_of(&records, &mut said)?;
                continue;
            }
            EntryType::XGlobalHeader => {
                // GitHub writes the commit's id there. A name or size for all entries is nothing
                // that anybody writes.
                let records = extension(&mut entry, writer)?;
                let mut all = Said::default();
                records_of(&records, &mut all)?;
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
        let Said { name, size: said_size, sparse } = std::mem::take(&mut said);
        let name = name.unwrap_or(header_name);
        let size = entry.size();
        // Needed for files beyond 8 GiB only, which are none of ours. Some write it always; another
        // one is a way to have readers disagree.
        if said_size.is_some_and(|said| said != size) {
            return Err(SnapshotError::hostile("a record overrides a size", &name));
        }
        match kind {
            EntryType::Directory => writer.folder(&name)?,
            // Old archives mark folders by their names' end only.
            EntryType::Regular | EntryType::Continuous if name.ends_with(b"/") => {
                writer.folder(&name)?
            }
            EntryType::Regular | EntryType::Continuous if !sparse => {
                let executable = entry.header().mode().is_ok_and(|mode| mode & 0o111 != 0);
                writer.file(&name, size, executable, &mut entry)?;
                continue;
            }
            EntryType::Symlink => writer.skip(Skip::Symlink, &name),
            EntryType::Link => writer.skip(Skip::Hardlink, &name),
            // Its map may go on after the header, where the next one would be looked for.
            EntryType::GNUSparse => return Err(SnapshotError::hostile("a file is sparse", &name)),
            _ => writer.skip(Skip::Special, &name),
        }
        writer.drain(&name, &mut entry)?;
    }
    if said.name.is_some() {
        return Err(SnapshotError::malformed(
            "the archive ends after a header for an entry that is missing",
        ));
    }
    Ok(())
}

fn extension(entry: &mut impl Read, writer: &mut Writer<'_>) -> Result<Vec<u8>, SnapshotError> {
    let mut content = Vec::new();
    entry.take(MAX_EXTENSION + 1).read_to_end(&mut content).map_err(SnapshotError::malformed)?;
    writer.count(content.len() as u64, b"")?;
    if content.len() as u64 > MAX_EXTENSION {
        return Err(SnapshotError::hostile("an extension header is too long", &content[..100]));
    }
    Ok(content)
}

/// Records are `LENGTH KEY=VALUE` with a line's end. A value may have line ends as well, so that
/// the length counts.
fn records_of(mut records: &[u8], said: &mut Said) -> Result<(), SnapshotError> {
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
            b"path" => said.name = Some(value.to_vec()),
            b"size" => {
                let size = str::from_utf8(value)
                    .ok()
                    .and_then(|text| text.parse().ok())
                    .ok_or_else(malformed)?;
                said.size = Some(size);
            }
            key if key.starts_with(b"GNU.sparse.") => said.sparse = true,
            _ => {}
        }
    }
    Ok(())
}
