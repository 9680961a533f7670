//! The child's side: files come in, lists of symbols go out. It is started with nothing that is
//! worth taking, and gives up all it can do but that.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    process::ExitCode,
};

use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use super::symbols::{Grammar, Symbols};

/// Bytes of address space.
const MEMORY: u64 = 768 << 20;
/// Seconds of computing.
const SECONDS: u64 = 60;
/// A larger file is not sent.
const MAX_FILE: u32 = 64 << 20;

/// What it may ask the kernel for once it has begun.
const CALLS: &[libc::c_long] = &[
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

/// Parses what comes over standard input until it ends. To be called before the process starts a
/// thread or reads its configuration: the filter is for this thread and those it starts.
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
    setrlimit(Resource::As, at_most(MEMORY))?;
    setrlimit(Resource::Cpu, at_most(SECONDS))?;
    setrlimit(Resource::Core, at_most(0))?;
    setrlimit(Resource::Fsize, at_most(0))?;
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let rules: BTreeMap<i64, Vec<_>> = CALLS.iter().map(|call| (*call, Vec::new())).collect();
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
        let grammar = Grammar::from_wire(grammar[0]).filter(|_| length <= MAX_FILE);
        let grammar =
            grammar.ok_or_else(|| io::Error::other("what comes is not what is agreed"))?;
        let mut content = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        input.read_exact(&mut content)?;
        let list = symbols.list(grammar, &content);
        output.write_all(&u32::try_from(list.len()).map_err(io::Error::other)?.to_be_bytes())?;
        output.write_all(list.as_bytes())?;
        output.flush()?;
    }
}
