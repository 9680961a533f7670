//! How the models that clients name are reached. ClientRequest of a reconciler, and cached for a while, so
//! that a call costs no question.

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

/// How long an answer is believed: so long a change of a model, a price or a key takes to arrive
/// here.
const ROUTE_TTL: Duration = Duration::from_secs(30);
/// How long it is used when nobody answers.
const STALE_ROUTE_TTL: Duration = Duration::from_secs(10 * 60);
/// How long an answer may take.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// RouteCache remembered at most.
const MAX_ROUTES: usize = 4_096;

/// How a model is reached.
pub(crate) struct Route {
    pub(crate) target: Target,
    /// Who answers when it cannot.
    pub(crate) fallbacks: Vec<mesh::Route>,
    /// After which silence the next one is asked as well.
    pub(crate) hedge_after: Option<Duration>,
}

impl Route {
    /// Who may answer one call, in the order they are tried. Whoever cannot call tools answers no
    /// call that offers some.
    pub(crate) fn ordered_targets(&self, offers_tools: bool) -> Vec<Arc<Target>> {
        let mut targets = ordered_targets(self.target.clone(), &self.fallbacks, fastrand::f64);
        targets.retain(|target| !offers_tools || target.model.tool_calling.unwrap_or(true));
        targets
    }

    /// What a call that reads so many tokens costs at most, in 10⁻¹² dollars, when it asks for no
    /// more than `max_tokens`.
    pub(crate) fn upper_cost(&self, input_tokens: i64, max_tokens: Option<u32>) -> i64 {
        self.upper_cost_with(input_tokens, |model| {
            (model.context_window, vendor::max_answer_tokens(model, max_tokens).into())
        })
    }

    /// What vectors of so many texts cost at most, which have so many tokens together. Each text
    /// may be as long as the model can see, and nothing is written.
    pub(crate) fn upper_embedding_cost(&self, input_tokens: i64, texts: usize) -> i64 {
        let texts = i64::try_from(texts).unwrap_or(i64::MAX);
        self.upper_cost_with(input_tokens, |model| (model.context_window.saturating_mul(texts), 0))
    }

    /// `bounds`: what a model reads and writes at most.
    fn upper_cost_with(&self, input_tokens: i64, bounds: impl Fn(&mesh::ModelTarget) -> (i64, i64)) -> i64 {
        let others = self.fallbacks.iter().filter_map(|route| route.model.as_ref());
        let targets = std::iter::once(&self.target.model).chain(others).map(|model| {
            let (context_window, max_output_tokens) = bounds(model);
            let prices = model.prices.map(vendor::prices_from_proto).unwrap_or_default();
            money::Target { prices, context_window, max_output_tokens }
        });
        let cost = money::max_cost(
            &targets.collect::<Vec<_>>(),
            self.hedge_after.is_some(),
            input_tokens,
        );
        let mut providers = self.fallbacks.iter().filter_map(|route| route.provider.as_ref());
        let told = vendor::reports_cost(&self.target.provider) || providers.any(vendor::reports_cost);
        // What is only known afterwards asks at least whether anything is left.
        cost.max(i64::from(told))
    }
}

/// Finds models.
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

    /// How the organization's model of this name is reached.
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
                    all.insert(name, CachedRoute { route: Arc::clone(&route), fetched_at: Instant::now() });
                }
                Ok(route)
            }
            Err(error) => match cached.filter(|cached| cached.fetched_at.elapsed() < STALE_ROUTE_TTL) {
                Some(cached) => {
                    tracing::warn!(%error, model, "a model is called as it was when it was last asked for");
                    Ok(cached.route)
                }
                None => Err(mesh_unavailable(&error)),
            },
        }
    }
}

fn route_from_proto(found: mesh::ModelFound, model: &str) -> Result<Route, Refusal> {
    let mesh::ModelFound { provider: Some(provider), model: Some(target), fallbacks, hedge_after } =
        found
    else {
        return Err(Refusal::new(Kind::NoModel, format!("there is no model `{model}`")));
    };
    let hedge_after = hedge_after
        .and_then(|after| Duration::try_from(after).ok())
        .filter(|after| !after.is_zero());
    Ok(Route { target: Target { provider, model: target }, fallbacks, hedge_after })
}

/// The mesh does not answer.
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
