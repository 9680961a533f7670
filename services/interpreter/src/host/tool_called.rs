//! The event that a call was made.

use construct_proto::v1;
use serde_json::Value;

use crate::{
    modules::READ_TOOL,
    sandbox::{HostCall, IMPORT},
    tools::{self, Toolbox},
};

/// The arguments of a call in their canonical form, as JSON, in the order of the tool's parameters,
/// so that a truncated text shows the target of a call before the content. If they do not fit the
/// tool, the call fails and they are shown as the script gave them; so are those of an import.
pub(super) fn arguments(call: &HostCall, toolbox: &Toolbox) -> String {
    match (toolbox.canonical(&call.name, &call.args), tools::definition(&call.name)) {
        (Ok(Value::Object(mut canonical)), Some(tool)) => {
            let in_order = tool
                .parameters
                .iter()
                .filter_map(|parameter| canonical.remove_entry(parameter.name));
            Value::Object(in_order.collect()).to_string()
        }
        _ => call.args.to_string(),
    }
}

/// A call with the effect and permission of its tool. An import has those of reading a file, as for
/// policies.
pub(super) fn event(
    step_id: &str,
    script_id: &str,
    call: &HostCall,
    arguments: &str,
) -> v1::ToolCalled {
    let tool = tools::definition(if call.name == IMPORT { READ_TOOL } else { &call.name });
    v1::ToolCalled {
        step_id: step_id.to_owned(),
        number: call.number,
        name: call.name.clone(),
        arguments: arguments.to_owned(),
        script_id: script_id.to_owned(),
        effect: tool.map(|tool| tool.effect.name().to_owned()).unwrap_or_default(),
        permission: tool.map(|tool| tool.permission.name().to_owned()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::policy::tests::toolbox;

    fn call(name: &str, args: Value) -> HostCall {
        HostCall { number: 7, name: name.to_owned(), args }
    }

    #[test]
    fn event_has_effect_and_permission_of_the_tools_page() {
        let page = include_str!("../../../../docs/tools.md");
        let rows = page.lines().filter(|line| line.starts_with("| [`"));
        let mut count = 0;
        for row in rows {
            let cells: Vec<&str> =
                row.split(" | ").map(|cell| cell.trim_matches(['|', ' '])).collect();
            let name = cells[0].split('`').nth(1).expect("a name");
            let event = event("step", "script", &call(name, json!({})), "{}");
            assert_eq!([&*event.effect, &*event.permission], cells[cells.len() - 2..], "{row}");
            assert_eq!((event.step_id.as_str(), event.script_id.as_str()), ("step", "script"));
            assert_eq!(
                (event.name.as_str(), event.number, event.arguments.as_str()),
                (name, 7, "{}")
            );
            count += 1;
        }
        assert_eq!(count, tools::definitions().len());
        let module = event("step", "script", &call(IMPORT, json!({"path": "a.ts"})), "");
        assert_eq!((module.effect.as_str(), module.permission.as_str()), ("read", "files.read"));
    }

    #[test]
    fn published_arguments_are_canonical() {
        let folder = tempfile::tempdir().expect("a folder");
        let toolbox = toolbox(folder.path());
        let absolute = toolbox.workspace().root().join("a").display().to_string();
        for (name, args, expected) in [
            (
                "create_file",
                json!({"path": "./b/../a", "content": "x"}),
                r#"{"path":"a","content":"x"}"#,
            ),
            (
                "create_file",
                json!({"content": "x", "path": absolute}),
                r#"{"path":"a","content":"x"}"#,
            ),
            // They do not fit, and the call will fail.
            ("create_file", json!({"path": "./a"}), r#"{"path":"./a"}"#),
            (IMPORT, json!({"path": "./lib"}), r#"{"path":"./lib"}"#),
        ] {
            assert_eq!(arguments(&call(name, args), &toolbox), expected);
        }
    }
}
