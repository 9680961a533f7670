//! What a result lacks, in words. They stand in a property of their own, beside the data, and the
//! model is shown them whatever a script does with the result: one that is cut without a word is
//! taken for all there is.

use super::stop::Stopped;
use crate::workspace::{MAX_DEPTH, MAX_VISITED, WalkEnd};

/// Why a walk did not see everything, if it did not, for other reasons than that there were enough
/// results.
pub(super) fn incomplete(end: WalkEnd, stopped: Option<Stopped>) -> Option<String> {
    if stopped == Some(Stopped::TimedOut) {
        return Some("the time for it was over, and what comes later was not looked at".to_owned());
    }
    let too_large = format!(
        "there are more than {MAX_VISITED} files and directories, or more than {MAX_DEPTH} levels of them, and the rest was \
         not looked at"
    );
    (end == WalkEnd::TooLarge).then_some(too_large)
}

/// Bytes of a file or an output were no UTF-8.
pub(super) const REPLACED: &str = "Bytes that are not UTF-8 are shown as U+FFFD here.";

/// The end of an output is left out because it may be a part of a secret.
pub(super) const WITHHELD: &str = "The command did not end its output by itself; the last bytes are left out, since they may be a part of a secret.";

/// Bytes of a body were no text in the encoding that its headers name.
pub(super) const UNDECODED: &str = "The body is not all text: bytes that belong to no character are U+FFFD here, so do not save it as the file it was.";

/// The note of a result that lacks these.
pub(super) fn joined(notes: Vec<String>) -> Option<String> {
    (!notes.is_empty()).then(|| notes.join(" "))
}
