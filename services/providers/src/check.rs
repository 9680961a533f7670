//! Queries about a provider: whether its keys are accepted, which models it has, and how many
//! tokens a request has.

use std::time::Duration;

use construct_bus::{
    Bus,
    subject::{CheckProvider, CountTokens, ListVendorModels, Question},
};
use construct_proto::{
    mesh::v1::{
        ModelInvoke, Provider, ProviderCheck, ProviderCheckResult, TokenCount, TokenCountQuery,
        VendorModels, VendorModelsQuery,
    },
    v1::{KeyCheck, VendorModel},
};
use construct_runtime::Lifecycle;
use futures::future::join_all;
use tokio::time::sleep;

use crate::{
    failure::Failure,
    router::{Router, Target},
    token_count::CountResult,
    vendor::Request,
};

/// The timeout of a vendor; the gateway waits a little longer.
const QUERY_TIMEOUT: Duration = Duration::from_secs(25);
/// Models that are returned at most. No vendor has as many; a faulty server may.
const MAX_MODELS: usize = 5_000;
/// Delay before NATS is tried again.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Answers the queries.
#[derive(Clone)]
pub(crate) struct Checks {
    pub(crate) bus: Bus,
    pub(crate) router: Router,
}

impl Checks {
    /// Answers until the service drains.
    pub(crate) fn start(self, lifecycle: &Lifecycle) {
        let checks = |checks: Self, question: ProviderCheck| async move {
            checks.check(question.provider.unwrap_or_default()).await
        };
        let models = |checks: Self, question: VendorModelsQuery| async move {
            checks.models(question.provider.unwrap_or_default()).await
        };
        let tokens = |checks: Self, question: TokenCountQuery| async move {
            checks.tokens(question.call.unwrap_or_default()).await
        };
        self.serve(lifecycle, "provider-checks", CheckProvider, checks);
        self.serve(lifecycle, "vendor-models", ListVendorModels, models);
        self.serve(lifecycle, "token-counts", CountTokens, tokens);
    }

    fn serve<Q, F>(
        &self,
        lifecycle: &Lifecycle,
        name: &'static str,
        address: Q,
        answer: impl Fn(Self, Q::Message) -> F + Send + Sync + 'static,
    ) where
        Q: Question + Send + Sync + 'static,
        Q::Message: Send,
        Q::Answer: Send,
        F: Future<Output = Q::Answer> + Send,
    {
        let (checks, draining) = (self.clone(), lifecycle.draining());
        lifecycle.spawn_job(name, async move {
            while !draining.is_cancelled() {
                let answer = |question| {
                    let answered = answer(checks.clone(), question);
                    async { Some(answered.await) }
                };
                if let Err(error) = checks.bus.answer(&address, draining.clone(), answer).await {
                    tracing::warn!(%error, name, "questions cannot be heard yet");
                    sleep(RETRY_DELAY).await;
                }
            }
        });
    }

    /// Checks every key, all at the same time.
    pub(crate) async fn check(&self, provider: Provider) -> ProviderCheckResult {
        let checks = self.router.open_keys(&provider).into_iter().map(|(number, key)| {
            let provider = &provider;
            async move {
                let checked = match key {
                    Ok(key) => {
                        self.router
                            .query(provider, key, QUERY_TIMEOUT, |vendor| vendor.check())
                            .await
                    }
                    Err(failure) => Err(failure),
                };
                let error = checked.as_ref().err().map(ToString::to_string).unwrap_or_default();
                KeyCheck { number, accepted: checked.is_ok(), error }
            }
        });
        ProviderCheckResult { keys: join_all(checks).await }
    }

    /// Lists the models with the first key that the vendor accepts.
    pub(crate) async fn models(&self, provider: Provider) -> VendorModels {
        let mut failed = None;
        for (_, key) in self.router.open_keys(&provider) {
            let listed = match key {
                Ok(key) => {
                    self.router.query(&provider, key, QUERY_TIMEOUT, |vendor| vendor.models()).await
                }
                Err(failure) => Err(failure),
            };
            match listed {
                Ok(mut models) => {
                    models.truncate(MAX_MODELS);
                    return VendorModels { models, failure: None };
                }
                Err(failure) => failed = failed.or(Some(failure)),
            }
        }
        VendorModels { models: Vec::new(), failure: failed.map(Failure::into_proto) }
    }

    /// Counts the tokens that a call would read.
    async fn tokens(&self, call: ModelInvoke) -> TokenCount {
        let target = Target {
            provider: call.provider.clone().unwrap_or_default(),
            model: call.model.clone().unwrap_or_default(),
        };
        // The owner of the step does not matter here.
        let call = ModelInvoke { step: Some(call.step.unwrap_or_default()), ..call };
        match Request::from_command(&call) {
            Ok(request) => {
                let CountResult { tokens: input_tokens, exact } =
                    self.router.count_tokens(&target, &request).await;
                TokenCount { input_tokens, exact, failure: None }
            }
            Err(failure) => {
                TokenCount { failure: Some(failure.into_proto()), ..TokenCount::default() }
            }
        }
    }
}

/// The models of a vendor's list that have a name.
pub(crate) fn model_list(
    list: &serde_json::Value,
    read: impl Fn(&serde_json::Value) -> VendorModel,
) -> Vec<VendorModel> {
    list.as_array().into_iter().flatten().map(read).filter(|model| !model.name.is_empty()).collect()
}

/// A string of a response; empty when there is none.
pub(crate) fn json_text(value: &serde_json::Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// A number of tokens of a response; 0 when there is none.
pub(crate) fn json_tokens(value: &serde_json::Value) -> i64 {
    value.as_i64().filter(|tokens| *tokens > 0).unwrap_or_default()
}

#[cfg(test)]
mod tests;
