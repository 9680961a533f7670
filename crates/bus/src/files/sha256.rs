//! The name of a content.

use std::{fmt, io, str::FromStr};

use sha2::Digest as _;

use crate::subject::Invalid;

/// A SHA-256: 64 hexadecimal digits, small ones.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sha256([u8; 32]);

impl Sha256 {
    /// As it is stored.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// What is stored of it.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// That of a content which is at hand.
    pub fn digest(content: &[u8]) -> Self {
        Self(sha2::Sha256::digest(content).into())
    }

    /// That of what a reader gives, with its length. Reads it in pieces, on a thread that may
    /// block.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(reader: &mut impl io::Read) -> io::Result<(Self, u64)> {
        let mut hasher = sha2::Sha256::new();
        let mut piece = vec![0; super::CHUNK_BYTES];
        let mut size = 0;
        loop {
            match reader.read(&mut piece)? {
                0 => return Ok((Self::from_hasher(hasher), size)),
                read => {
                    hasher.update(&piece[..read]);
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

    /// Only the form that is printed: it names a file.
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
