//! The tools that run programs, and their environment variables.

use super::*;
use crate::command::Confinement;
use crate::test_requirements::skip_or_fail;

/// A toolbox whose commands run without a sandbox on every host.
fn unconfined(search_path: Vec<PathBuf>) -> Bench {
    let mut policy = Policy::default();
    policy.commands.confinement = Confinement::AllowUnconfined;
    policy.commands.search_path = search_path;
    Bench::with(policy, Egress::new(&[]).expect("an HTTP client"))
}

#[tokio::test]
async fn commands_return_results_and_errors() {
    let mut policy = Policy::default();
    let refusing = Bench::with(policy.clone(), Egress::new(&[]).expect("an HTTP client"));
    let refused = refusing.fails("execute_command", json!(["touch ran"])).await;
    assert_eq!(refused.name, "CommandsUnavailable");
    assert!(refused.message.contains("nothing ran"));
    assert!(!refusing.path("ran").exists());

    policy.commands.confinement = Confinement::AllowUnconfined;
    let bench = Bench::with(policy, Egress::new(&[]).expect("an HTTP client"));
    bench.write("sub/a", "");
    let options = json!({"cwd": "sub", "env": {"A": "b"}, "stdin": "in"});
    let mut result =
        bench.call("execute_command", json!(["ls; echo $A >&2; cat; exit 3", options])).await;
    assert!(result["duration_ms"].take().is_number());
    let expected = json!({
        "exit_code": 3, "stdout": "a\nin", "stderr": "b\n", "timed_out": false, "signal": null,
        "limit_exceeded": null, "duration_ms": null,
    });
    assert_eq!(result, expected);

    let result = bench.call("execute_command", json!(["sleep 100", {"timeout_seconds": 1}])).await;
    assert_eq!((&result["timed_out"], &result["exit_code"]), (&json!(true), &json!(null)));
    for (args, name) in [
        (json!(["true", {"cwd": "missing"}]), "FileNotFound"),
        (json!(["true", {"cwd": "/etc"}]), "OutsideWorkspace"),
        (json!(["true", {"cwd": "sub/a"}]), "NotADirectory"),
        (json!(["true", {"env": {"A B": "x"}}]), "InvalidArguments"),
        (json!(["true\u{0}"]), "InvalidArguments"),
    ] {
        assert_eq!(bench.fails("execute_command", args).await.name, name);
    }
}

/// Puts a program into the workspace that prints how it was called.
fn program(bench: &Bench, name: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    bench.write(
        name,
        format!("#!/bin/sh\necho {name}; for word; do echo \"<$word>\"; done; cat; exit 3\n"),
    );
    std::fs::set_permissions(bench.path(name), std::fs::Permissions::from_mode(0o755))
        .expect("set");
}

/// A toolbox whose search path begins with its workspace.
fn bench_with_programs(names: &[&str]) -> Bench {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut bench = unconfined(vec![directory.path().to_owned()]);
    bench.tools.workspace = Workspace::open(directory.path()).expect("a workspace");
    bench.directory = directory;
    names.iter().for_each(|name| program(&bench, name));
    bench
}

#[tokio::test]
async fn programs_receive_exact_arguments() {
    let bench = bench_with_programs(&["git", "npm", "node", "python3"]);
    let words = [
        "",
        "a b",
        "it's",
        "$HOME",
        "`x`",
        "*",
        "\\",
        "-m",
        "a\nb",
        "\u{e4}",
        "!",
        "&& exit 0",
        "#",
    ];
    let shown: String = words.iter().map(|word| format!("<{word}>\n")).collect();
    for (tool, name) in [("git", "git"), ("npm", "npm"), ("node", "node"), ("python", "python3")] {
        let result = bench.call(tool, json!([words])).await;
        assert_eq!(
            (&result["stdout"], &result["exit_code"]),
            (&json!(format!("{name}\n{shown}")), &json!(3))
        );
    }
    let options = json!({"stdin": "in", "cwd": "sub"});
    bench.write("sub/x", "");
    assert_eq!(bench.call("git", json!([[], options])).await["stdout"], json!("git\nin"));
}

