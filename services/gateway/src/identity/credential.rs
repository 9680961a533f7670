//! API keys and set-up codes: created here, returned once, and stored as a hash.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use construct_store::identity::SecretHash;
use ring::rand::{SecureRandom as _, SystemRandom};
use sha2::{Digest as _, Sha256};
use tonic::Status;

/// Prefix of an API key.
pub(crate) const KEY: &str = "ct_";
/// Prefix of a set-up code.
pub(crate) const CODE: &str = "cs_";

/// Number of random bytes.
const RANDOM_BYTES: usize = 32;
/// Number of stored characters after the prefix, by which people recognize a key: 48 of its 256
/// bits.
const VISIBLE_CHARS: usize = 8;

/// Creates a key or code. Returns the text and what is stored.
///
/// # Errors
/// `INTERNAL` when the operating system provides no random numbers.
pub(crate) fn mint(kind: &str) -> Result<(String, SecretHash), Status> {
    let mut bytes = [0; RANDOM_BYTES];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| Status::internal("the machine provides no random numbers"))?;
    let text = format!("{kind}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes));
    let secret =
        SecretHash { prefix: text[..kind.len() + VISIBLE_CHARS].to_owned(), hash: digest(&text) };
    Ok((text, secret))
}

/// The hash of a key or code. A plain hash suffices for 256 random bits.
pub(crate) fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_is_random_and_stored_as_a_hash() {
        let (first, secret) = mint(KEY).expect("random numbers");
        let (second, _) = mint(KEY).expect("random numbers");
        assert_ne!(first, second);
        assert_eq!(first.len(), 3 + 43);
        assert!(
            first.starts_with(&secret.prefix) && secret.prefix.len() == 11,
            "{}",
            secret.prefix
        );
        assert_eq!(secret.hash, digest(&first));
        assert!(!format!("{secret:?}").contains(&format!("{:?}", secret.hash)));
    }
}
