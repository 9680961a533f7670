//! What is done with files beside requests: they are put together and looked at when their parts
//! are there, and what is superfluous goes from the folder.
//!
//! Who sends the last part begins with it; when that gateway is killed, the sweep of any other goes
//! on, because the row still says that nobody has finished. A file is looked at by one gateway at a
//! time, and twice at most at the same time by each: it costs a processor.

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
    limit::{Holder, Limit, Share},
    status,
};

/// How long the answer to a last part waits for what becomes of the file. Less than a protocol gives a
/// call.
const WAIT: Duration = Duration::from_secs(12);
/// How often is looked for what nobody has finished, what is too old, and what has to go.
const SWEEP: Duration = Duration::from_secs(10);
/// Files that are looked at, at the same time.
const LOOKED_AT: usize = 2;
/// Downloads under way, and those of one organization; each holds a piece of its file. Further ones
/// are refused.
const DOWNLOADS: usize = 256;
const DOWNLOADS_OF_ONE: usize = 64;
/// What goes from the folder before it is asked again what has to.
const AT_ONCE: u32 = 50;

/// What files may be.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Bytes of one.
    pub(crate) max_bytes: u64,
    /// Media types, with `*` for any part of one.
    pub(crate) types: Vec<String>,
}

impl Limits {
    /// Whether files of this type are taken.
    pub(crate) fn takes(&self, media_type: &str) -> bool {
        self.types.iter().any(|pattern| matches(pattern, media_type))
    }
}

/// `*` stands for any characters, also for none.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((begin, rest)) => text.strip_prefix(begin).is_some_and(|text| {
            (0..=text.len()).any(|at| text.is_char_boundary(at) && matches(rest, &text[at..]))
        }),
    }
}

/// Files, as the gateway works with them. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    store: Store,
    folder: files::Store,
    limits: Arc<Limits>,
    spool: Spool,
    looked_at: Arc<Semaphore>,
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
            spool: Spool { folder: dir, most: max_bytes },
            looked_at: Arc::new(Semaphore::new(LOOKED_AT)),
            downloads: Limit::new(DOWNLOADS, DOWNLOADS_OF_ONE),
        })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn folder(&self) -> &files::Store {
        &self.folder
    }

    /// A place for a download.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(crate) fn place(&self, organization: OrganizationId) -> Result<Share, Status> {
        let share = self.downloads.take(Holder::Organization(organization), 1);
        share.map_err(|full| full.status("downloads"))
    }

    /// Begins to put a file together, and waits a while for what becomes of it. It goes on though
    /// nobody waits any more.
    pub(crate) async fn settle(&self, lifecycle: &Lifecycle, id: FileId) {
        let (ended, waits) = tokio::sync::oneshot::channel::<()>();
        let files = self.clone();
        lifecycle.spawn_job("file", async move {
            files.finish(id).await;
            drop(ended);
        });
        // Only ends, and says nothing.
        _ = tokio::time::timeout(WAIT, waits).await;
    }

    /// Removes from the folder what has to go, beside the request that has made it superfluous.
    pub(crate) fn tidy(&self, lifecycle: &Lifecycle) {
        let files = self.clone();
        lifecycle.spawn_job("file removal", async move { files.remove().await });
    }

    /// Looks after files until the process drains.
    pub(crate) async fn sweep(self, draining: CancellationToken) {
        loop {
            tokio::select! {
                () = draining.cancelled() => return,
                () = tokio::time::sleep(SWEEP) => self.sweep_once(clock::now()).await,
            }
        }
    }

    /// What nobody has finished, what is too old, and what has to go.
    pub(crate) async fn sweep_once(&self, now: Timestamp) {
        match self.store.file_expire(now).await {
            Ok(0) => {}
            Ok(count) => {
                tracing::info!(count, "uploads that were not finished in time were removed")
            }
            Err(error) => {
                tracing::warn!(error = status::chain(&error), "uploads could not be looked through")
            }
        }
        match self.store.file_list_unclaimed(now).await {
            Ok(files) => {
                for file in files {
                    self.finish(file).await;
                }
            }
            Err(error) => {
                tracing::warn!(error = status::chain(&error), "files could not be looked through")
            }
        }
        self.remove().await;
    }

    /// Puts a file together, unless somebody else is at it.
    #[tracing::instrument(name = "gateway.file.finish", skip_all, fields(file = %id))]
    async fn finish(&self, id: FileId) {
        let Ok(_place) = self.looked_at.acquire().await else { return };
        let claimed = match self.store.file_claim(id, clock::now()).await {
            Ok(Some(claimed)) => claimed,
            Ok(None) => return,
            Err(error) => {
                return tracing::warn!(error = status::chain(&error), "a file could not be taken");
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
                    "a file could not be put together, and will be tried again"
                );
                if let Err(error) = self.store.file_release(id, clock::now()).await {
                    tracing::debug!(error = status::chain(&error), "it will be tried later");
                }
            }
        }
        self.remove().await;
    }

    /// Makes parts a file that is ready, or says why that is refused.
    async fn assemble(&self, claimed: &ClaimedFile) -> anyhow::Result<Option<String>> {
        let ClaimedFile { file, parts } = claimed;
        let names: Vec<PartName> =
            parts.iter().map(|part| PartName::from_uuid(part.part)).collect();
        let whole = match self.folder.assemble(file.organization, file.id, &names).await {
            Err(files::Error::Missing) => {
                return Ok(Some("a part of it was lost; upload it again".to_owned()));
            }
            whole => whole?,
        };
        let stored = whole.stored();
        if let Some(reason) = contradiction(file, stored) {
            return Ok(Some(reason));
        }
        let (whole, looked) =
            check::look(whole, file.media_type.clone(), self.spool.clone()).await?;
        let media_type = match looked {
            Ok(media_type) if self.limits.takes(&media_type) => media_type,
            Ok(media_type) => {
                return Ok(Some(format!("files of the type {media_type} are not taken here")));
            }
            Err(Stop::Refused(reason)) => return Ok(Some(reason)),
            Err(Stop::Failed(error)) => return Err(error.into()),
        };
        let content = self.store.file_content(file.organization, *stored.sha256.as_bytes()).await?;
        self.folder.place(file.organization, whole).await?;
        if !content.mark_ready(file.id, &media_type, clock::now()).await? {
            tracing::debug!("the file was deleted while it was looked at");
        }
        Ok(None)
    }

    /// Removes from the folder what has to go. Any number may do so at once.
    pub(crate) async fn remove(&self) {
        loop {
            let removals = match self.store.file_removals(AT_ONCE).await {
                Ok(removals) => removals,
                Err(error) => {
                    return tracing::warn!(
                        error = status::chain(&error),
                        "what has to go cannot be read"
                    );
                }
            };
            let is_last = removals.len() < AT_ONCE as usize;
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

/// What was uploaded is not what was said.
fn contradiction(file: &File, stored: files::StoredContent) -> Option<String> {
    if stored.size != file.size.unsigned_abs() {
        return Some(format!("it has {} bytes, and should have {}", stored.size, file.size));
    }
    let expected = file
        .expected_sha256
        .map(Sha256::from_bytes)
        .filter(|expected| *expected != stored.sha256)?;
    Some(format!("its SHA-256 is {}, and should be {expected}", stored.sha256))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_matched_by_their_parts() {
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
