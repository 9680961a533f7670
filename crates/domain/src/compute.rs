//! Pools of interpreters that run scripts. Each pool has a compute tier.

/// The pools of every installation, from small to large.
pub const STANDARD: [&str; 3] = ["cpu-2", "cpu-4", "cpu-8"];

/// The pool for scripts without a setting.
pub const DEFAULT: &str = STANDARD[0];

/// A pool of machines with a GPU. It exists only if the operator configures it.
pub const GPU: &str = "gpu";

/// Maximum length of a pool's name in bytes.
pub const MAX_NAME_BYTES: usize = 32;

/// Whether this is a valid pool name: `[a-z][a-z0-9-]{0,31}`. Names are part of subjects and
/// consumer names.
pub fn is_name(text: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_lowercase();
    text.len() <= MAX_NAME_BYTES
        && text.bytes().next().is_some_and(letter)
        && text.bytes().all(|byte| letter(byte) || byte.is_ascii_digit() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_names_are_short_lowercase_words() {
        let longest = "a".repeat(MAX_NAME_BYTES);
        for good in ["cpu-2", "gpu", "a", "a100-80", longest.as_str()].into_iter().chain(STANDARD) {
            assert!(is_name(good), "{good}");
        }
        let too_long = "a".repeat(MAX_NAME_BYTES + 1);
        for bad in ["", "2cpu", "-a", "CPU-2", "a.b", "a_b", "a b", "a>", "ä", too_long.as_str()] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
