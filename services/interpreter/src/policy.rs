//! What an agent's and a task's policies say about a call: the two lists of rules held against what
//! the call is about.

use construct_domain::policy::{self, Action, Policy, Rule, Subject, Verdict};
use construct_proto::{
    mesh::v1::CodeExecute,
    v1::{PolicyAction, PolicyRule},
};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::{
    modules::{self, READING},
    sandbox::{HostCall, IMPORT},
    tools::{Environment, FETCH, Permission, PolicySubject, Redirects, Toolbox, definition},
};

/// The policies a command carries.
#[derive(Debug)]
pub(crate) struct Policies {
    agent: Policy,
    task: Policy,
    /// The name of the task's agent.
    own: String,
}

/// A call as policies and people look at it.
#[derive(Debug)]
pub(crate) struct Judged {
    /// What becomes of it.
    pub(crate) verdict: Verdict,
    /// The arguments in the one form that equal calls have.
    pub(crate) arguments: Value,
    /// SHA-256 of the tool and the arguments, in hexadecimal: what an approval holds for.
    pub(crate) hash: String,
}

impl Policies {
    /// Those of a command.
    pub(crate) fn of(command: &CodeExecute) -> Self {
        let list = |rules: &[PolicyRule]| Policy::new(rules.iter().cloned().map(rule).collect());
        Self {
            agent: list(&command.agent_policy),
            task: list(&command.task_policy),
            own: command.agent_name.clone(),
        }
    }

    /// What they say about a call: the stricter of both. None when no rule is about it, or when it
    /// fails anyway, because there is no such tool or its arguments don't fit; nobody is asked
    /// about that. A call that was `asked` about before is looked at even when there are no rules
    /// any more.
    pub(crate) async fn judge(
        &self,
        call: &HostCall,
        toolbox: &Toolbox,
        environment: &Environment,
        asked: bool,
    ) -> Option<Judged> {
        if self.agent.is_empty() && self.task.is_empty() && !asked {
            return None;
        }
        let (arguments, subject) = if call.name == IMPORT {
            import(call, toolbox).await
        } else {
            of(call, toolbox, environment).await
        }?;
        let subject = match subject {
            Subject::Agent(name) if name.is_empty() => Subject::Agent(self.own.clone()),
            subject => subject,
        };
        let judge = |names: &[&str]| self.stricter(names, &subject);
        let verdict = judge(&names(&call.name));
        // A rule about reading files is about modules as well.
        let verdict = if call.name == IMPORT {
            policy::stricter_verdict(verdict, judge(&names(READING)))
        } else {
            verdict
        };
        let written = arguments.to_string();
        let digest = Sha256::new()
            .chain_update(&call.name)
            .chain_update([0])
            .chain_update(written)
            .finalize();
        let hash = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        Some(Judged { verdict, arguments, hash })
    }

    /// Of what both lists say the stricter.
    fn stricter(&self, names: &[&str], subject: &Subject) -> Verdict {
        policy::stricter_verdict(
            self.agent.evaluate(names, subject),
            self.task.evaluate(names, subject),
        )
    }
}

/// As if the request that a redirect asks for were a call of its own.
impl Redirects for Policies {
    fn judge(&self, to: PolicySubject) -> Verdict {
        self.stricter(&names(FETCH), &subject(vec![to]))
    }
}

/// A tool by each of its names, because models and people know it by any.
fn names(tool: &str) -> Vec<&str> {
    definition(tool).map_or_else(
        || vec![tool],
        |tool| tool.aliases.iter().copied().chain([tool.name]).collect(),
    )
}

/// The arguments of a tool's call, and what it is about.
async fn of(
    call: &HostCall,
    toolbox: &Toolbox,
    environment: &Environment,
) -> Option<(Value, Subject)> {
    let mut arguments = toolbox.canonical(&call.name, &call.args).ok()?;
    let subjects = toolbox.subjects(&call.name, &arguments, environment).await.ok()?;
    let runs = definition(&call.name).is_some_and(|tool| tool.permission == Permission::Commands);
    if runs && !environment.is_empty() {
        // First, where a person who is asked looks first: it can make a harmless line do anything.
        let rest = arguments.as_object_mut().map(std::mem::take).unwrap_or_default();
        arguments = json!({"environment": environment});
        arguments.as_object_mut()?.extend(rest);
    }
    Some((arguments, subject(subjects)))
}

