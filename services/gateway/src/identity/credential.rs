//! What opens doors: made here, given out once, known by its hash from then on.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use construct_store::identity::SecretHash;
use ring::rand::{SecureRandom as _, SystemRandom};
use sha2::{Digest as _, Sha256};
use tonic::Status;

/// How an API key begins.
pub(crate) const KEY: &str = "ct_";
/// How a set-up code begins.
pub(crate) const CODE: &str = "cs_";

/// Random bytes of each.
const BYTES: usize = 32;
/// Characters that are shown of each, so that people find the one they hold: 48 of its 256 bits.
const SHOWN: usize = 8;

/// A new key or code: the text, which is given away, and what is stored.
///
/// # Errors
/// `INTERNAL` when the operating system gives no randomness.
pub(crate) fn mint(kind: &str) -> Result<(String, SecretHash), Status> {
    let mut bytes = [0; BYTES];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| Status::internal("the machine gives no randomness"))?;
    let text = format!("{kind}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes));
    let secret = SecretHash { prefix: text[..kind.len() + SHOWN].to_owned(), hash: digest(&text) };
    Ok((text, secret))
}

/// What a key or code is known by. A plain hash will do: nobody guesses 256 random bits.
pub(crate) fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_long_random_and_known_by_its_hash() {
        let (first, secret) = mint(KEY).expect("there is randomness");
        let (second, _) = mint(KEY).expect("there is randomness");
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
