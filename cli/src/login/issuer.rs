//! The issuer: an OpenID Provider. This program is a public client without a client secret, because
//! a program on users' machines cannot keep one.
//!
//! Tokens are not verified here: they come from the issuer over TLS (OpenID Connect Core, 3.1.3.7),
//! and the gateway verifies them.

use std::{path::Path, time::Duration};

use form_urlencoded::Serializer;
use futures::StreamExt as _;
use reqwest::{Certificate, Client, ClientBuilder, Response, Url, redirect::Policy};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};
use serde_json::Value;

use crate::{
    context::Login,
    failure::{Exit, Failure},
    gateway::{error_chain, is_local, read},
    text::one_line,
};

/// The timeout of a request.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum bytes of a response.
const MAX_RESPONSE_BYTES: usize = 1024 * 1024;
/// Scopes that are requested only if the issuer lists them: others may refuse them.
const OPTIONAL_SCOPES: [&str; 3] = ["profile", "email", "offline_access"];

/// Why a request to the issuer failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Error {
    /// The issuer refuses, with a code of RFC 6749.
    Refused { code: String, description: String },
    /// The issuer does not respond, or is unavailable.
    Unreachable(String),
    /// The issuer is misconfigured or unsafe.
    Invalid(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Refused { code, description } if description.is_empty() => {
                Self::failed(format!("the issuer refuses: {code}"))
            }
            Error::Refused { code, description } => {
                Self::failed(format!("the issuer refuses: {description} ({code})"))
            }
            Error::Unreachable(reason) => {
                Self::new(Exit::Unreachable, format!("the issuer cannot be reached: {reason}"))
            }
            Error::Invalid(reason) => Self::failed(reason),
        }
    }
}

/// The issuer's metadata (OpenID Connect Discovery).
#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    token_endpoint: String,
    authorization_endpoint: Option<String>,
    device_authorization_endpoint: Option<String>,
    revocation_endpoint: Option<String>,
    scopes_supported: Option<Vec<String>>,
}

/// A token response.
#[derive(Deserialize)]
pub(super) struct Tokens {
    pub(super) access_token: Option<String>,
    pub(super) id_token: Option<String>,
    pub(super) refresh_token: Option<String>,
    #[serde(default, deserialize_with = "optional_seconds")]
    pub(super) expires_in: Option<f64>,
}

/// Reads a number. Some issuers write numbers as strings.
fn optional_seconds<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    let value = Value::deserialize(from)?;
    Ok(value.as_f64().or_else(|| value.as_str()?.parse().ok()))
}

/// A device authorization response (RFC 8628).
#[derive(Deserialize)]
pub(super) struct DeviceCode {
    pub(super) device_code: String,
    pub(super) user_code: String,
    #[serde(alias = "verification_url")]
    pub(super) verification_uri: String,
    pub(super) verification_uri_complete: Option<String>,
    #[serde(deserialize_with = "seconds")]
    pub(super) expires_in: u64,
    #[serde(default = "default_interval", deserialize_with = "seconds")]
    pub(super) interval: u64,
}

fn seconds<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let value = Value::deserialize(from)?;
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    number.ok_or_else(|| D::Error::custom("not a number of seconds"))
}

const fn default_interval() -> u64 {
    5
}

#[derive(Deserialize)]
struct Refusal {
    error: String,
    #[serde(default)]
    error_description: String,
}

/// An issuer, accessed as one of its clients.
pub(super) struct Issuer {
    client: Client,
    discovery: Discovery,
    client_id: String,
    /// The resource indicator (RFC 8707), if the audience of tokens is an address instead of this
    /// client.
    resource: Option<String>,
}

