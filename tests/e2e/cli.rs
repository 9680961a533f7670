//! The command line, used by people and scripts.

mod attachments;
mod control;
mod conversation;
mod doctor;
mod entities;
mod interrupt;
mod scan;

use std::process::{ExitStatus, Stdio};

use construct_bus::User;
use construct_tests::{
    client::TURN_TIMEOUT,
    mesh::{Mesh, Service, binary},
    terminal::Terminal,
    wait::until,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStderr},
    time::timeout,
};

/// The output of a command.
#[derive(Debug)]
struct CommandOutput {
    status: ExitStatus,
    output: String,
    errors: String,
}

impl CommandOutput {
    fn json(&self) -> Value {
        serde_json::from_str(&self.output).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    fn code(&self) -> i32 {
        self.status.code().unwrap_or(-1)
    }
}

fn command(gateway: &str, arguments: &[&str]) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(binary("construct").unwrap());
    command
        .env_clear()
        .env("CONSTRUCT_GATEWAY_URL", gateway)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// A running command.
struct Job {
    child: Child,
    errors: BufReader<ChildStderr>,
    /// The standard error read so far.
    told: String,
}

impl Job {
    /// Sends a signal (`INT`, …).
    fn signal(&self, name: &str) {
        let id = self.child.id().expect("the command runs").to_string();
        assert!(
            std::process::Command::new("kill")
                .args([&format!("-{name}"), &id])
                .status()
                .unwrap()
                .success()
        );
    }

    /// Waits for a line on standard error that contains `part`.
    async fn wait_for_error_line(&mut self, part: &str) -> String {
        loop {
            let from = self.told.len();
            let read = timeout(TURN_TIMEOUT, self.errors.read_line(&mut self.told)).await;
            assert!(matches!(read, Ok(Ok(1..))), "{part:?} is not printed, but: {}", self.told);
            if self.told[from..].contains(part) {
                return self.told[from..].to_owned();
            }
        }
    }

