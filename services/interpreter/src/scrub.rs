//! Removes secrets from responses and output. It searches for every form in which a host or a
//! program is likely to repeat a value, and replaces it by the secret's handle.
//!
//! A scrubber must not become an oracle: a script must not learn anything about a secret by having
//! texts of its choice scrubbed. Two rules follow.
//!
//! - A scrubber knows the secrets of one exchange: those sent with one request, or to one command.
//! - It matches whole forms only. At a cut, the caller reads [`Scrubber::margin`] bytes further, or
//!   omits that many bytes whatever they are.
//!
//! This finds repeated values, not disguised ones: a program that prints a value backwards is not
//! detected. Binding a secret to a program means trusting it not to do so (see
//! docs/adr/0012-secrets.md).

mod forms;
mod unwrapped;

use std::{fmt, ops::Range, sync::Arc};

use aho_corasick::{AhoCorasick, MatchKind};
use secrecy::{ExposeSecret as _, SecretSlice};
use serde_json::Value;

use unwrapped::Unwrapped;

/// Number of bytes of a form in the automaton; the rest is compared at each hit. This keeps the
/// automaton small for long secrets.
const HEAD_BYTES: usize = 16;

/// The forms of one secret's value, and the handle that replaces them. Expensive to create for long
/// values, so it is shared.
pub(crate) struct Pattern {
    forms: Vec<Form>,
    handle: String,
}

/// One encoding of a value.
struct Form {
    bytes: SecretSlice<u8>,
    /// Whether it may contain line breaks, as base64 may.
    wraps: bool,
}

/// Finds the secrets of one exchange in texts. Without secrets it leaves texts unchanged.
#[derive(Default)]
pub(crate) struct Scrubber {
    heads: Option<AhoCorasick>,
    patterns: Vec<Arc<Pattern>>,
    /// For each head in the automaton: the indexes of the pattern and of its form.
    forms: Vec<(usize, usize)>,
    longest: usize,
}

/// An occurrence of a secret in a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SecretMatch {
    range: Range<usize>,
    /// The index of the pattern.
    secret: usize,
}

impl Pattern {
    /// A pattern for `value`, which `handle` replaces.
    pub(crate) fn new(value: &str, handle: &str) -> Self {
        let forms = forms::all_forms(value)
            .into_iter()
            .map(|(bytes, wraps)| Form { bytes: bytes.into(), wraps });
        Self { forms: forms.collect(), handle: handle.to_owned() }
    }

    /// All forms to search for.
    #[cfg(test)]
    pub(crate) fn forms(&self) -> impl Iterator<Item = &[u8]> {
        self.forms.iter().map(Form::bytes)
    }
}

impl Form {
    fn bytes(&self) -> &[u8] {
        self.bytes.expose_secret()
    }

    /// The maximum size of an occurrence, in bytes.
    fn max_bytes(&self) -> usize {
        let length = self.bytes().len();
        if self.wraps {
            length + unwrapped::max_breaks(length) * unwrapped::MAX_BREAK_BYTES
        } else {
            length
        }
    }
}

impl fmt::Debug for Scrubber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let handles: Vec<&String> = self.patterns.iter().map(|pattern| &pattern.handle).collect();
        f.debug_struct("Scrubber").field("handles", &handles).finish_non_exhaustive()
    }
}

impl Scrubber {
    /// A scrubber for these secrets.
    pub(crate) fn new(patterns: impl IntoIterator<Item = Arc<Pattern>>) -> Self {
        let patterns: Vec<Arc<Pattern>> = patterns.into_iter().collect();
        let numbered = patterns.iter().enumerate();
        let forms: Vec<(usize, usize)> = numbered
            .flat_map(|(secret, pattern)| (0..pattern.forms.len()).map(move |form| (secret, form)))
            .collect();
        let form = |&(secret, form): &(usize, usize)| &patterns[secret].forms[form];
        let longest = forms.iter().map(|number| form(number).max_bytes()).max().unwrap_or(0);
        let heads = forms.iter().map(|number| {
            let bytes = form(number).bytes();
            &bytes[..bytes.len().min(HEAD_BYTES)]
        });
        let heads = (!forms.is_empty()).then(|| {
            let built = AhoCorasick::builder().match_kind(MatchKind::Standard).build(heads);
            built.expect("a few thousand short patterns are far below the limits of the automaton")
        });
        Self { heads, patterns, forms, longest }
    }

    /// How many bytes beyond a cut must be known to tell whether a secret lies across it. If they
    /// are unknown, that many bytes before the cut must be omitted, whatever they are.
    pub(crate) fn margin(&self) -> usize {
        self.longest.saturating_sub(1)
    }

    /// The occurrences of secrets, in order and without overlaps. Takes time linear in the size of
    /// the text, whatever its content.
    pub(crate) fn find(&self, text: &[u8]) -> Vec<SecretMatch> {
        let mut found = Vec::new();
        if self.heads.is_none() {
            return found;
        }
        self.search(text, |_| true, |next| add(&mut found, next));
        if let Some(unwrapped) = Unwrapped::from_text(text) {
            self.search(
                &unwrapped.bytes,
                |form| form.wraps,
                |SecretMatch { range, secret }| {
                    if let Some(range) = unwrapped.original_range(range) {
                        add(&mut found, SecretMatch { range, secret });
                    }
                },
            );
        }
        merge_overlaps(found)
    }

