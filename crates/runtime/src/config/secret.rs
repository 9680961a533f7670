//! Strings that must not be displayed: masked in `Debug` and when serialized, wiped from memory
//! when dropped.

use std::fmt;

use secrecy::{ExposeSecret, SecretString};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, Visitor},
};

const MASK: &str = "***";

/// An opaque secret such as a key or a token.
#[derive(Clone, Default)]
pub struct Secret(SecretString);

impl Secret {
    /// The secret itself. Review every use of this carefully.
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }
}

/// An address that may contain credentials: everything before its last `@` is masked when it is
/// displayed.
///
/// A list of addresses is cut at the last `@` as well, so its earlier hosts are hidden too: a
/// password may contain any of the characters at which it could be cut more precisely.
#[derive(Clone, Default)]
pub struct SecretUrl(SecretString);

impl SecretUrl {
    /// The address with its credentials, for the connecting client.
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }
}

impl fmt::Display for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = self.expose();
        let Some((scheme, rest)) = url.split_once("://") else {
            // Without a scheme the parts are unknown; `host:port` has no credentials to hide.
            return if url.contains('@') { f.write_str(MASK) } else { f.write_str(url) };
        };
        let (credentials, shown) = match rest.rsplit_once('@') {
            Some((_, shown)) => ("***@", shown),
            None => ("", rest),
        };
        // Parameters may contain a password too (`?password=…`), and only the client knows their
        // names.
        match shown.split_once('?') {
            Some((shown, _)) => write!(f, "{scheme}://{credentials}{shown}?{MASK}"),
            None => write!(f, "{scheme}://{credentials}{shown}"),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretUrl({self})")
    }
}

impl From<String> for Secret {
    fn from(secret: String) -> Self {
        Self(secret.into())
    }
}

impl From<&str> for Secret {
    fn from(secret: &str) -> Self {
        Self(secret.into())
    }
}

impl From<String> for SecretUrl {
    fn from(url: String) -> Self {
        Self(url.into())
    }
}

impl From<&str> for SecretUrl {
    fn from(url: &str) -> Self {
        Self(url.into())
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(if self.expose().is_empty() { "" } else { MASK })
    }
}

impl Serialize for SecretUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_string(Silent).map(Self)
    }
}

impl<'de> Deserialize<'de> for SecretUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_string(Silent).map(Self)
    }
}

/// Accepts a string, and reports any other type without its value: serde's usual error repeats it.
struct Silent;

impl Silent {
    fn refuse<T, E: de::Error>() -> Result<T, E> {
        Err(E::custom("must be a string (in the file: in quotes)"))
    }
}

impl Visitor<'_> for Silent {
    type Value = SecretString;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<SecretString, E> {
        Ok(value.into())
    }

    fn visit_string<E: de::Error>(self, value: String) -> Result<SecretString, E> {
        Ok(value.into())
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<SecretString, E> {
        Self::refuse()
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<SecretString, E> {
        Self::refuse()
    }

    fn visit_i128<E: de::Error>(self, _: i128) -> Result<SecretString, E> {
        Self::refuse()
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<SecretString, E> {
        Self::refuse()
    }

    fn visit_u128<E: de::Error>(self, _: u128) -> Result<SecretString, E> {
        Self::refuse()
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<SecretString, E> {
        Self::refuse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displayed_url_hides_unusual_credentials() {
        for (url, shown) in [
            ("postgres://construct:s3cret@db:5432/construct", "postgres://***@db:5432/construct"),
            ("postgres://construct:a/b@c?d,e@db/construct", "postgres://***@db/construct"),
            ("nats://token@127.0.0.1:4222", "nats://***@127.0.0.1:4222"),
            ("nats://u:p@one:4222,nats://u:p@two:4222", "nats://***@two:4222"),
            ("postgres://db/construct?password=s3cret", "postgres://db/construct?***"),
            ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
            ("127.0.0.1:4222", "127.0.0.1:4222"),
            ("u:p@127.0.0.1:4222", "***"),
        ] {
            let secret = SecretUrl::from(url);
            assert_eq!(secret.to_string(), shown);
            assert_eq!(format!("{secret:?}"), format!("SecretUrl({shown})"));
            assert_eq!(serde_json::to_value(&secret).unwrap(), serde_json::json!(shown));
            assert_eq!(secret.expose(), url);
        }
    }

    #[test]
    fn secret_is_masked_everywhere() {
        let secret = Secret::from("hunter2");
        assert_eq!(format!("{secret:?}"), "Secret(***)");
        assert_eq!(serde_json::to_string(&secret).unwrap(), "\"***\"");
        assert_eq!(secret.expose(), "hunter2");
    }
}
