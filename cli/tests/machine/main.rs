//! What the command line does with the person's machine: systemd, launchd, the keyring, the mesh's
//! script. All three are programs of the test's own.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails with what it met")]

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

/// A machine: folders for a person's files, for a checkout and for programs.
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

    /// A program that writes down how it is called, in `NAME.calls`, and then does what `script`
    /// says, with `$here` for the machine's folder.
    fn program(&self, name: &str, script: &str) {
        let path = self.path(name);
        let here = self.folder.path().display();
        let calls = self.path(&format!("{}.calls", path.file_name().unwrap().to_str().unwrap()));
        let text =
            format!("#!/bin/sh\nhere='{here}'\necho \"$*\" >>'{}'\n{script}\n", calls.display());
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    }

    /// How a program was called.
    fn calls(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.path(&format!("{name}.calls"))).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The command with the machine's folders, and its programs before those of the system.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_construct"));
        self.furnish(&mut command).args(arguments);
        command
    }

    fn furnish<'a>(&self, command: &'a mut Command) -> &'a mut Command {
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

    fn run(&self, arguments: &[&str]) -> Done {
        Done::of(self.command(arguments).output().unwrap())
    }

    fn run_with(&self, arguments: &[&str], input: &str) -> Done {
        let mut child = self.command(arguments).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        Done::of(child.wait_with_output().unwrap())
    }
}

/// What a command did.
#[derive(Debug)]
struct Done {
    code: Option<i32>,
    output: String,
    errors: String,
}

impl Done {
    fn of(done: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: done.status.code(), output: text(done.stdout), errors: text(done.stderr) }
    }

    /// What it printed, when it succeeded.
    #[track_caller]
    fn said(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.output
    }

    /// What it complained about, when it failed so.
    #[track_caller]
    fn complained(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:?}");
        self.errors
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
