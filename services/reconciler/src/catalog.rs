//! Caches what interpreters report about their tools and workspaces. Every model call needs it, and
//! it only changes with a deployment or when a project's notes change.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use construct_bus::{Bus, Pool, request};
use construct_proto::mesh::v1::{ToolCatalog, ToolCatalogRequest};

/// How long a cached answer is valid.
const CACHE_TTL: Duration = Duration::from_secs(60);
/// Timeout of a request to an interpreter.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of cached workspaces. When the cache is full, it is cleared, which costs one
/// request each.
const MAX_ENTRIES: usize = 1024;

/// A pool and a workspace.
type Key = (Pool, String);

/// A cache of the interpreters' answers.
#[derive(Debug)]
pub(crate) struct Catalog {
    bus: Bus,
    cache: Mutex<HashMap<Key, (Instant, Arc<ToolCatalog>)>>,
}

impl Catalog {
    pub(crate) fn new(bus: Bus) -> Self {
        Self { bus, cache: Mutex::default() }
    }

    /// Size of the cached answer about `workspace` in a pool, without a request.
    pub(crate) fn cached_bytes(&self, pool: &Pool, workspace: &str) -> Option<usize> {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, catalog) = cache.get(&(pool.clone(), workspace.to_owned()))?;
        Some(catalog.declarations.len() + catalog.facts.len())
    }

    /// What the interpreters of a pool report about `workspace`. While none answers, a stale answer
    /// is used.
    pub(crate) async fn get(
        &self,
        pool: &Pool,
        workspace: &str,
    ) -> Result<Arc<ToolCatalog>, request::Error> {
        let key = (pool.clone(), workspace.to_owned());
        let old = self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some((fetched_at, catalog)) = &old
            && fetched_at.elapsed() < CACHE_TTL
        {
            return Ok(Arc::clone(catalog));
        }
        let request = ToolCatalogRequest { workspace: workspace.to_owned() };
        match (self.bus.request_tools(pool, &request, REQUEST_TIMEOUT).await, old) {
            (Ok(catalog), _) => {
                let catalog = Arc::new(catalog);
                let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
                if cache.len() >= MAX_ENTRIES {
                    cache.clear();
                }
                cache.insert(key, (Instant::now(), Arc::clone(&catalog)));
                Ok(catalog)
            }
            (Err(error), Some((_, catalog))) => {
                tracing::warn!(%error, "no interpreter describes its tools; using a stale answer");
                Ok(catalog)
            }
            (Err(error), None) => Err(error),
        }
    }
}
