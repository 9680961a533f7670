//! `KeyService`. What opens a door is in one answer and nowhere else.

use std::time::Duration;

use construct_domain::{
    ApiKeyId, UserId,
    access::{Role, Scope},
};
use construct_proto::v1::{
    self, ApiKeyLimits, ApiKeySpec, ApiKeyUse, CreateApiKeyRequest, CreateApiKeyResponse,
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
    api::{Api, Entry, nobody},
    convert,
    identity::credential,
    organizations::silent,
    page::Column,
    status, validate,
};

/// How long a set-up code can be exchanged when nobody says.
pub(crate) const CODE_LIFE: Duration = Duration::from_secs(15 * 60);

/// Whose keys a caller sees and revokes: their own, or everybody's.
fn reach(entry: &Entry) -> Option<UserId> {
    (entry.caller().role < Role::Admin).then(|| entry.user())
}

/// How long something lasts, where the request says.
fn life(duration: Option<prost_types::Duration>) -> Option<Duration> {
    duration?.try_into().ok()
}

/// What a key may do at most.
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

/// Refuses who came with a key that has limits: another key would have none of them, or its own.
///
/// # Errors
/// `PERMISSION_DENIED`.
pub(crate) fn unlimited(entry: &Entry) -> Result<(), Status> {
    if entry.caller().limits == Limits::default() {
        return Ok(());
    }
    Err(Status::permission_denied("an API key that has limits makes no keys, and changes none"))
}

/// What a key of this description may do, when the caller may give it.
fn granted(entry: &Entry, spec: &ApiKeySpec) -> Result<(Role, Vec<Scope>), Status> {
    unlimited(entry)?;
    let role = show::to_role(spec.role()).unwrap_or(entry.caller().role);
    let scopes: Vec<Scope> = spec.scopes.iter().filter_map(|scope| Scope::parse(scope)).collect();
    if entry.caller().may_give(role, &scopes) {
        return Ok((role, scopes));
    }
    Err(Status::permission_denied("nobody may make a key that may more than they may themselves"))
}

/// Until when what a caller makes may be good: no longer than the key they came with. A person who
/// has logged in makes keys that last: their token is short because it is renewed, and the keys go
/// with their membership.
fn capped(entry: &Entry, wanted: Option<Timestamp>) -> Option<Timestamp> {
    let caller = entry.caller();
    match (wanted, caller.until.filter(|_| caller.key.is_some())) {
        (Some(wanted), Some(until)) => Some(wanted.min(until)),
        (wanted, until) => wanted.or(until),
    }
}

#[tonic::async_trait]
impl KeyService for Api {
    async fn create_api_key(
        &self,
        request: Request<CreateApiKeyRequest>,
    ) -> Result<Response<CreateApiKeyResponse>, Status> {
        let (entry, request) = self.enter(request)?;
        let spec = request.spec.unwrap_or_default();
        let life = life(request.expires_in);
        let (role, scopes) = granted(&entry, &spec)?;
        let (key, secret) = credential::mint(credential::KEY)?;
        let id = ApiKeyId::from_uuid(Uuid::now_v7());
        entry.touch(&id.to_string());
        let write = entry.plain_write();
        let new = NewApiKey {
            id,
            name: spec.name,
            secret,
            role,
            scopes,
            user: entry.user(),
            expires_at: capped(&entry, life.map(|life| write.now + life)),
            limits: limits(spec.limits),
        };
        let made = entry.store().api_key_create(&write, new).await.map_err(status::of_store)?;
        tracing::info!(key = %made.id, by = entry.name(), "an API key was made");
        Ok(Response::new(CreateApiKeyResponse { api_key: Some(show::api_key(&made)), key }))
    }

