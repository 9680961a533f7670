//! The one parser of subjects.

use std::str::FromStr;

use super::Invalid;

pub(super) const ROOT: &str = "construct.v1";

/// The pattern of all subjects of the mesh.
pub(crate) fn all_subjects() -> String {
    format!("{ROOT}.>")
}

/// The tokens of a subject, from left to right.
pub(super) struct Tokens<'a> {
    subject: &'a str,
    rest: Option<&'a str>,
}

impl<'a> Tokens<'a> {
    /// Starts after `construct.v1.<prefix>`.
    pub(super) fn after(subject: &'a str, prefix: &str) -> Result<Self, Invalid> {
        let rest = subject
            .strip_prefix(ROOT)
            .and_then(|rest| rest.strip_prefix('.'))
            .and_then(|rest| rest.strip_prefix(prefix))
            .and_then(|rest| rest.strip_prefix('.'));
        match rest {
            Some(rest) => Ok(Self { subject, rest: Some(rest) }),
            None => Err(Invalid::new("not a subject of this kind", subject)),
        }
    }

    /// The next token, which must not be empty.
    pub(super) fn next(&mut self) -> Result<&'a str, Invalid> {
        let rest = self.rest.ok_or_else(|| self.invalid("the subject is too short"))?;
        let (token, rest) = match rest.split_once('.') {
            Some((token, rest)) => (token, Some(rest)),
            None => (rest, None),
        };
        if token.is_empty() {
            return Err(self.invalid("the subject has an empty token"));
        }
        self.rest = rest;
        Ok(token)
    }

    /// Expects this word as the next token.
    pub(super) fn word(&mut self, word: &str) -> Result<(), Invalid> {
        if self.next()? == word {
            Ok(())
        } else {
            Err(self.invalid("the subject has an unexpected word"))
        }
    }

    /// Parses the next token.
    pub(super) fn value<T: FromStr>(&mut self) -> Result<T, Invalid> {
        let invalid = self.invalid("the subject has an invalid token");
        self.next()?.parse().map_err(|_| invalid)
    }

    /// The remaining tokens.
    pub(super) fn rest(&mut self) -> Result<&'a str, Invalid> {
        self.rest.take().ok_or_else(|| self.invalid("the subject is too short"))
    }

    /// Expects the end.
    pub(super) fn end(&self) -> Result<(), Invalid> {
        if self.rest.is_none() { Ok(()) } else { Err(self.invalid("the subject is too long")) }
    }

    fn invalid(&self, what: &'static str) -> Invalid {
        Invalid::new(what, self.subject)
    }
}
