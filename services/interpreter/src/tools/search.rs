//! `tools.search` and `tools.describe`: finding tools, so that a prompt need not contain them all.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::{self, ToolError};
use super::kind::{Kind, optional, required};
use super::output::{Output, field};
use super::subject;
use super::table::{definition, definitions};

/// Default number of returned tools.
const DEFAULT_RESULTS: usize = 10;

/// The score of a tool with this exact name, above all others.
const EXACT_NAME_SCORE: u32 = 1 << 24;

/// The score of a word that only one tool has.
const UNIQUE_WORD_SCORE: u32 = 1000;

/// Shortest word that matches as a prefix: "dir" finds "directory".
const MIN_PREFIX_LENGTH: usize = 3;

pub(super) const SEARCH: Definition = Definition {
    name: "tools.search",
    aliases: &[],
    summary: "Finds tools by words that describe what they do, best match first.",
    description: "",
    parameters: &[
        required(
            "query",
            Kind::Text { min_bytes: 1, max_bytes: 1000 },
            "Words, for example \"delete directory\".",
        ),
        optional("limit", Kind::Integer { min: 1, max: 50 }, "10", "Return at most this many."),
    ],
    output: Output::Object(&[
        field(
            "tools",
            Output::List(&Output::Object(&[
                field("name", Output::Text, "Its name."),
                field("summary", Output::Text, "What it does."),
                field("signature", Output::Text, "How it is called."),
            ])),
            "The matching tools; empty if no word matches.",
        ),
        field(
            "total",
            Output::Integer,
            "Number of matching tools, including those over the limit.",
        ),
    ]),
    base_tool: None,
    example: "await tools.search(\"delete a directory\")",
    errors: &[],
    effect: Effect::Read,
    permission: Permission::Pure,
    subject: subject::none,
    provider: Provider::Host,
    limits: limits(1, 64),
};

pub(super) const DESCRIBE: Definition = Definition {
    name: "tools.describe",
    aliases: &[],
    summary: "Returns the declaration and the schemas of a tool.",
    description: "",
    parameters: &[required(
        "name",
        Kind::Text { min_bytes: 1, max_bytes: 256 },
        "Name of the tool.",
    )],
    output: Output::Object(&[
        field("name", Output::Text, "Its name."),
        field("aliases", Output::List(&Output::Text), "Its other names."),
        field("declaration", Output::Text, "Its TypeScript declaration with documentation."),
        field("input_schema", Output::Any, "JSON schema of the arguments by name."),
        field("output_schema", Output::Any, "JSON schema of the result."),
        field("effect", Output::OneOf(&["read", "write", "external"]), "What a call changes."),
        field("permission", Output::Text, "Its permission in policies."),
    ]),
    base_tool: None,
    example: "print((await tools.describe(\"grep\")).declaration)",
    errors: &[("UnknownTool", "when there is no such tool; the message lists similar ones.")],
    effect: Effect::Read,
    permission: Permission::Pure,
    subject: subject::none,
    provider: Provider::Host,
    limits: limits(1, 64),
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SearchArguments {
    query: String,
    limit: Option<usize>,
}

#[derive(Serialize)]
pub(super) struct SearchResult {
    tools: Vec<ToolMatch>,
    total: usize,
}

#[derive(Serialize)]
struct ToolMatch {
    name: &'static str,
    summary: &'static str,
    signature: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DescribeArguments {
    name: String,
}

pub(super) fn search(SearchArguments { query, limit }: &SearchArguments) -> SearchResult {
    let query = query.trim().to_lowercase();
    let mut scores: Vec<u32> = definitions()
        .iter()
        .map(|tool| if tool.has_name(&query) { EXACT_NAME_SCORE } else { 0 })
        .collect();
    for word in significant_words(&query) {
        let matches: Vec<u32> = definitions().iter().map(|tool| match_score(tool, &word)).collect();
        let common = matches.iter().map(|fit| u32::from(*fit > 0)).sum::<u32>();
        // A word that many tools have distinguishes less.
        scores.iter_mut().zip(&matches).for_each(|(score, fit)| {
            *score += (UNIQUE_WORD_SCORE * fit).checked_div(common).unwrap_or(0)
        });
    }
    let mut ranked: Vec<(u32, &Definition)> =
        scores.into_iter().zip(definitions()).filter(|(score, _)| *score > 0).collect();
    // Stable: tools with equal scores keep the order of the table.
    ranked.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
    let found = |(_, tool): &(u32, &'static Definition)| ToolMatch {
        name: tool.name,
        summary: tool.summary,
        signature: tool.signature(),
    };
    SearchResult {
        total: ranked.len(),
        tools: ranked.iter().take(limit.unwrap_or(DEFAULT_RESULTS)).map(found).collect(),
    }
}

pub(super) fn describe(DescribeArguments { name }: &DescribeArguments) -> Result<Value, ToolError> {
    let tool =
        definition(name.trim_end_matches("()").trim()).ok_or_else(|| error::unknown_tool(name))?;
    Ok(json!({
        "name": tool.name,
        "aliases": tool.callable_aliases(),
        "declaration": tool.declaration(),
        "input_schema": tool.input_schema(),
        "output_schema": tool.output_schema(),
        "effect": tool.effect.name(),
        "permission": tool.permission.name(),
    }))
}

/// How well a tool matches one word, by the best text that contains it: names count more than the
/// summary, the summary more than the rest.
fn match_score(tool: &Definition, word: &str) -> u32 {
    let names = tool.aliases.iter().copied().chain([tool.name]);
    let parameters = tool.parameters.iter().flat_map(|p| [p.name, p.description]);
    let texts = [
        (6, names.collect::<Vec<_>>().join(" ")),
        (4, tool.summary.to_lowercase()),
        (2, tool.description.to_lowercase()),
        (1, parameters.collect::<Vec<_>>().join(" ").to_lowercase()),
    ];
    let score = |(weight, text): &(u32, String)| {
        weight * significant_words(text).iter().map(|w| similarity(word, w)).max().unwrap_or(0)
    };
    texts.iter().map(score).max().unwrap_or(0)
}

/// 2 for the same word, 1 for another form of it, 0 for a different word.
fn similarity(wanted: &str, other: &str) -> u32 {
    let (shorter, longer) =
        if wanted.len() < other.len() { (wanted, other) } else { (other, wanted) };
    match longer.strip_prefix(shorter) {
        Some("") => 2,
        Some(_) if shorter.len() >= MIN_PREFIX_LENGTH => 1,
        _ => 0,
    }
}

/// The words of a text, without stop words.
fn significant_words(text: &str) -> Vec<String> {
    const STOP_WORDS: [&str; 22] = [
        "a", "all", "an", "and", "are", "at", "be", "can", "do", "for", "how", "i", "in", "is",
        "it", "of", "or", "that", "the", "to", "what", "with",
    ];
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty() && !STOP_WORDS.contains(word))
        .map(str::to_owned)
        .collect()
}
