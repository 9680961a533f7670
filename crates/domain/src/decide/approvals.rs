//! Scripts that wait for people: put away, gone on with, or ended, and what becomes of the questions.

use super::{CODE_DEADLINE, Draft, Effect, FIRST_CHECK};
use crate::{
    StepId,
    approval::{APPROVAL_LIMIT, ApprovalState, Asked, AskedCall, Closed},
    message::CodeResult,
    task::{Step, StepState},
};

impl Draft<'_> {
    /// The scripts wait for people. If they are not wanted any more, or have used up the time for decisions already, what
    /// is known of them is their result.
    pub(super) fn parked(&mut self, step: Step, calls: &[String], asked: Vec<Asked>, results: Vec<CodeResult>) {
        if matches!(step.state, StepState::Cancelling { .. }) || self.now >= step.approvals_expire() {
            return self.end_parked(step.id, calls, results);
        }
        let waits: Vec<AskedCall> = asked.iter().map(|asked| asked.call.clone()).collect();
        let known = &self.d.task.approvals;
        self.d.asked = asked.into_iter().filter(|asked| !known.iter().any(|known| known.call == asked.call)).collect();
        self.d.task.step = Some(Step { state: StepState::Parked { waits, results }, ..step });
    }

    pub(super) fn end_parked(&mut self, step: StepId, calls: &[String], results: Vec<CodeResult>) {
        self.d.task.step = None;
        // What it has only just asked is not asked any more.
        self.d.asked.clear();
        self.d.effects.push(Effect::EndCode(step));
        self.append_results(calls, results, "cancelled while waiting for an approval; the script was not begun");
    }

    /// Ends the questions that nobody needs to answer any more. `before` is the step the questions are of.
    pub(super) fn close_approvals(&mut self, before: Option<&Step>) {
        let Some(before) = before else { return };
        let expired = self.now >= before.approvals_expire();
        let after = self.d.task.step.as_ref().filter(|after| after.id == before.id);
        let over = |call: &AskedCall| match after.map(|after| &after.state) {
            Some(StepState::Parked { waits, .. }) => !waits.iter().any(|waited| waited.is_at(call)),
            Some(_) => expired,
            None => true,
        };
        let state = if expired { ApprovalState::Expired } else { ApprovalState::Cancelled };
        let words = if expired {
            format!("nobody decided within {} days", APPROVAL_LIMIT.as_secs() / (24 * 60 * 60))
        } else if after.is_some() {
            "the script does not ask for it any more".to_owned()
        } else {
            "the script is over".to_owned()
        };
        let pending = self.d.task.approvals.iter().filter(|approval| approval.state == ApprovalState::Pending);
        let closed = pending.filter(|approval| over(&approval.call));
        self.d.closed = closed.map(|approval| Closed { id: approval.id, state, words: words.clone() }).collect();
    }

    /// Has scripts gone on with that waited for people. It stays the same step, because its journal is known by that.
    pub(super) fn resume_step(&mut self, step: Step) {
        let state = StepState::InFlight { deadline: self.now + CODE_DEADLINE };
        let step = Step { round: step.round + 1, resumed: Some(self.now), state, ..step };
        self.d.task.step = Some(step.clone());
        self.d.task.next_wake = Some(self.now + FIRST_CHECK);
        self.d.effects.push(Effect::ExecuteCode(step));
    }
}