#[tokio::test]
async fn code_of_any_length_is_passed_through_stdin() {
    let bench = bench_with_programs(&["node", "python3"]);
    let code = format!("print('{}')", "x".repeat(200_000));
    for (tool, name) in [("node", "node"), ("python", "python3")] {
        let result = bench.call(tool, json!([code, {"timeout_seconds": 60}])).await;
        assert_eq!(result["stdout"], json!(format!("{name}\n<->\n{code}")));
        let both = bench.fails(tool, json!([code, {"stdin": "x"}])).await;
        assert!(both.name == "InvalidArguments" && both.message.contains("create_file"), "{both}");
    }
    let many = bench.fails("node", json!([["x".repeat(100_000)]])).await;
    assert!(many.name == "InvalidArguments" && many.message.contains("options.stdin"), "{many}");
    let text = bench.fails("git", json!(["commit -m x"])).await;
    assert!(
        text.message.contains("one for each argument") && text.message.contains("git([\"commit\""),
        "{text}"
    );
    assert_eq!(bench.fails("git", json!([["a\u{0}"]])).await.name, "InvalidArguments");
}

#[tokio::test]
async fn missing_program_has_its_own_error() {
    let bench = unconfined(Vec::new());
    bench.call("setenv", json!(["PATH", "/nonexistent"])).await;
    for tool in ["git", "npm", "node", "python"] {
        let missing = bench.fails(tool, json!([["--version"]])).await;
        assert_eq!(missing.name, "ProgramNotFound", "{missing}");
        assert!(
            missing.message.contains("not installed") && missing.message.contains("nothing ran"),
            "{missing}"
        );
    }
    // A program that exits with the same status has run.
    let bench = bench_with_programs(&[]);
    bench.write("git", "#!/bin/sh\necho no >&2; exit 127\n");
    bench.call("bash", json!(["chmod +x git"])).await;
    let result = bench.call("git", json!([[]])).await;
    assert_eq!((&result["exit_code"], &result["stderr"]), (&json!(127), &json!("no\n")));
}

#[test]
fn policy_subject_of_a_program_is_its_command_line() {
    for (tool, args, expected) in [
        ("git", json!([["push", "--force", "origin"]]), "git push --force origin"),
        ("git", json!([["commit", "-m", "it's"]]), r"git commit -m 'it'\''s'"),
        ("node", json!(["process.exit()"]), "node -"),
        ("python", json!([["-c", "a b"]]), "python -c 'a b'"),
        ("npm", json!({"args": ["ci"]}), "npm ci"),
    ] {
        let tool = definition(tool).expect("a tool");
        let canonical = tool.canonical(&args).expect("arguments that fit");
        assert_eq!(tool.subject(&canonical), PolicySubject::Command(expected.to_owned()));
    }
}

#[tokio::test]
async fn setenv_applies_to_following_commands() {
    let bench = unconfined(Vec::new());
    assert_eq!(bench.call("getenv", json!(["GREETING"])).await, json!(null));
    // Cargo sets this for every test; it represents the environment of a service.
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    assert_eq!(bench.call("getenv", json!(["CARGO_MANIFEST_DIR"])).await, json!(null));
    let path = bench.call("bash", json!(["printf %s \"$PATH\""])).await["stdout"].clone();
    assert_eq!(bench.call("getenv", json!(["PATH"])).await, path);

    let set = bench.call("setenv", json!(["GREETING", "hello 'you'"])).await;
    assert_eq!(set, json!({"name": "GREETING", "value": "hello 'you'"}));
    assert_eq!(bench.call("getenv", json!(["GREETING"])).await, json!("hello 'you'"));
    let shown = json!(["echo \"$GREETING\""]);
    assert_eq!(bench.call("bash", shown.clone()).await["stdout"], json!("hello 'you'\n"));
    let own = bench.call("bash", json!(["echo \"$GREETING\"", {"env": {"GREETING": "own"}}])).await;
    assert_eq!(own["stdout"], json!("own\n"));

    bench.call("setenv", json!(["PATH", "/elsewhere"])).await;
    assert_eq!(bench.call("getenv", json!(["PATH"])).await, json!("/elsewhere"));
    for name in ["GREETING", "PATH"] {
        bench.call("setenv", json!([name])).await;
    }
    assert_eq!(bench.call("bash", shown).await["stdout"], json!("\n"));
    assert_eq!(bench.call("getenv", json!(["PATH"])).await, path);
    let root = bench.tools.workspace().root().to_str().expect("UTF-8");
    assert_eq!(bench.call("pwd", json!([])).await, json!(root));
    assert_eq!(bench.call("bash", json!(["pwd"])).await["stdout"], json!(format!("{root}\n")));
}

