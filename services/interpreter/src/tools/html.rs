//! Converts HTML to readable Markdown, for models.
//!
//! Pages are untrusted, so the work must be proportional to their size whatever they contain.
//! Converters that build a document tree first cannot guarantee that: HTML's rules let a page of a
//! few kilobytes grow to gigabytes of nodes (open formatting elements are repeated in every
//! paragraph), and walking a tree of a hundred thousand nested elements overflows the stack. Here
//! the page goes through a tokenizer twice: once to examine its tables, once to write the text. The
//! list of open elements is bounded, nothing is recursive, and the output is bounded.
//!
//! Deliberately absent: escaping every character that has a meaning in Markdown. Text is escaped
//! only where a line would become a heading, a quotation or a list, because models read the source.

mod element;
mod outline;
mod writer;

use html5gum::{DefaultEmitter, EndTag, StartTag, StringReader, Token, Tokenizer};
use reqwest::Url;

use super::stop::{Stop, StopReason};
use element::Element;
use outline::Outline;
use writer::{Prefix, Writer};

/// Maximum number of open elements that are tracked; deeper elements are ignored, but not their
/// text.
const MAX_OPEN: usize = 48;

/// How many tokens are processed between two checks of the stop.
const STOP_INTERVAL: usize = 1024;

/// Longest address of a link or an image, in bytes; longer ones are omitted.
const MAX_ADDRESS_BYTES: usize = 2048;

/// Maximum columns in the separator line below a table's head.
const MAX_COLUMNS: usize = 64;

/// A converted page.
#[derive(Debug, PartialEq)]
pub(super) struct Markdown {
    /// The text.
    pub(super) text: String,
    /// Whether it was cut at the limit.
    pub(super) truncated: bool,
}

/// Converts a page, or the beginning of one, to at most `limit` bytes. Addresses are made absolute
/// with `base`.
pub(super) fn to_markdown(
    html: &str,
    base: &Url,
    limit: usize,
    stop: &Stop,
) -> Result<Markdown, StopReason> {
    let outline = Outline::scan(tokens(html), stop)?;
    let mut page = Page {
        base,
        tables: outline.tables.into_iter(),
        writer: Writer::new(limit),
        open: Vec::new(),
        untracked: 0,
        skipping: None,
        code: None,
    };
    if let Some(title) = outline.title {
        page.start_heading(1);
        page.writer.text(&title);
        page.close_from(0);
    }
    for (number, token) in tokens(html).enumerate() {
        if number % STOP_INTERVAL == 0 {
            stop.check()?;
        }
        if page.writer.is_full() {
            break;
        }
        page.process(token);
    }
    page.end_code();
    page.close_from(0);
    let (text, truncated) = page.writer.finish();
    Ok(Markdown { text, truncated })
}

fn tokens(html: &str) -> impl Iterator<Item = Token> {
    let mut emitter = DefaultEmitter::default();
    // Scripts and style sheets are not markup.
    emitter.naively_switch_states(true);
    let tokenizer: Tokenizer<StringReader<'_>, _> = Tokenizer::new_with_emitter(html, emitter);
    tokenizer.map(|token| match token {
        Ok(token) => token,
        Err(never) => match never {},
    })
}

struct Page<'a> {
    base: &'a Url,
    /// For each table in document order, whether it contains data.
    tables: std::vec::IntoIter<bool>,
    writer: Writer,
    /// The tracked open elements, outermost first.
    open: Vec<Open>,
    /// Number of open elements that are not tracked because the list was full.
    untracked: usize,
    /// The element whose content is skipped, and how many elements of that name are open.
    skipping: Option<(Vec<u8>, usize)>,
    code: Option<Code>,
}

/// An open element.
struct Open {
    element: Element,
    state: State,
}

/// The state of an open element.
enum State {
    Nothing,
    /// Number of the next item, in an ordered list.
    List(Option<u32>),
    /// The address of the link.
    Link(String),
    /// A table with data: the cells in the current row, and whether the head is still missing.
    Table {
        cells: usize,
        head: bool,
    },
    /// A cell of a table with data.
    Cell,
}

/// Preformatted text.
struct Code {
    language: String,
    text: String,
}

