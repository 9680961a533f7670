//! Agents, models and model providers.

use construct_domain::{OrganizationId, compute};
use construct_proto::v1::{
    AgentSpec, CreateAgentRequest, CreateModelProviderRequest, CreateModelRequest,
    ListAgentsRequest, ListModelProvidersRequest, ListModelsRequest, ModelFallback,
    ModelParameters, ModelProviderSpec, ModelProviderType, ModelSpec, Prices, UpdateAgentRequest,
    UpdateModelProviderRequest, UpdateModelRequest,
};
use construct_store::{Cursor, ModelProvider, ModelProviderKind};
use tonic::{Status, codegen::http::Uri};

use super::{policies::policy, secrets::agent_secrets};
use crate::{
    convert,
    page::{Column, Page},
    validate::Violations,
};

/// Models that an agent's scripts may call beside its own, at most.
const SCRIPT_MODELS: usize = 20;

pub(super) const ORDERS: [Column; 3] = [Column::CreatedAt, Column::UpdatedAt, Column::Name];
pub(super) const DESCRIPTION_CHARS: usize = 1024;
pub(super) const INSTRUCTIONS_BYTES: usize = 64 * 1024;
pub(super) const MAX_TURNS: u32 = 1000;
pub(super) const STOP_SEQUENCES: usize = 8;
pub(super) const STOP_SEQUENCE_CHARS: usize = 64;
pub(super) const VENDOR_MODEL_CHARS: usize = 256;
pub(super) const MAX_TOKENS: i64 = 100_000_000;
/// A million dollars per million tokens.
pub(super) const MAX_PRICE: i64 = 1_000_000_000_000;
pub(super) const FALLBACKS: usize = 8;
pub(super) const MAX_WEIGHT: u32 = 1000;
pub(super) const FURTHER_KEYS: usize = 15;
/// Of what a key may be used for in a minute, or at a time.
pub(super) const MAX_LIMIT: i64 = 1_000_000_000;
/// In milliseconds: shorter is a second call for each, longer is no hedge.
const HEDGE_AFTER: std::ops::RangeInclusive<i64> = 100..=600_000;
pub(super) const URL_BYTES: usize = 2048;
pub(super) const API_KEY_BYTES: usize = 4096;
pub(super) const SCRIPT_BYTES: usize = 1024 * 1024;

/// A request that only names an entity.
pub(crate) fn get(field: &str, reference: &str, what: &str) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.reference(field, reference, what);
    violations.finish()
}

/// A deletion.
pub(crate) fn delete(
    field: &str,
    reference: &str,
    what: &str,
    idempotency_key: &str,
) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.reference(field, reference, what);
    violations.idempotency_key(idempotency_key);
    violations.finish()
}

