//! Work on files outside of requests: assembling and checking complete uploads, and removing what
//! is no longer needed from the folder.
//!
//! The gateway that receives the last part starts the work. If it is killed, the sweep of any other
//! gateway continues, because the row still says that the file is unfinished. A file is checked by
//! one gateway at a time. Each gateway checks at most two files at once, because a check occupies a
//! processor.

use std::{sync::Arc, time::Duration};

use construct_bus::files::{self, PartName, Sha256};
use construct_domain::{FileId, OrganizationId};
use construct_runtime::{Lifecycle, clock};
use construct_store::{ClaimedFile, File, Removal, RemovalTarget, Store};
use jiff::Timestamp;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::check::{self, Spool, Stop};
use crate::{
    Config,
    limit::{Holder, Limit, Permit},
    status,
};

/// How long the response to the last part waits for the check. Less than the deadline that
/// protocols give a call.
const FINISH_TIMEOUT: Duration = Duration::from_secs(12);
/// How often unfinished and expired uploads and pending removals are processed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of files that are checked at once.
const MAX_CONCURRENT_CHECKS: usize = 2;
/// Maximum number of concurrent downloads, in total and per organization; each holds a piece of its
/// file in memory. Further ones are refused.
const MAX_DOWNLOADS: usize = 256;
const MAX_DOWNLOADS_PER_ORGANIZATION: usize = 64;
/// Number of removals per query.
const REMOVAL_BATCH_SIZE: u32 = 50;

/// What files are accepted.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Maximum size of a file.
    pub(crate) max_bytes: u64,
    /// Media types, with `*` for any part of one.
    pub(crate) types: Vec<String>,
}

impl Limits {
    /// Whether files of this type are accepted.
    pub(crate) fn accepts(&self, media_type: &str) -> bool {
        self.types.iter().any(|pattern| matches(pattern, media_type))
    }
}

/// `*` matches any characters, also none.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((begin, rest)) => text.strip_prefix(begin).is_some_and(|text| {
            (0..=text.len()).any(|at| text.is_char_boundary(at) && matches(rest, &text[at..]))
        }),
    }
}

/// The files of the gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    store: Store,
    folder: files::Store,
    limits: Arc<Limits>,
    spool: Spool,
    check_permits: Arc<Semaphore>,
    downloads: Limit,
}

impl Files {
    pub(crate) fn new(
        store: Store,
        dir: std::path::PathBuf,
        config: &Config,
    ) -> Result<Self, files::Error> {
        let folder = files::Store::open(&dir)?;
        let (max_bytes, types) =
            (config.gateway_files_max_bytes, config.gateway_files_types.clone());
        Ok(Self {
            store,
            folder,
            limits: Arc::new(Limits { max_bytes, types }),
            spool: Spool { folder: dir, max: max_bytes },
            check_permits: Arc::new(Semaphore::new(MAX_CONCURRENT_CHECKS)),
            downloads: Limit::new(MAX_DOWNLOADS, MAX_DOWNLOADS_PER_ORGANIZATION),
        })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn folder(&self) -> &files::Store {
        &self.folder
    }

    /// Acquires a permit for a download.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(crate) fn acquire_download(&self, organization: OrganizationId) -> Result<Permit, Status> {
        let share = self.downloads.acquire(Holder::Organization(organization), 1);
        share.map_err(|full| full.status("downloads"))
    }

    /// Starts to assemble and check a file, and waits a while for the result. The work continues
    /// after that.
    pub(crate) async fn finish_soon(&self, lifecycle: &Lifecycle, id: FileId) {
        let (ended, waits) = tokio::sync::oneshot::channel::<()>();
        let files = self.clone();
        lifecycle.spawn_job("file", async move {
            files.finish(id).await;
            drop(ended);
        });
        // The channel only closes; no message is sent.
        _ = tokio::time::timeout(FINISH_TIMEOUT, waits).await;
    }

    /// Processes pending removals in the background of a request.
    pub(crate) fn remove_soon(&self, lifecycle: &Lifecycle) {
        let files = self.clone();
        lifecycle.spawn_job("file removal", async move { files.remove().await });
    }

    /// Processes files until the process drains.
    pub(crate) async fn sweep(self, draining: CancellationToken) {
        loop {
            tokio::select! {
                () = draining.cancelled() => return,
                () = tokio::time::sleep(SWEEP_INTERVAL) => self.sweep_once(clock::now()).await,
            }
        }
    }

    /// Processes unfinished and expired uploads and pending removals.
    pub(crate) async fn sweep_once(&self, now: Timestamp) {
        match self.store.file_expire(now).await {
            Ok(0) => {}
            Ok(count) => {
                tracing::info!(count, "expired uploads were removed")
            }
            Err(error) => {
                tracing::warn!(
                    error = status::chain(&error),
                    "expired uploads could not be removed"
                )
            }
        }
        match self.store.file_list_unclaimed(now).await {
            Ok(files) => {
                for file in files {
                    self.finish(file).await;
                }
            }
            Err(error) => {
                tracing::warn!(
                    error = status::chain(&error),
                    "unfinished files could not be listed"
                )
            }
        }
        self.remove().await;
    }

