//! BERT's tokenizer: cleans a text, splits it at spaces and punctuation, and splits each word into
//! the longest known pieces.
//!
//! Reads `tokenizer.json` as Hugging Face's `tokenizers` writes it, and behaves as that crate, with
//! one exception: special tokens in a text are text.

use std::collections::HashMap;

use icu_normalizer::DecomposingNormalizerBorrowed;
use icu_properties::{
    CodePointMapData,
    props::{GeneralCategory, GeneralCategoryGroup},
};
use serde::Deserialize;
use serde_json::Value;

/// Why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("it cannot be read")]
    Json(#[from] serde_json::Error),
    #[error("its {part} is `{found}`; only `{known}` is known here")]
    Unknown { part: &'static str, found: String, known: &'static str },
    #[error("it knows no tokens")]
    Empty,
}

/// A tokenizer.
pub(super) struct Tokenizer {
    normalizer: Normalizer,
    /// Tokens that begin a word, and those that continue one, by their text.
    word_starts: HashMap<Box<str>, usize>,
    continuations: HashMap<Box<str>, usize>,
    /// Length of the longest token, in bytes.
    max_token_bytes: usize,
    /// Longer words are unknown, in characters.
    max_word_chars: usize,
    unknown: Option<usize>,
    len: usize,
}

#[derive(Deserialize)]
struct File {
    model: Value,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
}

#[derive(Deserialize)]
struct WordPiece {
    unk_token: String,
    #[serde(default = "default_prefix")]
    continuing_subword_prefix: String,
    #[serde(default = "default_max_chars")]
    max_input_chars_per_word: usize,
    vocab: HashMap<String, usize>,
}

fn default_prefix() -> String {
    "##".to_owned()
}

const fn default_max_chars() -> usize {
    100
}

#[derive(Debug, Clone, Deserialize)]
struct Normalizer {
    clean_text: bool,
    handle_chinese_chars: bool,
    strip_accents: Option<bool>,
    lowercase: bool,
}

impl Tokenizer {
    pub(super) fn parse(text: &[u8]) -> Result<Self, Error> {
        let file: File = serde_json::from_slice(text)?;
        expect_type("pre-tokenizer", file.pre_tokenizer.as_ref(), "BertPreTokenizer")?;
        expect_type("normalizer", file.normalizer.as_ref(), "BertNormalizer")?;
        expect_type("model", Some(&file.model), "WordPiece")?;
        let normalizer: Normalizer = serde_json::from_value(file.normalizer.unwrap_or_default())?;
        let model: WordPiece = serde_json::from_value(file.model)?;
        let (mut word_starts, mut continuations, mut longest, mut len) =
            (HashMap::new(), HashMap::new(), 0, 0);
        let unknown = model.vocab.get(&model.unk_token).copied();
        for (token, id) in model.vocab {
            len = len.max(id.saturating_add(1));
            longest = longest.max(token.len());
            match token.strip_prefix(&model.continuing_subword_prefix) {
                Some(rest) if !rest.is_empty() => continuations.insert(rest.into(), id),
                _ => word_starts.insert(token.into_boxed_str(), id),
            };
        }
        if len == 0 {
            return Err(Error::Empty);
        }
        let max_chars = model.max_input_chars_per_word;
        Ok(Self {
            normalizer,
            word_starts,
            continuations,
            max_token_bytes: longest,
            max_word_chars: max_chars,
            unknown,
            len,
        })
    }

    /// The largest token plus one.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Calls `take` with each token of a text. Unknown words have none.
    pub(super) fn for_each_token(&self, text: &str, mut take: impl FnMut(usize)) {
        let text = self.normalizer.normalize(text);
        let mut pieces = Vec::new();
        for word in text.split_whitespace() {
            let mut rest = word;
            while !rest.is_empty() {
                // A punctuation mark is a word of its own.
                let end = match rest.char_indices().find(|(_, c)| is_punctuation(*c)) {
                    Some((0, mark)) => mark.len_utf8(),
                    Some((at, _)) => at,
                    None => rest.len(),
                };
                let (word, behind) = rest.split_at(end);
                rest = behind;
                pieces.clear();
                if self.split_word(word, &mut pieces) {
                    pieces
                        .iter()
                        .filter(|&&piece| Some(piece) != self.unknown)
                        .for_each(|&piece| take(piece));
                }
            }
        }
    }

    /// Splits a word into its tokens; false when some of it is unknown.
    fn split_word(&self, word: &str, pieces: &mut Vec<usize>) -> bool {
        if word.chars().count() > self.max_word_chars {
            return false;
        }
        let mut rest = word;
        while !rest.is_empty() {
            let known = if pieces.is_empty() { &self.word_starts } else { &self.continuations };
            let ends = (1..=rest.len().min(self.max_token_bytes))
                .rev()
                .filter(|end| rest.is_char_boundary(*end));
            let Some((end, token)) =
                ends.map(|end| (end, known.get(&rest[..end]))).find(|(_, token)| token.is_some())
            else {
                return false;
            };
            pieces.extend(token);
            rest = &rest[end..];
        }
        true
    }
}

impl Normalizer {
    fn normalize(&self, text: &str) -> String {
        let mut cleaned = String::with_capacity(text.len());
        for c in text.chars() {
            if self.clean_text && is_control(c) {
                continue;
            }
            if self.handle_chinese_chars && is_chinese(c) {
                cleaned.extend([' ', c, ' ']);
            } else {
                cleaned.push(c);
            }
        }
        if self.strip_accents.unwrap_or(self.lowercase) {
            let apart = DecomposingNormalizerBorrowed::new_nfd().normalize(&cleaned);
            cleaned =
                apart.chars().filter(|&c| category(c) != GeneralCategory::NonspacingMark).collect();
        }
        if self.lowercase {
            cleaned.chars().flat_map(char::to_lowercase).collect()
        } else {
            cleaned
        }
    }
}

fn expect_type(
    part: &'static str,
    found: Option<&Value>,
    known: &'static str,
) -> Result<(), Error> {
    let found = found.and_then(|found| found["type"].as_str()).unwrap_or("none");
    if found == known {
        Ok(())
    } else {
        Err(Error::Unknown { part, found: found.to_owned(), known })
    }
}

fn category(c: char) -> GeneralCategory {
    CodePointMapData::<GeneralCategory>::new().get(c)
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || GeneralCategoryGroup::Punctuation.contains(category(c))
}

/// Characters that are removed. Tabs and line ends count as spaces.
fn is_control(c: char) -> bool {
    !matches!(c, '\t' | '\n' | '\r')
        && (c == char::REPLACEMENT_CHARACTER || GeneralCategoryGroup::Other.contains(category(c)))
}

/// Characters that are words of their own.
fn is_chinese(c: char) -> bool {
    matches!(u32::from(c), 0x4E00..=0x9FFF | 0x3400..=0x4DBF | 0x20000..=0x2A6DF | 0x2A700..=0x2B73F | 0x2B740..=0x2B81F
        | 0x2B920..=0x2CEAF | 0xF900..=0xFAFF | 0x2F800..=0x2FA1F)
}

#[cfg(test)]
pub(super) mod tests;
