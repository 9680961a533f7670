//! Taking secrets out of what comes back: every form in which a host or a program is likely to
//! repeat a value is looked for, and the secret's handle put in its place.
//!
//! This catches what is repeated, not what is disguised: a program that prints a value backwards is
//! not noticed. Who binds a secret to it trusts it not to (see docs/adr/0012-secrets.md).

mod forms;

use std::{fmt, ops::Range};

use aho_corasick::{AhoCorasick, MatchKind};
use secrecy::{ExposeSecret as _, SecretSlice};
use serde_json::Value;

/// How many bytes of a form are looked for at once; where they are found the rest is compared. It
/// keeps the automaton small, however long secrets are.
const HEAD: usize = 16;

/// At a place where a text was cut off, so many bytes of the beginning of a form are taken for the
/// form. One or two prove nothing and say next to nothing.
const PARTIAL: usize = 3;

/// How many bytes are compared for each byte of a text at most, beside [`WORK`]. Only a secret that
/// consists of repetitions of itself, in a text that does as well, comes near; such a text is
/// replaced as a whole.
const WORK_PER_BYTE: usize = 64;

/// How many bytes are compared in any case.
const WORK: usize = 8 << 20;

/// Finds secrets in texts. One that knows no secrets leaves everything as it is.
#[derive(Default)]
pub(crate) struct Scrubber {
    heads: Option<AhoCorasick>,
    forms: Vec<Form>,
    handles: Vec<String>,
    shortest: usize,
    longest: usize,
}

/// One way to write a secret.
struct Form {
    bytes: SecretSlice<u8>,
    /// Which secret it is.
    secret: usize,
}

/// Where a secret stands in a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    place: Range<usize>,
    secret: usize,
}

impl fmt::Debug for Scrubber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrubber").field("handles", &self.handles).finish_non_exhaustive()
    }
}

