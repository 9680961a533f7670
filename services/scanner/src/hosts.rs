//! Hosts of repositories as they are reached: one client for each connection, however many scans go
//! through it. So what a host says of its limit holds for all of them, what it has answered need
//! not be sent again, and an app's token serves until it ends.

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

/// Clients of a kind that are kept. Of more the one goes that was not used for the longest time,
/// and is made again when it is needed.
const KEPT: usize = 32;
/// A client that nobody has used for so long is dropped with the credential in it. Longer than a
/// host wants to be left alone.
const IDLE: SignedDuration = SignedDuration::from_hours(3);

/// What this process reaches.
#[derive(Debug, Default)]
pub(crate) struct Hosts {
    pub(super) github: Clients<GitHub>,
    pub(super) gitlab: Clients<GitLab>,
}

/// What tells clients apart: the connection, with its revision, and where the host is. Without a
/// connection it is the same for everybody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) connection: Option<(ScanConnectionId, i64)>,
    pub(super) base: Option<String>,
}

/// Clients of one kind, the one that was used last at the end.
#[derive(Debug)]
pub(super) struct Clients<T> {
    kept: Mutex<VecDeque<(Key, Timestamp, T)>>,
}

impl<T> Default for Clients<T> {
    fn default() -> Self {
        Self { kept: Mutex::default() }
    }
}

impl<T: Clone> Clients<T> {
    /// The client that there is, or a new one.
    pub(super) fn get(
        &self,
        key: Key,
        now: Timestamp,
        make: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.forget_idle(now);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let found =
            kept.iter().position(|(known, ..)| *known == key).and_then(|index| kept.remove(index));
        let client = match found {
            Some((.., client)) => client,
            None => make()?,
        };
        kept.push_back((key, now, client.clone()));
        if kept.len() > KEPT {
            kept.pop_front();
        }
        Ok(client)
    }

    fn forget_idle(&self, now: Timestamp) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(_, used, _)| now.duration_since(*used) < IDLE);
    }
}

impl Hosts {
    /// Drops the clients that nobody has used for long.
    pub(crate) fn forget_idle(&self, now: Timestamp) {
        self.github.forget_idle(now);
        self.gitlab.forget_idle(now);
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn key(number: usize, revision: i64) -> Key {
        let id = ScanConnectionId::from_uuid(Uuid::from_u128(number as u128));
        Key { connection: Some((id, revision)), base: None }
    }

    #[test]
    fn a_client_is_made_once_and_again_when_its_connection_has_changed_or_nobody_has_used_it() {
        let (clients, now) = (Clients::default(), Timestamp::UNIX_EPOCH);
        let get =
            |key, now, made: usize| clients.get(key, now, || Ok(made)).expect("it can be made");
        assert_eq!(
            (get(key(1, 1), now, 1), get(key(1, 1), now, 2), get(key(1, 2), now, 3)),
            (1, 1, 3)
        );
        assert_eq!(get(Key { connection: None, base: None }, now, 4), 4);
        assert_eq!(get(Key { connection: None, base: Some("http://a".to_owned()) }, now, 5), 5);
        // The one that was used last stays.
        for number in 2..KEPT {
            get(key(number, 1), now, 0);
            assert_eq!(get(key(1, 1), now, 6), 1);
        }
        assert_eq!(get(key(1, 2), now, 7), 7);
        assert_eq!(get(key(1, 1), now + IDLE, 8), 8);
    }

    #[test]
    fn a_client_that_cannot_be_made_is_tried_again() {
        let clients = Clients::<usize>::default();
        let failed =
            clients.get(key(1, 1), Timestamp::UNIX_EPOCH, || Err(Error::Failed("no".to_owned())));
        assert!(failed.is_err());
        assert_eq!(clients.get(key(1, 1), Timestamp::UNIX_EPOCH, || Ok(2)).expect("now it can"), 2);
    }
}
