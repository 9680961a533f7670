//! Results of the tools, and errors of invalid calls.

mod commands;
mod definitions;
pub(crate) mod fetch;
mod files;
mod fuzz;
mod html;
mod llm;
mod removal;
mod robustness;
mod save;
pub(crate) mod secrets;
mod whole;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use super::*;

struct Bench {
    directory: TempDir,
    tools: Toolbox,
}

impl Bench {
    fn new() -> Self {
        Self::with(Policy::default(), Egress::new(&[]).expect("an HTTP client"))
    }

    fn with(policy: Policy, egress: Egress) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let workspace = Workspace::open(directory.path()).expect("a workspace");
        let tools = Toolbox::new(workspace, policy, egress, CommandSandbox::unavailable("a test"));
        Self { directory, tools }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        std::fs::write(path, content).expect("written");
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).expect("readable")
    }

    async fn call(&self, name: &str, args: Value) -> Value {
        let result = self
            .tools
            .call(name, args, &CallContext::default())
            .await
            .expect("a call that succeeds");
        // Every result in any test must match the definition of its tool.
        if let Err(difference) =
            definitions::accept(&definition(name).expect("a tool").output, &result)
        {
            panic!("{name} returned what its definition does not describe: {difference}");
        }
        result
    }

    async fn fails(&self, name: &str, args: Value) -> ToolError {
        match self.tools.call(name, args, &CallContext::default()).await {
            Ok(result) => panic!("{name} should fail, but returned {result}"),
            Err(error) => error,
        }
    }
}

#[tokio::test]
async fn every_declared_tool_has_an_implementation() {
    let bench = Bench::new();
    for tool in definitions() {
        let wrong = bench.fails(tool.name, json!([1, 2, 3, 4, 5, 6, 7, 8])).await;
        let expected =
            if tool.provider == Provider::Host { "InvalidArguments" } else { "UnknownTool" };
        assert_eq!(wrong.name, expected, "{}", tool.name);
    }
    let unknown = bench.fails("readfile", json!([])).await;
    assert_eq!(unknown.name, "UnknownTool");
    assert!(unknown.message.contains("Did you mean read_file?"), "{unknown}");
}

#[tokio::test]
async fn arguments_are_accepted_by_position_and_by_name() {
    let bench = Bench::new();
    bench.write("a", "1\n2\n3\n");
    for args in [
        json!(["a", 2, 2]),
        json!(["a", 2.0, 2.0]),
        json!({"path": "a", "start_line": 2, "end_line": 2}),
        json!([{"path": "a", "start_line": 2, "end_line": 2}]),
    ] {
        assert_eq!(bench.call("read_file", args).await, json!("2\n"));
    }
    assert_eq!(bench.call("read_file", json!(["a", null, 1])).await, json!("1\n"));
}

#[tokio::test]
async fn invalid_arguments_error_has_parameter_value_and_example() {
    let bench = Bench::new();
    let cases = [
        ("read_file", json!([]), "is missing \"path\""),
        (
            "read_file",
            json!([5]),
            "\"path\" to be a non-empty string of at most 4096 bytes, but got 5 (number)",
        ),
        ("read_file", json!([""]), "\"path\" to be a non-empty string"),
        (
            "read_file",
            json!(["a", 0]),
            "\"start_line\" to be a whole number of at least 1, but got 0 (number)",
        ),
        ("read_file", json!(["a", 1.5]), "but got 1.5 (number)"),
        ("read_file", json!(["a", -1]), "but got -1 (number)"),
        ("read_file", json!(["a", 1e300]), "but got 1e+300 (number)"),
        ("read_file", json!(["a", "3"]), "but got \"3\" (string)"),
        ("read_file", json!({"file": "a", "path": "b"}), "has no parameter \"file\""),
        ("read_file", json!({"path": "b", "startline": 1}), "did you mean \"start_line\"?"),
        ("edit_file", json!(["a", []]), "\"diffs\" to be a non-empty list"),
        ("edit_file", json!(["a", [{"old": "x"}]]), "is missing \"diffs[0].new\""),
        ("edit_file", json!(["a", ["x"]]), "\"diffs[0]\" to be an object"),
        (
            "grep",
            json!(["x", ".", {"include": [1]}]),
            "\"options.include\" to be a string or a list of strings",
        ),
        ("execute_command", json!(["x", {"timeout_seconds": 601}]), "from 1 to 600"),
        ("execute_command", json!(["x", {"env": {"A": 1}}]), "\"options.env.A\" to be a string"),
        ("fetch", json!(["https://a.com", {"method": "BREW"}]), "one of \"GET\""),
    ];
    for (tool, args, expected) in cases {
        let error = bench.fails(tool, args.clone()).await;
        assert_eq!(error.name, "InvalidArguments", "{tool} {args}");
        assert!(error.message.contains(expected), "{tool} {args}: {}", error.message);
        assert!(error.message.contains("Example: "), "{}", error.message);
    }
}

#[tokio::test]
async fn giant_arguments_are_rejected_with_a_short_message() {
    let bench = Bench::new();
    let giant = "x".repeat(5_000_000);
    let nested = (0..100).fold(json!(1), |inner, _| json!([inner]));
    for args in [
        json!([giant]),
        json!({"path": "a", giant.as_str(): 1}),
        nested,
        json!("\u{0}"),
        json!([{"a": giant}]),
    ] {
        let error = bench.fails("read_file", args).await;
        assert!(error.message.len() < 2_000, "{} bytes", error.message.len());
    }
}

#[tokio::test]
async fn canceled_call_does_nothing() {
    let bench = Bench::new();
    let cx = CallContext::default();
    cx.cancel.cancel();
    let error =
        bench.tools.call("create_file", json!(["a", "x"]), &cx).await.expect_err("cancelled");
    assert_eq!(error.name, "Cancelled");
    assert!(!bench.path("a").exists());
}

#[tokio::test]
async fn stack_overflowing_globs_are_rejected() {
    let bench = Bench::new();
    bench.write("a.rs", "x");
    let bomb = format!("{}{}", "{".repeat(300_000), "}".repeat(300_000));
    let braces = format!("{}{}", "{".repeat(400), "}".repeat(400));
    let many = vec!["*.rs"; 101];
    for glob in [json!(bomb), json!([bomb]), json!(braces), json!(["*.rs", braces]), json!(many)] {
        for option in ["include", "exclude"] {
            let error = bench.fails("grep", json!(["x", ".", {option: glob}])).await;
            assert_eq!(error.name, "InvalidArguments");
            assert!(error.message.len() < 2_000, "{} bytes", error.message.len());
        }
    }
    assert_eq!(bench.fails("find_file", json!([braces])).await.name, "InvalidArguments");
    let found = bench.call("grep", json!(["x", ".", {"include": "*.{rs,{toml,md}}"}])).await;
    assert_eq!(found["files_searched"], json!(1));
}

#[tokio::test]
async fn file_calls_wait_while_the_service_is_busy() {
    let bench = Bench::new();
    bench.write("a", "x");
    let busy = FILE_CALLS.acquire_many(64).await.expect("open");
    let cx = CallContext::default();
    let waiting = bench.tools.call("read_file", json!(["a"]), &cx);
    tokio::pin!(waiting);
    assert!(futures::poll!(&mut waiting).is_pending());
    drop(busy);
    assert_eq!(waiting.await, Ok(json!("x")));
}
