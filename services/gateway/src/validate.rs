//! Checks at the edge: every field of a request is held against its documented limit, and all that
//! is wrong is told at once, as `INVALID_ARGUMENT` with a `google.rpc.BadRequest` that names each
//! field.
//!
//! The limits themselves stand in the comments of `proto/construct/v1`; what each request is
//! checked for is in [`requests`].

pub(crate) mod requests;

use std::{fmt::Display, ops::RangeInclusive, str::FromStr};

use construct_domain::id;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt as _};

/// How many violations one answer lists. More would only repeat the first, and the answer must fit
/// into trailers.
const MAX_LISTED: usize = 32;

/// Characters of a name.
pub(crate) const NAME_CHARS: usize = 63;

/// What is wrong with a request, field by field.
#[derive(Debug, Default)]
pub(crate) struct Violations {
    found: Vec<FieldViolation>,
}

impl Violations {
    /// Nothing is wrong so far.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Reports a violation.
    pub(crate) fn add(&mut self, field: impl Into<String>, description: impl Into<String>) {
        if self.found.len() < MAX_LISTED {
            self.found.push(FieldViolation::new(field, description));
        }
    }

    /// Reports a violation unless `holds`.
    pub(crate) fn require(
        &mut self,
        holds: bool,
        field: &str,
        description: impl FnOnce() -> String,
    ) {
        if !holds {
            self.add(field, description());
        }
    }

    /// The status that tells of all violations, when there are any.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when anything was reported.
    pub(crate) fn finish(self) -> Result<(), Status> {
        let Some(first) = self.found.first() else { return Ok(()) };
        let message = match self.found.len() {
            1 => format!("{}: {}", first.field, first.description),
            more => format!("{}: {} (and {} more)", first.field, first.description, more - 1),
        };
        Err(Status::with_error_details(
            Code::InvalidArgument,
            message,
            ErrorDetails::with_bad_request(self.found),
        ))
    }

    /// A name: `[a-z0-9][a-z0-9._-]*`, 1 to 63 characters, and nothing that reads as an id, because
    /// names and ids are accepted in the same places.
    pub(crate) fn name(&mut self, field: &str, name: &str) {
        if !is_name(name) {
            self.add(
                field,
                format!(
                    "must be 1 to {NAME_CHARS} characters: lower-case letters, digits, `.`, `_` and `-`, beginning with a \
                     letter or digit"
                ),
            );
        } else if looks_like_an_id(name) {
            self.add(field, "must not look like an id");
        }
    }

    /// What may be a name or an id: the lookup decides which.
    pub(crate) fn reference(&mut self, field: &str, reference: &str, what: &str) {
        if reference.is_empty() {
            self.add(field, format!("is required: the name or id of {what}"));
        } else if !is_name(reference) {
            self.add(field, format!("is neither a name nor an id of {what}"));
        }
    }

    /// The beginning of a name, or nothing.
    pub(crate) fn name_prefix(&mut self, field: &str, prefix: &str) {
        self.require(prefix.is_empty() || is_name(prefix), field, || {
            format!("must be empty or the beginning of a name, at most {NAME_CHARS} characters")
        });
    }

    /// An id of one kind.
    pub(crate) fn id<T>(&mut self, field: &str, text: &str) -> Option<T>
    where
        T: FromStr<Err = id::ParseError>,
    {
        if text.is_empty() {
            self.add(field, "is required");
            return None;
        }
        text.parse().map_err(|error: id::ParseError| self.add(field, error.to_string())).ok()
    }

    /// Text of at most `max` characters.
    pub(crate) fn chars(&mut self, field: &str, text: &str, max: usize) {
        // Counting characters of a text that is far too long is avoided: no character has more than
        // four bytes.
        let fits = text.len() <= max || (text.len() <= max * 4 && text.chars().count() <= max);
        self.require(fits, field, || format!("must have at most {} characters", thousands(max)));
        self.no_nul(field, text);
    }

    /// Text of at most `max` bytes in UTF-8.
    pub(crate) fn bytes(&mut self, field: &str, text: &str, max: usize) {
        self.require(text.len() <= max, field, || {
            format!("must have at most {} bytes, has {}", thousands(max), thousands(text.len()))
        });
        self.no_nul(field, text);
    }

    /// One line: no control characters.
    pub(crate) fn one_line(&mut self, field: &str, text: &str) {
        self.require(!text.chars().any(char::is_control), field, || {
            "must be one line, with no control characters".into()
        });
    }

    /// PostgreSQL stores no U+0000, neither in text nor in JSON.
    pub(crate) fn no_nul(&mut self, field: &str, text: &str) {
        self.require(!text.contains('\0'), field, || {
            "must not contain the character U+0000".into()
        });
    }

