//! The files by which systemd knows the service and its socket, and what launchd's has in common
//! with them.

use std::{
    env, fs,
    io::ErrorKind,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use super::systemd::{SERVICE, SOCKET};
use crate::{
    failure::Failure,
    mesh::{self, Place},
};

/// What a file begins with that this program wrote.
pub(crate) const MARK: &str = "# Written by `construct daemon install`, which replaces it. Changes of yours: systemctl --user edit ";
/// What stands before the folder of the data, for `uninstall` to say where it is.
const DATA: &str = "# Data: ";
/// The files.
pub(crate) const NAMES: [&str; 2] = [SERVICE, SOCKET];

/// What a file is made of.
#[derive(Debug)]
pub(crate) struct Settings {
    /// This program.
    pub(crate) program: PathBuf,
    /// What it runs.
    pub(crate) place: Place,
    /// Where cargo puts what it builds, where that is not in the checkout.
    pub(crate) target: Option<PathBuf>,
    /// A file with further variables, which need not be there.
    pub(crate) environment: PathBuf,
    /// Where this shell looks for programs (`PATH`).
    pub(crate) search: Option<PathBuf>,
}

/// A file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// What it is called.
    pub(crate) name: &'static str,
    /// What it begins with, as no file of somebody else does.
    pub(crate) mark: &'static str,
    /// What is in it.
    pub(crate) text: String,
}

/// What lies where a file belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Nothing.
    Absent,
    /// Exactly it.
    Same,
    /// Another one that this program wrote.
    Ours,
    /// Something else.
    Foreign,
}

/// Where systemd looks for files of this person.
///
/// # Errors
/// When nothing says where the person's files are.
pub(crate) fn folder() -> Result<PathBuf, Failure> {
    Ok(configuration()?.join("systemd").join("user"))
}

fn configuration() -> Result<PathBuf, Failure> {
    let set = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config")));
    base.ok_or_else(|| Failure::usage("systemd's units are kept below HOME, which is not set"))
}

/// Where the data is of what is installed, if anything is.
pub(crate) fn data(folder: &Path) -> Option<String> {
    let text = fs::read_to_string(folder.join(SERVICE)).ok()?;
    text.lines().find_map(|line| line.strip_prefix(DATA)).map(str::to_owned)
}

impl Settings {
    /// Those of this program, of the checkout we are in, and of this shell.
    ///
    /// # Errors
    /// When there is no checkout.
    pub(crate) fn find() -> Result<Self, Failure> {
        let place = Place::find()?;
        let program = env::current_exe().and_then(fs::canonicalize)?;
        let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let target = set("CARGO_TARGET_DIR");
        let target = target.map(|target| mesh::root(&place.script).join(target));
        let environment = configuration()?.join("construct").join("daemon.env");
        let search = set("PATH").map(PathBuf::from);
        Ok(Self { program, place, target, environment, search })
    }

    /// The variables by which the program finds what it runs.
    pub(crate) fn variables(&self) -> Vec<(&'static str, &Path)> {
        let mut variables =
            vec![(mesh::VARIABLE, &*self.place.script), (mesh::HOME, &*self.place.home)];
        variables.extend(self.target.as_deref().map(|target| ("CARGO_TARGET_DIR", target)));
        variables
    }

    /// The files of systemd.
    ///
    /// # Errors
    /// When a path cannot be written into one.
    pub(crate) fn units(&self) -> Result<[Unit; 2], Failure> {
        let program = quoted(&self.program)?;
        let mut lines = String::new();
        for (name, value) in self.variables() {
            let value = quoted(value)?;
            lines.push_str(&format!("Environment=\"{name}={}\n", &value[1..]));
        }
        let environment = text(&self.environment)?.replace('%', "%%");
        let data = text(&self.place.home)?;
        let service = format!(
            "\
{MARK}{SERVICE}
{DATA}{data}
[Unit]
Description=Construct: the mesh
Requires={SOCKET}
After={SOCKET}
StartLimitIntervalSec=10min
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={program} daemon run
{lines}EnvironmentFile=-{environment}
Restart=on-failure
RestartSec=2
TimeoutStartSec=10min
TimeoutStopSec=90
# The daemon stops the rest itself; what is left after it is killed.
KillMode=mixed
# A command of a script that takes too much memory is killed alone.
OOMPolicy=continue
LimitCORE=0
NoNewPrivileges=yes
RestrictRealtime=yes
# bubblewrap needs netlink, and user namespaces: these must not be restricted.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
"
        );
        let socket = format!(
            "\
{MARK}{SOCKET}
[Unit]
Description=Construct: where its gateway is reached by programs of this user

[Socket]
ListenStream=%t/construct/gateway.socket
SocketMode=0600
DirectoryMode=0700
RemoveOnStop=yes

[Install]
WantedBy=sockets.target
"
        );
        Ok([(SERVICE, service), (SOCKET, socket)].map(|(name, text)| Unit {
            name,
            mark: MARK,
            text,
        }))
    }
}

