//! `KeyService`. A secret is in one response and nowhere else.

use std::time::Duration;

use construct_domain::{
    ApiKeyId, UserId,
    access::{Role, Scope},
};
use construct_proto::v1::{
    self, ApiKeyLimits, ApiKeySpec, ApiKeyUsage, CreateApiKeyRequest, CreateApiKeyResponse,
    CreateSetupCodeRequest, ExchangeSetupCodeRequest, GetApiKeyRequest, ListApiKeysRequest,
    ListApiKeysResponse, RevokeApiKeyRequest, SetupCode, UpdateApiKeyRequest,
    key_service_server::KeyService,
};
use construct_runtime::clock;
use construct_store::{
    CountSelection, Limits,
    identity::{NewApiKey, NewSetupCode},
};
use construct_wire::identity as show;
use jiff::Timestamp;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, CallerContext, no_wake},
    convert,
    identity::credential,
    organizations::response_output,
    page::Column,
    status, validate,
};

/// Default lifetime of a set-up code.
pub(crate) const SETUP_CODE_LIFETIME: Duration = Duration::from_secs(15 * 60);

/// The user whose keys a caller sees and revokes: their own; `None`: everybody's.
fn visible_user(context: &CallerContext) -> Option<UserId> {
    (context.caller().role < Role::Admin).then(|| context.user())
}

/// A duration of a request, if given.
fn positive_duration(duration: Option<prost_types::Duration>) -> Option<Duration> {
    duration?.try_into().ok()
}

/// The limits of a key.
fn limits(limits: Option<ApiKeyLimits>) -> Limits {
    let limits = limits.unwrap_or_default();
    Limits {
        requests_per_minute: limits.requests_per_minute,
        tasks_per_day: limits.tasks_per_day,
        runs_per_day: limits.runs_per_day,
        tokens_per_day: limits.tokens_per_day,
        spend_per_month_pico_usd: limits.spend_per_month_pico_usd,
        storage_bytes: limits.storage_bytes,
        ..Limits::default()
    }
}

/// Refuses callers whose key has limits: another key would have none of them, or its own.
///
/// # Errors
/// `PERMISSION_DENIED`.
pub(crate) fn ensure_unlimited_key(context: &CallerContext) -> Result<(), Status> {
    if context.caller().limits == Limits::default() {
        return Ok(());
    }
    Err(Status::permission_denied("an API key with limits may not create or change keys"))
}

/// The role and scopes of a new key, if the caller may grant them.
fn check_grant(context: &CallerContext, spec: &ApiKeySpec) -> Result<(Role, Vec<Scope>), Status> {
    ensure_unlimited_key(context)?;
    let role = show::to_role(spec.role()).unwrap_or(context.caller().role);
    let scopes: Vec<Scope> = spec.scopes.iter().filter_map(|scope| Scope::parse(scope)).collect();
    if context.caller().may_grant(role, &scopes) {
        return Ok((role, scopes));
    }
    Err(Status::permission_denied(
        "insufficient permissions: a key may not have more than its creator",
    ))
}

/// The expiry of what a caller creates: not later than that of the caller's key. A person who
/// logged in creates keys that last: their token is short-lived because it is renewed, and the keys
/// are revoked with their membership.
fn cap_expiry(context: &CallerContext, requested: Option<Timestamp>) -> Option<Timestamp> {
    let caller = context.caller();
    match (requested, caller.until.filter(|_| caller.key.is_some())) {
        (Some(requested), Some(until)) => Some(requested.min(until)),
        (requested, until) => requested.or(until),
    }
}

