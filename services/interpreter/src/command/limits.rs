//! What one command may use.

use std::time::Duration;

/// What one command may use, all of its processes together unless said otherwise. More ends the
/// command, unless said otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLimits {
    /// CPU time. Counted every 100 ms by the service, without processes that nobody waits for; and
    /// for each process by the kernel.
    pub cpu: Duration,
    /// Processors it is started on, so that programs that ask how many there are take so many.
    /// Nothing keeps a program from choosing others; what it may compute in all is
    /// [`cpu`](Self::cpu).
    pub cores: usize,
    /// Resident memory, in bytes. One process also cannot allocate more than this.
    pub memory_bytes: u64,
    /// Live processes. Counted every 100 ms by the service, and by the kernel where the service is
    /// not root.
    pub processes: usize,
    /// Largest file it may write, in bytes; writing more fails.
    pub file_bytes: u64,
    /// Size of the private `/tmp` and of `/dev/shm`, in bytes each; they live in memory. Writing
    /// more fails.
    pub scratch_bytes: u64,
}

impl Default for CommandLimits {
    /// What a command of the smallest tier may use.
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
