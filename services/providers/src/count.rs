//! How many tokens a request has for the model it is addressed to.

use std::time::Duration;

use crate::{
    answer,
    failure::Failure,
    fenced,
    router::{Router, Target},
    vendor::Request,
};

/// How long a vendor has. Whoever asks wants to know before a call, and an estimate is better than
/// a long wait.
const COUNT_TIMEOUT: Duration = Duration::from_secs(10);

/// A count of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CountResult {
    pub(crate) tokens: i64,
    /// The vendor has counted; otherwise it is an estimate from the length.
    pub(crate) exact: bool,
}

impl Router {
    /// Counts what `target` would read. Never fails: a vendor that does not count, cannot at the
    /// moment, or has its circuit breaker open is estimated for.
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

    /// Asks with the first key that the vendor takes.
    async fn query_count(
        &self,
        target: &Target,
        request: &Request,
    ) -> Result<Option<i64>, Failure> {
        let mut failed = None;
        for (_, key) in self.open_keys(&target.provider) {
            let count = |vendor| fenced::wrap(vendor, request).count(request);
            let counted = match key {
                Ok(key) => self.query(&target.provider, key, COUNT_TIMEOUT, count).await,
                Err(failure) => Err(failure),
            };
            match counted {
                Ok(counted) => return Ok(counted),
                // Another key would be told the same.
                Err(failure) if !failure.is_about_key() => return Err(failure),
                Err(failure) => failed = failed.or(Some(failure)),
            }
        }
        failed.map_or(Ok(None), Err)
    }
}
