//! Requests to the providers service, which calls the vendors for the gateway.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use construct_bus::{Bus, request, subject};
use construct_proto::{
    mesh::v1::{self as mesh, BreakerQuery, BreakerRef, ProviderCheck, VendorModelsQuery},
    v1,
};
use construct_runtime::clock;
use construct_store::{Model, ModelProvider, SealedSecret};
use construct_wire::convert;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::{
    deadline::{self, Deadline},
    status,
};

/// The timeout of the state of a breaker, which is read from memory; displaying a model doesn't
/// wait longer.
const BREAKER_TIMEOUT: Duration = Duration::from_millis(300);
/// The timeout of requests to vendors; the service gives a vendor slightly less. Short enough to
/// report the timeout in time.
const VENDOR_TIMEOUT: Duration = Duration::from_secs(28);
/// The poll interval. Explanations of tasks query directly.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// A client of the providers service.
#[derive(Debug)]
pub(crate) struct ProvidersClient {
    bus: Bus,
    /// Since when no process responds, as observed by this gateway.
    absent: Mutex<Option<Timestamp>>,
}

impl ProvidersClient {
    pub(crate) fn new(bus: Bus) -> Self {
        Self { bus, absent: Mutex::default() }
    }

    /// Polls the service until this process drains.
    pub(crate) async fn watch(&self, draining: &CancellationToken) {
        loop {
            self.absence(Deadline::new(None, BREAKER_TIMEOUT)).await;
            tokio::select! {
                () = draining.cancelled() => return,
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }

    /// Since when no process responds. `None` when one does, or when it is unknown.
    pub(crate) async fn absence(&self, deadline: Deadline) -> Option<Timestamp> {
        // Names no breaker, so any process can answer.
        let response = self
            .bus
            .ask(
                &subject::BreakerState,
                &BreakerQuery::default(),
                deadline.remaining(BREAKER_TIMEOUT),
            )
            .await;
        let mut absent = self.absent.lock().unwrap_or_else(PoisonError::into_inner);
        match response {
            Ok(_) => {
                if absent.take().is_some() {
                    tracing::info!("the providers service responds");
                }
            }
            Err(request::Error::NoResponders) => {
                absent.get_or_insert_with(|| {
                    tracing::info!("no process of the providers service responds");
                    clock::now()
                });
            }
            Err(error) => {
                tracing::debug!(%error, "cannot determine whether the providers service is running")
            }
        }
        *absent
    }

    /// The state of a model's breaker, if known.
    pub(crate) async fn breaker(&self, model: &Model, deadline: Deadline) -> Option<v1::Breaker> {
        let breaker = BreakerRef {
            provider_id: model.provider.to_string(),
            vendor_model: model.vendor_model.clone(),
        };
        let question = BreakerQuery { breaker: Some(breaker) };
        let response = self
            .bus
            .ask(&subject::BreakerState, &question, deadline.remaining(BREAKER_TIMEOUT))
            .await;
        response
            .inspect_err(|error| tracing::debug!(%error, "the state of a breaker is unknown"))
            .ok()
    }

    /// Checks each key of the provider at the vendor.
    pub(crate) async fn check(
        &self,
        provider: &ModelProvider,
        deadline: Deadline,
    ) -> Result<Vec<v1::KeyCheck>, Status> {
        let question = ProviderCheck { provider: Some(to_mesh_provider(provider)) };
        let response = self
            .bus
            .ask(&subject::CheckProvider, &question, deadline.remaining(VENDOR_TIMEOUT))
            .await;
        Ok(response.map_err(|error| request_failed(error, deadline))?.keys)
    }

    /// The models that the vendor offers.
    pub(crate) async fn models(
        &self,
        provider: &ModelProvider,
        deadline: Deadline,
    ) -> Result<Vec<v1::VendorModel>, Status> {
        let question = VendorModelsQuery { provider: Some(to_mesh_provider(provider)) };
        let response = self
            .bus
            .ask(&subject::ListVendorModels, &question, deadline.remaining(VENDOR_TIMEOUT))
            .await;
        let answer = response.map_err(|error| request_failed(error, deadline))?;
        match answer.failure {
            None => Ok(answer.models),
            Some(failure) => Err(Status::failed_precondition(format!(
                "the vendor lists no models: {}",
                failure.message
            ))),
        }
    }
}

fn to_mesh_provider(provider: &ModelProvider) -> mesh::Provider {
    mesh::Provider {
        id: provider.id.to_string(),
        r#type: convert::provider_type(provider.kind).into(),
        base_url: provider.base_url.clone(),
        api_key: provider.key.as_ref().map(to_mesh_secret),
        script: provider.script.clone().unwrap_or_default(),
        additional_api_keys: provider.additional_keys.iter().map(to_mesh_secret).collect(),
        max_concurrency: provider.limits.max_concurrency,
        requests_per_minute: provider.limits.requests_per_minute,
        tokens_per_minute: provider.limits.tokens_per_minute,
    }
}

fn to_mesh_secret(SealedSecret { key_id, nonce, ciphertext }: &SealedSecret) -> mesh::SealedSecret {
    mesh::SealedSecret {
        key_id: key_id.clone(),
        nonce: nonce.clone(),
        ciphertext: ciphertext.clone(),
    }
}

fn request_failed(error: request::Error, deadline: Deadline) -> Status {
    match error {
        request::Error::Timeout if deadline.is_over() => deadline::exceeded(),
        request::Error::NoResponders => status::unavailable("the providers service is not running"),
        request::Error::Timeout => {
            status::unavailable("the providers service, or the vendor, did not answer in time")
        }
        error => status::internal("the request to the providers service failed", &error),
    }
}
