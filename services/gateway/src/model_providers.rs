//! `ModelProviderService`. API keys are encrypted before they reach the store, and are never
//! returned.

use construct_domain::ModelProviderId;
use construct_proto::v1::{
    self, CheckModelProviderRequest, CheckModelProviderResponse, CreateModelProviderRequest,
    DeleteModelProviderRequest, DeleteModelProviderResponse, GetModelProviderRequest,
    ListModelProvidersRequest, ListModelProvidersResponse, ListVendorModelsRequest,
    ListVendorModelsResponse, UpdateModelProviderRequest, event::Payload,
    model_provider_service_server::ModelProviderService,
};
use construct_store::{
    Error, KeyLimits, ModelProvider, ModelProviderChanges, ModelProviderFilter, NewModelProvider,
    SealedSecret, WriteOutput,
};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, ReferenceResolver, no_wake},
    convert, events,
    page::Column,
    status,
    validate::requests,
};

fn render(kind: &'static str) -> impl FnOnce(&ModelProvider) -> WriteOutput + Send {
    move |provider| {
        let provider = convert::model_provider(provider);
        events::write_output(kind, Payload::ModelProvider(provider.clone()), &provider)
    }
}

/// A list item: without the script, which may be larger than the rest of the list.
fn list_item(provider: &ModelProvider) -> v1::ModelProvider {
    let mut provider = convert::model_provider(provider);
    if let Some(spec) = &mut provider.spec {
        spec.script.clear();
    }
    provider
}

