//! Notes about what is missing from a result. They have their own property beside the data, and the
//! model sees them whatever a script does with the result: a result truncated without a note would
//! pass for complete.

use super::stop::StopReason;
use crate::workspace::{MAX_DEPTH, MAX_VISITED, WalkEnd};

/// Why a walk was incomplete, unless there were enough results.
pub(super) fn incomplete(end: WalkEnd, stopped: Option<StopReason>) -> Option<String> {
    if stopped == Some(StopReason::TimedOut) {
        return Some("the time limit was reached, and the rest was not searched".to_owned());
    }
    let too_large = format!(
        "there are more than {MAX_VISITED} files and directories, or more than {MAX_DEPTH} levels, and the rest was \
         not searched"
    );
    (end == WalkEnd::TooLarge).then_some(too_large)
}

/// A file or an output contains invalid UTF-8.
pub(super) const NOT_UTF8: &str = "Bytes that are not UTF-8 are shown as U+FFFD.";

/// The end of an output is withheld because it may be part of a secret.
pub(super) const WITHHELD: &str = "The command did not close its output; the last bytes are withheld because they may be part of a secret.";

/// A body contains bytes that are invalid in the encoding of its headers.
pub(super) const UNDECODED: &str = "The body is not pure text: invalid bytes were replaced by U+FFFD, so do not save it as the original file.";

/// Joins notes; `None` without notes.
pub(super) fn join(notes: Vec<String>) -> Option<String> {
    (!notes.is_empty()).then(|| notes.join(" "))
}
