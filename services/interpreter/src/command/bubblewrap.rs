//! The sandbox of commands: bubblewrap's arguments, and its detection.
//!
//! The command sees the system's programs and libraries read-only, a private `/tmp`, and the
//! workspace at its own path, which is the only persistent writable directory. It has its own user,
//! process, IPC, host-name and (unless network is granted) network namespaces, no capabilities, and
//! dies with the service. Of `/etc` it sees what programs need to run and nothing that could
//! contain a secret: as a service that runs as root it could otherwise read all of it.
//!
//! If the kernel supports Landlock, the interpreter's own executable starts the command under
//! Landlock rules that repeat the restrictions of the mounts, as a second line of defense; see
//! [`crate::confine`].
//!
//! The workspace is mounted by its descriptor, because its path may lead elsewhere by now. `/proc`
//! is read-only: for the kernel, commands of a service that runs as root are still root when they
//! write to `/proc/sys`. One more effect of running as root is not prevented: a command can change
//! the mode of shared devices (`/dev/null`). The service therefore warns at start; it should run as
//! a separate user.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, Mode, OFlags};
use tokio::process::Command;

use super::{CommandPolicy, shell, spawn};
use crate::confine;
use crate::workspace::{RelativePath, Workspace};

/// The user id of the command inside the sandbox; files of the service's user appear as its own.
const USER: &str = "1000";

/// Time limit of the trial run.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The exit status that shows that the trial run really ran.
const TRIAL_STATUS: i32 = 42;

/// Files of `/etc` that programs need.
const SYSTEM_FILES: [&str; 19] = [
    "/etc/alternatives",
    "/etc/bash.bashrc",
    "/etc/ca-certificates",
    "/etc/ca-certificates.conf",
    "/etc/debian_version",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/magic",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    // Not all of /etc/pki: it also contains private keys.
    "/etc/pki/ca-trust/extracted",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/openssl.cnf",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
];

/// Additional files of `/etc` that programs need for network access.
const NETWORK_FILES: [&str; 4] =
    ["/etc/resolv.conf", "/etc/hosts", "/etc/services", "/etc/protocols"];

/// Path of the interpreter's own executable inside the sandbox.
const CONFINE: &str = "/run/construct-confine";

/// Directories of programs and libraries; symbolic links on a merged system.
const PROGRAMS: [&str; 6] = ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];

/// Limits processes and starts the command, without Landlock: the kernel then counts processes per
/// sandbox. The option's name depends on the shell.
const LIMITED_START: &str =
    r#"ulimit -u "$2" 2>/dev/null || ulimit -p "$2" 2>/dev/null; exec "$0" -c "$1""#;

/// A working bubblewrap.
#[derive(Clone, Debug)]
pub(super) struct Bubblewrap {
    program: PathBuf,
    /// Whether nested namespaces are forbidden; older versions do not support that.
    seals_namespaces: bool,
    /// Landlock, or the reason why it is not used.
    landlock: Result<Landlock, String>,
}

/// Landlock inside the sandbox.
#[derive(Clone, Debug)]
struct Landlock {
    /// Its ABI version.
    version: u32,
    /// The program that applies it.
    program: Arc<OwnedFd>,
}

/// Where the command runs.
pub(super) struct WorkingDirectory<'a> {
    /// The workspace.
    pub(super) workspace: &'a Workspace,
    /// The working directory, relative to the root.
    pub(super) start: &'a RelativePath,
}

impl fmt::Display for Bubblewrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bubblewrap at {} (namespaces, seccomp)", self.program.display())?;
        if !self.seals_namespaces {
            f.write_str(
                ", which is too old or lacks the permission to forbid nested user namespaces,",
            )?;
        }
        match &self.landlock {
            Ok(landlock) => write!(f, " and Landlock (ABI {})", landlock.version),
            Err(reason) => write!(f, ", without Landlock: {reason}"),
        }
    }
}

