//! Log messages of a service that starts on a machine without confinement.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

/// Ends with the test.
struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        // Both fail only if the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the service without bubblewrap, and returns the log line about the confinement of
/// commands. It logs the line before it connects to NATS, which does not run.
fn confinement_log_line(allowed: bool) -> String {
    let data = tempfile::tempdir().expect("a folder");
    let executable = std::env::current_exe().expect("the path of this executable");
    let cache = executable.ancestors().nth(3).unwrap_or(Path::new(".")).join("tmp/sandbox-cache");
    let child = Command::new(env!("CARGO_BIN_EXE_construct-interpreter"))
        .env_clear()
        .env("PATH", "/nonexistent")
        .env("CONSTRUCT_DATA_DIR", data.path())
        // Compiled code is cached beside the build's other artifacts.
        .env("CONSTRUCT_INTERPRETER_CACHE_DIR", cache)
        .env("CONSTRUCT_NATS_URL", "nats://127.0.0.1:1")
        .env("CONSTRUCT_INTERPRETER_CONCURRENCY", "1")
        .env("CONSTRUCT_INTERPRETER_ALLOW_UNCONFINED_COMMANDS", allowed.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the service starts");
    let mut service = Service(child);
    let log = BufReader::new(service.0.stderr.take().expect("piped"));
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || log.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let mut other_lines = Vec::new();
    // It may have to compile its guest first.
    while let Ok(line) = lines.recv_timeout(Duration::from_secs(120)) {
        if line.contains("commands cannot be confined") {
            return line;
        }
        other_lines.push(line);
    }
    panic!("no log line about it: {other_lines:#?}");
}

#[test]
fn log_says_whether_unconfined_commands_run() {
    let refusing = confinement_log_line(false);
    let reason = "commands cannot be confined: bubblewrap (bwrap) is not installed";
    assert!(
        refusing.contains("WARN") && refusing.contains(&format!("{reason}; commands are refused")),
        "{refusing}"
    );
    let accepting = confinement_log_line(true);
    let expected = format!("{reason}; they run UNCONFINED, as the operator allowed");
    assert!(accepting.contains("WARN") && accepting.contains(&expected), "{accepting}");
}
