//! Resource limits of commands.

use std::time::Duration;

/// Resource limits of one command. They apply to all of its processes together and exceeding them
/// ends the command, unless noted otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLimits {
    /// CPU time. The service measures it every 100 ms, without processes that were not reaped; the
    /// kernel limits each process.
    pub cpu: Duration,
    /// Number of processors it is started on, so that programs that ask for the processor count see
    /// this number. A program can still choose others; [`cpu`](Self::cpu) limits its total
    /// computation.
    pub cores: usize,
    /// Resident memory, in bytes. One process also cannot allocate more than this.
    pub memory_bytes: u64,
    /// Live processes. The service counts them every 100 ms, the kernel also if the service does
    /// not run as root.
    pub processes: usize,
    /// Largest file it may write, in bytes; writing more fails.
    pub file_bytes: u64,
    /// Size of the private `/tmp` and of `/dev/shm`, in bytes each; they live in memory. Writing
    /// more fails.
    pub scratch_bytes: u64,
}

impl Default for CommandLimits {
    /// The limits of the smallest compute tier.
    fn default() -> Self {
        Self {
            cpu: Duration::from_secs(20 * 60),
            cores: 2,
            memory_bytes: 4 << 30,
            processes: 512,
            file_bytes: 4 << 30,
            scratch_bytes: 512 << 20,
        }
    }
}
