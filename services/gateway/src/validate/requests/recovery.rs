//! Lists of dead letters.

use construct_proto::v1::ListDeadLettersRequest;
use tonic::Status;

use super::tasks::checked;
use crate::validate::Violations;

/// Letters of a list at most.
const LETTERS: i32 = 100;

/// How many are wanted; 0: the request doesn't say.
pub(crate) fn list_dead_letters(request: &ListDeadLettersRequest) -> Result<usize, Status> {
    let mut violations = Violations::new();
    violations.range("limit", request.limit, 0..=LETTERS);
    checked(violations, usize::try_from(request.limit).ok())
}
