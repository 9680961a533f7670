//! The metadata that clients need to log people in: protected resource metadata (RFC 9728). It
//! needs no credentials.
//!
//! Two members are not standardized: the client programs registered at the issuer, and the audience
//! of its tokens.

use serde_json::{Value, json};
use tonic::{
    body::Body,
    codegen::http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header},
};

use super::errors;
use crate::Config;

pub(super) const PATH: &str = "/.well-known/oauth-protected-resource";

/// The header in which a TLS proxy names the scheme of the original request.
const FORWARDED: &str = "x-forwarded-proto";

pub(super) struct Login {
    /// Everything but the resource, which is the address that was requested.
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
        // The resource depends on the requested address.
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }

    /// The address that the client requested. A client that lies about it gets its own lie.
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
                // Of several proxies, the first names the original address.
                schemes
                    .split(',')
                    .next()
                    .is_some_and(|scheme| scheme.trim().eq_ignore_ascii_case("https"))
            });
        format!("{}://{host}", if secure { "https" } else { "http" })
    }
}
