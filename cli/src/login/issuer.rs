//! The issuer: an OpenID Provider, asked as a public client, which has no secret that a program on
//! everybody's machine could not keep.
//!
//! What its tokens say is not verified here: they come from the issuer itself over TLS (OpenID
//! Connect Core, 3.1.3.7), are for the gateway, and the gateway verifies them.

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
    gateway::{causes, read, stays_here},
    words::one_line,
};

/// How long an answer may take.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of an answer.
const LONGEST: usize = 1024 * 1024;
/// What not every issuer has; one that lists what it has would refuse them.
const OPTIONAL: [&str; 3] = ["profile", "email", "offline_access"];

/// Why the issuer does not do what it is asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Error {
    /// It says so, with one of the codes of RFC 6749.
    Refused { code: String, words: String },
    /// It does not answer, or not now.
    Away(String),
    /// It is none that people can be sent to.
    Wrong(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Refused { code, words } if words.is_empty() => {
                Self::failed(format!("the issuer refuses: {code}"))
            }
            Error::Refused { code, words } => {
                Self::failed(format!("the issuer refuses: {words} ({code})"))
            }
            Error::Away(words) => {
                Self::new(Exit::Unreachable, format!("the issuer cannot be reached: {words}"))
            }
            Error::Wrong(words) => Self::failed(words),
        }
    }
}

/// What the issuer says of itself.
#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    token_endpoint: String,
    authorization_endpoint: Option<String>,
    device_authorization_endpoint: Option<String>,
    revocation_endpoint: Option<String>,
    scopes_supported: Option<Vec<String>>,
}

/// What it gives to who has logged in.
#[derive(Deserialize)]
pub(super) struct Tokens {
    pub(super) access_token: Option<String>,
    pub(super) id_token: Option<String>,
    pub(super) refresh_token: Option<String>,
    #[serde(default, deserialize_with = "seconds")]
    pub(super) expires_in: Option<f64>,
}

/// Some issuers write numbers as texts.
fn seconds<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    let value = Value::deserialize(from)?;
    Ok(value.as_f64().or_else(|| value.as_str()?.parse().ok()))
}

/// A log-in that waits for a code to be entered (RFC 8628).
#[derive(Deserialize)]
pub(super) struct Begun {
    pub(super) device_code: String,
    pub(super) user_code: String,
    #[serde(alias = "verification_url")]
    pub(super) verification_uri: String,
    pub(super) verification_uri_complete: Option<String>,
    #[serde(deserialize_with = "whole_seconds")]
    pub(super) expires_in: u64,
    #[serde(default = "usual_interval", deserialize_with = "whole_seconds")]
    pub(super) interval: u64,
}

fn whole_seconds<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let value = Value::deserialize(from)?;
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    number.ok_or_else(|| D::Error::custom("not a number of seconds"))
}

const fn usual_interval() -> u64 {
    5
}

#[derive(Deserialize)]
struct Refusal {
    error: String,
    #[serde(default)]
    error_description: String,
}

/// An issuer, as the program that it knows.
pub(super) struct Issuer {
    client: Client,
    discovery: Discovery,
    client_id: String,
    /// What is asked for by its address (RFC 8707), where tokens are for an address and not for
    /// this program.
    resource: Option<String>,
}

impl Issuer {
    /// # Errors
    /// When it does not say what there is to know of it, or says it where others could.
    pub(super) async fn find(login: &Login, ca: Option<&Path>) -> Result<Self, Error> {
        let shown = one_line(&login.issuer);
        check(&login.issuer, &shown)?;
        let mut builder = builder(&login.issuer);
        // An issuer of the same house may be vouched for by the same; others are by who always
        // does.
        if let Some(ca) = ca {
            let bytes = read(ca).map_err(|failure| Error::Wrong(failure.message().to_owned()))?;
            let wrong = |error: reqwest::Error| {
                Error::Wrong(format!("{} cannot be used: {error}", ca.display()))
            };
            builder = builder.tls_certs_merge(Certificate::from_pem_bundle(&bytes).map_err(wrong)?);
        }
        let client = builder.build().map_err(|error| Error::Wrong(causes(&error)))?;
        let url =
            format!("{}/.well-known/openid-configuration", login.issuer.trim_end_matches('/'));
        let answer = client.get(url).send().await.map_err(|error| Error::Away(causes(&error)))?;
        let discovery: Discovery = read_answer(answer).await?;
        if discovery.issuer != login.issuer {
            return Err(Error::Wrong(format!("what {shown} says of itself is of another issuer")));
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
            check(endpoint, &shown)?;
        }
        let Login { client_id, audience, .. } = login;
        let is_address =
            Url::parse(audience).is_ok_and(|url| matches!(url.scheme(), "https" | "http"));
        let resource = Some(audience).filter(|_| is_address && audience != client_id).cloned();
        Ok(Self { client, discovery, client_id: client_id.clone(), resource })
    }

