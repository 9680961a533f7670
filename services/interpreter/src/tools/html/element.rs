//! The meaning of HTML elements in text.

/// The kind of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    /// Its content is not text.
    Skipped,
    /// A line break.
    Break,
    /// A horizontal rule.
    Rule,
    /// A paragraph, separated from the text before and after it.
    Block,
    /// Text on its own line.
    Line,
    /// An image.
    Image,
    /// Preformatted text.
    Code,
    /// A heading of this level.
    Heading(u8),
    /// A list.
    List {
        /// Whether its items are numbered.
        ordered: bool,
    },
    /// An item of a list.
    Item,
    /// A quotation.
    Quote,
    /// A link, or the target of one.
    Link,
    /// Text between these marks.
    Mark(&'static str),
    /// A table.
    Table,
    /// A row of a table.
    Row,
    /// A cell of a table.
    Cell,
    /// Any other element.
    Other,
}

impl Element {
    /// The element of this name, which the tokenizer gives in lower case.
    pub(super) fn from_name(name: &[u8]) -> Self {
        match name {
            b"script" | b"style" | b"noscript" | b"template" | b"svg" | b"iframe" | b"object"
            | b"video" | b"audio" | b"canvas" | b"select" | b"datalist" | b"title" => Self::Skipped,
            b"br" => Self::Break,
            b"hr" => Self::Rule,
            b"p" | b"div" | b"section" | b"article" | b"header" | b"footer" | b"main"
            | b"aside" | b"nav" | b"figure" | b"figcaption" | b"address" | b"form"
            | b"fieldset" | b"details" | b"summary" | b"dl" | b"center" | b"body" | b"dialog"
            | b"hgroup" | b"search" | b"caption" => Self::Block,
            b"dt" | b"dd" | b"legend" | b"textarea" => Self::Line,
            b"img" => Self::Image,
            b"pre" | b"listing" | b"xmp" => Self::Code,
            [b'h', level @ b'1'..=b'6'] => Self::Heading(level - b'0'),
            b"ul" | b"menu" | b"dir" => Self::List { ordered: false },
            b"ol" => Self::List { ordered: true },
            b"li" => Self::Item,
            b"blockquote" => Self::Quote,
            b"a" => Self::Link,
            b"b" | b"strong" => Self::Mark("**"),
            b"i" | b"em" => Self::Mark("*"),
            b"del" | b"s" | b"strike" => Self::Mark("~~"),
            b"code" | b"kbd" | b"samp" | b"tt" => Self::Mark("`"),
            b"table" => Self::Table,
            b"tr" => Self::Row,
            b"td" | b"th" => Self::Cell,
            _ => Self::Other,
        }
    }

    /// Whether it is tracked until it is closed.
    pub(super) fn is_tracked(self) -> bool {
        match self {
            Self::Heading(_)
            | Self::List { .. }
            | Self::Item
            | Self::Quote
            | Self::Link
            | Self::Mark(_) => true,
            Self::Table | Self::Row | Self::Cell => true,
            Self::Skipped
            | Self::Break
            | Self::Rule
            | Self::Block
            | Self::Line
            | Self::Image
            | Self::Code => false,
            Self::Other => false,
        }
    }
}
