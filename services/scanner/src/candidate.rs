//! What a model proposes, checked: its form against a schema, every place it cites against the
//! files, one name and one entry point each. What does not hold is refused, with words that the
//! model can mend it by.

use std::{
    cell::RefCell,
    collections::{BTreeSet, VecDeque},
    fmt,
    sync::LazyLock,
};

use construct_wire::scan::CANDIDATE_SCHEMA;
use jsonschema::Validator;
use serde_json::Value;

use crate::repository::{Clean, lines_of};

/// Longer answers are not read.
const MAX_ANSWER: usize = 1024 * 1024;
/// More proposals are not read.
const MAX_CANDIDATES: usize = 100;
/// What is told of the mistakes in one candidate.
const PER_CANDIDATE: usize = 8;
/// Characters of what the model is told of its mistakes.
const MAX_REPAIR: usize = 20_000;
/// A quote that stands so many lines away is taken for a slip, and its line put right.
const SLIP: u32 = 3;
/// A quote has at least so many characters besides white space. Shorter ones stand in every line.
const SHORTEST_QUOTE: usize = 4;
/// Files whose lines are kept while an answer is checked, so that what cites one file often reads
/// it once.
const FILES_AT_HAND: usize = 8;
/// Objects that are tried before an answer is taken for one without any.
const TRIES: usize = 100;
/// Characters of a name, as the schema has it.
const MAX_NAME: usize = 63;

static VALIDATOR: LazyLock<Validator> = LazyLock::new(|| {
    let schema: Value =
        serde_json::from_str(CANDIDATE_SCHEMA).expect("the schema is part of this program");
    jsonschema::validator_for(&schema).expect("the schema is part of this program")
});

/// A candidate that holds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) name: String,
    pub(crate) score: i32,
    pub(crate) content: Value,
}

/// Why the answer, or one candidate of it, is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Which candidate, from 0, and what it calls itself; none: the answer as a whole.
    candidate: Option<(usize, String)>,
    what: String,
}

impl Problem {
    /// Whether it is about the answer as a whole.
    pub(crate) const fn is_whole(&self) -> bool {
        self.candidate.is_none()
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.candidate {
            None => f.write_str(&self.what),
            Some((index, name)) if name.is_empty() => {
                write!(f, "candidates[{index}]: {}", self.what)
            }
            Some((index, name)) => write!(f, "candidates[{index}] ({name}): {}", self.what),
        }
    }
}

/// What became of an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Checked {
    /// What holds, best first.
    pub(crate) candidates: Vec<Candidate>,
    /// What does not.
    pub(crate) problems: Vec<Problem>,
    /// How many were the same as another one.
    pub(crate) merged: usize,
}

/// How many candidates are refused for these reasons.
pub(crate) fn refused(problems: &[Problem]) -> usize {
    problems
        .iter()
        .filter_map(|problem| problem.candidate.as_ref().map(|(index, _)| index))
        .collect::<BTreeSet<_>>()
        .len()
}

/// What the model is told of its mistakes.
pub(crate) fn repair(problems: &[Problem]) -> String {
    let mut text = String::from(
        "Your answer cannot be taken as it is. Look at the files again where you have to, then answer once more with the whole JSON \
         object, with what was right and what you have put right; leave out what you cannot put right. These are the mistakes:\n",
    );
    for problem in problems {
        let line = format!("\n- {problem}");
        if text.len() + line.len() > MAX_REPAIR {
            text.push_str("\n- and more of the kind");
            break;
        }
        text.push_str(&line);
    }
    text
}

/// Checks an answer against the files of a commit. Reads files.
pub(crate) fn check(answer: &str, snapshot: &Clean, commit: &str) -> Checked {
    let at_hand = RefCell::new(VecDeque::<(String, Option<String>)>::new());
    check_with(answer, commit, &|path, first, last| {
        let mut at_hand = at_hand.borrow_mut();
        if !at_hand.iter().any(|(known, _)| known == path) {
            at_hand.truncate(FILES_AT_HAND - 1);
            at_hand.push_front((path.to_owned(), snapshot.text(path)));
        }
        let text =
            at_hand.iter().find(|(known, _)| known == path).and_then(|(_, text)| text.as_ref())?;
        lines_of(text, first, last)
    })
}

/// The lines of a file from one to another, both from 1; none when there is no such file, or it has
/// no such first line.
type Lines<'a> = &'a dyn Fn(&str, u32, u32) -> Option<Vec<String>>;

