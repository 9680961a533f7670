//! The stored session of a log-in.

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::issuer::Tokens;

/// A token for the gateway, and the refresh token that renews it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Session {
    pub(super) token: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) refresh: Option<String>,
    /// When the token expires, by this machine's clock.
    until: Timestamp,
}

/// The relevant claims of a token. The gateway verifies the token.
#[derive(Deserialize)]
struct Claims {
    aud: Value,
    exp: f64,
    iat: Option<f64>,
}

impl Session {
    /// Selects the token for the audience: the access token, else the ID token. None if neither has
    /// the audience. Without a new refresh token, that of the previous session stays valid.
    pub(super) fn from_tokens(
        tokens: Tokens,
        audience: &str,
        previous: Option<Self>,
        now: Timestamp,
    ) -> Option<Self> {
        let candidates = [tokens.access_token, tokens.id_token].into_iter().flatten();
        let (token, claims) = candidates
            .filter_map(|token| Claims::parse(&token).map(|claims| (token, claims)))
            .find(|(_, claims)| claims.is_for(audience))?;
        #[expect(clippy::cast_precision_loss, reason = "seconds since 1970")]
        let remaining = claims.exp - now.as_second() as f64;
        // The clocks may differ: prefer durations by the issuer's clock.
        let remaining = tokens
            .expires_in
            .unwrap_or(remaining)
            .min(claims.iat.map_or(f64::MAX, |iat| claims.exp - iat));
        #[expect(clippy::cast_possible_truncation, reason = "it is between zero and a year")]
        let remaining = SignedDuration::from_secs(remaining.clamp(0.0, 31_536_000.0) as i64);
        let refresh =
            tokens.refresh_token.or_else(|| previous.and_then(|previous| previous.refresh));
        Some(Self { token, refresh, until: now.checked_add(remaining).unwrap_or(Timestamp::MAX) })
    }

    pub(super) fn from_text(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    pub(super) fn to_text(&self) -> String {
        // Serializing plain data cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The time until the token expires; zero afterwards.
    pub(super) fn remaining(&self) -> Duration {
        Duration::try_from(self.until.duration_since(Timestamp::now())).unwrap_or_default()
    }
}

impl Claims {
    fn parse(token: &str) -> Option<Self> {
        let mut parts = token.split('.');
        let (_, body, _) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() {
            return None;
        }
        serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(body).ok()?).ok()
    }

    fn is_for(&self, audience: &str) -> bool {
        match &self.aud {
            Value::Array(audiences) => audiences.iter().any(|value| value == audience),
            value => value == audience,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn jwt(claims: &Value) -> Option<String> {
        Some(format!("e30.{}.c2ln", BASE64_URL_SAFE_NO_PAD.encode(claims.to_string())))
    }

    fn tokens(access: Option<String>, id: Option<String>) -> Tokens {
        Tokens { access_token: access, id_token: id, refresh_token: None, expires_in: None }
    }

    #[test]
    fn token_with_the_audience_is_selected() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let ours = jwt(&json!({"aud": ["other", "construct"], "exp": 1_000_600, "iat": 1_000_000}));
        let id = jwt(&json!({"aud": "construct", "exp": 1_000_300}));
        let others = jwt(&json!({"aud": "other", "exp": 1_000_600}));
        let selected = |access: &Option<String>, id: &Option<String>| {
            let session =
                Session::from_tokens(tokens(access.clone(), id.clone()), "construct", None, now)?;
            Some((session.token, session.until.as_second()))
        };
        assert_eq!(selected(&ours, &id), Some((ours.clone().unwrap(), 1_000_600)));
        for access in [&others, &Some("opaque".to_owned()), &Some("a.b.c".to_owned()), &None] {
            assert_eq!(selected(access, &id), Some((id.clone().unwrap(), 1_000_300)), "{access:?}");
            assert_eq!(selected(access, &others), None, "{access:?}");
            assert_eq!(selected(access, &None), None, "{access:?}");
        }
    }

    #[test]
    fn expiry_does_not_depend_on_the_local_clock() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let until = |claims: &Value, expires_in: Option<f64>| {
            let tokens = Tokens { expires_in, ..tokens(jwt(claims), None) };
            Session::from_tokens(tokens, "c", None, now).unwrap().until.as_second() - 1_000_000
        };
        // A clock that is an hour behind, and an issuer whose tokens start a little earlier.
        assert_eq!(
            until(&json!({"aud": "c", "exp": 1_007_200, "iat": 1_003_600}), Some(3600.0)),
            3600
        );
        assert_eq!(
            until(&json!({"aud": "c", "exp": 1_003_600, "iat": 999_700}), Some(3600.0)),
            3600
        );
        assert_eq!(until(&json!({"aud": "c", "exp": 1_003_600}), None), 3600);
        assert_eq!(
            until(&json!({"aud": "c", "exp": 1_000_300, "iat": 1_000_000}), Some(3600.0)),
            300
        );
        assert_eq!(until(&json!({"aud": "c", "exp": 900_000}), None), 0);
    }

    #[test]
    fn refresh_token_is_kept_until_it_is_replaced() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let with_refresh = |refresh: Option<&str>| Tokens {
            refresh_token: refresh.map(str::to_owned),
            ..tokens(jwt(&json!({"aud": "c", "exp": 1_000_300})), None)
        };
        let first = Session::from_tokens(with_refresh(Some("one")), "c", None, now).unwrap();
        let second = Session::from_tokens(with_refresh(None), "c", Some(first), now).unwrap();
        assert_eq!(second.refresh.as_deref(), Some("one"));
        let third =
            Session::from_tokens(with_refresh(Some("two")), "c", Some(second), now).unwrap();
        assert_eq!(third.refresh.as_deref(), Some("two"));
        assert!(Session::from_text(&third.to_text()).unwrap() == third);
    }
}
