//! Encryption at rest: AES-256-GCM with a key that never enters the database.
//!
//! Each secret has its own nonce, and the id of its record as associated data: a ciphertext that is
//! copied into another row does not open. The key's id is stored beside it, so that keys can be
//! rotated. New secrets use the active key; old ones open with the key they name until they are
//! resealed.

use std::{collections::BTreeMap, fmt};

use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    hmac,
    rand::{SecureRandom, SystemRandom},
};
use secrecy::{ExposeSecret, SecretBox, SecretSlice, zeroize::Zeroize};

/// Why a secret could not be sealed or opened. Contains nothing of its content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The keyring has no such key.
    #[error("the master key `{id}` is not configured")]
    UnknownKey {
        /// The key's id.
        id: String,
    },
    /// The secret was tampered with, belongs to another record, or was sealed with another key of
    /// the same name.
    #[error("the secret of {record} cannot be opened with the master key `{key_id}`")]
    Unopenable {
        /// The record's id.
        record: String,
        /// The key's id.
        key_id: String,
    },
    /// The operating system provided no randomness, or the secret is too long to encrypt.
    #[error("the secret cannot be encrypted")]
    Unsealable,
}

/// An encrypted secret, as it is stored and sent to services that can open it.
#[derive(Clone, PartialEq, Eq)]
pub struct SealedSecret {
    /// The master key it is encrypted with.
    pub key_id: String,
    /// 96 random bits.
    pub nonce: Vec<u8>,
    /// The ciphertext, then the tag.
    pub ciphertext: Vec<u8>,
}

impl fmt::Debug for SealedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedSecret").field("key_id", &self.key_id).finish_non_exhaustive()
    }
}

impl SealedSecret {
    /// Encodes it as one byte string, for storage outside of the database.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes =
            Vec::with_capacity(1 + self.key_id.len() + self.nonce.len() + self.ciphertext.len());
        // Keys have short names: a longer one is truncated, and does not open.
        bytes.push(u8::try_from(self.key_id.len()).unwrap_or(u8::MAX));
        bytes.extend(self.key_id.bytes().take(usize::from(u8::MAX)));
        bytes.extend_from_slice(&self.nonce);
        bytes.extend_from_slice(&self.ciphertext);
        bytes
    }

    /// Decodes the result of [`SealedSecret::to_bytes`]; none when it is malformed.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (length, rest) = bytes.split_first()?;
        let (key_id, rest) = rest.split_at_checked(usize::from(*length))?;
        let (nonce, ciphertext) = rest.split_at_checked(NONCE_LEN)?;
        let key_id = std::str::from_utf8(key_id).ok()?.to_owned();
        Some(Self { key_id, nonce: nonce.to_vec(), ciphertext: ciphertext.to_vec() })
    }
}

/// Master keys by id, one of them active. Zeroed when dropped.
pub struct Keyring {
    active: String,
    keys: BTreeMap<String, SecretBox<[u8; 32]>>,
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyring")
            .field("active", &self.active)
            .field("ids", &self.keys.keys())
            .finish_non_exhaustive()
    }
}

impl Keyring {
    /// A keyring that seals with `active` and opens with any of `keys`.
    ///
    /// # Errors
    /// [`Error::UnknownKey`] when `active` is none of them.
    pub fn new(
        active: &str,
        keys: impl IntoIterator<Item = (String, [u8; 32])>,
    ) -> Result<Self, Error> {
        let keys: BTreeMap<_, _> =
            keys.into_iter().map(|(id, key)| (id, SecretBox::new(Box::new(key)))).collect();
        if !keys.contains_key(active) {
            return Err(Error::UnknownKey { id: active.to_owned() });
        }
        Ok(Self { active: active.to_owned(), keys })
    }

    /// The id of the key that new secrets are sealed with.
    pub fn active(&self) -> &str {
        &self.active
    }

