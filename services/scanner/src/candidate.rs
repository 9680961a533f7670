//! Checks the proposals of a model: their form against a schema, every citation against the files,
//! and that name and entry point are unique. An invalid proposal is refused with a message that
//! helps the model to repair it.

use std::{
    cell::RefCell,
    collections::{BTreeSet, VecDeque},
    fmt,
    sync::LazyLock,
};

use construct_wire::scan::CANDIDATE_SCHEMA;
use jsonschema::Validator;
use serde_json::Value;

use crate::repository::{MaskedSnapshot, line_range};

/// Longer answers are refused.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;
/// Answers with more candidates are refused.
const MAX_CANDIDATES: usize = 100;
/// Mistakes of one candidate that are reported.
const MAX_PROBLEMS_PER_CANDIDATE: usize = 8;
/// Bytes of the repair prompt.
const MAX_REPAIR_BYTES: usize = 20_000;
/// A quote that is found at most so many lines away is accepted, and its line is corrected.
const MAX_LINE_OFFSET: u32 = 3;
/// The minimum length of a quote, without white space. Shorter quotes match nearly every line.
const MIN_QUOTE_CHARS: usize = 4;
/// Files that are cached during a check, so that a file with many citations is read once.
const CACHED_FILES: usize = 8;
/// JSON objects of an answer that are tried.
const MAX_OBJECTS: usize = 100;
/// Characters of a name, as in the schema.
const MAX_NAME_CHARS: usize = 63;

static VALIDATOR: LazyLock<Validator> = LazyLock::new(|| {
    let schema: Value =
        serde_json::from_str(CANDIDATE_SCHEMA).expect("the schema is part of this program");
    jsonschema::validator_for(&schema).expect("the schema is part of this program")
});

/// A valid candidate.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) name: String,
    pub(crate) score: i32,
    pub(crate) content: Value,
}

/// Why the answer, or one of its candidates, is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// The candidate's index from 0, and its name; none: the answer as a whole.
    candidate: Option<(usize, String)>,
    message: String,
}

impl Problem {
    /// Whether it concerns the answer as a whole.
    pub(crate) const fn is_about_answer(&self) -> bool {
        self.candidate.is_none()
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.candidate {
            None => f.write_str(&self.message),
            Some((index, name)) if name.is_empty() => {
                write!(f, "candidates[{index}]: {}", self.message)
            }
            Some((index, name)) => write!(f, "candidates[{index}] ({name}): {}", self.message),
        }
    }
}

/// The result of checking an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct CheckReport {
    /// The valid candidates, best first.
    pub(crate) candidates: Vec<Candidate>,
    /// The mistakes.
    pub(crate) problems: Vec<Problem>,
    /// How many were merged into another one.
    pub(crate) merged: usize,
}

/// The number of candidates with problems.
pub(crate) fn refused_count(problems: &[Problem]) -> usize {
    problems
        .iter()
        .filter_map(|problem| problem.candidate.as_ref().map(|(index, _)| index))
        .collect::<BTreeSet<_>>()
        .len()
}

/// The prompt that asks the model to repair its mistakes.
pub(crate) fn repair_prompt(problems: &[Problem]) -> String {
    let mut text = String::from(
        "Your answer has mistakes. Read the files again where necessary, then answer again with the complete JSON \
         object: keep what was right, correct the mistakes, and omit what you cannot correct. The mistakes are:\n",
    );
    for problem in problems {
        let line = format!("\n- {problem}");
        if text.len() + line.len() > MAX_REPAIR_BYTES {
            text.push_str("\n- and more of this kind");
            break;
        }
        text.push_str(&line);
    }
    text
}

/// Checks an answer against the files of a commit. Reads files.
pub(crate) fn check(answer: &str, snapshot: &MaskedSnapshot, commit: &str) -> CheckReport {
    let cache = RefCell::new(VecDeque::<(String, Option<String>)>::new());
    check_with(answer, commit, &|path, first, last| {
        let mut cache = cache.borrow_mut();
        if !cache.iter().any(|(cached, _)| cached == path) {
            cache.truncate(CACHED_FILES - 1);
            cache.push_front((path.to_owned(), snapshot.text(path)));
        }
        let text =
            cache.iter().find(|(cached, _)| cached == path).and_then(|(_, text)| text.as_ref())?;
        line_range(text, first, last)
    })
}

