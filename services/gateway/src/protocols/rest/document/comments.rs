//! The comments of the contract.

use std::collections::HashMap;

use construct_proto::DESCRIPTORS;

/// Comments by file and path.
pub(super) struct Comments {
    by_path: HashMap<(String, Vec<i32>), String>,
}

impl Comments {
    pub(super) fn read() -> Self {
        let mut by_path = HashMap::new();
        for file in DESCRIPTORS.files() {
            let Some(source) = &file.file_descriptor_proto().source_code_info else { continue };
            for location in &source.location {
                let comment = location.leading_comments();
                if !comment.is_empty() {
                    by_path.insert(
                        (file.name().to_owned(), location.path.clone()),
                        join_lines(comment),
                    );
                }
            }
        }
        Self { by_path }
    }

    /// The comment of the element at a path of a file; may be empty.
    pub(super) fn for_path(&self, file: &str, path: &[i32]) -> &str {
        self.by_path.get(&(file.to_owned(), path.to_vec())).map_or("", String::as_str)
    }
}

/// Joins the lines of each paragraph, which were wrapped for the file's width.
fn join_lines(comment: &str) -> String {
    let paragraphs = comment
        .split("\n\n")
        .map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    paragraphs.filter(|paragraph| !paragraph.is_empty()).collect::<Vec<_>>().join("\n\n")
}