/// A module may lie under any of the names that are tried for it.
async fn import(call: &HostCall, toolbox: &Toolbox) -> Option<(Value, Subject)> {
    let path = call.args["path"].as_str()?;
    let mut names = Vec::new();
    for candidate in modules::candidates(toolbox, path) {
        // What is no path of the workspace is not opened either.
        let Ok(arguments) = toolbox.canonical(READING, &json!({"path": candidate})) else {
            continue;
        };
        let subjects =
            toolbox.subjects(READING, &arguments, &Environment::new()).await.unwrap_or_default();
        names.extend(subjects.into_iter().map(|subject| subject.to_string()));
    }
    Some((json!({"path": path}), Subject::Path(names)))
}

fn subject(subjects: Vec<PolicySubject>) -> Subject {
    let is_tree = subjects.iter().any(|subject| matches!(subject, PolicySubject::Tree(_)));
    let (mut paths, mut lines) = (Vec::new(), Vec::new());
    for subject in subjects {
        match subject {
            PolicySubject::Path(path) | PolicySubject::Tree(path) => paths.push(path),
            PolicySubject::Command(line) => lines.push(line),
            PolicySubject::Request { method, host, path: _ } => {
                return Subject::Request { method, host };
            }
            PolicySubject::Agent(name) => return Subject::Agent(name),
            PolicySubject::Name(_) | PolicySubject::None => return Subject::None,
        }
    }
    match (is_tree, lines.is_empty()) {
        (_, false) => Subject::Command(lines),
        (true, _) => Subject::Tree(paths),
        (false, _) => Subject::Path(paths),
    }
}

