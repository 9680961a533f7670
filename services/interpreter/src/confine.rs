//! `construct-interpreter confine … -- PROGRAM …`: the last step before a confined command.
//!
//! Bubblewrap runs it inside the sandbox. It applies Landlock to itself, limits the number of its
//! processes, and executes the command. Landlock cannot be applied before bubblewrap, since it
//! forbids mounting.
//!
//! It starts with an empty environment and reads the command's from a descriptor, so that a
//! script's variables (`LD_PRELOAD`) have no effect before the rules apply. It reads nothing else,
//! and must do little: it runs before every command.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::process::{Resource, Rlimit};

/// The first argument of the program that selects this mode.
pub const MODE: &str = "confine";

/// The prefix of its error message when the command could not be started.
pub(crate) const FAILURE: &str = "construct-interpreter confine: ";

/// Its exit status in that case.
pub(crate) const FAILURE_STATUS: u8 = 125;

/// The newest version of Landlock that is used. With an older version, the supported part is used.
const NEWEST_ABI: ABI = ABI::V9;

/// Permissions of a command. Everything else that Landlock controls is denied.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Paths below which directories may be listed.
    pub(crate) list: Vec<PathBuf>,
    /// Paths below which everything may be read and executed.
    pub(crate) read: Vec<PathBuf>,
    /// Paths below which devices may be read, written and controlled.
    pub(crate) devices: Vec<PathBuf>,
    /// Paths below which everything is permitted except creating and controlling devices.
    pub(crate) write: Vec<PathBuf>,
    /// Whether TCP may be used.
    pub(crate) tcp: bool,
    /// Maximum number of processes of its user, as the kernel counts them.
    pub(crate) processes: Option<u64>,
    /// The descriptor with the command's environment: NUL-terminated `NAME=value`.
    pub(crate) environment: Option<RawFd>,
}

/// The reason why a command was not started.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("unknown argument {0:?}")]
    Argument(OsString),
    #[error("the argument {0} needs a value")]
    Value(&'static str),
    #[error("there is no command")]
    NoCommand,
    #[error("failed to read the environment")]
    Environment(#[source] io::Error),
    #[error("failed to limit the number of processes")]
    Processes(#[source] rustix::io::Errno),
    #[error("failed to set up Landlock")]
    Landlock(#[from] RulesetError),
    #[error("the kernel does not support Landlock")]
    NoLandlock,
    #[error("failed to run {}", .0.display())]
    Run(PathBuf, #[source] io::Error),
}

/// The version of Landlock in the kernel; `None` if it is not supported or turned off.
pub(crate) fn version() -> Option<u32> {
    const VERSION_ONLY: libc::c_long = 1;
    // SAFETY: with this flag the kernel returns a number and accesses no memory.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0_usize,
            VERSION_ONLY,
        )
    };
    u32::try_from(answer).ok().filter(|version| *version > 0)
}

/// Executes the arguments after [`MODE`]. Returns only if the command could not be started.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Err(error) = run(arguments);
    let mut message = format!("{FAILURE}{error}");
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        message.push_str(&format!(": {error}"));
        source = error.source();
    }
    eprintln!("{message}");
    ExitCode::from(FAILURE_STATUS)
}

fn run(arguments: impl Iterator<Item = OsString>) -> Result<std::convert::Infallible, Error> {
    let (rules, command) = Rules::parse(arguments)?;
    let (program, arguments) = command.split_first().ok_or(Error::NoCommand)?;
    let environment =
        rules.environment.map(read_environment).transpose().map_err(Error::Environment)?;
    if let Some(processes) = rules.processes {
        let hard = rustix::process::getrlimit(Resource::Nproc).maximum.unwrap_or(u64::MAX);
        let bound = Some(processes.min(hard));
        rustix::process::setrlimit(Resource::Nproc, Rlimit { current: bound, maximum: bound })
            .map_err(Error::Processes)?;
    }
    rules.restrict()?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(environment.unwrap_or_default());
    Err(Error::Run(program.into(), command.exec()))
}

