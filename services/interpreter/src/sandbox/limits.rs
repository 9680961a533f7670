//! What one run may use.

use std::time::Duration;

/// The name of the error of a call that is not made because its arguments are larger than
/// [`Limits::call_bytes`].
pub(super) const ARGUMENTS_EXCEEDED: &str = "CallArgumentsLimitExceeded";
/// The name of the error of a call that is not made because its arguments hold too many values.
pub(super) const VALUES_EXCEEDED: &str = "CallValuesLimitExceeded";
/// The name of the error of a call that was made and whose result is larger than
/// [`Limits::call_bytes`].
pub(super) const RESULT_EXCEEDED: &str = "CallResultLimitExceeded";

/// What one run may use. Whatever is exceeded ends the run with its own [`Limit`](super::Limit),
/// unless said otherwise.
///
/// Two limits are the sandbox's own and the same for every run: JavaScript may nest 256 KiB deep (a
/// few hundred to two thousand calls; more is a `RangeError` the script can catch), and 64
/// concurrent calls are given to the host at once (further ones wait inside the guest, in order;
/// that the guest gives more is a failure of the sandbox, see `outstanding.rs`).
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// CPU time of the script itself. Time spent in host calls, waiting or working, isn't counted,
    /// but for moments (see `Meter`). Checked every millisecond.
    pub cpu: Duration,
    /// Time from start to end, everything counted except the wait for a free instance.
    pub wall: Duration,
    /// Memory of the instance, of which the engine itself needs about 3 MiB. A script that needs
    /// more gets an error it can catch; the run ends with this limit when it doesn't. Bounded by
    /// [`EngineConfig::max_memory_bytes`](super::EngineConfig).
    pub memory_bytes: usize,
    /// What is kept of the printed text. The rest is counted and dropped; the run goes on.
    pub output_bytes: usize,
    /// Size of the script's value, as text.
    pub result_bytes: usize,
    /// Number of tool calls and timers.
    pub host_calls: u32,
    /// Size of one call's arguments, and of its result, as JSON. More is an error the script can
    /// catch, of a name of its own.
    pub call_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            cpu: Duration::from_secs(10),
            wall: Duration::from_secs(600),
            memory_bytes: 64 << 20,
            output_bytes: 256 << 10,
            result_bytes: 1 << 20,
            host_calls: 10_000,
            call_bytes: 4 << 20,
        }
    }
}
