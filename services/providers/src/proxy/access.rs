//! Authorization of requests: which token may call which model.

use axum::http::{HeaderMap, header::AUTHORIZATION};
use construct_runtime::{MasterKeys, ModelToken};
use jiff::Timestamp;

use super::refusal::{Kind, Refusal};

/// The token of a request, from `Authorization: Bearer` or `x-api-key`: SDKs differ.
pub(crate) fn verify_token(
    headers: &HeaderMap,
    keys: &MasterKeys,
    now: Timestamp,
) -> Result<ModelToken, Refusal> {
    let bearer =
        headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
        });
    let given = bearer.or_else(|| headers.get("x-api-key")?.to_str().ok());
    let Some(given) = given else {
        let words = "no token: send one of `construct token create` as the API key";
        return Err(Refusal::new(Kind::Unauthenticated, words));
    };
    ModelToken::verify(given, keys, now)
        .map_err(|error| Refusal::new(Kind::Unauthenticated, error.to_string()))
}

/// The requested model, when the token is valid for it.
pub(crate) fn allowed_model<'a>(token: &'a ModelToken, asked: &str) -> Result<&'a str, Refusal> {
    let found = if asked.is_empty() {
        token.models.first()
    } else {
        token.models.iter().find(|model| *model == asked)
    };
    found.map(String::as_str).ok_or_else(|| {
        let words = format!(
            "the token is not good for a model `{asked}`; it is for: {}",
            token.models.join(", ")
        );
        Refusal::new(Kind::NoModel, words)
    })
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn keys() -> MasterKeys {
        crate::sealed_key::tests::keys()
    }

    fn example_token() -> ModelToken {
        ModelToken {
            id: "t".into(),
            organization: "o".into(),
            task: String::new(),
            key: String::new(),
            models: vec!["opus".into(), "mini".into()],
            budget_pico_usd: 0,
            expires_at: Timestamp::MAX,
        }
    }

    #[test]
    fn token_is_read_from_either_header() {
        let token = ModelToken {
            expires_at: Timestamp::from_second(9_000_000_000).expect("a time"),
            ..example_token()
        };
        let text = token.sign(&keys());
        let value = |text: String| HeaderValue::from_str(&text).expect("a header");
        for (name, text) in [
            ("authorization", format!("Bearer {}", text.expose())),
            ("authorization", format!("bearer  {}", text.expose())),
            ("x-api-key", text.expose().to_owned()),
        ] {
            let headers = HeaderMap::from_iter([(name.parse().expect("a name"), value(text))]);
            assert_eq!(verify_token(&headers, &keys(), Timestamp::UNIX_EPOCH), Ok(token.clone()));
        }
        for headers in [
            HeaderMap::new(),
            HeaderMap::from_iter([(AUTHORIZATION, value(format!("Basic {}", text.expose())))]),
        ] {
            assert_eq!(
                verify_token(&headers, &keys(), Timestamp::UNIX_EPOCH).map_err(|error| error.kind),
                Err(Kind::Unauthenticated)
            );
        }
    }

    #[test]
    fn only_models_of_the_token_are_allowed() {
        assert_eq!(allowed_model(&example_token(), "mini"), Ok("mini"));
        assert_eq!(allowed_model(&example_token(), ""), Ok("opus"));
        assert_eq!(
            allowed_model(&example_token(), "other").map_err(|error| error.kind),
            Err(Kind::NoModel)
        );
    }
}
