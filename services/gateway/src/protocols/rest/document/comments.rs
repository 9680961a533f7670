//! What the contract's comments say.

use std::collections::HashMap;

use construct_proto::DESCRIPTORS;

/// Comments by file and place.
pub(super) struct Comments {
    by_place: HashMap<(String, Vec<i32>), String>,
}

impl Comments {
    pub(super) fn read() -> Self {
        let mut by_place = HashMap::new();
        for file in DESCRIPTORS.files() {
            let Some(source) = &file.file_descriptor_proto().source_code_info else { continue };
            for location in &source.location {
                let words = location.leading_comments();
                if !words.is_empty() {
                    by_place.insert(
                        (file.name().to_owned(), location.path.clone()),
                        one_line_each(words),
                    );
                }
            }
        }
        Self { by_place }
    }

    /// What stands before the thing at a place of a file; may be empty.
    pub(super) fn of(&self, file: &str, path: &[i32]) -> &str {
        self.by_place.get(&(file.to_owned(), path.to_vec())).map_or("", String::as_str)
    }
}

/// Lines were broken for the width of the file; paragraphs were meant.
fn one_line_each(words: &str) -> String {
    let paragraphs = words
        .split("\n\n")
        .map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    paragraphs.filter(|paragraph| !paragraph.is_empty()).collect::<Vec<_>>().join("\n\n")
}
