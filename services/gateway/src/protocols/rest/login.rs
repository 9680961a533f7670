//! What a program has to know to log people in: protected resource metadata (RFC 9728). Whoever
//! asks is told.
//!
//! Its own members have no standard: which client programs are at the issuer, and whom its tokens
//! have to be for.

use serde_json::{Value, json};
use tonic::{
    body::Body,
    codegen::http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header},
};

use super::errors;
use crate::Config;

pub(super) const PATH: &str = "/.well-known/oauth-protected-resource";

/// What a proxy that speaks TLS for the gateway says of how it was asked.
const FORWARDED: &str = "x-forwarded-proto";

pub(super) struct Login {
    /// All but what the gateway is called, which is what it was asked as.
    metadata: Value,
    secure: bool,
}

impl Login {
    pub(super) fn new(config: &Config) -> Option<Self> {
        let mut metadata = json!({
            "resource": "",
            "resource_name": "Construct",
            "authorization_servers": [config.gateway_oidc_issuer.as_ref()?],
            "scopes_supported": config.gateway_oidc_scopes,
            "bearer_methods_supported": ["header"],
            "construct_audience": config.gateway_oidc_audience.as_ref()?,
        });
        if let Some(id) = &config.gateway_oidc_client_id {
            metadata["construct_client_id"] = id.as_str().into();
        }
        Some(Self { metadata, secure: config.gateway_tls_certificate.is_some() })
    }

    pub(super) fn response(&self, request: &Request<Body>) -> Response<Body> {
        let mut metadata = self.metadata.clone();
        metadata["resource"] = self.resource(request).into();
        let mut response =
            errors::response(StatusCode::OK, "application/json", metadata.to_string());
        // It depends on how it was asked for.
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }

    /// What the gateway was asked as. Who lies about it is told the lie.
    pub(super) fn resource(&self, request: &Request<Body>) -> String {
        let text = |headers: &HeaderMap, name: &str| {
            headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
        };
        let headers = request.headers();
        // HTTP/2 has the host in its target.
        let target = request.uri().authority().map(ToString::to_string);
        let host = target.or_else(|| text(headers, "host")).unwrap_or_default();
        let secure = self.secure
            || text(headers, FORWARDED).is_some_and(|schemes| {
                // Of several proxies, the first is the one that was asked.
                schemes
                    .split(',')
                    .next()
                    .is_some_and(|scheme| scheme.trim().eq_ignore_ascii_case("https"))
            });
        format!("{}://{host}", if secure { "https" } else { "http" })
    }
}
