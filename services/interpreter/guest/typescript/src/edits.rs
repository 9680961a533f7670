//! A source text and what is changed about it, so that what stays keeps its line, and where nothing
//! is inserted its column.

use std::collections::BTreeMap;

/// Changes to a source text.
pub(crate) struct Edits {
    /// The text with everything blanked that is to go; as long as the source.
    text: Vec<u8>,
    /// Starts of blanked ranges by their ends.
    blanked: BTreeMap<u32, u32>,
    insertions: Vec<Insertion>,
}

struct Insertion {
    at: u32,
    text: String,
    /// How many bytes after `at`, which are blank, the text takes the place of.
    over: u32,
}

impl Edits {
    pub(crate) fn new(source: &str) -> Self {
        Edits { text: source.as_bytes().to_vec(), blanked: BTreeMap::new(), insertions: Vec::new() }
    }

    /// Puts spaces in place of the range's bytes, of which QuickJS counts its columns. Line breaks
    /// stay.
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

    /// Where the blanked range that ends here starts.
    pub(crate) fn blanked_until(&self, end: u32) -> Option<u32> {
        self.blanked.get(&end).copied()
    }

    /// Whether what stood here was blanked.
    pub(crate) fn is_blank(&self, at: u32) -> bool {
        self.text[at as usize] == b' '
    }

    /// Puts one character in place of another, usually a blanked one.
    pub(crate) fn put(&mut self, at: u32, character: u8) {
        self.text[at as usize] = character;
    }

    /// Inserts a text. Of several at one place, the one inserted first comes first.
    pub(crate) fn insert(&mut self, at: u32, text: impl Into<String>) {
        self.insertions.push(Insertion { at, text: text.into(), over: 0 });
    }

    /// Puts a text in place of a range. What follows on the range's first line keeps its column if
    /// the text is not longer.
    pub(crate) fn replace(&mut self, start: u32, end: u32, text: impl Into<String>) {
        let text = text.into();
        self.blank(start, end);
        let blanks = self.text[start as usize..end as usize]
            .iter()
            .take(text.len())
            .take_while(|&&byte| byte == b' ');
        let over = u32::try_from(blanks.count()).unwrap_or(0);
        self.insertions.push(Insertion { at: start, text, over });
    }

    /// The changed text.
    pub(crate) fn apply(mut self) -> String {
        if !self.insertions.is_empty() {
            self.insertions.sort_by_key(|insertion| insertion.at);
            let inserted: usize =
                self.insertions.iter().map(|insertion| insertion.text.len()).sum();
            let mut text = Vec::with_capacity(self.text.len() + inserted);
            let mut from = 0;
            for Insertion { at, text: insertion, over } in &self.insertions {
                text.extend_from_slice(&self.text[from..*at as usize]);
                text.extend_from_slice(insertion.as_bytes());
                from = (at + over) as usize;
            }
            text.extend_from_slice(&self.text[from..]);
            self.text = text;
        }
        // Whole characters were blanked: the text is UTF-8 as the source was.
        String::from_utf8(self.text)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}
