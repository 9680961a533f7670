//! Clients of repository hosts: one per connection, shared by all its scans. So a rate limit holds
//! for all of them, cached responses are shared, and an app's token is used until it expires.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use construct_domain::ScanConnectionId;
use jiff::{SignedDuration, Timestamp};

use crate::{
    error::Error,
    repository::{GitHub, GitLab},
};

/// Clients of one kind at most. The least recently used one is dropped, and recreated when it is
/// needed.
const MAX_CLIENTS: usize = 32;
/// An unused client is dropped after this time, with the credential in it. Longer than the longest
/// rate limit.
const IDLE_TIMEOUT: SignedDuration = SignedDuration::from_hours(3);

/// The clients of this process.
#[derive(Debug, Default)]
pub(crate) struct HostClients {
    pub(super) github: Clients<GitHub>,
    pub(super) gitlab: Clients<GitLab>,
}

/// The key of a client: the connection with its revision, and the host's address. Without a
/// connection, all scans share the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClientKey {
    pub(super) connection: Option<(ScanConnectionId, i64)>,
    pub(super) base: Option<String>,
}

/// Clients of one kind, the latest used last.
#[derive(Debug)]
pub(super) struct Clients<T> {
    entries: Mutex<VecDeque<(ClientKey, Timestamp, T)>>,
}

impl<T> Default for Clients<T> {
    fn default() -> Self {
        Self { entries: Mutex::default() }
    }
}

impl<T: Clone> Clients<T> {
    /// Returns the existing client, or a new one.
    pub(super) fn get(
        &self,
        key: ClientKey,
        now: Timestamp,
        create: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.drop_idle(now);
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let found = entries
            .iter()
            .position(|(known, ..)| *known == key)
            .and_then(|index| entries.remove(index));
        let client = match found {
            Some((.., client)) => client,
            None => create()?,
        };
        entries.push_back((key, now, client.clone()));
        if entries.len() > MAX_CLIENTS {
            entries.pop_front();
        }
        Ok(client)
    }

    fn drop_idle(&self, now: Timestamp) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|(_, used, _)| now.duration_since(*used) < IDLE_TIMEOUT);
    }
}

impl HostClients {
    /// Drops the clients that were unused for long.
    pub(crate) fn forget_idle(&self, now: Timestamp) {
        self.github.drop_idle(now);
        self.gitlab.drop_idle(now);
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn key(number: usize, revision: i64) -> ClientKey {
        let id = ScanConnectionId::from_uuid(Uuid::from_u128(number as u128));
        ClientKey { connection: Some((id, revision)), base: None }
    }

    #[test]
    fn client_is_shared_until_its_connection_changes_or_it_idles() {
        let (clients, now) = (Clients::default(), Timestamp::UNIX_EPOCH);
        let get =
            |key, now, made: usize| clients.get(key, now, || Ok(made)).expect("it can be made");
        assert_eq!(
            (get(key(1, 1), now, 1), get(key(1, 1), now, 2), get(key(1, 2), now, 3)),
            (1, 1, 3)
        );
        assert_eq!(get(ClientKey { connection: None, base: None }, now, 4), 4);
        assert_eq!(
            get(ClientKey { connection: None, base: Some("http://a".to_owned()) }, now, 5),
            5
        );
        // The client that was used last stays.
        for number in 2..MAX_CLIENTS {
            get(key(number, 1), now, 0);
            assert_eq!(get(key(1, 1), now, 6), 1);
        }
        assert_eq!(get(key(1, 2), now, 7), 7);
        assert_eq!(get(key(1, 1), now + IDLE_TIMEOUT, 8), 8);
    }

    #[test]
    fn failed_client_creation_is_retried() {
        let clients = Clients::<usize>::default();
        let failed =
            clients.get(key(1, 1), Timestamp::UNIX_EPOCH, || Err(Error::Failed("no".to_owned())));
        assert!(failed.is_err());
        assert_eq!(clients.get(key(1, 1), Timestamp::UNIX_EPOCH, || Ok(2)).expect("now it can"), 2);
    }
}
