//! Secrets that scripts may use without seeing them: what a name, a value and its bindings may be.

/// Fewest bytes of a value, white space around it not counted: what is shorter cannot be told from
/// ordinary text, and so cannot be taken out of what comes back.
pub const MIN_BYTES: usize = 8;
/// Most bytes of a value.
pub const MAX_BYTES: usize = 64 * 1024;
/// Most secrets that one agent may use.
pub const PER_AGENT: usize = 50;
/// Most hosts, and most commands, that one secret is bound to.
pub const BINDINGS: usize = 50;
/// Most characters of a name.
pub const NAME_CHARS: usize = 64;
/// Most bytes of a host.
const HOST_BYTES: usize = 253;
/// Most bytes of a program's name.
const COMMAND_BYTES: usize = 64;

/// Whether this can be the name of a secret: `[A-Z][A-Z0-9_]{0,63}`.
pub fn is_name(text: &str) -> bool {
    text.len() <= NAME_CHARS
        && text.starts_with(|c: char| c.is_ascii_uppercase())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
}

/// Whether a secret can be bound to this host: a name, an IP address (IPv6 without brackets), or
/// every name below one (`*.example.com`). Not every host: a secret that may be sent anywhere is
/// none.
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
    // The last label is no number, for that would be an IP address in one of its odd spellings.
    let is_top = |label: &str| label.starts_with(|c: char| c.is_ascii_lowercase());
    text.len() <= HOST_BYTES
        && name.split('.').all(is_label)
        && name.rsplit('.').next().is_some_and(is_top)
}

/// Whether a secret can be bound to this command: the name of a program, without a directory.
pub fn is_command(text: &str) -> bool {
    (1..=COMMAND_BYTES).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'+'))
}

/// Whether this can be a value.
pub fn is_value(text: &str) -> bool {
    text.len() <= MAX_BYTES && text.trim().len() >= MIN_BYTES && !text.contains('\0')
}

/// The program that a line of shell runs, when it is certain that the shell runs nothing else for
/// it: one bare word, then nothing that a shell may take for another command.
pub fn program(line: &str) -> Option<&str> {
    // Arithmetic expands variables in turn, and what stands in those may be a command.
    let certain = !crate::policy::is_compound(line) && !line.contains("$[");
    line.split_ascii_whitespace().next().filter(|word| certain && is_command(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_hosts_and_commands_follow_their_patterns() {
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
    fn a_value_is_neither_too_short_nor_too_long() {
        assert!(is_value("12345678") && is_value(&"x".repeat(MAX_BYTES)));
        assert!(
            !is_value("1234567")
                && !is_value("  1234567 ")
                && !is_value(&"x".repeat(MAX_BYTES + 1))
        );
        assert!(!is_value("1234\u{0}5678"));
    }

    #[test]
    fn the_program_of_a_line_is_known_only_when_nothing_else_can_run() {
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
