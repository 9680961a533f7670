//! What an agent's and a task's policies say about a call: what the call is about, in one canonical form, and the two
//! lists of rules held against it (`construct_domain::policy`).

use std::{
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
};

use construct_domain::policy::{self, Action, Policy, Rule, Subject, Verdict};
use construct_proto::{
    mesh::v1::CodeExecute,
    v1::{PolicyAction, PolicyRule},
};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::{tools::Definition, workspace::Workspace};

/// How many symbolic links are followed to find out what a path means; the kernel gives up at as many.
const LINKS: usize = 40;

/// The policies a command carries.
#[derive(Debug)]
pub(crate) struct Policies {
    agent: Policy,
    task: Policy,
}

impl Policies {
    /// Those of a command.
    pub(crate) fn of(command: &CodeExecute) -> Self {
        let list = |rules: &[PolicyRule]| Policy::new(rules.iter().cloned().map(rule).collect());
        Self { agent: list(&command.agent_policy), task: list(&command.task_policy) }
    }

    /// What they say about a call with these arguments: the stricter of both.
    pub(crate) async fn judge(&self, tool: &Definition, arguments: &Canonical, workspace: &Workspace) -> Verdict {
        let mut subject = arguments.subject(tool);
        if let Subject::Path(names) = &mut subject {
            let path = names.pop().unwrap_or_default();
            // Where no rule asks for a path, nobody needs to look at the file system.
            if self.agent.has_paths() || self.task.has_paths() {
                *names = names_of(workspace, path).await;
            }
        }
        policy::stricter(self.agent.judge(tool.name, &subject), self.task.judge(tool.name, &subject))
    }
}

fn rule(rule: PolicyRule) -> Rule {
    let action = match rule.action() {
        PolicyAction::Allow => Action::Allow,
        PolicyAction::Ask => Action::Ask,
        // What a newer version means by it is not known here.
        PolicyAction::Deny | PolicyAction::Unspecified => Action::Deny,
    };
    let PolicyRule { action: _, tools, paths, commands, hosts, methods, reason } = rule;
    Rule { action, tools, paths, commands, hosts, methods, reason }
}

/// The arguments of a call in the one form that equal calls have: by name, sorted, without those that are absent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Canonical(BTreeMap<String, Value>);

impl Canonical {
    /// Of a call's arguments, which the sandbox gives by name.
    pub(crate) fn new(args: &Value) -> Self {
        let named = args.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
        Self(named.map(|(name, value)| (name.clone(), sorted(value.clone()))).collect())
    }

    /// As JSON.
    pub(crate) fn json(&self) -> String {
        serde_json::to_string(&self.0).unwrap_or_default()
    }

