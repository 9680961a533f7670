//! Classified failures of model calls.

use std::{borrow::Cow, time::Duration};

use construct_proto::mesh::v1::{self as mesh, FailureClass};
use jiff::Timestamp;

use crate::metrics;

/// Message length in characters. Vendors echo whole requests into their errors; the beginning is
/// enough.
const MAX_MESSAGE_CHARS: usize = 1_000;

/// Stands between the failures of several models.
const FAILURE_SEPARATOR: &str = "; ";

/// Stands in place of a secret.
const KEY_PLACEHOLDER: &str = "[api key]";

/// The shortest part of a secret that is taken for one by itself.
const MIN_PART: usize = 16;

/// Most bytes of an API key as it may stand in a text: the gateway takes 4,096 characters, and each
/// may be escaped.
pub(crate) const MAX_KEY_BYTES: usize = 2 * 4096;

/// A classified failure. Its message is for people and must hold no secret: [`Failure::scrubbed`]
/// sees to that before a failure leaves the service.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}", clip_message(message))]
pub(crate) struct Failure {
    pub(crate) class: FailureClass,
    /// The full message. It is clipped only for display: a secret across the clip boundary would
    /// leave a part behind that no scrubbing finds.
    pub(crate) message: String,
    /// When the vendor allows the next attempt.
    pub(crate) retry_at: Option<Timestamp>,
    /// The HTTP status of the vendor's response; 0 without one.
    pub(crate) http_status: u16,
    /// Calls made for the answer, over all models and with hedges, this one included; 0 when no
    /// vendor was called.
    pub(crate) tries: u32,
    /// Whether the vendor had accepted the request before the failure: then it is charged.
    pub(crate) accepted: bool,
}

impl Failure {
    pub(crate) fn new(class: FailureClass, message: impl Into<String>) -> Self {
        Self {
            class,
            message: message.into(),
            retry_at: None,
            http_status: 0,
            tries: 0,
            accepted: false,
        }
    }

    /// The connection or the stream broke, or the vendor had an internal error.
    pub(crate) fn transient(message: impl Into<String>) -> Self {
        Self::new(FailureClass::Transient, message)
    }

    /// The command cannot be executed as it is.
    pub(crate) fn configuration(message: impl Into<String>) -> Self {
        Self::new(FailureClass::Configuration, message)
    }

    /// A bug of this service.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(FailureClass::Internal, message)
    }

    pub(crate) fn with_status(mut self, status: u16) -> Self {
        self.http_status = status;
        self
    }

    /// The same failure, of a request that the vendor had accepted.
    pub(crate) fn after_success(mut self) -> Self {
        self.accepted = true;
        self
    }

    pub(crate) fn with_retry_at(mut self, retry_at: Option<Timestamp>) -> Self {
        self.retry_at = retry_at;
        self
    }

    /// Whether the same request may succeed later.
    pub(crate) fn is_retryable(&self) -> bool {
        matches!(
            self.class,
            FailureClass::Transient | FailureClass::RateLimited | FailureClass::Overloaded
        )
    }

    /// Whether another key may work.
    pub(crate) fn is_about_key(&self) -> bool {
        matches!(
            self.class,
            FailureClass::Authentication | FailureClass::RateLimited | FailureClass::Configuration
        )
    }

    /// Whether the vendor does not know the model.
    pub(crate) fn is_model_missing(&self) -> bool {
        let message = self.message.to_lowercase();
        let says = |words: &[&str]| words.iter().any(|word| message.contains(word));
        let missing = [
            "not found",
            "not_found",
            "does not exist",
            "not a valid model",
            "identifier is invalid",
        ];
        self.class == FailureClass::InvalidRequest
            && message.contains("model")
            && (self.http_status == 404 || says(&missing))
    }

    /// The delay from `now` that the vendor asks for.
    pub(crate) fn requested_delay(&self, now: Timestamp) -> Option<Duration> {
        let wait = self.retry_at?.duration_since(now);
        Some(Duration::try_from(wait).unwrap_or(Duration::ZERO))
    }

    /// The same failure without `secret` in its text: some vendors repeat the key they refuse. Only
    /// the whole secret is replaced, or a whole part: whoever chose what the vendor repeats could
    /// find out the secret piece by piece otherwise.
    pub(crate) fn scrubbed(mut self, secret: Option<&str>) -> Self {
        // A secret of several parts may come back in parts: AWS repeats the session token when a
        // signature is wrong.
        let parts = secret
            .into_iter()
            .flat_map(|secret| secret.split(':').filter(|part| part.len() >= MIN_PART));
        for form in secret.into_iter().chain(parts).flat_map(secret_forms) {
            self.message = self.message.replace(&form, KEY_PLACEHOLDER);
        }
        self
    }

    pub(crate) fn into_proto(self) -> mesh::Failure {
        mesh::Failure {
            class: self.class.into(),
            message: clip_message(&self.message).into_owned(),
            retry_at: self.retry_at.map(|at| prost_types::Timestamp {
                seconds: at.as_second(),
                nanos: at.subsec_nanosecond(),
            }),
            http_status: u32::from(self.http_status),
            tries: self.tries,
        }
    }
}

