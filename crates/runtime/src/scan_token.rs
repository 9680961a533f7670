//! Tokens for the scanner to access the one task that explores for a scan, and nothing else.
//!
//! A token is a JSON Web Token (HS256) signed with the keys of [`crate::ModelToken`]s, for another
//! audience, so that one is never accepted as the other. It names one scan and one task of one
//! organization, and expires by itself. A verifier also checks whether the scan has ended.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    MasterKeys,
    config::Secret,
    signed::{self, VerifyError},
};

/// The audience.
const AUDIENCE: &str = "construct-scans";
/// Longer texts cannot be valid tokens.
const MAX_BYTES: usize = 4 * 1024;

/// The prefix of a token's text, which distinguishes it from other credentials in an
/// `authorization` header.
pub const PREFIX: &str = "cscan_";

/// The claims of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanToken {
    /// The scan.
    pub scan: String,
    /// The organization.
    pub organization: String,
    /// The task it gives access to.
    pub task: String,
    /// The caller who requested the scan.
    pub user: String,
    /// The time after which it is rejected.
    pub expires_at: Timestamp,
}

#[derive(Serialize, Deserialize)]
struct Claims {
    /// The scan.
    sub: String,
    org: String,
    task: String,
    user: String,
}

impl ScanToken {
    /// Signs the token with the active key.
    pub fn sign(&self, keys: &MasterKeys) -> Secret {
        let claims = Claims {
            sub: self.scan.clone(),
            org: self.organization.clone(),
            task: self.task.clone(),
            user: self.user.clone(),
        };
        let signed = signed::sign(AUDIENCE, claims, self.expires_at, keys);
        Secret::from(format!("{PREFIX}{signed}"))
    }

    /// Verifies that `text` was signed with one of `keys` and is valid at `now`.
    ///
    /// # Errors
    /// [`VerifyError`].
    pub fn verify(text: &str, keys: &MasterKeys, now: Timestamp) -> Result<Self, VerifyError> {
        let text = text
            .strip_prefix(PREFIX)
            .filter(|text| text.len() <= MAX_BYTES)
            .ok_or(VerifyError::Invalid)?;
        let (claims, expires_at): (Claims, _) = signed::verify(AUDIENCE, text, keys, now)?;
        Ok(Self {
            scan: claims.sub,
            organization: claims.org,
            task: claims.task,
            user: claims.user,
            expires_at,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelToken;

    const KEY: &str = "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const OTHER: &str = "k1:AQECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

    fn keys(text: &str) -> MasterKeys {
        MasterKeys::parse(text).unwrap()
    }

    fn seconds(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn token() -> ScanToken {
        ScanToken {
            scan: "scan_1".into(),
            organization: "org_1".into(),
            task: "task_1".into(),
            user: "user_1".into(),
            expires_at: seconds(1_000),
        }
    }

    #[test]
    fn token_verifies_until_it_expires() {
        let text = token().sign(&keys(KEY));
        assert_eq!(ScanToken::verify(text.expose(), &keys(KEY), seconds(999)), Ok(token()));
        assert_eq!(
            ScanToken::verify(text.expose(), &keys(KEY), seconds(1_000)),
            Err(VerifyError::Expired)
        );
        assert_eq!(
            ScanToken::verify(text.expose(), &keys(OTHER), seconds(0)),
            Err(VerifyError::Invalid)
        );
    }

    #[test]
    fn tokens_for_models_and_scans_are_not_interchangeable() {
        let keys = keys(KEY);
        let scan = token().sign(&keys);
        let bare = scan.expose().strip_prefix(PREFIX).unwrap();
        assert_eq!(ModelToken::verify(bare, &keys, seconds(0)), Err(VerifyError::Invalid));
        let model = ModelToken {
            id: "t".into(),
            organization: "org_1".into(),
            task: "task_1".into(),
            key: String::new(),
            models: vec!["m".into()],
            budget_pico_usd: 0,
            expires_at: seconds(1_000),
        };
        let text = format!("{PREFIX}{}", model.sign(&keys).expose());
        assert_eq!(ScanToken::verify(&text, &keys, seconds(0)), Err(VerifyError::Invalid));
    }

    #[test]
    fn token_with_a_changed_character_is_rejected() {
        let text = token().sign(&keys(KEY));
        for at_byte in 0..text.expose().len() {
            let mut changed = text.expose().as_bytes().to_vec();
            changed[at_byte] = if changed[at_byte] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            let verified = ScanToken::verify(&changed, &keys(KEY), seconds(0));
            // The last character of a part has unused bits.
            assert!(verified.is_err() || verified == Ok(token()), "{at_byte}");
        }
    }
}
