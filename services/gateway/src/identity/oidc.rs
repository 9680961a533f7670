//! Log-in of users with tokens of one OpenID Connect issuer, whose keys are found by discovery.
//!
//! Keys are cached. An unknown key id, and keys older than an hour, cause a new request for the
//! keys, at most once a minute in total. While the issuer is unavailable, the cached keys stay
//! valid.

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

use super::peer::is_loopback_host;

/// Minimum time between two requests for the keys.
const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(60);
/// Age at which cached keys are fetched again, so that revoked ones are removed.
const MAX_KEY_AGE: Duration = Duration::from_secs(3600);
/// Timeout of a request to the issuer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of a response of the issuer in bytes.
const MAX_RESPONSE_BYTES: usize = 1024 * 1024;
/// Maximum number of keys of an issuer.
const MAX_KEYS: usize = 100;
/// Maximum clock difference, in seconds.
const LEEWAY_SECONDS: i64 = 60;
/// The algorithms of RSA_ALGORITHMS keys.
const RSA_ALGORITHMS: [Algorithm; 6] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
];

/// Why a token is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// It is not a token of the issuer for this audience, or not valid now.
    #[error("the token is not valid: {0}")]
    Invalid(&'static str),
    /// No keys of the issuer are cached, and they cannot be fetched.
    #[error("the issuer's keys are unavailable")]
    Unavailable(#[source] Arc<anyhow::Error>),
}

/// An issuer.
#[derive(Clone)]
pub(crate) struct Oidc {
    issuer: String,
    audience: String,
    client: reqwest::Client,
    keys: Arc<RwLock<Arc<Keys>>>,
    /// Locked while keys are fetched. Has the time and the failure of the last attempt.
    fetching: Arc<Mutex<Option<(Instant, Failure)>>>,
}

/// Why the keys could not be fetched, if they could not.
type Failure = Option<Arc<anyhow::Error>>;

#[derive(Default)]
struct Keys {
    by_id: HashMap<String, VerificationKey>,
    without_id: Vec<VerificationKey>,
    fetched: Option<Instant>,
}

/// A key and the algorithms that it verifies.
struct VerificationKey {
    algorithms: Vec<Algorithm>,
    key: DecodingKey,
}

#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    jwks_uri: String,
}

