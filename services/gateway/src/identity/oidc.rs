//! Log-in of people: tokens of one OpenID Connect issuer, whose keys are found by discovery.
//!
//! Keys are cached. An unknown key id, and keys older than an hour, make them be fetched again, at most once a minute whoever asks
//! how often; while the issuer is away, the keys that are known hold on.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use construct_store::identity::Profile;
use futures::StreamExt as _;
use jiff::Timestamp;
use jsonwebtoken::{
    Algorithm, DecodingKey, Validation, decode, decode_header,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse},
};
use serde::{Deserialize, de::DeserializeOwned};
use tokio::sync::Mutex;

/// How often the issuer is asked for its keys at most.
const PAUSE: Duration = Duration::from_secs(60);
/// When keys are asked for anew although all are known, so that one that was taken back is forgotten.
const FRESH: Duration = Duration::from_secs(3600);
/// How long the issuer may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of an answer of the issuer.
const ANSWER: usize = 1024 * 1024;
/// Keys of an issuer.
const KEYS: usize = 100;
/// How far clocks may be apart, in seconds.
const LEEWAY: i64 = 60;

/// Why a token tells nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// It is not one of the issuer for us, or its time is over.
    #[error("the token is not valid: {0}")]
    Invalid(&'static str),
    /// The issuer's keys are not known yet and cannot be had.
    #[error("the issuer's keys cannot be had")]
    Unavailable(#[source] Arc<anyhow::Error>),
}

/// An issuer.
pub(crate) struct Oidc {
    issuer: String,
    audience: String,
    client: reqwest::Client,
    keys: RwLock<Arc<Keys>>,
    /// Held while keys are fetched; when that was last tried, and how it failed.
    fetching: Mutex<Option<(Instant, Option<Arc<anyhow::Error>>)>>,
}

#[derive(Default)]
struct Keys {
    by_id: HashMap<String, (Algorithm, DecodingKey)>,
    without_id: Vec<(Algorithm, DecodingKey)>,
    fetched: Option<Instant>,
}

#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    jwks_uri: String,
}

/// Keys of kinds that are unknown here don't spoil the others.
#[derive(Deserialize)]
struct KeySet {
    keys: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
struct Claims {
    sub: String,
    exp: f64,
    nbf: Option<f64>,
    email: Option<String>,
    #[serde(default)]
    email_verified: serde_json::Value,
    name: Option<String>,
    preferred_username: Option<String>,
}

impl Oidc {
    pub(crate) fn new(issuer: &str, audience: &str) -> anyhow::Result<Self> {
        // Fails when somebody has chosen one already, which is as good.
        _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder()
            .timeout(TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("construct/", env!("CARGO_PKG_VERSION")))
            .build()
            .context("no client for the issuer of log-ins can be made")?;
        let (keys, fetching) = (RwLock::default(), Mutex::new(None));
        Ok(Self { issuer: issuer.to_owned(), audience: audience.to_owned(), client, keys, fetching })
    }

    /// Whom a token is of, and until when. `now` and `time` are the same moment.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) async fn verify(
        &self,
        token: &str,
        now: Instant,
        time: Timestamp,
    ) -> Result<(Profile, Timestamp), Error> {
        let header = decode_header(token).map_err(|_| Error::Invalid("it is no token"))?;
        if !matches!(header.alg, Algorithm::RS256 | Algorithm::ES256) {
            return Err(Error::Invalid("it is signed in another way than RS256 or ES256"));
        }
        let key = self.key(header.kid.as_deref(), header.alg, now).await?;
        let mut validation = Validation::new(header.alg);
        validation.set_issuer(&[&self.issuer]);
        validation.set_audience(&[&self.audience]);
        validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
        // Below, by the time that was given.
        validation.validate_exp = false;
        validation.validate_nbf = false;
        let claims = decode::<Claims>(token, &key, &validation)
            .map_err(|_| Error::Invalid("its signature, issuer or audience is another"))?
            .claims;
        let seconds = time.as_second();
        #[expect(clippy::cast_possible_truncation, reason = "a number that no time has becomes the first or last one")]
        let whole = |number: f64| number as i64;
        let until = whole(claims.exp).saturating_add(LEEWAY);
        if until <= seconds {
            return Err(Error::Invalid("its time is over"));
        }
        if claims.nbf.is_some_and(|from| whole(from).saturating_sub(LEEWAY) > seconds) {
            return Err(Error::Invalid("its time has not come"));
        }
        if claims.sub.is_empty() || claims.sub.len() > 255 {
            return Err(Error::Invalid("it names nobody"));
        }
        let email = claims.email.unwrap_or_default().trim().to_lowercase();
        let profile = Profile {
            issuer: self.issuer.clone(),
            subject: claims.sub,
            // Some issuers say it as a text.
            email_verified: claims.email_verified == true || claims.email_verified == "true",
            email: if email.len() <= 254 { email } else { String::new() },
            name: claims.name.or(claims.preferred_username).unwrap_or_default().chars().take(200).collect(),
        };
        Ok((profile, Timestamp::from_second(until).unwrap_or(Timestamp::MAX)))
    }