    /// Waits until the command ends.
    async fn wait(mut self) -> CommandOutput {
        // Read both at once: a process that writes more than a pipe holds waits for a reader.
        let rest = async {
            tokio::join!(self.errors.read_to_string(&mut self.told), self.child.wait_with_output())
        };
        let (errors, done) = timeout(TURN_TIMEOUT, rest).await.expect("the command ends");
        errors.unwrap();
        let done = done.unwrap();
        CommandOutput {
            status: done.status,
            output: String::from_utf8(done.stdout).unwrap(),
            errors: self.told,
        }
    }
}

/// Starts a command and writes its input.
async fn spawn(mesh: &Mesh, arguments: &[&str], input: &str) -> Job {
    let mut child = command(&mesh.gateway_url(), arguments).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A command that ends without reading closes its end.
    let _ = stdin.write_all(input.as_bytes()).await;
    let errors = BufReader::new(child.stderr.take().unwrap());
    Job { child, errors, told: String::new() }
}

async fn construct(mesh: &Mesh, arguments: &[&str], input: &str) -> CommandOutput {
    spawn(mesh, arguments, input).await.wait().await
}

/// Runs a command in its own terminal.
fn terminal(mesh: &Mesh, arguments: &[&str]) -> Terminal {
    let environment = [("CONSTRUCT_GATEWAY_URL", mesh.gateway_url())];
    let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
    Terminal::run(&binary("construct").unwrap(), arguments, &environment).unwrap()
}

#[tokio::test]
async fn cli_runs_jobs_and_questions() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"conversations": [
        {"match": "count", "turns": [
            {"text": "Counting.", "code": "create_file('n.txt', '3'); print(read_file('n.txt')); 1 + 2", "usage": {"input": 10, "output": 2}},
            {"text": "There are {{last_result}}.", "usage": {"input": 20, "output": 3}},
        ]},
        {"match": "locked", "turns": [{"text": "x", "fault": {"class": "authentication", "times": 0, "message": "the key is refused"}}]},
        {"match": "endless", "turns": [{"code": "1"}, {"code": "2"}, {"code": "3"}]},
        {"match": "stall", "turns": [{"text": "Slowly.", "fault": {"stall_ms": 600_000, "times": 0}}]},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let workspace = mesh.workspace().display().to_string();
    let run = async |arguments: &[&str], input: &str| construct(&mesh, arguments, input).await;

    let text =
        run(&["exec", "--agent", "worker", "--workspace", &workspace, "count them"], "").await;
    assert_eq!(text.code(), 0, "{text:?}");
    assert!(
        text.output.contains("There are 3\n3."),
        "the answer goes to standard output: {text:?}"
    );
    assert!(
        !text.output.contains("create_file") && text.errors.contains("create_file"),
        "the work is told aside: {text:?}"
    );
    assert_eq!(std::fs::read_to_string(mesh.workspace().join("n.txt")).unwrap(), "3");

    // The only agent need not be named, and the job can come from a pipe.
    let done = run(&["exec", "-o", "json"], "count these\nas well\n").await;
    assert_eq!(done.code(), 0, "{done:?}");
    let report = done.json();
    assert_eq!(
        (&report["outcome"], &report["text"]),
        (&json!("completed"), &json!("There are 3\n3."))
    );
    assert_eq!(report["error"], Value::Null);
    assert_eq!(report["tool_uses"], json!({"create_file": 1, "read_file": 1}));
    let cost = 30 * 3_000_000 + 5 * 15_000_000;
    assert_eq!(report["usage"]["costPicoUsd"].as_str().unwrap(), cost.to_string(), "{report}");
    let task = report["task"].as_str().unwrap().to_owned();

    let failed = run(&["exec", "-o", "json", "locked"], "").await;
    assert_eq!(failed.code(), 1, "{failed:?}");
    let report = failed.json();
    assert_eq!(
        (&report["outcome"], &report["error"]["code"]),
        (&json!("failed"), &json!("AUTHENTICATION"))
    );
    let failed = run(&["exec", "locked"], "").await;
    assert_eq!((failed.code(), failed.output.as_str()), (1, ""));
    assert!(failed.errors.contains("the key is refused"), "{failed:?}");

    let limited = run(&["exec", "--max-turns", "2", "-o", "json", "endless"], "").await;
    assert_eq!(
        (limited.code(), &limited.json()["outcome"]),
        (5, &json!("max_turns")),
        "{limited:?}"
    );
    let timed = run(&["exec", "--timeout", "1s", "-o", "json", "stall"], "").await;
    assert_eq!((timed.code(), &timed.json()["outcome"]), (4, &json!("cancelled")), "{timed:?}");
    let usage = run(&["exec", "  "], "").await;
    assert_eq!(usage.code(), 2, "{usage:?}");
    let nobody = run(&["exec", "--agent", "nobody", "hello"], "").await;
    assert_eq!(nobody.code(), 1, "{nobody:?}");
    assert!(nobody.errors.contains("nobody"), "{nobody:?}");

    // No gateway is there.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let away =
        command(&format!("http://127.0.0.1:{port}"), &["task", "list"]).output().await.unwrap();
    assert_eq!(away.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&away.stderr).contains("cannot be reached"));

    let why = run(&["explain", &task], "").await;
    assert_eq!(why.code(), 0);
    assert!(why.output.starts_with("The task waits for a message from a user."), "{why:?}");

    // Lists for programs.
    let agents = run(&["agent", "list", "-o", "json"], "").await.json();
    assert_eq!(agents["agents"][0]["spec"]["name"], "worker", "{agents}");
    let tasks = run(&["task", "list", "-o", "json"], "").await.json();
    assert_eq!(tasks["tasks"].as_array().unwrap().len(), 6, "{tasks}");
    let messages = run(&["message", "list", &task, "-o", "json"], "").await;
    assert_eq!(messages.code(), 0, "{messages:?}");
    assert_eq!(messages.json()["messages"].as_array().unwrap().len(), 4);
    let missing = run(&["task", "get", "task_01890a5d-ac96-774b-bcce-b302099a8057"], "").await;
    assert_eq!(missing.code(), 1);
    assert!(missing.errors.contains("not found"), "{missing:?}");
}

