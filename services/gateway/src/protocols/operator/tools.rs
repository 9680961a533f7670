//! The tools that scripts can call, by name, and the format of their calls. A session cannot offer
//! other tools.

use construct_domain::policy::{Action, MAX_PATTERN_BYTES, MAX_PATTERNS, Policy, Rule, Subject};
use serde_json::{Value, json};

/// The tools with their aliases. The interpreter implements them; a test compares this list with
/// the interpreter's.
const TOOLS: [(&str, &[&str]); 29] = [
    ("read_file", &["read"]),
    ("create_file", &["write"]),
    ("edit_file", &["edit"]),
    ("list_files", &["listdir"]),
    ("grep", &[]),
    ("find_file", &["find", "glob"]),
    ("save_file", &[]),
    ("execute_command", &["bash"]),
    ("fetch", &[]),
    ("secrets.get", &[]),
    ("llm.ask", &[]),
    ("llm.json", &[]),
    ("llm.embed", &[]),
    ("tasks.spawn", &[]),
    ("tasks.await", &[]),
    ("tasks.send", &[]),
    ("tasks.parent", &[]),
    ("tasks.hand_off", &[]),
    ("tasks.list", &[]),
    ("delete_file", &["tools.delete"]),
    ("tools.search", &[]),
    ("tools.describe", &[]),
    ("git", &[]),
    ("node", &[]),
    ("python", &[]),
    ("npm", &[]),
    ("setenv", &[]),
    ("getenv", &[]),
    ("pwd", &[]),
];
/// Not a tool, but subject to policies like one: the import of a workspace module by a script.
const IMPORT: &str = "import";
/// Maximum number of characters of a name in an error.
const MAX_NAME_CHARS: usize = 100;

/// The error for the first pattern that matches no tool. Patterns are globs, as in every policy.
pub(super) fn unknown_tool(patterns: &[String]) -> Option<String> {
    // A policy with more patterns is refused later.
    let unknown_tool = patterns.iter().take(MAX_PATTERNS).find(|pattern| !matches_tool(pattern))?;
    let name: String = unknown_tool.chars().take(MAX_NAME_CHARS).collect();
    let names: Vec<&str> = TOOLS
        .iter()
        .flat_map(|(name, others)| [*name].into_iter().chain(others.iter().copied()))
        .collect();
    Some(format!("unknown tool `{name}`; the tools are {}", names.join(", ")))
}

fn matches_tool(pattern: &str) -> bool {
    // Policies refuse longer patterns, and they must not be compiled.
    if pattern.len() > MAX_PATTERN_BYTES {
        return false;
    }
    let rule = |action, tools: &[&str]| Rule {
        action,
        tools: tools.iter().map(|tool| (*tool).to_owned()).collect(),
        paths: Vec::new(),
        commands: Vec::new(),
        hosts: Vec::new(),
        methods: Vec::new(),
        agents: Vec::new(),
        reason: String::new(),
    };
    let policy = Policy::new(vec![rule(Action::Allow, &[pattern]), rule(Action::Deny, &[])]);
    let allowed = |names: &[&str]| policy.evaluate(names, &Subject::None).action == Action::Allow;
    TOOLS.iter().any(|(name, others)| allowed(&[*name]) || allowed(others)) || allowed(&[IMPORT])
}

/// The id of a call, live and later: its script, and its number in the script.
pub(super) fn id(script: &str, step: &str, number: u32) -> String {
    // An older interpreter names only the step.
    let of = if script.is_empty() { step } else { script };
    format!("{of}/{number}")
}

/// The input of a tool as an object. Truncated input is no longer JSON, and becomes a string.
pub(super) fn input(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(input @ Value::Object(_)) => input,
        _ if arguments.is_empty() => json!({}),
        _ => json!({"text": arguments}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_tool_input_is_still_an_object() {
        assert_eq!(input(r#"{"path":"a"}"#), json!({"path": "a"}));
        assert_eq!(input(""), json!({}));
        assert_eq!(input(r#"{"content":"xx…"#), json!({"text": r#"{"content":"xx…"#}));
        assert_eq!(input("[1]"), json!({"text": "[1]"}));
        assert_eq!(
            (id("call_1", "step_1", 2), id("", "step_1", 2)),
            ("call_1/2".to_owned(), "step_1/2".to_owned())
        );
    }

    #[test]
    fn tools_match_the_interpreter() {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../interpreter/guest/quickjs/src/tools.json");
        let text = std::fs::read_to_string(path).expect("the interpreter's list is there");
        // Per tool: its name, …, its aliases.
        let listed: Vec<Value> = serde_json::from_str(&text).expect("it is JSON");
        let listed: Vec<_> = listed.iter().map(|tool| json!([tool[0], tool[4]])).collect();
        let own: Vec<_> = TOOLS.iter().map(|(name, others)| json!([name, others])).collect();
        assert_eq!(own, listed);
    }

    #[test]
    fn unknown_tool_is_named_and_known_tools_are_listed() {
        let unknown_tool = |patterns: &[&str]| {
            unknown_tool(&patterns.iter().map(|tool| (*tool).to_owned()).collect::<Vec<_>>())
        };
        for names in [
            &["bash", "read", "write"][..],
            &["execute_command"],
            &["tasks.*"],
            &["import"],
            &["*"],
            &[],
        ] {
            assert_eq!(unknown_tool(names), None, "{names:?}");
        }
        for (patterns, named) in [
            (&["read", "readFile"][..], "`readFile`"),
            (&["tsks.*"][..], "`tsks.*`"),
            (&[""][..], "``"),
        ] {
            let message = unknown_tool(patterns).expect("it is missing");
            assert!(
                message.contains(named)
                    && message.contains("bash")
                    && message.contains("tools.search"),
                "{message}"
            );
        }
        assert!(unknown_tool(&["x".repeat(1 << 20).as_str()]).expect("it is missing").len() < 1000);
    }
}
