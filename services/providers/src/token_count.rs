//! Counts the tokens of a request for the model it is addressed to.

use std::time::Duration;

use crate::{
    answer,
    failure::Failure,
    fenced_blocks,
    router::{Router, Target},
    vendor::Request,
};

/// The timeout of a vendor. Callers need the count before a call, and an estimate is better than a
/// long wait.
const COUNT_TIMEOUT: Duration = Duration::from_secs(10);

/// A count of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CountResult {
    pub(crate) tokens: i64,
    /// Counted by the vendor; otherwise estimated from the length.
    pub(crate) exact: bool,
}

impl Router {
    /// Counts the tokens that `target` would read. Never fails: estimates when the vendor cannot
    /// count, fails, or has an open circuit breaker.
    pub(crate) async fn count_tokens(&self, target: &Target, request: &Request) -> CountResult {
        let counted = match self.refusal(target) {
            Some(refusal) => Err(refusal),
            None => self.query_count(target, request).await,
        };
        match counted {
            Ok(Some(tokens)) => return CountResult { tokens, exact: true },
            Ok(None) => {}
            Err(failure) => tracing::debug!(
                class = failure.class.as_str_name(),
                gen_ai.request.model = request.model,
                "the vendor does not count tokens now, and they are estimated: {failure}"
            ),
        }
        CountResult { tokens: answer::estimate_tokens(request.input_chars()), exact: false }
    }

    /// Asks the vendor with the first key that it accepts.
    async fn query_count(
        &self,
        target: &Target,
        request: &Request,
    ) -> Result<Option<i64>, Failure> {
        let mut failed = None;
        for (_, key) in self.open_keys(&target.provider) {
            let count = |vendor| fenced_blocks::wrap(vendor, request).count(request);
            let counted = match key {
                Ok(key) => self.query(&target.provider, key, COUNT_TIMEOUT, count).await,
                Err(failure) => Err(failure),
            };
            match counted {
                Ok(counted) => return Ok(counted),
                // Another key would get the same response.
                Err(failure) if !failure.is_about_key() => return Err(failure),
                Err(failure) => failed = failed.or(Some(failure)),
            }
        }
        failed.map_or(Ok(None), Err)
    }
}
