//! The child process: it receives files and sends lists of symbols. It starts with nothing worth
//! stealing, and gives up all other capabilities.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    process::ExitCode,
};

use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use super::symbols::{Grammar, Symbols};

/// Bytes of address space.
const MAX_MEMORY_BYTES: u64 = 768 << 20;
/// Seconds of CPU time.
const MAX_CPU_SECONDS: u64 = 60;
/// Bytes of a file; larger ones are not sent.
const MAX_FILE_BYTES: u32 = 64 << 20;

/// The system calls that are allowed after the start.
const ALLOWED_SYSCALLS: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Parses files from standard input until it ends. Call it before the process starts a thread or
/// reads its configuration: the filter applies to this thread and those it starts.
#[must_use]
pub fn outline_child() -> ExitCode {
    let Ok(mut symbols) = Symbols::new() else { return ExitCode::FAILURE };
    match confine().and_then(|()| serve(&mut symbols)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn confine() -> io::Result<()> {
    let at_most = |value| Rlimit { current: Some(value), maximum: Some(value) };
    setrlimit(Resource::As, at_most(MAX_MEMORY_BYTES))?;
    setrlimit(Resource::Cpu, at_most(MAX_CPU_SECONDS))?;
    setrlimit(Resource::Core, at_most(0))?;
    setrlimit(Resource::Fsize, at_most(0))?;
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let rules: BTreeMap<i64, Vec<_>> =
        ALLOWED_SYSCALLS.iter().map(|call| (*call, Vec::new())).collect();
    let filter = SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch)
        .map_err(io::Error::other)?;
    let program = BpfProgram::try_from(filter).map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

fn serve(symbols: &mut Symbols) -> io::Result<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    loop {
        let mut grammar = [0];
        if input.read(&mut grammar)? == 0 {
            return Ok(());
        }
        let mut length = [0; 4];
        input.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length);
        let grammar = Grammar::from_wire(grammar[0]).filter(|_| length <= MAX_FILE_BYTES);
        let grammar = grammar.ok_or_else(|| io::Error::other("malformed request"))?;
        let mut content = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        input.read_exact(&mut content)?;
        let list = symbols.list(grammar, &content);
        output.write_all(&u32::try_from(list.len()).map_err(io::Error::other)?.to_be_bytes())?;
        output.write_all(list.as_bytes())?;
        output.flush()?;
    }
}
