//! Converts Markdown, as models write it, to Slack's blocks: sections of its own markup, headers
//! and rules.
//!
//! In Slack's markup `<…>` has a meaning: `<!channel>` notifies everybody. A model must not be able
//! to notify anybody. So `&`, `<` and `>` of its text are escaped, the only `<…>` are links with a
//! checked address, and sections are `verbatim`, which keeps Slack from looking for names in them.

use pulldown_cmark::{Alignment, Event, HeadingLevel, Options, Parser, Tag, TagEnd};
use serde_json::{Value, json};

/// Characters of one section; Slack's limit is 3,000.
const MAX_SECTION_CHARS: usize = 2_900;
/// Characters of a header; Slack's limit.
const MAX_HEADER_CHARS: usize = 150;
/// Blocks of an answer's message; Slack's limit is 50, and the app may add some.
const MAX_ANSWER_BLOCKS: usize = 45;
/// Characters of a message's blocks. Slack returns `msg_blocks_too_long` above about 13,000, and
/// the app may add some.
const MAX_MESSAGE_CHARS: usize = 10_000;
/// Blocks of a message; Slack's limit.
const MAX_BLOCKS: usize = 50;
/// Levels of lists that are indented.
const MAX_LIST_DEPTH: usize = 6;
/// Characters of a table's cell. A table with longer cells would not fit in columns, and becomes a
/// list.
const MAX_CELL_CHARS: usize = 60;

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Header(String),
    /// Escaped, in Slack's markup.
    Text(String),
    /// Escaped, to be fenced.
    Code(String),
    Rule,
}

/// Escapes the special characters of Slack's markup.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Truncates a text to `limit` characters.
pub(crate) fn truncate(text: &str, limit: usize) -> String {
    if text.chars().count() <= limit {
        return text.to_owned();
    }
    let kept: String = text.chars().take(limit.saturating_sub(1)).collect();
    format!("{kept}…")
}

/// A section of escaped markup.
pub(crate) fn section(mrkdwn: &str) -> Value {
    json!({"type": "section", "text": {"type": "mrkdwn", "text": mrkdwn, "verbatim": true}})
}

/// A context line of escaped markup.
pub(crate) fn context(mrkdwn: &str) -> Value {
    json!({"type": "context", "elements": [{"type": "mrkdwn", "text": mrkdwn, "verbatim": true}]})
}

/// Fenced sections for a text, split where necessary. Fences in the text are broken up by a
/// zero-width space.
pub(crate) fn fenced(text: &str) -> Vec<Value> {
    code_blocks(&break_fences(&escape(text)))
}

/// Whether blocks fit into one message.
pub(crate) fn fits(blocks: &[Value]) -> bool {
    let text_of = |value: &Value| match value.as_str() {
        Some(text) => text.chars().count(),
        None => value["text"].as_str().map_or(0, |text| text.chars().count()),
    };
    let characters = blocks.iter().map(|block| {
        let elements = block["elements"].as_array().into_iter().flatten();
        text_of(&block["text"]) + elements.map(|element| text_of(&element["text"])).sum::<usize>()
    });
    blocks.len() <= MAX_BLOCKS && characters.sum::<usize>() <= MAX_MESSAGE_CHARS
}

/// Converts Markdown to messages, each as its blocks.
pub(crate) fn messages(markdown: &str) -> Vec<Vec<Value>> {
    let mut messages = Vec::new();
    let (mut blocks, mut size) = (Vec::new(), 0);
    for block in parse_parts(markdown).iter().flat_map(blocks_of) {
        let length = block["text"]["text"].as_str().map_or(0, |text| text.chars().count());
        if !blocks.is_empty()
            && (blocks.len() >= MAX_ANSWER_BLOCKS || size + length > MAX_MESSAGE_CHARS)
        {
            messages.push(std::mem::take(&mut blocks));
            size = 0;
        }
        size += length;
        blocks.push(block);
    }
    if !blocks.is_empty() {
        messages.push(blocks);
    }
    messages
}

fn blocks_of(part: &Part) -> Vec<Value> {
    match part {
        Part::Header(text) => {
            vec![
                json!({"type": "header", "text": {"type": "plain_text", "text": truncate(text, MAX_HEADER_CHARS), "emoji": false}}),
            ]
        }
        Part::Rule => vec![json!({"type": "divider"})],
        Part::Text(text) => {
            split_text(text, MAX_SECTION_CHARS).iter().map(|piece| section(piece)).collect()
        }
        Part::Code(code) => code_blocks(code),
    }
}

