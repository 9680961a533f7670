//! Tests of the CLI with the user's machine: systemd, launchd, the keyring and the mesh's script.
//! All of them are fake programs.
#![expect(clippy::unwrap_used, reason = "a panic fails the test with its cause")]

mod containers;
mod daemon;
mod install;
mod keyring;
mod launchd;
mod login;

use std::{
    fs,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use tempfile::TempDir;

/// A fake machine: directories for the user's files, a checkout and programs.
struct Machine {
    folder: TempDir,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["programs", "checkout", "config", "runtime", "data"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Creates a program that records its calls in `NAME.calls` and runs `script`. `$here` is the
    /// machine's directory.
    fn program(&self, name: &str, script: &str) {
        let path = self.path(name);
        let here = self.folder.path().display();
        let calls = self.path(&format!("{}.calls", path.file_name().unwrap().to_str().unwrap()));
        let text =
            format!("#!/bin/sh\nhere='{here}'\necho \"$*\" >>'{}'\n{script}\n", calls.display());
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    }

    /// The recorded calls of a program.
    fn calls(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.path(&format!("{name}.calls"))).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The command with the machine's directories, and its programs before those of the system.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_construct"));
        self.set_environment(&mut command).args(arguments);
        command
    }

    fn set_environment<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env_clear()
            .env("PATH", format!("{}:/usr/bin:/bin", self.path("programs").display()))
            .env("HOME", self.folder.path())
            .env("XDG_CONFIG_HOME", self.path("config"))
            .env("XDG_RUNTIME_DIR", self.path("runtime"))
            .env("CONSTRUCT_DEV", self.path("checkout/dev"))
            .env("CONSTRUCT_HOME", self.path("data"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
    }

    fn run(&self, arguments: &[&str]) -> Finished {
        Finished::from_output(self.command(arguments).output().unwrap())
    }

    fn run_with(&self, arguments: &[&str], input: &str) -> Finished {
        let mut child = self.command(arguments).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        Finished::from_output(child.wait_with_output().unwrap())
    }
}

/// The result of a command.
#[derive(Debug)]
struct Finished {
    code: Option<i32>,
    output: String,
    errors: String,
}

impl Finished {
    fn from_output(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code(),
            output: text(output.stdout),
            errors: text(output.stderr),
        }
    }

    /// Its standard output. It must have succeeded.
    #[track_caller]
    fn stdout(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.output
    }

    /// Its standard error. It must have failed with this exit code.
    #[track_caller]
    fn stderr(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:?}");
        self.errors
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
