//! Scripts that wait for people or subtasks: put away, gone on with, or ended, and what becomes of
//! the questions.

use super::{CODE_DEADLINE, Draft, Effect, FIRST_CHECK};
use crate::{
    StepId,
    approval::{APPROVAL_LIMIT, ApprovalState, Asked, AskedCall, Closed},
    message::CodeResult,
    subtask::AwaitedCall,
    task::{Phase, Step, StepState},
};

impl Draft<'_> {
    /// The scripts wait for people or subtasks. If they are not wanted any more, or have used up
    /// the time for decisions already, what is known of them is their result.
    pub(super) fn parked(
        &mut self,
        step: Step,
        calls: &[String],
        asked: Vec<Asked>,
        awaits: Vec<AwaitedCall>,
        results: Vec<CodeResult>,
    ) {
        if matches!(step.state, StepState::Cancelling { .. }) || self.now >= step.approvals_expire()
        {
            return self.end_parked(step.id, calls, results);
        }
        let waits: Vec<AskedCall> = asked.iter().map(|asked| asked.call.clone()).collect();
        let known = &self.d.task.approvals;
        self.d.asked = asked
            .into_iter()
            .filter(|asked| !known.iter().any(|known| known.call == asked.call))
            .collect();
        // A subtask may have ended since its parent was last looked at, and that have been noticed
        // by somebody for whom the scripts still ran. So it is looked at again when it stands in
        // the row that they wait.
        self.d.task.subtasks = None;
        self.d.task.step =
            Some(Step { state: StepState::Parked { waits, awaits, results }, ..step });
    }

    /// Goes on with scripts that are put away, when something they wait for has come.
    pub(super) fn settle_parked(
        &mut self,
        step: Step,
        waits: &[AskedCall],
        awaits: &[AwaitedCall],
    ) {
        let is_decided = |call: &AskedCall| {
            let mut known = self.d.task.approvals.iter().filter(|approval| approval.call == *call);
            known.any(|approval| approval.state != ApprovalState::Pending)
        };
        let at_work = self.d.task.subtasks.as_deref();
        let is_over =
            |call: &AwaitedCall| at_work.is_some_and(|at_work| call.is_over(at_work, self.now));
        if waits.iter().any(is_decided)
            || awaits.iter().any(is_over)
            || self.now >= step.approvals_expire()
        {
            return self.resume_step(step);
        }
        self.d.task.phase =
            if waits.is_empty() { Phase::AwaitSubtasks } else { Phase::AwaitApproval };
        let until = awaits.iter().map(|call| call.until).min();
        self.d.task.next_wake = match until {
            Some(_) if at_work.is_none() => Some(self.now),
            until => Some(until.unwrap_or(step.approvals_expire()).min(step.approvals_expire())),
        };
    }

    pub(super) fn end_parked(&mut self, step: StepId, calls: &[String], results: Vec<CodeResult>) {
        self.d.task.step = None;
        // What it has only just asked is not asked any more.
        self.d.asked.clear();
        self.d.effects.push(Effect::EndCode(step));
        self.append_results(calls, results, "cancelled while it waited; the script was not begun");
    }

    /// Ends the questions that nobody needs to answer any more. `before` is the step the questions
    /// are of.
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
        let pending = self
            .d
            .task
            .approvals
            .iter()
            .filter(|approval| approval.state == ApprovalState::Pending);
        let closed = pending.filter(|approval| over(&approval.call));
        self.d.closed = closed
            .map(|approval| Closed { id: approval.id, state, words: words.clone() })
            .collect();
    }

    /// Has scripts gone on with that waited for people or subtasks. It stays the same step, because
    /// its journal is known by that.
    pub(super) fn resume_step(&mut self, step: Step) {
        let state = StepState::InFlight { deadline: self.now + CODE_DEADLINE };
        let step = Step { round: step.round + 1, resumed: Some(self.now), state, ..step };
        self.d.task.step = Some(step.clone());
        self.d.task.subtasks = None;
        self.d.task.next_wake = Some(self.now + FIRST_CHECK);
        self.d.effects.push(Effect::ExecuteCode(step));
    }
}
