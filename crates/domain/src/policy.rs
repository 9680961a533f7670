//! Policies: which calls of scripts are made, which need a person's approval, and which are refused.
//!
//! A policy is a list of rules, of which the first that matches a call decides; a call that none matches is allowed. An
//! agent and a task have one each, and the stricter answer wins ([`Action`] is ordered so).
//!
//! Rules are about what a call says of itself. They are no confinement: a command can do in many ways what a rule about
//! another tool forbids, and the sandbox holds whatever a policy says.

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

use globset::{Glob, GlobBuilder, GlobMatcher};
use serde::{Deserialize, Serialize};

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
    /// Globs on the path a call is about, relative to the workspace; `*` stays within one directory, `**` does not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// Patterns on a whole command line: `*` stands for any text, `?` for one character, everything else for itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<String>,
    /// Patterns on the host of a request, as for commands; upper and lower case are the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// Methods of a request; upper and lower case are the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// Why, for people and for the model.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// What a call is about, as far as rules have conditions on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// Nothing that a rule could name.
    None,
    /// A file or directory, relative to the workspace, by every name it is known to have.
    Path(Vec<String>),
    /// A directory with everything below it, by every name it is known to have. A rule that holds back anything which might lie
    /// there holds back the whole.
    Tree(Vec<String>),
    /// A command line.
    Command(String),
    /// A request.
    Request {
        /// `GET`, …
        method: String,
        /// Without port.
        host: String,
    },
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

    /// What the list says about a call of `tool`.
    pub fn judge(&self, tool: &str, subject: &Subject) -> Verdict {
        let matching = self.rules.iter().find(|(rule, compiled)| {
            match compiled.get_or_init(|| Compiled::new(rule).ok()) {
                Some(compiled) => compiled.matches(rule, tool, subject),
                // Nobody can store such a rule. Were there one, what it was to keep from happening does not happen.
                None => rule.action != Action::Allow,
            }
        });
        match matching {
            Some((rule, _)) => Verdict { action: rule.action, reason: rule.reason.clone() },
            None => Verdict { action: Action::Allow, reason: String::new() },
        }
    }
}

/// The stricter of two verdicts; the first one when they are equally strict.
pub fn stricter(one: Verdict, other: Verdict) -> Verdict {
    if other.action > one.action { other } else { one }
}

/// What is wrong with the patterns of a rule: for each the field with its index, e.g. `paths[2]`, and why.
pub fn invalid_patterns(rule: &Rule) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let globs = [
        ("tools", &rule.tools, compile_name as fn(&str) -> Result<GlobMatcher, globset::Error>),
        ("paths", &rule.paths, compile_path),
        ("commands", &rule.commands, compile_text),
        ("hosts", &rule.hosts, compile_text),
    ];
    for (field, patterns, compile) in globs {
        for (index, pattern) in patterns.iter().enumerate().take(PATTERNS) {
            if let Err(error) = compile(pattern) {
                found.push((format!("{field}[{index}]"), format!("is not a valid pattern: {}", error.kind())));
            }
        }
    }
    found
}

#[derive(Debug)]
struct Compiled {
    tools: Vec<GlobMatcher>,
    paths: Vec<GlobMatcher>,
    commands: Vec<GlobMatcher>,
    hosts: Vec<GlobMatcher>,
}

impl Compiled {
    fn new(rule: &Rule) -> Result<Self, globset::Error> {
        let lower: Vec<String> = rule.hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        Ok(Self {
            tools: rule.tools.iter().map(|glob| compile_name(glob)).collect::<Result<_, _>>()?,
            paths: rule.paths.iter().map(|glob| compile_path(glob)).collect::<Result<_, _>>()?,
            commands: rule.commands.iter().map(|glob| compile_text(glob.trim())).collect::<Result<_, _>>()?,
            hosts: lower.iter().map(|glob| compile_text(glob)).collect::<Result<_, _>>()?,
        })
    }