/// The forms of a secret in a text: as it is, and escaped as in JSON. A secret is visible ASCII, so
/// only these three characters are ever escaped.
fn secret_forms(secret: &str) -> Vec<String> {
    let escaped = secret.replace('\\', r"\\").replace('"', r#"\""#);
    let mut forms = vec![escaped.replace('/', r"\/"), escaped, secret.to_owned()];
    forms.dedup();
    forms.retain(|form| !form.is_empty());
    forms
}

/// One message for the failures of several models. Each gets the same share of the message length,
/// so that none is crowded out. The failures must be scrubbed before.
pub(crate) fn join_failures<'a>(
    failures: impl ExactSizeIterator<Item = (String, &'a Failure)>,
) -> String {
    let share =
        (MAX_MESSAGE_CHARS / failures.len().max(1)).saturating_sub(FAILURE_SEPARATOR.len() + 1);
    let texts = failures.map(|(model, Failure { class, message, http_status, .. })| {
        let class = metrics::class_name(*class).replace('_', " ");
        let status = if *http_status > 0 { format!(" ({http_status})") } else { String::new() };
        truncate_chars(&format!("{model}: {class}{status}: {message}"), share).into_owned()
    });
    texts.collect::<Vec<_>>().join(FAILURE_SEPARATOR)
}

/// The beginning of a message, for display.
fn clip_message(text: &str) -> Cow<'_, str> {
    truncate_chars(text, MAX_MESSAGE_CHARS)
}

