//! Background work beside scans: deleting the files of ended scans, and publishing hand-overs that
//! the mesh has not received.

use std::{
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use construct_bus::subject;
use construct_domain::ScanId;
use construct_proto::mesh::v1::ToolCreate;
use construct_runtime::{clock, telemetry::Chain};
use construct_store::scan::{HandOver, Scan};
use construct_wire::scan as wire;
use jiff::SignedDuration;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::{repository::Tree, shared::Shared};

/// The prefix of folders with unmasked files, before the scan's id.
const UNMASKED_PREFIX: &str = ".unmasked-";
/// The interval of the cleanup.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(15);
/// Rows per statement.
const BATCH_SIZE: i64 = 100;
/// The gateway may still be publishing a younger hand-over.
const MIN_HAND_OVER_AGE: SignedDuration = SignedDuration::from_secs(10);

pub(super) async fn run(shared: Arc<Shared>, draining: CancellationToken) {
    let mut ticks = tokio::time::interval(CLEANUP_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            _ = ticks.tick() => {}
        }
        shared.hosts.forget_idle(clock::now());
        if let Err(error) = publish_hand_overs(&shared).await {
            tracing::warn!(error = &*error, "cannot publish hand-overs");
        }
        if let Err(error) = delete_files(&shared).await {
            tracing::warn!(error = &*error, "cannot delete files of scans");
        }
    }
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn publish_hand_overs(shared: &Shared) -> Result<(), Failure> {
    let now = clock::now();
    for hand_over in
        shared.store.hand_overs_unpublished(now - MIN_HAND_OVER_AGE, BATCH_SIZE).await?
    {
        let HandOver { id, scan, candidates } = hand_over;
        let message = ToolCreate {
            organization_id: scan.organization.to_string(),
            hand_over_id: id.to_string(),
            scan_id: scan.id.to_string(),
            repository: scan.repository,
            commit: scan.commit,
            candidates: candidates.iter().map(wire::candidate).collect(),
        };
        // A failure does not block the others.
        match shared
            .bus
            .publish(&subject::ToolCreate { organization: scan.organization }, &message)
            .await
        {
            Ok(_) => shared.store.hand_over_mark_published(id, clock::now()).await?,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), hand_over = %id, "cannot publish a hand-over");
            }
        }
    }
    Ok(())
}

/// Deletes the files of scans that ended long enough ago, and folders that belong to no scan: those
/// of deleted scans, and leftovers of a crash. A failure does not block the others.
async fn delete_files(shared: &Shared) -> Result<(), Failure> {
    let now = clock::now();
    let retention = SignedDuration::try_from(shared.config.scanner_keep_snapshots)?;
    for (id, archive) in shared.store.scans_to_clean(now - retention, BATCH_SIZE).await? {
        match delete_scan_files(shared, id, archive.as_deref()).await {
            Ok(()) => shared.store.scan_mark_cleaned(id, clock::now()).await?,
            Err(error) => {
                tracing::warn!(error = &*error, scan = %id, "cannot delete the files of a scan")
            }
        }
    }
    let mut entries = tokio::fs::read_dir(&shared.dir).await?;
    let mut found = Vec::new();
    while let Some(entry) = entries.next_entry().await? {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        found.extend(name.strip_prefix(UNMASKED_PREFIX).unwrap_or(&name).parse::<ScanId>());
    }
    let needed = shared.store.scans_with_files(&found).await?;
    for id in found.into_iter().filter(|id| !needed.contains(id)) {
        tracing::info!(scan = %id, "deleting the files of a scan that no longer exists");
        if let Err(error) = remove_folders(&shared.dir, id).await {
            tracing::warn!(%error, scan = %id, "cannot delete the files of a scan that no longer exists");
        }
    }
    Ok(())
}

/// The folder of a scan's files until they are masked. No task's workspace is there.
pub(crate) fn unmasked_dir(dir: &Path, id: ScanId) -> PathBuf {
    dir.join(format!("{UNMASKED_PREFIX}{id}"))
}

/// Deletes the files of a scan, and its uploaded archive. The archive is sealed, so no other scan
/// shares it.
async fn delete_scan_files(
    shared: &Shared,
    id: ScanId,
    archive: Option<&str>,
) -> Result<(), Failure> {
    if let Some(archive) = archive {
        shared.blobs.remove(&archive.parse()?).await?;
    }
    Ok(remove_folders(&shared.dir, id).await?)
}

/// Deletes the folders of a scan, if they exist.
async fn remove_folders(dir: &Path, id: ScanId) -> io::Result<()> {
    for folder in [format!("{UNMASKED_PREFIX}{id}"), id.to_string()] {
        let mut removed = tokio::fs::remove_dir_all(dir.join(&folder)).await;
        if removed.as_ref().is_err_and(|error| error.kind() == ErrorKind::PermissionDenied) {
            let (below, closed) = (dir.to_owned(), folder.clone());
            let unlock = move || Tree::open(&below)?.unlock_directories(&closed);
            tokio::task::spawn_blocking(unlock).await.map_err(io::Error::other)??;
            removed = tokio::fs::remove_dir_all(dir.join(&folder)).await;
        }
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Deletes the files of an ended scan, unless they are kept for a while.
pub(crate) async fn delete_unless_kept(shared: &Shared, scan: &Scan) {
    if !shared.config.scanner_keep_snapshots.is_zero() {
        return;
    }
    if let Err(error) = delete_scan_files(shared, scan.id, scan.archive.as_deref()).await {
        tracing::warn!(error = &*error, scan = %scan.id, "cannot delete the files of a scan yet");
    } else if let Err(error) = shared.store.scan_mark_cleaned(scan.id, clock::now()).await {
        tracing::debug!(error = %Chain(&error), "cannot record that files were deleted");
    }
}
