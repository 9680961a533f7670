//! Policies: which calls of scripts are allowed, need an approval, or are denied.
//!
//! A policy is a list of rules. The first rule that matches a call decides; a call that matches
//! none is allowed. An agent and a task have one policy each, and the stricter verdict wins
//! ([`Action`] is ordered accordingly).
//!
//! Rules judge what a call says about itself. They are no confinement: a command can do what a rule
//! about another tool denies, in many ways. The sandbox applies regardless of policies.

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

/// Maximum number of patterns of one kind in a rule.
pub const MAX_PATTERNS: usize = 100;
/// Maximum length of a pattern in bytes.
pub const MAX_PATTERN_BYTES: usize = 1024;

/// What happens to a call, in order of strictness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// The call is made.
    Allow,
    /// The call waits until a person approves it.
    Ask,
    /// The call is denied.
    Deny,
}

/// A rule. It matches a call when every given condition matches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// What happens to the calls that it matches.
    pub action: Action,
    /// Globs on the tool's name. Empty: every tool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<String>,
    /// Globs on the path that a call concerns, relative to the workspace. `*` stays within one
    /// directory, `**` does not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// Patterns on a complete command line: `*` matches any text, `?` one character, and everything
    /// else itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<String>,
    /// Patterns on the host of a request, as for commands. Case-insensitive.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// Methods of a request. Case-insensitive.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// Patterns on the name of the agent that gets work, as for commands.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub agents: Vec<String>,
    /// The reason, for people and for the model.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// What a call concerns, as far as rules have conditions on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// Nothing that a rule could name.
    None,
    /// A file or directory, relative to the workspace, under every name it is known by. Each name
    /// is judged, and the strictest verdict holds.
    Path(Vec<String>),
    /// A directory with everything below it, under every name it is known by. A rule that restricts
    /// anything that could be below it restricts the whole.
    Tree(Vec<String>),
    /// A command line, in every form that a rule may have in mind. Each form is judged, and the
    /// strictest verdict holds.
    Command(Vec<String>),
    /// An HTTP request.
    Request {
        /// The method: `GET`, …
        method: String,
        /// The host, without port.
        host: String,
    },
    /// The name of an agent that gets work.
    Agent(String),
}

/// A policy's decision about a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// What happens to the call.
    pub action: Action,
    /// The rule's reason; may be empty.
    pub reason: String,
}

/// A compiled list of rules. A rule is compiled when it is first needed.
#[derive(Debug, Default)]
pub struct Policy {
    rules: Vec<(Rule, OnceLock<Option<CompiledRule>>)>,
}

impl Policy {
    /// Creates a policy from a list of rules.
    pub fn new(rules: Vec<Rule>) -> Self {
        Self { rules: rules.into_iter().map(|rule| (rule, OnceLock::new())).collect() }
    }

    /// Whether the policy has no rules.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Evaluates a call of the tool with these names.
    pub fn evaluate(&self, tools: &[&str], subject: &Subject) -> Verdict {
        let mut verdict = Verdict { action: Action::Allow, reason: String::new() };
        for form in subject.forms() {
            verdict = stricter_verdict(verdict, self.evaluate_form(tools, form));
        }
        verdict
    }

    /// The first rule that matches the whole form decides. Earlier rules that match a part of it
    /// can make the verdict stricter.
    fn evaluate_form(&self, tools: &[&str], form: SubjectForm<'_>) -> Verdict {
        let mut verdict = Verdict { action: Action::Allow, reason: String::new() };
        for (rule, compiled) in &self.rules {
            let matched = match compiled.get_or_init(|| CompiledRule::new(rule).ok()) {
                Some(compiled) => compiled.matches(rule, tools, form),
                // Such a rule cannot be stored. If there were one, it would deny or ask for every
                // call.
                None if rule.action == Action::Allow => Match::None,
                None => Match::Whole,
            };
            // An allow rule for a part says nothing about the rest.
            let says =
                matched == Match::Whole || (matched == Match::Part && rule.action != Action::Allow);
            if says {
                verdict = stricter_verdict(
                    verdict,
                    Verdict { action: rule.action, reason: rule.reason.clone() },
                );
            }
            if matched == Match::Whole {
                break;
            }
        }
        verdict
    }
}