impl Issuer {
    /// Reads the issuer's metadata.
    ///
    /// # Errors
    /// When it cannot be read, or an endpoint is not secure.
    pub(super) async fn discover(login: &Login, ca: Option<&Path>) -> Result<Self, Error> {
        let name = one_line(&login.issuer);
        check_secure(&login.issuer, &name)?;
        let mut builder = client_builder(&login.issuer);
        // An internal issuer may have a certificate of the gateway's authority. The system's
        // authorities are trusted as well.
        if let Some(ca) = ca {
            let bytes = read(ca).map_err(|failure| Error::Invalid(failure.message().to_owned()))?;
            let unusable = |error: reqwest::Error| {
                Error::Invalid(format!("{} cannot be used: {error}", ca.display()))
            };
            builder =
                builder.tls_certs_merge(Certificate::from_pem_bundle(&bytes).map_err(unusable)?);
        }
        let client = builder.build().map_err(|error| Error::Invalid(error_chain(&error)))?;
        let url =
            format!("{}/.well-known/openid-configuration", login.issuer.trim_end_matches('/'));
        let response = client
            .get(url)
            .send()
            .await
            .map_err(|error| Error::Unreachable(error_chain(&error)))?;
        let discovery: Discovery = read_json(response).await?;
        if discovery.issuer != login.issuer {
            return Err(Error::Invalid(format!("the metadata of {name} is of another issuer")));
        }
        let Discovery {
            token_endpoint,
            authorization_endpoint,
            device_authorization_endpoint,
            revocation_endpoint,
            ..
        } = &discovery;
        let optional = [authorization_endpoint, device_authorization_endpoint, revocation_endpoint];
        for endpoint in optional.into_iter().flatten().chain([token_endpoint]) {
            check_secure(endpoint, &name)?;
        }
        let Login { client_id, audience, .. } = login;
        let is_address =
            Url::parse(audience).is_ok_and(|url| matches!(url.scheme(), "https" | "http"));
        let resource = Some(audience).filter(|_| is_address && audience != client_id).cloned();
        Ok(Self { client, discovery, client_id: client_id.clone(), resource })
    }

    /// The scopes for a request, without optional ones that the issuer does not support.
    pub(super) fn supported_scopes(&self, scopes: Vec<String>) -> String {
        let is_supported = |scope: &String| {
            let listed = self.discovery.scopes_supported.as_ref();
            !OPTIONAL_SCOPES.contains(&scope.as_str())
                || listed.is_none_or(|listed| listed.contains(scope))
        };
        scopes.into_iter().filter(is_supported).collect::<Vec<_>>().join(" ")
    }

