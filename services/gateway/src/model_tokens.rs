//! `ModelTokenService`. A token is signed here and not stored.

use std::time::Duration;

use construct_domain::TaskId;
use construct_proto::v1::{
    CreateModelTokenRequest, ModelToken, model_token_service_server::ModelTokenService,
};
use construct_runtime::{clock, model_token};
use construct_wire::convert;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{api::Api, quotas::QuotaRequest, status};

/// Default lifetime of a token.
const DEFAULT_LIFETIME: Duration = Duration::from_secs(3600);

#[tonic::async_trait]
impl ModelTokenService for Api {
    async fn create_model_token(
        &self,
        request: Request<CreateModelTokenRequest>,
    ) -> Result<Response<ModelToken>, Status> {
        let (context, request) = self.begin_request(request)?;
        let keys = self.token_keys()?;
        self.check_quotas(&context, None, QuotaRequest::WORK).await?;
        let mut models = Vec::with_capacity(request.models.len());
        for model in &request.models {
            let found = context.store().model_find(context.organization(), model).await;
            let name = found.map_err(|error| status::for_reference(model, error))?.name;
            if !models.contains(&name) {
                models.push(name);
            }
        }
        if !request.task.is_empty() {
            let task: TaskId = request
                .task
                .parse()
                .map_err(|_| Status::not_found(format!("there is no task {}", request.task)))?;
            let found = context.store().task_get(context.organization(), task).await;
            found.map_err(|error| status::for_reference(&request.task, error))?;
        }
        let life = request
            .expires_in
            .and_then(|life| Duration::try_from(life).ok())
            .unwrap_or(DEFAULT_LIFETIME);
        let token = model_token::ModelToken {
            id: Uuid::now_v7().to_string(),
            organization: context.organization().to_string(),
            task: request.task,
            key: context.caller().key.map(|key| key.to_string()).unwrap_or_default(),
            models,
            budget_pico_usd: request.budget_pico_usd,
            expires_at: clock::now() + life,
        };
        context.touch(&token.id);
        Ok(Response::new(ModelToken {
            token: token.sign(keys).expose().to_owned(),
            id: token.id,
            models: token.models,
            task_id: token.task,
            budget_pico_usd: token.budget_pico_usd,
            expires_at: Some(convert::time(token.expires_at)),
        }))
    }
}