    async fn key(&self, id: Option<&str>, algorithm: Algorithm, now: Instant) -> Result<DecodingKey, Error> {
        let keys = self.known();
        let fresh = keys.fetched.is_some_and(|fetched| now.saturating_duration_since(fetched) < FRESH);
        let found = keys.find(id, algorithm);
        if let Some(key) = &found
            && fresh
        {
            return Ok(key.clone());
        }
        let failure = self.refresh(now).await;
        let keys = self.known();
        match (keys.find(id, algorithm).or(found), failure) {
            (Some(key), _) => Ok(key),
            (None, Some(failure)) if keys.fetched.is_none() => Err(Error::Unavailable(failure)),
            (None, _) => Err(Error::Invalid("it is signed with a key that its issuer does not have")),
        }
    }

    fn known(&self) -> Arc<Keys> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Fetches the keys, unless that was tried a moment ago. Gives why it last failed.
    async fn refresh(&self, now: Instant) -> Option<Arc<anyhow::Error>> {
        let mut last = self.fetching.lock().await;
        if let Some((tried, failure)) = &*last
            && now.saturating_duration_since(*tried) < PAUSE
        {
            return failure.clone();
        }
        let failure = match self.fetch().await {
            Ok(mut keys) => {
                keys.fetched = Some(now);
                *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
                None
            }
            Err(error) => Some(Arc::new(error)),
        };
        *last = Some((now, failure.clone()));
        failure
    }

    async fn fetch(&self) -> anyhow::Result<Keys> {
        let url = format!("{}/.well-known/openid-configuration", self.issuer.trim_end_matches('/'));
        let discovery: Discovery = self.get(&url).await?;
        anyhow::ensure!(discovery.issuer == self.issuer, "what is found there is another issuer");
        anyhow::ensure!(is_trustworthy(&discovery.jwks_uri), "its keys are at an address without TLS");
        let set: KeySet = self.get(&discovery.jwks_uri).await?;
        let mut keys = Keys::default();
        for key in set.keys.into_iter().take(KEYS) {
            let Ok(key) = serde_json::from_value::<Jwk>(key) else { continue };
            let algorithm = match &key.algorithm {
                AlgorithmParameters::RSA(_) => Algorithm::RS256,
                AlgorithmParameters::EllipticCurve(curve) if curve.curve == EllipticCurve::P256 => Algorithm::ES256,
                _ => continue,
            };
            if key.common.public_key_use.as_ref().is_some_and(|use_| *use_ != PublicKeyUse::Signature) {
                continue;
            }
            let Ok(decoding) = DecodingKey::from_jwk(&key) else { continue };
            match key.common.key_id {
                Some(id) => _ = keys.by_id.insert(id, (algorithm, decoding)),
                None => keys.without_id.push((algorithm, decoding)),
            }
        }
        Ok(keys)
    }

    async fn get<T: DeserializeOwned>(&self, url: &str) -> anyhow::Result<T> {
        let response = self.client.get(url).send().await?.error_for_status()?;
        let (mut body, mut bytes) = (response.bytes_stream(), Vec::new());
        while let Some(chunk) = body.next().await {
            bytes.extend_from_slice(&chunk?);
            anyhow::ensure!(bytes.len() <= ANSWER, "the answer is too long");
        }
        serde_json::from_slice(&bytes).with_context(|| format!("what {url} answers cannot be read"))
    }
}

impl Keys {
    fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Option<DecodingKey> {
        let mut fitting: Vec<&DecodingKey> = match id {
            Some(id) => {
                self.by_id.get(id).filter(|(known, _)| *known == algorithm).map(|(_, key)| key).into_iter().collect()
            }
            None => self
                .by_id
                .values()
                .chain(&self.without_id)
                .filter(|(known, _)| *known == algorithm)
                .map(|(_, key)| key)
                .collect(),
        };
        // A token that names no key is verified only where there is no choice.
        if fitting.len() > 1 { None } else { fitting.pop().cloned() }
    }
}

/// Whether what is read there is what was written: over TLS, or on this machine.
pub(crate) fn is_trustworthy(url: &str) -> bool {
    reqwest::Url::parse(url).is_ok_and(|url| match url.scheme() {
        "https" => url.host().is_some(),
        "http" => url.host_str().is_some_and(|host| {
            let bare = host.trim_start_matches('[').trim_end_matches(']');
            bare == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
        }),
        _ => false,
    })
}