impl Rules {
    /// The arguments for these rules, up to and including the `--` before the command.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments = vec![OsString::from(MODE)];
        for (name, paths) in [
            ("--list", &self.list),
            ("--read", &self.read),
            ("--devices", &self.devices),
            ("--write", &self.write),
        ] {
            arguments.extend(paths.iter().flat_map(|path| [name.into(), path.into()]));
        }
        if self.tcp {
            arguments.push("--tcp".into());
        }
        let numbers = [
            ("--processes", self.processes),
            ("--environment", self.environment.map(|fd| fd as u64)),
        ];
        for (name, number) in numbers {
            arguments.extend(
                number.into_iter().flat_map(|number| [name.into(), number.to_string().into()]),
            );
        }
        arguments.push("--".into());
        arguments
    }

    /// Parses the arguments after [`MODE`], with the command.
    fn parse(
        mut arguments: impl Iterator<Item = OsString>,
    ) -> Result<(Self, Vec<OsString>), Error> {
        let mut rules = Self::default();
        while let Some(argument) = arguments.next() {
            let mut path = |name| arguments.next().map(PathBuf::from).ok_or(Error::Value(name));
            match argument.to_str() {
                Some("--list") => rules.list.push(path("--list")?),
                Some("--read") => rules.read.push(path("--read")?),
                Some("--devices") => rules.devices.push(path("--devices")?),
                Some("--write") => rules.write.push(path("--write")?),
                Some("--tcp") => rules.tcp = true,
                Some("--processes") => {
                    rules.processes = Some(number(arguments.next(), "--processes")?)
                }
                Some("--environment") => {
                    rules.environment = Some(number(arguments.next(), "--environment")?)
                }
                Some("--") => return Ok((rules, arguments.collect())),
                _ => return Err(Error::Argument(argument)),
            }
        }
        Err(Error::NoCommand)
    }

    /// Applies the rules to this process and all that it starts.
    fn restrict(&self) -> Result<(), Error> {
        let ruleset = Ruleset::default().handle_access(AccessFs::from_all(NEWEST_ABI))?;
        // Forbids abstract sockets of other processes, and signals to them.
        let ruleset = ruleset.scope(Scope::from_all(NEWEST_ABI))?;
        let ruleset = if self.tcp {
            ruleset
        } else {
            ruleset.handle_access(AccessNet::from_all(NEWEST_ABI))?
        };
        let write = AccessFs::from_all(NEWEST_ABI)
            & !(AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev);
        let devices: BitFlags<AccessFs> = AccessFs::ReadDir
            | AccessFs::ReadFile
            | AccessFs::WriteFile
            | AccessFs::Truncate
            | AccessFs::IoctlDev;
        // Missing paths grant nothing.
        let status = ruleset
            .create()?
            .add_rules(path_beneath_rules(&self.list, AccessFs::ReadDir))?
            .add_rules(path_beneath_rules(&self.read, AccessFs::from_read(NEWEST_ABI)))?
            .add_rules(path_beneath_rules(&self.devices, devices))?
            .add_rules(path_beneath_rules(&self.write, write))?
            .restrict_self()?;
        if status.ruleset == RulesetStatus::NotEnforced { Err(Error::NoLandlock) } else { Ok(()) }
    }
}

fn number<T: std::str::FromStr>(text: Option<OsString>, name: &'static str) -> Result<T, Error> {
    text.as_deref()
        .and_then(OsStr::to_str)
        .and_then(|text| text.parse().ok())
        .ok_or(Error::Value(name))
}

fn read_environment(descriptor: RawFd) -> io::Result<Vec<(OsString, OsString)>> {
    // SAFETY: the parent passes the descriptor for this purpose alone; nothing else here uses it.
    let mut file = unsafe { File::from_raw_fd(descriptor) };
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let variables = bytes.split(|byte| *byte == 0).filter_map(|variable| {
        let at = variable.iter().position(|byte| *byte == b'=')?;
        let name = OsString::from_vec(variable[..at].to_vec());
        Some((name, OsStr::from_bytes(&variable[at + 1..]).to_owned()))
    });
    Ok(variables.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_round_trip_through_arguments() {
        let rules = Rules {
            list: vec!["/".into()],
            read: vec!["/usr".into(), "/with space".into(), "--".into()],
            devices: vec!["/dev".into()],
            write: vec!["/tmp".into()],
            tcp: true,
            processes: Some(7),
            environment: Some(9),
        };
        for rules in [rules, Rules::default()] {
            let mut arguments = rules.arguments();
            arguments.extend(["/bin/sh", "--", "--tcp"].map(OsString::from));
            let mut arguments = arguments.into_iter();
            assert_eq!(arguments.next().as_deref(), Some(OsStr::new(MODE)));
            let (read, command) = Rules::parse(arguments).expect("valid arguments");
            assert_eq!(read, rules);
            assert_eq!(command, ["/bin/sh", "--", "--tcp"]);
        }
    }

    #[test]
    fn invalid_arguments_are_rejected() {
        for arguments in [
            &["--rad", "/usr", "--", "true"][..],
            &["--read"],
            &["--processes", "x", "--", "true"],
            &["true"],
        ] {
            assert!(Rules::parse(arguments.iter().map(OsString::from)).is_err(), "{arguments:?}");
        }
    }
}
