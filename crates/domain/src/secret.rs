//! Limits of secrets, which scripts use without seeing them: names, values and bindings.

use std::collections::HashSet;

/// Minimum size of a value in bytes, surrounding white space not counted. A shorter value cannot be
/// told from ordinary text, so it could not be scrubbed from output.
pub const MIN_VALUE_BYTES: usize = 8;
/// Minimum strength of a value in bits. A script could confirm a guess by having it echoed where
/// the value was sent. At ten million guesses a second, a search takes two hundred years.
pub const MIN_VALUE_BITS: u32 = 56;
/// Maximum size of a value in bytes.
pub const MAX_VALUE_BYTES: usize = 64 * 1024;
/// Maximum number of secrets of one agent.
pub const MAX_PER_AGENT: usize = 50;
/// Maximum length of a name in characters.
pub const MAX_NAME_CHARS: usize = 64;
/// Maximum length of a host in bytes.
const MAX_HOST_BYTES: usize = 253;
/// Maximum length of a program's name in bytes.
const MAX_COMMAND_BYTES: usize = 64;

/// Whether this is a valid name of a secret: `[A-Z][A-Z0-9_]{0,63}`.
pub fn is_name(text: &str) -> bool {
    text.len() <= MAX_NAME_CHARS
        && text.starts_with(|c: char| c.is_ascii_uppercase())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
}

/// Whether a secret can be bound to this host: a name, an IP address (IPv6 without brackets), or
/// every name below a domain (`*.example.com`). Not `*`: a secret that may be sent anywhere is no
/// secret.
pub fn is_host(text: &str) -> bool {
    if text.parse::<std::net::IpAddr>().is_ok() {
        return true;
    }
    let name = text.strip_prefix("*.").unwrap_or(text);
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| {
                byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_')
            })
    };
    // The last label is not a number. That would be an unusual spelling of an IP address.
    let is_top = |label: &str| label.starts_with(|c: char| c.is_ascii_lowercase());
    text.len() <= MAX_HOST_BYTES
        && name.split('.').all(is_label)
        && name.rsplit('.').next().is_some_and(is_top)
}

/// Whether a secret can be bound to this command: the name of a program, without a directory.
pub fn is_command(text: &str) -> bool {
    (1..=MAX_COMMAND_BYTES).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'+'))
}

/// Whether this is a valid value.
pub fn is_value(text: &str) -> bool {
    text.len() <= MAX_VALUE_BYTES && text.trim().len() >= MIN_VALUE_BYTES && !text.contains('\0')
}

/// Whether a value has less than [`MIN_VALUE_BITS`], however it was chosen. This counts characters
/// and knows no dictionary: a value that passes is not proven to be random.
pub fn is_guessable(text: &str) -> bool {
    let chars: Vec<char> = text.trim().chars().collect();
    let bits_per_char = alphabet(&chars).log2();
    let mut bits = 0.0;
    let mut seen = HashSet::new();
    for (index, char) in chars.iter().enumerate() {
        if let [.., first, second] = chars[..index] {
            // `123`, `cba` and `aaa` go on as they began, and so does what has stood there before.
            let step = i64::from(u32::from(second)) - i64::from(u32::from(first));
            let goes_on = step.abs() <= 1
                && i64::from(u32::from(*char)) - i64::from(u32::from(second)) == step;
            let is_new = seen.insert([first, second, *char]);
            if goes_on || !is_new {
                continue;
            }
        }
        bits += bits_per_char;
        if bits >= f64::from(MIN_VALUE_BITS) {
            return false;
        }
    }
    true
}

/// The number of characters in the alphabets that a text uses.
fn alphabet(text: &[char]) -> f64 {
    let any = |kind: fn(char) -> bool| text.iter().any(|char| kind(*char));
    let other = any(|char| !char.is_ascii_alphanumeric());
    let letters = any(|char| char.is_ascii_alphabetic());
    if letters && !other && text.iter().all(char::is_ascii_hexdigit) {
        return 16.0;
    }
    let kinds = [
        (any(|char| char.is_ascii_digit()), 10.0),
        (any(|char| char.is_ascii_lowercase()), 26.0),
        (any(|char| char.is_ascii_uppercase()), 26.0),
        (other, 33.0),
    ];
    kinds.into_iter().filter(|(there, _)| *there).map(|(_, count)| count).sum()
}

