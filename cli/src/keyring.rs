//! The keyring of the person's session, where keys of contexts lie when there is one.
//!
//! It is asked through the program that comes with it: `secret-tool` for the Secret Service of
//! GNOME, KDE and KeePassXC, `security` for macOS's keychain. A secret goes through a pipe and
//! never stands on a command line (`docs/adr/0037-keyring.md`).

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

/// How long it may take: somebody may be asked for the keyring's password.
const PATIENCE: Duration = Duration::from_secs(60);
/// What our entries are found by, with a name for each.
const SERVICE: &str = "construct";
/// What `security` ends with when there is no such entry.
const NO_ITEM: i32 = 44;

/// Whether keys are put into the keyring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Wanted {
    /// When it takes them; else into the file.
    Auto,
    /// Or nowhere.
    Always,
    /// Into the file.
    Never,
}

/// A program that opens the keyring.
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
    /// That of this machine.
    ///
    /// # Errors
    /// When its program is not installed, in words.
    pub(crate) fn find() -> Result<Self, String> {
        let kind = if cfg!(target_os = "macos") { Kind::Security } else { Kind::SecretTool };
        let folders = env::var_os("PATH").unwrap_or_default();
        let mut programs = env::split_paths(&folders)
            .filter(|folder| folder.is_absolute())
            .map(|it| it.join(kind.name()));
        let program = programs.find(|program| program.is_file());
        let program = program
            .ok_or_else(|| format!("{}, which opens a keyring, is not installed", kind.name()))?;
        Ok(Self { program, kind })
    }

    /// Puts a secret there under a name that nobody else uses, and looks whether it is there.
    /// `label` is what people see of it.
    ///
    /// # Errors
    /// When the keyring does not take it, in words.
    pub(crate) fn store(&self, item: &str, label: &str, secret: &str) -> Result<(), String> {
        let done = match self.kind {
            Kind::SecretTool => {
                let label = format!("--label={label}");
                self.run(&["store", &label, "service", SERVICE, "item", item], secret)?
            }
            // Its own words for a secret on standard input ask for it on the terminal; as a command
            // it takes one from there, in hexadecimal.
            Kind::Security => {
                let hexadecimal =
                    secret.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
                let command =
                    format!("add-generic-password -U -s {SERVICE} -a {item} -X {hexadecimal}\n");
                self.run(&["-i"], &command)?
            }
        };
        if !done.status.success() {
            return Err(self.complaint(&done));
        }
        let kept = match self.get(item) {
            Ok(kept) if kept.as_deref() == Some(secret) => return Ok(()),
            kept => kept,
        };
        // Whatever it is that it keeps: nobody would know of it.
        _ = self.remove(item);
        kept.and_then(|_| Err(format!("{} took it and does not give it back", self.kind.name())))
    }

    /// The secret of this name, if there is one.
    ///
    /// # Errors
    /// When the keyring cannot be asked, in words.
    pub(crate) fn get(&self, item: &str) -> Result<Option<String>, String> {
        let done = match self.kind {
            Kind::SecretTool => self.run(&["lookup", "service", SERVICE, "item", item], "")?,
            Kind::Security => {
                self.run(&["find-generic-password", "-s", SERVICE, "-a", item, "-w"], "")?
            }
        };
        if done.status.success() {
            let secret = String::from_utf8(done.stdout)
                .map_err(|_| "what is there is no text".to_owned())?;
            return Ok(
                Some(secret.trim_end_matches('\n').to_owned()).filter(|secret| !secret.is_empty())
            );
        }
        if self.is_absent(&done) { Ok(None) } else { Err(self.complaint(&done)) }
    }

    /// Removes the secret of this name, if there is one.
    ///
    /// # Errors
    /// When the keyring does not do it, in words.
    pub(crate) fn remove(&self, item: &str) -> Result<(), String> {
        let done = match self.kind {
            Kind::SecretTool => self.run(&["clear", "service", SERVICE, "item", item], "")?,
            Kind::Security => {
                self.run(&["delete-generic-password", "-s", SERVICE, "-a", item], "")?
            }
        };
        if done.status.success() || self.is_absent(&done) {
            Ok(())
        } else {
            Err(self.complaint(&done))
        }
    }

    /// Whether the program says that there is no such entry. `secret-tool` says nothing then.
    fn is_absent(&self, done: &Output) -> bool {
        match self.kind {
            Kind::SecretTool => done.status.code() == Some(1) && done.stderr.is_empty(),
            Kind::Security => done.status.code() == Some(NO_ITEM),
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
            // A program that ends without reading says why by itself.
            _ = stdin.write_all(input.as_bytes());
        }
        let process = Pid::from_child(&child);
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(child.wait_with_output()));
        match receiver.recv_timeout(PATIENCE) {
            Ok(done) => done.map_err(unusable),
            Err(_) => {
                _ = kill_process(process, Signal::KILL);
                Err(format!("{name} has not answered within {} s", PATIENCE.as_secs()))
            }
        }
    }

    /// The first line of what the program complained about; nothing of its output, which may be a
    /// secret.
    fn complaint(&self, done: &Output) -> String {
        let errors = String::from_utf8_lossy(&done.stderr);
        let line = errors.lines().map(str::trim).find(|line| !line.is_empty());
        line.map_or_else(|| format!("{}: {}", self.kind.name(), done.status), str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    /// A program that keeps one secret in a file beside it, and writes down how it was called.
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
    fn a_secret_is_kept_given_and_removed_and_never_stands_on_a_command_line() {
        for keyring in [fake(Kind::SecretTool, SECRET_TOOL), fake(Kind::Security, SECURITY)] {
            let folder = folder(&keyring);
            assert_eq!(keyring.get("i").unwrap(), None);
            // The fake of `security` does not turn hexadecimal digits back: it says what it was
            // given.
            let secret = "ct_s3cret";
            let stored = keyring.store("i", "Construct: work", secret);
            if keyring.kind == Kind::SecretTool {
                stored.unwrap();
                assert_eq!(keyring.get("i").unwrap().as_deref(), Some(secret));
            } else {
                assert!(stored.unwrap_err().contains("does not give it back"));
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
    fn a_keyring_that_does_not_answer_says_why() {
        let keyring = fake(
            Kind::SecretTool,
            "echo 'Cannot autolaunch D-Bus without X11 $DISPLAY' >&2; exit 1",
        );
        for told in [
            keyring.store("i", "l", "s").unwrap_err(),
            keyring.get("i").unwrap_err(),
            keyring.remove("i").unwrap_err(),
        ] {
            assert!(told.contains("Cannot autolaunch D-Bus"), "{told}");
        }
        fs::remove_dir_all(folder(&keyring)).unwrap();
        let gone = keyring.get("i").unwrap_err();
        assert!(gone.contains("secret-tool cannot be run"), "{gone}");
        let forgetful = fake(Kind::SecretTool, "cat >/dev/null");
        assert!(forgetful.store("i", "l", "s").unwrap_err().contains("does not give it back"));
        fs::remove_dir_all(folder(&forgetful)).unwrap();
    }
}