impl Unit {
    /// What lies where this belongs.
    pub(crate) fn state(&self, folder: &Path) -> State {
        let path = folder.join(self.name);
        match state(&path, self.mark) {
            State::Ours if fs::read_to_string(&path).is_ok_and(|text| text == self.text) => {
                State::Same
            }
            state => state,
        }
    }

    /// Puts it there, whole or not at all.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), Failure> {
        let path = folder.join(self.name);
        let failed =
            |error| Failure::failed(format!("{} cannot be written: {error}", path.display()));
        fs::create_dir_all(folder).map_err(failed)?;
        let unfinished = folder.join(format!(".{}.{}", self.name, std::process::id()));
        let done = fs::write(&unfinished, &self.text)
            .and_then(|()| fs::set_permissions(&unfinished, fs::Permissions::from_mode(0o644)))
            .and_then(|()| fs::rename(&unfinished, &path));
        if done.is_err() {
            _ = fs::remove_file(&unfinished);
        }
        done.map_err(failed)
    }
}

/// What lies at a path where something belongs that begins with `mark`.
pub(crate) fn state(path: &Path, mark: &str) -> State {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => State::Absent,
        // A link is somebody's intention (a mask, or settings that are kept elsewhere).
        Ok(found)
            if found.is_file()
                && fs::read_to_string(path).is_ok_and(|text| text.starts_with(mark)) =>
        {
            State::Ours
        }
        _ => State::Foreign,
    }
}

/// A path as such files can hold it.
///
/// # Errors
/// When it has characters that they cannot hold.
pub(crate) fn text(path: &Path) -> Result<&str, Failure> {
    let text = path.to_str().filter(|text| !text.chars().any(char::is_control));
    text.ok_or_else(|| {
        Failure::usage(format!(
            "{} has characters that a service's file cannot hold",
            path.display()
        ))
    })
}

/// The same in quotes, where systemd would otherwise split it or put something else in the place of
/// `%`.
fn quoted(path: &Path) -> Result<String, Failure> {
    let text = text(path)?.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%");
    Ok(format!("\"{text}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            program: "/opt/a b/construct".into(),
            place: Place { script: "/src/50%/dev".into(), home: "/home/ann/construct".into() },
            target: None,
            environment: "/home/ann/.config/construct/daemon.env".into(),
            search: Some("/usr/bin".into()),
        }
    }

    #[test]
    fn the_units_are_as_they_are_documented() {
        let [service, socket] = settings().units().unwrap();
        assert_eq!(service.text, include_str!("golden/construct.service"));
        assert_eq!(socket.text, include_str!("golden/construct.socket"));
    }

    #[test]
    fn what_systemd_would_read_otherwise_is_quoted() {
        let odd = Settings {
            program: "/o\"p\\t/$HOME/construct".into(),
            target: Some("/t%".into()),
            environment: "/a b/100%.env".into(),
            ..settings()
        };
        let [service, _] = odd.units().unwrap();
        for line in [
            r#"ExecStart="/o\"p\\t/$HOME/construct" daemon run"#,
            r#"Environment="CARGO_TARGET_DIR=/t%%""#,
            "EnvironmentFile=-/a b/100%%.env",
        ] {
            assert!(service.text.lines().any(|found| found == line), "{line}: {}", service.text);
        }
        let broken = Settings { program: "/a\nExecStartPost=/b".into(), ..settings() };
        assert!(broken.units().is_err(), "it would be another line");
    }
}
