//! `construct-interpreter confine … -- PROGRAM …`: the last step in front of a confined command.
//!
//! Bubblewrap runs it inside the sandbox it has made; it puts itself under Landlock, bounds the
//! number of its processes, and becomes the command. Landlock can't come before bubblewrap, since
//! who is under it cannot mount.
//!
//! It starts with an empty environment and takes the command's from a descriptor, so that nothing a
//! script sets (`LD_PRELOAD`) acts before the rules do. It reads nothing else, and must do little:
//! it runs in front of every command.

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

/// The first argument by which the program is asked to do this.
pub const MODE: &str = "confine";

/// What it says first when the command could not be begun.
pub(crate) const FAILURE: &str = "construct-interpreter confine: ";

/// Its exit status then.
pub(crate) const FAILURE_STATUS: u8 = 125;

/// The newest version of Landlock that is made use of; of an older one what it has.
const NEWEST: ABI = ABI::V9;

/// What a command may do. Everything else that Landlock knows is refused.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Below these, the names in directories may be read.
    pub(crate) list: Vec<PathBuf>,
    /// Below these, everything may be read and run.
    pub(crate) read: Vec<PathBuf>,
    /// Below these, devices may be read, written and controlled.
    pub(crate) devices: Vec<PathBuf>,
    /// Below these, everything may be done, but for making and controlling devices.
    pub(crate) write: Vec<PathBuf>,
    /// TCP may be used.
    pub(crate) tcp: bool,
    /// How many processes its user may have, as the kernel counts them.
    pub(crate) processes: Option<u64>,
    /// The descriptor that holds the command's environment: `NAME=value`, each ending with NUL.
    pub(crate) environment: Option<RawFd>,
}

/// Why a command was not begun.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the argument {0:?} is not known")]
    Argument(OsString),
    #[error("the argument {0} lacks its value")]
    Value(&'static str),
    #[error("there is no command")]
    NoCommand,
    #[error("the environment cannot be read")]
    Environment(#[source] io::Error),
    #[error("the number of processes cannot be bounded")]
    Processes(#[source] rustix::io::Errno),
    #[error("Landlock cannot be set up")]
    Landlock(#[from] RulesetError),
    #[error("the kernel has no Landlock")]
    NoLandlock,
    #[error("{} cannot be run", .0.display())]
    Run(PathBuf, #[source] io::Error),
}

/// The version of Landlock that the kernel has; none where it has none, or the operator has turned
/// it off.
pub(crate) fn version() -> Option<u32> {
    const VERSION_ONLY: libc::c_long = 1;
    // SAFETY: with this flag the kernel answers with a number; it is given no memory.
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

/// Does what the arguments behind [`MODE`] say. Returns only when the command could not be begun.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Err(error) = run(arguments);
    let mut words = format!("{FAILURE}{error}");
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        words.push_str(&format!(": {error}"));
        source = error.source();
    }
    eprintln!("{words}");
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
    /// The arguments that say this, up to and with the `--` in front of the command.
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

    /// Reads them back, from behind [`MODE`] on, with the command.
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

    /// Puts this process, and all that it starts, under the rules.
    fn restrict(&self) -> Result<(), Error> {
        let ruleset = Ruleset::default().handle_access(AccessFs::from_all(NEWEST))?;
        // Abstract sockets of others, and signals to them.
        let ruleset = ruleset.scope(Scope::from_all(NEWEST))?;
        let ruleset =
            if self.tcp { ruleset } else { ruleset.handle_access(AccessNet::from_all(NEWEST))? };
        let write = AccessFs::from_all(NEWEST)
            & !(AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev);
        let devices: BitFlags<AccessFs> = AccessFs::ReadDir
            | AccessFs::ReadFile
            | AccessFs::WriteFile
            | AccessFs::Truncate
            | AccessFs::IoctlDev;
        // Paths that are missing grant nothing.
        let status = ruleset
            .create()?
            .add_rules(path_beneath_rules(&self.list, AccessFs::ReadDir))?
            .add_rules(path_beneath_rules(&self.read, AccessFs::from_read(NEWEST)))?
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
    // SAFETY: whoever starts this program hands the descriptor down for this purpose alone; nothing
    // else here uses it.
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
    fn rules_are_read_back_from_the_arguments_that_say_them() {
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
            let (read, command) = Rules::parse(arguments).expect("well said");
            assert_eq!(read, rules);
            assert_eq!(command, ["/bin/sh", "--", "--tcp"]);
        }
    }

    #[test]
    fn what_is_not_understood_is_not_left_out() {
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