#[tokio::test]
async fn variables_are_bounded_and_rejection_changes_nothing() {
    let bench = Bench::new();
    for args in
        [json!(["A B", "x"]), json!(["1A", "x"]), json!(["A", "x\u{0}"]), json!(["A=", "x"])]
    {
        assert_eq!(bench.fails("setenv", args).await.name, "InvalidArguments");
    }
    bench.call("setenv", json!(["BIG", "x".repeat(65_000)])).await;
    assert!(
        bench
            .fails("setenv", json!(["MORE", "x".repeat(1_000)]))
            .await
            .message
            .contains("200 variables")
    );
    assert_eq!(bench.call("getenv", json!(["MORE"])).await, json!(null));
    bench.call("setenv", json!(["BIG", "x".repeat(1_000)])).await;
    for n in 0..199 {
        bench.call("setenv", json!([format!("V{n}"), ""])).await;
    }
    assert_eq!(bench.fails("setenv", json!(["ONE_MORE", ""])).await.name, "InvalidArguments");
    bench.call("setenv", json!(["BIG"])).await;
    bench.call("setenv", json!(["ONE_MORE", ""])).await;
}

#[tokio::test]
async fn new_toolbox_restores_variables_from_the_journal() {
    let old = Bench::new();
    let mut journal = Vec::new();
    for args in
        [json!(["A", "1"]), json!(["B", "2"]), json!(["A", "3"]), json!(["B"]), json!(["C", ""])]
    {
        journal.push(("setenv", old.call("setenv", args).await));
    }
    old.write("file", "text");
    journal.push(("read_file", old.call("read_file", json!(["file"])).await));
    // A failed call has set nothing.
    let failed = old.fails("setenv", json!(["A B", "x"])).await;
    journal.push(("setenv", json!({"name": failed.name, "message": failed.message})));
    journal.push(("setenv", json!(null)));
    let new = Bench::new();
    for (name, result) in &journal {
        new.tools.replay(name, result);
    }
    for name in ["A", "B", "C", "PATH"] {
        assert_eq!(
            new.call("getenv", json!([name])).await,
            old.call("getenv", json!([name])).await,
            "{name}"
        );
    }
    assert_eq!(new.call("getenv", json!(["A"])).await, json!("3"));
}

#[tokio::test]
async fn installed_programs_run_in_the_sandbox() {
    let sandbox = crate::command::tests::sandbox().await;
    if !sandbox.is_available() {
        return;
    }
    let mut bench = Bench::new();
    bench.tools.sandbox = sandbox;
    for (tool, args, expected) in [
        ("git", json!([["init", "--quiet"], {"env": {"GIT_CONFIG_NOSYSTEM": "1"}}]), ""),
        ("git", json!([["status", "--short"]]), "?? it's\n"),
        ("python", json!(["import os\nprint(1 + 1, os.environ['GREETING'])"]), "2 hello\n"),
        ("node", json!(["console.log(1 + 1, process.env.GREETING)"]), "2 hello\n"),
        ("python", json!([["-c", "import sys; print(sys.argv[1:])", "a b", ""]]), "['a b', '']\n"),
    ] {
        bench.write("it's", "");
        bench.call("setenv", json!(["GREETING", "hello"])).await;
        match bench.tools.call(tool, args.clone(), &CallContext::default()).await {
            Ok(result) => {
                assert_eq!(
                    (&result["stdout"], &result["exit_code"]),
                    (&json!(expected), &json!(0)),
                    "{tool}: {result}"
                )
            }
            Err(error) => {
                assert_eq!(error.name, "ProgramNotFound", "{error}");
                skip_or_fail(error);
            }
        }
    }
}
