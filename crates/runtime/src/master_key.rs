//! Keys that encrypt confidential values in the database, such as the keys of model providers.
//!
//! One active key encrypts; any number of retired ones still decrypt. To rotate, put the new key in
//! front of the old one, restart, re-encrypt everything, then remove the old one.

use std::{
    fmt,
    fs::File,
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use secrecy::{ExposeSecret, SecretBox, SecretString, zeroize::Zeroizing};
use sha2::{Digest as _, Sha256};

/// Length of a key in bytes: AES-256.
const KEY_BYTES: usize = 32;

/// More than any sensible number of keys needs: a file at a wrong path must not be read into memory
/// as a whole.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// One key and its name, to which ciphertexts refer.
#[derive(Clone)]
pub struct MasterKey {
    id: String,
    bytes: Arc<SecretBox<[u8; KEY_BYTES]>>,
}

impl MasterKey {
    /// Name of the key, stored beside its ciphertexts. Letters, digits, `-` and `_`, at most 32.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The key itself.
    pub fn expose(&self) -> &[u8; KEY_BYTES] {
        self.bytes.expose_secret()
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MasterKey").field("id", &self.id).finish_non_exhaustive()
    }
}

/// All keys of an installation.
#[derive(Debug, Clone)]
pub struct MasterKeys {
    active: MasterKey,
    retired: Vec<MasterKey>,
}

impl MasterKeys {
    /// Parses keys from text: `base64` or `id:base64`, separated by commas or newlines. The first
    /// is active. Empty lines and lines that begin with `#` are skipped.
    ///
    /// A key without an id gets one from its own SHA-256, so that it keeps its id at any position
    /// of the list, and keys can be rotated without inventing names.
    ///
    /// # Errors
    /// [`Error`], with the position of the bad entry and never its text.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let entries = text
            .lines()
            .filter(|line| !line.trim_start().starts_with('#'))
            .flat_map(|line| line.split(','))
            .map(str::trim)
            .filter(|entry| !entry.is_empty());
        let mut keys: Vec<MasterKey> = Vec::new();
        for (index, entry) in entries.enumerate() {
            let key = parse_entry(entry, index + 1)?;
            if keys.iter().any(|other| other.id == key.id) {
                return Err(Error::Duplicate { id: key.id });
            }
            keys.push(key);
        }
        let mut keys = keys.into_iter();
        let active = keys.next().ok_or(Error::Empty)?;
        Ok(Self { active, retired: keys.collect() })
    }

    /// Reads keys from a file that only its owner may read.
    ///
    /// A file of another user may be readable by its group: this is how orchestrators mount secrets
    /// into processes that do not run as root.
    ///
    /// # Errors
    /// [`Error`]: unreadable, readable by others, or malformed.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let unreadable = |source| Error::Read { path: path.to_owned(), source };
        // Checks the permissions of the opened file, because the path may refer to another one a
        // moment later.
        let file = File::open(path).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(unreadable(io::Error::other("it is not a regular file")));
        }
        let mode = metadata.mode() & 0o777;
        let is_ours = metadata.uid() == rustix::process::geteuid().as_raw();
        let forbidden = if is_ours { 0o077 } else { 0o037 };
        if mode & forbidden != 0 {
            return Err(Error::Permissions { path: path.to_owned(), mode });
        }
        let mut text = Zeroizing::new(String::new());
        file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(unreadable(io::Error::other("it is larger than 64 KiB")));
        }
        Self::parse(&text)
    }

    /// The key that encrypts.
    pub fn active(&self) -> &MasterKey {
        &self.active
    }

    /// The key with this id, active or retired, for decryption.
    pub fn get(&self, id: &str) -> Option<&MasterKey> {
        self.iter().find(|key| key.id == id)
    }

    /// Decrypts a ciphertext (AES-256-GCM, the tag at the end) of `record` with the key `key_id`.
    ///
    /// # Errors
    /// [`OpenError`], which reveals nothing about the text.
    pub fn open(
        &self,
        record: &str,
        key_id: &str,
        nonce: &[u8],
        ciphertext: &[u8],
    ) -> Result<SecretString, OpenError> {
        let key =
            self.get(key_id).ok_or_else(|| OpenError::UnknownKey { id: key_id.to_owned() })?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| OpenError::Unopenable)?;
        let key = UnboundKey::new(&AES_256_GCM, key.expose()).map_err(|_| OpenError::Unopenable)?;
        // Decrypted in place and copied once, into a box of exactly its length; the buffer is
        // wiped.
        let mut buffer = Zeroizing::new(ciphertext.to_vec());
        let opened =
            LessSafeKey::new(key).open_in_place(nonce, Aad::from(record.as_bytes()), &mut buffer);
        let text = std::str::from_utf8(opened.map_err(|_| OpenError::Unopenable)?)
            .map_err(|_| OpenError::Unopenable)?;
        Ok(SecretString::from(text))
    }

    /// All keys, the active one first.
    pub fn iter(&self) -> impl Iterator<Item = &MasterKey> {
        std::iter::once(&self.active).chain(&self.retired)
    }
}