#[tonic::async_trait]
impl KeyService for Api {
    async fn create_api_key(
        &self,
        request: Request<CreateApiKeyRequest>,
    ) -> Result<Response<CreateApiKeyResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let spec = request.spec.unwrap_or_default();
        let lifetime = positive_duration(request.expires_in);
        let (role, scopes) = check_grant(&context, &spec)?;
        let (key, secret) = credential::mint(credential::KEY)?;
        let id = ApiKeyId::from_uuid(Uuid::now_v7());
        context.touch(&id.to_string());
        let write = context.plain_write();
        let new = NewApiKey {
            id,
            name: spec.name,
            secret,
            role,
            scopes,
            user: context.user(),
            expires_at: cap_expiry(&context, lifetime.map(|lifetime| write.now + lifetime)),
            limits: limits(spec.limits),
        };
        let created =
            context.store().api_key_create(&write, new).await.map_err(status::from_store)?;
        tracing::info!(key = %created.id, by = context.name(), "API key created");
        Ok(Response::new(CreateApiKeyResponse { api_key: Some(show::api_key(&created)), key }))
    }

    async fn get_api_key(
        &self,
        request: Request<GetApiKeyRequest>,
    ) -> Result<Response<v1::ApiKey>, Status> {
        let (context, request) = self.begin_request(request)?;
        let id = validate::id(&request.api_key)?;
        let found =
            context.store().api_key_get(context.organization(), id, visible_user(&context)).await;
        let found = found.map_err(|error| status::for_reference(&request.api_key, error))?;
        let periods = self.quotas().periods(clock::now());
        let permit = self.acquire_sum_permit(context.organization()).await?;
        let counts = context
            .store()
            .quota_key_counts(context.organization(), CountSelection::ALL, &periods)
            .await;
        drop(permit);
        let used = counts.map_err(status::from_store)?.get(&id).copied().unwrap_or_default();
        let used = ApiKeyUsage {
            tasks: used.tasks,
            runs: used.runs,
            tokens: used.tokens,
            spend_pico_usd: used.spend_pico_usd,
            storage_bytes: used.storage_bytes,
        };
        Ok(Response::new(v1::ApiKey { used: Some(used), ..show::api_key(&found) }))
    }

    async fn update_api_key(
        &self,
        request: Request<UpdateApiKeyRequest>,
    ) -> Result<Response<v1::ApiKey>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let (id, limits) = (validate::id(&request.api_key)?, limits(request.limits));
        ensure_unlimited_key(&context)?;
        let write = context.write("UpdateApiKey", &mut request);
        let expected = (request.revision != 0).then_some(request.revision);
        let (which, by) = ((id, visible_user(&context)), context.caller().role);
        let render = |key: &_| response_output(&show::api_key(key));
        let written =
            context.store().api_key_set_limits(&write, which, (limits, expected), by, render).await;
        let written = written.map_err(|error| status::for_reference(&request.api_key, error))?;
        tracing::info!(key = %id, by = context.name(), "API key limits changed");
        context.answer(written, no_wake, show::api_key).await
    }

    async fn list_api_keys(
        &self,
        request: Request<ListApiKeysRequest>,
    ) -> Result<Response<ListApiKeysResponse>, Status> {
        let (context, _, page) = self.begin_list_request(request, &[Column::CreatedAt])?;
        let found = context
            .store()
            .api_key_list(context.organization(), visible_user(&context), &page.query())
            .await;
        let found = found.map_err(status::from_store)?;
        let (api_keys, info) = page.cut(&found, show::api_key, |key| key.cursor(page.key()));
        Ok(Response::new(ListApiKeysResponse { api_keys, page: Some(info) }))
    }

    async fn revoke_api_key(
        &self,
        request: Request<RevokeApiKeyRequest>,
    ) -> Result<Response<v1::ApiKey>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let id = validate::id(&request.api_key)?;
        let write = context.write("RevokeApiKey", &mut request);
        let render = |key: &_| response_output(&show::api_key(key));
        let written = context
            .store()
            .api_key_revoke(&write, id, visible_user(&context), context.caller().role, render)
            .await;
        let written = written.map_err(|error| status::for_reference(&request.api_key, error))?;
        tracing::info!(key = %id, by = context.name(), "API key revoked");
        context.answer(written, no_wake, show::api_key).await
    }

    async fn create_setup_code(
        &self,
        request: Request<CreateSetupCodeRequest>,
    ) -> Result<Response<SetupCode>, Status> {
        let (context, request) = self.begin_request(request)?;
        let spec = request.spec.unwrap_or_default();
        let (lifetime, key_lifetime) =
            (positive_duration(request.expires_in), positive_duration(request.key_expires_in));
        let (role, scopes) = check_grant(&context, &spec)?;
        let (code, secret) = credential::mint(credential::CODE)?;
        let write = context.plain_write();
        let new = NewSetupCode {
            secret,
            name: spec.name,
            role,
            scopes,
            user: context.user(),
            made_by: context.caller().key,
            key_expires_at: cap_expiry(&context, key_lifetime.map(|lifetime| write.now + lifetime)),
            expires_at: write.now + lifetime.unwrap_or(SETUP_CODE_LIFETIME),
            limits: limits(spec.limits),
        };
        context.store().setup_code_create(&write, &new).await.map_err(status::from_store)?;
        Ok(Response::new(SetupCode { code, expires_at: Some(convert::time(new.expires_at)) }))
    }

    async fn exchange_setup_code(
        &self,
        request: Request<ExchangeSetupCodeRequest>,
    ) -> Result<Response<CreateApiKeyResponse>, Status> {
        let (context, request) = self.begin_public_request(request)?;
        let hash = credential::digest(&request.code);
        let (key, secret) = credential::mint(credential::KEY)?;
        let id = ApiKeyId::from_uuid(Uuid::now_v7());
        let created = context
            .store()
            .setup_code_exchange(&hash, id, &secret, context.audit().as_ref(), clock::now())
            .await;
        match created.map_err(status::from_store) {
            Ok(Some(created)) => {
                tracing::info!(key = %created.id, "set-up code exchanged for an API key");
                Ok(Response::new(CreateApiKeyResponse {
                    api_key: Some(show::api_key(&created)),
                    key,
                }))
            }
            Ok(None) => Err(Status::unauthenticated("the set-up code is invalid")),
            Err(status) => Err(status),
        }
    }
}