/// Reads the lines of a file between two line numbers, counted from 1 and inclusive. None when the
/// file or its first line does not exist.
type LineReader<'a> = &'a dyn Fn(&str, u32, u32) -> Option<Vec<String>>;

fn check_with(answer: &str, commit: &str, lines: LineReader<'_>) -> CheckReport {
    let proposed = match parse_candidates(answer) {
        Ok(proposed) => proposed,
        Err(message) => {
            return CheckReport {
                problems: vec![Problem { candidate: None, message }],
                ..CheckReport::default()
            };
        }
    };
    let mut checked = CheckReport::default();
    for (index, mut content) in proposed.into_iter().enumerate() {
        normalize(&mut content, commit);
        let name =
            content["name"].as_str().unwrap_or_default().chars().take(80).collect::<String>();
        let mut mistakes: Vec<String> = VALIDATOR
            .iter_errors(&content)
            .map(|error| {
                let place = error.instance_path().to_string();
                let words: String = error.to_string().chars().take(300).collect();
                if place.is_empty() {
                    words
                } else {
                    format!("{}: {words}", place.trim_start_matches('/'))
                }
            })
            .collect();
        if mistakes.is_empty() {
            mistakes = check_citations(&mut content, lines);
        }
        if mistakes.is_empty() {
            add_candidate(&mut checked, content);
        } else {
            let more = mistakes.len().saturating_sub(MAX_PROBLEMS_PER_CANDIDATE);
            mistakes.truncate(MAX_PROBLEMS_PER_CANDIDATE);
            if more > 0 {
                mistakes.push(format!("and {more} more mistakes"));
            }
            let problem = |what| Problem { candidate: Some((index, name.clone())), message: what };
            checked.problems.extend(mistakes.into_iter().map(problem));
        }
    }
    checked
        .candidates
        .sort_by(|one, other| other.score.cmp(&one.score).then_with(|| one.name.cmp(&other.name)));
    make_names_unique(&mut checked.candidates);
    checked
}

/// Finds the proposals in an answer: models like to put text and fences around the JSON.
fn parse_candidates(answer: &str) -> Result<Vec<Value>, String> {
    if answer.len() > MAX_ANSWER_BYTES {
        return Err(format!("the answer is longer than {MAX_ANSWER_BYTES} bytes"));
    }
    let (mut at, mut furthest_error, mut others) = (0, None::<serde_json::Error>, false);
    let mut found = None::<Vec<Value>>;
    for _ in 0..MAX_OBJECTS {
        let Some(start) = answer[at..].find('{').map(|found| at + found) else { break };
        let mut objects = serde_json::Deserializer::from_str(&answer[start..]).into_iter::<Value>();
        match objects.next() {
            Some(Ok(mut object)) => {
                match object.get_mut("candidates").map(Value::take) {
                    // Models show the form before they fill it in: the last list counts, and an
                    // empty one does not replace another.
                    Some(Value::Array(proposed)) if found.is_none() || !proposed.is_empty() => {
                        found = Some(proposed)
                    }
                    Some(Value::Array(_)) => {}
                    _ => others = true,
                }
                at = start + objects.byte_offset();
            }
            Some(Err(error)) => {
                // Report the error that came furthest, which is in what the model meant.
                let far = |error: &serde_json::Error| (error.line(), error.column());
                if furthest_error.as_ref().is_none_or(|furthest| far(&error) > far(furthest)) {
                    furthest_error = Some(error);
                }
                at = start + 1;
            }
            None => break,
        }
    }
    if let Some(proposed) = found {
        let many = proposed.len() > MAX_CANDIDATES;
        let too_many = || {
            format!("there are {} candidates; at most {MAX_CANDIDATES} are allowed", proposed.len())
        };
        return if many { Err(too_many()) } else { Ok(proposed) };
    }
    Err(match furthest_error {
        Some(error) => format!("the answer is not valid JSON: {error}"),
        None if others => "the answer has no list `candidates`".to_owned(),
        None => "the answer has no JSON object".to_owned(),
    })
}

