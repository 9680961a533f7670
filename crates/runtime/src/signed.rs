//! Tokens that are verified without a database: JSON Web Tokens (RFC 7519, HS256), signed with the
//! token keys, each kind for its own audience, so that one is never accepted as another.

use jiff::Timestamp;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::MasterKeys;

/// The issuer in the token.
const ISSUER: &str = "construct";

/// Why a token is rejected. Reveals nothing about the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// Malformed, or signed with an unknown key.
    #[error("the token is invalid")]
    Invalid,
    /// Expired.
    #[error("the token has expired")]
    Expired,
}

#[derive(Serialize, Deserialize)]
struct Claims<T> {
    iss: String,
    aud: String,
    /// Whole seconds since 1970.
    exp: i64,
    #[serde(flatten)]
    said: T,
}

/// Signs claims with the active key, valid until they expire.
pub(crate) fn sign<T: Serialize>(
    audience: &str,
    said: T,
    expires_at: Timestamp,
    keys: &MasterKeys,
) -> String {
    let (iss, aud) = (ISSUER.to_owned(), audience.to_owned());
    let claims = Claims { iss, aud, exp: expires_at.as_second(), said };
    let key = keys.active();
    let header = Header { kid: Some(key.id().to_owned()), ..Header::new(Algorithm::HS256) };
    jsonwebtoken::encode(&header, &claims, &EncodingKey::from_secret(key.expose()))
        .expect("texts and numbers can be written as JSON, and any bytes are an HMAC key")
}

/// Verifies a token: the claims and the expiry, if it was signed for `audience` with one of `keys`
/// and is valid at `now`.
///
/// # Errors
/// [`VerifyError`].
/// [`VerifyError`].
pub(crate) fn verify<T: DeserializeOwned>(
    audience: &str,
    text: &str,
    keys: &MasterKeys,
    now: Timestamp,
) -> Result<(T, Timestamp), VerifyError> {
    let header = jsonwebtoken::decode_header(text).map_err(|_| VerifyError::Invalid)?;
    let key = header.kid.and_then(|id| keys.get(&id)).ok_or(VerifyError::Invalid)?;
    let mut wanted = Validation::new(Algorithm::HS256);
    wanted.set_issuer(&[ISSUER]);
    wanted.set_audience(&[audience]);
    // Checked below, against the given time.
    wanted.validate_exp = false;
    let decoded =
        jsonwebtoken::decode::<Claims<T>>(text, &DecodingKey::from_secret(key.expose()), &wanted);
    let claims = decoded.map_err(|_| VerifyError::Invalid)?.claims;
    let expires_at = Timestamp::from_second(claims.exp).map_err(|_| VerifyError::Invalid)?;
    if expires_at <= now { Err(VerifyError::Expired) } else { Ok((claims.said, expires_at)) }
}