fn check_with(answer: &str, commit: &str, lines: Lines<'_>) -> Checked {
    let proposed = match read(answer) {
        Ok(proposed) => proposed,
        Err(what) => {
            return Checked {
                problems: vec![Problem { candidate: None, what }],
                ..Checked::default()
            };
        }
    };
    let mut checked = Checked::default();
    for (index, mut content) in proposed.into_iter().enumerate() {
        normalize(&mut content, commit);
        let name =
            content["name"].as_str().unwrap_or_default().chars().take(80).collect::<String>();
        let mut wrong: Vec<String> = VALIDATOR
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
        if wrong.is_empty() {
            wrong = places(&mut content, lines);
        }
        if wrong.is_empty() {
            take(&mut checked, content);
        } else {
            let more = wrong.len().saturating_sub(PER_CANDIDATE);
            wrong.truncate(PER_CANDIDATE);
            if more > 0 {
                wrong.push(format!("and {more} more mistakes"));
            }
            let problem = |what| Problem { candidate: Some((index, name.clone())), what };
            checked.problems.extend(wrong.into_iter().map(problem));
        }
    }
    checked
        .candidates
        .sort_by(|one, other| other.score.cmp(&one.score).then_with(|| one.name.cmp(&other.name)));
    number(&mut checked.candidates);
    checked
}

/// The proposals in an answer: models like to put words and fences around what they were asked for.
fn read(answer: &str) -> Result<Vec<Value>, String> {
    if answer.len() > MAX_ANSWER {
        return Err(format!("the answer is longer than {MAX_ANSWER} bytes"));
    }
    let (mut at, mut wrong, mut others) = (0, None::<serde_json::Error>, false);
    let mut found = None::<Vec<Value>>;
    for _ in 0..TRIES {
        let Some(start) = answer[at..].find('{').map(|found| at + found) else { break };
        let mut objects = serde_json::Deserializer::from_str(&answer[start..]).into_iter::<Value>();
        match objects.next() {
            Some(Ok(mut object)) => {
                match object.get_mut("candidates").map(Value::take) {
                    // Models show the form before they fill it: the last list counts, and one
                    // without anything for nothing.
                    Some(Value::Array(proposed)) if found.is_none() || !proposed.is_empty() => {
                        found = Some(proposed)
                    }
                    Some(Value::Array(_)) => {}
                    _ => others = true,
                }
                at = start + objects.byte_offset();
            }
            Some(Err(error)) => {
                // Of the text that came furthest as JSON, which is what the model meant.
                let far = |error: &serde_json::Error| (error.line(), error.column());
                if wrong.as_ref().is_none_or(|furthest| far(&error) > far(furthest)) {
                    wrong = Some(error);
                }
                at = start + 1;
            }
            None => break,
        }
    }
    if let Some(proposed) = found {
        let many = proposed.len() > MAX_CANDIDATES;
        let told = || {
            format!("there are {} candidates; at most {MAX_CANDIDATES} are read", proposed.len())
        };
        return if many { Err(told()) } else { Ok(proposed) };
    }
    Err(match wrong {
        Some(error) => format!("the answer is no valid JSON: {error}"),
        None if others => "the answer has no list `candidates`".to_owned(),
        None => "the answer has no JSON object".to_owned(),
    })
}

/// One spelling of names and paths.
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