    async fn get_api_key(
        &self,
        request: Request<GetApiKeyRequest>,
    ) -> Result<Response<v1::ApiKey>, Status> {
        let (entry, request) = self.enter(request)?;
        let id = validate::id(&request.api_key)?;
        let found = entry.store().api_key_get(entry.organization(), id, reach(&entry)).await;
        let found = found.map_err(|error| status::about(&request.api_key, error))?;
        let periods = self.quotas().periods(clock::now());
        let place = self.sum(entry.organization()).await?;
        let counts = entry
            .store()
            .quota_key_counts(entry.organization(), CountSelection::ALL, &periods)
            .await;
        drop(place);
        let used = counts.map_err(status::of_store)?.get(&id).copied().unwrap_or_default();
        let used = ApiKeyUse {
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
        let (entry, mut request) = self.enter(request)?;
        let (id, limits) = (validate::id(&request.api_key)?, limits(request.limits));
        unlimited(&entry)?;
        let write = entry.write("UpdateApiKey", &mut request);
        let expected = (request.revision != 0).then_some(request.revision);
        let (which, by) = ((id, reach(&entry)), entry.caller().role);
        let render = |key: &_| silent(&show::api_key(key));
        let written =
            entry.store().api_key_set_limits(&write, which, (limits, expected), by, render).await;
        let written = written.map_err(|error| status::about(&request.api_key, error))?;
        tracing::info!(key = %id, by = entry.name(), "the limits of an API key were changed");
        entry.answer(written, nobody, show::api_key).await
    }

    async fn list_api_keys(
        &self,
        request: Request<ListApiKeysRequest>,
    ) -> Result<Response<ListApiKeysResponse>, Status> {
        let (entry, _, page) = self.enter_list(request, &[Column::CreatedAt])?;
        let found =
            entry.store().api_key_list(entry.organization(), reach(&entry), &page.query()).await;
        let found = found.map_err(status::of_store)?;
        let (api_keys, info) = page.cut(&found, show::api_key, |key| key.cursor(page.key()));
        Ok(Response::new(ListApiKeysResponse { api_keys, page: Some(info) }))
    }

    async fn revoke_api_key(
        &self,
        request: Request<RevokeApiKeyRequest>,
    ) -> Result<Response<v1::ApiKey>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let id = validate::id(&request.api_key)?;
        let write = entry.write("RevokeApiKey", &mut request);
        let render = |key: &_| silent(&show::api_key(key));
        let written = entry
            .store()
            .api_key_revoke(&write, id, reach(&entry), entry.caller().role, render)
            .await;
        let written = written.map_err(|error| status::about(&request.api_key, error))?;
        tracing::info!(key = %id, by = entry.name(), "an API key was revoked");
        entry.answer(written, nobody, show::api_key).await
    }

    async fn create_setup_code(
        &self,
        request: Request<CreateSetupCodeRequest>,
    ) -> Result<Response<SetupCode>, Status> {
        let (entry, request) = self.enter(request)?;
        let spec = request.spec.unwrap_or_default();
        let (life, key_life) = (life(request.expires_in), life(request.key_expires_in));
        let (role, scopes) = granted(&entry, &spec)?;
        let (code, secret) = credential::mint(credential::CODE)?;
        let write = entry.plain_write();
        let new = NewSetupCode {
            secret,
            name: spec.name,
            role,
            scopes,
            user: entry.user(),
            made_by: entry.caller().key,
            key_expires_at: capped(&entry, key_life.map(|life| write.now + life)),
            expires_at: write.now + life.unwrap_or(CODE_LIFE),
            limits: limits(spec.limits),
        };
        entry.store().setup_code_create(&write, &new).await.map_err(status::of_store)?;
        Ok(Response::new(SetupCode { code, expires_at: Some(convert::time(new.expires_at)) }))
    }

    async fn exchange_setup_code(
        &self,
        request: Request<ExchangeSetupCodeRequest>,
    ) -> Result<Response<CreateApiKeyResponse>, Status> {
        let (visit, request) = self.visit(request)?;
        let hash = credential::digest(&request.code);
        let (key, secret) = credential::mint(credential::KEY)?;
        let id = ApiKeyId::from_uuid(Uuid::now_v7());
        let made = visit
            .store()
            .setup_code_exchange(&hash, id, &secret, visit.audit().as_ref(), clock::now())
            .await;
        match made.map_err(status::of_store) {
            Ok(Some(made)) => {
                tracing::info!(key = %made.id, "a set-up code was exchanged for an API key");
                Ok(Response::new(CreateApiKeyResponse { api_key: Some(show::api_key(&made)), key }))
            }
            Ok(None) => Err(Status::unauthenticated("the set-up code is not valid")),
            Err(status) => Err(status),
        }
    }
}
