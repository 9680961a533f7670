//! What is kept of a log-in.

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::issuer::Tokens;

/// A token that the gateway takes, and what it is renewed with.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Session {
    pub(super) token: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) refresh: Option<String>,
    /// When the token ends, by this machine's clock.
    until: Timestamp,
}

/// What a token says, as far as it matters here. Whether it is true the gateway looks at.
#[derive(Deserialize)]
struct Claims {
    aud: Value,
    exp: f64,
    iat: Option<f64>,
}

impl Session {
    /// The one of the tokens that is for the audience: the access token if it says so, else the ID
    /// token. Nothing if neither does. An issuer that gives no new refresh token when it renews
    /// means the one of `before`.
    pub(super) fn of(
        tokens: Tokens,
        audience: &str,
        before: Option<Self>,
        now: Timestamp,
    ) -> Option<Self> {
        let fitting = [tokens.access_token, tokens.id_token].into_iter().flatten();
        let (token, claims) = fitting
            .filter_map(|token| Claims::of(&token).map(|claims| (token, claims)))
            .find(|(_, claims)| claims.is_for(audience))?;
        #[expect(clippy::cast_precision_loss, reason = "seconds since 1970")]
        let left = claims.exp - now.as_second() as f64;
        // The issuer's clock may be another one than ours; how long a token lasts it says by its
        // own.
        let left = tokens
            .expires_in
            .unwrap_or(left)
            .min(claims.iat.map_or(f64::MAX, |iat| claims.exp - iat));
        #[expect(clippy::cast_possible_truncation, reason = "it is between nothing and a year")]
        let left = SignedDuration::from_secs(left.clamp(0.0, 31_536_000.0) as i64);
        let refresh = tokens.refresh_token.or_else(|| before.and_then(|before| before.refresh));
        Some(Self { token, refresh, until: now.checked_add(left).unwrap_or(Timestamp::MAX) })
    }

    pub(super) fn from_text(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    pub(super) fn to_text(&self) -> String {
        // Plain texts cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// How long it lasts from now.
    pub(super) fn left(&self) -> Duration {
        Duration::try_from(self.until.duration_since(Timestamp::now())).unwrap_or_default()
    }
}

impl Claims {
    fn of(token: &str) -> Option<Self> {
        let mut parts = token.split('.');
        let (_, body, _) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() {
            return None;
        }
        serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(body).ok()?).ok()
    }

    fn is_for(&self, audience: &str) -> bool {
        match &self.aud {
            Value::Array(several) => several.iter().any(|one| one == audience),
            one => one == audience,
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
    fn the_token_that_is_for_the_gateway_is_the_one_that_is_kept() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let ours = jwt(&json!({"aud": ["other", "construct"], "exp": 1_000_600, "iat": 1_000_000}));
        let id = jwt(&json!({"aud": "construct", "exp": 1_000_300}));
        let others = jwt(&json!({"aud": "other", "exp": 1_000_600}));
        let kept = |access: &Option<String>, id: &Option<String>| {
            let session = Session::of(tokens(access.clone(), id.clone()), "construct", None, now)?;
            Some((session.token, session.until.as_second()))
        };
        assert_eq!(kept(&ours, &id), Some((ours.clone().unwrap(), 1_000_600)));
        for access in [&others, &Some("opaque".to_owned()), &Some("a.b.c".to_owned()), &None] {
            assert_eq!(kept(access, &id), Some((id.clone().unwrap(), 1_000_300)), "{access:?}");
            assert_eq!(kept(access, &others), None, "{access:?}");
            assert_eq!(kept(access, &None), None, "{access:?}");
        }
    }

    #[test]
    fn how_long_a_token_lasts_does_not_depend_on_this_machines_clock() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let until = |claims: &Value, expires_in: Option<f64>| {
            let tokens = Tokens { expires_in, ..tokens(jwt(claims), None) };
            Session::of(tokens, "c", None, now).unwrap().until.as_second() - 1_000_000
        };
        // A clock that is an hour behind, and an issuer that lets its tokens begin a little
        // earlier.
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
    fn a_refresh_token_holds_until_there_is_another_one() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let given = |refresh: Option<&str>| Tokens {
            refresh_token: refresh.map(str::to_owned),
            ..tokens(jwt(&json!({"aud": "c", "exp": 1_000_300})), None)
        };
        let first = Session::of(given(Some("one")), "c", None, now).unwrap();
        let second = Session::of(given(None), "c", Some(first), now).unwrap();
        assert_eq!(second.refresh.as_deref(), Some("one"));
        let third = Session::of(given(Some("two")), "c", Some(second), now).unwrap();
        assert_eq!(third.refresh.as_deref(), Some("two"));
        assert!(Session::from_text(&third.to_text()).unwrap() == third);
    }
}
