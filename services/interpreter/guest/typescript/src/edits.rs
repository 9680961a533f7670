//! Changes to a source text. Unchanged text keeps its line, and its column where nothing is
//! inserted.

use std::collections::BTreeMap;

/// Changes to a source text.
pub(crate) struct Edits {
    /// The text with removed parts blanked; as long as the source.
    text: Vec<u8>,
    /// Starts of blanked ranges by their ends.
    blanked: BTreeMap<u32, u32>,
    insertions: Vec<Insertion>,
}

struct Insertion {
    at: u32,
    text: String,
    /// The number of blank bytes after `at` that the text replaces.
    replaced_bytes: u32,
}

impl Edits {
    pub(crate) fn new(source: &str) -> Self {
        Edits { text: source.as_bytes().to_vec(), blanked: BTreeMap::new(), insertions: Vec::new() }
    }

    /// Replaces the range's bytes by spaces; QuickJS counts columns in bytes. Line breaks stay.
    pub(crate) fn blank(&mut self, start: u32, end: u32) {
        if start >= end {
            return;
        }
        let range = &mut self.text[start as usize..end as usize];
        let mut at = 0;
        while at < range.len() {
            match range[at..] {
                [b'\n' | b'\r', ..] => at += 1,
                // U+2028 and U+2029 are line breaks too.
                [0xE2, 0x80, 0xA8 | 0xA9, ..] => at += 3,
                _ => {
                    range[at] = b' ';
                    at += 1;
                }
            }
        }
        self.blanked.entry(end).or_insert(start);
    }

    /// The start of the blanked range that ends here.
    pub(crate) fn blank_start(&self, end: u32) -> Option<u32> {
        self.blanked.get(&end).copied()
    }

    /// Whether this position was blanked.
    pub(crate) fn is_blank(&self, at: u32) -> bool {
        self.text[at as usize] == b' '
    }

    /// Replaces one character, usually a blanked one.
    pub(crate) fn put(&mut self, at: u32, character: u8) {
        self.text[at as usize] = character;
    }

    /// Inserts a text. Several insertions at one position keep their order.
    pub(crate) fn insert(&mut self, at: u32, text: impl Into<String>) {
        self.insertions.push(Insertion { at, text: text.into(), replaced_bytes: 0 });
    }

    /// Replaces a range by a text. The rest of the range's first line keeps its column if the text
    /// is not longer.
    pub(crate) fn replace(&mut self, start: u32, end: u32, text: impl Into<String>) {
        let text = text.into();
        self.blank(start, end);
        let blanks = self.text[start as usize..end as usize]
            .iter()
            .take(text.len())
            .take_while(|&&byte| byte == b' ');
        let replaced_bytes = u32::try_from(blanks.count()).unwrap_or(0);
        self.insertions.push(Insertion { at: start, text, replaced_bytes });
    }

    /// The changed text.
    pub(crate) fn apply(mut self) -> String {
        if !self.insertions.is_empty() {
            self.insertions.sort_by_key(|insertion| insertion.at);
            let inserted: usize =
                self.insertions.iter().map(|insertion| insertion.text.len()).sum();
            let mut text = Vec::with_capacity(self.text.len() + inserted);
            let mut from = 0;
            for Insertion { at, text: insertion, replaced_bytes } in &self.insertions {
                text.extend_from_slice(&self.text[from..*at as usize]);
                text.extend_from_slice(insertion.as_bytes());
                from = (at + replaced_bytes) as usize;
            }
            text.extend_from_slice(&self.text[from..]);
            self.text = text;
        }
        // Whole characters were blanked, so the text is still UTF-8.
        String::from_utf8(self.text)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}
