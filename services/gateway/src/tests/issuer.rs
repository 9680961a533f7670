//! A small OpenID Connect issuer: an HTTP server with discovery and keys, which signs valid tokens.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use axum::{Json, Router, extract::State, http::StatusCode, routing::get};
use base64::{Engine as _, prelude::BASE64_STANDARD, prelude::BASE64_URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use ring::{
    rand::SystemRandom,
    signature::{
        ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair,
        EcdsaSigningAlgorithm, Ed25519KeyPair, KeyPair as _, RsaKeyPair,
    },
};
use serde_json::{Value, json};

/// RSA keys for these tests only. Generating one takes longer than everything else here.
const RSA: [&str; 2] =
    [include_str!("issuer/first.der.b64"), include_str!("issuer/second.der.b64")];

pub(crate) const AUDIENCE: &str = "construct";

/// A key that the issuer signs with.
#[derive(Clone)]
pub(crate) struct Key {
    id: String,
    algorithm: Algorithm,
    signing: EncodingKey,
    public: Value,
}

impl Key {
    /// One of two RSA keys.
    pub(crate) fn rsa(id: &str, number: usize) -> Self {
        let der = BASE64_STANDARD.decode(RSA[number].replace('\n', "")).expect("base64");
        let pair = RsaKeyPair::from_der(&der).expect("an RSA key");
        // `SEQUENCE { INTEGER n, INTEGER 65537 }`: with 2048 bits, nine bytes precede n.
        let n = BASE64_URL_SAFE_NO_PAD.encode(&pair.public().as_ref()[9..265]);
        let public =
            json!({"kty": "RSA", "kid": id, "use": "sig", "alg": "RS256", "n": n, "e": "AQAB"});
        Self {
            id: id.to_owned(),
            algorithm: Algorithm::RS256,
            signing: EncodingKey::from_rsa_der(&der),
            public,
        }
    }

    /// The same key, published without its algorithm.
    pub(crate) fn without_algorithm(mut self) -> Self {
        self.public.as_object_mut().expect("an object").remove("alg");
        self
    }

    /// A new key on the curve P-256.
    pub(crate) fn ec(id: &str) -> Self {
        Self::on_curve(id, Algorithm::ES256, &ECDSA_P256_SHA256_FIXED_SIGNING, "P-256")
    }

    /// A new key on the curve P-384.
    pub(crate) fn ec384(id: &str) -> Self {
        Self::on_curve(id, Algorithm::ES384, &ECDSA_P384_SHA384_FIXED_SIGNING, "P-384")
    }

    fn on_curve(
        id: &str,
        algorithm: Algorithm,
        signing_algorithm: &'static EcdsaSigningAlgorithm,
        curve: &str,
    ) -> Self {
        let random = SystemRandom::new();
        let document =
            EcdsaKeyPair::generate_pkcs8(signing_algorithm, &random).expect("there is randomness");
        let pair = EcdsaKeyPair::from_pkcs8(signing_algorithm, document.as_ref(), &random)
            .expect("it was just made");
        // A byte with the encoding of the point, then both coordinates.
        let point = &pair.public_key().as_ref()[1..];
        let (x, y) = point.split_at(point.len() / 2);
        let public = json!({"kty": "EC", "crv": curve, "kid": id,
            "x": BASE64_URL_SAFE_NO_PAD.encode(x), "y": BASE64_URL_SAFE_NO_PAD.encode(y)});
        let signing = EncodingKey::from_ec_der(document.as_ref());
        Self { id: id.to_owned(), algorithm, signing, public }
    }

    /// A new Ed25519 key.
    pub(crate) fn ed(id: &str) -> Self {
        let document =
            Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).expect("there is randomness");
        let pair = Ed25519KeyPair::from_pkcs8(document.as_ref()).expect("it was just made");
        let x = BASE64_URL_SAFE_NO_PAD.encode(pair.public_key().as_ref());
        let public = json!({"kty": "OKP", "crv": "Ed25519", "kid": id, "alg": "EdDSA", "x": x});
        let signing = EncodingKey::from_ed_der(document.as_ref());
        Self { id: id.to_owned(), algorithm: Algorithm::EdDSA, signing, public }
    }

    pub(crate) fn sign(&self, claims: &Value) -> String {
        let header = Header { kid: Some(self.id.clone()), ..Header::new(self.algorithm) };
        encode(&header, claims, &self.signing).expect("it can be signed")
    }

    /// Signs with another algorithm of the same key.
    pub(crate) fn sign_as(&self, algorithm: Algorithm, claims: &Value) -> String {
        let header = Header { kid: Some(self.id.clone()), ..Header::new(algorithm) };
        encode(&header, claims, &self.signing).expect("it can be signed")
    }

    /// Signs without naming the key.
    pub(crate) fn sign_without_id(&self, claims: &Value) -> String {
        encode(&Header::new(self.algorithm), claims, &self.signing).expect("it can be signed")
    }
}

/// The issuer. It ends with the test's runtime.
pub(crate) struct Issuer {
    shared: Arc<Shared>,
}

struct Shared {
    url: String,
    /// The published keys.
    keys: Mutex<Vec<Value>>,
    unavailable: AtomicBool,
    requests: AtomicUsize,
}

impl Issuer {
    pub(crate) async fn start(keys: &[&Key]) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address: SocketAddr = listener.local_addr().expect("it is bound");
        let shared = Arc::new(Shared {
            url: format!("http://{address}"),
            keys: Mutex::default(),
            unavailable: AtomicBool::new(false),
            requests: AtomicUsize::new(0),
        });
        let issuer = Self { shared: Arc::clone(&shared) };
        issuer.publish(keys);
        let routes = Router::new()
            .route("/.well-known/openid-configuration", get(discovery))
            .route("/keys", get(published_keys))
            .with_state(shared);
        tokio::spawn(async move { axum::serve(listener, routes).await });
        issuer
    }

    pub(crate) fn url(&self) -> &str {
        &self.shared.url
    }

    /// Replaces the published keys. A key of an unknown type is always among them.
    pub(crate) fn publish(&self, keys: &[&Key]) {
        let unknown = json!({"kty": "AKP", "kid": "q", "alg": "ML-DSA-44", "pub": "AA"});
        let published = keys.iter().map(|key| key.public.clone()).chain([unknown]).collect();
        *self.shared.keys.lock().expect("no panic") = published;
    }

    /// Answers with 503, or answers again.
    pub(crate) fn set_unavailable(&self, unavailable: bool) {
        self.shared.unavailable.store(unavailable, Ordering::SeqCst);
    }

    /// How many requests there were for its discovery document, also failed ones.
    pub(crate) fn request_count(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Claims about a user that are valid for an hour.
    pub(crate) fn claims(&self, subject: &str, email: &str) -> Value {
        let now = jiff::Timestamp::now().as_second();
        json!({"iss": self.url(), "aud": AUDIENCE, "sub": subject, "email": email, "email_verified": true,
            "name": "Ada", "iat": now, "nbf": now, "exp": now + 3600})
    }
}

async fn discovery(State(shared): State<Arc<Shared>>) -> Result<Json<Value>, StatusCode> {
    shared.requests.fetch_add(1, Ordering::SeqCst);
    if shared.unavailable.load(Ordering::SeqCst) {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    Ok(Json(json!({"issuer": shared.url, "jwks_uri": format!("{}/keys", shared.url)})))
}

async fn published_keys(State(shared): State<Arc<Shared>>) -> Json<Value> {
    Json(json!({"keys": *shared.keys.lock().expect("no panic")}))
}