/// Keys of unknown types do not invalidate the others.
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
        // Fails if a provider is installed already, which is fine.
        _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder()
            .timeout(TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("construct/", env!("CARGO_PKG_VERSION")))
            .build()
            .context("cannot create an HTTP client for the issuer")?;
        let (keys, fetching) = (Arc::default(), Arc::default());
        Ok(Self {
            issuer: issuer.to_owned(),
            audience: audience.to_owned(),
            client,
            keys,
            fetching,
        })
    }

    /// Verifies a token. Returns its user and its expiry. `now` and `time` are the same moment.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) async fn verify(
        &self,
        token: &str,
        now: Instant,
        time: Timestamp,
    ) -> Result<(Profile, Timestamp), Error> {
        let header = decode_header(token).map_err(|_| Error::Invalid("it is not a token"))?;
        if !RSA_ALGORITHMS.contains(&header.alg)
            && !matches!(header.alg, Algorithm::ES256 | Algorithm::ES384 | Algorithm::EdDSA)
        {
            return Err(Error::Invalid("it is not signed with an asymmetric key"));
        }
        let key = self.find_key(header.kid.as_deref(), header.alg, now).await?;
        let mut validation = Validation::new(header.alg);
        validation.set_issuer(&[&self.issuer]);
        validation.set_audience(&[&self.audience]);
        validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
        // Checked below, with the given time.
        validation.validate_exp = false;
        validation.validate_nbf = false;
        let claims = decode::<Claims>(token, &key, &validation)
            .map_err(|_| Error::Invalid("its signature, issuer or audience does not match"))?
            .claims;
        let seconds = time.as_second();
        #[expect(clippy::cast_possible_truncation, reason = "an out-of-range number saturates")]
        let whole = |number: f64| number as i64;
        let until = whole(claims.exp).saturating_add(LEEWAY_SECONDS);
        if until <= seconds {
            return Err(Error::Invalid("it has expired"));
        }
        if claims.nbf.is_some_and(|from| whole(from).saturating_sub(LEEWAY_SECONDS) > seconds) {
            return Err(Error::Invalid("it is not valid yet"));
        }
        if claims.sub.is_empty() || claims.sub.len() > 255 {
            return Err(Error::Invalid("it has no valid subject"));
        }
        let email = claims.email.unwrap_or_default().trim().to_lowercase();
        let profile = Profile {
            issuer: self.issuer.clone(),
            subject: claims.sub,
            // Some issuers send it as a string.
            email_verified: claims.email_verified == true || claims.email_verified == "true",
            email: if email.len() <= 254 { email } else { String::new() },
            name: claims
                .name
                .or(claims.preferred_username)
                .unwrap_or_default()
                .chars()
                .take(200)
                .collect(),
        };
        Ok((profile, Timestamp::from_second(until).unwrap_or(Timestamp::MAX)))
    }

    async fn find_key(
        &self,
        id: Option<&str>,
        algorithm: Algorithm,
        now: Instant,
    ) -> Result<DecodingKey, Error> {
        let keys = self.cached_keys();
        let fresh = keys
            .fetched
            .is_some_and(|fetched| now.saturating_duration_since(fetched) < MAX_KEY_AGE);
        if fresh && let Some(key) = keys.find(id, algorithm) {
            return Ok(key);
        }
        let failure = self.refresh(now).await;
        let keys = self.cached_keys();
        match (keys.find(id, algorithm), failure) {
            (Some(key), _) => Ok(key),
            (None, Some(failure)) if keys.fetched.is_none() => Err(Error::Unavailable(failure)),
            (None, _) => {
                Err(Error::Invalid("it is signed with a key that the issuer does not have"))
            }
        }
    }

    fn cached_keys(&self) -> Arc<Keys> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Fetches the keys, unless that was tried recently. Returns the last failure. The caller may
    /// be canceled meanwhile: the attempt is recorded before it starts, and runs to its end.
    async fn refresh(&self, now: Instant) -> Failure {
        let mut last = Arc::clone(&self.fetching).lock_owned().await;
        if let Some((tried, failure)) = &*last
            && now.saturating_duration_since(*tried) < MIN_FETCH_INTERVAL
        {
            return failure.clone();
        }
        *last = Some((now, Some(Arc::new(anyhow::anyhow!("the issuer has not answered")))));
        let this = self.clone();
        let fetching = tokio::spawn(async move {
            let failure = match this.fetch().await {
                Ok(mut keys) => {
                    keys.fetched = Some(now);
                    *this.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
                    None
                }
                Err(error) => Some(Arc::new(error)),
            };
            *last = Some((now, failure.clone()));
            failure
        });
        fetching.await.unwrap_or_else(|error| Some(Arc::new(error.into())))
    }

    async fn fetch(&self) -> anyhow::Result<Keys> {
        let url = format!("{}/.well-known/openid-configuration", self.issuer.trim_end_matches('/'));
        let discovery: Discovery = self.fetch_json(&url).await?;
        anyhow::ensure!(
            discovery.issuer == self.issuer,
            "the discovery document is of another issuer"
        );
        anyhow::ensure!(is_trustworthy(&discovery.jwks_uri), "the URL of its keys has no TLS");
        let set: KeySet = self.fetch_json(&discovery.jwks_uri).await?;
        let mut keys = Keys::default();
        for key in set.keys.into_iter().take(MAX_KEYS) {
            let Ok(key) = serde_json::from_value::<Jwk>(key) else { continue };
            let algorithms = algorithms(&key);
            if algorithms.is_empty()
                || key
                    .common
                    .public_key_use
                    .as_ref()
                    .is_some_and(|use_| *use_ != PublicKeyUse::Signature)
            {
                continue;
            }
            let Ok(decoding) = DecodingKey::from_jwk(&key) else { continue };
            let known = VerificationKey { algorithms, key: decoding };
            match key.common.key_id {
                Some(id) => _ = keys.by_id.insert(id, known),
                None => keys.without_id.push(known),
            }
        }
        Ok(keys)
    }

    async fn fetch_json<T: DeserializeOwned>(&self, url: &str) -> anyhow::Result<T> {
        let response = self.client.get(url).send().await?.error_for_status()?;
        let (mut body, mut bytes) = (response.bytes_stream(), Vec::new());
        while let Some(chunk) = body.next().await {
            bytes.extend_from_slice(&chunk?);
            anyhow::ensure!(bytes.len() <= MAX_RESPONSE_BYTES, "the response is too long");
        }
        serde_json::from_slice(&bytes).with_context(|| format!("the response of {url} is invalid"))
    }
}

