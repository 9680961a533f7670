//! Agents and model providers.

use construct_domain::compute;
use construct_proto::v1::{
    CreateAgentRequest, CreateModelProviderRequest, ModelProviderSpec, UpdateAgentRequest,
    UpdateModelProviderRequest,
};
use construct_store::{ModelProvider, ModelProviderKind};
use tonic::{Status, codegen::http::Uri};

use super::{checked, policies::policy};
use crate::{convert, validate::Violations};

pub(crate) fn create_agent(request: &CreateAgentRequest, pools: &[String]) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    policy(&mut violations, "spec.policy", &spec.policy);
    compute(&mut violations, "spec.compute", &spec.compute, pools);
    violations.finish()
}

pub(crate) fn update_agent(request: &UpdateAgentRequest, pools: &[String]) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    if let Some(replacement) = &request.policy {
        policy(&mut violations, "policy.rules", &replacement.rules);
    }
    compute(&mut violations, "compute", request.compute(), pools);
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

/// Returns the kind of provider that is to be made.
pub(crate) fn create_model_provider(
    request: &CreateModelProviderRequest,
) -> Result<ModelProviderKind, Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    let kind = convert::to_provider_kind(spec.r#type());
    script(&mut violations, "spec.script", &spec.script);
    if let Some(kind) = kind {
        complete(&mut violations, kind, &spec);
        fits(&mut violations, "spec.", kind, [&spec.base_url, &spec.api_key, &spec.script]);
        further_fit(&mut violations, "spec.additional_api_keys", kind, &spec.additional_api_keys);
    }
    checked(violations, kind)
}

pub(crate) fn update_model_provider(request: &UpdateModelProviderRequest) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    script(&mut violations, "script", request.script());
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
        for (index, key) in keys.iter().enumerate() {
            bedrock_key(violations, &format!("{path}[{index}]"), key);
        }
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

/// What a turn may hold is known to the providers service alone, which refuses the rest at the
/// first call.
fn script(violations: &mut Violations, field: &str, script: &str) {
    if script.is_empty() || violations.concern(field) {
        return;
    }
    match serde_json::from_str::<serde::de::IgnoredAny>(script) {
        Ok(_) => violations.require(script.trim_start().starts_with(['{', '[']), field, || {
            "must be a JSON object, or a list of turns".into()
        }),
        Err(error) => violations.add(field, format!("must be JSON: {error}")),
    }
}