fn rule(rule: PolicyRule) -> Rule {
    let action = match rule.action() {
        PolicyAction::Allow => Action::Allow,
        PolicyAction::Ask => Action::Ask,
        // What a newer version means by it is not known here.
        PolicyAction::Deny | PolicyAction::Unspecified => Action::Deny,
    };
    let PolicyRule { action: _, tools, paths, commands, hosts, methods, reason, agents } = rule;
    Rule { action, tools, paths, commands, hosts, methods, agents, reason }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{
        command::CommandSandbox,
        tools::{Egress, Policy as Grants},
        workspace::Workspace,
    };

    /// One with everything of this folder, and nothing else.
    pub(crate) fn toolbox(root: &std::path::Path) -> Toolbox {
        let workspace = Workspace::open(root).expect("a workspace");
        let egress = Egress::new(&[]).expect("an HTTP client");
        Toolbox::new(workspace, Grants::default(), egress, CommandSandbox::unavailable("a test"))
    }

    fn call(name: &str, args: Value) -> HostCall {
        HostCall { number: 1, name: name.to_owned(), args }
    }

    fn command(agent: Vec<PolicyRule>, task: Vec<PolicyRule>) -> Policies {
        Policies::of(&CodeExecute {
            agent_policy: agent,
            task_policy: task,
            ..CodeExecute::default()
        })
    }

    fn rule(action: PolicyAction, tool: &str) -> PolicyRule {
        PolicyRule { action: action.into(), tools: vec![tool.to_owned()], ..PolicyRule::default() }
    }

    #[tokio::test]
    async fn equal_calls_have_one_form_and_one_hash() {
        let folder = tempfile::tempdir().expect("a folder");
        let toolbox = toolbox(folder.path());
        let policies = command(vec![rule(PolicyAction::Ask, "*")], Vec::new());
        let judged = async |name: &str, args| {
            policies
                .judge(&call(name, args), &toolbox, &toolbox.environment(), false)
                .await
                .expect("a call that fits")
        };
        let one = judged("create_file", json!({"content": "x", "path": "./a"})).await;
        let same = judged("create_file", json!({"path": "a", "content": "x"})).await;
        assert_eq!((same.arguments, &same.hash), (one.arguments.clone(), &one.hash));
        assert_eq!(one.arguments.to_string(), r#"{"content":"x","path":"a"}"#);
        assert_ne!(
            judged("create_file", json!({"path": "a", "content": "y"})).await.hash,
            one.hash
        );
        let nested = json!({"options": {"env": {"B": "1", "A": "2"}, "cwd": "x"}, "command": "ls"});
        let nested = judged("execute_command", nested).await.arguments;
        assert_eq!(
            nested.to_string(),
            r#"{"command":"ls","options":{"cwd":"x","env":{"A":"2","B":"1"}}}"#
        );
        for (name, args) in [("no_such_tool", json!({})), ("create_file", json!({"path": 1}))] {
            assert!(
                policies
                    .judge(&call(name, args), &toolbox, &toolbox.environment(), false)
                    .await
                    .is_none(),
                "nobody is asked about {name}"
            );
        }
    }

    #[tokio::test]
    async fn every_way_to_a_file_is_judged() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        for directory in ["secrets", "open"] {
            std::fs::create_dir(root.join(directory)).expect("made");
        }
        std::fs::write(root.join("secrets/key.ts"), "").expect("written");
        std::os::unix::fs::symlink("secrets", root.join("harmless")).expect("linked");
        std::os::unix::fs::symlink("secrets/new", root.join("dangling")).expect("linked");
        let toolbox = toolbox(root);
        let secrets =
            PolicyRule { paths: vec!["secrets/**".into()], ..rule(PolicyAction::Ask, "*") };
        let policies = command(vec![secrets], Vec::new());
        let absolute = toolbox.workspace().root().join("secrets/new").display().to_string();
        let write = |path: &str| call("create_file", json!({"path": path, "content": "x"}));
        let import = |path: &str| call(IMPORT, json!({"path": path}));
        let search = |path: &str| call("grep", json!({"query": "x", "path": path}));
        let table = [
            (write("secrets/new"), Action::Ask),
            (write("./secrets//key"), Action::Ask),
            (write("x/../secrets/key"), Action::Ask),
            (write("harmless/key"), Action::Ask),
            (write("harmless/made/later"), Action::Ask),
            (write("dangling"), Action::Ask),
            (write(&absolute), Action::Ask),
            (write("open/key"), Action::Allow),
            (write("secrets/../open/x"), Action::Allow),
            (import("secrets/key"), Action::Ask),
            (import("secrets/key.js"), Action::Ask),
            (import("harmless/key.ts"), Action::Ask),
            (import("open/key.ts"), Action::Allow),
            (search("."), Action::Ask),
            (search("harmless"), Action::Ask),
            (search("open"), Action::Allow),
            (call("list_files", json!({})), Action::Allow),
            (call("list_files", json!({"recursive": true})), Action::Ask),
            (call("delete_file", json!({"path": ".", "recursive": true})), Action::Ask),
        ];
        for (call, expected) in table {
            let judged = policies
                .judge(&call, &toolbox, &toolbox.environment(), false)
                .await
                .expect("a call that fits");
            assert_eq!(judged.verdict.action, expected, "{call:?}");
        }
        let reading = PolicyRule {
            paths: vec!["secrets/**".into()],
            ..rule(PolicyAction::Deny, "read_file")
        };
        let judged = command(Vec::new(), vec![reading])
            .judge(&import("secrets/key"), &toolbox, &toolbox.environment(), false)
            .await;
        assert_eq!(judged.expect("judged").verdict.action, Action::Deny, "a module is read");
    }

    #[tokio::test]
    async fn programs_are_commands_and_requests_have_hosts() {
        let folder = tempfile::tempdir().expect("a folder");
        let toolbox = toolbox(folder.path());
        let git =
            PolicyRule { commands: vec!["git push*".into()], ..rule(PolicyAction::Deny, "*") };
        let example =
            PolicyRule { hosts: vec!["example.com".into()], ..rule(PolicyAction::Ask, "*") };
        let policies = command(vec![git, example], Vec::new());
        for (call, expected) in [
            (call("execute_command", json!({"command": "git push"})), Action::Deny),
            (call("git", json!({"args": ["push", "origin"]})), Action::Deny),
            (call("git", json!({"args": ["status"]})), Action::Allow),
            (call("fetch", json!({"url": "https://Example.com:8080/x"})), Action::Ask),
            (call("fetch", json!({"url": "http://example.com@b.com/"})), Action::Allow),
        ] {
            let judged = policies
                .judge(&call, &toolbox, &toolbox.environment(), false)
                .await
                .expect("a call that fits");
            assert_eq!(judged.verdict.action, expected, "{call:?}");
        }
    }

    #[tokio::test]
    async fn whoever_is_to_work_on_something_is_judged_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let toolbox = toolbox(folder.path());
        let lawyers =
            PolicyRule { agents: vec!["lawyer*".into()], ..rule(PolicyAction::Deny, "tasks.*") };
        let boss = PolicyRule { agents: vec!["boss".into()], ..rule(PolicyAction::Ask, "*") };
        let policies = Policies::of(&CodeExecute {
            task_policy: vec![lawyers, boss],
            agent_name: "boss".to_owned(),
            ..CodeExecute::default()
        });
        for (call, expected) in [
            (call("tasks.spawn", json!({"message": "x", "agent": "lawyer 2"})), Action::Deny),
            (call("tasks.hand_off", json!({"agent": "lawyer"})), Action::Deny),
            (call("tasks.spawn", json!({"message": "x", "agent": "reader"})), Action::Allow),
            (call("tasks.spawn", json!({"message": "x", "agent": "boss"})), Action::Ask),
            (call("tasks.spawn", json!({"message": "lawyer"})), Action::Ask),
            (call("tasks.send", json!({"task": "lawyer", "message": "x"})), Action::Allow),
            (call("tasks.list", json!({})), Action::Allow),
        ] {
            let judged = policies
                .judge(&call, &toolbox, &toolbox.environment(), false)
                .await
                .expect("a call that fits");
            assert_eq!(judged.verdict.action, expected, "{call:?}");
        }
    }

    #[tokio::test]
    async fn variables_belong_to_a_command() {
        let folder = tempfile::tempdir().expect("a folder");
        let toolbox = toolbox(folder.path());
        let allowed =
            PolicyRule { commands: vec!["git fetch*".into()], ..rule(PolicyAction::Allow, "*") };
        let policies = command(vec![allowed, rule(PolicyAction::Ask, "*")], Vec::new());
        let judged = async |name: &str, args| {
            let judged = policies
                .judge(&call(name, args), &toolbox, &toolbox.environment(), false)
                .await
                .expect("a call that fits");
            (judged.verdict.action, judged.arguments, judged.hash)
        };
        let git = json!({"args": ["fetch"]});
        let (action, _, plain) = judged("git", git.clone()).await;
        assert_eq!(action, Action::Allow);
        let with =
            json!({"args": ["fetch"], "options": {"env": {"GIT_SSH_COMMAND": "sh -c 'rm x'"}}});
        assert_eq!(judged("git", with).await.0, Action::Ask);

        toolbox.replay("setenv", &json!({"name": "BASH_ENV", "value": "x"}));
        let (action, arguments, hash) = judged("git", git).await;
        assert_eq!((action, &arguments["environment"]), (Action::Ask, &json!({"BASH_ENV": "x"})));
        assert_ne!(hash, plain, "an approval does not hold for another environment");
        assert!(
            judged("create_file", json!({"path": "a", "content": ""}))
                .await
                .1
                .get("environment")
                .is_none()
        );
    }

    #[tokio::test]
    async fn the_stricter_of_agent_and_task_holds() {
        let folder = tempfile::tempdir().expect("a folder");
        let toolbox = toolbox(folder.path());
        let call = call("create_file", json!({"path": "a", "content": "x"}));
        use PolicyAction::{Allow, Ask, Deny, Unspecified};
        for (agent, task, expected) in [
            (Allow, Allow, Action::Allow),
            (Ask, Allow, Action::Ask),
            (Allow, Ask, Action::Ask),
            (Ask, Deny, Action::Deny),
            (Unspecified, Allow, Action::Deny),
        ] {
            let policies = command(vec![rule(agent, "create_file")], vec![rule(task, "*")]);
            let judged = policies
                .judge(&call, &toolbox, &toolbox.environment(), false)
                .await
                .expect("a call that fits");
            assert_eq!(judged.verdict.action, expected, "{agent:?} {task:?}");
        }
    }
}
