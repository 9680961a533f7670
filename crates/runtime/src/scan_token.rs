//! Tokens by which the scanner speaks to the one task that explores for a scan, and to nothing
//! else.
//!
//! A token is a JSON Web Token (HS256) signed with the keys of [`crate::ModelToken`]s, for another
//! audience, so that neither is ever taken for the other. It names one scan and one task of one
//! organization, and ends by itself; whoever accepts it also looks whether the scan is over.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    MasterKeys,
    config::Secret,
    signed::{self, VerifyError},
};

/// What they are for, in the token.
const AUDIENCE: &str = "construct-scans";
/// Longer texts are no tokens of ours.
const MAX_BYTES: usize = 4 * 1024;

/// How a token's text begins, so that it is told from what else may stand in an `authorization`
/// header.
pub const PREFIX: &str = "cscan_";

/// What a token says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanToken {
    /// The scan.
    pub scan: String,
    /// Whose it is.
    pub organization: String,
    /// The task it may be used for.
    pub task: String,
    /// Who wanted the scan.
    pub user: String,
    /// From then on it is refused.
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
    /// The token as text, signed with the active key.
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

    /// What the token `text` says, when it was signed with one of `keys` and holds at `now`.
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
    fn a_token_says_what_it_was_made_of_until_it_expires() {
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
    fn a_token_for_models_is_none_for_scans_and_the_other_way_round() {
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
    fn no_character_of_a_token_can_be_changed() {
        let text = token().sign(&keys(KEY));
        for at_byte in 0..text.expose().len() {
            let mut changed = text.expose().as_bytes().to_vec();
            changed[at_byte] = if changed[at_byte] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            let verified = ScanToken::verify(&changed, &keys(KEY), seconds(0));
            // The last character of a part has bits that say nothing.
            assert!(verified.is_err() || verified == Ok(token()), "{at_byte}");
        }
    }
}
