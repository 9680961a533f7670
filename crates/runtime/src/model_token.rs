//! Tokens for scripts and programs to call models without a vendor's key.
//!
//! A token is a JSON Web Token (HS256), so that its verification needs no database. It is
//! short-lived and names the paying organization, the models and the budget. Anyone who has it can
//! use it until it expires: it cannot be revoked individually, only with the key that signed it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

pub use crate::signed::VerifyError;
use crate::{MasterKeys, config::Secret, signed};

/// The audience. Other tokens signed with the same key are rejected.
const AUDIENCE: &str = "construct-models";
/// Longer texts cannot be valid tokens.
const MAX_BYTES: usize = 16 * 1024;

/// The claims of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelToken {
    /// Identifies the token; its spending is recorded under this id.
    pub id: String,
    /// The paying organization.
    pub organization: String,
    /// The task; empty: for the organization itself.
    pub task: String,
    /// The API key that created it, to which its usage counts; empty: none.
    pub key: String,
    /// Names of the models that may be called. The first is the default for requests that name
    /// none.
    pub models: Vec<String>,
    /// The most it may spend, in 10⁻¹² US dollars; 0: no limit of its own.
    pub budget_pico_usd: i64,
    /// The time after which it is rejected.
    pub expires_at: Timestamp,
}

#[derive(Serialize, Deserialize)]
struct Claims {
    jti: String,
    org: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    task: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    key: String,
    models: Vec<String>,
    #[serde(default, skip_serializing_if = "is_zero")]
    budget: i64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &i64) -> bool {
    *value == 0
}

impl ModelToken {
    /// Signs the token with the active key.
    pub fn sign(&self, keys: &MasterKeys) -> Secret {
        let claims = Claims {
            jti: self.id.clone(),
            org: self.organization.clone(),
            task: self.task.clone(),
            key: self.key.clone(),
            models: self.models.clone(),
            budget: self.budget_pico_usd,
        };
        Secret::from(signed::sign(AUDIENCE, claims, self.expires_at, keys))
    }

    /// Verifies that `text` was signed with one of `keys` and is valid at `now`.
    ///
    /// # Errors
    /// [`VerifyError`].
    pub fn verify(text: &str, keys: &MasterKeys, now: Timestamp) -> Result<Self, VerifyError> {
        if text.len() > MAX_BYTES {
            return Err(VerifyError::Invalid);
        }
        let (claims, expires_at): (Claims, _) = signed::verify(AUDIENCE, text, keys, now)?;
        Ok(Self {
            id: claims.jti,
            organization: claims.org,
            task: claims.task,
            key: claims.key,
            models: claims.models,
            budget_pico_usd: claims.budget.max(0),
            expires_at,
        })
    }
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
    use jsonwebtoken::{Algorithm, EncodingKey, Header};

    use super::*;

    const KEY: &str = "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const OTHER: &str = "k2:AQECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

    fn keys(text: &str) -> MasterKeys {
        MasterKeys::parse(text).unwrap()
    }

    fn seconds(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn token() -> ModelToken {
        ModelToken {
            id: "t".into(),
            organization: "org_1".into(),
            task: "task_1".into(),
            key: "key_1".into(),
            models: vec!["opus".into(), "mini".into()],
            budget_pico_usd: 2_000_000_000_000,
            expires_at: seconds(1_000),
        }
    }

    #[test]
    fn token_verifies_until_it_expires() {
        let text = token().sign(&keys(KEY));
        assert_eq!(ModelToken::verify(text.expose(), &keys(KEY), seconds(999)), Ok(token()));
        assert_eq!(
            ModelToken::verify(text.expose(), &keys(KEY), seconds(1_000)),
            Err(VerifyError::Expired)
        );
        let plain =
            ModelToken { task: String::new(), key: String::new(), budget_pico_usd: 0, ..token() };
        let text = plain.sign(&keys(KEY));
        assert_eq!(ModelToken::verify(text.expose(), &keys(KEY), seconds(0)), Ok(plain));
    }

    #[test]
    fn retired_key_verifies_and_unknown_key_does_not() {
        let text = token().sign(&keys(KEY));
        let rotated = keys(&format!("{OTHER},{KEY}"));
        assert!(ModelToken::verify(text.expose(), &rotated, seconds(0)).is_ok());
        assert_eq!(
            ModelToken::verify(text.expose(), &keys(OTHER), seconds(0)),
            Err(VerifyError::Invalid)
        );
        // The same id with another key.
        let forged = OTHER.replace("k2", "k1");
        assert_eq!(
            ModelToken::verify(text.expose(), &keys(&forged), seconds(0)),
            Err(VerifyError::Invalid)
        );
    }

    #[test]
    fn token_with_a_changed_character_is_rejected() {
        let text = token().sign(&keys(KEY));
        let text = text.expose();
        for at_byte in 0..text.len() {
            let mut changed = text.as_bytes().to_vec();
            changed[at_byte] = if changed[at_byte] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            let verified = ModelToken::verify(&changed, &keys(KEY), seconds(0));
            // The last character of a part has unused bits.
            assert!(verified.is_err() || verified == Ok(token()), "{at_byte}");
        }
    }

    #[test]
    fn unsigned_token_is_rejected() {
        let text = token().sign(&keys(KEY));
        let claims = text.expose().split('.').nth(1).unwrap();
        for algorithm in ["none", "HS512", "RS256"] {
            let header = URL_SAFE_NO_PAD
                .encode(format!(r#"{{"alg":"{algorithm}","typ":"JWT","kid":"k1"}}"#));
            for signature in ["", "AAAA"] {
                let forged = format!("{header}.{claims}.{signature}");
                assert_eq!(
                    ModelToken::verify(&forged, &keys(KEY), seconds(0)),
                    Err(VerifyError::Invalid)
                );
            }
        }
        for text in ["", "a", "a.b", "a.b.c", &"x".repeat(MAX_BYTES + 1)] {
            assert_eq!(ModelToken::verify(text, &keys(KEY), seconds(0)), Err(VerifyError::Invalid));
        }
    }

    #[test]
    fn token_for_another_audience_is_rejected() {
        let claims = serde_json::json!({"iss": "construct", "aud": "elsewhere", "jti": "t", "exp": 1_000, "org": "o", "models": []});
        let header = Header { kid: Some("k1".into()), ..Header::new(Algorithm::HS256) };
        let key = keys(KEY);
        let text = jsonwebtoken::encode(
            &header,
            &claims,
            &EncodingKey::from_secret(key.active().expose()),
        )
        .unwrap();
        assert_eq!(ModelToken::verify(&text, &key, seconds(0)), Err(VerifyError::Invalid));
    }
}
