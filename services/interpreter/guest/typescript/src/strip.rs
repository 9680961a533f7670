//! Turns TypeScript into JavaScript on the same lines.

use oxc_allocator::Allocator;
use oxc_parser::config::TokensParserConfig;
use oxc_parser::{ParseOptions, Parser, ParserReturn};
use oxc_span::SourceType;

use crate::erase;

/// Why the source could not be turned into JavaScript.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) message: String,
    /// Counted from 1.
    pub(crate) line: usize,
    /// In characters, counted from 1.
    pub(crate) column: usize,
}

impl Failure {
    pub(crate) fn from_offset(source: &str, offset: u32, message: String) -> Self {
        let before = &source[..source.floor_char_boundary(offset as usize)];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Failure {
            message,
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

/// Removes TypeScript-only syntax from the source. Enums and parameter properties become equivalent
/// JavaScript.
pub(crate) fn strip(source: &str) -> Result<String, Failure> {
    let allocator = Allocator::default();
    // First as a module, where `await` is always a keyword; then for syntax that only sloppy mode
    // allows.
    let module = parse(&allocator, source, SourceType::ts());
    if is_valid(&module) {
        return erase::erase(source, &module);
    }
    let sloppy = parse(&allocator, source, SourceType::ts().with_unambiguous(true));
    if is_valid(&sloppy) {
        return erase::erase(source, &sloppy);
    }
    let failure = explain(source, &module);
    if is_valid(&parse(&allocator, source, SourceType::tsx())) {
        let message = "JSX is not supported; write the text with template literals, or call a function that builds it";
        return Err(Failure { message: message.to_owned(), ..failure });
    }
    Err(failure)
}

fn parse<'a>(
    allocator: &'a Allocator,
    source: &'a str,
    source_type: SourceType,
) -> ParserReturn<'a> {
    let options = ParseOptions {
        allow_return_outside_function: true,
        enable_ident_hashes: false,
        ..ParseOptions::default()
    };
    Parser::new(allocator, source, source_type)
        .with_options(options)
        .with_config(TokensParserConfig)
        .parse()
}

fn is_valid(parsed: &ParserReturn<'_>) -> bool {
    !parsed.panicked && !parsed.diagnostics.has_errors()
}

/// Describes the parser's first error: its message, the source text there, and its advice.
fn explain(source: &str, failed: &ParserReturn<'_>) -> Failure {
    let Some(error) = failed.diagnostics.errors().next() else {
        return Failure { message: "the source cannot be parsed".to_owned(), line: 1, column: 1 };
    };
    let mut message = error.message.to_string();
    let Some(label) = error.labels.first() else {
        return Failure { message, line: 1, column: 1 };
    };
    let start = label.offset() as usize;
    let found = source.get(start..start + label.len() as usize).unwrap_or_default();
    let found = found.lines().next().unwrap_or_default();
    if start >= source.len() {
        message.push_str(" at the end of the source");
    } else if !found.is_empty() && found.len() <= 40 && !message.contains(found) {
        message.push_str(&format!(": {found}"));
    }
    for more in label.label().into_iter().chain(error.help.as_deref()) {
        message.push_str(&format!(" ({more})"));
    }
    Failure::from_offset(source, label.offset(), message)
}
