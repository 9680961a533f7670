//! The system calls a confined command cannot make.
//!
//! Namespaces hide things; the kernel's code stays reachable. What programs of a workspace don't
//! need and kernels have been broken through is refused with `EPERM`: mounting and new namespaces,
//! eBPF, `io_uring`, keys, modules, handles, sockets of other families than the usual. Neither can
//! a command set the set-user or set-group bit of a file, which would outlive it: where the service
//! is root, the file would make root of whoever starts it.
//!
//! The filter names what is refused and not what is allowed, because commands are any program. Its
//! list follows the one of Docker's default profile
//! (<https://docs.docker.com/engine/security/seccomp/>).

use std::collections::BTreeMap;
use std::sync::LazyLock;

use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};

/// The filter in the form that bubblewrap reads from a descriptor; the error says why there is
/// none.
pub(super) fn program() -> Result<&'static [u8], &'static str> {
    static PROGRAM: LazyLock<Result<Vec<u8>, String>> =
        LazyLock::new(|| build().map(|program| bytes(&program)).map_err(|error| error.to_string()));
    PROGRAM.as_ref().map(Vec::as_slice).map_err(String::as_str)
}

/// Refused whatever their arguments are.
const REFUSED: &[i64] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kcmp,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
    libc::SYS_vhangup,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// Answered as by a kernel that lacks them, because a filter cannot look into what they are given:
/// programs then use the older call, which it can judge.
const MISSING: [i64; 2] = [libc::SYS_clone3, libc::SYS_openat2];

/// Any of these makes a namespace.
const NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWUTS,
    // Not CLONE_NEWTIME: to `clone` its bit is part of a signal's number, so that it needs
    // `clone3`.
];

/// Sockets may be of these families; netlink tells programs their addresses.
const FAMILIES: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Calls that set a file's mode, with the place of the mode among the arguments.
const MODES: &[(i64, u8)] = &[
    (libc::SYS_fchmod, 1),
    (libc::SYS_fchmodat, 2),
    (libc::SYS_fchmodat2, 2),
    (libc::SYS_mknodat, 2),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_chmod, 1),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_creat, 1),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_mknod, 1),
];

/// Calls that set the mode of a file they make, with the places of flags and mode.
const OPENING: &[(i64, u8, u8)] = &[
    (libc::SYS_openat, 2, 3),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, 1, 2),
];

/// In either of these cases a file is made.
const MAKING: [i32; 2] = [libc::O_CREAT, libc::O_TMPFILE & !libc::O_DIRECTORY];

fn build() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    let mut refuse = |call: i64, conditions: Vec<SeccompCondition>| {
        SeccompRule::new(conditions).map(|rule| rules.entry(call).or_default().push(rule))
    };
    for flag in NAMESPACES {
        refuse(libc::SYS_clone, vec![has(0, flag)?])?;
    }
    let other_family = |family| SeccompCondition::new(0, Dword, SeccompCmpOp::Ne, number(family));
    refuse(libc::SYS_socket, FAMILIES.into_iter().map(other_family).collect::<Result<_, _>>()?)?;
    // Both put text into a terminal's input, as if its user had typed it.
    for request in [libc::TIOCSTI, libc::TIOCLINUX] {
        refuse(libc::SYS_ioctl, vec![SeccompCondition::new(1, Dword, SeccompCmpOp::Eq, request)?])?;
    }
    for bit in [libc::S_ISUID, libc::S_ISGID] {
        let bit = bit.cast_signed();
        for (call, mode) in MODES {
            refuse(*call, vec![has(*mode, bit)?])?;
        }
        for (call, flags, mode) in OPENING {
            for making in MAKING {
                refuse(*call, vec![has(*flags, making)?, has(*mode, bit)?])?;
            }
        }
    }
    let refused = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, architecture()?)?;
    let mut program = preamble();
    program.extend(BpfProgram::try_from(filter)?);
    Ok(program)
}

/// The condition that an argument has all bits of `flag`.
fn has(argument: u8, flag: i32) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, Dword, SeccompCmpOp::MaskedEq(number(flag)), number(flag))
}

/// An argument of 32 bits in the form in which conditions take it.
fn number(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}

fn architecture() -> Result<TargetArch, seccompiler::BackendError> {
    TargetArch::try_from(std::env::consts::ARCH)
}

/// What runs before the filter proper: `ENOSYS` for [`MISSING`] calls, and on x86-64 for the second
/// set of numbers that some kernels offer (x32), under which every call could be made unseen.
fn preamble() -> BpfProgram {
    const LOAD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const JUMP_IF_AT_LEAST: u16 = 0x35;
    const RETURN: u16 = 0x06;
    const X32: u32 = 0x4000_0000;
    const SECCOMP_RET_ERRNO: u32 = 0x0005_0000;
    let instruction = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let mut program = vec![instruction(LOAD, 0, 0, 0)];
    let mut checks: Vec<(u16, u32)> =
        MISSING.iter().map(|call| (JUMP_IF_EQUAL, *call as u32)).collect();
    if cfg!(target_arch = "x86_64") {
        checks.push((JUMP_IF_AT_LEAST, X32));
    }
    let count = checks.len() as u8;
    for (index, (code, value)) in (0_u8..).zip(checks) {
        // To the return behind the last check, or on; the last one that doesn't hold skips the
        // return.
        let last = index + 1 == count;
        program.push(instruction(code, count - index - 1, u8::from(last), value));
    }
    program.push(instruction(RETURN, 0, 0, SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned()));
    program
}

/// As the kernel has it in memory (`struct sock_filter`).
fn bytes(program: &BpfProgram) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(program.len() * 8);
    for instruction in program {
        bytes.extend_from_slice(&instruction.code.to_ne_bytes());
        bytes.extend_from_slice(&[instruction.jt, instruction.jf]);
        bytes.extend_from_slice(&instruction.k.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_is_small_enough_for_the_kernel() {
        let program = build().expect("a filter");
        assert!(program.len() < 4096, "{}", program.len());
        assert_eq!(super::program().expect("a filter").len(), program.len() * 8);
    }
}
