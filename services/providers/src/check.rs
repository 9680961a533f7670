//! What people ask about a provider before they use it: whether its keys are taken, and which models there are.

use std::time::Duration;

use construct_bus::{
    Bus,
    subject::{CheckProvider, ListVendorModels},
};
use construct_proto::{
    mesh::v1::{Provider, ProviderCheck, ProviderChecked, VendorModels, VendorModelsQuestion},
    v1::{KeyCheck, VendorModel},
};
use construct_runtime::Lifecycle;
use futures::future::join_all;
use secrecy::{ExposeSecret as _, SecretString};
use tokio::time::{sleep, timeout};

use crate::{failure::Failure, router::Router, vendor::Vendor};

/// How long a vendor has; the gateway waits a little longer.
const PATIENCE: Duration = Duration::from_secs(25);
/// Models that are passed on at most. No vendor has as many; a server that calls itself one may.
const MAX_MODELS: usize = 5_000;
/// Before the mesh is tried again.
const PAUSE: Duration = Duration::from_millis(500);

/// Answers such questions.
#[derive(Clone)]
pub(crate) struct Checks {
    pub(crate) bus: Bus,
    pub(crate) router: Router,
}

impl Checks {
    /// Answers until the service drains.
    pub(crate) fn start(self, lifecycle: &Lifecycle) {
        let (checks, draining) = (self.clone(), lifecycle.draining());
        lifecycle.spawn_job("provider-checks", async move {
            while !draining.is_cancelled() {
                let answer = |question: ProviderCheck| {
                    let checks = &checks;
                    async move { Some(checks.check(question.provider.unwrap_or_default()).await) }
                };
                if let Err(error) = checks.bus.answer(&CheckProvider, draining.clone(), answer).await {
                    tracing::warn!(%error, "questions about keys cannot be heard yet");
                    sleep(PAUSE).await;
                }
            }
        });
        let draining = lifecycle.draining();
        lifecycle.spawn_job("vendor-models", async move {
            while !draining.is_cancelled() {
                let answer = |question: VendorModelsQuestion| {
                    let checks = &self;
                    async move { Some(checks.models(question.provider.unwrap_or_default()).await) }
                };
                if let Err(error) = self.bus.answer(&ListVendorModels, draining.clone(), answer).await {
                    tracing::warn!(%error, "questions about vendors' models cannot be heard yet");
                    sleep(PAUSE).await;
                }
            }
        });
    }

    /// Tries every key, all at the same time.
    pub(crate) async fn check(&self, provider: Provider) -> ProviderChecked {
        let checks = self.router.open_keys(&provider).into_iter().map(|(number, key)| {
            let provider = &provider;
            async move {
                let checked = match key {
                    Ok(key) => self.ask(provider, key, |vendor| vendor.check()).await,
                    Err(failure) => Err(failure),
                };
                let error = checked.as_ref().err().map(ToString::to_string).unwrap_or_default();
                KeyCheck { number, accepted: checked.is_ok(), error }
            }
        });
        ProviderChecked { keys: join_all(checks).await }
    }

    /// Asks with the first key that the vendor takes.
    pub(crate) async fn models(&self, provider: Provider) -> VendorModels {
        let mut failed = None;
        for (_, key) in self.router.open_keys(&provider) {
            let listed = match key {
                Ok(key) => self.ask(&provider, key, |vendor| vendor.models()).await,
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

    async fn ask<T, F>(
        &self,
        provider: &Provider,
        key: Option<SecretString>,
        question: impl FnOnce(&dyn Vendor) -> F + Send,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>> + Send,
    {
        // No observer: a listing has limits of its own, which are not those of calls.
        let vendor = self.router.vendors().open(provider, key.clone(), None)?;
        let asked = question(vendor.as_ref());
        let answered = timeout(PATIENCE, asked).await;
        let silent = |_| Failure::transient(format!("the vendor did not answer within {} s", PATIENCE.as_secs()));
        answered.map_err(silent)?.map_err(|failure| failure.scrubbed(key.as_ref().map(|key| key.expose_secret())))
    }
}

/// The models of a list in an answer, as far as they have a name.
pub(crate) fn named(list: &serde_json::Value, read: impl Fn(&serde_json::Value) -> VendorModel) -> Vec<VendorModel> {
    list.as_array().into_iter().flatten().map(read).filter(|model| !model.name.is_empty()).collect()
}

/// A text in an answer; empty when there is none.
pub(crate) fn text(value: &serde_json::Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// A number of tokens in an answer; 0 when there is none.
pub(crate) fn tokens(value: &serde_json::Value) -> i64 {
    value.as_i64().filter(|tokens| *tokens > 0).unwrap_or_default()
}

#[cfg(test)]
mod tests;