    /// SHA-256 of the tool and the arguments, in hexadecimal: what an approval holds for.
    pub(crate) fn hash(&self, tool: &str) -> String {
        let digest = Sha256::new().chain_update(tool).chain_update([0]).chain_update(self.json()).finalize();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// What the call is about. A path stands there as it was given.
    fn subject(&self, tool: &Definition) -> Subject {
        let text = |name: &str| self.0.get(name).and_then(Value::as_str);
        let takes = |name: &str| tool.parameters.iter().any(|parameter| parameter.name == name);
        if let Some(command) = text("command").filter(|_| takes("command")) {
            return Subject::Command(command.to_owned());
        }
        if takes("url") {
            let url = text("url").and_then(|url| reqwest::Url::parse(url).ok());
            let Some(host) = url.as_ref().and_then(reqwest::Url::host_str) else { return Subject::None };
            let options = self.0.get("options").unwrap_or(&Value::Null);
            let method = options["method"].as_str().unwrap_or("GET").to_ascii_uppercase();
            return Subject::Request { method, host: host.to_owned() };
        }
        if takes("path") {
            return Subject::Path(vec![text("path").unwrap_or(".").to_owned()]);
        }
        Subject::None
    }
}

/// A value whose objects have their fields in order.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<(String, Value)> = fields.into_iter().collect();
            fields.sort_by(|(a, _), (b, _)| a.cmp(b));
            Value::Object(fields.into_iter().map(|(name, value)| (name, sorted(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

/// The names of a file, relative to the workspace: as it is written, and where symbolic links lead at this moment. None
/// when it lies outside, which the tool refuses.
async fn names_of(workspace: &Workspace, path: String) -> Vec<String> {
    let workspace = workspace.clone();
    let names = tokio::task::spawn_blocking(move || {
        let Ok(located) = workspace.locate(&path) else { return Vec::new() };
        let shown = |path: PathBuf| {
            let text = path.to_string_lossy().into_owned();
            if text.is_empty() { ".".to_owned() } else { text }
        };
        let written = lexical(located.as_path()).map(shown);
        let resolved = resolve(&workspace.root().join(located.as_path()), LINKS)
            .and_then(|path| path.strip_prefix(workspace.root()).map(Path::to_owned).ok())
            .map(shown);
        let mut names: Vec<String> = written.into_iter().chain(resolved).collect();
        names.dedup();
        names
    });
    // Only when the runtime ends, and the call with it.
    names.await.unwrap_or_default()
}

/// The path without `.` and `..`, as if there were no symbolic links; none when it leads out of the workspace.
fn lexical(path: &Path) -> Option<PathBuf> {
    let mut cleaned = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => cleaned.push(name),
            Component::ParentDir => {
                if !cleaned.pop() {
                    return None;
                }
            }
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    Some(cleaned)
}

/// Where a path leads, whether or not its last parts exist.
fn resolve(path: &Path, links: usize) -> Option<PathBuf> {
    if let Ok(found) = path.canonicalize() {
        return Some(found);
    }
    let (parent, name) = (path.parent()?, path.file_name()?);
    // A link to what does not exist yet: making the file makes it there.
    if let Ok(target) = std::fs::read_link(path) {
        return resolve(&parent.join(target), links.checked_sub(1)?);
    }
    Some(resolve(parent, links)?.join(name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tools::definition;

    fn tool(name: &str) -> &'static Definition {
        definition(name).expect("there is such a tool")
    }

    fn command(agent: Vec<PolicyRule>, task: Vec<PolicyRule>) -> Policies {
        Policies::of(&CodeExecute { agent_policy: agent, task_policy: task, ..CodeExecute::default() })
    }

    fn rule(action: PolicyAction, tool: &str) -> PolicyRule {
        PolicyRule { action: action.into(), tools: vec![tool.to_owned()], ..PolicyRule::default() }
    }

    #[test]
    fn equal_calls_have_one_form_and_one_hash() {
        let call = Canonical::new(&json!({"content": "x", "path": "a"}));
        let same = Canonical::new(&json!({"path": "a", "content": "x", "mode": null}));
        assert_eq!((same.json(), same.hash("create_file")), (call.json(), call.hash("create_file")));
        assert_eq!(call.json(), r#"{"content":"x","path":"a"}"#);
        assert_eq!(call.hash("create_file").len(), 64);
        let other = Canonical::new(&json!({"path": "a", "content": "y"}));
        assert_ne!(call.hash("create_file"), other.hash("create_file"));
        assert_ne!(call.hash("create_file"), call.hash("edit_file"));
        let nested = Canonical::new(&json!({"options": {"env": {"B": "1", "A": "2"}, "cwd": "x"}, "command": "ls"}));
        assert_eq!(nested.json(), r#"{"command":"ls","options":{"cwd":"x","env":{"A":"2","B":"1"}}}"#);
    }

    #[test]
    fn a_call_is_about_what_its_arguments_name() {
        let subject = |name, args| Canonical::new(&args).subject(tool(name));
        let request = |method: &str, host: &str| Subject::Request { method: method.into(), host: host.into() };
        assert_eq!(subject("create_file", json!({"path": "a/b", "content": ""})), Subject::Path(vec!["a/b".into()]));
        assert_eq!(subject("list_files", json!({})), Subject::Path(vec![".".into()]));
        assert_eq!(subject("execute_command", json!({"command": "git push"})), Subject::Command("git push".into()));
        assert_eq!(subject("fetch", json!({"url": "https://Example.com:8080/x"})), request("GET", "example.com"));
        let posted = json!({"url": "http://user:a.com@b.com/", "options": {"method": "post"}});
        assert_eq!(subject("fetch", posted), request("POST", "b.com"));
        assert_eq!(subject("fetch", json!({"url": "no address"})), Subject::None);
    }

    #[tokio::test]
    async fn a_path_is_judged_by_every_name_it_has() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        std::fs::create_dir(root.join("secrets")).expect("made");
        std::fs::write(root.join("secrets/key"), "").expect("written");
        std::os::unix::fs::symlink("secrets", root.join("harmless")).expect("linked");
        std::os::unix::fs::symlink("secrets/new", root.join("dangling")).expect("linked");
        let workspace = Workspace::open(root).expect("opened");
        let secrets = PolicyRule { paths: vec!["secrets/**".into()], ..rule(PolicyAction::Ask, "*") };
        let policies = command(vec![secrets], Vec::new());
        let absolute = workspace.root().join("secrets/new").display().to_string();
        for (path, expected) in [
            ("secrets/new", Action::Ask),
            ("./secrets//key", Action::Ask),
            ("x/../secrets/key", Action::Ask),
            ("harmless/key", Action::Ask),
            ("harmless/made/later", Action::Ask),
            ("dangling", Action::Ask),
            (absolute.as_str(), Action::Ask),
            ("open/key", Action::Allow),
            ("secrets/../open", Action::Allow),
        ] {
            let call = Canonical::new(&json!({"path": path, "content": "x"}));
            assert_eq!(policies.judge(tool("create_file"), &call, &workspace).await.action, expected, "{path}");
        }
    }

    #[tokio::test]
    async fn the_stricter_of_agent_and_task_holds() {
        let folder = tempfile::tempdir().expect("a folder");
        let workspace = Workspace::open(folder.path()).expect("opened");
        let call = Canonical::new(&json!({"path": "a", "content": "x"}));
        use PolicyAction::{Allow, Ask, Deny, Unspecified};
        for (agent, task, expected) in [
            (Allow, Allow, Action::Allow),
            (Ask, Allow, Action::Ask),
            (Allow, Ask, Action::Ask),
            (Ask, Deny, Action::Deny),
            (Unspecified, Allow, Action::Deny),
        ] {
            let policies = command(vec![rule(agent, "create_file")], vec![rule(task, "*")]);
            let verdict = policies.judge(tool("create_file"), &call, &workspace).await;
            assert_eq!(verdict.action, expected, "{agent:?} {task:?}");
        }
    }
}
