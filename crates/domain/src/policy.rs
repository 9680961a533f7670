//! Policies: which calls of scripts are made, which need a person's approval, and which are
//! refused.
//!
//! A policy is a list of rules, of which the first that matches a call decides; a call that none
//! matches is allowed. An agent and a task have one each, and the stricter answer wins ([`Action`]
//! is ordered so).
//!
//! Rules are about what a call says of itself. They are no confinement: a command can do in many
//! ways what a rule about another tool forbids, and the sandbox holds whatever a policy says.

use std::{
    net::Ipv6Addr,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use globset::{Glob, GlobBuilder, GlobMatcher};
use serde::{Deserialize, Serialize};
use wildmatch::WildMatch;

#[cfg(test)]
mod tests;

/// Rules of one list.
pub const RULES: usize = 100;
/// Patterns of one kind in one rule.
pub const PATTERNS: usize = 100;
/// Bytes of one pattern.
pub const PATTERN_BYTES: usize = 1024;
/// Characters of a rule's reason.
pub const REASON_CHARS: usize = 1024;

/// What becomes of a call; each is stricter than the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// It is made.
    Allow,
    /// It waits until a person approves it.
    Ask,
    /// It is refused.
    Deny,
}

/// One rule. It matches a call when everything that is given matches it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// What becomes of the calls it matches.
    pub action: Action,
    /// Globs on the tool's name; empty: every tool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<String>,
    /// Globs on the path a call is about, relative to the workspace; `*` stays within one
    /// directory, `**` does not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// Patterns on a whole command line: `*` stands for any text, `?` for one character, everything
    /// else for itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<String>,
    /// Patterns on the host of a request, as for commands; upper and lower case are the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// Methods of a request; upper and lower case are the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// Patterns on the name of the agent that is to work on something, as for commands.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub agents: Vec<String>,
    /// Why, for people and for the model.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// What a call is about, as far as rules have conditions on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// Nothing that a rule could name.
    None,
    /// A file or directory, relative to the workspace, by every name it is known to have. Each is
    /// judged, and the strictest answer holds.
    Path(Vec<String>),
    /// A directory with everything below it, by every name it is known to have. A rule that holds
    /// back anything which might lie there holds back the whole.
    Tree(Vec<String>),
    /// A command line, in every form in which a rule may know it. Each is judged, and the strictest
    /// answer holds.
    Command(Vec<String>),
    /// A request.
    Request {
        /// `GET`, …
        method: String,
        /// Without port.
        host: String,
    },
    /// An agent that is to work on something, by its name.
    Agent(String),
}

/// What a policy says about a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// What becomes of it.
    pub action: Action,
    /// What the rule gives as its reason; may be empty.
    pub reason: String,
}

/// A list of rules, ready to be asked. A rule is compiled when it is first needed.
#[derive(Debug, Default)]
pub struct Policy {
    rules: Vec<(Rule, OnceLock<Option<Compiled>>)>,
}

impl Policy {
    /// Takes a list of rules.
    pub fn new(rules: Vec<Rule>) -> Self {
        Self { rules: rules.into_iter().map(|rule| (rule, OnceLock::new())).collect() }
    }

    /// Whether there is any rule.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// What the list says about a call of a tool that has these names.
    pub fn judge(&self, tools: &[&str], subject: &Subject) -> Verdict {
        let mut verdict = Verdict { action: Action::Allow, reason: String::new() };
        for form in subject.forms() {
            verdict = stricter(verdict, self.judge_form(tools, form));
        }
        verdict
    }

    /// The first rule that is about a whole form decides; those before it that are about a part of
    /// it may be stricter.
    fn judge_form(&self, tools: &[&str], form: Form<'_>) -> Verdict {
        let mut verdict = Verdict { action: Action::Allow, reason: String::new() };
        for (rule, compiled) in &self.rules {
            let matched = match compiled.get_or_init(|| Compiled::new(rule).ok()) {
                Some(compiled) => compiled.matches(rule, tools, form),
                // Nobody can store such a rule. Were there one, what it was to keep from happening
                // does not happen.
                None if rule.action == Action::Allow => Match::None,
                None => Match::Whole,
            };
            // What is allowed for a part only says nothing about the rest.
            let says =
                matched == Match::Whole || (matched == Match::Part && rule.action != Action::Allow);
            if says {
                verdict =
                    stricter(verdict, Verdict { action: rule.action, reason: rule.reason.clone() });
            }
            if matched == Match::Whole {
                break;
            }
        }
        verdict
    }
}