/// One form of a subject.
#[derive(Debug, Clone, Copy)]
enum SubjectForm<'a> {
    None,
    Path(&'a str),
    Tree(&'a str),
    Command(&'a str),
    Request { method: &'a str, host: &'a str },
    Agent(&'a str),
}

impl Subject {
    fn forms(&self) -> Vec<SubjectForm<'_>> {
        match self {
            Self::None => vec![SubjectForm::None],
            // Without names, no condition on paths or commands holds.
            Self::Path(names) | Self::Tree(names) | Self::Command(names) if names.is_empty() => {
                vec![SubjectForm::None]
            }
            Self::Path(names) => names.iter().map(|name| SubjectForm::Path(name)).collect(),
            Self::Tree(names) => names.iter().map(|name| SubjectForm::Tree(name)).collect(),
            Self::Command(lines) => lines.iter().map(|line| SubjectForm::Command(line)).collect(),
            Self::Request { method, host } => vec![SubjectForm::Request { method, host }],
            Self::Agent(name) => vec![SubjectForm::Agent(name)],
        }
    }
}

/// How much of a form a rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    None,
    /// Something below a directory.
    Part,
    Whole,
}

/// Returns the stricter of two verdicts; the first one when they are equal.
pub fn stricter_verdict(one: Verdict, other: Verdict) -> Verdict {
    if other.action > one.action { other } else { one }
}

/// Lists the invalid patterns of a rule: for each the field with its index, e.g. `paths[2]`, and
/// the reason.
pub fn invalid_patterns(rule: &Rule) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let globs = [
        ("tools", &rule.tools, compile_name as fn(&str) -> Result<GlobMatcher, globset::Error>),
        ("paths", &rule.paths, compile_path),
    ];
    for (field, patterns, compile) in globs {
        for (index, pattern) in patterns.iter().enumerate().take(MAX_PATTERNS) {
            if let Err(error) = compile(pattern) {
                found.push((
                    format!("{field}[{index}]"),
                    format!("is not a valid pattern: {}", error.kind()),
                ));
            }
        }
    }
    for (index, pattern) in rule.hosts.iter().enumerate().take(MAX_PATTERNS) {
        if let Some(why) = invalid_host(pattern) {
            found.push((format!("hosts[{index}]"), why.to_owned()));
        }
    }
    found
}

/// Returns why no host would ever match a pattern.
fn invalid_host(pattern: &str) -> Option<&'static str> {
    let name = normalize_host(pattern);
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

/// Normalizes a host, or a pattern of hosts, for comparison.
fn normalize_host(name: &str) -> String {
    name.trim_end_matches('.').trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase()
}

#[derive(Debug)]
struct CompiledRule {
    tools: Vec<GlobMatcher>,
    paths: Vec<GlobMatcher>,
    /// The directories of patterns that match whole directories.
    directories: Vec<GlobMatcher>,
    commands: Vec<WildMatch>,
    hosts: Vec<WildMatch>,
    agents: Vec<WildMatch>,
}

