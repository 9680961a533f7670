//! Policies as YAML or JSON: a list of rules.

use std::path::{Path, PathBuf};

use construct_proto::v1::{Policy, PolicyAction, PolicyRule};
use serde::Deserialize;

use crate::{entity::read_text, failure::Failure};

/// The option for a policy.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct PolicyArgs {
    /// The rules for calls of scripts, as a YAML or JSON list; `-` is standard input. Each rule has
    /// an `action` (allow, ask, deny), and optional `tools`, `paths`, `commands`, `hosts`,
    /// `methods`, `agents` and `reason`. Replaces the whole policy.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    action: Action,
    #[serde(default)]
    tools: Vec<String>,
    #[serde(default)]
    paths: Vec<String>,
    #[serde(default)]
    commands: Vec<String>,
    #[serde(default)]
    hosts: Vec<String>,
    #[serde(default)]
    methods: Vec<String>,
    #[serde(default)]
    agents: Vec<String>,
    #[serde(default)]
    reason: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Action {
    Allow,
    Ask,
    Deny,
}

impl PolicyArgs {
    /// Reads the policy file, if one is given.
    ///
    /// # Errors
    /// When the file cannot be read, or is not a list of rules.
    pub(crate) fn read(&self) -> Result<Option<Policy>, Failure> {
        let Some(path) = &self.policy else { return Ok(None) };
        parse(&read_text(path)?, path).map(Some)
    }
}

fn parse(text: &str, path: &Path) -> Result<Policy, Failure> {
    // JSON is YAML as well.
    let rules: Vec<Rule> = serde_yaml_ng::from_str(text).map_err(|error| {
        Failure::usage(format!("{} is not a list of rules: {error}", path.display()))
    })?;
    Ok(Policy { rules: rules.into_iter().map(Rule::into_message).collect() })
}

impl Rule {
    fn into_message(self) -> PolicyRule {
        let action = match self.action {
            Action::Allow => PolicyAction::Allow,
            Action::Ask => PolicyAction::Ask,
            Action::Deny => PolicyAction::Deny,
        };
        let Self { action: _, tools, paths, commands, hosts, methods, agents, reason } = self;
        PolicyRule { action: action.into(), tools, paths, commands, hosts, methods, reason, agents }
    }
}

/// The policy as text, one line per rule.
pub(crate) fn describe(rules: &[PolicyRule]) -> String {
    let rules = rules.iter().map(|rule| {
        let action = match rule.action() {
            PolicyAction::Allow => "allow",
            PolicyAction::Ask => "ask",
            PolicyAction::Deny => "deny",
            PolicyAction::Unspecified => "?",
        };
        let lists = [
            ("tools", &rule.tools),
            ("paths", &rule.paths),
            ("commands", &rule.commands),
            ("hosts", &rule.hosts),
            ("methods", &rule.methods),
            ("agents", &rule.agents),
        ];
        let conditions = lists.into_iter().filter(|(_, patterns)| !patterns.is_empty());
        let conditions: String =
            conditions.map(|(name, patterns)| format!(" {name} {}", patterns.join(", "))).collect();
        let reason =
            if rule.reason.is_empty() { String::new() } else { format!(" ({})", rule.reason) };
        format!("{action}{conditions}{reason}")
    });
    rules.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_from_yaml_and_json() {
        let yaml = "- action: ask\n  tools: [create_file]\n  paths: ['secrets/**']\n  reason: it is secret\n- action: deny\n  agents: [lawyer]\n";
        let json = r#"[{"action":"ask","tools":["create_file"],"paths":["secrets/**"],"reason":"it is secret"},{"action":"deny","agents":["lawyer"]}]"#;
        let policy = parse(yaml, Path::new("p.yaml")).unwrap();
        assert_eq!(policy, parse(json, Path::new("p.json")).unwrap());
        assert_eq!(
            describe(&policy.rules),
            "ask tools create_file paths secrets/** (it is secret)\ndeny agents lawyer"
        );
    }

    #[test]
    fn misspelled_rules_are_refused() {
        for text in ["- action: aks", "- action: ask\n  path: [x]", "action: ask", "- {}"] {
            assert!(parse(text, Path::new("p.yaml")).is_err(), "{text}");
        }
    }
}
