//! Sums of what was used, made when somebody asks for them. Each reads as much of the ledger as
//! there is of the time that is asked for, so that many at once would take the database from those
//! who work with it.
//!
//! What is counted: statements that run at the same time in this gateway, whoever has asked. Who
//! finds no place waits a moment for one; who waits in vain is refused, and told to come back.
//! Counting for what is to be allowed is no such statement: it is done once in two seconds for each
//! organization, however many ask.

use std::time::Duration;

use construct_domain::OrganizationId;
use tonic::Status;

use crate::{
    limit::{Holder, Limit, Share},
    status,
};

/// Statements at the same time, and those of one organization.
const AT_ONCE: usize = 4;
const AT_ONCE_OF_ONE: usize = 2;
/// How long a place is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

/// The places.
#[derive(Debug)]
pub(crate) struct Sums {
    places: Limit,
}

impl Default for Sums {
    fn default() -> Self {
        Self { places: Limit::new(AT_ONCE, AT_ONCE_OF_ONE) }
    }
}

impl Sums {
    /// A place, held as long as the statement runs.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(crate) async fn place(&self, organization: OrganizationId) -> Result<Share, Status> {
        let waiting = self.places.wait(Holder::Organization(organization), 1);
        let crowded =
            |_| status::exhausted("too many ask at the moment for what was used; try again later");
        tokio::time::timeout(PATIENCE, waiting).await.map_err(crowded)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;
    use tonic::Code;
    use tonic_types::StatusExt as _;
    use uuid::Uuid;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_few_sums_are_made_at_once_and_who_waits_in_vain_is_told_when_to_come_back() {
        let sums = Sums::default();
        let [one, other, third] = [1, 2, 3].map(|n| OrganizationId::from_uuid(Uuid::from_u128(n)));
        let mut held = Vec::new();
        for organization in [one, one, other, other] {
            held.push(sums.place(organization).await.expect("there is one"));
        }
        let before = Instant::now();
        let refused = sums.place(third).await.expect_err("all are taken");
        let waited = before.elapsed();
        assert_eq!(
            (refused.code(), waited.as_secs()),
            (Code::ResourceExhausted, PATIENCE.as_secs())
        );
        assert!(refused.get_details_retry_info().is_some_and(|info| info.retry_delay.is_some()));
        // Who comes in time gets the one that becomes free.
        let (got, ()) = tokio::join!(sums.place(third), async {
            tokio::time::sleep(PATIENCE / 2).await;
            held.pop();
        });
        assert!(got.is_ok());
        drop(held);
        let _held = [
            sums.place(one).await.expect("there is one"),
            sums.place(one).await.expect("there is one"),
        ];
        assert!(sums.place(one).await.is_err(), "one organization does not take all");
        assert!(sums.place(other).await.is_ok());
    }
}
