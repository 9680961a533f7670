//! Agents and model providers.

use construct_domain::compute;
use construct_proto::v1::{
    CreateAgentRequest, CreateModelProviderRequest, ModelProviderSpec, UpdateAgentRequest,
    UpdateModelProviderRequest,
};
use construct_store::{ModelProvider, ModelProviderKind};
use tonic::{Status, codegen::http::Uri};

use super::{checked, policies::check_policy};
use crate::{convert, validate::Violations};

pub(crate) fn create_agent(request: &CreateAgentRequest, pools: &[String]) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    check_policy(&mut violations, "spec.policy", &spec.policy);
    check_compute(&mut violations, "spec.compute", &spec.compute, pools);
    violations.finish()
}

pub(crate) fn update_agent(request: &UpdateAgentRequest, pools: &[String]) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    if let Some(replacement) = &request.policy {
        check_policy(&mut violations, "policy.rules", &replacement.rules);
    }
    check_compute(&mut violations, "compute", request.compute(), pools);
    violations.finish()
}

/// Checks that the named pool of interpreters exists, if one is named.
pub(super) fn check_compute(
    violations: &mut Violations,
    field: &str,
    name: &str,
    pools: &[String],
) {
    if name.is_empty() || pools.iter().any(|pool| pool == name) {
        return;
    }
    // A text that is not even a name isn't repeated: it may be long.
    let what = if compute::is_name(name) {
        format!("this installation has no pool `{name}`")
    } else {
        "must be the name of a pool: at most 32 of a-z, 0-9 and `-`, starting with a letter"
            .to_owned()
    };
    let pools: Vec<String> = pools.iter().map(|pool| format!("`{pool}`")).collect();
    let hint =
        "the operator adds one with CONSTRUCT_GATEWAY_POOLS and an interpreter that serves it";
    violations.add(field, format!("{what}; there are {} ({hint})", pools.join(", ")));
}

/// Returns the kind of the new provider.
pub(crate) fn create_model_provider(
    request: &CreateModelProviderRequest,
) -> Result<ModelProviderKind, Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    let kind = convert::to_provider_kind(spec.r#type());
    check_script(&mut violations, "spec.script", &spec.script);
    if let Some(kind) = kind {
        check_required_fields(&mut violations, kind, &spec);
        check_fields(&mut violations, "spec.", kind, [&spec.base_url, &spec.api_key, &spec.script]);
        check_additional_keys(
            &mut violations,
            "spec.additional_api_keys",
            kind,
            &spec.additional_api_keys,
        );
    }
    checked(violations, kind)
}

pub(crate) fn update_model_provider(request: &UpdateModelProviderRequest) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    check_script(&mut violations, "script", request.script());
    violations.finish()
}

/// Checks an update against the stored provider.
pub(crate) fn check_model_provider_update(
    request: &UpdateModelProviderRequest,
    provider: &ModelProvider,
) -> Result<(), Status> {
    let mut violations = Violations::new();
    check_fields(
        &mut violations,
        "",
        provider.kind,
        [request.base_url(), request.api_key(), request.script()],
    );
    if let Some(replacement) = &request.additional_api_keys {
        check_additional_keys(
            &mut violations,
            "additional_api_keys.keys",
            provider.kind,
            &replacement.keys,
        );
    }
    // A caller who may change the URL need not know the key. A URL of their own would receive it.
    let origin_changes =
        request.base_url.as_ref().is_some_and(|url| origin(url) != origin(&provider.base_url));
    let needs_url =
        provider.kind == ModelProviderKind::Bedrock && request.base_url.as_deref() == Some("");
    violations
        .require(!needs_url, "base_url", || "must not be empty: it contains the region".into());
    let keeps_key = provider.key.is_some() && request.api_key.is_none();
    violations.require(!(origin_changes && keeps_key), "api_key", || {
        "must be set again or removed when `base_url` changes to another origin: a key is only sent to the origin it \
         was set for"
            .into()
    });
    let keeps_additional_keys =
        !provider.additional_keys.is_empty() && request.additional_api_keys.is_none();
    violations.require(!(origin_changes && keeps_additional_keys), "additional_api_keys", || {
        "must be set again or removed when `base_url` changes to another origin".into()
    });
    violations.finish()
}