/// What is wrong with the places a candidate cites. A line that was miscounted is put right.
fn places(content: &mut Value, lines: Lines<'_>) -> Vec<String> {
    let mut wrong = Vec::new();
    let line_of = |value: &Value| {
        value["line"].as_u64().and_then(|line| u32::try_from(line).ok()).unwrap_or(u32::MAX)
    };
    let entry = &mut content["entry_point"];
    let (path, line) = (entry["path"].as_str().unwrap_or_default().to_owned(), line_of(entry));
    if let Some(stands) = lines(&path, line, line).and_then(|mut cited| cited.pop()) {
        let symbol = entry["symbol"].as_str().map(own_name).unwrap_or_default().to_owned();
        if symbol.is_empty() {
            if stands.trim().is_empty() {
                wrong.push(format!("entry_point: line {line} of {path} is blank"));
            }
        } else {
            match near(&path, line, lines, |text| text.contains(&symbol)) {
                Some(at) => entry["line"] = at.into(),
                None => wrong.push(format!(
                    "entry_point: neither line {line} of {path} nor those beside it have the symbol `{symbol}`; the line is `{}`",
                    shown(&stands)
                )),
            }
        }
    } else {
        wrong.push(format!("entry_point: {}", missing(&path, line, lines)));
    }
    for (index, evidence) in content["evidence"].as_array_mut().into_iter().flatten().enumerate() {
        let (path, line) =
            (evidence["path"].as_str().unwrap_or_default().to_owned(), line_of(evidence));
        let Some(cited) = lines(&path, line, line).and_then(|mut cited| cited.pop()) else {
            wrong.push(format!("evidence[{index}]: {}", missing(&path, line, lines)));
            continue;
        };
        let quote = squeeze(evidence["quote"].as_str().unwrap_or_default());
        // A line that is as short as that may be quoted whole.
        if quote.is_empty()
            || (quote.chars().filter(|c| *c != ' ').count() < SHORTEST_QUOTE
                && quote != squeeze(&cited))
        {
            wrong.push(format!(
                "evidence[{index}]: the quote proves nothing: quote the line, or a part that only it has"
            ));
            continue;
        }
        match near(&path, line, lines, |text| squeeze(text).contains(&quote)) {
            Some(at) => evidence["line"] = at.into(),
            None => wrong.push(format!(
                "evidence[{index}]: line {line} of {path} does not have the quote; it is `{}`",
                shown(&cited)
            )),
        }
    }
    wrong
}

/// The line nearest to one that was cited, and at most a slip away, of which something holds.
fn near(path: &str, line: u32, lines: Lines<'_>, holds: impl Fn(&str) -> bool) -> Option<u32> {
    let first = line.saturating_sub(SLIP).max(1);
    let around = lines(path, first, line.saturating_add(SLIP))?;
    let found = (first..).zip(&around).filter(|(_, text)| holds(text)).map(|(at, _)| at);
    found.min_by_key(|at| at.abs_diff(line))
}

/// The last name of a qualified one: `handle` of `ReportCommand.handle`, `main` of
/// `crate::cli::main()`.
fn own_name(symbol: &str) -> &str {
    let bare = symbol.trim().trim_end_matches("()");
    bare.rsplit(['.', ':', '/', '#']).next().unwrap_or(bare).trim()
}

/// A line as the model is told of it.
fn shown(line: &str) -> String {
    line.trim().chars().take(120).collect()
}

fn missing(path: &str, line: u32, lines: Lines<'_>) -> String {
    if lines(path, 1, 1).is_some() {
        format!("{path} has no line {line}")
    } else {
        format!("there is no text file {path} in the repository")
    }
}

/// Without what doesn't count in a quotation: how much white space there is.
fn squeeze(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether two are the same tool: started alike at the same place, or of one name in one file.
/// Subcommands of a program are tools of their own, and so is what another package calls by the
/// same name.
fn same(one: &Value, other: &Value) -> bool {
    let started = |content: &Value| {
        let entry = &content["entry_point"];
        (entry["line"].as_u64(), squeeze(entry["command"].as_str().unwrap_or_default()))
    };
    one["entry_point"]["path"] == other["entry_point"]["path"]
        && (one["name"] == other["name"] || started(one) == started(other))
}

/// Gives each its own name: of those that are called the same the best keeps it.
fn number(candidates: &mut [Candidate]) {
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
                &candidate.name[..candidate.name.len().min(MAX_NAME - number.len())]
            )
        });
        if let Some(free) = numbered.into_iter().find(|name| !taken.contains(name)) {
            candidate.content["name"] = free.clone().into();
            candidate.name.clone_from(&free);
            taken.insert(free);
        }
    }
}

/// Takes a candidate, and makes one of it and of all that are the same: the better one stays, with
/// the reasons and the proof of both.
fn take(checked: &mut Checked, content: Value) {
    let name = content["name"].as_str().unwrap_or_default().to_owned();
    let score = content["score"].as_i64().and_then(|score| i32::try_from(score).ok()).unwrap_or(0);
    let mut new = Candidate { name, score, content };
    // What two have become may be the same as a third one, by the name of the one or the entry
    // point of the other.
    while let Some(at) =
        checked.candidates.iter().position(|known| same(&known.content, &new.content))
    {
        checked.merged += 1;
        let known = checked.candidates.swap_remove(at);
        let (mut better, other) = if new.score > known.score { (new, known) } else { (known, new) };
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