/// One of the forms of a subject.
#[derive(Debug, Clone, Copy)]
enum Form<'a> {
    None,
    Path(&'a str),
    Tree(&'a str),
    Command(&'a str),
    Request { method: &'a str, host: &'a str },
    Agent(&'a str),
}

impl Subject {
    fn forms(&self) -> Vec<Form<'_>> {
        match self {
            Self::None => vec![Form::None],
            // Of nothing, no condition on paths or commands can be said to hold.
            Self::Path(names) | Self::Tree(names) | Self::Command(names) if names.is_empty() => {
                vec![Form::None]
            }
            Self::Path(names) => names.iter().map(|name| Form::Path(name)).collect(),
            Self::Tree(names) => names.iter().map(|name| Form::Tree(name)).collect(),
            Self::Command(lines) => lines.iter().map(|line| Form::Command(line)).collect(),
            Self::Request { method, host } => vec![Form::Request { method, host }],
            Self::Agent(name) => vec![Form::Agent(name)],
        }
    }
}

/// How much of a form a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    None,
    /// Something below a directory.
    Part,
    Whole,
}

/// The stricter of two verdicts; the first one when they are equally strict.
pub fn stricter(one: Verdict, other: Verdict) -> Verdict {
    if other.action > one.action { other } else { one }
}

/// What is wrong with the patterns of a rule: for each the field with its index, e.g. `paths[2]`,
/// and why.
pub fn invalid_patterns(rule: &Rule) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let globs = [
        ("tools", &rule.tools, compile_name as fn(&str) -> Result<GlobMatcher, globset::Error>),
        ("paths", &rule.paths, compile_path),
    ];
    for (field, patterns, compile) in globs {
        for (index, pattern) in patterns.iter().enumerate().take(PATTERNS) {
            if let Err(error) = compile(pattern) {
                found.push((
                    format!("{field}[{index}]"),
                    format!("is not a valid pattern: {}", error.kind()),
                ));
            }
        }
    }
    for (index, pattern) in rule.hosts.iter().enumerate().take(PATTERNS) {
        if let Some(why) = invalid_host(pattern) {
            found.push((format!("hosts[{index}]"), why.to_owned()));
        }
    }
    found
}

/// Why no request's host would ever match a pattern.
fn invalid_host(pattern: &str) -> Option<&'static str> {
    let name = host(pattern);
    if !name.is_ascii() {
        Some(
            "has characters that no host has in a request; write it as there, e.g. xn--mnchen-3ya.de",
        )
    } else if name.contains(':') && !name.contains(['*', '?']) && name.parse::<Ipv6Addr>().is_err()
    {
        Some("is more than a host: leave the port and the scheme out")
    } else if name.contains(['/', '@', ' ']) {
        Some("is more than a host")
    } else {
        None
    }
}

/// A host, or a pattern of one, in the form in which they are compared.
fn host(name: &str) -> String {
    name.trim_end_matches('.').trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase()
}

#[derive(Debug)]
struct Compiled {
    tools: Vec<GlobMatcher>,
    paths: Vec<GlobMatcher>,
    /// Of the patterns that stand for whole directories, the directories.
    directories: Vec<GlobMatcher>,
    commands: Vec<WildMatch>,
    hosts: Vec<WildMatch>,
    agents: Vec<WildMatch>,
}

impl Compiled {
    fn new(rule: &Rule) -> Result<Self, globset::Error> {
        let whole = |glob: &String| {
            glob.strip_suffix("/*").unwrap_or(glob).strip_suffix("/**").map(str::to_owned)
        };
        Ok(Self {
            tools: rule.tools.iter().map(|glob| compile_name(glob)).collect::<Result<_, _>>()?,
            paths: rule.paths.iter().map(|glob| compile_path(glob)).collect::<Result<_, _>>()?,
            directories: rule
                .paths
                .iter()
                .filter_map(whole)
                .map(|glob| compile_path(&glob))
                .collect::<Result<_, _>>()?,
            commands: rule.commands.iter().map(|pattern| WildMatch::new(pattern.trim())).collect(),
            hosts: rule.hosts.iter().map(|pattern| WildMatch::new(&host(pattern))).collect(),
            agents: rule.agents.iter().map(|pattern| WildMatch::new(pattern)).collect(),
        })
    }

