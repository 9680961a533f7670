//! Writing Markdown down: lines, their beginnings, and marks that are written only when text
//! follows.

use std::borrow::Cow;

/// Longest row of backticks in front of code.
const MAX_FENCE: usize = 20;

/// What stands at the beginning of lines.
pub(super) struct Prefix {
    /// Of the next line, once.
    first: Option<String>,
    /// Of all others.
    rest: Cow<'static, str>,
}

impl Prefix {
    /// `first` at the beginning of the next line, `rest` at those after it.
    pub(super) fn once(first: String, rest: impl Into<Cow<'static, str>>) -> Self {
        Self { first: Some(first), rest: rest.into() }
    }

    /// At the beginning of each line.
    pub(super) fn always(text: &'static str) -> Self {
        Self { first: None, rest: Cow::Borrowed(text) }
    }
}

/// The text so far, and what is to be written before the next word.
pub(super) struct Writer {
    text: String,
    limit: usize,
    prefixes: Vec<Prefix>,
    /// Marks that were opened and have no text yet.
    marks: Vec<&'static str>,
    /// Line ends before the next word; a page begins with none.
    newlines: usize,
    /// A space before the next word.
    space: bool,
    /// Nothing but the prefixes stands on the line.
    at_start: bool,
    /// How many elements are open in which lines do not end.
    in_line: usize,
    /// How many of them are cells of tables.
    in_cell: usize,
}

impl Writer {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            text: String::new(),
            limit,
            prefixes: Vec::new(),
            marks: Vec::new(),
            newlines: 1,
            space: false,
            at_start: true,
            in_line: 0,
            in_cell: 0,
        }
    }

    /// Whether there is no use in writing more.
    pub(super) fn is_full(&self) -> bool {
        self.text.len() > self.limit
    }

    /// The whole text, and whether it was cut.
    pub(super) fn finish(mut self) -> (String, bool) {
        let truncated = self.is_full();
        if truncated {
            self.text.truncate(self.text.floor_char_boundary(self.limit));
        } else if !self.text.is_empty() {
            self.text.push('\n');
        }
        (self.text, truncated)
    }

    /// Writes text, white space as a single space.
    pub(super) fn text(&mut self, text: &str) {
        let text = text.replace('\u{a0}', " ");
        self.space |= text.starts_with(|c: char| c.is_ascii_whitespace());
        for word in text.split_ascii_whitespace() {
            self.begin();
            if self.at_start && (word.starts_with(['#', '>']) || matches!(word, "-" | "+" | "*")) {
                self.text.push('\\');
            }
            if self.in_cell > 0 {
                self.text.push_str(&word.replace('|', "\\|"));
            } else {
                self.text.push_str(word);
            }
            self.at_start = false;
            self.space = true;
        }
        if !text.ends_with(|c: char| c.is_ascii_whitespace()) && !text.is_empty() {
            self.space = false;
        }
    }

    /// What follows is apart from what is there by at least so many line ends.
    pub(super) fn separate(&mut self, newlines: usize) {
        if self.in_line > 0 {
            self.space = true;
        } else {
            self.newlines = self.newlines.max(newlines);
        }
    }

    /// The line ends here; a second time, the paragraph.
    pub(super) fn line_break(&mut self) {
        self.separate((self.newlines + 1).min(2));
    }

    /// What follows is another word.
    pub(super) fn space(&mut self) {
        self.space = true;
    }

    pub(super) fn rule(&mut self) {
        self.separate(2);
        self.line("---");
        self.separate(2);
    }

    /// Writes a line of its own.
    pub(super) fn line(&mut self, line: &str) {
        let marks = std::mem::take(&mut self.marks);
        self.separate(1);
        self.begin();
        self.text.push_str(line);
        self.at_start = false;
        self.separate(1);
        self.marks = marks;
    }

    /// Opens marked text; the mark is written when text follows.
    pub(super) fn open(&mut self, mark: &'static str) {
        self.marks.push(mark);
    }

    /// Closes what was opened last, unless there was no text in it.
    pub(super) fn close(&mut self, mark: &str) {
        if self.marks.pop().is_none() {
            self.text.push_str(mark);
        }
    }

    pub(super) fn push_prefix(&mut self, prefix: Prefix) {
        self.prefixes.push(prefix);
    }

    pub(super) fn pop_prefix(&mut self) {
        self.prefixes.pop();
    }

    /// From here to [`Self::end_in_line`] lines do not end.
    pub(super) fn begin_in_line(&mut self) {
        self.in_line += 1;
    }

    pub(super) fn end_in_line(&mut self) {
        self.in_line -= 1;
    }

    pub(super) fn is_in_line(&self) -> bool {
        self.in_line > 0
    }

    /// Begins a cell of a table, which is the first of its row or not.
    pub(super) fn begin_cell(&mut self, first: bool) {
        let marks = std::mem::take(&mut self.marks);
        if first {
            self.separate(1);
            self.begin();
            self.text.push('|');
        }
        self.marks = marks;
        self.space = true;
        self.newlines = 0;
        self.at_start = false;
        self.in_line += 1;
        self.in_cell += 1;
    }

    pub(super) fn end_cell(&mut self) {
        self.text.push_str(" |");
        self.space = false;
        self.in_line -= 1;
        self.in_cell -= 1;
    }

    /// Writes preformatted text.
    pub(super) fn code(&mut self, language: &str, text: &str) {
        let text = text.strip_prefix('\n').unwrap_or(text).trim_end();
        if text.trim().is_empty() {
            return;
        }
        if self.in_line > 0 {
            self.open("`");
            self.text(text);
            self.close("`");
            return;
        }
        // Marks that were opened around it would end up in it.
        let marks = std::mem::take(&mut self.marks);
        let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat((longest + 1).clamp(3, MAX_FENCE));
        self.separate(2);
        self.line(&format!("{fence}{language}"));
        for line in text.split('\n') {
            if self.is_full() {
                break;
            }
            self.begin();
            self.text.push_str(line.trim_end_matches('\r'));
            self.at_start = false;
            self.newlines = 1;
        }
        self.line(&fence);
        self.separate(2);
        self.marks = marks;
    }

    /// Writes what must stand before the next word.
    fn begin(&mut self) {
        if self.newlines > 0 {
            if !self.text.is_empty() {
                self.text.push('\n');
                if self.newlines > 1 {
                    self.blank_line();
                }
            }
            for prefix in &mut self.prefixes {
                match prefix.first.take() {
                    Some(first) => self.text.push_str(&first),
                    None => self.text.push_str(&prefix.rest),
                }
            }
            self.newlines = 0;
            self.at_start = true;
        } else if self.space {
            self.text.push(' ');
        }
        self.space = false;
        for mark in self.marks.drain(..) {
            self.text.push_str(mark);
            self.at_start = false;
        }
    }

    /// An empty line, which in a quotation has its mark.
    fn blank_line(&mut self) {
        // What is yet to begin is not yet around this line.
        let begun = self.prefixes.iter().take_while(|prefix| prefix.first.is_none());
        let line: String = begun.map(|prefix| prefix.rest.as_ref()).collect();
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }
}
