//! The gateway's metadata for log-ins (RFC 9728).

use serde::Deserialize;
use tokio::time::timeout;

use super::issuer::{self, REQUEST_TIMEOUT};
use crate::{
    context::TlsArgs,
    failure::{Exit, Failure},
    gateway::{error_chain, read},
    text::one_line,
};

const PATH: &str = "/.well-known/oauth-protected-resource";

/// The issuer and the client for log-ins.
#[derive(Debug)]
pub(super) struct Resource {
    pub(super) issuer: String,
    pub(super) client_id: Option<String>,
    pub(super) audience: String,
    pub(super) scopes: Vec<String>,
}

#[derive(Deserialize)]
struct Metadata {
    resource: String,
    #[serde(default)]
    authorization_servers: Vec<String>,
    #[serde(default)]
    scopes_supported: Vec<String>,
    construct_client_id: Option<String>,
    construct_audience: Option<String>,
}

impl Resource {
    /// Reads the gateway's metadata.
    ///
    /// # Errors
    /// When the gateway has none, or it is invalid.
    pub(super) async fn fetch(address: &str, tls: &TlsArgs) -> Result<Self, Failure> {
        if address.starts_with("unix:") {
            let failure =
                Failure::usage("the caller is the operator on a local socket; there is no log-in");
            return Err(failure.hint("log in over http:// or https://"));
        }
        let invalid = |_| Failure::usage(format!("{address} is not an address"));
        let base = reqwest::Url::parse(address).map_err(invalid)?;
        let url = base.join(PATH).map_err(invalid)?;
        let unreachable = |error: &dyn std::error::Error| {
            Failure::new(
                Exit::Unreachable,
                format!("the gateway cannot be reached: {}", error_chain(error)),
            )
        };
        let client = client(address, tls)?;
        let request = async {
            let response = client.get(url).send().await.map_err(|error| unreachable(&error))?;
            let status = response.status();
            let body = issuer::read_body(response).await;
            body.map(|body| (status, body))
                .map_err(|reason| Failure::new(Exit::Unreachable, reason))
        };
        let (status, body) =
            timeout(REQUEST_TIMEOUT, request).await.map_err(|error| unreachable(&error))??;
        if status == reqwest::StatusCode::NOT_FOUND {
            let failure = Failure::failed(
                "the gateway does not support log-ins: it has no issuer, or another version",
            );
            return Err(failure
                .hint("use an API key of its operator: construct context add NAME --key-stdin …"));
        }
        if !status.is_success() {
            return Err(Failure::failed(format!(
                "the gateway does not provide its log-in metadata ({status})"
            )));
        }
        let invalid = |_| Failure::failed("the gateway's log-in metadata cannot be read");
        serde_json::from_slice::<Metadata>(&body).map_err(invalid)?.validate(&base)
    }
}

impl Metadata {
    /// # Errors
    /// When it is of another address, or incomplete.
    fn validate(self, requested: &reqwest::Url) -> Result<Resource, Failure> {
        // RFC 9728, 3.3: metadata of another resource must not be used.
        let same = reqwest::Url::parse(&self.resource)
            .is_ok_and(|resource| resource.origin() == requested.origin());
        if !same {
            let message = format!(
                "the log-in metadata of {requested} is of another address: {}",
                one_line(&self.resource)
            );
            return Err(Failure::failed(message)
                .hint("a proxy in front of the gateway must forward the Host header and set X-Forwarded-Proto"));
        }
        let missing = || Failure::failed("the gateway's log-in metadata names no issuer");
        let issuer = self.authorization_servers.into_iter().next().ok_or_else(missing)?;
        let audience = self.construct_audience.ok_or_else(missing)?;
        Ok(Resource {
            issuer,
            client_id: self.construct_client_id,
            audience,
            scopes: self.scopes_supported,
        })
    }
}

/// An HTTP client with the certificates of the gateway connection.
fn client(address: &str, tls: &TlsArgs) -> Result<reqwest::Client, Failure> {
    let unusable = |error: reqwest::Error| {
        Failure::usage(format!("the certificates cannot be used: {}", error_chain(&error)))
    };
    let mut builder = issuer::client_builder(address);
    if let Some(ca) = &tls.ca {
        builder = builder
            .tls_certs_only(reqwest::Certificate::from_pem_bundle(&read(ca)?).map_err(unusable)?);
    }
    if let (Some(certificate), Some(key)) = (&tls.client_certificate, &tls.client_key) {
        let both = [read(certificate)?, b"\n".to_vec(), read(key)?].concat();
        builder = builder.identity(reqwest::Identity::from_pem(&both).map_err(unusable)?);
    }
    builder.build().map_err(unusable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_of_another_address_is_refused() {
        let metadata = |resource: &str| Metadata {
            resource: resource.to_owned(),
            authorization_servers: vec!["https://login.example.com".to_owned()],
            scopes_supported: Vec::new(),
            construct_client_id: None,
            construct_audience: Some("construct".to_owned()),
        };
        let requested = reqwest::Url::parse("https://construct.example.com").unwrap();
        for (resource, valid) in [
            ("https://construct.example.com", true),
            ("https://construct.example.com:443/", true),
            ("http://construct.example.com", false),
            ("https://construct.example.com:8443", false),
            ("https://evil.example.com", false),
            ("construct", false),
            ("", false),
        ] {
            assert_eq!(metadata(resource).validate(&requested).is_ok(), valid, "{resource}");
        }
        assert!(
            Metadata { construct_audience: None, ..metadata("https://construct.example.com") }
                .validate(&requested)
                .is_err()
        );
    }
}
