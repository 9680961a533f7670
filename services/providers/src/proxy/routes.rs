//! Resolves the models of clients. A reconciler knows them; its answers are cached, so that a call
//! needs no query.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use construct_bus::{Bus, request, subject};
use construct_domain::money;
use construct_proto::mesh::v1 as mesh;
use construct_runtime::clock;
use tokio::time::Instant;

use super::refusal::{Kind, Refusal};
use crate::{
    router::{Target, ordered_targets},
    vendor,
};

/// How long a cached route is used. A change of a model, a price or a key takes as long to arrive
/// here.
const ROUTE_TTL: Duration = Duration::from_secs(30);
/// How long a cached route is used while no reconciler answers.
const STALE_ROUTE_TTL: Duration = Duration::from_secs(10 * 60);
/// Timeout of a query.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Cached routes at most.
const MAX_ROUTES: usize = 4_096;

/// The target of a model, with its fallbacks.
pub(crate) struct Route {
    pub(crate) target: Target,
    /// The targets when it fails.
    pub(crate) fallbacks: Vec<mesh::Route>,
    /// The silence after which the next target is called as well.
    pub(crate) hedge_after: Option<Duration>,
}

impl Route {
    /// The targets of one call, in the order they are tried. A call with tools skips models that
    /// cannot call tools.
    pub(crate) fn ordered_targets(&self, offers_tools: bool) -> Vec<Arc<Target>> {
        let mut targets = ordered_targets(self.target.clone(), &self.fallbacks, fastrand::f64);
        targets.retain(|target| !offers_tools || target.model.tool_calling.unwrap_or(true));
        targets
    }

    /// The upper bound of a call's cost, in 10⁻¹² dollars, with `input_tokens` and at most
    /// `max_tokens` of output.
    pub(crate) fn upper_cost(&self, input_tokens: i64, max_tokens: Option<u32>) -> i64 {
        self.upper_cost_with(input_tokens, |model| {
            (model.context_window, vendor::max_answer_tokens(model, max_tokens).into())
        })
    }

    /// The upper bound of the cost of embedding `texts` texts with `input_tokens` together. Each
    /// text may fill the context window, and there is no output.
    pub(crate) fn upper_embedding_cost(&self, input_tokens: i64, texts: usize) -> i64 {
        let texts = i64::try_from(texts).unwrap_or(i64::MAX);
        self.upper_cost_with(input_tokens, |model| (model.context_window.saturating_mul(texts), 0))
    }

    /// `bounds` returns the maximum of a model's input and output tokens.
    fn upper_cost_with(
        &self,
        input_tokens: i64,
        bounds: impl Fn(&mesh::ModelTarget) -> (i64, i64),
    ) -> i64 {
        let others = self.fallbacks.iter().filter_map(|route| route.model.as_ref());
        let targets = std::iter::once(&self.target.model).chain(others).map(|model| {
            let (context_window, max_output_tokens) = bounds(model);
            let prices = model.prices.map(vendor::prices_from_proto).unwrap_or_default();
            money::Target { prices, context_window, max_output_tokens }
        });
        let cost =
            money::max_cost(&targets.collect::<Vec<_>>(), self.hedge_after.is_some(), input_tokens);
        let mut providers = self.fallbacks.iter().filter_map(|route| route.provider.as_ref());
        let told =
            vendor::reports_cost(&self.target.provider) || providers.any(vendor::reports_cost);
        // A cost that is known only afterwards still needs a check that some budget is left.
        cost.max(i64::from(told))
    }
}

/// Caches the routes of models.
pub(crate) struct RouteCache {
    bus: Bus,
    routes: RwLock<HashMap<(String, String), CachedRoute>>,
}

#[derive(Clone)]
struct CachedRoute {
    route: Arc<Route>,
    fetched_at: Instant,
}

impl RouteCache {
    pub(crate) fn new(bus: Bus) -> Self {
        Self { bus, routes: RwLock::default() }
    }

    /// The route of an organization's model.
    pub(crate) async fn find(
        &self,
        organization: &str,
        model: &str,
    ) -> Result<Arc<Route>, Refusal> {
        let name = (organization.to_owned(), model.to_owned());
        let cached = self.routes.read().unwrap_or_else(PoisonError::into_inner).get(&name).cloned();
        if let Some(cached) = &cached
            && cached.fetched_at.elapsed() < ROUTE_TTL
        {
            return Ok(Arc::clone(&cached.route));
        }
        let question = mesh::ModelLookup { organization_id: name.0.clone(), model: name.1.clone() };
        match self.bus.ask(&subject::Models, &question, LOOKUP_TIMEOUT).await {
            Ok(found) => {
                let route = Arc::new(route_from_proto(found, model)?);
                let mut all = self.routes.write().unwrap_or_else(PoisonError::into_inner);
                if all.len() >= MAX_ROUTES {
                    all.retain(|_, cached| cached.fetched_at.elapsed() < ROUTE_TTL);
                }
                if all.len() < MAX_ROUTES {
                    all.insert(
                        name,
                        CachedRoute { route: Arc::clone(&route), fetched_at: Instant::now() },
                    );
                }
                Ok(route)
            }
            Err(error) => {
                match cached.filter(|cached| cached.fetched_at.elapsed() < STALE_ROUTE_TTL) {
                    Some(cached) => {
                        tracing::warn!(%error, model, "a model is called as it was when it was last asked for");
                        Ok(cached.route)
                    }
                    None => Err(mesh_unavailable(&error)),
                }
            }
        }
    }
}

fn route_from_proto(found: mesh::ResolvedModel, model: &str) -> Result<Route, Refusal> {
    let mesh::ResolvedModel {
        provider: Some(provider),
        model: Some(target),
        fallbacks,
        hedge_after,
    } = found
    else {
        return Err(Refusal::new(Kind::NoModel, format!("there is no model `{model}`")));
    };
    let hedge_after = hedge_after
        .and_then(|after| Duration::try_from(after).ok())
        .filter(|after| !after.is_zero());
    Ok(Route { target: Target { provider, model: target }, fallbacks, hedge_after })
}

/// The refusal when no reconciler answers.
pub(crate) fn mesh_unavailable(error: &request::Error) -> Refusal {
    let source = error as &dyn std::error::Error;
    tracing::warn!(error = source, "no reconciler answers the proxy");
    let retry_at = clock::now().checked_add(Duration::from_secs(1)).ok();
    Refusal {
        retry_at,
        ..Refusal::new(
            Kind::Overloaded,
            "Construct cannot say at the moment how models are reached and paid",
        )
    }
}
