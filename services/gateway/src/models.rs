//! `ModelService`.

use construct_domain::{ModelId, ModelProviderId, money::Prices};
use construct_proto::v1::{
    self, CreateModelRequest, DeleteModelRequest, DeleteModelResponse, GetModelRequest,
    ListCatalogModelsRequest, ListCatalogModelsResponse, ListModelsRequest, ListModelsResponse,
    UpdateModelRequest, event::Payload, model_service_server::ModelService,
};
use construct_store::{
    Fallback, Model, ModelChanges, ModelFilter, ModelProviderKind, NewModel, PricesSource,
    WriteOutput,
};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, CallerContext, ReferenceResolver, no_wake},
    catalog, convert, events,
    page::Column,
    status,
};

/// Default context window, in tokens.
const DEFAULT_CONTEXT_WINDOW: i64 = 128_000;
/// Default maximum output, in tokens.
const DEFAULT_MAX_OUTPUT_TOKENS: i64 = 8192;

fn render(kind: &'static str) -> impl FnOnce(&Model) -> WriteOutput + Send {
    move |model| {
        let model = convert::model(model);
        events::write_output(kind, Payload::Model(model.clone()), &model)
    }
}

/// The first nonzero value.
fn first_nonzero(value: i64, catalog_model: i64, default: i64) -> i64 {
    [value, catalog_model].into_iter().find(|&value| value != 0).unwrap_or(default)
}

/// The prices of a new model, and their source.
fn prices(
    given: Option<v1::Prices>,
    kind: Option<ModelProviderKind>,
    catalog_model: Option<&v1::CatalogModel>,
) -> (Prices, PricesSource) {
    match (given, catalog_model.and_then(|model| model.prices)) {
        (Some(given), _) => (convert::to_prices(given), PricesSource::Given),
        (None, Some(catalog_model)) => (convert::to_prices(catalog_model), PricesSource::Catalog),
        (None, None)
            if matches!(
                kind,
                Some(
                    ModelProviderKind::Local
                        | ModelProviderKind::Ollama
                        | ModelProviderKind::Scripted
                )
            ) =>
        {
            (Prices::default(), PricesSource::Free)
        }
        (None, None) => (Prices::default(), PricesSource::Unknown),
    }
}

impl CallerContext {
    /// Resolves the fallbacks of a model.
    async fn fallbacks(
        &self,
        resolver: &mut ReferenceResolver,
        named: &[v1::ModelFallback],
    ) -> Result<Vec<Fallback>, Status> {
        let mut fallbacks: Vec<Fallback> = Vec::with_capacity(named.len());
        for v1::ModelFallback { model, weight } in named {
            let found = self.store().model_resolve(self.organization(), model).await;
            let found = resolver.resolve(model, found, ModelId::from_uuid)?;
            // Also finds a model that is named once by id and once by name.
            if fallbacks
                .iter()
                .any(|fallback| fallback.model == found && found.uuid() != Uuid::nil())
            {
                resolver.reject(
                    Status::invalid_argument(format!("fallbacks: `{model}` is listed twice")),
                    ModelId::from_uuid,
                )?;
            }
            fallbacks.push(Fallback { model: found, name: String::new(), weight: *weight });
        }
        Ok(fallbacks)
    }
}

