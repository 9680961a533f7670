//! The system calls that confined commands cannot make.
//!
//! Namespaces hide resources, but the kernel's code stays reachable. The filter denies with `EPERM`
//! what programs of a workspace don't need and what kernels have been exploited through: mounts and
//! new namespaces, eBPF, `io_uring`, keys, modules, handles, sockets of unusual families. It also
//! denies setting the set-user or set-group bit of a file, which would outlive the command: if the
//! service is root, anyone who runs the file would become root.
//!
//! The filter lists what is denied and not what is allowed, because commands can be any program.
//! Its list follows the one of Docker's default profile
//! (<https://docs.docker.com/engine/security/seccomp/>).

use std::collections::BTreeMap;
use std::sync::LazyLock;

use seccompiler::SeccompCmpArgLen::Dword;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};

/// The filter in the form that bubblewrap reads from a descriptor. The error says why it cannot be
/// built.
pub(super) fn program() -> Result<&'static [u8], &'static str> {
    static PROGRAM: LazyLock<Result<Vec<u8>, String>> =
        LazyLock::new(|| build().map(|program| bytes(&program)).map_err(|error| error.to_string()));
    PROGRAM.as_ref().map(Vec::as_slice).map_err(String::as_str)
}

/// System calls that are denied whatever their arguments.
const DENIED: &[i64] = &[
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

/// System calls that fail with `ENOSYS`, because a filter cannot inspect their arguments behind
/// pointers: programs then use the older call, which it can filter.
const UNSUPPORTED: [i64; 2] = [libc::SYS_clone3, libc::SYS_openat2];

/// Flags that create a namespace.
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

/// Allowed socket families; programs learn their addresses through netlink.
const SOCKET_FAMILIES: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Calls that set a file's mode, with the argument index of the mode.
const CHMOD_CALLS: &[(i64, u8)] = &[
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

/// Calls that set the mode of a file they create, with the argument indices of flags and mode.
const OPEN_CALLS: &[(i64, u8, u8)] = &[
    (libc::SYS_openat, 2, 3),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, 1, 2),
];

/// Flags that create a file.
const CREATE_FLAGS: [i32; 2] = [libc::O_CREAT, libc::O_TMPFILE & !libc::O_DIRECTORY];

fn build() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        DENIED.iter().map(|call| (*call, Vec::new())).collect();
    let mut deny = |call: i64, conditions: Vec<SeccompCondition>| {
        SeccompRule::new(conditions).map(|rule| rules.entry(call).or_default().push(rule))
    };
    for flag in NAMESPACES {
        deny(libc::SYS_clone, vec![has(0, flag)?])?;
    }
    let other_family = |family| SeccompCondition::new(0, Dword, SeccompCmpOp::Ne, number(family));
    deny(
        libc::SYS_socket,
        SOCKET_FAMILIES.into_iter().map(other_family).collect::<Result<_, _>>()?,
    )?;
    // Both put text into a terminal's input, as if its user had typed it.
    for request in [libc::TIOCSTI, libc::TIOCLINUX] {
        deny(libc::SYS_ioctl, vec![SeccompCondition::new(1, Dword, SeccompCmpOp::Eq, request)?])?;
    }
    for bit in [libc::S_ISUID, libc::S_ISGID] {
        let bit = bit.cast_signed();
        for (call, mode) in CHMOD_CALLS {
            deny(*call, vec![has(*mode, bit)?])?;
        }
        for (call, flags, mode) in OPEN_CALLS {
            for making in CREATE_FLAGS {
                deny(*call, vec![has(*flags, making)?, has(*mode, bit)?])?;
            }
        }
    }
    let denied = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, architecture()?)?;
    let mut program = preamble();
    program.extend(BpfProgram::try_from(filter)?);
    Ok(program)
}

/// The condition that an argument has all bits of `flag`.
fn has(argument: u8, flag: i32) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, Dword, SeccompCmpOp::MaskedEq(number(flag)), number(flag))
}

/// A 32-bit argument as conditions take it.
fn number(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}

fn architecture() -> Result<TargetArch, seccompiler::BackendError> {
    TargetArch::try_from(std::env::consts::ARCH)
}

/// The instructions before the actual filter: `ENOSYS` for [`UNSUPPORTED`] calls, and on x86-64 for
/// the second set of call numbers that some kernels offer (x32), which would bypass the filter.
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
        UNSUPPORTED.iter().map(|call| (JUMP_IF_EQUAL, *call as u32)).collect();
    if cfg!(target_arch = "x86_64") {
        checks.push((JUMP_IF_AT_LEAST, X32));
    }
    let count = checks.len() as u8;
    for (index, (code, value)) in (0_u8..).zip(checks) {
        // Jumps to the return after the last check, or continues; a failed last check skips the
        // return.
        let last = index + 1 == count;
        program.push(instruction(code, count - index - 1, u8::from(last), value));
    }
    program.push(instruction(RETURN, 0, 0, SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned()));
    program
}

/// The kernel's representation in memory (`struct sock_filter`).
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
    fn filter_is_small_enough_for_the_kernel() {
        let program = build().expect("a filter");
        assert!(program.len() < 4096, "{}", program.len());
        assert_eq!(super::program().expect("a filter").len(), program.len() * 8);
    }
}
