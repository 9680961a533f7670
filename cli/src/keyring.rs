//! The keyring of the desktop session, which stores the keys of contexts.
//!
//! It is accessed through its program: `secret-tool` for the Secret Service of GNOME, KDE and
//! KeePassXC, `security` for macOS's keychain. Secrets go through pipes and never appear on a
//! command line (`docs/adr/0037-keyring.md`).

use std::{
    env,
    io::Write as _,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

/// The timeout of the program: it may prompt for the keyring's password.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(60);
/// The service name of our items.
const SERVICE: &str = "construct";
/// The exit code of `security` when there is no such item.
const ITEM_NOT_FOUND: i32 = 44;

/// Whether to store keys in the keyring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum KeyringMode {
    /// In the keyring if it works, else in the file.
    Auto,
    /// In the keyring, or fail.
    Always,
    /// In the file.
    Never,
}

/// The program that accesses the keyring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Keyring {
    program: PathBuf,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    SecretTool,
    Security,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::SecretTool => "secret-tool",
            Self::Security => "security",
        }
    }
}

impl Keyring {
    /// Finds the program of this machine.
    ///
    /// # Errors
    /// The reason, when it is not installed.
    pub(crate) fn find() -> Result<Self, String> {
        let kind = if cfg!(target_os = "macos") { Kind::Security } else { Kind::SecretTool };
        let folders = env::var_os("PATH").unwrap_or_default();
        let mut programs = env::split_paths(&folders)
            .filter(|folder| folder.is_absolute())
            .map(|folder| folder.join(kind.name()));
        let program = programs.find(|program| program.is_file());
        let program = program.ok_or_else(|| {
            format!("{}, which accesses the keyring, is not installed", kind.name())
        })?;
        Ok(Self { program, kind })
    }

    /// Stores a secret under a unique name, and verifies it. `label` is shown to people.
    ///
    /// # Errors
    /// The reason, when the keyring does not store it.
    pub(crate) fn store(&self, item: &str, label: &str, secret: &str) -> Result<(), String> {
        let output = match self.kind {
            Kind::SecretTool => {
                let label = format!("--label={label}");
                self.run(&["store", &label, "service", SERVICE, "item", item], secret)?
            }
            // Its option for reading a secret prompts on the terminal. Its interactive mode takes
            // the secret in hexadecimal.
            Kind::Security => {
                let hexadecimal =
                    secret.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
                let command =
                    format!("add-generic-password -U -s {SERVICE} -a {item} -X {hexadecimal}\n");
                self.run(&["-i"], &command)?
            }
        };
        if !output.status.success() {
            return Err(self.error_message(&output));
        }
        let stored = match self.get(item) {
            Ok(stored) if stored.as_deref() == Some(secret) => return Ok(()),
            stored => stored,
        };
        // Do not leave an unknown item behind.
        _ = self.remove(item);
        stored.and_then(|_| Err(format!("{} does not return the stored secret", self.kind.name())))
    }

    /// The secret of this name, if there is one.
    ///
    /// # Errors
    /// The reason, when the keyring cannot be read.
    pub(crate) fn get(&self, item: &str) -> Result<Option<String>, String> {
        let output = match self.kind {
            Kind::SecretTool => self.run(&["lookup", "service", SERVICE, "item", item], "")?,
            Kind::Security => {
                self.run(&["find-generic-password", "-s", SERVICE, "-a", item, "-w"], "")?
            }
        };
        if output.status.success() {
            let secret =
                String::from_utf8(output.stdout).map_err(|_| "the item is not UTF-8".to_owned())?;
            return Ok(
                Some(secret.trim_end_matches('\n').to_owned()).filter(|secret| !secret.is_empty())
            );
        }
        if self.is_absent(&output) { Ok(None) } else { Err(self.error_message(&output)) }
    }

    /// Removes the secret of this name, if there is one.
    ///
    /// # Errors
    /// The reason, when the keyring refuses.
    pub(crate) fn remove(&self, item: &str) -> Result<(), String> {
        let output = match self.kind {
            Kind::SecretTool => self.run(&["clear", "service", SERVICE, "item", item], "")?,
            Kind::Security => {
                self.run(&["delete-generic-password", "-s", SERVICE, "-a", item], "")?
            }
        };
        if output.status.success() || self.is_absent(&output) {
            Ok(())
        } else {
            Err(self.error_message(&output))
        }
    }

    /// Whether the program reports that there is no such item. `secret-tool` prints nothing then.
    fn is_absent(&self, output: &Output) -> bool {
        match self.kind {
            Kind::SecretTool => output.status.code() == Some(1) && output.stderr.is_empty(),
            Kind::Security => output.status.code() == Some(ITEM_NOT_FOUND),
        }
    }

