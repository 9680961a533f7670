//! How the models that clients name are reached. Asked of a reconciler, and kept for a while, so
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
    router::{Target, in_order},
    vendor,
};

/// How long an answer is believed: so long a change of a model, a price or a key takes to arrive
/// here.
const FRESH: Duration = Duration::from_secs(30);
/// How long it is used when nobody answers.
const STALE: Duration = Duration::from_secs(10 * 60);
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Models remembered at most.
const MAX_KEPT: usize = 4_096;

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
    pub(crate) fn in_order(&self, offers_tools: bool) -> Vec<Arc<Target>> {
        let mut targets = in_order(self.target.clone(), &self.fallbacks, fastrand::f64);
        targets.retain(|target| !offers_tools || target.model.tool_calling.unwrap_or(true));
        targets
    }

    /// What a call that reads so many tokens costs at most, in 10⁻¹² dollars, when it asks for no
    /// more than `max_tokens`.
    pub(crate) fn upper_cost(&self, input_tokens: i64, max_tokens: Option<u32>) -> i64 {
        self.upper(input_tokens, |model| {
            (model.context_window, vendor::longest_answer(model, max_tokens).into())
        })
    }

    /// What vectors of so many texts cost at most, which have so many tokens together. Each text
    /// may be as long as the model can see, and nothing is written.
    pub(crate) fn upper_cost_of_vectors(&self, input_tokens: i64, texts: usize) -> i64 {
        let texts = i64::try_from(texts).unwrap_or(i64::MAX);
        self.upper(input_tokens, |model| (model.context_window.saturating_mul(texts), 0))
    }

    /// `bounds`: what a model reads and writes at most.
    fn upper(&self, input_tokens: i64, bounds: impl Fn(&mesh::ModelTarget) -> (i64, i64)) -> i64 {
        let others = self.fallbacks.iter().filter_map(|route| route.model.as_ref());
        let targets = std::iter::once(&self.target.model).chain(others).map(|model| {
            let (context_window, max_output_tokens) = bounds(model);
            let prices = model.prices.map(vendor::prices).unwrap_or_default();
            money::Target { prices, context_window, max_output_tokens }
        });
        let cost = money::upper_cost(
            &targets.collect::<Vec<_>>(),
            self.hedge_after.is_some(),
            input_tokens,
        );
        let mut providers = self.fallbacks.iter().filter_map(|route| route.provider.as_ref());
        let told = vendor::tells_cost(&self.target.provider) || providers.any(vendor::tells_cost);
        // What is only known afterwards asks at least whether anything is left.
        cost.max(i64::from(told))
    }
}

/// Finds models.
pub(crate) struct Models {
    bus: Bus,
    kept: RwLock<HashMap<(String, String), Kept>>,
}

#[derive(Clone)]
struct Kept {
    route: Arc<Route>,
    at: Instant,
}

impl Models {
    pub(crate) fn new(bus: Bus) -> Self {
        Self { bus, kept: RwLock::default() }
    }

    /// How the organization's model of this name is reached.
    pub(crate) async fn find(
        &self,
        organization: &str,
        model: &str,
    ) -> Result<Arc<Route>, Refusal> {
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
                let route = Arc::new(route(found, model)?);
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
}

fn route(found: mesh::ModelFound, model: &str) -> Result<Route, Refusal> {
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
pub(crate) fn away(error: &request::Error) -> Refusal {
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
