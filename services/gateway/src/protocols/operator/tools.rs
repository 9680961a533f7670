//! The tools that scripts can call, by name: who offers others to a session would offer nothing.
//! And their calls, as they are told.

use construct_domain::policy::{Action, MAX_PATTERN_BYTES, MAX_PATTERNS, Policy, Rule, Subject};
use serde_json::{Value, json};

/// Each tool by its name, and by its other names. The interpreter has them; a test compares this
/// with its list.
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
/// No tool, but judged like one: a module of the workspace that a script uses.
const IMPORT: &str = "import";
/// Characters of a name that are told back.
const SHOWN: usize = 100;

/// What is said about the first of these that no tool is called. They are globs, as in every
/// policy.
pub(super) fn missing(wanted: &[String]) -> Option<String> {
    // More of them are refused as a policy with too many patterns.
    let missing = wanted.iter().take(MAX_PATTERNS).find(|pattern| !is_known(pattern))?;
    let shown: String = missing.chars().take(SHOWN).collect();
    let known: Vec<&str> = TOOLS
        .iter()
        .flat_map(|(name, others)| [*name].into_iter().chain(others.iter().copied()))
        .collect();
    Some(format!("tool `{shown}` is not available; there are {}", known.join(", ")))
}

fn is_known(pattern: &str) -> bool {
    // No policy takes a longer one, and it must not be compiled.
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

/// What a call is named by, as it happens and later: its script, and its number in that.
pub(super) fn id(script: &str, step: &str, number: u32) -> String {
    // An interpreter of an earlier release names the step alone.
    let of = if script.is_empty() { step } else { script };
    format!("{of}/{number}")
}

/// What a tool was given, as an object. What was cut off on its way is no JSON any more, and told
/// as a text.
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
    fn what_a_tool_was_given_is_an_object_whatever_is_left_of_it() {
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
    fn the_tools_are_those_of_the_interpreter() {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../interpreter/guest/quickjs/src/tools.json");
        let text = std::fs::read_to_string(path).expect("the interpreter's list is there");
        // Of each tool: its name, …, its other names.
        let listed: Vec<Value> = serde_json::from_str(&text).expect("it is JSON");
        let listed: Vec<_> = listed.iter().map(|tool| json!([tool[0], tool[4]])).collect();
        let own: Vec<_> = TOOLS.iter().map(|(name, others)| json!([name, others])).collect();
        assert_eq!(own, listed);
    }

    #[test]
    fn what_no_tool_is_called_is_missing_and_the_others_are_named() {
        let missing = |wanted: &[&str]| {
            missing(&wanted.iter().map(|tool| (*tool).to_owned()).collect::<Vec<_>>())
        };
        for known in [
            &["bash", "read", "write"][..],
            &["execute_command"],
            &["tasks.*"],
            &["import"],
            &["*"],
            &[],
        ] {
            assert_eq!(missing(known), None, "{known:?}");
        }
        for (wanted, named) in [
            (&["read", "readFile"][..], "`readFile`"),
            (&["tsks.*"][..], "`tsks.*`"),
            (&[""][..], "``"),
        ] {
            let words = missing(wanted).expect("it is missing");
            assert!(
                words.contains(named) && words.contains("bash") && words.contains("tools.search"),
                "{words}"
            );
        }
        assert!(missing(&["x".repeat(1 << 20).as_str()]).expect("it is missing").len() < 1000);
    }
}
