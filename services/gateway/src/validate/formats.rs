//! The kinds of texts that the contract names, as [`Format`].

use construct_domain::{access::Scope, secret, state};
use construct_proto::v1::field_rule::Format;
use tonic::codegen::http::Uri;

use super::thousands;

/// Characters of a name.
pub(crate) const NAME_CHARS: usize = 63;
/// Characters of a media type.
const MEDIA_TYPE_CHARS: usize = 100;
/// Bytes of a picture's address.
const HTTPS_URL_BYTES: usize = 2048;
/// Bytes of an e-mail address, as SMTP has it.
const EMAIL_BYTES: usize = 254;
/// Bytes of an idempotency key.
const KEY_BYTES: usize = 128;

/// What a text of this kind must be, when `text` is not.
pub(super) fn violation(format: Format, text: &str) -> Option<String> {
    let (is_valid, hint) = match format {
        Format::Unspecified => return None,
        Format::Name if is_name(text) => {
            (!looks_like_an_id(text), "must not look like an id".to_owned())
        }
        Format::Name => {
            let hint =
                "lower-case letters, digits, `.`, `_` and `-`, beginning with a letter or digit";
            (false, format!("must be 1 to {NAME_CHARS} characters: {hint}"))
        }
        Format::NamePrefix => (
            is_name(text),
            format!("must be empty or the beginning of a name, at most {NAME_CHARS} characters"),
        ),
        Format::SecretName => {
            let hint = "upper-case letters, digits and `_`, beginning with a letter";
            (
                secret::is_name(text),
                format!("must be 1 to {} characters: {hint}", secret::MAX_NAME_CHARS),
            )
        }
        Format::SecretNamePrefix => {
            let hint = format!(
                "must be empty or the beginning of a name, at most {} characters",
                secret::MAX_NAME_CHARS
            );
            (secret::is_name(text), hint)
        }
        Format::SecretValue if secret::is_value(text) && secret::is_guessable(text) => {
            let hint = "is too easy to guess: a script could find it by trying. It must be as hard to guess as 17 random digits, \
                        14 hexadecimal digits, 12 lowercase letters, or 10 letters and digits; repetitions and sequences do not \
                        count";
            (false, hint.to_owned())
        }
        Format::SecretValue => {
            let (least, most) = (secret::MIN_VALUE_BYTES, thousands(secret::MAX_VALUE_BYTES));
            let hint = format!(
                "must have {least} to {most} bytes (white space around it does not count for the least), and no \
                 U+0000: what is shorter could not be told from other text when it comes back"
            );
            (secret::is_value(text), hint)
        }
        Format::Host => {
            let hint = "must be a host in lower case, as `api.example.com`, `*.example.com` or an IP address";
            (secret::is_host(text), hint.to_owned())
        }
        Format::Program => {
            let hint = "must be the name of a program, without a directory and arguments";
            (secret::is_command(text), hint.to_owned())
        }
        Format::IdempotencyKey => {
            let is_valid = (1..=KEY_BYTES).contains(&text.len()) && is_visible(text);
            (is_valid, format!("must have 1 to {KEY_BYTES} visible ASCII characters, or be empty"))
        }
        Format::VisibleAscii => (is_visible(text), "must be visible ASCII characters".to_owned()),
        Format::Sha256 => {
            (is_sha256(text), "must be 64 hexadecimal digits in lower case, or empty".to_owned())
        }
        Format::AbsolutePath => {
            let is_valid = text.starts_with('/') && !text.split('/').any(|part| part == "..");
            (is_valid, "must be an absolute path without `..`".to_owned())
        }
        Format::FileName => {
            let is_path = text.contains('/') || text == "." || text == "..";
            (!is_path, "must be the name of a file, without a folder".to_owned())
        }
        Format::MediaType => {
            let hint =
                "must be like `application/pdf`, in lower case and without parameters, of at most";
            (is_media_type(text), format!("{hint} {MEDIA_TYPE_CHARS} characters"))
        }
        Format::MediaRange => {
            let range = text.strip_suffix("/*").map(|kind| format!("{kind}/x"));
            let is_valid = is_media_type(range.as_deref().unwrap_or(text));
            (is_valid, "must be like `image/png` or `image/*`, or empty".to_owned())
        }
        Format::HttpUrl => {
            let hint = "must be empty or an absolute `http://` or `https://` address without user name and password";
            (text.is_empty() || is_http_url(text), hint.to_owned())
        }
        Format::HttpsUrl => {
            let is_https = |url: reqwest::Url| url.scheme() == "https" && url.host().is_some();
            let is_valid =
                text.len() <= HTTPS_URL_BYTES && reqwest::Url::parse(text).is_ok_and(is_https);
            (
                text.is_empty() || is_valid,
                format!(
                    "must be empty or an `https` address of at most {HTTPS_URL_BYTES} characters"
                ),
            )
        }
        Format::Email => (
            is_email(text),
            format!("must be an e-mail address of at most {EMAIL_BYTES} characters"),
        ),
        Format::Scope => {
            let known =
                Scope::ALL.iter().map(|scope| scope.as_str()).collect::<Vec<_>>().join(", ");
            (Scope::parse(text).is_some(), format!("must be one of {known}"))
        }
        Format::DocumentName => (
            state::parse_name(text).is_some(),
            format!("must be one of: {}", state::NAMES.join(", ")),
        ),
    };
    (!is_valid).then_some(hint)
}