impl Scrubber {
    /// Looks for these values, and puts the handles in their place.
    pub(crate) fn new<'a>(secrets: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let (mut forms, mut handles) = (Vec::new(), Vec::new());
        for (value, handle) in secrets {
            let all = forms::of(value);
            forms.extend(
                all.into_iter().map(|form| Form { bytes: form.into(), secret: handles.len() }),
            );
            handles.push(handle.to_owned());
        }
        let lengths = || forms.iter().map(|form| form.bytes.expose_secret().len());
        let (shortest, longest) = (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0));
        let heads = forms.iter().map(|form| {
            let bytes = form.bytes.expose_secret();
            &bytes[..bytes.len().min(HEAD)]
        });
        let heads = (!forms.is_empty()).then(|| {
            let built = AhoCorasick::builder().match_kind(MatchKind::Standard).build(heads);
            built.expect("a few thousand short patterns are far below the limits of the automaton")
        });
        Self { heads, forms, handles, shortest, longest }
    }

    /// Whether there is nothing to look for.
    pub(crate) fn is_empty(&self) -> bool {
        self.forms.is_empty()
    }

    /// How many bytes beyond a cut have to be known to tell whether a secret lies across it.
    pub(crate) fn margin(&self) -> usize {
        self.longest.saturating_sub(1)
    }

    /// Where secrets stand, in order and without overlaps. `cut` says that the text is the
    /// beginning of a longer one: what may be the beginning of a secret at its end counts as well.
    pub(crate) fn find(&self, text: &[u8], cut: bool) -> Vec<Found> {
        let Some(heads) = &self.heads else { return Vec::new() };
        // Most texts of most results are names and numbers.
        if text.len() < self.shortest && !cut {
            return Vec::new();
        }
        let mut found = Vec::new();
        let mut work = WORK + text.len().saturating_mul(WORK_PER_BYTE);
        // Up to where the text is known to be each form. Most texts have nothing that looks like
        // one.
        let mut known_to: Vec<usize> = Vec::new();
        for hit in heads.find_overlapping_iter(text) {
            let number = hit.pattern().as_usize();
            if known_to.is_empty() {
                known_to.resize(self.forms.len(), 0);
            }
            let (form, start) = (self.forms[number].bytes.expose_secret(), hit.start());
            let end = start + form.len();
            if end > text.len() {
                continue;
            }
            // Of an occurrence that begins within another one of the same form only the rest is
            // compared, so that the work does not grow with the square of the length. That may take
            // too much for the secret, and never too little.
            let known = known_to[number].saturating_sub(start).min(form.len());
            let Some(left) = work.checked_sub(form.len() - known) else {
                return vec![Found { place: 0..text.len(), secret: self.forms[number].secret }];
            };
            work = left;
            if text[start + known..end] == form[known..] {
                known_to[number] = end;
                found.push(Found { place: start..end, secret: self.forms[number].secret });
            }
        }
        if cut {
            found.extend(self.forms.iter().filter_map(|form| {
                let start = begun(text, form.bytes.expose_secret())?;
                Some(Found { place: start..text.len(), secret: form.secret })
            }));
        }
        merged(found)
    }

    /// Appends a part of a text, with a handle for each secret that lies in the part or reaches
    /// into it.
    pub(crate) fn render(
        &self,
        text: &[u8],
        found: &[Found],
        part: Range<usize>,
        to: &mut Vec<u8>,
    ) {
        let mut next = part.start;
        let mut last = None;
        for Found { place, secret } in found {
            if place.end <= part.start || place.start >= part.end {
                continue;
            }
            let between = next..place.start.max(next);
            // A host that repeats a secret without end gets one handle for all, so that the text
            // doesn't grow.
            if last != Some(*secret) || !between.is_empty() {
                to.extend_from_slice(&text[between]);
                to.extend_from_slice(self.handles[*secret].as_bytes());
            }
            last = Some(*secret);
            next = place.end.min(part.end);
        }
        to.extend_from_slice(&text[next..part.end]);
    }

    /// A text without secrets; `cut` as for [`Scrubber::find`].
    pub(crate) fn bytes(&self, text: Vec<u8>, cut: bool) -> Vec<u8> {
        let found = self.find(&text, cut);
        if found.is_empty() {
            return text;
        }
        let mut scrubbed = Vec::with_capacity(text.len());
        self.render(&text, &found, 0..text.len(), &mut scrubbed);
        scrubbed
    }

    /// The same, of text.
    pub(crate) fn text(&self, text: String, cut: bool) -> String {
        let found = self.find(text.as_bytes(), cut);
        if found.is_empty() {
            return text;
        }
        let mut scrubbed = Vec::with_capacity(text.len());
        self.render(text.as_bytes(), &found, 0..text.len(), &mut scrubbed);
        // What is taken out are whole characters, but where a text is replaced as a whole or cut.
        String::from_utf8(scrubbed)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    /// The same, of all texts in a value.
    pub(crate) fn value(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.text(std::mem::take(text), false),
            Value::Array(items) => items.iter_mut().for_each(|item| self.value(item)),
            Value::Object(fields) => {
                fields.values_mut().for_each(|field| self.value(field));
                if fields.keys().any(|name| !self.find(name.as_bytes(), false).is_empty()) {
                    let named = std::mem::take(fields).into_iter();
                    fields.extend(named.map(|(name, field)| (self.text(name, false), field)));
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// Where the beginning of a form begins that a text ends with.
fn begun(text: &[u8], form: &[u8]) -> Option<usize> {
    let first = text.len().saturating_sub(form.len() - 1);
    let last = text.len().checked_sub(PARTIAL)?;
    (first..=last).find(|start| form.starts_with(&text[*start..]))
}

/// In order, those that overlap made one. Those that only touch stay apart.
fn merged(mut found: Vec<Found>) -> Vec<Found> {
    found.sort_by_key(|found| (found.place.start, std::cmp::Reverse(found.place.end)));
    let mut merged: Vec<Found> = Vec::with_capacity(found.len());
    for next in found {
        match merged.last_mut() {
            Some(last) if next.place.start < last.place.end => {
                last.place.end = last.place.end.max(next.place.end)
            }
            _ => merged.push(next),
        }
    }
    merged
}

#[cfg(test)]
mod tests;
