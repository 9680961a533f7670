//! What is common to tokens that are checked without a database: JSON Web Tokens (RFC 7519, HS256),
//! signed with the keys for tokens, each kind for an audience of its own, so that none is ever
//! taken for another.

use jiff::Timestamp;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::MasterKeys;

/// Who issues tokens, in the token.
const ISSUER: &str = "construct";

/// Why a text is not accepted as a token. Says nothing of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// It is no token of ours: malformed, or signed with a key that is not known here.
    #[error("the token is not valid here")]
    Invalid,
    /// It was one.
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

/// A token that says something until it expires, signed with the active key.
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

/// What a token for an audience says, and until when, if it was signed with one of `keys` and holds
/// at `now`.
///
/// # Errors
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
    // Against the clock that is passed in, below.
    wanted.validate_exp = false;
    let decoded =
        jsonwebtoken::decode::<Claims<T>>(text, &DecodingKey::from_secret(key.expose()), &wanted);
    let claims = decoded.map_err(|_| VerifyError::Invalid)?.claims;
    let expires_at = Timestamp::from_second(claims.exp).map_err(|_| VerifyError::Invalid)?;
    if expires_at <= now { Err(VerifyError::Expired) } else { Ok((claims.said, expires_at)) }
}