    /// Assembles and checks a file, unless another gateway does.
    #[tracing::instrument(name = "gateway.file.finish", skip_all, fields(file = %id))]
    async fn finish(&self, id: FileId) {
        let Ok(_permit) = self.check_permits.acquire().await else { return };
        let claimed = match self.store.file_claim(id, clock::now()).await {
            Ok(Some(claimed)) => claimed,
            Ok(None) => return,
            Err(error) => {
                return tracing::warn!(
                    error = status::chain(&error),
                    "a file could not be claimed"
                );
            }
        };
        match self.assemble(&claimed).await {
            Ok(None) => {}
            Ok(Some(reason)) => {
                tracing::info!(reason, "a file is refused");
                if let Err(error) = self.store.file_refuse(id, &reason, clock::now()).await {
                    tracing::warn!(error = status::chain(&error), "a file could not be refused");
                }
            }
            Err(error) => {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "a file could not be assembled; retrying later"
                );
                if let Err(error) = self.store.file_release(id, clock::now()).await {
                    tracing::debug!(error = status::chain(&error), "its claim expires later");
                }
            }
        }
        self.remove().await;
    }

    /// Assembles the parts of a file. Returns the reason if the file is refused.
    async fn assemble(&self, claimed: &ClaimedFile) -> anyhow::Result<Option<String>> {
        let ClaimedFile { file, parts } = claimed;
        let names: Vec<PartName> =
            parts.iter().map(|part| PartName::from_uuid(part.part)).collect();
        let assembled = match self.folder.assemble(file.organization, file.id, &names).await {
            Err(files::Error::Missing) => {
                return Ok(Some("a part of it was lost; upload it again".to_owned()));
            }
            assembled => assembled?,
        };
        let stored = assembled.stored();
        if let Some(reason) = mismatch(file, stored) {
            return Ok(Some(reason));
        }
        let (assembled, checked) =
            check::check_file(assembled, file.media_type.clone(), self.spool.clone()).await?;
        let media_type = match checked {
            Ok(media_type) if self.limits.accepts(&media_type) => media_type,
            Ok(media_type) => {
                return Ok(Some(format!("files of the type {media_type} are not accepted")));
            }
            Err(Stop::Refused(reason)) => return Ok(Some(reason)),
            Err(Stop::Failed(error)) => return Err(error.into()),
        };
        let content = self.store.file_content(file.organization, *stored.sha256.as_bytes()).await?;
        self.folder.place(file.organization, assembled).await?;
        if !content.mark_ready(file.id, &media_type, clock::now()).await? {
            tracing::debug!("the file was deleted while it was checked");
        }
        Ok(None)
    }

    /// Processes pending removals. Several processes may do so at once.
    pub(crate) async fn remove(&self) {
        loop {
            let removals = match self.store.file_removals(REMOVAL_BATCH_SIZE).await {
                Ok(removals) => removals,
                Err(error) => {
                    return tracing::warn!(
                        error = status::chain(&error),
                        "pending removals cannot be read"
                    );
                }
            };
            let is_last = removals.len() < REMOVAL_BATCH_SIZE as usize;
            for removal in removals {
                if let Err(error) = self.remove_one(&removal).await {
                    let what = format!("{removal:?}");
                    return tracing::warn!(
                        what,
                        error = format!("{error:#}"),
                        "a file could not be removed"
                    );
                }
            }
            if is_last {
                return;
            }
        }
    }

    async fn remove_one(&self, removal: &Removal) -> anyhow::Result<()> {
        let organization = removal.organization;
        match removal.target {
            RemovalTarget::Content(sha256) => {
                let mut content = self.store.file_content(organization, sha256).await?;
                if !content.is_needed().await? {
                    self.folder.remove(organization, &Sha256::from_bytes(sha256)).await?;
                }
                return Ok(content.finish(removal.id).await?);
            }
            RemovalTarget::Upload(file) => self.folder.remove_upload(organization, file).await?,
            RemovalTarget::Everything => self.folder.remove_organization(organization).await?,
        }
        Ok(self.store.file_removal_done(removal.id).await?)
    }
}

/// Compares an upload with its declaration. Returns the mismatch.
fn mismatch(file: &File, stored: files::StoredContent) -> Option<String> {
    if stored.size != file.size.unsigned_abs() {
        return Some(format!("it has {} bytes, but {} are expected", stored.size, file.size));
    }
    let expected = file
        .expected_sha256
        .map(Sha256::from_bytes)
        .filter(|expected| *expected != stored.sha256)?;
    Some(format!("its SHA-256 is {}, but {expected} is expected", stored.sha256))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_type_patterns_match() {
        for (pattern, media_type, expected) in [
            ("*", "image/png", true),
            ("*/*", "image/png", true),
            ("image/*", "image/png", true),
            ("image/*", "imagery/png", false),
            ("image/png", "image/png", true),
            ("image/png", "image/pngx", false),
            ("application/vnd.*.document", "application/vnd.openxml.word.document", true),
            ("application/vnd.*.document", "application/vnd.openxml.sheet", false),
        ] {
            assert_eq!(matches(pattern, media_type), expected, "{pattern} {media_type}");
        }
    }
}
