//! The limits of one run.

use std::time::Duration;

/// The error name of a call that is not made because its arguments exceed [`Limits::call_bytes`].
pub(super) const ARGUMENTS_EXCEEDED: &str = "CallArgumentsLimitExceeded";
/// The error name of a call that is not made because its arguments have too many values.
pub(super) const VALUES_EXCEEDED: &str = "CallValuesLimitExceeded";
/// The error name of a call that was made and whose result exceeds [`Limits::call_bytes`].
pub(super) const RESULT_EXCEEDED: &str = "CallResultLimitExceeded";

/// The limits of one run. Exceeding one ends the run with its own [`Limit`](super::Limit), unless
/// said otherwise.
///
/// Two limits are fixed for every run. JavaScript may nest 256 KiB deep (a few hundred to two
/// thousand calls); more is a `RangeError` that the script can catch. The host gets at most 64
/// concurrent calls; further ones wait inside the guest, in order. A guest that sends more is a
/// failure of the sandbox, see `outstanding.rs`.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// CPU time of the script itself. Time in host calls, waiting or working, is not counted,
    /// except for very short ones (see `Meter`). Checked every millisecond.
    pub cpu: Duration,
    /// Time from start to end, except the wait for a free instance.
    pub wall: Duration,
    /// Memory of the instance, of which the engine itself uses about 3 MiB. A script that needs
    /// more gets an error that it can catch; if it does not, the run ends with this limit. Bounded
    /// by [`EngineConfig::max_memory_bytes`](super::EngineConfig).
    pub memory_bytes: usize,
    /// Maximum size of the printed text. The rest is counted and dropped; the run continues.
    pub output_bytes: usize,
    /// Size of the script's value, as text.
    pub result_bytes: usize,
    /// Number of tool calls and timers.
    pub host_calls: u32,
    /// Size of one call's arguments, and of its result, as JSON. More is an error that the script
    /// can catch, with its own name.
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
