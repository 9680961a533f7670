//! How the models that clients name are reached. Asked of a reconciler, and kept for a while, so that a call costs no
//! question.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use construct_bus::{Bus, request, subject};
use construct_domain::money::Prices;
use construct_proto::mesh::v1 as mesh;
use construct_runtime::MasterKeys;
use secrecy::SecretString;
use tokio::time::Instant;

use super::refusal::{Kind, Refusal};
use crate::{
    key,
    vendor::{Origin, Vendor, Vendors},
};

/// How long an answer is believed: so long a change of a model, a price or a key takes to arrive here.
const FRESH: Duration = Duration::from_secs(30);
/// How long it is used when nobody answers.
const STALE: Duration = Duration::from_secs(10 * 60);
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Models remembered at most.
const MAX_KEPT: usize = 4_096;

/// How a model is reached.
pub(crate) struct Route {
    pub(crate) provider: mesh::Provider,
    pub(crate) target: mesh::ModelTarget,
    pub(crate) prices: Prices,
    pub(crate) origin: Origin,
    pub(crate) vendor: Box<dyn Vendor>,
    /// So that it is taken out of what is said of a failure.
    pub(crate) key: Option<SecretString>,
}

/// Finds models.
pub(crate) struct Models {
    bus: Bus,
    vendors: Vendors,
    keys: MasterKeys,
    kept: RwLock<HashMap<(String, String), Kept>>,
}

#[derive(Clone)]
struct Kept {
    route: Arc<Route>,
    at: Instant,
}

impl Models {
    pub(crate) fn new(bus: Bus, vendors: Vendors, keys: MasterKeys) -> Self {
        Self { bus, vendors, keys, kept: RwLock::default() }
    }

    /// How the organisation's model of this name is reached.
    pub(crate) async fn find(&self, organization: &str, model: &str) -> Result<Arc<Route>, Refusal> {
        let name = (organization.to_owned(), model.to_owned());
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner).get(&name).cloned();
        if let Some(kept) = &kept
            && kept.at.elapsed() < FRESH
        {
            return Ok(Arc::clone(&kept.route));
        }
        let question = mesh::ModelLookup { organization_id: name.0.clone(), model: name.1.clone() };
        match self.bus.ask(&subject::Models, &question, PATIENCE).await {
            Ok(found) => {
                let route = Arc::new(self.open(found, model)?);
                let mut all = self.kept.write().unwrap_or_else(PoisonError::into_inner);
                if all.len() >= MAX_KEPT {
                    all.retain(|_, kept| kept.at.elapsed() < FRESH);
                }
                if all.len() < MAX_KEPT {
                    all.insert(name, Kept { route: Arc::clone(&route), at: Instant::now() });
                }
                Ok(route)
            }
            Err(error) => match kept.filter(|kept| kept.at.elapsed() < STALE) {
                Some(kept) => {
                    tracing::warn!(%error, model, "a model is called as it was when it was last asked for");
                    Ok(kept.route)
                }
                None => Err(away(&error)),
            },
        }
    }

    fn open(&self, found: mesh::ModelFound, model: &str) -> Result<Route, Refusal> {
        let (Some(provider), Some(target)) = (found.provider, found.model) else {
            return Err(Refusal::new(Kind::NoModel, format!("there is no model `{model}`")));
        };
        let key = key::open(&self.keys, &provider.id, provider.api_key.as_ref())?;
        let vendor = self.vendors.open(&provider, key.clone())?;
        let prices = target.prices.unwrap_or_default();
        let kind = provider.r#type().as_str_name().trim_start_matches("MODEL_PROVIDER_TYPE_").to_lowercase();
        Ok(Route {
            prices: Prices {
                input: prices.input,
                output: prices.output,
                cache_read: prices.cache_read,
                cache_write: prices.cache_write,
            },
            origin: Origin { vendor: kind, provider_id: provider.id.clone() },
            provider,
            target,
            vendor,
            key,
        })
    }
}

/// The mesh does not answer.
pub(crate) fn away(error: &request::Error) -> Refusal {
    let source = error as &dyn std::error::Error;
    tracing::warn!(error = source, "no reconciler answers the proxy");
    let retry_at = jiff::Timestamp::now().checked_add(Duration::from_secs(1)).ok();
    Refusal {
        retry_at,
        ..Refusal::new(Kind::Overloaded, "Construct cannot say at the moment how models are reached and paid")
    }
}