    fn matches(&self, rule: &Rule, tools: &[&str], form: Form<'_>) -> Match {
        let is_tool = self.tools.is_empty() || tools.iter().any(|tool| any(&self.tools, tool));
        let is_command = self.commands.is_empty()
            || match form {
                Form::Command(line) if rule.action == Action::Allow && is_compound(line) => false,
                Form::Command(line) => {
                    self.commands.iter().any(|pattern| pattern.matches(line.trim()))
                }
                _ => false,
            };
        let (method, name) = match form {
            Form::Request { method, host: name } => (Some(method), Some(host(name))),
            _ => (None, None),
        };
        let is_method =
            |method: &str| rule.methods.iter().any(|known| known.eq_ignore_ascii_case(method));
        let is_host = |name: &str| self.hosts.iter().any(|pattern| pattern.matches(name));
        let is_agent = self.agents.is_empty()
            || matches!(form, Form::Agent(name) if self.agents.iter().any(|pattern| pattern.matches(name)));
        let others = is_tool
            && is_command
            && is_agent
            && (self.hosts.is_empty() || name.as_deref().is_some_and(is_host))
            && (rule.methods.is_empty() || method.is_some_and(is_method));
        if !others { Match::None } else { self.matches_path(rule, form) }
    }

    fn matches_path(&self, rule: &Rule, form: Form<'_>) -> Match {
        if self.paths.is_empty() {
            return Match::Whole;
        }
        match form {
            Form::Path(name) if self.is_path(name) => Match::Whole,
            Form::Tree(name) if self.is_whole_tree(rule, name) => Match::Whole,
            Form::Tree(name) if self.is_path(name) || may_reach_into(rule, name) => Match::Part,
            _ => Match::None,
        }
    }

    /// Whether a pattern holds for everything below a directory, however deep and whatever it is
    /// called.
    fn is_whole_tree(&self, rule: &Rule, directory: &str) -> bool {
        let below = |directory: &Path| self.directories.iter().any(|glob| glob.is_match(directory));
        rule.paths.iter().any(|pattern| matches!(relative(pattern), "**" | "**/*"))
            // The workspace as a whole has no name that a pattern could have meant.
            || (directory != "." && Path::new(directory).ancestors().any(below))
    }

    /// `secrets/**` is also meant to hold for `secrets` itself, which a tool may list or search as
    /// a whole.
    fn is_path(&self, path: &str) -> bool {
        any(&self.paths, path) || any(&self.paths, &format!("{path}/"))
    }
}

/// Whether a pattern could match something below a directory, by the directories it names before
/// its first wildcard.
fn may_reach_into(rule: &Rule, directory: &str) -> bool {
    let directory = Path::new(if directory == "." { "" } else { directory });
    rule.paths.iter().any(|pattern| {
        let pattern = relative(pattern);
        let literal: PathBuf = pattern
            .split('/')
            .take_while(|part| !part.contains(['*', '?', '[', '{', '\\']))
            .collect();
        literal.starts_with(directory)
            || (literal != Path::new(pattern) && directory.starts_with(&literal))
    })
}

fn any(patterns: &[GlobMatcher], text: &str) -> bool {
    patterns.iter().any(|pattern| pattern.is_match(text))
}

/// Whether a shell may take a command line for more than one command with its arguments. Such a
/// line is never what a pattern allows: `git *` is not meant to let `git status; rm -r .` pass.
/// More is taken for it than a shell would, because a quoted `|` that needs an approval is better
/// than one that was overlooked.
pub(crate) fn is_compound(line: &str) -> bool {
    line.trim().contains([';', '&', '|', '`', '<', '>', '\n', '\r'])
        || ["$(", "${", "$["].iter().any(|expansion| line.contains(expansion))
}

fn compile_name(pattern: &str) -> Result<GlobMatcher, globset::Error> {
    Ok(Glob::new(pattern)?.compile_matcher())
}

fn compile_path(pattern: &str) -> Result<GlobMatcher, globset::Error> {
    let glob = GlobBuilder::new(relative(pattern))
        .literal_separator(true)
        .backslash_escape(true)
        .build()?;
    Ok(glob.compile_matcher())
}

/// Paths are relative to the workspace, however a rule writes that.
fn relative(pattern: &str) -> &str {
    pattern.trim_start_matches("./").trim_start_matches('/')
}
