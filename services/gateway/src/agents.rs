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
    api::{Api, CallerContext, ReferenceResolver, no_wake},
    convert, events,
    page::Column,
    status,
    validate::requests,
};

/// Stores the default compute tier explicitly, so that a later version doesn't change it.
fn compute_or_default(name: String) -> String {
    if name.is_empty() { compute::DEFAULT.to_owned() } else { name }
}

fn render(kind: &'static str) -> impl FnOnce(&Agent) -> WriteOutput + Send {
    move |agent| {
        let agent = convert::agent(agent);
        events::write_output(kind, Payload::Agent(agent.clone()), &agent)
    }
}

/// Resolves the secrets of a request.
async fn secrets(
    context: &CallerContext,
    resolver: &mut ReferenceResolver,
    named: &[String],
) -> Result<Vec<SecretId>, Status> {
    let mut secrets = Vec::with_capacity(named.len());
    for name in named {
        let found = context.store().secret_resolve(context.organization(), name).await;
        secrets.push(resolver.resolve(name, found, SecretId::from_uuid)?);
    }
    Ok(secrets)
}

/// Resolves the script models of a request.
async fn script_models(
    context: &CallerContext,
    resolver: &mut ReferenceResolver,
    named: &[String],
) -> Result<Vec<ModelId>, Status> {
    let mut models = Vec::with_capacity(named.len());
    for name in named {
        let found = context.store().model_resolve(context.organization(), name).await;
        models.push(resolver.resolve(name, found, ModelId::from_uuid)?);
    }
    Ok(models)
}

#[tonic::async_trait]
impl AgentService for Api {
    async fn create_agent(
        &self,
        request: Request<CreateAgentRequest>,
    ) -> Result<Response<v1::Agent>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        requests::create_agent(&request, self.pools())?;
        let write = context.write("CreateAgent", &mut request);
        let spec = request.spec.unwrap_or_default();
        let mut resolver = ReferenceResolver::new(&write);
        let model = context.store().model_resolve(context.organization(), &spec.model).await;
        let new = NewAgent {
            id: AgentId::from_uuid(Uuid::now_v7()),
            model: resolver.resolve(&spec.model, model, ModelId::from_uuid)?,
            name: spec.name,
            description: spec.description,
            instructions: spec.instructions,
            max_turns: spec.max_turns,
            parameters: convert::to_parameters(spec.parameters.unwrap_or_default()),
            policy: spec.policy.into_iter().filter_map(convert::to_rule).collect(),
            compute: compute_or_default(spec.compute),
            secrets: secrets(&context, &mut resolver, &spec.secrets).await?,
            script_models: script_models(&context, &mut resolver, &spec.script_models).await?,
            compact_at: compact_at_or_default(spec.compact_at_percent),
        };
        let written = resolver
            .finish(context.store().agent_create(&write, new, render("agent.created")).await)?;
        context.answer(written, no_wake, convert::agent).await
    }

    async fn get_agent(
        &self,
        request: Request<GetAgentRequest>,
    ) -> Result<Response<v1::Agent>, Status> {
        let (context, GetAgentRequest { agent }) = self.begin_request(request)?;
        let found = context.store().agent_find(context.organization(), &agent).await;
        found
            .map(|agent| Response::new(convert::agent(&agent)))
            .map_err(|error| status::for_reference(&agent, error))
    }

    async fn list_agents(
        &self,
        request: Request<ListAgentsRequest>,
    ) -> Result<Response<ListAgentsResponse>, Status> {
        let (context, request, page) = self.begin_list_request(request, &Column::NAMED)?;
        let organization = context.organization();
        let filter = request.filter.unwrap_or_default();
        let model = match filter.model.as_str() {
            "" => None,
            model => {
                let found = context.store().model_resolve(organization, model).await;
                Some(found.map_err(|error| status::for_reference(model, error))?)
            }
        };
        let filter = AgentFilter { model, name_prefix: filter.name_prefix };
        let found = context.store().agent_list(organization, &filter, &page.query()).await;
        let agents = found.map_err(status::from_store)?;
        let (agents, info) = page.cut(&agents, convert::agent, |agent| agent.cursor(page.key()));
        Ok(Response::new(ListAgentsResponse { agents, page: Some(info) }))
    }

    async fn update_agent(
        &self,
        request: Request<UpdateAgentRequest>,
    ) -> Result<Response<v1::Agent>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        requests::update_agent(&request, self.pools())?;
        let write = context.write("UpdateAgent", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let agent = context.store().agent_resolve(context.organization(), &request.agent).await;
        let agent = resolver.resolve(&request.agent, agent, AgentId::from_uuid)?;
        let model = match &request.model {
            None => None,
            Some(model) => {
                let found = context.store().model_resolve(context.organization(), model).await;
                Some(resolver.resolve(model, found, ModelId::from_uuid)?)
            }
        };
        let secrets = match &request.secrets {
            None => None,
            Some(replacement) => {
                Some(secrets(&context, &mut resolver, &replacement.secrets).await?)
            }
        };
        let script_models = match &request.script_models {
            None => None,
            Some(replacement) => {
                Some(script_models(&context, &mut resolver, &replacement.script_models).await?)
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
        let updated = context
            .store()
            .agent_update(&write, agent, expected, changes, render("agent.updated"))
            .await;
        context.answer(resolver.finish(updated)?, no_wake, convert::agent).await
    }

    async fn delete_agent(
        &self,
        request: Request<DeleteAgentRequest>,
    ) -> Result<Response<DeleteAgentResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("DeleteAgent", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let agent = context.store().agent_resolve(context.organization(), &request.agent).await;
        let agent = resolver.resolve(&request.agent, agent, AgentId::from_uuid)?;
        let render = |agent: &Agent| events::deletion_output("agent.deleted", agent.id);
        let deleted = context.store().agent_delete(&write, agent, render).await;
        context.answer(resolver.finish(deleted)?, no_wake, |_| DeleteAgentResponse {}).await
    }
}

/// 0 means the default.
fn compact_at_or_default(percent: u32) -> u32 {
    if percent == 0 { construct_domain::context::DEFAULT_COMPACT_AT_PERCENT } else { percent }
}
