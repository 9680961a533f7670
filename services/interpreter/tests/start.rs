//! What the service says of commands when it starts on a machine that cannot confine them.

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
        // Both fail only where it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the service where no bubblewrap is found, and gives the line of its log that says whether
/// commands can be confined. It says so before it reaches for NATS, which there is none of.
fn says(allowed: bool) -> String {
    let data = tempfile::tempdir().expect("a folder");
    let executable = std::env::current_exe().expect("there is one");
    let cache = executable.ancestors().nth(3).unwrap_or(Path::new(".")).join("tmp/sandbox-cache");
    let child = Command::new(env!("CARGO_BIN_EXE_construct-interpreter"))
        .env_clear()
        .env("PATH", "/nonexistent")
        .env("CONSTRUCT_DATA_DIR", data.path())
        // Compiled code is kept beside the build's other artifacts.
        .env("CONSTRUCT_INTERPRETER_CACHE_DIR", cache)
        .env("CONSTRUCT_NATS_URL", "nats://127.0.0.1:1")
        .env("CONSTRUCT_INTERPRETER_CONCURRENCY", "1")
        .env("CONSTRUCT_INTERPRETER_ALLOW_UNCONFINED_COMMANDS", allowed.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut service = Service(child);
    let log = BufReader::new(service.0.stderr.take().expect("piped"));
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || log.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let mut said = Vec::new();
    // It may have to compile its guest first.
    while let Ok(line) = lines.recv_timeout(Duration::from_secs(120)) {
        if line.contains("commands cannot be confined") {
            return line;
        }
        said.push(line);
    }
    panic!("it says nothing of it: {said:#?}");
}

#[test]
fn a_service_that_cannot_confine_commands_says_so_and_what_becomes_of_them() {
    let refusing = says(false);
    let reason = "commands cannot be confined: bubblewrap (bwrap) is not installed";
    assert!(
        refusing.contains("WARN") && refusing.contains(&format!("{reason}; commands are refused")),
        "{refusing}"
    );
    let accepting = says(true);
    let words = format!("{reason}; they run UNCONFINED, as the operator has allowed");
    assert!(accepting.contains("WARN") && accepting.contains(&words), "{accepting}");
}
