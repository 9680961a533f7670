//! The user's systemd.

use std::{
    io::ErrorKind,
    process::{Command, Output},
};

use crate::failure::Failure;

/// The unit that runs the mesh.
pub(crate) const SERVICE: &str = "construct.service";
/// The unit that listens on the socket.
pub(crate) const SOCKET: &str = "construct.socket";

/// A reachable systemd.
#[derive(Debug)]
pub(crate) struct Systemd(());

impl Systemd {
    /// # Errors
    /// When there is no systemd for the user.
    pub(crate) fn find() -> Result<Self, Failure> {
        let reason = match systemctl(&["show-environment"]) {
            Ok(output) if output.status.success() => return Ok(Self(())),
            Ok(output) => error_message(&output),
            Err(error) if error.kind() == ErrorKind::NotFound => "there is no systemctl".to_owned(),
            Err(error) => format!("systemctl cannot be run: {error}"),
        };
        Err(Failure::failed(format!("systemd is not available ({reason})")).hint(
            "construct daemon run runs the mesh in the foreground, construct up in the background; install --no-start only writes the units",
        ))
    }

    /// # Errors
    /// When systemd refuses.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<(), Failure> {
        let output = systemctl(arguments)?;
        if output.status.success() {
            return Ok(());
        }
        let failure = Failure::failed(format!(
            "systemctl --user {}: {}",
            arguments.join(" "),
            error_message(&output)
        ));
        Err(failure.hint("for details: journalctl --user -u construct.service"))
    }

    /// A property of a unit in systemd's terms (`active`, `inactive`, `enabled`, …).
    ///
    /// # Errors
    /// When systemctl cannot be run.
    pub(crate) fn state(&self, question: &str, unit: &str) -> Result<String, Failure> {
        // The exit code is not an error here: it repeats the answer.
        let output = systemctl(&[question, unit])?;
        let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Ok(if state.is_empty() { "unknown".to_owned() } else { state })
    }

    /// Whether a unit runs, or is starting.
    ///
    /// # Errors
    /// When systemctl cannot be run.
    pub(crate) fn is_running(&self, unit: &str) -> Result<bool, Failure> {
        Ok(!matches!(self.state("is-active", unit)?.as_str(), "inactive" | "failed" | "unknown"))
    }
}

fn systemctl(arguments: &[&str]) -> std::io::Result<Output> {
    Command::new("systemctl").arg("--user").args(arguments).output()
}

/// The first line of a program's standard error.
pub(crate) fn error_message(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    let line = errors.lines().map(str::trim).find(|line| !line.is_empty());
    line.map_or_else(|| output.status.to_string(), str::to_owned)
}
