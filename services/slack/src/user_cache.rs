//! A cache of Slack users.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::web::{self, Token, Web, users, users::User};

/// How long an entry is valid. A user who becomes a guest loses access after this time at the
/// latest.
const CACHE_TTL: Duration = Duration::from_secs(5 * 60);
/// Entries at most; then the cache is cleared.
const CACHE_CAPACITY: usize = 20_000;

type Key = (String, String);

/// Looks up users in Slack, and caches them. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct UserCache {
    web: Web,
    cache: Arc<Mutex<HashMap<Key, (Instant, User)>>>,
}

impl UserCache {
    pub(crate) fn new(web: Web) -> Self {
        Self { web, cache: Arc::default() }
    }

    /// Returns a user, as a workspace sees them.
    pub(crate) async fn get(&self, token: &Token, user: &str) -> Result<User, web::Error> {
        let key = (token.team.clone(), user.to_owned());
        if let Some((at, user)) =
            self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(&key)
            && at.elapsed() < CACHE_TTL
        {
            return Ok(user.clone());
        }
        let found = users::get(&self.web, token, user).await?;
        let mut known = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= CACHE_CAPACITY {
            known.clear();
        }
        known.insert(key, (Instant::now(), found.clone()));
        Ok(found)
    }

    /// The name of a user to display; the id when the lookup fails, because a name is not worth
    /// waiting for.
    pub(crate) async fn display_name(&self, token: &Token, user: &str) -> String {
        match self.get(token, user).await {
            Ok(found) => found.display_name().to_owned(),
            Err(error) => {
                tracing::debug!(%error, user, "cannot look up a user's name");
                user.to_owned()
            }
        }
    }
}
