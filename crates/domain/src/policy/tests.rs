use super::*;

fn rule(action: Action) -> Rule {
    Rule {
        action,
        tools: Vec::new(),
        paths: Vec::new(),
        commands: Vec::new(),
        hosts: Vec::new(),
        methods: Vec::new(),
        agents: Vec::new(),
        reason: String::new(),
    }
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

fn path(path: &str) -> Subject {
    Subject::Path(vec![path.to_owned()])
}

fn tree(path: &str) -> Subject {
    Subject::Tree(vec![path.to_owned()])
}

fn command(line: &str) -> Subject {
    Subject::Command(vec![line.to_owned()])
}

fn request(method: &str, host: &str) -> Subject {
    Subject::Request { method: method.to_owned(), host: host.to_owned() }
}

fn evaluate(rules: &[Rule], tool: &str, subject: &Subject) -> Action {
    Policy::new(rules.to_vec()).evaluate(&[tool], subject).action
}

#[test]
fn rules_match_on_every_condition_kind() {
    use Action::{Allow, Ask, Deny};
    let tools = |tools: &[&str], action| Rule { tools: strings(tools), ..rule(action) };
    let paths = |paths: &[&str], action| Rule { paths: strings(paths), ..rule(action) };
    let commands = |commands: &[&str], action| Rule { commands: strings(commands), ..rule(action) };
    let hosts = |hosts: &[&str], action| Rule { hosts: strings(hosts), ..rule(action) };
    let methods = |methods: &[&str], action| Rule { methods: strings(methods), ..rule(action) };
    let agents = |agents: &[&str], action| Rule { agents: strings(agents), ..rule(action) };
    let agent = |name: &str| Subject::Agent(name.to_owned());
    let table: Vec<(Vec<Rule>, &str, Subject, Action)> = vec![
        (vec![], "create_file", path("a"), Allow),
        (vec![rule(Ask)], "anything", Subject::None, Ask),
        (vec![tools(&["create_file"], Ask)], "create_file", path("a"), Ask),
        (vec![tools(&["create_file"], Ask)], "edit_file", path("a"), Allow),
        (vec![tools(&["*_file"], Deny)], "edit_file", path("a"), Deny),
        (vec![tools(&["{fetch,execute_command}"], Deny)], "fetch", request("GET", "a.com"), Deny),
        (vec![paths(&["secrets/**"], Ask)], "create_file", path("secrets/a/b"), Ask),
        (vec![paths(&["/secrets/**"], Ask)], "create_file", path("secrets/a"), Ask),
        (vec![paths(&["secrets/**"], Ask)], "list_files", path("secrets"), Ask),
        (vec![paths(&["secrets/**"], Ask)], "create_file", path("secret/a"), Allow),
        (vec![paths(&["*.key"], Ask)], "read_file", path("a.key"), Ask),
        (vec![paths(&["*.key"], Ask)], "read_file", path("a/b.key"), Allow),
        (vec![paths(&["**/*.key"], Ask)], "read_file", path("a/b.key"), Ask),
        (vec![paths(&["secrets/**"], Deny)], "grep", tree("."), Deny),
        (vec![paths(&["secrets/**"], Deny)], "grep", tree("secrets"), Deny),
        (vec![paths(&["secrets/**"], Deny)], "grep", tree("secrets/a"), Deny),
        (vec![paths(&["secrets/**"], Deny)], "grep", tree("src"), Allow),
        (vec![paths(&["src/secrets/**"], Deny)], "grep", tree("src"), Deny),
        (vec![paths(&["src/a.key"], Deny)], "grep", tree("src"), Deny),
        (vec![paths(&["src/a.key"], Deny)], "grep", tree("src/b"), Allow),
        (vec![paths(&["**/*.key"], Deny)], "grep", tree("src"), Deny),
        (vec![paths(&["docs/**"], Allow), rule(Deny)], "grep", tree("docs"), Allow),
        (vec![paths(&["docs/*"], Allow), rule(Deny)], "grep", tree("docs"), Deny),
        (vec![paths(&["docs/**"], Allow), rule(Deny)], "grep", tree("."), Deny),
        (vec![paths(&["docs/**/*"], Allow), rule(Deny)], "grep", tree("docs/a"), Allow),
        (vec![paths(&["*/**"], Allow), rule(Deny)], "grep", tree("."), Deny),
        // Whatever a file below it is named.
        (vec![paths(&["**/[!.]*"], Allow), rule(Deny)], "grep", tree("src"), Deny),
        (vec![paths(&["docs", "docs/**/c"], Allow), rule(Deny)], "grep", tree("docs"), Deny),
        // A verdict for one part does not hide that for another.
        (vec![paths(&["docs/a/**"], Ask), paths(&["docs/b/**"], Deny)], "grep", tree("docs"), Deny),
        (
            vec![paths(&["docs/a/**"], Ask), paths(&["docs/**"], Allow), rule(Deny)],
            "grep",
            tree("docs"),
            Ask,
        ),
        (
            vec![paths(&["docs/**"], Allow), paths(&["docs/b/**"], Deny)],
            "grep",
            tree("docs"),
            Allow,
        ),
        (vec![paths(&["**"], Ask)], "execute_command", command("ls"), Allow),
        (
            vec![commands(&["echo hi!", "a!b!c"], Deny)],
            "execute_command",
            command("echo hi!"),
            Deny,
        ),
        (vec![commands(&["a!b!c"], Deny)], "execute_command", command("a!b!c"), Deny),
        (vec![commands(&["a!b!c"], Deny)], "execute_command", command("aXc"), Allow),
        (vec![commands(&["rm ?"], Deny)], "execute_command", command("rm é"), Deny),
        (
            vec![hosts(&["example.com.", "[2001:DB8::1]"], Deny)],
            "fetch",
            request("GET", "example.com"),
            Deny,
        ),
        (vec![hosts(&["2001:db8::1"], Deny)], "fetch", request("GET", "[2001:db8::1]"), Deny),
        (vec![commands(&["git *"], Deny)], "execute_command", command("git push origin a/b"), Deny),
        (vec![commands(&["git *"], Deny)], "execute_command", command("  git push  "), Deny),
        (vec![commands(&["git *"], Deny)], "execute_command", command("github"), Allow),
        (vec![commands(&["rm *"], Ask)], "execute_command", command("rm a; ls\nls"), Ask),
        (vec![commands(&["make [x]"], Deny)], "execute_command", command("make [x]"), Deny),
        (vec![commands(&["make [x]"], Deny)], "execute_command", command("make x"), Allow),
        (vec![commands(&["a**b"], Deny)], "execute_command", command("a/c/b"), Deny),
        (vec![hosts(&["*.example.com"], Deny)], "fetch", request("GET", "API.example.com."), Deny),
        (vec![hosts(&["*.Example.com"], Deny)], "fetch", request("GET", "api.example.com"), Deny),
        (vec![hosts(&["*.example.com"], Deny)], "fetch", request("GET", "example.com"), Allow),
        (vec![methods(&["post", "PUT"], Ask)], "fetch", request("POST", "a.com"), Ask),
        (vec![methods(&["post"], Ask)], "fetch", request("GET", "a.com"), Allow),
        (vec![methods(&["post"], Ask)], "execute_command", command("post"), Allow),
        (vec![agents(&["lawyer", "dev-*"], Deny)], "tasks.spawn", agent("lawyer"), Deny),
        (vec![agents(&["lawyer", "dev-*"], Deny)], "tasks.hand_off", agent("dev-ops"), Deny),
        (vec![agents(&["lawyer"], Deny)], "tasks.spawn", agent("lawyer 2"), Allow),
        (vec![agents(&["lawyer"], Deny)], "tasks.spawn", agent("Lawyer"), Allow),
        (vec![agents(&["*"], Deny)], "tasks.spawn", agent(""), Deny),
        (vec![agents(&["*"], Deny)], "tasks.send", Subject::None, Allow),
        (vec![agents(&["ls"], Deny)], "execute_command", command("ls"), Allow),
        (
            vec![agents(&["reader"], Allow), tools(&["tasks.*"], Ask)],
            "tasks.spawn",
            agent("lawyer"),
            Ask,
        ),
        (
            vec![agents(&["reader"], Allow), tools(&["tasks.*"], Ask)],
            "tasks.spawn",
            agent("reader"),
            Allow,
        ),
        (vec![hosts(&["*"], Deny)], "tasks.spawn", agent("reader"), Allow),
        // The first matching rule decides.
        (vec![tools(&["read_file"], Allow), rule(Deny)], "read_file", path("a"), Allow),
        (vec![rule(Deny), tools(&["read_file"], Allow)], "read_file", path("a"), Deny),
        // Every given condition must match.
        (
            vec![Rule { paths: strings(&["a/**"]), ..tools(&["read_file"], Deny) }],
            "edit_file",
            path("a/b"),
            Allow,
        ),
        (
            vec![Rule { methods: strings(&["GET"]), ..hosts(&["a.com"], Deny) }],
            "fetch",
            request("PUT", "a.com"),
            Allow,
        ),
    ];
    for (rules, tool, subject, expected) in table {
        assert_eq!(evaluate(&rules, tool, &subject), expected, "{rules:?} {tool} {subject:?}");
    }
}

#[test]
fn command_pattern_does_not_allow_compound_commands() {
    let git = Rule { commands: strings(&["git *"]), ..rule(Action::Allow) };
    let rules = [git, rule(Action::Deny)];
    assert_eq!(evaluate(&rules, "execute_command", &command("git status")), Action::Allow);
    for hidden in [
        "git status; rm -r .",
        "git status && rm a",
        "git status & rm a",
        "git log | sh",
        "git log || rm a",
        "git log `rm a`",
        "git log $(rm a)",
        "git log ${x:=y}",
        "git log $[a[$(rm)]]",
        "git log\nrm a",
        "git log\rrm a",
        "git log > ~/.profile",
        "git apply <(rm a)",
    ] {
        assert_eq!(evaluate(&rules, "execute_command", &command(hidden)), Action::Deny, "{hidden}");
    }
}

#[test]
fn file_with_two_names_gets_the_stricter_verdict() {
    let both = Subject::Path(strings(&["harmless/key", "secrets/key"]));
    let secrets = |action| Rule { paths: strings(&["secrets/**"]), ..rule(action) };
    assert_eq!(evaluate(&[secrets(Action::Ask)], "read_file", &both), Action::Ask);
    assert_eq!(
        evaluate(&[secrets(Action::Allow), rule(Action::Deny)], "read_file", &both),
        Action::Deny
    );
}

#[test]
fn strictest_verdict_of_all_names_and_forms_holds() {
    let paths = |glob: &str, action| Rule { paths: strings(&[glob]), ..rule(action) };
    let both = Subject::Path(strings(&["a/link", "b/key"]));
    assert_eq!(
        evaluate(&[paths("a/**", Action::Ask), paths("b/**", Action::Deny)], "read_file", &both),
        Action::Deny
    );
    let status = Rule { commands: strings(&["git status"]), ..rule(Action::Allow) };
    let forms = Subject::Command(strings(&["git status", "PATH='x' git status"]));
    assert_eq!(evaluate(&[status, rule(Action::Deny)], "execute_command", &forms), Action::Deny);
}

#[test]
fn rule_matches_any_name_of_a_tool() {
    let bash = Rule { tools: strings(&["bash"]), ..rule(Action::Deny) };
    let verdict = Policy::new(vec![bash]).evaluate(&["execute_command", "bash"], &command("ls"));
    assert_eq!(verdict.action, Action::Deny);
}

#[test]
fn stricter_verdict_of_two_policies_wins() {
    let verdict = |action, reason: &str| Verdict { action, reason: reason.to_owned() };
    let ask = verdict(Action::Ask, "agent");
    assert_eq!(stricter_verdict(ask.clone(), verdict(Action::Deny, "task")).reason, "task");
    assert_eq!(stricter_verdict(ask.clone(), verdict(Action::Allow, "task")).reason, "agent");
    assert_eq!(stricter_verdict(ask, verdict(Action::Ask, "task")).reason, "agent");
}

#[test]
fn invalid_patterns_are_reported_with_field_and_index() {
    let bad = Rule {
        tools: strings(&["ok", "{a"]),
        paths: strings(&["[z-a]"]),
        commands: strings(&["[anything {goes"]),
        hosts: strings(&[
            "*.example.com",
            "münchen.de",
            "example.com:8080",
            "2001:db8::1",
            "https://a.com",
        ]),
        ..rule(Action::Ask)
    };
    let fields: Vec<String> = invalid_patterns(&bad).into_iter().map(|(field, _)| field).collect();
    assert_eq!(fields, ["tools[1]", "paths[0]", "hosts[1]", "hosts[2]", "hosts[4]"]);
    assert_eq!(
        evaluate(&[bad], "x", &Subject::None),
        Action::Ask,
        "what cannot be read is not let pass"
    );
}

#[test]
fn rule_is_stored_as_written() {
    let read: Rule = serde_json::from_str(r#"{"action":"ask","tools":["fetch"]}"#).expect("a rule");
    assert_eq!(read, Rule { tools: strings(&["fetch"]), ..rule(Action::Ask) });
    assert_eq!(
        serde_json::to_string(&read).expect("JSON"),
        r#"{"action":"ask","tools":["fetch"]}"#
    );
}
