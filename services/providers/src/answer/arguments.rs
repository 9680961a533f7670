//! Extracts one string from a JSON object while the object is still being written, to show a script
//! as the model types it. For display only: what runs is read from the complete arguments.

/// Takes JSON in pieces, and returns the text of one top-level string property as it grows.
#[derive(Debug)]
pub(super) struct ArgumentExtractor {
    target_key: String,
    depth: u32,
    position: Position,
    key: String,
    escape: Escape,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    /// Before a key of the object, or outside every string of interest.
    Key,
    InKey,
    /// After the colon.
    Value,
    /// Within the target string.
    Target,
    /// Within another string.
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Escape {
    None,
    /// After a backslash.
    Backslash,
    /// Within `\uXXXX`: the remaining digits, their value so far, and the preceding high surrogate.
    Unicode {
        digits: u8,
        value: u32,
        high: Option<u32>,
    },
    /// After a high surrogate; its other half must follow.
    High(u32),
    /// After a high surrogate and a backslash.
    HighBackslash(u32),
}

impl ArgumentExtractor {
    pub(super) fn new(target_key: &str) -> Self {
        Self {
            target_key: target_key.to_owned(),
            depth: 0,
            position: Position::Key,
            key: String::new(),
            escape: Escape::None,
        }
    }

    /// The text that `json` adds to the target string.
    pub(super) fn push(&mut self, json: &str) -> String {
        let mut text = String::new();
        for c in json.chars() {
            match self.position {
                Position::Key | Position::Value => self.outside(c),
                Position::InKey | Position::Target | Position::Other => self.inside(c, &mut text),
            }
        }
        text
    }

    fn outside(&mut self, c: char) {
        match c {
            '{' | '[' => {
                self.depth += 1;
                self.position =
                    if c == '{' && self.depth == 1 { Position::Key } else { self.position };
            }
            '}' | ']' => self.depth = self.depth.saturating_sub(1),
            ':' if self.depth == 1 => self.position = Position::Value,
            ',' if self.depth == 1 => self.position = Position::Key,
            '"' => {
                self.position = match self.position {
                    Position::Key if self.depth == 1 => {
                        self.key.clear();
                        Position::InKey
                    }
                    Position::Value if self.depth == 1 && self.key == self.target_key => {
                        Position::Target
                    }
                    _ => Position::Other,
                };
            }
            _ => {}
        }
    }

    fn inside(&mut self, c: char, text: &mut String) {
        let decoded = match self.escape {
            Escape::None => match c {
                '\\' => return self.escape = Escape::Backslash,
                '"' => {
                    // A comma follows every value, and says that a key comes next.
                    self.position = if self.position == Position::InKey {
                        Position::Key
                    } else {
                        Position::Value
                    };
                    if self.depth == 1 && self.position == Position::Value {
                        self.key.clear();
                    }
                    return;
                }
                c => c,
            },
            Escape::Backslash => match c {
                'n' => '\n',
                't' => '\t',
                'r' => '\r',
                'b' => '\u{8}',
                'f' => '\u{c}',
                'u' => return self.escape = Escape::Unicode { digits: 4, value: 0, high: None },
                c => c,
            },
            Escape::Unicode { digits, value, high } => {
                let value = value * 16 + c.to_digit(16).unwrap_or(0);
                if digits > 1 {
                    return self.escape = Escape::Unicode { digits: digits - 1, value, high };
                }
                match (high, value) {
                    (None, 0xD800..=0xDBFF) => return self.escape = Escape::High(value),
                    (Some(high), 0xDC00..=0xDFFF) => {
                        char::from_u32(0x1_0000 + ((high - 0xD800) << 10) + (value - 0xDC00))
                            .unwrap_or('\u{FFFD}')
                    }
                    (_, value) => char::from_u32(value).unwrap_or('\u{FFFD}'),
                }
            }
            Escape::High(high) if c == '\\' => return self.escape = Escape::HighBackslash(high),
            Escape::HighBackslash(high) if c == 'u' => {
                return self.escape = Escape::Unicode { digits: 4, value: 0, high: Some(high) };
            }
            // Half a character: shown as unknown, and the rest is read on its own.
            Escape::High(_) | Escape::HighBackslash(_) => {
                let begun = matches!(self.escape, Escape::HighBackslash(_));
                self.escape = if begun { Escape::Backslash } else { Escape::None };
                self.append('\u{FFFD}', text);
                return self.inside(c, text);
            }
        };
        self.escape = Escape::None;
        self.append(decoded, text);
    }

    fn append(&mut self, c: char, text: &mut String) {
        match self.position {
            Position::InKey => self.key.push(c),
            Position::Target => text.push(c),
            Position::Key | Position::Value | Position::Other => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extract(json: &str, split: usize) -> String {
        let mut extractor = ArgumentExtractor::new("code");
        let (left, right) = json.split_at(split);
        extractor.push(left) + &extractor.push(right)
    }

    #[test]
    fn extracted_text_is_the_same_at_every_split() {
        for (json, code) in [
            (r#"{"code": "a\n\"b\"\\ \u00e4 \ud83d\ude00 ä😀"}"#, "a\n\"b\"\\ ä 😀 ä😀"),
            (
                r#"{"note":"x","code":"1","code2":"no","list":["code",{"code":"no"}],"deep":{"code":"no"}}"#,
                "1",
            ),
            (r#" { "\u0063ode" : "yes" } "#, "yes"),
            (r#"{"a":"code","b":[1,2,"code"],"code":""}"#, ""),
            (r#"{"code":"\ud83dx\ud83d\n"}"#, "\u{FFFD}x\u{FFFD}\n"),
            (r#"["code","no"]"#, ""),
            (r#"{"other":"code","x":"no"}"#, ""),
        ] {
            for split in (0..=json.len()).filter(|at| json.is_char_boundary(*at)) {
                assert_eq!(extract(json, split), code, "{json} split at {split}");
            }
        }
    }
}