    /// Requests a device code. None if the issuer does not support that, or not for this client.
    ///
    /// # Errors
    /// [`Error`].
    pub(super) async fn request_device_code(
        &self,
        scopes: &str,
    ) -> Result<Option<DeviceCode>, Error> {
        let Some(endpoint) = &self.discovery.device_authorization_endpoint else { return Ok(None) };
        match self.post(endpoint, &self.client_form(&[("scope", scopes)])).await {
            Ok(device_code) => Ok(Some(device_code)),
            Err(Error::Refused { code, .. }) if code == "unauthorized_client" => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Polls whether the device code was entered.
    ///
    /// # Errors
    /// [`Error`]: `authorization_pending` and `slow_down` are temporary refusals.
    pub(super) async fn poll_device_code(&self, device_code: &str) -> Result<Tokens, Error> {
        let grant = "urn:ietf:params:oauth:grant-type:device_code";
        self.tokens(&[("grant_type", grant), ("device_code", device_code)]).await
    }

    /// The address of the log-in page, which redirects to `redirect_uri`.
    ///
    /// # Errors
    /// When the issuer has no such page.
    pub(super) fn authorization_url(
        &self,
        scopes: &str,
        redirect_uri: &str,
        state: &str,
        challenge: &str,
    ) -> Result<Url, Error> {
        let none = || {
            Error::Invalid("the issuer supports neither device codes nor a log-in page".to_owned())
        };
        let endpoint = self.discovery.authorization_endpoint.as_ref().ok_or_else(none)?;
        let mut url = Url::parse(endpoint).map_err(|_| none())?;
        let mut parameters = vec![
            ("response_type", "code"),
            ("redirect_uri", redirect_uri),
            ("scope", scopes),
            ("state", state),
            ("code_challenge", challenge),
            ("code_challenge_method", "S256"),
        ];
        // Without this the issuer may omit the refresh token (OpenID Connect Core, 11).
        if scopes.split(' ').any(|scope| scope == "offline_access") {
            parameters.push(("prompt", "consent"));
        }
        url.query_pairs_mut().extend_pairs(self.client_form(&parameters));
        Ok(url)
    }

    /// Exchanges the code of a redirect for tokens.
    ///
    /// # Errors
    /// [`Error`].
    pub(super) async fn exchange_code(
        &self,
        code: &str,
        redirect_uri: &str,
        verifier: &str,
    ) -> Result<Tokens, Error> {
        let grant = ("grant_type", "authorization_code");
        self.tokens(&[
            grant,
            ("code", code),
            ("redirect_uri", redirect_uri),
            ("code_verifier", verifier),
        ])
        .await
    }

    /// Exchanges a refresh token for new tokens.
    ///
    /// # Errors
    /// [`Error`]: `invalid_grant` when the session has ended.
    pub(super) async fn refresh(&self, token: &str) -> Result<Tokens, Error> {
        self.tokens(&[("grant_type", "refresh_token"), ("refresh_token", token)]).await
    }

    /// Revokes a refresh token (RFC 7009), if the issuer supports it.
    ///
    /// # Errors
    /// [`Error`].
    pub(super) async fn revoke(&self, token: &str) -> Result<(), Error> {
        let Some(endpoint) = &self.discovery.revocation_endpoint else { return Ok(()) };
        let form = [
            ("token", token),
            ("token_type_hint", "refresh_token"),
            ("client_id", self.client_id.as_str()),
        ];
        successful_body(self.send(endpoint, &form).await?).await.map(drop)
    }

    /// Whether a redirect's `iss` parameter is this issuer (RFC 9207).
    pub(super) fn is(&self, issuer: &str) -> bool {
        self.discovery.issuer == issuer
    }

    async fn tokens(&self, form: &[(&str, &str)]) -> Result<Tokens, Error> {
        self.post(&self.discovery.token_endpoint, &self.client_form(form)).await
    }

    /// Adds the client id and the resource indicator to a form.
    fn client_form<'a>(&'a self, form: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        let resource = self.resource.as_deref().map(|resource| ("resource", resource));
        form.iter()
            .copied()
            .chain([("client_id", self.client_id.as_str())])
            .chain(resource)
            .collect()
    }

    async fn post<T: DeserializeOwned>(
        &self,
        endpoint: &str,
        form: &[(&str, &str)],
    ) -> Result<T, Error> {
        read_json(self.send(endpoint, form).await?).await
    }

    async fn send(&self, endpoint: &str, form: &[(&str, &str)]) -> Result<Response, Error> {
        let body = Serializer::new(String::new()).extend_pairs(form).finish();
        let request = self.client.post(endpoint).header("accept", "application/json");
        let request =
            request.header("content-type", "application/x-www-form-urlencoded").body(body);
        request.send().await.map_err(|error| Error::Unreachable(error_chain(&error)))
    }
}

/// An HTTP client that follows no redirects: responses come only from the requested address.
pub(super) fn client_builder(address: &str) -> ClientBuilder {
    // Fails when a provider is installed already, which is fine.
    _ = rustls::crypto::ring::default_provider().install_default();
    let builder = Client::builder()
        .timeout(REQUEST_TIMEOUT)
        .redirect(Policy::none())
        .user_agent(concat!("construct/", env!("CARGO_PKG_VERSION")));
    // No proxy for local addresses.
    if is_local(address) { builder.no_proxy() } else { builder }
}

/// Reads the body of a response, up to a maximum size.
///
/// # Errors
/// The reason for people.
pub(super) async fn read_body(response: Response) -> Result<Vec<u8>, String> {
    let (mut body, mut bytes) = (response.bytes_stream(), Vec::new());
    while let Some(chunk) = body.next().await {
        bytes.extend_from_slice(&chunk.map_err(|error| error_chain(&error))?);
        if bytes.len() > MAX_RESPONSE_BYTES {
            return Err("the response is too large".to_owned());
        }
    }
    Ok(bytes)
}

/// Reads the body of a successful response.
async fn successful_body(response: Response) -> Result<Vec<u8>, Error> {
    let status = response.status();
    let body = read_body(response).await.map_err(Error::Unreachable)?;
    if status.is_success() {
        return Ok(body);
    }
    Err(match serde_json::from_slice::<Refusal>(&body) {
        Ok(Refusal { error, error_description }) if status.is_client_error() => {
            Error::Refused { code: one_line(&error), description: one_line(&error_description) }
        }
        _ => Error::Unreachable(format!("it responds with {status}")),
    })
}

async fn read_json<T: DeserializeOwned>(response: Response) -> Result<T, Error> {
    // Unreadable content is not quoted: it may be a token.
    serde_json::from_slice(&successful_body(response).await?)
        .map_err(|_| Error::Invalid("the issuer's response cannot be read".to_owned()))
}

/// Checks that an address is reached over TLS or on this machine.
///
/// # Errors
/// When it is not.
fn check_secure(address: &str, issuer: &str) -> Result<(), Error> {
    let secure = Url::parse(address).is_ok_and(|url| match url.scheme() {
        "https" => url.has_host(),
        "http" => is_local(address),
        _ => false,
    });
    if secure {
        Ok(())
    } else {
        Err(Error::Invalid(format!("the issuer {issuer} has an address without TLS")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn expires_in_is_a_number_or_a_string() {
        for (response, expected) in [
            (json!({"expires_in": 3600}), Some(3600.0)),
            (json!({"expires_in": "3599"}), Some(3599.0)),
            (json!({"expires_in": null}), None),
            (json!({"expires_in": "soon"}), None),
            (json!({}), None),
        ] {
            let tokens: Tokens = serde_json::from_value(response.clone()).unwrap();
            assert_eq!(tokens.expires_in, expected, "{response}");
        }
    }
}