fn code_blocks(code: &str) -> Vec<Value> {
    let pieces = split(code, MAX_SECTION_CHARS - 8, true);
    pieces.iter().map(|piece| section(&format!("```\n{piece}\n```"))).collect()
}

/// Splits escaped text into pieces of at most `limit` characters: between lines if possible, else
/// between words, and never inside an entity or a link.
fn split_text(text: &str, limit: usize) -> Vec<String> {
    split(text, limit, false)
}

/// Like [`split_text`]. With `exact`, no white space is dropped: in code every space counts.
fn split(text: &str, limit: usize, exact: bool) -> Vec<String> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while rest.chars().count() > limit {
        let end = rest.char_indices().nth(limit).map_or(rest.len(), |(at, _)| at);
        let head = &rest[..end];
        let between = [head.rfind('\n'), head.rfind(' ').filter(|_| !exact)];
        let mut cut = between.into_iter().flatten().find(|at| *at > limit / 2).unwrap_or(end);
        for (open, close) in [('<', '>'), ('&', ';')] {
            if let Some(at) = rest[..cut].rfind(open)
                && !rest[at..cut].contains(close)
                // A link or entity as long as a piece is no link or entity.
                && at > 0
                && rest[at..].find(close).is_some()
            {
                cut = at;
            }
        }
        if exact {
            pieces.push(rest[..cut].to_owned());
            rest = rest[cut..].strip_prefix('\n').unwrap_or(&rest[cut..]);
        } else {
            pieces.push(rest[..cut].trim_end().to_owned());
            rest = rest[cut..].trim_start_matches(['\n', ' ']);
        }
    }
    if !rest.trim().is_empty() {
        pieces.push(rest.to_owned());
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

fn break_fences(escaped: &str) -> String {
    escaped.replace("```", "`\u{200B}`\u{200B}`")
}

/// Builds parts from the parser's events.
#[derive(Default)]
struct PartBuilder {
    parts: Vec<Part>,
    text: String,
    /// The next number of each open list, or none.
    lists: Vec<Option<u64>>,
    quotes: usize,
    header: Option<String>,
    /// Whether a heading within the text is open: it is bold as a whole.
    heading: bool,
    /// Where the text of the latest list item begins.
    item_start: usize,
    code: Option<String>,
    /// For each open link, where its text begins, and its address.
    links: Vec<(usize, String)>,
    table: Option<Table>,
    image: Option<(String, String)>,
}

#[derive(Default)]
struct Table {
    alignments: Vec<Alignment>,
    rows: Vec<Vec<String>>,
    cell: String,
}

fn parse_parts(markdown: &str) -> Vec<Part> {
    let options =
        Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS;
    let mut writer = PartBuilder::default();
    for event in Parser::new_ext(markdown, options) {
        writer.apply(event);
    }
    writer.flush();
    writer.parts
}

impl PartBuilder {
    fn apply(&mut self, event: Event<'_>) {
        match event {
            Event::Start(tag) => self.start_tag(tag),
            Event::End(tag) => self.end_tag(tag),
            Event::Text(text) => self.write(&text),
            // HTML has no meaning in Slack; it is shown as text.
            Event::Html(text) | Event::InlineHtml(text) => self.write(&text),
            Event::Code(code) | Event::InlineMath(code) | Event::DisplayMath(code) => {
                self.inline_code(&code)
            }
            Event::FootnoteReference(name) => self.write(&format!("[{name}]")),
            Event::SoftBreak | Event::HardBreak => self.line_break(),
            Event::Rule => {
                self.flush();
                self.parts.push(Part::Rule);
            }
            Event::TaskListMarker(done) => self.text.push_str(if done { "☑ " } else { "☐ " }),
        }
    }

    fn start_tag(&mut self, tag: Tag<'_>) {
        match tag {
            Tag::Heading { level, .. } => {
                self.flush();
                if level <= HeadingLevel::H2 && self.quotes == 0 && self.lists.is_empty() {
                    self.header = Some(String::new());
                } else {
                    self.text.push('*');
                    self.heading = true;
                }
            }
            Tag::Paragraph => self.start_paragraph(),
            Tag::BlockQuote(_) => {
                self.flush();
                self.quotes += 1;
            }
            Tag::CodeBlock(_) => {
                self.flush();
                self.code = Some(String::new());
            }
            Tag::List(first) => {
                if self.lists.is_empty() {
                    self.start_paragraph();
                }
                self.lists.push(first);
            }
            Tag::Item => self.start_item(),
            Tag::Emphasis => self.push_mark('_'),
            Tag::Strong => self.push_mark('*'),
            Tag::Strikethrough => self.push_mark('~'),
            Tag::Link { dest_url, .. } => self.links.push((self.text.len(), dest_url.to_string())),
            Tag::Image { dest_url, .. } => self.image = Some((dest_url.to_string(), String::new())),
            Tag::Table(alignments) => {
                self.flush();
                self.table = Some(Table { alignments, ..Table::default() });
            }
            Tag::TableHead | Tag::TableRow => {
                if let Some(table) = &mut self.table {
                    table.rows.push(Vec::new());
                }
            }
            _ => {}
        }
    }

    fn end_tag(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Heading(_) => match self.header.take() {
                Some(header) if header.trim().is_empty() => {}
                // It is too long for a header, and nothing of it may be lost.
                Some(header) if header.chars().count() > MAX_HEADER_CHARS => {
                    self.parts.push(Part::Text(format!("*{}*", escape(header.trim()))));
                }
                Some(header) => self.parts.push(Part::Header(header)),
                None => {
                    self.heading = false;
                    self.text.push('*');
                    self.text.push('\n');
                }
            },
            TagEnd::BlockQuote(_) => {
                self.flush();
                self.quotes = self.quotes.saturating_sub(1);
            }
            TagEnd::CodeBlock => {
                if let Some(code) = self.code.take() {
                    self.parts.push(Part::Code(break_fences(&escape(code.trim_end_matches('\n')))));
                }
            }
            TagEnd::List(_) => {
                self.lists.pop();
                if self.lists.is_empty() {
                    self.text.push('\n');
                }
            }
            TagEnd::Emphasis => self.push_mark('_'),
            TagEnd::Strong => self.push_mark('*'),
            TagEnd::Strikethrough => self.push_mark('~'),
            TagEnd::Link => self.end_link(),
            TagEnd::Image => {
                if let Some((url, description)) = self.image.take() {
                    let text = if description.trim().is_empty() {
                        "image".to_owned()
                    } else {
                        description
                    };
                    self.links.push((self.text.len(), url));
                    self.write(&text);
                    self.end_link();
                }
            }
            TagEnd::TableCell => {
                if let Some(table) = &mut self.table {
                    let cell = std::mem::take(&mut table.cell).trim().to_owned();
                    if let Some(row) = table.rows.last_mut() {
                        row.push(cell);
                    }
                }
            }
            TagEnd::Table => {
                if let Some(table) = self.table.take() {
                    self.parts.push(table.to_part());
                }
            }
            _ => {}
        }
    }

    /// Appends raw text of the model.
    fn write(&mut self, text: &str) {
        if let Some(code) = &mut self.code {
            code.push_str(text);
        } else if let Some(header) = &mut self.header {
            header.push_str(text);
        } else if let Some(table) = &mut self.table {
            table.cell.push_str(text);
        } else if let Some((_, description)) = &mut self.image {
            description.push_str(text);
        } else {
            self.text.push_str(&escape(text));
        }
    }

    fn inline_code(&mut self, code: &str) {
        if self.header.is_some() || self.table.is_some() || self.image.is_some() {
            return self.write(code);
        }
        self.text.push('`');
        self.text.push_str(&escape(&code.replace('`', "ˋ")));
        self.text.push('`');
    }

    /// Slack recognizes a mark only next to a character that is no letter.
    fn push_mark(&mut self, mark: char) {
        if self.header.is_some()
            || self.table.is_some()
            || self.image.is_some()
            || self.code.is_some()
        {
            return;
        }
        if self.heading && mark == '*' {
            return;
        }
        if self.text.chars().last().is_some_and(char::is_alphanumeric) && !self.is_mark_open(mark) {
            self.text.push('\u{200B}');
        }
        self.text.push(mark);
    }

    /// Whether a mark of this kind is open in the current line.
    fn is_mark_open(&self, mark: char) -> bool {
        let line = self.text.rsplit('\n').next().unwrap_or_default();
        line.chars().filter(|character| *character == mark).count() % 2 == 1
    }

    fn line_break(&mut self) {
        if self.header.is_some() || self.table.is_some() || self.image.is_some() {
            return self.write(" ");
        }
        self.text.push('\n');
        self.text.push_str(&"    ".repeat(self.lists.len().min(MAX_LIST_DEPTH)));
    }

    /// Starts a new paragraph.
    fn start_paragraph(&mut self) {
        if self.text.is_empty() {
            return;
        }
        if !self.lists.is_empty() {
            if self.text.len() > self.item_start {
                self.line_break();
            }
            return;
        }
        let end = self.text.trim_end_matches('\n').len();
        self.text.truncate(end);
        self.text.push_str("\n\n");
    }

    fn start_item(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
        let depth = self.lists.len().saturating_sub(1).min(MAX_LIST_DEPTH);
        self.text.push_str(&"    ".repeat(depth));
        match self.lists.last_mut() {
            Some(Some(number)) => {
                self.text.push_str(&format!("{number}. "));
                *number += 1;
            }
            _ => self.text.push_str(if depth.is_multiple_of(2) { "• " } else { "◦ " }),
        }
        self.item_start = self.text.len();
    }

    /// Ends the open link. A link with an unsafe address stays text, followed by its address.
    fn end_link(&mut self) {
        let Some((begin, url)) = self.links.pop() else { return };
        if self.code.is_some() {
            return;
        }
        if let Some(plain) =
            self.header.as_mut().or(self.table.as_mut().map(|table| &mut table.cell))
        {
            // Headers and fences have no links; keep the address as text.
            if !url.is_empty() && !plain.ends_with(&url) {
                plain.push_str(&format!(" ({url})"));
            }
            return;
        }
        let label = self.text.split_off(begin.min(self.text.len()));
        let safe =
            ["https://", "http://", "mailto:"].iter().any(|scheme| {
                url.get(..scheme.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(scheme))
            }) && !url.chars().any(|character| character.is_whitespace() || character.is_control());
        if !safe {
            self.text.push_str(&label);
            if !url.is_empty() {
                self.text.push_str(&format!(" ({})", escape(&url)));
            }
            return;
        }
        let address = escape(&url).replace('|', "%7C");
        // Within a link, a bar would end the address, and a line break the link.
        let label = label.replace('|', "¦").replace('\n', " ");
        if label.trim().is_empty() {
            self.text.push_str(&format!("<{address}>"));
        } else {
            self.text.push_str(&format!("<{address}|{label}>"));
        }
    }

    fn flush(&mut self) {
        let text = std::mem::take(&mut self.text);
        self.item_start = 0;
        let text = text.trim_matches('\n').trim_end();
        self.links.clear();
        if text.is_empty() {
            return;
        }
        let text = if self.quotes > 0 {
            text.lines().map(|line| format!("> {line}")).collect::<Vec<_>>().join("\n")
        } else {
            text.to_owned()
        };
        self.parts.push(Part::Text(text));
    }
}