#[tonic::async_trait]
impl ModelService for Api {
    async fn create_model(
        &self,
        request: Request<CreateModelRequest>,
    ) -> Result<Response<v1::Model>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("CreateModel", &mut request);
        let spec = request.spec.unwrap_or_default();
        let mut resolver = ReferenceResolver::new(&write);
        let provider =
            context.store().model_provider_find(context.organization(), &spec.provider).await;
        let kind = provider.as_ref().ok().map(|provider| provider.kind);
        let provider = resolver.resolve(
            &spec.provider,
            provider.map(|provider| provider.id),
            ModelProviderId::from_uuid,
        )?;
        let fallbacks = context.fallbacks(&mut resolver, &spec.fallbacks).await?;
        let vendor_model =
            if spec.vendor_model.is_empty() { spec.name.clone() } else { spec.vendor_model };
        let catalog_model =
            kind.and_then(|kind| catalog::find_model(convert::provider_type(kind), &vendor_model));
        let (prices, prices_source) = prices(spec.prices, kind, catalog_model);
        let new = NewModel {
            id: ModelId::from_uuid(Uuid::now_v7()),
            provider,
            vendor_model,
            name: spec.name,
            context_window: first_nonzero(
                spec.context_window,
                catalog_model.map_or(0, |model| model.context_window),
                DEFAULT_CONTEXT_WINDOW,
            ),
            max_output_tokens: first_nonzero(
                spec.max_output_tokens,
                catalog_model.map_or(0, |model| model.max_output_tokens),
                DEFAULT_MAX_OUTPUT_TOKENS,
            ),
            prices,
            prices_source,
            tool_calling: spec
                .tool_calling
                .unwrap_or(catalog_model.is_none_or(|model| model.tool_calling)),
            fallbacks,
            hedge_after_ms: spec.hedge_after.map_or(0, convert::to_hedge_after),
        };
        let written = resolver
            .finish(context.store().model_create(&write, new, render("model.created")).await)?;
        context.answer(written, no_wake, convert::model).await
    }

    async fn get_model(
        &self,
        request: Request<GetModelRequest>,
    ) -> Result<Response<v1::Model>, Status> {
        let (context, GetModelRequest { model }) = self.begin_request(request)?;
        let found = context.store().model_find(context.organization(), &model).await;
        let model = found.map_err(|error| status::for_reference(&model, error))?;
        let mut response = convert::model(&model);
        if let Some(status) = &mut response.status {
            status.breaker = context.backend.providers.breaker(&model, context.deadline).await;
        }
        Ok(Response::new(response))
    }

    async fn list_models(
        &self,
        request: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        let (context, request, page) = self.begin_list_request(request, &Column::NAMED)?;
        let organization = context.organization();
        let filter = request.filter.unwrap_or_default();
        let provider = match filter.provider.as_str() {
            "" => None,
            provider => {
                let found = context.store().model_provider_resolve(organization, provider).await;
                Some(found.map_err(|error| status::for_reference(provider, error))?)
            }
        };
        let filter = ModelFilter { provider, name_prefix: filter.name_prefix };
        let found = context.store().model_list(organization, &filter, &page.query()).await;
        let models = found.map_err(status::from_store)?;
        let (models, info) = page.cut(&models, convert::model, |model| model.cursor(page.key()));
        Ok(Response::new(ListModelsResponse { models, page: Some(info) }))
    }

    async fn update_model(
        &self,
        request: Request<UpdateModelRequest>,
    ) -> Result<Response<v1::Model>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("UpdateModel", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let model = context.store().model_resolve(context.organization(), &request.model).await;
        let model = resolver.resolve(&request.model, model, ModelId::from_uuid)?;
        let fallbacks = match &request.fallbacks {
            None => None,
            Some(named) => {
                let fallbacks = context.fallbacks(&mut resolver, &named.fallbacks).await?;
                if fallbacks
                    .iter()
                    .any(|fallback| fallback.model == model && model.uuid() != Uuid::nil())
                {
                    let reason =
                        Status::invalid_argument("fallbacks: a model cannot fall back to itself");
                    resolver.reject(reason, ModelId::from_uuid)?;
                }
                Some(fallbacks)
            }
        };
        let changes = ModelChanges {
            name: request.name,
            vendor_model: request.vendor_model,
            context_window: request
                .context_window
                .map(|tokens| first_nonzero(tokens, 0, DEFAULT_CONTEXT_WINDOW)),
            max_output_tokens: request
                .max_output_tokens
                .map(|tokens| first_nonzero(tokens, 0, DEFAULT_MAX_OUTPUT_TOKENS)),
            prices: request.prices.map(convert::to_prices),
            tool_calling: request.tool_calling,
            fallbacks,
            hedge_after_ms: request.hedge_after.map(convert::to_hedge_after),
        };
        let expected = (request.revision != 0).then_some(request.revision);
        let updated = context
            .store()
            .model_update(&write, model, expected, changes, render("model.updated"))
            .await;
        context.answer(resolver.finish(updated)?, no_wake, convert::model).await
    }

    async fn delete_model(
        &self,
        request: Request<DeleteModelRequest>,
    ) -> Result<Response<DeleteModelResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("DeleteModel", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let model = context.store().model_resolve(context.organization(), &request.model).await;
        let model = resolver.resolve(&request.model, model, ModelId::from_uuid)?;
        let render = |model: &Model| events::deletion_output("model.deleted", model.id);
        let deleted = context.store().model_delete(&write, model, render).await;
        context.answer(resolver.finish(deleted)?, no_wake, |_| DeleteModelResponse {}).await
    }
    async fn list_catalog_models(
        &self,
        request: Request<ListCatalogModelsRequest>,
    ) -> Result<Response<ListCatalogModelsResponse>, Status> {
        let (_entry, request) = self.begin_request(request)?;
        let requested = request.r#type();
        let all = requested == v1::ModelProviderType::Unspecified;
        let models = catalog::models()
            .iter()
            .filter(|model| all || model.r#type() == requested)
            .cloned()
            .collect();
        Ok(Response::new(ListCatalogModelsResponse { models }))
    }
}