impl Page<'_> {
    fn process(&mut self, token: Token) {
        match token {
            Token::StartTag(tag) => self.start_tag(&tag),
            Token::EndTag(tag) => self.end_tag(&tag),
            Token::String(text) if self.skipping.is_none() => {
                let text = String::from_utf8_lossy(&text);
                match &mut self.code {
                    Some(code) => code.text.push_str(&text),
                    None => self.writer.text(&text),
                }
            }
            _ => {}
        }
    }

    fn start_tag(&mut self, tag: &StartTag<()>) {
        let element = Element::from_name(&tag.name);
        // Called for every table, to keep the document order.
        let data = element == Element::Table && self.tables.next().unwrap_or(false);
        if let Some((name, depth)) = &mut self.skipping {
            *depth += usize::from(*name == tag.name.0);
            return;
        }
        if let Some(code) = &mut self.code {
            match element {
                Element::Break => code.text.push('\n'),
                _ if code.language.is_empty() => code.language = language(tag),
                _ => {}
            }
            return;
        }
        match element {
            Element::Skipped => self.skipping = Some((tag.name.0.clone(), 1)),
            Element::Break => self.writer.line_break(),
            Element::Rule => self.writer.rule(),
            Element::Block => self.writer.separate(2),
            Element::Line => self.writer.separate(1),
            Element::Image => self.image(tag),
            Element::Code => {
                self.writer.separate(2);
                self.code = Some(Code { language: language(tag), text: String::new() });
            }
            Element::Heading(level) => self.start_heading(level),
            Element::List { ordered } => {
                self.writer.separate(if self.is_open(|one| one == Element::Item) { 1 } else { 2 });
                let first =
                    attribute(tag, "start").and_then(|start| start.parse().ok()).unwrap_or(1);
                self.push(element, State::List(ordered.then_some(first)));
            }
            Element::Item => self.start_item(),
            Element::Quote => {
                self.writer.separate(2);
                if self.push(element, State::Nothing) {
                    self.writer.push_prefix(Prefix::always("> "));
                }
            }
            Element::Link => {
                // A link within a link ends the outer one.
                self.close_last(|one| one == Element::Link, |_| false);
                if let Some(address) = attribute(tag, "href").and_then(|href| self.address(&href))
                    && self.push(element, State::Link(address))
                {
                    self.writer.open("[");
                }
            }
            Element::Mark(mark) => {
                if self.push(element, State::Nothing) {
                    self.writer.open(mark);
                }
            }
            Element::Table => {
                self.writer.separate(2);
                // Within a line, only the text of a table is written.
                let data = data && !self.writer.is_in_line();
                self.push(
                    element,
                    if data { State::Table { cells: 0, head: true } } else { State::Nothing },
                );
            }
            Element::Row => {
                self.close_last(|one| matches!(one, Element::Row), |one| one == Element::Table);
                self.writer.separate(1);
                self.push(element, State::Nothing);
            }
            Element::Cell => self.start_cell(),
            Element::Other => {}
        }
    }

    fn end_tag(&mut self, tag: &EndTag<()>) {
        let element = Element::from_name(&tag.name);
        if let Some((name, depth)) = &mut self.skipping {
            *depth -= usize::from(*name == tag.name.0);
            if *depth == 0 {
                self.skipping = None;
            }
            return;
        }
        match element {
            Element::Code => self.end_code(),
            _ if self.code.is_some() => {}
            Element::Block => self.writer.separate(2),
            Element::Line => self.writer.separate(1),
            element if element.is_tracked() => {
                if self.untracked > 0 {
                    self.untracked -= 1;
                    return;
                }
                let in_cell = |one| one == Element::Cell;
                let same = |one: Element| match (one, element) {
                    (Element::List { .. }, Element::List { .. })
                    | (Element::Heading(_), Element::Heading(_)) => true,
                    (one, element) => one == element,
                };
                // The content of a cell does not close anything outside of it.
                match element {
                    Element::Table | Element::Row | Element::Cell => {
                        self.close_last(same, |one| one == Element::Table)
                    }
                    _ => self.close_last(same, in_cell),
                }
            }
            _ => {}
        }
    }

    fn start_heading(&mut self, level: u8) {
        self.writer.separate(2);
        if self.push(Element::Heading(level), State::Nothing) {
            self.writer
                .push_prefix(Prefix::once(format!("{} ", "#".repeat(usize::from(level))), ""));
            self.writer.begin_in_line();
        }
    }

    fn start_item(&mut self) {
        self.close_last(
            |one| one == Element::Item,
            |one| matches!(one, Element::List { .. } | Element::Cell),
        );
        self.writer.separate(1);
        let list = self.open.iter_mut().rev().find_map(|open| match &mut open.state {
            State::List(number) => Some(number),
            _ => None,
        });
        let marker = match list {
            Some(Some(number)) => {
                let marker = format!("{number}. ");
                *number = number.saturating_add(1);
                marker
            }
            _ => "- ".to_owned(),
        };
        if self.push(Element::Item, State::Nothing) {
            let indent = " ".repeat(marker.len());
            self.writer.push_prefix(Prefix::once(marker, indent));
        }
    }

    fn start_cell(&mut self) {
        self.close_last(|one| one == Element::Cell, |one| one == Element::Table);
        let table = self.open.iter_mut().rev().find(|open| open.element == Element::Table);
        match table.map(|table| &mut table.state) {
            Some(State::Table { cells, .. }) => {
                *cells += 1;
                let first = *cells == 1;
                if self.push(Element::Cell, State::Cell) {
                    self.writer.begin_cell(first);
                }
            }
            _ => {
                self.writer.space();
                self.push(Element::Cell, State::Nothing);
            }
        }
    }

    fn image(&mut self, tag: &StartTag<()>) {
        let alternative = attribute(tag, "alt").unwrap_or_default();
        if alternative.trim().is_empty() {
            return;
        }
        let address = attribute(tag, "src").and_then(|source| self.address(&source));
        self.writer.open("![");
        self.writer.text(&alternative);
        self.writer.close(&address.map_or("]".to_owned(), |address| format!("]({address})")));
    }

    fn end_code(&mut self) {
        if let Some(Code { language, text }) = self.code.take() {
            self.writer.code(&language, &text);
        }
    }

    /// Adds an element to the list of open ones, if there is space.
    fn push(&mut self, element: Element, state: State) -> bool {
        let has_space = self.open.len() < MAX_OPEN;
        if has_space {
            self.open.push(Open { element, state });
        } else {
            self.untracked += 1;
        }
        has_space
    }

    fn is_open(&self, wanted: impl Fn(Element) -> bool) -> bool {
        self.open.iter().any(|open| wanted(open.element))
    }

    /// Closes the innermost element that is `wanted` and everything open inside it, unless it is
    /// outside of a `boundary`.
    fn close_last(&mut self, wanted: impl Fn(Element) -> bool, boundary: impl Fn(Element) -> bool) {
        for (index, open) in self.open.iter().enumerate().rev() {
            if wanted(open.element) {
                return self.close_from(index);
            }
            if boundary(open.element) {
                return;
            }
        }
    }

    fn close_from(&mut self, index: usize) {
        while self.open.len() > index
            && let Some(Open { element, state }) = self.open.pop()
        {
            match (element, state) {
                (Element::Heading(_), _) => {
                    self.writer.end_in_line();
                    self.writer.pop_prefix();
                    self.writer.separate(2);
                }
                (Element::List { .. }, _) => {
                    self.writer.separate(if self.is_open(|one| one == Element::Item) {
                        1
                    } else {
                        2
                    });
                }
                (Element::Item, _) => {
                    self.writer.pop_prefix();
                    self.writer.separate(1);
                }
                (Element::Quote, _) => {
                    self.writer.pop_prefix();
                    self.writer.separate(2);
                }
                (Element::Link, State::Link(address)) => {
                    self.writer.close(&format!("]({address})"))
                }
                (Element::Mark(mark), _) => self.writer.close(mark),
                (Element::Cell, State::Cell) => self.writer.end_cell(),
                (Element::Cell, _) => self.writer.space(),
                (Element::Row, _) => self.end_row(),
                (Element::Table, _) => self.writer.separate(2),
                _ => {}
            }
        }
    }

    fn end_row(&mut self) {
        self.writer.separate(1);
        if let Some(Open { state: State::Table { cells, head }, .. }) = self.open.last_mut() {
            if *head && *cells > 0 {
                *head = false;
                let columns = (*cells).min(MAX_COLUMNS);
                self.writer.line(&format!("|{}", " --- |".repeat(columns)));
            }
            *cells = 0;
        }
    }

    /// The absolute form of an address, if it can be fetched.
    fn address(&self, given: &str) -> Option<String> {
        let given = given.trim();
        // A link within the page is of no use to a reader of its text.
        if given.is_empty() || given.starts_with('#') || given.len() > MAX_ADDRESS_BYTES {
            return None;
        }
        let url = self.base.join(given).ok()?;
        let usable = matches!(url.scheme(), "http" | "https" | "mailto")
            && url.as_str().len() <= MAX_ADDRESS_BYTES;
        usable.then(|| {
            if url.as_str().contains(['(', ')']) { format!("<{url}>") } else { url.to_string() }
        })
    }
}

fn attribute(tag: &StartTag<()>, name: &str) -> Option<String> {
    tag.attributes.get(name.as_bytes()).map(|value| String::from_utf8_lossy(value).into_owned())
}

/// The language of code, as most pages write it: `class="language-rust"`.
fn language(tag: &StartTag<()>) -> String {
    let classes = attribute(tag, "class").unwrap_or_default();
    let named = classes.split_ascii_whitespace().find_map(|class| {
        class
            .strip_prefix("language-")
            .or_else(|| class.strip_prefix("lang-"))
            .or_else(|| class.strip_prefix("highlight-source-"))
    });
    let plain = |name: &&str| {
        name.len() <= 20 && name.chars().all(|c| c.is_ascii_alphanumeric() || "+-#".contains(c))
    };
    named.filter(plain).unwrap_or_default().to_owned()
}
