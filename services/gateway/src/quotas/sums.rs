//! A limit on usage reports. Each reads the ledger of the requested period, so that many at once
//! would slow the database down for others.
//!
//! The limit counts statements that run at the same time in this gateway. A statement beyond it
//! waits a moment, and is then refused with a retry delay. Counts for quotas are not included: they
//! run once in two seconds per organization, however many calls need them.

use std::time::Duration;

use construct_domain::OrganizationId;
use tonic::Status;

use crate::{
    limit::{Holder, Limit, Permit},
    status,
};

/// Maximum number of concurrent statements, in total and per organization.
const MAX_STATEMENTS: usize = 4;
const MAX_STATEMENTS_PER_ORGANIZATION: usize = 2;
/// Timeout of the wait for a permit.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Sums {
    limit: Limit,
}

impl Default for Sums {
    fn default() -> Self {
        Self { limit: Limit::new(MAX_STATEMENTS, MAX_STATEMENTS_PER_ORGANIZATION) }
    }
}

impl Sums {
    /// Acquires a permit, held while the statement runs.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED`.
    pub(crate) async fn acquire(&self, organization: OrganizationId) -> Result<Permit, Status> {
        let waiting = self.limit.wait(Holder::Organization(organization), 1);
        let crowded = |_| {
            status::exhausted("too many usage reports are running at the moment; try again later")
        };
        tokio::time::timeout(ACQUIRE_TIMEOUT, waiting).await.map_err(crowded)
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
    async fn concurrent_reports_are_limited_with_a_retry_delay() {
        let sums = Sums::default();
        let [one, other, third] = [1, 2, 3].map(|n| OrganizationId::from_uuid(Uuid::from_u128(n)));
        let mut held = Vec::new();
        for organization in [one, one, other, other] {
            held.push(sums.acquire(organization).await.expect("a permit"));
        }
        let before = Instant::now();
        let refused = sums.acquire(third).await.expect_err("all permits are in use");
        let waited = before.elapsed();
        assert_eq!(
            (refused.code(), waited.as_secs()),
            (Code::ResourceExhausted, ACQUIRE_TIMEOUT.as_secs())
        );
        assert!(refused.get_details_retry_info().is_some_and(|info| info.retry_delay.is_some()));
        // A statement that waits in time gets the freed permit.
        let (got, ()) = tokio::join!(sums.acquire(third), async {
            tokio::time::sleep(ACQUIRE_TIMEOUT / 2).await;
            held.pop();
        });
        assert!(got.is_ok());
        drop(held);
        let _held = [
            sums.acquire(one).await.expect("a permit"),
            sums.acquire(one).await.expect("a permit"),
        ];
        assert!(sums.acquire(one).await.is_err(), "one organization cannot use all permits");
        assert!(sums.acquire(other).await.is_ok());
    }
}
