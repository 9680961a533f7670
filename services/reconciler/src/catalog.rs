//! What interpreters say about their tools and about workspaces, kept for a while: every model call
//! needs it, and it changes only with a deploy or when a project's notes change.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use construct_bus::{Bus, Pool, request};
use construct_proto::mesh::v1::{ToolCatalog, ToolCatalogRequest};

/// How long an answer is used.
const CACHE_TTL: Duration = Duration::from_secs(60);
/// How long an interpreter has to answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Workspaces in pools remembered at most; when full everything is asked again, which costs one
/// round trip each.
const MAX_ENTRIES: usize = 1024;

/// Who was asked, and about which workspace.
type Key = (Pool, String);

/// A cache in front of the interpreters' answers.
#[derive(Debug)]
pub(crate) struct Catalog {
    bus: Bus,
    cache: Mutex<HashMap<Key, (Instant, Arc<ToolCatalog>)>>,
}

impl Catalog {
    pub(crate) fn new(bus: Bus) -> Self {
        Self { bus, cache: Mutex::default() }
    }

    /// Bytes of what is known already about `workspace` in a pool; nobody is asked.
    pub(crate) fn cached_bytes(&self, pool: &Pool, workspace: &str) -> Option<usize> {
        let known = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, catalog) = known.get(&(pool.clone(), workspace.to_owned()))?;
        Some(catalog.declarations.len() + catalog.facts.len())
    }

    /// What the interpreters of a pool say about `workspace`. While none answers, an older answer
    /// is better than none.
    pub(crate) async fn get(
        &self,
        pool: &Pool,
        workspace: &str,
    ) -> Result<Arc<ToolCatalog>, request::Error> {
        let key = (pool.clone(), workspace.to_owned());
        let old = self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some((asked, catalog)) = &old
            && asked.elapsed() < CACHE_TTL
        {
            return Ok(Arc::clone(catalog));
        }
        let request = ToolCatalogRequest { workspace: workspace.to_owned() };
        match (self.bus.request_tools(pool, &request, REQUEST_TIMEOUT).await, old) {
            (Ok(catalog), _) => {
                let catalog = Arc::new(catalog);
                let mut known = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
                if known.len() >= MAX_ENTRIES {
                    known.clear();
                }
                known.insert(key, (Instant::now(), Arc::clone(&catalog)));
                Ok(catalog)
            }
            (Err(error), Some((_, catalog))) => {
                tracing::warn!(%error, "no interpreter describes its tools; going on with what it said before");
                Ok(catalog)
            }
            (Err(error), None) => Err(error),
        }
    }
}