    fn run(&self, arguments: &[&str], input: &str) -> Result<Output, String> {
        let name = self.kind.name();
        let unusable = |error: std::io::Error| format!("{name} cannot be run: {error}");
        let mut child = Command::new(&self.program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(unusable)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A program that exits without reading reports the reason itself.
            _ = stdin.write_all(input.as_bytes());
        }
        let process = Pid::from_child(&child);
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(child.wait_with_output()));
        match receiver.recv_timeout(PROGRAM_TIMEOUT) {
            Ok(output) => output.map_err(unusable),
            Err(_) => {
                _ = kill_process(process, Signal::KILL);
                Err(format!("{name} has not answered within {} s", PROGRAM_TIMEOUT.as_secs()))
            }
        }
    }

    /// The first line of the program's standard error. Its output may be a secret.
    fn error_message(&self, output: &Output) -> String {
        let errors = String::from_utf8_lossy(&output.stderr);
        let line = errors.lines().map(str::trim).find(|line| !line.is_empty());
        line.map_or_else(|| format!("{}: {}", self.kind.name(), output.status), str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    /// A program that stores one secret in a file next to it, and records its calls.
    fn fake(kind: Kind, script: &str) -> Keyring {
        let folder = env::temp_dir().join(format!("construct-keyring-{}", uuid::Uuid::now_v7()));
        fs::create_dir(&folder).unwrap();
        let program = folder.join(kind.name());
        fs::write(
            &program,
            format!("#!/bin/sh\ncd '{}'\necho \"$*\" >>calls\n{script}\n", folder.display()),
        )
        .unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        Keyring { program, kind }
    }

    fn folder(keyring: &Keyring) -> PathBuf {
        keyring.program.parent().unwrap().to_owned()
    }

    const SECRET_TOOL: &str = "case $1 in
store) cat >secret ;;
lookup) cat secret 2>/dev/null || exit 1 ;;
clear) rm secret 2>/dev/null || exit 1 ;;
esac";

    const SECURITY: &str = "case $1 in
-i) read -r line; echo \"$line\" >line; echo \"${line##* }\" >secret ;;
find-generic-password) cat secret 2>/dev/null || exit 44 ;;
delete-generic-password) rm secret 2>/dev/null || exit 44 ;;
esac";

    #[test]
    fn secret_is_stored_and_removed_without_command_line_exposure() {
        for keyring in [fake(Kind::SecretTool, SECRET_TOOL), fake(Kind::Security, SECURITY)] {
            let folder = folder(&keyring);
            assert_eq!(keyring.get("i").unwrap(), None);
            // The fake `security` does not decode hexadecimal digits, so the secret differs.
            let secret = "ct_s3cret";
            let stored = keyring.store("i", "Construct: work", secret);
            if keyring.kind == Kind::SecretTool {
                stored.unwrap();
                assert_eq!(keyring.get("i").unwrap().as_deref(), Some(secret));
            } else {
                assert!(stored.unwrap_err().contains("does not return the stored secret"));
                let line = fs::read_to_string(folder.join("line")).unwrap();
                assert_eq!(
                    line,
                    "add-generic-password -U -s construct -a i -X 63745f733363726574\n"
                );
            }
            keyring.remove("i").unwrap();
            assert_eq!(keyring.get("i").unwrap(), None);
            keyring.remove("i").unwrap();
            let calls = fs::read_to_string(folder.join("calls")).unwrap();
            assert!(!calls.contains(secret) && !calls.contains("63745f"), "{calls}");
            fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn keyring_errors_contain_the_reason() {
        let keyring = fake(
            Kind::SecretTool,
            "echo 'Cannot autolaunch D-Bus without X11 $DISPLAY' >&2; exit 1",
        );
        for error in [
            keyring.store("i", "l", "s").unwrap_err(),
            keyring.get("i").unwrap_err(),
            keyring.remove("i").unwrap_err(),
        ] {
            assert!(error.contains("Cannot autolaunch D-Bus"), "{error}");
        }
        fs::remove_dir_all(folder(&keyring)).unwrap();
        let missing = keyring.get("i").unwrap_err();
        assert!(missing.contains("secret-tool cannot be run"), "{missing}");
        let forgetful = fake(Kind::SecretTool, "cat >/dev/null");
        assert!(
            forgetful
                .store("i", "l", "s")
                .unwrap_err()
                .contains("does not return the stored secret")
        );
        fs::remove_dir_all(folder(&forgetful)).unwrap();
    }
}
