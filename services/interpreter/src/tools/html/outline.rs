//! Facts about a page that are needed before its text is written.

use html5gum::Token;

use super::{Element, STOP_INTERVAL};
use crate::tools::stop::{Stop, StopReason};

/// Longest title, in characters.
const MAX_TITLE_CHARS: usize = 300;

/// How many levels of nested tables are distinguished.
const MAX_TABLE_DEPTH: usize = 100;

/// The outline of a page.
pub(super) struct Outline {
    /// For each table in document order, whether it contains data: whether one of its own cells is
    /// a head. Other tables are only layout.
    pub(super) tables: Vec<bool>,
    /// The title, unless the page has a heading of the first level.
    pub(super) title: Option<String>,
}

impl Outline {
    pub(super) fn scan(
        tokens: impl Iterator<Item = Token>,
        stop: &Stop,
    ) -> Result<Self, StopReason> {
        let (mut tables, mut open): (Vec<bool>, Vec<usize>) = (Vec::new(), Vec::new());
        let (mut title, mut in_title, mut has_heading): (Option<String>, bool, bool) =
            (None, false, false);
        let mut drawings: usize = 0;
        for (number, token) in tokens.enumerate() {
            if number % STOP_INTERVAL == 0 {
                stop.check()?;
            }
            match token {
                Token::StartTag(tag) => {
                    drawings += usize::from(tag.name.as_slice() == b"svg");
                    // SVG drawings have titles too.
                    in_title = title.is_none() && drawings == 0 && tag.name.as_slice() == b"title";
                    match Element::from_name(&tag.name) {
                        Element::Table => {
                            if open.len() < MAX_TABLE_DEPTH {
                                open.push(tables.len());
                            }
                            tables.push(false);
                        }
                        Element::Cell if tag.name.as_slice() == b"th" => {
                            if let Some(table) =
                                open.last().and_then(|index| tables.get_mut(*index))
                            {
                                *table = true;
                            }
                        }
                        Element::Heading(1) => has_heading = true,
                        _ => {}
                    }
                }
                Token::EndTag(tag) => {
                    in_title = false;
                    drawings = drawings.saturating_sub(usize::from(tag.name.as_slice() == b"svg"));
                    if Element::from_name(&tag.name) == Element::Table {
                        open.pop();
                    }
                }
                Token::String(text) if in_title => {
                    title = Some(
                        String::from_utf8_lossy(&text).chars().take(MAX_TITLE_CHARS).collect(),
                    );
                }
                _ => {}
            }
        }
        Ok(Self { tables, title: title.filter(|title| !has_heading && !title.trim().is_empty()) })
    }
}