/// The regular expression of JSON Schema that texts of this kind match, where one says enough.
pub(crate) fn pattern(format: Format) -> Option<&'static str> {
    Some(match format {
        Format::Name | Format::NamePrefix => "^[a-z0-9][a-z0-9._-]{0,62}$",
        Format::SecretName | Format::SecretNamePrefix => "^[A-Z][A-Z0-9_]{0,63}$",
        Format::Program => "^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$",
        Format::IdempotencyKey => "^[!-~]{1,128}$",
        Format::VisibleAscii => "^[!-~]*$",
        Format::Sha256 => "^[0-9a-f]{64}$",
        Format::AbsolutePath => "^/",
        Format::FileName => "^[^/]+$",
        Format::MediaType => "^[a-z0-9][a-z0-9!#$&^_.+-]*/[a-z0-9][a-z0-9!#$&^_.+-]*$",
        Format::MediaRange => "^[a-z0-9][a-z0-9!#$&^_.+-]*/([*]|[a-z0-9][a-z0-9!#$&^_.+-]*)$",
        Format::HttpUrl => "^($|[Hh][Tt][Tt][Pp][Ss]?://)",
        Format::HttpsUrl => "^($|[Hh][Tt][Tt][Pp][Ss]://)",
        Format::Email => "^\\s*[^@\\s]+@[^\\s]+\\s*$",
        Format::Scope => "^(admin|[a-z]+:[a-z]+)$",
        Format::Unspecified | Format::SecretValue | Format::Host | Format::DocumentName => {
            return None;
        }
    })
}

/// Whether `text` has the form of a name. Ids have it too.
pub(crate) fn is_name(text: &str) -> bool {
    let is_alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.len() <= NAME_CHARS
        && text.bytes().next().is_some_and(is_alphanumeric)
        && text.bytes().all(|byte| is_alphanumeric(byte) || matches!(byte, b'.' | b'_' | b'-'))
}

/// Whether `text` is a prefix, an underscore and a UUID.
fn looks_like_an_id(text: &str) -> bool {
    text.rsplit_once('_')
        .is_some_and(|(_, tail)| tail.len() == 36 && uuid::Uuid::parse_str(tail).is_ok())
}

