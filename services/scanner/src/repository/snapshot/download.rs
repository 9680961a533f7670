//! Writes a stream to a file, within limits of size and time.

use std::path::Path;

use futures::StreamExt as _;
use tokio::{io::AsyncWriteExt as _, time::timeout};

use super::{Archive, Limit, Limits, SnapshotError};

/// Writes an archive to `path`. Returns its size in bytes.
pub(super) async fn download(
    archive: Archive,
    path: &Path,
    limits: &Limits,
) -> Result<u64, SnapshotError> {
    let too_slow = |_| SnapshotError::exceeded(Limit::Download, b"");
    timeout(limits.download, write(archive, path, limits)).await.map_err(too_slow)?
}

async fn write(mut archive: Archive, path: &Path, limits: &Limits) -> Result<u64, SnapshotError> {
    let too_slow = |_| SnapshotError::exceeded(Limit::Download, b"");
    let mut file = tokio::fs::File::create_new(path).await?;
    let mut size = 0_u64;
    while let Some(chunk) = timeout(limits.idle, archive.bytes.next()).await.map_err(too_slow)? {
        let chunk = chunk?;
        size = size.saturating_add(chunk.len() as u64);
        if size > limits.archive_bytes {
            return Err(SnapshotError::exceeded(Limit::ArchiveBytes, b""));
        }
        file.write_all(&chunk).await?;
    }
    file.flush().await?;
    Ok(size)
}
