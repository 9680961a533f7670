//! Selects an agent when the command line names none.

use construct_proto::v1::{Agent, ListAgentsRequest};

use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    page,
};

/// The environment variable with the default agent. Not bound to the argument: it would conflict
/// with `--task`.
const VARIABLE: &str = "CONSTRUCT_AGENT";

/// All agents, sorted by name.
///
/// # Errors
/// The error of the gateway.
pub(crate) async fn all(gateway: &Gateway) -> Result<Vec<Agent>, Failure> {
    page::all("name asc", |page| async move {
        let request = ListAgentsRequest { page: Some(page), filter: None };
        let response = call(gateway.agents().list_agents(request)).await?;
        Ok((response.agents, response.page))
    })
    .await
}

/// The agent that the command line or the environment names.
pub(crate) fn named(argument: Option<String>) -> Option<String> {
    argument.or_else(|| std::env::var(VARIABLE).ok().filter(|name| !name.is_empty()))
}

/// The named agent, or the only one.
///
/// # Errors
/// When there is no agent, or several and none is named, or the gateway fails.
pub(crate) async fn choose(gateway: &Gateway, argument: Option<String>) -> Result<String, Failure> {
    if let Some(named) = named(argument) {
        return Ok(named);
    }
    let names: Vec<String> = all(gateway).await?.iter().map(name).collect();
    match names.as_slice() {
        [only] => Ok(only.clone()),
        [] => Err(Failure::usage("there is no agent yet").hint(
            "create a provider, a model and an agent: construct modelprovider create, construct model create, construct agent create",
        )),
        _ => Err(Failure::usage(format!("there are several agents; choose one with --agent or CONSTRUCT_AGENT: {}", names.join(", ")))),
    }
}

/// The name of the agent.
pub(crate) fn name(agent: &Agent) -> String {
    agent.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default()
}
