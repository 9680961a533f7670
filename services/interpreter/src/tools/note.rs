//! What a search tells of what it left out. A result that is cut without a word is taken for all
//! there is.

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
