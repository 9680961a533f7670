//! The hash that names a content.

use std::{fmt, io, str::FromStr};

use sha2::Digest as _;

use crate::subject::Invalid;

/// A SHA-256: 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sha256([u8; 32]);

impl Sha256 {
    /// From its stored bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes, as stored.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The hash of a content in memory.
    pub fn digest(content: &[u8]) -> Self {
        Self(sha2::Sha256::digest(content).into())
    }

    /// The hash and the length of a reader's content. Reads in chunks, on a blocking thread.
    ///
    /// # Errors
    /// When reading fails.
    pub fn read(reader: &mut impl io::Read) -> io::Result<(Self, u64)> {
        let mut hasher = sha2::Sha256::new();
        let mut chunk = vec![0; super::CHUNK_BYTES];
        let mut size = 0;
        loop {
            match reader.read(&mut chunk)? {
                0 => return Ok((Self::from_hasher(hasher), size)),
                read => {
                    hasher.update(&chunk[..read]);
                    size += read as u64;
                }
            }
        }
    }

    pub(super) fn from_hasher(hasher: sha2::Sha256) -> Self {
        Self(hasher.finalize().into())
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Sha256 {
    type Err = Invalid;

    /// Only the displayed form is accepted: it names a file.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        let invalid = || Invalid::new("not a SHA-256", text);
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
        {
            return Err(invalid());
        }
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte =
                u8::from_str_radix(&text[2 * index..2 * index + 2], 16).map_err(|_| invalid())?;
        }
        Ok(Self(bytes))
    }
}
