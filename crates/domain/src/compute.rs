//! Where scripts run: pools of interpreters, each with a tier of limits.

/// The pools that every installation has, from small to large.
pub const STANDARD: [&str; 3] = ["cpu-2", "cpu-4", "cpu-8"];

/// Where scripts run unless something else is said.
pub const DEFAULT: &str = STANDARD[0];

/// A pool of machines with a graphics processor. No installation has it unless its operator says
/// so.
pub const GPU: &str = "gpu";

/// Bytes of a pool's name.
pub const NAME_BYTES: usize = 32;

/// Whether this is a pool's name: `[a-z][a-z0-9-]{0,31}`. Names stand in subjects, and in the names
/// of consumers.
pub fn is_name(text: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_lowercase();
    text.len() <= NAME_BYTES
        && text.bytes().next().is_some_and(letter)
        && text.bytes().all(|byte| letter(byte) || byte.is_ascii_digit() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_lower_case_words() {
        let longest = "a".repeat(NAME_BYTES);
        for good in ["cpu-2", "gpu", "a", "a100-80", longest.as_str()].into_iter().chain(STANDARD) {
            assert!(is_name(good), "{good}");
        }
        let too_long = "a".repeat(NAME_BYTES + 1);
        for bad in ["", "2cpu", "-a", "CPU-2", "a.b", "a_b", "a b", "a>", "ä", too_long.as_str()] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