fn is_visible(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Two words of RFC 6838, in lower case.
fn is_media_type(text: &str) -> bool {
    let is_alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_word = |word: &str| {
        word.bytes().next().is_some_and(is_alphanumeric)
            && word.bytes().all(|byte| is_alphanumeric(byte) || b"!#$&-^_.+".contains(&byte))
    };
    text.len() <= MEDIA_TYPE_CHARS
        && text.split_once('/').is_some_and(|(kind, rest)| is_word(kind) && is_word(rest))
}

/// The address is shown to everybody who may read what it belongs to, so it has no password.
fn is_http_url(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    let has_user = uri.authority().is_some_and(|authority| authority.as_str().contains('@'));
    matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some() && !has_user
}

fn is_email(text: &str) -> bool {
    let email = text.trim().to_lowercase();
    let is_whole =
        email.split_once('@').is_some_and(|(name, host)| !name.is_empty() && !host.is_empty());
    let is_plain = !email.chars().any(|letter| letter.is_whitespace() || letter.is_control());
    is_whole && is_plain && email.len() <= EMAIL_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_of_their_format_at_its_edges_and_not_beyond() {
        let (longest, hash) = ("a".repeat(63), "0f".repeat(32));
        let (long_type, long_key) = (format!("a/{}", "b".repeat(98)), "k".repeat(128));
        let id = "agent_01890a5d-ac96-774b-bcce-b302099a8057";
        let (too_long, long_hash, too_long_type, too_long_key) = (
            format!("{longest}a"),
            format!("{hash}0"),
            format!("{long_type}b"),
            format!("{long_key}k"),
        );
        for (format, valid, invalid) in [
            (
                Format::Name,
                &["a", "0", "a.b_c-d", "claude-sonnet-4.5", &longest][..],
                &["", "-a", ".a", "_a", "A", "a b", "ä", "a/b", "a\0", &too_long, id][..],
            ),
            (Format::NamePrefix, &["a", id], &["A", "a b"]),
            (Format::SecretName, &["A", "A_1"], &["", "a", "_A", "1"]),
            (Format::Sha256, &[&hash], &["", "0F", &hash[1..], &long_hash]),
            (Format::IdempotencyKey, &["k", &long_key], &["a b", "ä", "\n", &too_long_key]),
            (Format::VisibleAscii, &["", "~!"], &["a b", "ä", "\t", "a\0"]),
            (
                Format::AbsolutePath,
                &["/", "/home/me", "/a/..b"],
                &["", "a", "./a", "/a/../b", "/.."],
            ),
            (Format::FileName, &["a.pdf", "...", "Übersicht 2026.txt"], &["a/b", ".", "..", "/"]),
            (
                Format::MediaType,
                &["text/csv", &long_type],
                &["text", "text/CSV", "*/x", "text/*", &too_long_type],
            ),
            (Format::MediaRange, &["image/*", "image/png"], &["*", "image", "image/**", "*/png"]),
            (
                Format::HttpUrl,
                &["", "http://localhost:11434/v1", "https://vendor"],
                &["ftp://host", "/v1", "not an address", "https://user:secret@host/v1"],
            ),
            (Format::HttpsUrl, &["", "https://host/a.png"], &["http://host", "https://", "a"]),
            (Format::Email, &["a@b", " Ada@Example.com "], &["a", "@b", "a@", "a b@c", "a@b\n.c"]),
            (Format::Scope, &["tasks:read", "admin"], &["tasks", "Admin", ""]),
            (Format::DocumentName, &["settings"], &["", "nothing"]),
        ] {
            for text in valid {
                assert_eq!(violation(format, text), None, "{format:?} {text:?}");
                let expression =
                    pattern(format).map(|pattern| regex::Regex::new(pattern).expect("it is one"));
                assert!(
                    expression.is_none_or(|expression| expression.is_match(text)),
                    "{format:?} {text:?}"
                );
            }
            for text in invalid {
                assert!(violation(format, text).is_some(), "{format:?} {text:?}");
            }
        }
    }
}