impl Bubblewrap {
    /// Finds bubblewrap and makes a trial run. The error says why it does not work, for the
    /// operator.
    pub(super) async fn detect(interpreter: &Path) -> Result<Self, String> {
        let program = find("bwrap").ok_or("bubblewrap (bwrap) is not installed")?;
        let mut reason = String::new();
        for seals_namespaces in [true, false] {
            let landlock = Err("it was not tested".to_owned());
            let candidate = Self { program: program.clone(), seals_namespaces, landlock };
            match candidate.trial_run().await {
                Ok(()) => return Ok(candidate.with_landlock(interpreter).await),
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    /// Adds Landlock, if that works.
    async fn with_landlock(self, interpreter: &Path) -> Self {
        let Some(version) = confine::version() else {
            return Self { landlock: Err("the kernel does not support it".to_owned()), ..self };
        };
        let program =
            match rustix::fs::open(interpreter, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
                Ok(program) => Arc::new(program),
                Err(error) => {
                    return Self {
                        landlock: Err(format!("{}: {error}", interpreter.display())),
                        ..self
                    };
                }
            };
        let candidate = Self { landlock: Ok(Landlock { version, program }), ..self };
        match candidate.trial_run().await {
            Ok(()) => candidate,
            Err(reason) => Self { landlock: Err(reason), ..candidate },
        }
    }

    async fn trial_run(&self) -> Result<(), String> {
        let script = format!("exit {TRIAL_STATUS}");
        let command = self
            .command(None, &CommandPolicy::default(), &BTreeMap::new(), &script)
            .map_err(|e| format!("failed to prepare bubblewrap: {e}"))?;
        let (group, child) = spawn::spawn(command, None)
            .await
            .map_err(|e| format!("failed to start bubblewrap: {e}"))?;
        match tokio::time::timeout(TRIAL_TIMEOUT, child.wait_with_output()).await {
            Err(_) => Err("a trial run of bubblewrap did not finish within 10 seconds".to_owned()),
            Ok(Err(error)) => Err(format!("failed to wait for bubblewrap: {error}")),
            Ok(Ok(output)) if output.status.code() == Some(TRIAL_STATUS) => {
                group.mark_dead();
                Ok(())
            }
            Ok(Ok(output)) => {
                let stderr: String =
                    String::from_utf8_lossy(&output.stderr).trim().chars().take(500).collect();
                Err(format!("a trial run of bubblewrap failed ({}): {stderr}", output.status))
            }
        }
    }

    /// The confined process that runs `script`. Without a location it sees no workspace.
    pub(super) fn command(
        &self,
        location: Option<&WorkingDirectory<'_>>,
        policy: &CommandPolicy,
        environment: &BTreeMap<String, String>,
        script: &str,
    ) -> io::Result<Command> {
        let mut arguments = Arguments::default();
        self.namespaces(&mut arguments, policy);
        system(&mut arguments, policy)?;
        if let Some(location) = location {
            workspace(&mut arguments, location.workspace)?;
        }
        if let Ok(landlock) = &self.landlock {
            arguments.bind("--ro-bind-fd", landlock.program.try_clone()?, Path::new(CONFINE));
        }
        arguments.add(["--remount-ro", "/"]);
        let start =
            location.map_or(PathBuf::from("/"), |location| match location.start.is_root() {
                true => location.workspace.root().to_owned(),
                false => location.workspace.root().join(location.start.as_path()),
            });
        arguments.add([OsStr::new("--chdir"), start.as_os_str()]);

        // The arguments are passed through a descriptor and the environment of bubblewrap itself is
        // empty: the values are not visible in the process table, and a script's variables
        // (LD_PRELOAD) have no effect outside of the sandbox.
        let filter = super::seccomp::program().map_err(io::Error::other)?;
        let filter = in_memory("filter", filter)?;
        arguments.add(["--seccomp", &filter.as_raw_fd().to_string()]);
        arguments.files.push(filter);
        let starter = self.starter(&mut arguments, location, policy, environment)?;
        let list = in_memory("arguments", &arguments.list)?;
        let mut command = Command::new(&self.program);
        command.env_clear().arg("--args").arg(list.as_raw_fd().to_string());
        command.arg("--").args(starter);
        match &self.landlock {
            Ok(_) => command.args([shell(), "-c", script]),
            Err(_) => command.args([shell(), script]).arg(policy.limits.processes.to_string()),
        };
        let mut inherited = arguments.files;
        inherited.push(list);
        spawn::isolate(&mut command, &policy.limits, inherited, None);
        Ok(command)
    }

    /// The first program inside the sandbox, which gives the command its environment and its limit
    /// of processes.
    fn starter(
        &self,
        arguments: &mut Arguments,
        location: Option<&WorkingDirectory<'_>>,
        policy: &CommandPolicy,
        environment: &BTreeMap<String, String>,
    ) -> io::Result<Vec<OsString>> {
        if self.landlock.is_err() {
            for (name, value) in environment {
                arguments.add(["--setenv", name, value]);
            }
            return Ok(["/bin/sh", "-c", LIMITED_START].map(OsString::from).into());
        }
        let variables: String =
            environment.iter().map(|(name, value)| format!("{name}={value}\0")).collect();
        let variables = in_memory("environment", variables.as_bytes())?;
        let rules = confine::Rules {
            environment: Some(variables.as_raw_fd()),
            processes: Some(policy.limits.processes as u64),
            ..rules(location, policy)
        };
        arguments.files.push(variables);
        Ok(std::iter::once(OsString::from(CONFINE)).chain(rules.arguments()).collect())
    }

    fn namespaces(&self, arguments: &mut Arguments, policy: &CommandPolicy) {
        arguments.add([
            "--die-with-parent",
            "--new-session",
            "--unshare-user",
            "--unshare-ipc",
            "--unshare-pid",
        ]);
        arguments.add(["--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]);
        arguments.add(["--uid", USER, "--gid", USER, "--cap-drop", "ALL", "--clearenv"]);
        if self.seals_namespaces {
            arguments.add(["--disable-userns"]);
        }
        if !policy.network {
            arguments.add(["--unshare-net"]);
        }
    }
}

/// The restrictions of the mounts, as Landlock rules.
fn rules(location: Option<&WorkingDirectory<'_>>, policy: &CommandPolicy) -> confine::Rules {
    let system = ["/usr", "/etc", "/proc"].into_iter().chain(PROGRAMS).map(PathBuf::from);
    let scratch = ["/tmp", "/dev/shm"].map(PathBuf::from);
    confine::Rules {
        list: vec!["/".into()],
        read: system.chain(policy.read_only_paths.iter().cloned()).collect(),
        devices: vec!["/dev".into()],
        write: scratch
            .into_iter()
            .chain(location.map(|location| location.workspace.root().to_owned()))
            .collect(),
        tcp: policy.network || policy.loopback,
        ..confine::Rules::default()
    }
}

/// Mounts the workspace at its own path, without its hidden files.
fn workspace(arguments: &mut Arguments, workspace: &Workspace) -> io::Result<()> {
    let root = workspace.root();
    let mounts = workspace.hidden_mounts()?;
    arguments.bind("--bind-fd", workspace.root_handle()?, root);
    for (path, handle) in mounts.pinned {
        arguments.bind("--bind-fd", handle, &root.join(path));
    }
    for path in mounts.directories {
        let path = root.join(path);
        arguments.add(["--perms", "0500", "--size", "4096", "--tmpfs"]);
        arguments.add([path.as_os_str(), OsStr::new("--remount-ro"), path.as_os_str()]);
    }
    for path in mounts.files {
        arguments.add_file(&root.join(path), b"")?;
    }
    Ok(())
}

/// Mounts everything but the workspace.
fn system(arguments: &mut Arguments, policy: &CommandPolicy) -> io::Result<()> {
    // By descriptor like a workspace, so that the trial run tests whether this version supports it.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    arguments.bind(
        "--ro-bind-fd",
        rustix::fs::open("/usr", flags, Mode::empty())?,
        Path::new("/usr"),
    );
    for name in PROGRAMS {
        // On a merged system these are links into /usr, and must be the same inside.
        match std::fs::read_link(name) {
            Ok(target) => {
                arguments.add([OsStr::new("--symlink"), target.as_os_str(), OsStr::new(name)])
            }
            Err(_) => arguments.add(["--ro-bind-try", name, name]),
        }
    }
    for name in SYSTEM_FILES {
        arguments.add(["--ro-bind-try", name, name]);
    }
    if policy.network {
        for name in NETWORK_FILES {
            arguments.add(["--ro-bind-try", name, name]);
        }
    }
    let passwd = format!(
        "agent:x:{USER}:{USER}:agent:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
    );
    let group = format!("agent:x:{USER}:\nnogroup:x:65534:\n");
    arguments.add_file(Path::new("/etc/passwd"), passwd.as_bytes())?;
    arguments.add_file(Path::new("/etc/group"), group.as_bytes())?;
    let size = policy.limits.scratch_bytes.to_string();
    arguments.add(["--proc", "/proc", "--remount-ro", "/proc"]);
    arguments.add(["--dev", "/dev", "--size", &size, "--tmpfs", "/dev/shm"]);
    arguments.add(["--remount-ro", "/dev", "--perms", "1777", "--size", &size, "--tmpfs", "/tmp"]);
    arguments.add(["--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]);
    for path in policy.read_only_paths.iter().filter(|path| path.is_absolute()) {
        arguments.add([OsStr::new("--ro-bind-try"), path.as_os_str(), path.as_os_str()]);
    }
    Ok(())
}

/// Arguments as bubblewrap reads them from a descriptor, NUL-terminated, and the descriptors they
/// refer to.
#[derive(Default)]
struct Arguments {
    list: Vec<u8>,
    files: Vec<OwnedFd>,
}

impl Arguments {
    fn add<T: AsRef<OsStr>, const N: usize>(&mut self, arguments: [T; N]) {
        for argument in arguments {
            self.list.extend_from_slice(argument.as_ref().as_bytes());
            self.list.push(0);
        }
    }

    /// Adds a read-only file with this content.
    fn add_file(&mut self, path: &Path, content: &[u8]) -> io::Result<()> {
        self.add(["--perms", "0444"]);
        self.bind("--ro-bind-data", in_memory("file", content)?, path);
        Ok(())
    }

    /// Mounts an open file or directory at this path.
    fn bind(&mut self, how: &str, handle: OwnedFd, path: &Path) {
        let number = handle.as_raw_fd().to_string();
        self.add([OsStr::new(how), OsStr::new(&number), path.as_os_str()]);
        self.files.push(handle);
    }
}

fn in_memory(name: &str, content: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(content)?;
    file.rewind()?;
    Ok(file.into())
}

/// Finds a program in `PATH`, or in the usual directories if the service has no `PATH`.
fn find(program: &str) -> Option<PathBuf> {
    let path =
        std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/local/bin:/usr/bin:/bin"));
    std::env::split_paths(&path)
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join(program))
        .find(|candidate| candidate.is_file())
}
