//! Opens sealed API keys for calls. Otherwise only the gateway sees a vendor's key in the clear,
//! while it seals one: when the key is set, and again after a change of the master key.

use construct_proto::mesh::v1::SealedSecret;
use construct_runtime::{MasterKeys, OpenError};
use secrecy::SecretString;

use crate::failure::Failure;

/// The API key of provider `provider_id`, none when it has none. The id is the associated data, so
/// that a key sealed for one provider can't be used for another.
pub(crate) fn open(
    keys: &MasterKeys,
    provider_id: &str,
    sealed: Option<&SealedSecret>,
) -> Result<Option<SecretString>, Failure> {
    let Some(sealed) = sealed.filter(|sealed| !sealed.ciphertext.is_empty()) else {
        return Ok(None);
    };
    let opened = keys.open(provider_id, &sealed.key_id, &sealed.nonce, &sealed.ciphertext);
    opened.map(Some).map_err(|error| match error {
        OpenError::UnknownKey { id } => Failure::configuration(format!(
            "the provider's API key is sealed with master key `{id}`, which this service does not have"
        )),
        OpenError::Unopenable => Failure::configuration("the provider's API key cannot be opened: set it again"),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use construct_proto::mesh::v1::FailureClass;
    use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
    use secrecy::ExposeSecret as _;

    use super::*;

    /// Master keys for tests.
    pub(crate) fn keys() -> MasterKeys {
        MasterKeys::parse("k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
            .expect("a key of 32 bytes")
    }

    /// Seals `text` as the gateway does.
    pub(crate) fn seal(provider_id: &str, text: &str) -> SealedSecret {
        let keys = keys();
        let nonce = [7; 12];
        let key = UnboundKey::new(&AES_256_GCM, keys.active().expose()).expect("32 bytes");
        let mut ciphertext = text.as_bytes().to_vec();
        LessSafeKey::new(key)
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(provider_id.as_bytes()),
                &mut ciphertext,
            )
            .expect("a short text");
        SealedSecret { key_id: keys.active().id().to_owned(), nonce: nonce.to_vec(), ciphertext }
    }

    #[test]
    fn sealed_key_opens_only_for_its_provider_and_undamaged() {
        let sealed = seal("provider_1", "sk-1");
        let opened =
            open(&keys(), "provider_1", Some(&sealed)).expect("it opens").expect("there is a key");
        assert_eq!(opened.expose_secret(), "sk-1");
        let mut harmed = sealed.clone();
        harmed.ciphertext[0] ^= 1;
        let short = SealedSecret { nonce: vec![1], ..sealed.clone() };
        let foreign = SealedSecret { key_id: "k2".into(), ..sealed.clone() };
        for (provider, sealed) in [
            ("provider_2", &sealed),
            ("provider_1", &harmed),
            ("provider_1", &short),
            ("provider_1", &foreign),
        ] {
            let failure = open(&keys(), provider, Some(sealed)).expect_err("it must not open");
            assert_eq!(failure.class, FailureClass::Configuration);
        }
    }

    #[test]
    fn provider_without_key_opens_as_none() {
        assert!(open(&keys(), "p", None).expect("fine").is_none());
        assert!(open(&keys(), "p", Some(&SealedSecret::default())).expect("fine").is_none());
    }
}