/// Normalizes names and paths.
fn normalize(content: &mut Value, commit: &str) {
    if let Some(Value::String(name)) = content.get_mut("name") {
        let mut normal = String::with_capacity(name.len());
        for c in name.trim().chars().flat_map(char::to_lowercase) {
            let c = if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' };
            if c != '-' || !normal.ends_with('-') {
                normal.push(c);
            }
        }
        *name = normal.trim_matches('-').to_owned();
    }
    let root = format!("{commit}/tree/");
    let plain = |path: &mut Value| {
        if let Value::String(path) = path {
            let bare = path.trim().trim_start_matches("./").trim_start_matches('/');
            *path = bare.strip_prefix(&root).unwrap_or(bare).to_owned();
        }
    };
    if let Some(path) = content.pointer_mut("/entry_point/path") {
        plain(path);
    }
    for evidence in content.get_mut("evidence").and_then(Value::as_array_mut).into_iter().flatten()
    {
        if let Some(path) = evidence.get_mut("path") {
            plain(path);
        }
    }
}

/// Checks the citations of a candidate. A miscounted line is corrected.
fn check_citations(content: &mut Value, lines: LineReader<'_>) -> Vec<String> {
    let mut mistakes = Vec::new();
    let line_of = |value: &Value| {
        value["line"].as_u64().and_then(|line| u32::try_from(line).ok()).unwrap_or(u32::MAX)
    };
    let entry = &mut content["entry_point"];
    let (path, line) = (entry["path"].as_str().unwrap_or_default().to_owned(), line_of(entry));
    if let Some(entry_line) = lines(&path, line, line).and_then(|mut cited| cited.pop()) {
        let symbol = entry["symbol"].as_str().map(last_segment).unwrap_or_default().to_owned();
        if symbol.is_empty() {
            if entry_line.trim().is_empty() {
                mistakes.push(format!("entry_point: line {line} of {path} is blank"));
            }
        } else {
            match nearest_line(&path, line, lines, |text| text.contains(&symbol)) {
                Some(at) => entry["line"] = at.into(),
                None => mistakes.push(format!(
                    "entry_point: neither line {line} of {path} nor those beside it have the symbol `{symbol}`; the line is `{}`",
                    excerpt(&entry_line)
                )),
            }
        }
    } else {
        mistakes.push(format!("entry_point: {}", missing_line(&path, line, lines)));
    }
    for (index, evidence) in content["evidence"].as_array_mut().into_iter().flatten().enumerate() {
        let (path, line) =
            (evidence["path"].as_str().unwrap_or_default().to_owned(), line_of(evidence));
        let Some(cited) = lines(&path, line, line).and_then(|mut cited| cited.pop()) else {
            mistakes.push(format!("evidence[{index}]: {}", missing_line(&path, line, lines)));
            continue;
        };
        let quote = collapse_whitespace(evidence["quote"].as_str().unwrap_or_default());
        // A line as short as that may be quoted as a whole.
        if quote.is_empty()
            || (quote.chars().filter(|c| *c != ' ').count() < MIN_QUOTE_CHARS
                && quote != collapse_whitespace(&cited))
        {
            mistakes.push(format!(
                "evidence[{index}]: the quote is too short: quote the line, or a part that only this line has"
            ));
            continue;
        }
        match nearest_line(&path, line, lines, |text| collapse_whitespace(text).contains(&quote)) {
            Some(at) => evidence["line"] = at.into(),
            None => mistakes.push(format!(
                "evidence[{index}]: line {line} of {path} does not have the quote; it is `{}`",
                excerpt(&cited)
            )),
        }
    }
    mistakes
}