/// Why the master keys are unusable. Never contains a part of a key.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot be read from {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is accessible by more than its owner.
    #[error("names {}, which others may access (mode {mode:04o}): run `chmod 600 {}`", path.display(), path.display())]
    Permissions {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It contains no key.
    #[error("contains no key: expected 32 random bytes in base64")]
    Empty,
    /// An entry is not base64.
    #[error("has a key (number {position}) that is not valid base64")]
    Encoding {
        /// Position of the entry, from 1.
        position: usize,
    },
    /// A key has the wrong length.
    #[error("has a key (number {position}) of {length} bytes: a key has 32 bytes")]
    Length {
        /// Position of the entry, from 1.
        position: usize,
        /// Its length in bytes.
        length: usize,
    },
    /// An id has characters or a length that are not allowed.
    #[error("has a key (number {position}) whose id is not 1 to 32 letters, digits, `-` or `_`")]
    Id {
        /// Position of the entry, from 1.
        position: usize,
    },
    /// Two keys have the same id, so that a ciphertext would be ambiguous.
    #[error("has two keys with the id `{id}`")]
    Duplicate {
        /// The id.
        id: String,
    },
}

/// Why a ciphertext cannot be decrypted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// None of the keys has this id.
    #[error("it is encrypted with the key `{id}`, which this service does not have")]
    UnknownKey {
        /// The id.
        id: String,
    },
    /// It was changed, was encrypted for another record or with another key of the same id, or is
    /// not text.
    #[error("it cannot be decrypted")]
    Unopenable,
}

fn parse_entry(entry: &str, position: usize) -> Result<MasterKey, Error> {
    let (id, encoded) = match entry.split_once(':') {
        Some((id, encoded)) => (Some(id.trim()), encoded.trim()),
        None => (None, entry),
    };
    let decoded =
        Zeroizing::new(STANDARD.decode(encoded).map_err(|_| Error::Encoding { position })?);
    if decoded.len() != KEY_BYTES {
        return Err(Error::Length { position, length: decoded.len() });
    }
    let bytes =
        SecretBox::init_with_mut(|bytes: &mut [u8; KEY_BYTES]| bytes.copy_from_slice(&decoded));
    let id = match id {
        Some(id) if is_id(id) => id.to_owned(),
        Some(_) => return Err(Error::Id { position }),
        None => fingerprint(bytes.expose_secret()),
    };
    Ok(MasterKey { id, bytes: Arc::new(bytes) })
}