    /// Encrypts `plaintext` for the record with the id `record` (`provider_…`).
    ///
    /// # Errors
    /// [`Error::Unsealable`] when the operating system provides no randomness.
    pub fn seal(&self, record: &str, plaintext: &[u8]) -> Result<SealedSecret, Error> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| Error::Unsealable)?;
        // Sealed in place: the only copy of the plaintext becomes the ciphertext. The capacity
        // includes the tag, so that no reallocation leaves a copy behind.
        let mut buffer = Vec::with_capacity(plaintext.len() + AES_256_GCM.tag_len());
        buffer.extend_from_slice(plaintext);
        self.key(&self.active)?
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(record.as_bytes()),
                &mut buffer,
            )
            .map_err(|_| Error::Unsealable)?;
        Ok(SealedSecret { key_id: self.active.clone(), nonce: nonce.to_vec(), ciphertext: buffer })
    }

    /// A keyed digest. With the key one can compare two secrets; without it the digest reveals
    /// nothing, not even by brute force.
    ///
    /// # Errors
    /// [`Error::UnknownKey`] never, because the active key is there.
    pub fn digest(&self, secret: &[u8]) -> Result<[u8; 32], Error> {
        let unknown = || Error::UnknownKey { id: self.active.clone() };
        let key = self.keys.get(&self.active).ok_or_else(unknown)?;
        let mut context =
            hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key.expose_secret()));
        context.update(b"construct digest of a secret\0");
        context.update(secret);
        let mut digest = [0; 32];
        digest.copy_from_slice(context.sign().as_ref());
        Ok(digest)
    }

    /// Decrypts the secret of the record with the id `record`.
    ///
    /// # Errors
    /// [`Error::UnknownKey`] or [`Error::Unopenable`].
    pub fn open(&self, record: &str, sealed: &SealedSecret) -> Result<SecretSlice<u8>, Error> {
        let unopenable =
            || Error::Unopenable { record: record.to_owned(), key_id: sealed.key_id.clone() };
        let nonce = Nonce::try_assume_unique_for_key(&sealed.nonce).map_err(|_| unopenable())?;
        let mut buffer = sealed.ciphertext.clone();
        let plaintext = self
            .key(&sealed.key_id)?
            .open_in_place(nonce, Aad::from(record.as_bytes()), &mut buffer)
            .map_err(|_| unopenable())?
            // Exactly as long as needed: the conversion into a box then moves nothing and leaves no
            // copy behind.
            .to_vec();
        buffer.zeroize();
        Ok(SecretSlice::from(plaintext))
    }

    fn key(&self, id: &str) -> Result<LessSafeKey, Error> {
        let unknown = || Error::UnknownKey { id: id.to_owned() };
        let key = self.keys.get(id).ok_or_else(unknown)?;
        UnboundKey::new(&AES_256_GCM, key.expose_secret())
            .map(LessSafeKey::new)
            .map_err(|_| unknown())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keyring(active: &str) -> Keyring {
        Keyring::new(active, [("old".to_owned(), [1; 32]), ("new".to_owned(), [2; 32])])
            .expect("the active key is there")
    }

    #[test]
    fn sealed_secret_opens_for_its_record() {
        let sealed = keyring("old").seal("provider_1", b"sk-1234").expect("it seals");
        assert_eq!(
            keyring("new").open("provider_1", &sealed).expect("it opens").expose_secret(),
            b"sk-1234"
        );
        assert!(!sealed.ciphertext.windows(4).any(|bytes| bytes == b"1234"));
    }

    #[test]
    fn sealed_secret_round_trips_as_bytes() {
        let sealed = keyring("old").seal("org_1", b"an archive").expect("it seals");
        let bytes = sealed.to_bytes();
        assert_eq!(SealedSecret::from_bytes(&bytes), Some(sealed));
        for part in [&b""[..], b"\x03ol", &bytes[..10]] {
            assert_eq!(SealedSecret::from_bytes(part), None);
        }
    }

    #[test]
    fn sealed_secret_does_not_open_for_another_record() {
        let sealed = keyring("old").seal("provider_1", b"sk-1234").expect("it seals");
        let error = keyring("old").open("provider_2", &sealed).expect_err("it must not open");
        assert_eq!(error, Error::Unopenable { record: "provider_2".into(), key_id: "old".into() });
    }

    #[test]
    fn tampered_secret_does_not_open() {
        let sealed = keyring("old").seal("provider_1", b"sk-1234").expect("it seals");
        for change in [
            SealedSecret { ciphertext: sealed.ciphertext[1..].to_vec(), ..sealed.clone() },
            SealedSecret { nonce: vec![0; 12], ..sealed.clone() },
            SealedSecret { nonce: vec![0; 3], ..sealed.clone() },
            SealedSecret { key_id: "new".into(), ..sealed.clone() },
            SealedSecret { key_id: "none".into(), ..sealed },
        ] {
            assert!(keyring("old").open("provider_1", &change).is_err(), "{change:?}");
        }
    }

    #[test]
    fn same_secret_is_sealed_differently_each_time() {
        let keyring = keyring("old");
        let (a, b) = (
            keyring.seal("r", b"x").expect("it seals"),
            keyring.seal("r", b"x").expect("it seals"),
        );
        assert_ne!((a.nonce, a.ciphertext), (b.nonce, b.ciphertext));
    }

    #[test]
    fn debug_output_has_no_secret() {
        let keyring =
            Keyring::new("k", [("k".to_owned(), [77; 32])]).expect("the active key is there");
        let sealed = keyring.seal("r", b"x").expect("it seals");
        assert!(!format!("{keyring:?} {sealed:?}").contains("77"));
    }

    #[test]
    fn keyring_without_its_active_key_is_rejected() {
        assert!(Keyring::new("none", [("k".to_owned(), [0; 32])]).is_err());
    }
}