fn non_empty(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

impl Api {
    /// Encrypts a key for its record; an empty key means none.
    fn seal(&self, id: ModelProviderId, key: &str) -> Result<Option<SealedSecret>, Status> {
        if key.is_empty() {
            return Ok(None);
        }
        let sealed = self.keyring().seal(&id.to_string(), key.as_bytes());
        sealed
            .map(Some)
            .map_err(|error| status::internal("an API key could not be encrypted", &error))
    }

    fn seal_all(&self, id: ModelProviderId, keys: &[String]) -> Result<Vec<SealedSecret>, Status> {
        Ok(keys
            .iter()
            .map(|key| self.seal(id, key))
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .flatten()
            .collect())
    }
}

#[tonic::async_trait]
impl ModelProviderService for Api {
    async fn create_model_provider(
        &self,
        request: Request<CreateModelProviderRequest>,
    ) -> Result<Response<v1::ModelProvider>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        let kind = requests::create_model_provider(&request)?;
        let write = context.write("CreateModelProvider", &mut request);
        let spec = request.spec.unwrap_or_default();
        context.check_provider(kind, &spec.base_url)?;
        let id = ModelProviderId::from_uuid(Uuid::now_v7());
        let new = NewModelProvider {
            id,
            name: spec.name,
            kind,
            base_url: spec.base_url,
            script: non_empty(spec.script),
            key: self.seal(id, &spec.api_key)?,
            additional_keys: self.seal_all(id, &spec.additional_api_keys)?,
            limits: KeyLimits {
                max_concurrency: spec.max_concurrency,
                requests_per_minute: spec.requests_per_minute,
                tokens_per_minute: spec.tokens_per_minute,
            },
        };
        let written =
            context.store().model_provider_create(&write, new, render("provider.created")).await;
        context.answer(written.map_err(status::from_store)?, no_wake, convert::model_provider).await
    }

    async fn get_model_provider(
        &self,
        request: Request<GetModelProviderRequest>,
    ) -> Result<Response<v1::ModelProvider>, Status> {
        let (context, GetModelProviderRequest { model_provider }) = self.begin_request(request)?;
        let found =
            context.store().model_provider_find(context.organization(), &model_provider).await;
        let provider = found.map_err(|error| status::for_reference(&model_provider, error))?;
        Ok(Response::new(convert::model_provider(&provider)))
    }

    async fn list_model_providers(
        &self,
        request: Request<ListModelProvidersRequest>,
    ) -> Result<Response<ListModelProvidersResponse>, Status> {
        let (context, request, page) = self.begin_list_request(request, &Column::NAMED)?;
        let filter = request.filter.unwrap_or_default();
        let kind = convert::to_provider_kind(filter.r#type());
        let filter = ModelProviderFilter { kind, name_prefix: filter.name_prefix };
        let found = context
            .store()
            .model_provider_list(context.organization(), &filter, &page.query())
            .await;
        let providers = found.map_err(status::from_store)?;
        let (model_providers, info) =
            page.cut(&providers, list_item, |provider| provider.cursor(page.key()));
        Ok(Response::new(ListModelProvidersResponse { model_providers, page: Some(info) }))
    }

    async fn update_model_provider(
        &self,
        request: Request<UpdateModelProviderRequest>,
    ) -> Result<Response<v1::ModelProvider>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        requests::update_model_provider(&request)?;
        let write = context.write("UpdateModelProvider", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let mut expected = (request.revision != 0).then_some(request.revision);
        let found = context
            .store()
            .model_provider_find(context.organization(), &request.model_provider)
            .await;
        let provider = match found {
            Ok(provider) => {
                let id = resolver.resolve(
                    &request.model_provider,
                    Ok(provider.id),
                    ModelProviderId::from_uuid,
                )?;
                let mut checked = requests::check_model_provider_update(&request, &provider);
                if request.base_url.is_some() {
                    checked = checked
                        .and_then(|()| context.check_provider(provider.kind, request.base_url()));
                }
                let keeps_keys = request.api_key.is_none() || request.additional_api_keys.is_none();
                if request.base_url.is_some() && keeps_keys {
                    // Whether the key may stay was decided for the provider as it was read.
                    let revision = *expected.get_or_insert(provider.revision);
                    if revision != provider.revision {
                        checked = Err(status::from_store(Error::Conflict));
                    }
                }
                match checked {
                    Ok(()) => id,
                    Err(reason) => resolver.reject(reason, ModelProviderId::from_uuid)?,
                }
            }
            Err(error) => {
                resolver.resolve(&request.model_provider, Err(error), ModelProviderId::from_uuid)?
            }
        };
        let changes = ModelProviderChanges {
            name: request.name,
            base_url: request.base_url,
            script: request.script.map(non_empty),
            key: request.api_key.map(|key| self.seal(provider, &key)).transpose()?,
            additional_keys: request
                .additional_api_keys
                .map(|keys| self.seal_all(provider, &keys.keys))
                .transpose()?,
            max_concurrency: request.max_concurrency,
            requests_per_minute: request.requests_per_minute,
            tokens_per_minute: request.tokens_per_minute,
        };
        let updated = context
            .store()
            .model_provider_update(&write, provider, expected, changes, render("provider.updated"))
            .await;
        context.answer(resolver.finish(updated)?, no_wake, convert::model_provider).await
    }

    async fn delete_model_provider(
        &self,
        request: Request<DeleteModelProviderRequest>,
    ) -> Result<Response<DeleteModelProviderResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("DeleteModelProvider", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let provider = context
            .store()
            .model_provider_resolve(context.organization(), &request.model_provider)
            .await;
        let provider =
            resolver.resolve(&request.model_provider, provider, ModelProviderId::from_uuid)?;
        let render =
            |provider: &ModelProvider| events::deletion_output("provider.deleted", provider.id);
        let deleted = context.store().model_provider_delete(&write, provider, render).await;
        context.answer(resolver.finish(deleted)?, no_wake, |_| DeleteModelProviderResponse {}).await
    }

    async fn check_model_provider(
        &self,
        request: Request<CheckModelProviderRequest>,
    ) -> Result<Response<CheckModelProviderResponse>, Status> {
        let (context, CheckModelProviderRequest { model_provider }) =
            self.begin_request(request)?;
        let found =
            context.store().model_provider_find(context.organization(), &model_provider).await;
        let provider = found.map_err(|error| status::for_reference(&model_provider, error))?;
        let keys = context.backend.providers.check(&provider, context.deadline).await?;
        Ok(Response::new(CheckModelProviderResponse { keys }))
    }

    async fn list_vendor_models(
        &self,
        request: Request<ListVendorModelsRequest>,
    ) -> Result<Response<ListVendorModelsResponse>, Status> {
        let (context, ListVendorModelsRequest { model_provider }) = self.begin_request(request)?;
        let found =
            context.store().model_provider_find(context.organization(), &model_provider).await;
        let provider = found.map_err(|error| status::for_reference(&model_provider, error))?;
        let models = context.backend.providers.models(&provider, context.deadline).await?;
        Ok(Response::new(ListVendorModelsResponse { models }))
    }
}
