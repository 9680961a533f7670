//! HTML as readable Markdown, for models.
//!
//! The page comes from anybody, so the work must be in proportion to its size whatever is in it.
//! Converters that build the document's tree first do not have that: the rules of HTML let a page
//! of a few kilobytes grow to gigabytes of nodes (open formatting elements are repeated in every
//! paragraph), and walking a tree of a hundred thousand nested elements overflows the stack. Here
//! the page goes through a tokenizer once to look at its tables, and once to write the text down;
//! what is open is kept in a list of bounded length, nothing calls itself, and the output is
//! bounded.
//!
//! Deliberately absent: the escaping of every character that could mean something in Markdown. Text
//! is escaped only where a line would be taken for a heading, a quotation or a list, because models
//! read it as it is.

mod element;
mod outline;
mod writer;

use html5gum::{DefaultEmitter, EndTag, StartTag, StringReader, Token, Tokenizer};
use reqwest::Url;

use super::stop::{Stop, Stopped};
use element::Element;
use outline::Outline;
use writer::{Prefix, Writer};

/// How many elements that matter are open at once; those within are passed over, their text is not.
const MAX_OPEN: usize = 48;

/// How often it is asked whether to stop, in tokens.
const STOP_INTERVAL: usize = 1024;

/// Longest address of a link or an image, in bytes; a longer one is left out.
const MAX_ADDRESS: usize = 2048;

/// Most columns of a table that get a line under their head.
const MAX_COLUMNS: usize = 64;

/// A converted page.
#[derive(Debug, PartialEq)]
pub(super) struct Markdown {
    /// The text.
    pub(super) text: String,
    /// It was longer than permitted.
    pub(super) truncated: bool,
}

/// Converts a page, or the beginning of one, to at most `limit` bytes. Addresses are made absolute
/// with `base`.
pub(super) fn to_markdown(
    html: &str,
    base: &Url,
    limit: usize,
    stop: &Stop,
) -> Result<Markdown, Stopped> {
    let outline = Outline::of(tokens(html), stop)?;
    let mut page = Page {
        base,
        tables: outline.tables.into_iter(),
        writer: Writer::new(limit),
        open: Vec::new(),
        passed_over: 0,
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
        page.take(token);
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
    /// Of each table in the order of their beginnings, whether it has data.
    tables: std::vec::IntoIter<bool>,
    writer: Writer,
    /// What is open and matters, outermost first.
    open: Vec<Open>,
    /// How many elements are open within those that were not taken into the list.
    passed_over: usize,
    /// The element whose content is skipped, and how many of that name are open.
    skipping: Option<(Vec<u8>, usize)>,
    code: Option<Code>,
}

/// An open element.
struct Open {
    element: Element,
    state: State,
}

/// What is to be remembered until it is closed.
enum State {
    Nothing,
    /// Number of the next item, in an ordered list.
    List(Option<u32>),
    /// Where it leads.
    Link(String),
    /// A table with data; the cells of the row so far, and whether the head is still to come.
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
    fn take(&mut self, token: Token) {
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
        let element = Element::of(&tag.name);
        // Asked of every table: the order must stay that of the page.
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
                // Within a line there is room for the text of a table only.
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
        let element = Element::of(&tag.name);
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
            element if element.is_kept_open() => {
                if self.passed_over > 0 {
                    self.passed_over -= 1;
                    return;
                }
                let in_cell = |one| one == Element::Cell;
                let same = |one: Element| match (one, element) {
                    (Element::List { .. }, Element::List { .. })
                    | (Element::Heading(_), Element::Heading(_)) => true,
                    (one, element) => one == element,
                };
                // What is within a cell ends nothing outside of it.
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

    /// Takes an element into the list of open ones, if there is room.
    fn push(&mut self, element: Element, state: State) -> bool {
        let room = self.open.len() < MAX_OPEN;
        if room {
            self.open.push(Open { element, state });
        } else {
            self.passed_over += 1;
        }
        room
    }

    fn is_open(&self, wanted: impl Fn(Element) -> bool) -> bool {
        self.open.iter().any(|open| wanted(open.element))
    }

    /// Closes the innermost element that is `wanted`, with what is open in it, unless it lies
    /// outside of a `wall`.
    fn close_last(&mut self, wanted: impl Fn(Element) -> bool, wall: impl Fn(Element) -> bool) {
        for (index, open) in self.open.iter().enumerate().rev() {
            if wanted(open.element) {
                return self.close_from(index);
            }
            if wall(open.element) {
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

    /// The absolute form of an address, if it is one that can be fetched.
    fn address(&self, given: &str) -> Option<String> {
        let given = given.trim();
        // A place in the same page is no use to who has its text.
        if given.is_empty() || given.starts_with('#') || given.len() > MAX_ADDRESS {
            return None;
        }
        let url = self.base.join(given).ok()?;
        let usable = matches!(url.scheme(), "http" | "https" | "mailto")
            && url.as_str().len() <= MAX_ADDRESS;
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