fn truncate_chars(text: &str, chars: usize) -> Cow<'_, str> {
    match text.char_indices().nth(chars) {
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

/// The class of an HTTP status, where the vendor's error body says nothing more precise.
pub(crate) fn class_from_status(status: u16) -> FailureClass {
    match status {
        // 402: the account cannot pay. As with a bad key, only a person can fix it.
        401..=403 => FailureClass::Authentication,
        413 => FailureClass::ContextTooLong,
        429 => FailureClass::RateLimited,
        503 | 529 => FailureClass::Overloaded,
        408 | 409 | 425 | 500..=599 => FailureClass::Transient,
        300..=399 => FailureClass::Configuration,
        _ => FailureClass::InvalidRequest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrubbed_failure_contains_no_key() {
        let failure = Failure::transient("Incorrect API key provided: sk-secret-1.")
            .scrubbed(Some("sk-secret-1"));
        assert_eq!(failure.message, "Incorrect API key provided: [api key].");
        assert_eq!(Failure::transient("text").scrubbed(Some("")).message, "text");
    }

    #[test]
    fn scrubbed_failure_contains_no_part_of_a_key() {
        let key = "AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY:IQoJb3JpZ2luX2VjEHoaDGV1";
        let text = "should have been 'POST\nx-amz-security-token:IQoJb3JpZ2luX2VjEHoaDGV1\n'";
        let failure = Failure::transient(text).scrubbed(Some(key));
        assert_eq!(failure.message, "should have been 'POST\nx-amz-security-token:[api key]\n'");
    }

    #[test]
    fn key_across_the_clip_boundary_leaves_no_part() {
        let key = "sk-0123456789abcdefghijklmnopqrstuvwxyz";
        for before in MAX_MESSAGE_CHARS - key.len() - 1..=MAX_MESSAGE_CHARS + 1 {
            let text = format!("{} {key} and {key}", "x".repeat(before));
            let failure = Failure::transient(text).scrubbed(Some(key));
            let shown = failure.to_string();
            assert!(!shown.contains("sk-"), "{before}: {shown}");
            assert_eq!(failure.into_proto().message, shown);
        }
    }

    #[test]
    fn text_with_part_of_key_stays_as_it_is() {
        let key = "sk-0123456789";
        for end in 0..key.len() {
            let text = format!("unknown model: {}", &key[..end]);
            assert_eq!(Failure::transient(text.clone()).scrubbed(Some(key)).message, text);
        }
    }

    #[test]
    fn escaped_key_is_scrubbed() {
        let key = r#"a/b\c"d"#;
        for text in [key, r#"a/b\\c\"d"#, r#"a\/b\\c\"d"#] {
            assert_eq!(
                Failure::transient(format!("<{text}>")).scrubbed(Some(key)).message,
                "<[api key]>",
                "{text}"
            );
        }
    }

    #[test]
    fn long_message_is_clipped_between_characters() {
        let failure = Failure::transient("ä".repeat(5_000));
        assert_eq!(failure.to_string().chars().count(), MAX_MESSAGE_CHARS + 1);
        assert_eq!(failure.clone().into_proto().message, failure.to_string());
    }

    #[test]
    fn joined_failures_share_the_message_length_equally() {
        let failures = [
            Failure::new(FailureClass::Overloaded, "Overloaded").with_status(529),
            Failure::new(
                FailureClass::RateLimited,
                "every API key of the provider is at its limit",
            ),
        ];
        let named = |failures: &[Failure]| {
            join_failures(
                ["anthropic/x", "openai/y", "gemini/z"]
                    .map(str::to_owned)
                    .into_iter()
                    .zip(failures)
                    .collect::<Vec<_>>()
                    .into_iter(),
            )
        };
        assert_eq!(
            named(&failures),
            "anthropic/x: overloaded (529): Overloaded; openai/y: rate limited: every API key of the provider is at its limit"
        );
        let long = [0; 3].map(|_| Failure::transient("ä".repeat(5_000)));
        let told = named(&long);
        assert!(
            ["anthropic/x: transient: ä", "openai/y: transient: ä", "gemini/z: transient: ä"]
                .iter()
                .all(|part| told.contains(part))
        );
        assert_eq!(
            Failure::transient(told.clone()).to_string(),
            told,
            "it need not be clipped once more"
        );
    }

    #[test]
    fn http_statuses_map_to_failure_classes() {
        for (status, class) in [
            (302, FailureClass::Configuration),
            (400, FailureClass::InvalidRequest),
            (401, FailureClass::Authentication),
            (402, FailureClass::Authentication),
            (403, FailureClass::Authentication),
            (404, FailureClass::InvalidRequest),
            (408, FailureClass::Transient),
            (413, FailureClass::ContextTooLong),
            (422, FailureClass::InvalidRequest),
            (429, FailureClass::RateLimited),
            (500, FailureClass::Transient),
            (503, FailureClass::Overloaded),
            (529, FailureClass::Overloaded),
        ] {
            assert_eq!(class_from_status(status), class, "{status}");
        }
    }
}
