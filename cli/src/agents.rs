//! Which agent is meant when none is named.

use construct_proto::v1::{Agent, ListAgentsRequest};

use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    page,
};

/// Names the agent when the command line does not. Not an argument's own variable: it would
/// contradict `--task`.
const VARIABLE: &str = "CONSTRUCT_AGENT";

/// All agents, by name.
///
/// # Errors
/// What the gateway fails with.
pub(crate) async fn all(gateway: &Gateway) -> Result<Vec<Agent>, Failure> {
    page::all("name asc", |page| async move {
        let request = ListAgentsRequest { page: Some(page), filter: None };
        let response = call(gateway.agents().list_agents(request)).await?;
        Ok((response.agents, response.page))
    })
    .await
}

/// The agent that is named, on the command line or else in the environment.
pub(crate) fn named(given: Option<String>) -> Option<String> {
    given.or_else(|| std::env::var(VARIABLE).ok().filter(|name| !name.is_empty()))
}

/// The agent that is named, or the only one there is.
///
/// # Errors
/// When there is none or a choice, or the gateway fails.
pub(crate) async fn choose(gateway: &Gateway, given: Option<String>) -> Result<String, Failure> {
    if let Some(named) = named(given) {
        return Ok(named);
    }
    let names: Vec<String> = all(gateway).await?.iter().map(name).collect();
    match names.as_slice() {
        [only] => Ok(only.clone()),
        [] => Err(Failure::usage("there is no agent yet").hint(
            "create a provider, a model and an agent: construct modelprovider create, construct model create, construct agent create",
        )),
        _ => Err(Failure::usage(format!("which agent? --agent, or CONSTRUCT_AGENT, can be: {}", names.join(", ")))),
    }
}

/// What the agent is called.
pub(crate) fn name(agent: &Agent) -> String {
    agent.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default()
}
