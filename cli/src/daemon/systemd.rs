//! The systemd that runs services of the person who calls.

use std::{
    io::ErrorKind,
    process::{Command, Output},
};

use crate::failure::Failure;

/// What runs the mesh.
pub(crate) const SERVICE: &str = "construct.service";
/// What listens for it.
pub(crate) const SOCKET: &str = "construct.socket";

/// It answers.
#[derive(Debug)]
pub(crate) struct Systemd(());

impl Systemd {
    /// # Errors
    /// When there is none.
    pub(crate) fn find() -> Result<Self, Failure> {
        let found = systemctl(&["show-environment"]);
        let why = match found {
            Ok(done) if done.status.success() => return Ok(Self(())),
            Ok(done) => complaint(&done),
            Err(error) if error.kind() == ErrorKind::NotFound => "there is no systemctl".to_owned(),
            Err(error) => format!("systemctl cannot be run: {error}"),
        };
        Err(Failure::failed(format!("no systemd runs services for you here ({why})")).hint(
            "construct daemon run runs the mesh in the foreground, construct up in the background; install --no-start writes the units all the same",
        ))
    }

    /// # Errors
    /// When systemd refuses.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<(), Failure> {
        let done = systemctl(arguments)?;
        if done.status.success() {
            return Ok(());
        }
        let failure = Failure::failed(format!(
            "systemctl --user {}: {}",
            arguments.join(" "),
            complaint(&done)
        ));
        Err(failure.hint("journalctl --user -u construct.service says more"))
    }

    /// What systemd says of a unit, in its own words (`active`, `inactive`, `enabled`, …).
    ///
    /// # Errors
    /// When systemctl cannot be run.
    pub(crate) fn state(&self, question: &str, unit: &str) -> Result<String, Failure> {
        // What is not so is told by the exit code as well, which therefore says nothing here.
        let done = systemctl(&[question, unit])?;
        let word = String::from_utf8_lossy(&done.stdout).trim().to_owned();
        Ok(if word.is_empty() { "unknown".to_owned() } else { word })
    }

    /// Whether a unit runs, or is about to.
    ///
    /// # Errors
    /// When systemctl cannot be run.
    pub(crate) fn runs(&self, unit: &str) -> Result<bool, Failure> {
        Ok(!matches!(self.state("is-active", unit)?.as_str(), "inactive" | "failed" | "unknown"))
    }
}

fn systemctl(arguments: &[&str]) -> std::io::Result<Output> {
    Command::new("systemctl").arg("--user").args(arguments).output()
}

/// The first line of what was complained about.
pub(crate) fn complaint(done: &Output) -> String {
    let errors = String::from_utf8_lossy(&done.stderr);
    let line = errors.lines().map(str::trim).find(|line| !line.is_empty());
    line.map_or_else(|| done.status.to_string(), str::to_owned)
}