    fn search(
        &self,
        text: &[u8],
        filter: impl Fn(&Form) -> bool,
        mut add: impl FnMut(SecretMatch),
    ) {
        let Some(heads) = &self.heads else { return };
        // Created on demand: most texts contain nothing like a form.
        let mut searches: Vec<Option<Search>> = Vec::new();
        for hit in heads.find_overlapping_iter(text) {
            let number = hit.pattern().as_usize();
            let (secret, form) = self.forms[number];
            let form = &self.patterns[secret].forms[form];
            if !filter(form) {
                continue;
            }
            let form = form.bytes();
            if form.len() <= HEAD_BYTES {
                add(SecretMatch { range: hit.range(), secret });
                continue;
            }
            searches.resize_with(self.forms.len(), || None);
            let search = searches[number].get_or_insert_with(|| Search::new(form));
            search.advance(form, text, hit.start(), |range| add(SecretMatch { range, secret }));
        }
    }

    /// Appends a part of a text to `to`, with a handle for each secret inside the part or across
    /// its ends.
    pub(crate) fn render(
        &self,
        text: &[u8],
        found: &[SecretMatch],
        part: Range<usize>,
        to: &mut Vec<u8>,
    ) {
        let mut next = part.start;
        let mut last = None;
        for SecretMatch { range, secret } in found {
            if range.end <= part.start || range.start >= part.end {
                continue;
            }
            let between = next..range.start.max(next);
            // Adjacent repetitions of a secret get one handle, so that the text does not grow.
            if last != Some(*secret) || !between.is_empty() {
                to.extend_from_slice(&text[between]);
                to.extend_from_slice(self.patterns[*secret].handle.as_bytes());
            }
            last = Some(*secret);
            next = range.end.min(part.end);
        }
        to.extend_from_slice(&text[next..part.end]);
    }

    /// Scrubs a text.
    pub(crate) fn text(&self, text: String) -> String {
        let end = text.len();
        self.beginning(text, end)
    }

    /// Scrubs the first `end` bytes of a text, including secrets that reach beyond. Returns less
    /// where `end` is within a character.
    pub(crate) fn beginning(&self, mut text: String, end: usize) -> String {
        let found = self.find(text.as_bytes());
        let end = text.floor_char_boundary(end);
        if found.is_empty() {
            text.truncate(end);
            return text;
        }
        let mut scrubbed = Vec::with_capacity(end);
        self.render(text.as_bytes(), &found, 0..end, &mut scrubbed);
        // Matches cover whole characters.
        String::from_utf8(scrubbed)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    /// Scrubs the strings and field names of a value.
    pub(crate) fn value(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.text(std::mem::take(text)),
            Value::Array(items) => items.iter_mut().for_each(|item| self.value(item)),
            Value::Object(fields) => {
                fields.values_mut().for_each(|field| self.value(field));
                if fields.keys().any(|name| !self.find(name.as_bytes()).is_empty()) {
                    let named = std::mem::take(fields).into_iter();
                    fields.extend(named.map(|(name, field)| (self.text(name), field)));
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// The Knuth-Morris-Pratt search for one form in one text. It reads each byte once, however
/// repetitive the form is.
struct Search {
    /// For each prefix length, less one: the length of the longest shorter prefix that is also a
    /// suffix of the prefix.
    borders: Vec<u32>,
    /// Every occurrence that begins before this byte has been found.
    next: usize,
}

impl Search {
    fn new(form: &[u8]) -> Self {
        let mut borders = vec![0_u32; form.len()];
        let mut length = 0;
        for end in 1..form.len() {
            while length > 0 && form[length] != form[end] {
                length = borders[length - 1] as usize;
            }
            length += usize::from(form[length] == form[end]);
            borders[end] = u32::try_from(length).expect("forms are far shorter than 4 GiB");
        }
        Self { borders, next: 0 }
    }

    /// Continues at a byte where the form may begin, for as long as the following bytes may match.
    fn advance(
        &mut self,
        form: &[u8],
        text: &[u8],
        start: usize,
        mut found: impl FnMut(Range<usize>),
    ) {
        if start < self.next {
            return;
        }
        let mut matched = 0;
        for (at, byte) in text.iter().enumerate().skip(start) {
            while matched > 0 && (matched == form.len() || form[matched] != *byte) {
                matched = self.borders[matched - 1] as usize;
            }
            matched += usize::from(form[matched] == *byte);
            if matched == form.len() {
                found(at + 1 - form.len()..at + 1);
            } else if matched == 0 {
                self.next = at + 1;
                return;
            }
        }
        self.next = text.len();
    }
}

/// Adds a match, or extends the last one if both are of the same secret and overlap: a text can
/// consist of occurrences.
fn add(found: &mut Vec<SecretMatch>, next: SecretMatch) {
    match found.last_mut() {
        Some(last)
            if last.secret == next.secret
                && (last.range.start..last.range.end).contains(&next.range.start) =>
        {
            last.range.end = last.range.end.max(next.range.end);
        }
        _ => found.push(next),
    }
}

/// Sorts matches and merges overlapping ones. Adjacent ones stay separate.
fn merge_overlaps(mut found: Vec<SecretMatch>) -> Vec<SecretMatch> {
    found.sort_by_key(|found| (found.range.start, std::cmp::Reverse(found.range.end)));
    let mut merged: Vec<SecretMatch> = Vec::with_capacity(found.len());
    for next in found {
        match merged.last_mut() {
            Some(last) if next.range.start < last.range.end => {
                last.range.end = last.range.end.max(next.range.end)
            }
            _ => merged.push(next),
        }
    }
    merged
}

#[cfg(test)]
mod tests;