    fn matches(&self, rule: &Rule, tool: &str, subject: &Subject) -> bool {
        let allows = rule.action == Action::Allow;
        if !self.tools.is_empty() && !any(&self.tools, tool) {
            return false;
        }
        let path = self.paths.is_empty()
            || match subject {
                // A file with several names is allowed when all of them are, and held back when one of them is.
                Subject::Path(names) if allows => !names.is_empty() && names.iter().all(|name| self.is_path(name)),
                Subject::Path(names) => names.iter().any(|name| self.is_path(name)),
                Subject::Tree(names) if allows => {
                    !names.is_empty() && names.iter().all(|name| self.is_whole_tree(name))
                }
                Subject::Tree(names) => names.iter().any(|name| self.is_path(name) || self.may_reach_into(rule, name)),
                _ => false,
            };
        let command = self.commands.is_empty()
            || match subject {
                Subject::Command(line) if allows && is_compound(line) => false,
                Subject::Command(line) => any(&self.commands, line.trim()),
                _ => false,
            };
        let (method, host) = match subject {
            Subject::Request { method, host } => (Some(method), Some(host.trim_end_matches('.').to_ascii_lowercase())),
            _ => (None, None),
        };
        let is_method = |method: &String| rule.methods.iter().any(|known| known.eq_ignore_ascii_case(method));
        path && command
            && (self.hosts.is_empty() || host.is_some_and(|host| any(&self.hosts, &host)))
            && (rule.methods.is_empty() || method.is_some_and(is_method))
    }

    /// Whether what lies below a directory matches, however deep.
    fn is_whole_tree(&self, directory: &str) -> bool {
        self.is_path(directory) && any(&self.paths, Path::new(directory).join("a/b/c").to_string_lossy().as_ref())
    }

    /// Whether a pattern could match something below a directory, by the directories it names before its first wildcard.
    fn may_reach_into(&self, rule: &Rule, directory: &str) -> bool {
        let directory = Path::new(if directory == "." { "" } else { directory });
        rule.paths.iter().any(|pattern| {
            let pattern = relative(pattern);
            let literal: PathBuf =
                pattern.split('/').take_while(|part| !part.contains(['*', '?', '[', '{', '\\'])).collect();
            literal.starts_with(directory) || (literal != Path::new(pattern) && directory.starts_with(&literal))
        })
    }

    /// `secrets/**` is also meant to hold for `secrets` itself, which a tool may list or search as a whole.
    fn is_path(&self, path: &str) -> bool {
        any(&self.paths, path) || any(&self.paths, &format!("{path}/"))
    }
}

fn any(patterns: &[GlobMatcher], text: &str) -> bool {
    patterns.iter().any(|pattern| pattern.is_match(text))
}

/// Whether a shell may take a command line for more than one command with its arguments. Such a line is never what a
/// pattern allows: `git *` is not meant to let `git status; rm -r .` pass. More is taken for it than a shell would,
/// because a quoted `|` that needs an approval is better than one that was overlooked.
fn is_compound(line: &str) -> bool {
    line.trim().contains([';', '&', '|', '`', '<', '>', '\n', '\r']) || line.contains("$(") || line.contains("${")
}

fn compile_name(pattern: &str) -> Result<GlobMatcher, globset::Error> {
    Ok(Glob::new(pattern)?.compile_matcher())
}

fn compile_path(pattern: &str) -> Result<GlobMatcher, globset::Error> {
    let glob = GlobBuilder::new(relative(pattern)).literal_separator(true).backslash_escape(true).build()?;
    Ok(glob.compile_matcher())
}

/// Paths are relative to the workspace, however a rule writes that.
fn relative(pattern: &str) -> &str {
    pattern.trim_start_matches("./").trim_start_matches('/')
}

/// A pattern of which only `*` and `?` mean something.
fn compile_text(pattern: &str) -> Result<GlobMatcher, globset::Error> {
    let mut literal = String::with_capacity(pattern.len());
    for c in pattern.chars() {
        match c {
            // Two in a row would mean something about directories.
            '*' if literal.ends_with('*') => {}
            '[' | ']' | '{' | '}' | '!' => literal.extend(['[', c, ']']),
            '\\' => literal.push_str("\\\\"),
            _ => literal.push(c),
        }
    }
    let glob = GlobBuilder::new(&literal).literal_separator(false).backslash_escape(true).build()?;
    Ok(glob.compile_matcher())
}
