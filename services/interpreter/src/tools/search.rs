//! `tools.search` and `tools.describe`: finding tools, so that a prompt need not hold them all.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::{self, ToolError};
use super::kind::{Kind, optional, required};
use super::output::{Output, field};
use super::subject;
use super::table::{definition, definitions};

/// Tools returned when nothing else is asked for.
const DEFAULT_RESULTS: usize = 10;

/// The score of a tool that is called so, above all others.
const EXACTLY: u32 = 1 << 24;

/// What a word counts that only one tool has.
const RARE: u32 = 1000;

/// Shortest word that is compared by its beginning: "dir" finds "directory".
const SHORTEST_STEM: usize = 3;

pub(super) const SEARCH: Definition = Definition {
    name: "tools.search",
    aliases: &[],
    summary: "Finds tools by words about what they do, best first.",
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
            "The tools that fit; none when no word fits.",
        ),
        field("total", Output::Integer, "How many fit, those over the limit included."),
    ]),
    like: None,
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
    summary: "Returns everything known about a tool: its declaration and schemas.",
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
        field("permission", Output::Text, "What policies call it."),
    ]),
    like: None,
    example: "print((await tools.describe(\"grep\")).declaration)",
    errors: &[("UnknownTool", "when there is no such tool; the message names similar ones.")],
    effect: Effect::Read,
    permission: Permission::Pure,
    subject: subject::none,
    provider: Provider::Host,
    limits: limits(1, 64),
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    query: String,
    limit: Option<usize>,
}

#[derive(Serialize)]
pub(super) struct Found {
    tools: Vec<FoundTool>,
    total: usize,
}

#[derive(Serialize)]
struct FoundTool {
    name: &'static str,
    summary: &'static str,
    signature: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    name: String,
}

pub(super) fn search(Query { query, limit }: &Query) -> Found {
    let whole = query.trim().to_lowercase();
    let mut scores: Vec<u32> =
        definitions().iter().map(|tool| if tool.is_called(&whole) { EXACTLY } else { 0 }).collect();
    for word in words(&whole) {
        let fits: Vec<u32> = definitions().iter().map(|tool| fits(tool, &word)).collect();
        let common = fits.iter().map(|fit| u32::from(*fit > 0)).sum::<u32>();
        // A word that many tools have says less about which is meant.
        scores
            .iter_mut()
            .zip(&fits)
            .for_each(|(score, fit)| *score += (RARE * fit).checked_div(common).unwrap_or(0));
    }
    let mut ranked: Vec<(u32, &Definition)> =
        scores.into_iter().zip(definitions()).filter(|(score, _)| *score > 0).collect();
    // Stable: of tools that fit as well the one told of first comes first.
    ranked.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
    let found = |(_, tool): &(u32, &'static Definition)| FoundTool {
        name: tool.name,
        summary: tool.summary,
        signature: tool.signature(),
    };
    Found {
        total: ranked.len(),
        tools: ranked.iter().take(limit.unwrap_or(DEFAULT_RESULTS)).map(found).collect(),
    }
}

pub(super) fn describe(Named { name }: &Named) -> Result<Value, ToolError> {
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

/// How well a tool fits one word, by the best place where it stands: the names before the summary
/// before the rest.
fn fits(tool: &Definition, word: &str) -> u32 {
    let names = tool.aliases.iter().copied().chain([tool.name]);
    let parameters = tool.parameters.iter().flat_map(|p| [p.name, p.description]);
    let places = [
        (6, names.collect::<Vec<_>>().join(" ")),
        (4, tool.summary.to_lowercase()),
        (2, tool.description.to_lowercase()),
        (1, parameters.collect::<Vec<_>>().join(" ").to_lowercase()),
    ];
    let in_place = |(weight, text): &(u32, String)| {
        weight * words(text).iter().map(|w| alike(word, w)).max().unwrap_or(0)
    };
    places.iter().map(in_place).max().unwrap_or(0)
}

/// 2 for the same word, 1 for another form of it, 0 for another word.
fn alike(wanted: &str, there: &str) -> u32 {
    let (shorter, longer) =
        if wanted.len() < there.len() { (wanted, there) } else { (there, wanted) };
    match longer.strip_prefix(shorter) {
        Some("") => 2,
        Some(_) if shorter.len() >= SHORTEST_STEM => 1,
        _ => 0,
    }
}

/// The words of a text, without those that say nothing about a tool.
fn words(text: &str) -> Vec<String> {
    const SILENT: [&str; 22] = [
        "a", "all", "an", "and", "are", "at", "be", "can", "do", "for", "how", "i", "in", "is",
        "it", "of", "or", "that", "the", "to", "what", "with",
    ];
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty() && !SILENT.contains(word))
        .map(str::to_owned)
        .collect()
}