/// The line closest to the cited one, within [`MAX_LINE_OFFSET`], that satisfies a predicate.
fn nearest_line(
    path: &str,
    line: u32,
    lines: LineReader<'_>,
    holds: impl Fn(&str) -> bool,
) -> Option<u32> {
    let first = line.saturating_sub(MAX_LINE_OFFSET).max(1);
    let around = lines(path, first, line.saturating_add(MAX_LINE_OFFSET))?;
    let found = (first..).zip(&around).filter(|(_, text)| holds(text)).map(|(at, _)| at);
    found.min_by_key(|at| at.abs_diff(line))
}

/// The last segment of a qualified name: `handle` of `ReportCommand.handle`, `main` of
/// `crate::cli::main()`.
fn last_segment(symbol: &str) -> &str {
    let bare = symbol.trim().trim_end_matches("()");
    bare.rsplit(['.', ':', '/', '#']).next().unwrap_or(bare).trim()
}

/// The part of a line that is shown to the model.
fn excerpt(line: &str) -> String {
    line.trim().chars().take(120).collect()
}

fn missing_line(path: &str, line: u32, lines: LineReader<'_>) -> String {
    if lines(path, 1, 1).is_some() {
        format!("{path} has no line {line}")
    } else {
        format!("there is no text file {path} in the repository")
    }
}

/// Collapses white space, which does not matter in a quotation.
fn collapse_whitespace(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether two candidates are the same tool: with the same command at the same place, or with the
/// same name in the same file. Subcommands of a program are different tools, and so are tools of
/// one name in different packages.
fn is_same_tool(one: &Value, other: &Value) -> bool {
    let start = |content: &Value| {
        let entry = &content["entry_point"];
        (entry["line"].as_u64(), collapse_whitespace(entry["command"].as_str().unwrap_or_default()))
    };
    one["entry_point"]["path"] == other["entry_point"]["path"]
        && (one["name"] == other["name"] || start(one) == start(other))
}

/// Makes names unique: of candidates with the same name, the best one keeps it.
fn make_names_unique(candidates: &mut [Candidate]) {
    let mut taken: BTreeSet<String> =
        candidates.iter().map(|candidate| candidate.name.clone()).collect();
    let mut seen = BTreeSet::new();
    for candidate in candidates {
        if seen.insert(candidate.name.clone()) {
            continue;
        }
        let numbered = (2_u32..).map(|number| {
            let number = format!("-{number}");
            // Names are ASCII.
            format!(
                "{}{number}",
                &candidate.name[..candidate.name.len().min(MAX_NAME_CHARS - number.len())]
            )
        });
        if let Some(free) = numbered.into_iter().find(|name| !taken.contains(name)) {
            candidate.content["name"] = free.clone().into();
            candidate.name.clone_from(&free);
            taken.insert(free);
        }
    }
}

/// Adds a candidate, and merges it with all equal ones: the better one stays, with the reasons and
/// the evidence of both.
fn add_candidate(checked: &mut CheckReport, content: Value) {
    let name = content["name"].as_str().unwrap_or_default().to_owned();
    let score = content["score"].as_i64().and_then(|score| i32::try_from(score).ok()).unwrap_or(0);
    let mut new = Candidate { name, score, content };
    // A merged candidate may equal a third one, by the name of the one or the entry point of the
    // other.
    while let Some(at) =
        checked.candidates.iter().position(|existing| is_same_tool(&existing.content, &new.content))
    {
        checked.merged += 1;
        let existing = checked.candidates.swap_remove(at);
        let (mut better, other) =
            if new.score > existing.score { (new, existing) } else { (existing, new) };
        for (list, most) in [("evidence", 30), ("score_reasons", 10)] {
            let more = other.content[list].as_array().cloned().unwrap_or_default();
            if let Some(all) = better.content[list].as_array_mut() {
                for item in more {
                    if all.len() < most && !all.contains(&item) {
                        all.push(item);
                    }
                }
            }
        }
        new = better;
    }
    checked.candidates.push(new);
}

#[cfg(test)]
mod tests;