fn is_id(id: &str) -> bool {
    (1..=32).contains(&id.len())
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

/// 32 bits of a hash distinguish the few keys of an installation and reveal nothing useful about
/// 256 random bits.
fn fingerprint(key: &[u8; KEY_BYTES]) -> String {
    let mut hash = Sha256::new_with_prefix(b"construct master key id\0");
    hash.update(key);
    let hash = hash.finalize();
    format!("k{:02x}{:02x}{:02x}{:02x}", hash[0], hash[1], hash[2], hash[3])
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;
    use crate::{config::Common, telemetry::Chain};

    fn encoded(byte: u8) -> String {
        STANDARD.encode([byte; KEY_BYTES])
    }

    #[test]
    fn single_key_is_active_with_an_id_from_its_hash() {
        let keys = MasterKeys::parse(&format!("{}\n", encoded(1))).unwrap();
        assert_eq!(keys.active().expose(), &[1; 32]);
        assert!(
            keys.active().id().starts_with('k') && keys.active().id().len() == 9,
            "{}",
            keys.active().id()
        );
        assert_eq!(keys.iter().count(), 1);
    }

    #[test]
    fn rotated_key_keeps_its_id_and_still_decrypts() {
        let before = MasterKeys::parse(&encoded(1)).unwrap();
        let after = MasterKeys::parse(&format!("{},{}", encoded(2), encoded(1))).unwrap();
        assert_eq!(after.active().expose(), &[2; 32]);
        assert_eq!(after.get(before.active().id()).unwrap().expose(), &[1; 32]);
        assert!(after.get("unknown").is_none());
    }

    #[test]
    fn named_keys_comments_and_blank_lines_are_parsed() {
        let text =
            format!("# new, since March\n\n 2026-03 : {} \r\nold_1:{},\n", encoded(3), encoded(4));
        let keys = MasterKeys::parse(&text).unwrap();
        assert_eq!(keys.iter().map(MasterKey::id).collect::<Vec<_>>(), ["2026-03", "old_1"]);
        assert_eq!(keys.get("old_1").unwrap().expose(), &[4; 32]);
    }

    #[test]
    fn malformed_text_is_rejected_without_repeating_it() {
        let short = STANDARD.encode([7; 16]);
        for (text, expected) in [
            (String::new(), "contains no key"),
            ("# only a comment".to_owned(), "contains no key"),
            (short.clone(), "of 16 bytes"),
            (format!("{},{short}", encoded(1)), "number 2"),
            ("sup3r-secret!".to_owned(), "not valid base64"),
            (format!("a b:{}", encoded(1)), "whose id"),
            (format!(":{}", encoded(1)), "whose id"),
            (format!("a:{},a:{}", encoded(1), encoded(2)), "two keys with the id `a`"),
            (format!("{0},{0}", encoded(1)), "two keys"),
        ] {
            let error = MasterKeys::parse(&text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert!(
                !error.contains("sup3r") && !error.contains(&short) && !error.contains(&encoded(1)),
                "{error}"
            );
        }
    }

    #[test]
    fn debug_output_has_ids_and_no_keys() {
        let keys = MasterKeys::parse(&format!("main:{}", encoded(0xAB))).unwrap();
        let debug = format!("{keys:?}");
        assert!(
            debug.contains("main") && !debug.contains("171") && !debug.contains("ab, ab"),
            "{debug}"
        );
    }

    #[test]
    fn key_file_accessible_by_others_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("master.key");
        fs::write(&path, encoded(5)).unwrap();
        for mode in [0o644, 0o640, 0o604, 0o620, 0o601] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = MasterKeys::read(&path).unwrap_err().to_string();
            assert!(
                error.contains(&format!("mode {mode:04o}")) && error.contains("chmod 600"),
                "{error}"
            );
        }
        for mode in [0o600, 0o400] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(MasterKeys::read(&path).unwrap().active().expose(), &[5; 32]);
        }
    }

    #[test]
    fn missing_file_folder_and_huge_file_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let huge = folder.path().join("huge");
        fs::write(&huge, "#".repeat(100_000)).unwrap();
        fs::set_permissions(&huge, fs::Permissions::from_mode(0o600)).unwrap();
        for (path, expected) in [
            (folder.path().join("missing"), "No such file"),
            (folder.path().to_owned(), "not a regular file"),
            (huge, "larger than 64 KiB"),
        ] {
            let error = Chain(&MasterKeys::read(&path).unwrap_err()).to_string();
            assert!(
                error.contains(expected) && error.contains(&path.display().to_string()),
                "{error}"
            );
        }
    }

    #[test]
    fn configuration_needs_exactly_one_source_of_keys() {
        let none = Common::default();
        assert!(none.master_keys().unwrap_err().to_string().contains("CONSTRUCT_MASTER_KEY_FILE"));

        let text = Common { master_key: Some(encoded(1).into()), ..Common::default() };
        assert_eq!(text.master_keys().unwrap().active().expose(), &[1; 32]);

        let both = Common { master_key_file: Some("/k".into()), ..text };
        assert!(both.master_keys().unwrap_err().to_string().contains("set one of them"));
    }

    #[test]
    fn secrets_keys_are_optional_and_no_master_keys() {
        let none = Common { master_key: Some(encoded(1).into()), ..Common::default() };
        assert!(none.secrets_keys().unwrap().is_none());
        let empty = Common { secrets_key: Some("".into()), ..none.clone() };
        assert!(empty.secrets_keys().unwrap().is_none());
        let own = Common { secrets_key: Some(encoded(2).into()), ..none.clone() };
        assert_eq!(own.secrets_keys().unwrap().unwrap().active().expose(), &[2; 32]);
        let shared = Common {
            secrets_key: Some(format!("s:{},m:{}", encoded(2), encoded(1)).into()),
            ..none.clone()
        };
        let refused = shared.secrets_keys().unwrap_err().to_string();
        assert!(
            refused.contains("`secrets_key`") && refused.contains("also a master key"),
            "{refused}"
        );
        // The interpreter has no master key and does not need one for this.
        let alone = Common { secrets_key: Some(encoded(2).into()), ..Common::default() };
        assert!(alone.secrets_keys().unwrap().is_some());
        let both = Common { secrets_key_file: Some("/k".into()), ..alone };
        assert!(
            both.secrets_keys()
                .unwrap_err()
                .to_string()
                .contains("set together with `secrets_key_file`")
        );
    }

    #[test]
    fn ciphertext_decrypts_only_unchanged_and_for_its_record() {
        let keys = MasterKeys::parse(&format!("k:{}", encoded(3))).unwrap();
        let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[3; 32]).unwrap());
        let mut sealed = b"the text".to_vec();
        let nonce = Nonce::assume_unique_for_key([9; 12]);
        key.seal_in_place_append_tag(nonce, Aad::from(b"record"), &mut sealed).unwrap();
        assert_eq!(
            keys.open("record", "k", &[9; 12], &sealed).unwrap().expose_secret(),
            "the text"
        );
        let unknown = keys.open("record", "other", &[9; 12], &sealed).unwrap_err();
        assert_eq!(unknown, OpenError::UnknownKey { id: "other".into() });
        for (record, nonce, sealed) in [
            ("another", &[9; 12][..], &sealed[..]),
            ("record", &[8; 12], &sealed),
            ("record", &[9; 3], &sealed),
            ("record", &[9; 12], b""),
        ] {
            assert_eq!(keys.open(record, "k", nonce, sealed).unwrap_err(), OpenError::Unopenable);
        }
    }
}