pub(crate) fn create_agent(request: &CreateAgentRequest, pools: &[String]) -> Result<(), Status> {
    let mut violations = Violations::new();
    let default = AgentSpec::default();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.as_ref().unwrap_or(&default);
    violations.name("spec.name", &spec.name);
    violations.chars("spec.description", &spec.description, DESCRIPTION_CHARS);
    violations.bytes("spec.instructions", &spec.instructions, INSTRUCTIONS_BYTES);
    violations.reference("spec.model", &spec.model, "a model");
    violations.range("spec.max_turns", spec.max_turns, 0..=MAX_TURNS);
    violations.range("spec.compact_at_percent", spec.compact_at_percent, 0..=100);
    parameters(&mut violations, "spec.parameters", spec.parameters.as_ref());
    policy(&mut violations, "spec.policy", &spec.policy);
    compute(&mut violations, "spec.compute", &spec.compute, pools);
    agent_secrets(&mut violations, "spec.secrets", &spec.secrets);
    script_models(&mut violations, "spec.script_models", &spec.script_models);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

/// The models an agent's scripts may call.
fn script_models(violations: &mut Violations, field: &str, models: &[String]) {
    violations.require(models.len() <= SCRIPT_MODELS, field, || {
        format!("must have at most {SCRIPT_MODELS} entries, has {}", models.len())
    });
    for (index, model) in models.iter().take(SCRIPT_MODELS).enumerate() {
        violations.reference(&format!("{field}[{index}]"), model, "a model");
    }
}

pub(crate) fn update_agent(request: &UpdateAgentRequest, pools: &[String]) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.reference("agent", &request.agent, "an agent");
    if let Some(name) = &request.name {
        violations.name("name", name);
    }
    violations.chars("description", request.description(), DESCRIPTION_CHARS);
    violations.bytes("instructions", request.instructions(), INSTRUCTIONS_BYTES);
    if let Some(model) = &request.model {
        violations.reference("model", model, "a model");
    }
    violations.range("max_turns", request.max_turns(), 0..=MAX_TURNS);
    violations.range("compact_at_percent", request.compact_at_percent(), 0..=100);
    parameters(&mut violations, "parameters", request.parameters.as_ref());
    if let Some(replacement) = &request.policy {
        policy(&mut violations, "policy.rules", &replacement.rules);
    }
    compute(&mut violations, "compute", request.compute(), pools);
    if let Some(replacement) = &request.secrets {
        agent_secrets(&mut violations, "secrets.secrets", &replacement.secrets);
    }
    if let Some(replacement) = &request.script_models {
        script_models(&mut violations, "script_models.script_models", &replacement.script_models);
    }
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

/// A pool of interpreters, or none named: it must exist.
pub(super) fn compute(violations: &mut Violations, field: &str, name: &str, pools: &[String]) {
    if name.is_empty() || pools.iter().any(|pool| pool == name) {
        return;
    }
    // What is not even a name isn't repeated: it may be long.
    let what = if compute::is_name(name) {
        format!("this installation has no pool `{name}`")
    } else {
        "must be the name of a pool: at most 32 of a-z, 0-9 and `-`, beginning with a letter"
            .to_owned()
    };
    let pools: Vec<String> = pools.iter().map(|pool| format!("`{pool}`")).collect();
    let hint =
        "the operator adds one with CONSTRUCT_GATEWAY_POOLS and an interpreter that serves it";
    violations.add(field, format!("{what}; there are {} ({hint})", pools.join(", ")));
}

fn parameters(violations: &mut Violations, field: &str, parameters: Option<&ModelParameters>) {
    let Some(parameters) = parameters else { return };
    // A NaN is in no range, so it is refused with the rest.
    if let Some(temperature) = parameters.temperature {
        violations.range(&format!("{field}.temperature"), temperature, 0.0..=2.0);
    }
    if let Some(top_p) = parameters.top_p {
        violations.range(&format!("{field}.top_p"), top_p, 0.0..=1.0);
    }
    if let Some(max_tokens) = parameters.max_tokens {
        violations.range(&format!("{field}.max_tokens"), i64::from(max_tokens), 1..=MAX_TOKENS);
    }
    if let Some(top_k) = parameters.top_k {
        violations.range(&format!("{field}.top_k"), top_k, 1..=1_000_000);
    }
    let sequences = &parameters.stop_sequences;
    violations.require(
        sequences.len() <= STOP_SEQUENCES,
        &format!("{field}.stop_sequences"),
        || format!("must have at most {STOP_SEQUENCES} entries, has {}", sequences.len()),
    );
    for (index, sequence) in sequences.iter().take(STOP_SEQUENCES).enumerate() {
        let field = format!("{field}.stop_sequences[{index}]");
        violations.require(!sequence.is_empty(), &field, || "must not be empty".into());
        violations.chars(&field, sequence, STOP_SEQUENCE_CHARS);
    }
}

pub(crate) fn list_agents(
    organization: OrganizationId,
    request: &ListAgentsRequest,
) -> Result<Page<Cursor>, Status> {
    let mut violations = Violations::new();
    let filter = request.filter.clone().unwrap_or_default();
    if !filter.model.is_empty() {
        violations.reference("filter.model", &filter.model, "a model");
    }
    violations.name_prefix("filter.name_prefix", &filter.name_prefix);
    let page = Page::read(
        request.page.as_ref(),
        "ListAgents",
        organization,
        &filter,
        &ORDERS,
        &mut violations,
    );
    violations.finish().map(|()| page)
}

pub(crate) fn create_model(request: &CreateModelRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    let default = ModelSpec::default();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.as_ref().unwrap_or(&default);
    violations.name("spec.name", &spec.name);
    violations.reference("spec.provider", &spec.provider, "a model provider");
    violations.chars("spec.vendor_model", &spec.vendor_model, VENDOR_MODEL_CHARS);
    violations.one_line("spec.vendor_model", &spec.vendor_model);
    violations.range("spec.context_window", spec.context_window, 0..=MAX_TOKENS);
    violations.range("spec.max_output_tokens", spec.max_output_tokens, 0..=MAX_TOKENS);
    prices(&mut violations, "spec.prices", spec.prices.as_ref());
    fallbacks(&mut violations, "spec.fallbacks", &spec.fallbacks);
    hedge_after(&mut violations, "spec.hedge_after", spec.hedge_after.as_ref());
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

pub(crate) fn update_model(request: &UpdateModelRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.reference("model", &request.model, "a model");
    if let Some(name) = &request.name {
        violations.name("name", name);
    }
    if let Some(vendor_model) = &request.vendor_model {
        violations.require(!vendor_model.is_empty(), "vendor_model", || "must not be empty".into());
        violations.chars("vendor_model", vendor_model, VENDOR_MODEL_CHARS);
        violations.one_line("vendor_model", vendor_model);
    }
    violations.range("context_window", request.context_window(), 0..=MAX_TOKENS);
    violations.range("max_output_tokens", request.max_output_tokens(), 0..=MAX_TOKENS);
    prices(&mut violations, "prices", request.prices.as_ref());
    if let Some(replacement) = &request.fallbacks {
        fallbacks(&mut violations, "fallbacks.fallbacks", &replacement.fallbacks);
    }
    hedge_after(&mut violations, "hedge_after", request.hedge_after.as_ref());
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

fn fallbacks(violations: &mut Violations, field: &str, fallbacks: &[ModelFallback]) {
    violations.require(fallbacks.len() <= FALLBACKS, field, || {
        format!("must have at most {FALLBACKS} entries, has {}", fallbacks.len())
    });
    for (index, fallback) in fallbacks.iter().take(FALLBACKS).enumerate() {
        violations.reference(&format!("{field}[{index}].model"), &fallback.model, "a model");
        violations.range(&format!("{field}[{index}].weight"), fallback.weight, 0..=MAX_WEIGHT);
    }
}

fn hedge_after(violations: &mut Violations, field: &str, after: Option<&prost_types::Duration>) {
    let Some(after) = after else { return };
    let whole = (0..1_000_000_000).contains(&after.nanos) && after.seconds >= 0;
    let millis = convert::to_hedge_after(*after);
    violations.require(whole && (HEDGE_AFTER.contains(&millis) || millis == 0), field, || {
        "must be 0, or 100 ms to 10 minutes".into()
    });
}

fn prices(violations: &mut Violations, field: &str, prices: Option<&Prices>) {
    let Some(prices) = prices else { return };
    for (name, price) in [
        ("input", prices.input),
        ("output", prices.output),
        ("cache_read", prices.cache_read),
        ("cache_write", prices.cache_write),
        ("thinking", prices.thinking),
        ("request", prices.request),
    ] {
        violations.range(&format!("{field}.{name}"), price, 0..=MAX_PRICE);
    }
    let Some(long) = &prices.long_context else { return };
    let field = format!("{field}.long_context");
    violations.range(
        &format!("{field}.above_input_tokens"),
        long.above_input_tokens,
        1..=MAX_TOKENS,
    );
    for (name, price) in [
        ("input", long.input),
        ("output", long.output),
        ("cache_read", long.cache_read),
        ("cache_write", long.cache_write),
        ("thinking", long.thinking),
    ] {
        violations.range(&format!("{field}.{name}"), price, 0..=MAX_PRICE);
    }
}

pub(crate) fn list_models(
    organization: OrganizationId,
    request: &ListModelsRequest,
) -> Result<Page<Cursor>, Status> {
    let mut violations = Violations::new();
    let filter = request.filter.clone().unwrap_or_default();
    if !filter.provider.is_empty() {
        violations.reference("filter.provider", &filter.provider, "a model provider");
    }
    violations.name_prefix("filter.name_prefix", &filter.name_prefix);
    let page = Page::read(
        request.page.as_ref(),
        "ListModels",
        organization,
        &filter,
        &ORDERS,
        &mut violations,
    );
    violations.finish().map(|()| page)
}

/// Returns the kind of provider that is to be made.
pub(crate) fn create_model_provider(
    request: &CreateModelProviderRequest,
) -> Result<ModelProviderKind, Status> {
    let mut violations = Violations::new();
    let default = ModelProviderSpec::default();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.as_ref().unwrap_or(&default);
    violations.name("spec.name", &spec.name);
    let kind = ModelProviderType::try_from(spec.r#type).ok().and_then(convert::to_provider_kind);
    violations.require(kind.is_some(), "spec.type", || "must be one of `ModelProviderType`".into());
    base_url(&mut violations, "spec.base_url", &spec.base_url);
    api_key(&mut violations, "spec.api_key", &spec.api_key);
    script(&mut violations, "spec.script", &spec.script);
    further_keys(&mut violations, "spec.additional_api_keys", &spec.additional_api_keys);
    let limits = [spec.max_concurrency, spec.requests_per_minute, spec.tokens_per_minute];
    key_limits(&mut violations, "spec.", limits);
    if let Some(kind) = kind {
        complete(&mut violations, kind, spec);
    }
    let kind = kind.unwrap_or(ModelProviderKind::Anthropic);
    fits(&mut violations, "spec.", kind, [&spec.base_url, &spec.api_key, &spec.script]);
    further_fit(&mut violations, "spec.additional_api_keys", kind, &spec.additional_api_keys);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish().map(|()| kind)
}

pub(crate) fn update_model_provider(request: &UpdateModelProviderRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.reference("model_provider", &request.model_provider, "a model provider");
    if let Some(name) = &request.name {
        violations.name("name", name);
    }
    base_url(&mut violations, "base_url", request.base_url());
    api_key(&mut violations, "api_key", request.api_key());
    script(&mut violations, "script", request.script());
    if let Some(replacement) = &request.additional_api_keys {
        further_keys(&mut violations, "additional_api_keys.keys", &replacement.keys);
    }
    let limits =
        [request.max_concurrency(), request.requests_per_minute(), request.tokens_per_minute()];
    key_limits(&mut violations, "", limits);
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

/// Whether an update suits the provider it is for.
pub(crate) fn model_provider_fits(
    request: &UpdateModelProviderRequest,
    provider: &ModelProvider,
) -> Result<(), Status> {
    let mut violations = Violations::new();
    fits(
        &mut violations,
        "",
        provider.kind,
        [request.base_url(), request.api_key(), request.script()],
    );
    if let Some(replacement) = &request.additional_api_keys {
        further_fit(&mut violations, "additional_api_keys.keys", provider.kind, &replacement.keys);
    }
    // Who may change an address need not know the key. They would if it could be sent to an address
    // of theirs.
    let moves =
        request.base_url.as_ref().is_some_and(|url| origin(url) != origin(&provider.base_url));
    let needs_url =
        provider.kind == ModelProviderKind::Bedrock && request.base_url.as_deref() == Some("");
    violations.require(!needs_url, "base_url", || "must not be empty: it names the region".into());
    let keeps_key = provider.key.is_some() && request.api_key.is_none();
    violations.require(!(moves && keeps_key), "api_key", || {
        "must be given again, or taken away, when `base_url` changes to another origin: a key is only sent to the origin \
         it was given for"
            .into()
    });
    let keeps_further =
        !provider.additional_keys.is_empty() && request.additional_api_keys.is_none();
    violations.require(!(moves && keeps_further), "additional_api_keys", || {
        "must be given again, or taken away, when `base_url` changes to another origin".into()
    });
    violations.finish()
}

const NO_VENDOR: &str = "must be empty: a `SCRIPTED` or `LOCAL` provider calls no vendor";

fn calls_nobody(kind: ModelProviderKind) -> bool {
    matches!(kind, ModelProviderKind::Scripted | ModelProviderKind::Local)
}

/// Whether each of the further keys is one that the vendor could take.
fn further_fit(violations: &mut Violations, path: &str, kind: ModelProviderKind, keys: &[String]) {
    violations.require(!calls_nobody(kind) || keys.is_empty(), path, || NO_VENDOR.into());
    if kind == ModelProviderKind::Bedrock {
        for (index, key) in keys.iter().enumerate().take(FURTHER_KEYS) {
            bedrock_key(violations, &format!("{path}[{index}]"), key);
        }
    }
}

fn further_keys(violations: &mut Violations, field: &str, keys: &[String]) {
    violations.require(keys.len() <= FURTHER_KEYS, field, || {
        format!("must have at most {FURTHER_KEYS} entries, has {}", keys.len())
    });
    for (index, key) in keys.iter().take(FURTHER_KEYS).enumerate() {
        let field = format!("{field}[{index}]");
        violations.require(!key.is_empty(), &field, || "must not be empty".into());
        api_key(violations, &field, key);
    }
}

fn key_limits(violations: &mut Violations, path: &str, limits: [i64; 3]) {
    for (name, limit) in
        ["max_concurrency", "requests_per_minute", "tokens_per_minute"].into_iter().zip(limits)
    {
        violations.range(&format!("{path}{name}"), limit, 0..=MAX_LIMIT);
    }
}

/// Scheme, host and port. None: the vendor's own.
fn origin(base_url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = base_url.parse().ok()?;
    let (scheme, host) = (uri.scheme_str()?.to_ascii_lowercase(), uri.host()?.to_ascii_lowercase());
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some((scheme, host, port))
}

fn fits(
    violations: &mut Violations,
    path: &str,
    kind: ModelProviderKind,
    [base_url, api_key, script]: [&str; 3],
) {
    if calls_nobody(kind) {
        for (field, value) in [("base_url", base_url), ("api_key", api_key)] {
            violations.require(value.is_empty(), &format!("{path}{field}"), || NO_VENDOR.into());
        }
    }
    if kind != ModelProviderKind::Scripted {
        violations.require(script.is_empty(), &format!("{path}script"), || {
            "must be empty: only a `SCRIPTED` provider has a script".into()
        });
    }
    if kind == ModelProviderKind::Bedrock {
        bedrock_key(violations, &format!("{path}api_key"), api_key);
        violations.require(base_url.is_empty() || has_region(base_url), &format!("{path}base_url"), || {
            "must name the region: `https://bedrock-runtime.REGION.amazonaws.com`, or any address with `?region=REGION`"
                .into()
        });
    }
}

fn bedrock_key(violations: &mut Violations, field: &str, api_key: &str) {
    // Two or three parts, or a single one that is no access key.
    let parts: Vec<&str> = api_key.split(':').collect();
    let whole =
        parts.len() <= 3 && (api_key.is_empty() || parts.iter().all(|part| !part.is_empty()));
    let secret =
        parts.len() > 1 || !["AKIA", "ASIA"].iter().any(|prefix| api_key.starts_with(prefix));
    violations.require(whole && secret, field, || {
        "must be `ACCESS_KEY_ID:SECRET_ACCESS_KEY`, optionally followed by `:SESSION_TOKEN`, or a Bedrock API key"
            .into()
    });
}

/// Whether a provider that is to be made has all that its vendor asks for.
fn complete(violations: &mut Violations, kind: ModelProviderKind, spec: &ModelProviderSpec) {
    use ModelProviderKind as Kind;
    let (needs_url, needs_key) = match kind {
        Kind::Scripted | Kind::Local | Kind::Ollama => (false, false),
        Kind::Bedrock => (true, true),
        // What is compatible with a vendor may ask for no key, the vendor itself does.
        Kind::Anthropic
        | Kind::Openai
        | Kind::OpenaiResponses
        | Kind::Gemini
        | Kind::Xai
        | Kind::Deepseek
        | Kind::Openrouter => (false, spec.base_url.is_empty()),
    };
    violations.require(!needs_url || !spec.base_url.is_empty(), "spec.base_url", || {
        "is required: it names the region, as in `https://bedrock-runtime.REGION.amazonaws.com`"
            .into()
    });
    violations.require(!needs_key || !spec.api_key.is_empty(), "spec.api_key", || {
        "is required: the vendor answers nobody without a key".into()
    });
}

/// Whether the address of a Bedrock endpoint tells its region, which the signature of a request
/// needs.
fn has_region(base_url: &str) -> bool {
    let Ok(uri) = base_url.parse::<Uri>() else { return false };
    let by_query = uri.query().is_some_and(|query| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.any(|(key, value)| key == "region" && !value.is_empty())
    });
    by_query
        || uri
            .host()
            .is_some_and(|host| host.contains("bedrock-runtime") && host.contains(".amazonaws.com"))
}

fn base_url(violations: &mut Violations, field: &str, url: &str) {
    if url.is_empty() {
        return;
    }
    violations.bytes(field, url, URL_BYTES);
    let uri: Option<Uri> = url.parse().ok();
    let web = uri.as_ref().is_some_and(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()
    });
    violations.require(web, field, || "must be an absolute `http://` or `https://` address".into());
    // What stands here is shown to everybody who may read the provider.
    let open = uri
        .as_ref()
        .and_then(Uri::authority)
        .is_none_or(|authority| !authority.as_str().contains('@'));
    violations
        .require(open, field, || "must not contain a user name or password; use `api_key`".into());
}

fn api_key(violations: &mut Violations, field: &str, key: &str) {
    let sendable = key.len() <= API_KEY_BYTES && key.bytes().all(|byte| byte.is_ascii_graphic());
    violations
        .require(sendable, field, || "must have at most 4,096 visible ASCII characters".into());
}

fn script(violations: &mut Violations, field: &str, script: &str) {
    violations.bytes(field, script, SCRIPT_BYTES);
    if !script.is_empty() && script.len() <= SCRIPT_BYTES {
        // What a turn may hold is known to the providers service alone, which refuses the rest at
        // the first call.
        match serde_json::from_str::<serde::de::IgnoredAny>(script) {
            Ok(_) => violations.require(script.trim_start().starts_with(['{', '[']), field, || {
                "must be a JSON object, or a list of turns".into()
            }),
            Err(error) => violations.add(field, format!("must be JSON: {error}")),
        }
    }
}

/// Returns the page and the kind to filter by.
pub(crate) fn list_model_providers(
    organization: OrganizationId,
    request: &ListModelProvidersRequest,
) -> Result<(Page<Cursor>, Option<ModelProviderKind>), Status> {
    let mut violations = Violations::new();
    let filter = request.filter.clone().unwrap_or_default();
    let kind = ModelProviderType::try_from(filter.r#type);
    violations.require(kind.is_ok(), "filter.type", || "is not a known type".into());
    violations.name_prefix("filter.name_prefix", &filter.name_prefix);
    let page = Page::read(
        request.page.as_ref(),
        "ListModelProviders",
        organization,
        &filter,
        &ORDERS,
        &mut violations,
    );
    violations.finish().map(|()| (page, kind.ok().and_then(convert::to_provider_kind)))
}