impl CompiledRule {
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
            hosts: rule
                .hosts
                .iter()
                .map(|pattern| WildMatch::new(&normalize_host(pattern)))
                .collect(),
            agents: rule.agents.iter().map(|pattern| WildMatch::new(pattern)).collect(),
        })
    }

    fn matches(&self, rule: &Rule, tools: &[&str], form: SubjectForm<'_>) -> Match {
        let is_tool =
            self.tools.is_empty() || tools.iter().any(|tool| matches_any(&self.tools, tool));
        let is_command = self.commands.is_empty()
            || match form {
                SubjectForm::Command(line) if rule.action == Action::Allow && is_compound(line) => {
                    false
                }
                SubjectForm::Command(line) => {
                    self.commands.iter().any(|pattern| pattern.matches(line.trim()))
                }
                _ => false,
            };
        let (method, name) = match form {
            SubjectForm::Request { method, host: name } => {
                (Some(method), Some(normalize_host(name)))
            }
            _ => (None, None),
        };
        let is_method =
            |method: &str| rule.methods.iter().any(|allowed| allowed.eq_ignore_ascii_case(method));
        let is_host = |name: &str| self.hosts.iter().any(|pattern| pattern.matches(name));
        let is_agent = self.agents.is_empty()
            || matches!(form, SubjectForm::Agent(name) if self.agents.iter().any(|pattern| pattern.matches(name)));
        let others = is_tool
            && is_command
            && is_agent
            && (self.hosts.is_empty() || name.as_deref().is_some_and(is_host))
            && (rule.methods.is_empty() || method.is_some_and(is_method));
        if !others { Match::None } else { self.matches_path(rule, form) }
    }

    fn matches_path(&self, rule: &Rule, form: SubjectForm<'_>) -> Match {
        if self.paths.is_empty() {
            return Match::Whole;
        }
        match form {
            SubjectForm::Path(name) if self.is_path(name) => Match::Whole,
            SubjectForm::Tree(name) if self.is_whole_tree(rule, name) => Match::Whole,
            SubjectForm::Tree(name) if self.is_path(name) || may_reach_into(rule, name) => {
                Match::Part
            }
            _ => Match::None,
        }
    }

    /// Whether a pattern matches everything below a directory, at any depth and under any name.
    fn is_whole_tree(&self, rule: &Rule, directory: &str) -> bool {
        let below = |directory: &Path| self.directories.iter().any(|glob| glob.is_match(directory));
        rule.paths.iter().any(|pattern| matches!(workspace_relative(pattern), "**" | "**/*"))
            // The workspace itself has no name that a pattern could mean.
            || (directory != "." && Path::new(directory).ancestors().any(below))
    }

    /// `secrets/**` also matches `secrets` itself, which a tool may list or search as a whole.
    fn is_path(&self, path: &str) -> bool {
        matches_any(&self.paths, path) || matches_any(&self.paths, &format!("{path}/"))
    }
}

/// Whether a pattern could match something below a directory, judged by the directories before its
/// first wildcard.
fn may_reach_into(rule: &Rule, directory: &str) -> bool {
    let directory = Path::new(if directory == "." { "" } else { directory });
    rule.paths.iter().any(|pattern| {
        let pattern = workspace_relative(pattern);
        let literal: PathBuf = pattern
            .split('/')
            .take_while(|part| !part.contains(['*', '?', '[', '{', '\\']))
            .collect();
        literal.starts_with(directory)
            || (literal != Path::new(pattern) && directory.starts_with(&literal))
    })
}

fn matches_any(patterns: &[GlobMatcher], text: &str) -> bool {
    patterns.iter().any(|pattern| pattern.is_match(text))
}

/// Whether a shell may take a command line for more than one command with its arguments. An allow
/// pattern never matches such a line: `git *` must not allow `git status; rm -r .`. This is
/// stricter than a shell: a quoted `|` that needs an approval is better than a missed one.
pub(crate) fn is_compound(line: &str) -> bool {
    line.trim().contains([';', '&', '|', '`', '<', '>', '\n', '\r'])
        || ["$(", "${", "$["].iter().any(|expansion| line.contains(expansion))
}

fn compile_name(pattern: &str) -> Result<GlobMatcher, globset::Error> {
    Ok(Glob::new(pattern)?.compile_matcher())
}

fn compile_path(pattern: &str) -> Result<GlobMatcher, globset::Error> {
    let glob = GlobBuilder::new(workspace_relative(pattern))
        .literal_separator(true)
        .backslash_escape(true)
        .build()?;
    Ok(glob.compile_matcher())
}

/// Returns a pattern relative to the workspace, however a rule writes it.
fn workspace_relative(pattern: &str) -> &str {
    pattern.trim_start_matches("./").trim_start_matches('/')
}