/// The program that a shell command line runs, if the shell certainly runs no other: one bare word,
/// followed by nothing that a shell may take for another command.
pub fn program(line: &str) -> Option<&str> {
    // Arithmetic expansion expands variables recursively, and their values may contain commands.
    let certain = !crate::policy::is_compound(line) && !line.contains("$[");
    line.split_ascii_whitespace().next().filter(|word| certain && is_command(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_hosts_and_commands_are_validated() {
        for (name, good) in [
            ("A", true),
            ("GITHUB_TOKEN_2", true),
            ("", false),
            ("a", false),
            ("_A", false),
            ("A-B", false),
        ] {
            assert_eq!(is_name(name), good, "{name:?}");
        }
        assert!(is_name(&"A".repeat(64)) && !is_name(&"A".repeat(65)));
        for (host, good) in [
            ("api.github.com", true),
            ("*.example.com", true),
            ("localhost", true),
            ("127.0.0.1", true),
            ("::1", true),
            ("*", false),
            ("", false),
            ("Api.github.com", false),
            ("a.*.com", false),
            ("https://a.com", false),
            ("a.com:443", false),
            ("a.com/b", false),
            ("a..com", false),
            ("a.com.", false),
            ("2130706433", false),
            ("0x7f.1", false),
            ("[::1]", false),
            ("*.0.0.1", false),
        ] {
            assert_eq!(is_host(host), good, "{host:?}");
        }
        for (command, good) in [
            ("git", true),
            ("python3.11", true),
            ("g++", true),
            ("./git", false),
            ("a b", false),
            ("", false),
            ("-x", false),
        ] {
            assert_eq!(is_command(command), good, "{command:?}");
        }
    }

    #[test]
    fn value_length_is_bounded() {
        assert!(is_value("12345678") && is_value(&"x".repeat(MAX_VALUE_BYTES)));
        assert!(
            !is_value("1234567")
                && !is_value("  1234567 ")
                && !is_value(&"x".repeat(MAX_VALUE_BYTES + 1))
        );
        assert!(!is_value("1234\u{0}5678"));
    }

    #[test]
    fn guessable_value_is_one_that_repeats_continues_or_is_short() {
        for value in [
            "48112345",
            "2026-11-28",
            "hunter2hunter2hunter2",
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            "abcdefghijklmnopqrstuvwxyz",
            "01234567899876543210",
            "abcabcabcabcabcabcabcabcabcabc",
            "Xk4!pq9Z",
            " 8f742231b10e8 \n",
            "7391840275610934",
        ] {
            assert!(is_guessable(value), "{value:?}");
        }
        for value in [
            "8f742231b10e8d99",
            "73918402756109342",
            "qzvkwmxhrtbp",
            "Xk4pq9ZrT2m",
            "ghp_x7Qw9Zk2Lm4Vt8Rp1eNd5Yc3Hs6Jf0Ab",
            "correct horse battery staple",
            "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIF",
        ] {
            assert!(!is_guessable(value), "{value:?}");
        }
    }

    #[test]
    fn program_is_returned_only_for_a_single_simple_command() {
        for (line, expected) in [
            ("curl -H \"Authorization: Bearer $TOKEN\" https://a.com", Some("curl")),
            ("  gh api /user ", Some("gh")),
            ("curl a; rev <x", None),
            ("curl $(rev x)", None),
            ("curl `rev x`", None),
            ("curl a | rev", None),
            ("curl a\nrev x", None),
            ("curl ${x@P}", None),
            ("curl $[x]", None),
            ("PATH=. curl a", None),
            ("./curl a", None),
            ("'curl' a", None),
            ("cu\\rl a", None),
            ("! curl", None),
            ("", None),
        ] {
            assert_eq!(program(line), expected, "{line}");
        }
    }
}
