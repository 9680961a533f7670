//! Tokens for models.

use std::time::Duration;

use construct_proto::v1::CreateModelTokenRequest;
use tonic::Status;

use crate::validate::Violations;

/// Models of one token at most.
const MODELS: usize = 50;
/// The longest a token holds: it cannot be taken back.
const LIFE: Duration = Duration::from_secs(7 * 24 * 3600);

pub(crate) fn create_model_token(request: &CreateModelTokenRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.require((1..=MODELS).contains(&request.models.len()), "models", || {
        format!("must name 1 to {MODELS} models")
    });
    for (at, model) in request.models.iter().take(MODELS).enumerate() {
        violations.reference(&format!("models[{at}]"), model, "a model");
    }
    violations.require(request.budget_pico_usd >= 0, "budget_pico_usd", || {
        "must not be negative".to_owned()
    });
    if let Some(life) = request.expires_in {
        let life = Duration::try_from(life).ok();
        let fits = life.is_some_and(|life| (Duration::from_secs(1)..=LIFE).contains(&life));
        violations.require(fits, "expires_in", || "must be one second to 7 days".to_owned());
    }
    violations.finish()
}