impl Table {
    fn to_part(&self) -> Part {
        if self.rows.iter().flatten().any(|cell| cell.chars().count() > MAX_CELL_CHARS) {
            Part::Text(self.to_list())
        } else {
            Part::Code(break_fences(&escape(&self.to_columns())))
        }
    }

    /// A paragraph for each row, with a line for each cell.
    fn to_list(&self) -> String {
        let Some((titles, rows)) = self.rows.split_first() else { return String::new() };
        let line = |(column, cell): (usize, &String)| match titles
            .get(column)
            .filter(|title| !title.is_empty())
        {
            Some(title) => format!("*{}*: {}", escape(title), escape(cell)),
            None => escape(cell),
        };
        let paragraph = |row: &Vec<String>| {
            let lines = row.iter().enumerate().filter(|(_, cell)| !cell.is_empty()).map(line);
            lines.collect::<Vec<_>>().join("\n")
        };
        if rows.is_empty() {
            return escape(&titles.join("\n"));
        }
        rows.iter().map(paragraph).collect::<Vec<_>>().join("\n\n")
    }

    /// Columns of equal width.
    fn to_columns(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut lines = Vec::new();
        for (number, row) in self.rows.iter().enumerate() {
            let cells: Vec<String> = widths
                .iter()
                .enumerate()
                .map(|(column, width)| {
                    let cell = row.get(column).map(String::as_str).unwrap_or_default();
                    let width = *width;
                    match self.alignments.get(column) {
                        Some(Alignment::Right) => format!("{cell:>width$}"),
                        Some(Alignment::Center) => format!("{cell:^width$}"),
                        _ => format!("{cell:<width$}"),
                    }
                })
                .collect();
            lines.push(cells.join(" | ").trim_end().to_owned());
            if number == 0 {
                lines.push(
                    widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>().join("-+-"),
                );
            }
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests;