impl Keys {
    fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Option<DecodingKey> {
        let fits = |known: &&VerificationKey| known.algorithms.contains(&algorithm);
        let mut fitting: Vec<&VerificationKey> = match id {
            Some(id) => self.by_id.get(id).filter(fits).into_iter().collect(),
            None => self.by_id.values().chain(&self.without_id).filter(fits).collect(),
        };
        // A token without a key id is only verified if the key is unambiguous.
        if fitting.len() > 1 { None } else { fitting.pop().map(|known| known.key.clone()) }
    }
}

/// The supported algorithms of a key; if the key names one, only that. So a token can only choose
/// among the algorithms that the issuer's key allows.
fn algorithms(key: &Jwk) -> Vec<Algorithm> {
    let kind: &[Algorithm] = match &key.algorithm {
        AlgorithmParameters::RSA(_) => &RSA_ALGORITHMS,
        AlgorithmParameters::EllipticCurve(curve) => match curve.curve {
            EllipticCurve::P256 => &[Algorithm::ES256],
            EllipticCurve::P384 => &[Algorithm::ES384],
            EllipticCurve::P521 | EllipticCurve::Ed25519 => &[],
        },
        AlgorithmParameters::OctetKeyPair(curve) if curve.curve == EllipticCurve::Ed25519 => {
            &[Algorithm::EdDSA]
        }
        _ => &[],
    };
    let Some(named) = key.common.key_algorithm else { return kind.to_vec() };
    named
        .to_string()
        .parse::<Algorithm>()
        .ok()
        .filter(|named| kind.contains(named))
        .into_iter()
        .collect()
}

