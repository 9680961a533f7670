//! The unit files of systemd, and what launchd's file has in common with them.

use std::{
    env, fs,
    io::ErrorKind,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use super::systemd::{SERVICE, SOCKET};
use crate::{
    failure::Failure,
    mesh::{self, MeshPaths},
};

/// The beginning of files that this program wrote.
pub(crate) const MARK: &str = "# Written by `construct daemon install`, which replaces it. Changes of yours: systemctl --user edit ";
/// The prefix of the line with the data directory, which `uninstall` prints.
const DATA_PREFIX: &str = "# Data: ";
/// The file names.
pub(crate) const NAMES: [&str; 2] = [SERVICE, SOCKET];

/// The settings in the files.
#[derive(Debug)]
pub(crate) struct Settings {
    /// This program.
    pub(crate) program: PathBuf,
    /// The paths of the mesh.
    pub(crate) paths: MeshPaths,
    /// Cargo's target directory, if not in the checkout.
    pub(crate) target: Option<PathBuf>,
    /// An optional file with more variables.
    pub(crate) environment: PathBuf,
    /// The shell's search path for programs (`PATH`).
    pub(crate) search_path: Option<PathBuf>,
}

/// A file of a service manager.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// The file name.
    pub(crate) name: &'static str,
    /// The beginning that identifies it as ours.
    pub(crate) mark: &'static str,
    /// The content.
    pub(crate) text: String,
}

/// The state of a file's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// There is no file.
    Absent,
    /// The file is up to date.
    Same,
    /// Another file that this program wrote.
    Ours,
    /// Not written by this program.
    Foreign,
}

/// The directory with the user's units.
///
/// # Errors
/// When HOME is not set.
pub(crate) fn folder() -> Result<PathBuf, Failure> {
    Ok(config_directory()?.join("systemd").join("user"))
}

fn config_directory() -> Result<PathBuf, Failure> {
    let variable =
        |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base =
        variable("XDG_CONFIG_HOME").or_else(|| variable("HOME").map(|home| home.join(".config")));
    base.ok_or_else(|| Failure::usage("systemd's units are stored below HOME, which is not set"))
}

/// The data directory of the installed service.
pub(crate) fn data(folder: &Path) -> Option<String> {
    let text = fs::read_to_string(folder.join(SERVICE)).ok()?;
    text.lines().find_map(|line| line.strip_prefix(DATA_PREFIX)).map(str::to_owned)
}

impl Settings {
    /// The settings of this program, the current checkout and this shell.
    ///
    /// # Errors
    /// When there is no checkout.
    pub(crate) fn find() -> Result<Self, Failure> {
        let paths = MeshPaths::find()?;
        let program = env::current_exe().and_then(fs::canonicalize)?;
        let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let target = variable("CARGO_TARGET_DIR");
        let target = target.map(|target| mesh::root(&paths.script).join(target));
        let environment = config_directory()?.join("construct").join("daemon.env");
        let search_path = variable("PATH").map(PathBuf::from);
        Ok(Self { program, paths, target, environment, search_path })
    }

    /// The environment variables of the service.
    pub(crate) fn variables(&self) -> Vec<(&'static str, &Path)> {
        let mut variables = vec![
            (mesh::SCRIPT_VARIABLE, &*self.paths.script),
            (mesh::HOME_VARIABLE, &*self.paths.home),
        ];
        variables.extend(self.target.as_deref().map(|target| ("CARGO_TARGET_DIR", target)));
        variables
    }

    /// The unit files of systemd.
    ///
    /// # Errors
    /// When a path has characters that a unit cannot hold.
    pub(crate) fn units(&self) -> Result<[Unit; 2], Failure> {
        let program = quoted(&self.program)?;
        let mut lines = String::new();
        for (name, value) in self.variables() {
            let value = quoted(value)?;
            lines.push_str(&format!("Environment=\"{name}={}\n", &value[1..]));
        }
        let environment = path_text(&self.environment)?.replace('%', "%%");
        let data = path_text(&self.paths.home)?;
        let service = format!(
            "\
{MARK}{SERVICE}
{DATA_PREFIX}{data}
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
# The daemon stops its processes itself; systemd kills the remaining ones.
KillMode=mixed
# A script's command that runs out of memory is killed alone.
OOMPolicy=continue
LimitCORE=0
NoNewPrivileges=yes
RestrictRealtime=yes
# bubblewrap needs netlink and user namespaces: do not restrict them.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
"
        );
        let socket = format!(
            "\
{MARK}{SOCKET}
[Unit]
Description=Construct: the gateway's socket for this user

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
    /// The state of the file in a directory.
    pub(crate) fn state(&self, folder: &Path) -> State {
        let path = folder.join(self.name);
        match state(&path, self.mark) {
            State::Ours if fs::read_to_string(&path).is_ok_and(|text| text == self.text) => {
                State::Same
            }
            state => state,
        }
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), Failure> {
        let path = folder.join(self.name);
        let failed =
            |error| Failure::failed(format!("{} cannot be written: {error}", path.display()));
        fs::create_dir_all(folder).map_err(failed)?;
        let unfinished = folder.join(format!(".{}.{}", self.name, std::process::id()));
        let written = fs::write(&unfinished, &self.text)
            .and_then(|()| fs::set_permissions(&unfinished, fs::Permissions::from_mode(0o644)))
            .and_then(|()| fs::rename(&unfinished, &path));
        if written.is_err() {
            _ = fs::remove_file(&unfinished);
        }
        written.map_err(failed)
    }
}

/// The state of a path whose file should begin with `mark`.
pub(crate) fn state(path: &Path, mark: &str) -> State {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => State::Absent,
        // A link is intentional: a mask, or settings stored elsewhere.
        Ok(metadata)
            if metadata.is_file()
                && fs::read_to_string(path).is_ok_and(|text| text.starts_with(mark)) =>
        {
            State::Ours
        }
        _ => State::Foreign,
    }
}

/// A path as text for these files.
///
/// # Errors
/// When it is not UTF-8 or has control characters.
pub(crate) fn path_text(path: &Path) -> Result<&str, Failure> {
    let text = path.to_str().filter(|text| !text.chars().any(char::is_control));
    text.ok_or_else(|| {
        Failure::usage(format!("{} has characters that a service file cannot hold", path.display()))
    })
}

/// A path in quotes, so that systemd neither splits it nor expands `%`.
fn quoted(path: &Path) -> Result<String, Failure> {
    let text = path_text(path)?.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%");
    Ok(format!("\"{text}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            program: "/opt/a b/construct".into(),
            paths: MeshPaths { script: "/src/50%/dev".into(), home: "/home/ann/construct".into() },
            target: None,
            environment: "/home/ann/.config/construct/daemon.env".into(),
            search_path: Some("/usr/bin".into()),
        }
    }

    #[test]
    fn units_match_golden_files() {
        let [service, socket] = settings().units().unwrap();
        assert_eq!(service.text, include_str!("golden/construct.service"));
        assert_eq!(socket.text, include_str!("golden/construct.socket"));
    }

    #[test]
    fn systemd_special_characters_are_quoted() {
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
            assert!(service.text.lines().any(|other| other == line), "{line}: {}", service.text);
        }
        let broken = Settings { program: "/a\nExecStartPost=/b".into(), ..settings() };
        assert!(broken.units().is_err(), "a line break would add a directive");
    }
}
