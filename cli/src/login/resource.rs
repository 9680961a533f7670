//! What a gateway says of how people log in there (RFC 9728).

use serde::Deserialize;
use tokio::time::timeout;

use super::issuer::{self, TIMEOUT};
use crate::{
    context::TlsArgs,
    failure::{Exit, Failure},
    gateway::{causes, read},
    words::one_line,
};

const PATH: &str = "/.well-known/oauth-protected-resource";

/// An issuer, and what to be there.
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
    /// # Errors
    /// When the gateway does not say it.
    pub(super) async fn ask(address: &str, tls: &TlsArgs) -> Result<Self, Failure> {
        if address.starts_with("unix:") {
            let failure = Failure::usage(
                "over a socket of this machine everybody who gets in is the operator",
            );
            return Err(failure.hint("a person logs in over http:// or https://"));
        }
        let whole = reqwest::Url::parse(address)
            .map_err(|_| Failure::usage(format!("{address} is no address")))?;
        let url =
            whole.join(PATH).map_err(|_| Failure::usage(format!("{address} is no address")))?;
        let away = |error: &dyn std::error::Error| {
            Failure::new(
                Exit::Unreachable,
                format!("the gateway cannot be reached: {}", causes(error)),
            )
        };
        let client = client(address, tls)?;
        let asked = async {
            let answer = client.get(url).send().await.map_err(|error| away(&error))?;
            let status = answer.status();
            let body = issuer::body(answer).await;
            body.map(|body| (status, body)).map_err(|why| Failure::new(Exit::Unreachable, why))
        };
        let (status, body) = timeout(TIMEOUT, asked).await.map_err(|error| away(&error))??;
        if status == reqwest::StatusCode::NOT_FOUND {
            let failure = Failure::failed(
                "nobody can log in at this gateway: it has no issuer, or is of another version",
            );
            return Err(failure.hint(
                "its operator gives out API keys: construct context add NAME --key-stdin …",
            ));
        }
        if !status.is_success() {
            return Err(Failure::failed(format!(
                "the gateway does not say how people log in ({status})"
            )));
        }
        let wrong =
            |_| Failure::failed("what the gateway says of how people log in cannot be read");
        serde_json::from_slice::<Metadata>(&body).map_err(wrong)?.checked(&whole)
    }
}

impl Metadata {
    fn checked(self, asked: &reqwest::Url) -> Result<Resource, Failure> {
        // RFC 9728, 3.3: what is of another resource is not to be used.
        let same = reqwest::Url::parse(&self.resource)
            .is_ok_and(|resource| resource.origin() == asked.origin());
        if !same {
            let message = format!(
                "{asked} says how people log in at {}, which is another address",
                one_line(&self.resource)
            );
            return Err(Failure::failed(message)
                .hint("a proxy before the gateway has to pass on the host it was asked for, and X-Forwarded-Proto"));
        }
        let missing = || Failure::failed("the gateway does not say where people log in");
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

/// One that trusts, and shows, what the connection to the gateway does.
fn client(address: &str, tls: &TlsArgs) -> Result<reqwest::Client, Failure> {
    let wrong = |error: reqwest::Error| {
        Failure::usage(format!("the certificates cannot be used: {}", causes(&error)))
    };
    let mut builder = issuer::builder(address);
    if let Some(ca) = &tls.ca {
        builder = builder
            .tls_certs_only(reqwest::Certificate::from_pem_bundle(&read(ca)?).map_err(wrong)?);
    }
    if let (Some(certificate), Some(key)) = (&tls.client_certificate, &tls.client_key) {
        let both = [read(certificate)?, b"\n".to_vec(), read(key)?].concat();
        builder = builder.identity(reqwest::Identity::from_pem(&both).map_err(wrong)?);
    }
    builder.build().map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_another_address_is_not_believed() {
        let metadata = |resource: &str| Metadata {
            resource: resource.to_owned(),
            authorization_servers: vec!["https://login.example.com".to_owned()],
            scopes_supported: Vec::new(),
            construct_client_id: None,
            construct_audience: Some("construct".to_owned()),
        };
        let asked = reqwest::Url::parse("https://construct.example.com").unwrap();
        for (resource, fine) in [
            ("https://construct.example.com", true),
            ("https://construct.example.com:443/", true),
            ("http://construct.example.com", false),
            ("https://construct.example.com:8443", false),
            ("https://evil.example.com", false),
            ("construct", false),
            ("", false),
        ] {
            assert_eq!(metadata(resource).checked(&asked).is_ok(), fine, "{resource}");
        }
        assert!(
            Metadata { construct_audience: None, ..metadata("https://construct.example.com") }
                .checked(&asked)
                .is_err()
        );
    }
}