#[tokio::test]
async fn tap_prints_messages_of_the_mesh() {
    let mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &json!({"turns": [{"code": "1 + 1"}, {"text": "two"}]}))
        .await
        .unwrap();
    let mut tap = command(&mesh.gateway_url(), &["tap", "-o", "json"])
        .env("CONSTRUCT_NATS_URL", mesh.nats.url_for(User::Tap))
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(tap.stdout.take().unwrap()).lines();
    let client = mesh.client().unwrap();
    // It is subscribed once it prints anything.
    let first = until("the first message", TURN_TIMEOUT, async || {
        client.create_task("worker", None).await.unwrap();
        let line = timeout(std::time::Duration::from_millis(300), lines.next_line()).await;
        line.map_err(|_| "nothing yet")
    })
    .await;
    assert!(first.unwrap().is_some());
    let conversation = client.create_task("worker", None).await.unwrap();
    conversation.ask("what is one and one?").await;
    let wanted = ["TaskWake", "ModelInvoke", "StepResult", "CodeExecute", "JournalEntry", "Event"];
    let mut seen: Vec<String> = Vec::new();
    until("each kind of message to be tapped", TURN_TIMEOUT, async || {
        while let Ok(Ok(Some(line))) =
            timeout(std::time::Duration::from_millis(300), lines.next_line()).await
        {
            let message: Value =
                serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
            assert!(message["subject"].as_str().unwrap().starts_with("construct.v1."), "{message}");
            seen.push(line);
        }
        let missing: Vec<&str> = wanted
            .into_iter()
            .filter(|name| !seen.iter().any(|line| line.contains(&format!(".{name}\""))))
            .collect();
        if missing.is_empty() { Ok(()) } else { Err((missing, seen.last().cloned())) }
    })
    .await;
    // Payloads are decoded: they show the script and the task.
    let script = seen.iter().find(|line| line.contains(".CodeExecute\"")).unwrap();
    assert!(script.contains("\"1 + 1\"") && script.contains(conversation.id()), "{script}");

    // For people, and of one kind.
    let mut tap = command(&mesh.gateway_url(), &["tap", "construct.v1.evt.>"])
        .env("CONSTRUCT_NATS_URL", mesh.nats.url_for(User::Tap))
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(tap.stdout.take().unwrap()).lines();
    let line = until("a line for people", TURN_TIMEOUT, async || {
        client.create_task("worker", None).await.unwrap();
        let line = timeout(std::time::Duration::from_millis(300), lines.next_line()).await;
        line.map_err(|_| "nothing yet")
    })
    .await;
    let line = line.unwrap().unwrap();
    assert!(line.contains("evt.") && line.contains("task.created"), "{line}");

    // NATS has another address.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let nats = format!("nats://127.0.0.1:{port}");
    let away = construct(&mesh, &["tap", "--nats", &nats], "").await;
    assert_eq!(away.code(), 3, "{away:?}");
    assert!(
        away.errors.contains("set the address of NATS with --nats or CONSTRUCT_NATS_URL"),
        "{away:?}"
    );
}

#[tokio::test]
async fn watched_job_is_followed_to_its_end_across_gateway_crash() {
    let mut mesh = Mesh::start().await.unwrap();
    let script = json!({"turns": [
        {"code": "execute_command('touch begun; while [ ! -e go ]; do sleep 0.05; done'); 'opened'"},
        {"text": "It {{last_result}}."},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let workspace = mesh.workspace().display().to_string();
    let job =
        command(&mesh.gateway_url(), &["exec", "--workspace", &workspace, "-o", "json", "go"])
            .spawn()
            .unwrap();
    construct_tests::client::wait_for_file(&mesh.workspace().join("begun"), |_| true).await;
    mesh.crash(Service::Gateway).await.unwrap();
    std::fs::write(mesh.workspace().join("go"), "").unwrap();
    let done = job.wait_with_output().await.unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let report: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!((&report["outcome"], &report["text"]), (&json!("completed"), &json!("It opened.")));
    assert_eq!(report["tool_uses"], json!({"execute_command": 1}));
}
