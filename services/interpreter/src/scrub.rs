//! Taking secrets out of what comes back: every form in which a host or a program is likely to
//! repeat a value is searched for, and the handle of the secret is put in its place.
//!
//! A scrubber must not become an oracle: a script must not learn anything about a secret by having
//! texts of its choice scrubbed. Two rules follow.
//!
//! - A scrubber knows the secrets of one exchange: those that went out with one request, or to one
//!   command.
//! - It matches whole forms only. At a cut the caller reads on by [`Scrubber::margin`], or leaves
//!   that many bytes out whatever they are.
//!
//! This catches what is repeated, not what is disguised: a program that prints a value backwards is
//! not noticed. Whoever binds a secret to a program trusts it not to (see
//! docs/adr/0012-secrets.md).

mod forms;
mod unwrapped;

use std::{fmt, ops::Range, sync::Arc};

use aho_corasick::{AhoCorasick, MatchKind};
use secrecy::{ExposeSecret as _, SecretSlice};
use serde_json::Value;

use unwrapped::Unwrapped;

/// How many bytes of a form the automaton knows; the rest is compared where they are found. This
/// keeps the automaton small, however long secrets are.
const HEAD: usize = 16;

/// One secret: the forms of its value, and the handle that replaces them. Expensive to make for
/// long values, so it is shared.
pub(crate) struct Pattern {
    forms: Vec<Form>,
    handle: String,
}

/// One way to write a value.
struct Form {
    bytes: SecretSlice<u8>,
    /// Line breaks may stand in it, as in base64.
    wraps: bool,
}

/// Finds the secrets of one exchange in texts. One that knows no secrets leaves everything as it
/// is.
#[derive(Default)]
pub(crate) struct Scrubber {
    heads: Option<AhoCorasick>,
    patterns: Vec<Arc<Pattern>>,
    /// Of each head in the automaton, the pattern and the form.
    forms: Vec<(usize, usize)>,
    longest: usize,
}

/// Where a secret stands in a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    place: Range<usize>,
    /// The number of the pattern.
    secret: usize,
}

impl Pattern {
    /// Everything that `handle` replaces.
    pub(crate) fn new(value: &str, handle: &str) -> Self {
        let forms =
            forms::of(value).into_iter().map(|(bytes, wraps)| Form { bytes: bytes.into(), wraps });
        Self { forms: forms.collect(), handle: handle.to_owned() }
    }

    /// Everything that is searched for.
    #[cfg(test)]
    pub(crate) fn forms(&self) -> impl Iterator<Item = &[u8]> {
        self.forms.iter().map(Form::bytes)
    }
}

impl Form {
    fn bytes(&self) -> &[u8] {
        self.bytes.expose_secret()
    }

    /// Most bytes that an occurrence has.
    fn extent(&self) -> usize {
        let length = self.bytes().len();
        if self.wraps {
            length + unwrapped::most_breaks(length) * unwrapped::MAX_BREAK
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
    /// Searches for these secrets.
    pub(crate) fn new(patterns: impl IntoIterator<Item = Arc<Pattern>>) -> Self {
        let patterns: Vec<Arc<Pattern>> = patterns.into_iter().collect();
        let numbered = patterns.iter().enumerate();
        let forms: Vec<(usize, usize)> = numbered
            .flat_map(|(secret, pattern)| (0..pattern.forms.len()).map(move |form| (secret, form)))
            .collect();
        let form = |&(secret, form): &(usize, usize)| &patterns[secret].forms[form];
        let longest = forms.iter().map(|number| form(number).extent()).max().unwrap_or(0);
        let heads = forms.iter().map(|number| {
            let bytes = form(number).bytes();
            &bytes[..bytes.len().min(HEAD)]
        });
        let heads = (!forms.is_empty()).then(|| {
            let built = AhoCorasick::builder().match_kind(MatchKind::Standard).build(heads);
            built.expect("a few thousand short patterns are far below the limits of the automaton")
        });
        Self { heads, patterns, forms, longest }
    }

    /// How many bytes on the other side of a cut must be known to tell whether a secret lies across
    /// it. Where they cannot be known, that many bytes on this side are left out, whatever they
    /// are.
    pub(crate) fn margin(&self) -> usize {
        self.longest.saturating_sub(1)
    }

    /// Where secrets stand, in order and without overlaps. Takes time in proportion to the text,
    /// whatever is in it.
    pub(crate) fn find(&self, text: &[u8]) -> Vec<Found> {
        let mut found = Vec::new();
        if self.heads.is_none() {
            return found;
        }
        self.search(text, |_| true, |next| add(&mut found, next));
        if let Some(unwrapped) = Unwrapped::of(text) {
            self.search(
                &unwrapped.bytes,
                |form| form.wraps,
                |Found { place, secret }| {
                    if let Some(place) = unwrapped.place(place) {
                        add(&mut found, Found { place, secret });
                    }
                },
            );
        }
        merged(found)
    }

    fn search(&self, text: &[u8], wanted: impl Fn(&Form) -> bool, mut add: impl FnMut(Found)) {
        let Some(heads) = &self.heads else { return };
        // Most texts have nothing that looks like a form.
        let mut searches: Vec<Option<Search>> = Vec::new();
        for hit in heads.find_overlapping_iter(text) {
            let number = hit.pattern().as_usize();
            let (secret, form) = self.forms[number];
            let form = &self.patterns[secret].forms[form];
            if !wanted(form) {
                continue;
            }
            let form = form.bytes();
            if form.len() <= HEAD {
                add(Found { place: hit.range(), secret });
                continue;
            }
            searches.resize_with(self.forms.len(), || None);
            let search = searches[number].get_or_insert_with(|| Search::new(form));
            search.go_on(form, text, hit.start(), |place| add(Found { place, secret }));
        }
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
                to.extend_from_slice(self.patterns[*secret].handle.as_bytes());
            }
            last = Some(*secret);
            next = place.end.min(part.end);
        }
        to.extend_from_slice(&text[next..part.end]);
    }

    /// A text without secrets.
    pub(crate) fn text(&self, text: String) -> String {
        let end = text.len();
        self.beginning(text, end)
    }

    /// The first `end` bytes of a text without secrets, also without those that reach beyond; a few
    /// less where `end` is within a character.
    pub(crate) fn beginning(&self, mut text: String, end: usize) -> String {
        let found = self.find(text.as_bytes());
        let end = text.floor_char_boundary(end);
        if found.is_empty() {
            text.truncate(end);
            return text;
        }
        let mut scrubbed = Vec::with_capacity(end);
        self.render(text.as_bytes(), &found, 0..end, &mut scrubbed);
        // What is taken out are whole characters.
        String::from_utf8(scrubbed)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    /// A value without secrets in its texts and names.
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

/// The search for one form in one text, by Knuth, Morris and Pratt: it looks at each byte once,
/// however often the form repeats itself.
struct Search {
    /// For each length of a beginning of the form, less one: the longest shorter beginning that is
    /// also its end.
    borders: Vec<u32>,
    /// Everything that begins before this byte has been found.
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

    /// Goes on at a byte where the form may begin, for as long as what follows may be a form.
    fn go_on(
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

/// Adds what was found, to the last one where that is of the same secret and overlaps: a text can
/// consist of occurrences.
fn add(found: &mut Vec<Found>, next: Found) {
    match found.last_mut() {
        Some(last)
            if last.secret == next.secret
                && (last.place.start..last.place.end).contains(&next.place.start) =>
        {
            last.place.end = last.place.end.max(next.place.end);
        }
        _ => found.push(next),
    }
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
