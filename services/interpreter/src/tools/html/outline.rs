//! What must be known of a page before its text is written down.

use html5gum::Token;

use super::{Element, STOP_INTERVAL};
use crate::tools::stop::{Stop, Stopped};

/// Longest title, in characters.
const MAX_TITLE: usize = 300;

/// How deep tables are nested that are told apart.
const MAX_TABLES: usize = 100;

/// A look at the whole page.
pub(super) struct Outline {
    /// Of each table in the order of their beginnings, whether it has data: whether a cell of its
    /// own is a head. All others are there for the layout.
    pub(super) tables: Vec<bool>,
    /// The title, unless the text has a heading of the first level itself.
    pub(super) title: Option<String>,
}

impl Outline {
    pub(super) fn of(tokens: impl Iterator<Item = Token>, stop: &Stop) -> Result<Self, Stopped> {
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
                    // Drawings have titles too.
                    in_title = title.is_none() && drawings == 0 && tag.name.as_slice() == b"title";
                    match Element::of(&tag.name) {
                        Element::Table => {
                            if open.len() < MAX_TABLES {
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
                    if Element::of(&tag.name) == Element::Table {
                        open.pop();
                    }
                }
                Token::String(text) if in_title => {
                    title = Some(String::from_utf8_lossy(&text).chars().take(MAX_TITLE).collect());
                }
                _ => {}
            }
        }
        Ok(Self { tables, title: title.filter(|title| !has_heading && !title.trim().is_empty()) })
    }
}