const NO_VENDOR: &str = "must be empty: a `SCRIPTED` or `LOCAL` provider calls no vendor";

fn has_no_vendor(kind: ModelProviderKind) -> bool {
    matches!(kind, ModelProviderKind::Scripted | ModelProviderKind::Local)
}

/// Checks the additional keys against the rules of the vendor.
fn check_additional_keys(
    violations: &mut Violations,
    path: &str,
    kind: ModelProviderKind,
    keys: &[String],
) {
    violations.require(!has_no_vendor(kind) || keys.is_empty(), path, || NO_VENDOR.into());
    if kind == ModelProviderKind::Bedrock {
        for (index, key) in keys.iter().enumerate() {
            check_bedrock_key(violations, &format!("{path}[{index}]"), key);
        }
    }
}

/// Scheme, host and port. `None`: the vendor's own.
fn origin(base_url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = base_url.parse().ok()?;
    let (scheme, host) = (uri.scheme_str()?.to_ascii_lowercase(), uri.host()?.to_ascii_lowercase());
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some((scheme, host, port))
}

fn check_fields(
    violations: &mut Violations,
    path: &str,
    kind: ModelProviderKind,
    [base_url, api_key, script]: [&str; 3],
) {
    if has_no_vendor(kind) {
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
        check_bedrock_key(violations, &format!("{path}api_key"), api_key);
        violations.require(base_url.is_empty() || has_region(base_url), &format!("{path}base_url"), || {
            "must contain the region: `https://bedrock-runtime.REGION.amazonaws.com`, or any URL with `?region=REGION`"
                .into()
        });
    }
}

fn check_bedrock_key(violations: &mut Violations, field: &str, api_key: &str) {
    // Two or three parts, or a single one that is not an access key.
    let parts: Vec<&str> = api_key.split(':').collect();
    let is_complete =
        parts.len() <= 3 && (api_key.is_empty() || parts.iter().all(|part| !part.is_empty()));
    let is_not_access_key =
        parts.len() > 1 || !["AKIA", "ASIA"].iter().any(|prefix| api_key.starts_with(prefix));
    violations.require(is_complete && is_not_access_key, field, || {
        "must be `ACCESS_KEY_ID:SECRET_ACCESS_KEY`, optionally followed by `:SESSION_TOKEN`, or a Bedrock API key"
            .into()
    });
}

/// Checks that a new provider has everything that its vendor requires.
fn check_required_fields(
    violations: &mut Violations,
    kind: ModelProviderKind,
    spec: &ModelProviderSpec,
) {
    use ModelProviderKind as Kind;
    let (needs_url, needs_key) = match kind {
        Kind::Scripted | Kind::Local | Kind::Ollama => (false, false),
        Kind::Bedrock => (true, true),
        // A vendor always needs a key; a compatible server may not.
        Kind::Anthropic
        | Kind::Openai
        | Kind::OpenaiResponses
        | Kind::Gemini
        | Kind::Xai
        | Kind::Deepseek
        | Kind::Openrouter => (false, spec.base_url.is_empty()),
    };
    violations.require(!needs_url || !spec.base_url.is_empty(), "spec.base_url", || {
        "is required: it contains the region, as in `https://bedrock-runtime.REGION.amazonaws.com`"
            .into()
    });
    violations.require(!needs_key || !spec.api_key.is_empty(), "spec.api_key", || {
        "is required: the vendor refuses requests without a key".into()
    });
}

/// Whether the URL of a Bedrock endpoint contains its region, which request signatures need.
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

/// Only the providers service knows the format of turns. It refuses an invalid script at the first
/// call.
fn check_script(violations: &mut Violations, field: &str, script: &str) {
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