    /// The scopes without those that the issuer does not have and one can do without, as it is
    /// asked for them.
    pub(super) fn known(&self, scopes: Vec<String>) -> String {
        let has = |scope: &String| {
            let listed = self.discovery.scopes_supported.as_ref();
            !OPTIONAL.contains(&scope.as_str())
                || listed.is_none_or(|listed| listed.contains(scope))
        };
        scopes.into_iter().filter(has).collect::<Vec<_>>().join(" ")
    }

    /// Has it give a code that is entered elsewhere. Nothing if it does not do that, or not for
    /// this program.
    ///
    /// # Errors
    /// [`Error`].
    pub(super) async fn begin_device(&self, scopes: &str) -> Result<Option<Begun>, Error> {
        let Some(endpoint) = &self.discovery.device_authorization_endpoint else { return Ok(None) };
        match self.post(endpoint, &self.asking(&[("scope", scopes)])).await {
            Ok(begun) => Ok(Some(begun)),
            Err(Error::Refused { code, .. }) if code == "unauthorized_client" => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Asks whether a code was entered.
    ///
    /// # Errors
    /// [`Error`]: `authorization_pending` and `slow_down` are refusals that pass.
    pub(super) async fn device_tokens(&self, device_code: &str) -> Result<Tokens, Error> {
        let grant = "urn:ietf:params:oauth:grant-type:device_code";
        self.tokens(&[("grant_type", grant), ("device_code", device_code)]).await
    }

    /// Where a browser is sent to come back to `redirect`.
    ///
    /// # Errors
    /// When people cannot log in there like this.
    pub(super) fn page(
        &self,
        scopes: &str,
        redirect: &str,
        state: &str,
        challenge: &str,
    ) -> Result<Url, Error> {
        let none = || {
            Error::Wrong("the issuer has neither codes for devices nor a page to log in".to_owned())
        };
        let endpoint = self.discovery.authorization_endpoint.as_ref().ok_or_else(none)?;
        let mut page = Url::parse(endpoint).map_err(|_| none())?;
        let mut more = vec![
            ("response_type", "code"),
            ("redirect_uri", redirect),
            ("scope", scopes),
            ("state", state),
            ("code_challenge", challenge),
            ("code_challenge_method", "S256"),
        ];
        // Without this no refresh token has to be given (OpenID Connect Core, 11).
        if scopes.split(' ').any(|scope| scope == "offline_access") {
            more.push(("prompt", "consent"));
        }
        page.query_pairs_mut().extend_pairs(self.asking(&more));
        Ok(page)
    }

    /// Turns what a browser came back with into tokens.
    ///
    /// # Errors
    /// [`Error`].
    pub(super) async fn code_tokens(
        &self,
        code: &str,
        redirect: &str,
        verifier: &str,
    ) -> Result<Tokens, Error> {
        let grant = ("grant_type", "authorization_code");
        self.tokens(&[
            grant,
            ("code", code),
            ("redirect_uri", redirect),
            ("code_verifier", verifier),
        ])
        .await
    }

    /// Renews.
    ///
    /// # Errors
    /// [`Error`]: `invalid_grant` when it is over.
    pub(super) async fn refresh(&self, token: &str) -> Result<Tokens, Error> {
        self.tokens(&[("grant_type", "refresh_token"), ("refresh_token", token)]).await
    }

    /// Ends what a refresh token is of (RFC 7009), where the issuer does that.
    ///
    /// # Errors
    /// [`Error`].
    pub(super) async fn revoke(&self, token: &str) -> Result<(), Error> {
        let Some(endpoint) = &self.discovery.revocation_endpoint else { return Ok(()) };
        let asked = [
            ("token", token),
            ("token_type_hint", "refresh_token"),
            ("client_id", self.client_id.as_str()),
        ];
        done(self.send(endpoint, &asked).await?).await.map(drop)
    }

    /// Whether what a browser comes back with is from this issuer, as far as it says (RFC 9207).
    pub(super) fn is(&self, issuer: &str) -> bool {
        self.discovery.issuer == issuer
    }

    async fn tokens(&self, form: &[(&str, &str)]) -> Result<Tokens, Error> {
        self.post(&self.discovery.token_endpoint, &self.asking(form)).await
    }

    /// What is asked for, and who asks.
    fn asking<'a>(&'a self, form: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
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
        read_answer(self.send(endpoint, form).await?).await
    }

    async fn send(&self, endpoint: &str, form: &[(&str, &str)]) -> Result<Response, Error> {
        let body = Serializer::new(String::new()).extend_pairs(form).finish();
        let request = self.client.post(endpoint).header("accept", "application/json");
        let request =
            request.header("content-type", "application/x-www-form-urlencoded").body(body);
        request.send().await.map_err(|error| Error::Away(causes(&error)))
    }
}

/// A client of HTTP that follows nothing: an answer is from where it was asked for.
pub(super) fn builder(address: &str) -> ClientBuilder {
    // Fails when somebody has chosen one already, which is as good.
    _ = rustls::crypto::ring::default_provider().install_default();
    let builder = Client::builder()
        .timeout(TIMEOUT)
        .redirect(Policy::none())
        .user_agent(concat!("construct/", env!("CARGO_PKG_VERSION")));
    // A proxy is not the way to this machine.
    if stays_here(address) { builder.no_proxy() } else { builder }
}

/// The body of an answer, if it is not too long.
///
/// # Errors
/// Why it cannot be had, in words.
pub(super) async fn body(answer: Response) -> Result<Vec<u8>, String> {
    let (mut body, mut bytes) = (answer.bytes_stream(), Vec::new());
    while let Some(chunk) = body.next().await {
        bytes.extend_from_slice(&chunk.map_err(|error| causes(&error))?);
        if bytes.len() > LONGEST {
            return Err("the answer is too long".to_owned());
        }
    }
    Ok(bytes)
}

/// The body of an answer that says that it went well.
async fn done(answer: Response) -> Result<Vec<u8>, Error> {
    let status = answer.status();
    let body = body(answer).await.map_err(Error::Away)?;
    if status.is_success() {
        return Ok(body);
    }
    Err(match serde_json::from_slice::<Refusal>(&body) {
        Ok(Refusal { error, error_description }) if status.is_client_error() => {
            Error::Refused { code: one_line(&error), words: one_line(&error_description) }
        }
        _ => Error::Away(format!("it answers {status}")),
    })
}

async fn read_answer<T: DeserializeOwned>(answer: Response) -> Result<T, Error> {
    // What cannot be read is not quoted: it may be a token.
    serde_json::from_slice(&done(answer).await?)
        .map_err(|_| Error::Wrong("the issuer's answer cannot be read".to_owned()))
}

/// What goes to an address goes there alone: over TLS, or on this machine.
///
/// # Errors
/// When it does not.
fn check(address: &str, issuer: &str) -> Result<(), Error> {
    let fine = Url::parse(address).is_ok_and(|url| match url.scheme() {
        "https" => url.has_host(),
        "http" => stays_here(address),
        _ => false,
    });
    if fine {
        Ok(())
    } else {
        Err(Error::Wrong(format!("the issuer {issuer} has an address without TLS")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn how_long_a_token_lasts_may_be_a_number_or_a_text() {
        for (said, expected) in [
            (json!({"expires_in": 3600}), Some(3600.0)),
            (json!({"expires_in": "3599"}), Some(3599.0)),
            (json!({"expires_in": null}), None),
            (json!({"expires_in": "soon"}), None),
            (json!({}), None),
        ] {
            let tokens: Tokens = serde_json::from_value(said.clone()).unwrap();
            assert_eq!(tokens.expires_in, expected, "{said}");
        }
    }
}