/// Whether a response from there is authentic: over TLS, or from this machine.
pub(crate) fn is_trustworthy(url: &str) -> bool {
    reqwest::Url::parse(url).is_ok_and(|url| match url.scheme() {
        "https" => url.host().is_some(),
        "http" => url.host_str().is_some_and(is_loopback_host),
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::tests::issuer::{AUDIENCE, Issuer, Key};

    async fn verify(oidc: &Oidc, token: &str, after: Duration) -> Result<String, String> {
        let verified = oidc.verify(token, Instant::now() + after, Timestamp::now()).await;
        verified.map(|(profile, _)| profile.subject).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn only_valid_tokens_of_the_issuer_are_accepted() {
        let (rsa, ec, other) = (Key::rsa("r", 0), Key::ec("e"), Key::rsa("r", 1));
        let issuer = Issuer::start(&[&rsa, &ec]).await;
        let oidc = Oidc::new(issuer.url(), AUDIENCE).expect("client");
        let claims = issuer.claims("ada", "Ada@Example.com");
        for token in [rsa.sign(&claims), ec.sign(&claims), rsa.sign_without_id(&claims)] {
            assert_eq!(verify(&oidc, &token, Duration::ZERO).await, Ok("ada".to_owned()));
        }
        let (profile, _) = oidc
            .verify(&rsa.sign(&claims), Instant::now(), Timestamp::now())
            .await
            .expect("it is accepted");
        assert_eq!((profile.email.as_str(), profile.email_verified), ("ada@example.com", true));
        let now = Timestamp::now().as_second();
        let with = |field: &str, value: Value| {
            let mut changed = claims.clone();
            changed[field] = value;
            rsa.sign(&changed)
        };
        let without = |field: &str| {
            let mut changed = claims.clone();
            changed.as_object_mut().expect("an object").remove(field);
            rsa.sign(&changed)
        };
        let hs256 = jsonwebtoken::encode(
            &jsonwebtoken::Header {
                kid: Some("r".to_owned()),
                ..jsonwebtoken::Header::new(Algorithm::HS256)
            },
            &claims,
            &jsonwebtoken::EncodingKey::from_secret(b"public"),
        )
        .expect("it can be signed");
        let good = rsa.sign(&claims);
        let (head, signature) = good.rsplit_once('.').expect("three parts");
        for (what, token) in [
            ("another key under the same id", other.sign(&claims)),
            ("another audience", with("aud", json!("somebody else"))),
            ("another issuer", with("iss", json!("https://elsewhere.example"))),
            ("its time is over", with("exp", json!(now - 61))),
            ("its time has not come", with("nbf", json!(now + 120))),
            ("no subject", with("sub", json!(""))),
            ("no expiry", without("exp")),
            ("no audience", without("aud")),
            ("no issuer", without("iss")),
            ("a secret instead of a key", hs256),
            ("no signature", format!("{head}.")),
            ("half a signature", format!("{head}.{}", &signature[..20])),
            (
                "no algorithm",
                format!("eyJhbGciOiJub25lIn0.{}.", good.split('.').nth(1).expect("three parts")),
            ),
            ("not a token", "x.y.z".to_owned()),
        ] {
            assert!(verify(&oidc, &token, Duration::ZERO).await.is_err(), "{what}");
        }
        // Clocks may differ a little.
        assert!(verify(&oidc, &with("exp", json!(now - 30)), Duration::ZERO).await.is_ok());
    }

    #[tokio::test]
    async fn key_with_an_algorithm_verifies_no_other() {
        let any = Key::rsa("any", 0).without_algorithm();
        let named = Key::rsa("named", 1);
        let (ec, ec384, ed) = (Key::ec("ec"), Key::ec384("ec384"), Key::ed("ed"));
        let issuer = Issuer::start(&[&any, &named, &ec, &ec384, &ed]).await;
        let oidc = Oidc::new(issuer.url(), AUDIENCE).expect("client");
        let claims = issuer.claims("ada", "");
        for algorithm in RSA_ALGORITHMS {
            let known = verify(&oidc, &any.sign_as(algorithm, &claims), Duration::ZERO).await;
            assert_eq!(known, Ok("ada".to_owned()), "{algorithm:?}");
            let known = verify(&oidc, &named.sign_as(algorithm, &claims), Duration::ZERO).await;
            assert_eq!(known.is_ok(), algorithm == Algorithm::RS256, "{algorithm:?}");
        }
        for key in [&ec, &ec384, &ed] {
            assert_eq!(
                verify(&oidc, &key.sign(&claims), Duration::ZERO).await,
                Ok("ada".to_owned())
            );
        }
        // Keys of another issuer of these types, under the same ids.
        for key in [Key::rsa("any", 1), Key::ec("ec"), Key::ec384("ec384"), Key::ed("ed")] {
            assert!(verify(&oidc, &key.sign(&claims), Duration::ZERO).await.is_err());
        }
        // A signature with a key of one type is not valid for a key of another type.
        assert!(verify(&oidc, &Key::ec384("ec").sign(&claims), Duration::ZERO).await.is_err());
        assert!(verify(&oidc, &Key::ed("any").sign(&claims), Duration::ZERO).await.is_err());
    }

    #[tokio::test]
    async fn unknown_keys_are_fetched_at_most_once_a_minute() {
        let (old, new, unknown) = (Key::ec("old"), Key::ec("new"), Key::ec("unknown"));
        let issuer = Issuer::start(&[&old]).await;
        let oidc = Oidc::new(issuer.url(), AUDIENCE).expect("client");
        let claims = issuer.claims("ada", "");
        let begin = Duration::ZERO;
        assert!(verify(&oidc, &old.sign(&claims), begin).await.is_ok());
        issuer.publish(&[&new]);
        for _ in 0..20 {
            assert!(verify(&oidc, &unknown.sign(&claims), begin).await.is_err());
        }
        assert_eq!(issuer.request_count(), 1);
        // A minute later the new key is fetched, and the old one is no longer valid.
        let later = MIN_FETCH_INTERVAL + Duration::from_secs(1);
        assert!(verify(&oidc, &new.sign(&claims), later).await.is_ok());
        assert!(verify(&oidc, &old.sign(&claims), later).await.is_err());
        assert_eq!(issuer.request_count(), 2);
    }

    #[tokio::test]
    async fn cached_keys_outlive_an_outage_but_not_an_hour() {
        let (key, next) = (Key::rsa("one", 0), Key::rsa("two", 1));
        let issuer = Issuer::start(&[&key]).await;
        issuer.set_unavailable(true);
        let oidc = Oidc::new(issuer.url(), AUDIENCE).expect("client");
        let claims = issuer.claims("ada", "");
        let early = oidc.verify(&key.sign(&claims), Instant::now(), Timestamp::now()).await;
        assert!(matches!(early, Err(Error::Unavailable(_))), "no keys are cached yet: {early:?}");
        issuer.set_unavailable(false);
        let minutes = |minutes: u64| Duration::from_secs(minutes * 60 + 1);
        assert!(verify(&oidc, &key.sign(&claims), minutes(1)).await.is_ok());
        issuer.set_unavailable(true);
        assert!(verify(&oidc, &key.sign(&claims), minutes(90)).await.is_ok());
        issuer.publish(&[&next]);
        issuer.set_unavailable(false);
        assert!(verify(&oidc, &key.sign(&claims), minutes(95)).await.is_err());
        assert!(verify(&oidc, &next.sign(&claims), minutes(95)).await.is_ok());
    }
}
