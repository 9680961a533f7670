//! `AgentService`.

use construct_domain::{AgentId, ModelId, SecretId, compute};
use construct_proto::v1::{
    self, CreateAgentRequest, DeleteAgentRequest, DeleteAgentResponse, GetAgentRequest,
    ListAgentsRequest, ListAgentsResponse, UpdateAgentRequest, agent_service_server::AgentService,
    event::Payload,
};
use construct_store::{Agent, AgentChanges, AgentFilter, NewAgent, WriteOutput};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, Entry, Lookup, nobody},
    convert, events,
    page::Column,
    status,
    validate::requests,
};

/// What an agent that names no pool gets is written down, so that it stays the same with a later
/// version.
fn compute_or_default(name: String) -> String {
    if name.is_empty() { compute::DEFAULT.to_owned() } else { name }
}

fn render(kind: &'static str) -> impl FnOnce(&Agent) -> WriteOutput + Send {
    move |agent| {
        let agent = convert::agent(agent);
        events::rendered(kind, Payload::Agent(agent.clone()), &agent)
    }
}

/// The secrets that a request names.
async fn secrets(
    entry: &Entry,
    lookup: &mut Lookup,
    named: &[String],
) -> Result<Vec<SecretId>, Status> {
    let mut secrets = Vec::with_capacity(named.len());
    for name in named {
        let found = entry.store().secret_resolve(entry.organization(), name).await;
        secrets.push(lookup.take(name, found, SecretId::from_uuid)?);
    }
    Ok(secrets)
}

/// The models that a request names for scripts.
async fn script_models(
    entry: &Entry,
    lookup: &mut Lookup,
    named: &[String],
) -> Result<Vec<ModelId>, Status> {
    let mut models = Vec::with_capacity(named.len());
    for name in named {
        let found = entry.store().model_resolve(entry.organization(), name).await;
        models.push(lookup.take(name, found, ModelId::from_uuid)?);
    }
    Ok(models)
}

#[tonic::async_trait]
impl AgentService for Api {
    async fn create_agent(
        &self,
        request: Request<CreateAgentRequest>,
    ) -> Result<Response<v1::Agent>, Status> {
        let (entry, mut request) = self.enter_unchecked(request)?;
        requests::create_agent(&request, self.pools())?;
        let write = entry.write("CreateAgent", &mut request);
        let spec = request.spec.unwrap_or_default();
        let mut lookup = Lookup::new(&write);
        let model = entry.store().model_resolve(entry.organization(), &spec.model).await;
        let new = NewAgent {
            id: AgentId::from_uuid(Uuid::now_v7()),
            model: lookup.take(&spec.model, model, ModelId::from_uuid)?,
            name: spec.name,
            description: spec.description,
            instructions: spec.instructions,
            max_turns: spec.max_turns,
            parameters: convert::to_parameters(spec.parameters.unwrap_or_default()),
            policy: spec.policy.into_iter().filter_map(convert::to_rule).collect(),
            compute: compute_or_default(spec.compute),
            secrets: secrets(&entry, &mut lookup, &spec.secrets).await?,
            script_models: script_models(&entry, &mut lookup, &spec.script_models).await?,
            compact_at: compact_at_or_default(spec.compact_at_percent),
        };
        let written = lookup
            .settle(entry.store().agent_create(&write, new, render("agent.created")).await)?;
        entry.answer(written, nobody, convert::agent).await
    }

    async fn get_agent(
        &self,
        request: Request<GetAgentRequest>,
    ) -> Result<Response<v1::Agent>, Status> {
        let (entry, GetAgentRequest { agent }) = self.enter(request)?;
        let found = entry.store().agent_find(entry.organization(), &agent).await;
        found
            .map(|agent| Response::new(convert::agent(&agent)))
            .map_err(|error| status::about(&agent, error))
    }

    async fn list_agents(
        &self,
        request: Request<ListAgentsRequest>,
    ) -> Result<Response<ListAgentsResponse>, Status> {
        let (entry, request, page) = self.enter_list(request, &Column::NAMED)?;
        let organization = entry.organization();
        let filter = request.filter.unwrap_or_default();
        let model = match filter.model.as_str() {
            "" => None,
            model => {
                let found = entry.store().model_resolve(organization, model).await;
                Some(found.map_err(|error| status::about(model, error))?)
            }
        };
        let filter = AgentFilter { model, name_prefix: filter.name_prefix };
        let found = entry.store().agent_list(organization, &filter, &page.query()).await;
        let agents = found.map_err(status::of_store)?;
        let (agents, info) = page.cut(&agents, convert::agent, |agent| agent.cursor(page.key()));
        Ok(Response::new(ListAgentsResponse { agents, page: Some(info) }))
    }

    async fn update_agent(
        &self,
        request: Request<UpdateAgentRequest>,
    ) -> Result<Response<v1::Agent>, Status> {
        let (entry, mut request) = self.enter_unchecked(request)?;
        requests::update_agent(&request, self.pools())?;
        let write = entry.write("UpdateAgent", &mut request);
        let mut lookup = Lookup::new(&write);
        let agent = entry.store().agent_resolve(entry.organization(), &request.agent).await;
        let agent = lookup.take(&request.agent, agent, AgentId::from_uuid)?;
        let model = match &request.model {
            None => None,
            Some(model) => {
                let found = entry.store().model_resolve(entry.organization(), model).await;
                Some(lookup.take(model, found, ModelId::from_uuid)?)
            }
        };
        let secrets = match &request.secrets {
            None => None,
            Some(replacement) => Some(secrets(&entry, &mut lookup, &replacement.secrets).await?),
        };
        let script_models = match &request.script_models {
            None => None,
            Some(replacement) => {
                Some(script_models(&entry, &mut lookup, &replacement.script_models).await?)
            }
        };
        let changes = AgentChanges {
            model,
            name: request.name,
            description: request.description,
            instructions: request.instructions,
            max_turns: request.max_turns,
            parameters: request.parameters.map(convert::to_parameters),
            policy: request
                .policy
                .map(|policy| policy.rules.into_iter().filter_map(convert::to_rule).collect()),
            compute: request.compute.map(compute_or_default),
            secrets,
            script_models,
            compact_at: request.compact_at_percent.map(compact_at_or_default),
        };
        let expected = (request.revision != 0).then_some(request.revision);
        let updated = entry
            .store()
            .agent_update(&write, agent, expected, changes, render("agent.updated"))
            .await;
        entry.answer(lookup.settle(updated)?, nobody, convert::agent).await
    }

    async fn delete_agent(
        &self,
        request: Request<DeleteAgentRequest>,
    ) -> Result<Response<DeleteAgentResponse>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let write = entry.write("DeleteAgent", &mut request);
        let mut lookup = Lookup::new(&write);
        let agent = entry.store().agent_resolve(entry.organization(), &request.agent).await;
        let agent = lookup.take(&request.agent, agent, AgentId::from_uuid)?;
        let render = |agent: &Agent| events::deleted("agent.deleted", agent.id);
        let deleted = entry.store().agent_delete(&write, agent, render).await;
        entry.answer(lookup.settle(deleted)?, nobody, |_| DeleteAgentResponse {}).await
    }
}

/// 0 asks for what holds when nothing is said.
fn compact_at_or_default(percent: u32) -> u32 {
    if percent == 0 { construct_domain::context::DEFAULT_COMPACT_AT_PERCENT } else { percent }
}
