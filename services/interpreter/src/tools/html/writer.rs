//! Writes Markdown: lines, their prefixes, and marks that are written only when text follows.

use std::borrow::Cow;

/// Maximum number of backticks of a code fence.
const MAX_FENCE: usize = 20;

/// The prefix of lines.
pub(super) struct Prefix {
    /// The prefix of the next line, used once.
    first: Option<String>,
    /// The prefix of all other lines.
    rest: Cow<'static, str>,
}

impl Prefix {
    /// `first` for the next line, `rest` for the lines after it.
    pub(super) fn once(first: String, rest: impl Into<Cow<'static, str>>) -> Self {
        Self { first: Some(first), rest: rest.into() }
    }

    /// The same prefix for every line.
    pub(super) fn always(text: &'static str) -> Self {
        Self { first: None, rest: Cow::Borrowed(text) }
    }
}

/// The text so far, and what must be written before the next word.
pub(super) struct Writer {
    text: String,
    limit: usize,
    prefixes: Vec<Prefix>,
    /// Opened marks without text so far.
    marks: Vec<&'static str>,
    /// Line feeds before the next word.
    newlines: usize,
    /// Whether there is a space before the next word.
    space: bool,
    /// Whether the line contains only prefixes.
    at_start: bool,
    /// Number of open elements that suppress line breaks.
    in_line: usize,
    /// Number of open table cells.
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

    /// Whether the limit is exceeded.
    pub(super) fn is_full(&self) -> bool {
        self.text.len() > self.limit
    }

    /// The text, and whether it was cut at the limit.
    pub(super) fn finish(mut self) -> (String, bool) {
        let truncated = self.is_full();
        if truncated {
            self.text.truncate(self.text.floor_char_boundary(self.limit));
        } else if !self.text.is_empty() {
            self.text.push('\n');
        }
        (self.text, truncated)
    }

    /// Writes text, with whitespace collapsed to single spaces.
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

    /// Separates the following text by at least this many line feeds.
    pub(super) fn separate(&mut self, newlines: usize) {
        if self.in_line > 0 {
            self.space = true;
        } else {
            self.newlines = self.newlines.max(newlines);
        }
    }

    /// Ends the line; called twice, the paragraph.
    pub(super) fn line_break(&mut self) {
        self.separate((self.newlines + 1).min(2));
    }

    /// Separates the following text by a space.
    pub(super) fn space(&mut self) {
        self.space = true;
    }

    pub(super) fn rule(&mut self) {
        self.separate(2);
        self.line("---");
        self.separate(2);
    }

    /// Writes a separate line.
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

    /// Closes the last opened mark, unless it has no text.
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

    /// Suppresses line breaks until [`Self::end_in_line`].
    pub(super) fn begin_in_line(&mut self) {
        self.in_line += 1;
    }

    pub(super) fn end_in_line(&mut self) {
        self.in_line -= 1;
    }

    pub(super) fn is_in_line(&self) -> bool {
        self.in_line > 0
    }

    /// Begins a cell of a table. `first` is true for the first cell of a row.
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
        // Marks opened around the code must not be written into it.
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

    /// Writes what precedes the next word.
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

    /// An empty line, with the prefix of a quotation.
    fn blank_line(&mut self) {
        // Prefixes of elements that have not begun do not apply to this line.
        let begun = self.prefixes.iter().take_while(|prefix| prefix.first.is_none());
        let line: String = begun.map(|prefix| prefix.rest.as_ref()).collect();
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }
}