    /// A number within limits.
    pub(crate) fn range<T: PartialOrd + Display>(
        &mut self,
        field: &str,
        value: T,
        range: RangeInclusive<T>,
    ) {
        self.require(range.contains(&value), field, || {
            format!("must be between {} and {}, is {value}", range.start(), range.end())
        });
    }

    /// A key chosen by the client, or none.
    pub(crate) fn idempotency_key(&mut self, key: &str) {
        let visible = key.bytes().all(|byte| byte.is_ascii_graphic());
        self.require(visible && key.len() <= 128, "idempotency_key", || {
            "must have 1 to 128 visible ASCII characters, or be empty".into()
        });
    }

    /// The revision an update expects, or 0.
    pub(crate) fn revision(&mut self, revision: i64) {
        self.require(revision >= 0, "revision", || "must not be negative; 0 means any".into());
    }
}

/// Whether `text` has the form of a name. Ids have it too.
pub(crate) fn is_name(text: &str) -> bool {
    let lower = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.len() <= NAME_CHARS
        && text.bytes().next().is_some_and(lower)
        && text.bytes().all(|byte| lower(byte) || matches!(byte, b'.' | b'_' | b'-'))
}

/// Whether `text` is a prefix, an underscore and a UUID.
fn looks_like_an_id(text: &str) -> bool {
    text.rsplit_once('_')
        .is_some_and(|(_, tail)| tail.len() == 36 && uuid::Uuid::parse_str(tail).is_ok())
}

/// `1048576` as `1,048,576`.
pub(crate) fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The violated fields of a status.
    pub(crate) fn fields(status: &Status) -> Vec<String> {
        let details = status.get_error_details();
        details.bad_request().map_or_else(Vec::new, |bad| {
            bad.field_violations.iter().map(|violation| violation.field.clone()).collect()
        })
    }

    #[test]
    fn every_violation_is_told_at_once() {
        let mut violations = Violations::new();
        violations.name("spec.name", "Not A Name");
        violations.chars("spec.description", &"x".repeat(1025), 1024);
        violations.range("page.page_size", 101, 1..=100);
        let status = violations.finish().expect_err("three things are wrong");
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(fields(&status), ["spec.name", "spec.description", "page.page_size"]);
        assert!(status.message().contains("(and 2 more)"), "{}", status.message());
        let details = status.get_error_details();
        let bad = details.bad_request().expect("there are field violations");
        assert_eq!(bad.field_violations[1].description, "must have at most 1,024 characters");
        assert_eq!(bad.field_violations[2].description, "must be between 1 and 100, is 101");
    }

    #[test]
    fn names_follow_their_pattern() {
        let longest = "a".repeat(63);
        for good in ["a", "0", "a.b_c-d", "claude-sonnet-4.5", longest.as_str()] {
            let mut violations = Violations::new();
            violations.name("name", good);
            assert!(violations.finish().is_ok(), "{good}");
        }
        let too_long = "a".repeat(64);
        for bad in [
            "",
            "-a",
            ".a",
            "_a",
            "A",
            "a b",
            "ä",
            "a/b",
            too_long.as_str(),
            "agent_01890a5d-ac96-774b-bcce-b302099a8057",
        ] {
            let mut violations = Violations::new();
            violations.name("name", bad);
            assert!(violations.finish().is_err(), "{bad}");
        }
    }

    #[test]
    fn lengths_are_counted_in_characters_or_bytes_as_documented() {
        let mut violations = Violations::new();
        violations.chars("title", &"ä".repeat(200), 200);
        violations.bytes("workspace", &"x".repeat(4096), 4096);
        assert!(violations.finish().is_ok());
        let mut violations = Violations::new();
        violations.chars("title", &"ä".repeat(201), 200);
        violations.bytes("workspace", &"ä".repeat(2049), 4096);
        violations.chars("text", "a\0b", 10);
        assert_eq!(
            fields(&violations.finish().expect_err("all are wrong")),
            ["title", "workspace", "text"]
        );
    }

    #[test]
    fn idempotency_keys_are_short_visible_ascii() {
        for (key, good) in [("", true), ("k", true), ("a b", false), ("ä", false), ("\n", false)] {
            let mut violations = Violations::new();
            violations.idempotency_key(key);
            assert_eq!(violations.finish().is_ok(), good, "{key:?}");
        }
        let mut violations = Violations::new();
        violations.idempotency_key(&"k".repeat(129));
        assert!(violations.finish().is_err());
    }

    #[test]
    fn the_list_of_violations_is_bounded() {
        let mut violations = Violations::new();
        for index in 0..1000 {
            violations.add(format!("types[{index}]"), "wrong");
        }
        assert_eq!(fields(&violations.finish().expect_err("much is wrong")).len(), MAX_LISTED);
    }
}
