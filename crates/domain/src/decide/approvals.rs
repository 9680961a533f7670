//! Scripts that wait for people or subtasks are suspended, resumed or ended, and their approvals
//! closed.

use super::{CODE_TIMEOUT, Draft, Effect, MIN_CHECK_INTERVAL};
use crate::{
    StepId,
    approval::{APPROVAL_TIMEOUT, ApprovalCall, ApprovalRequest, ApprovalState, ClosedApproval},
    message::CodeResult,
    subtask::AwaitedCall,
    task::{Phase, Step, StepState},
};

impl Draft<'_> {
    /// The scripts wait for people or subtasks. If they are no longer wanted, or the time for
    /// approvals is over, their known results end the step.
    pub(super) fn suspend_script(
        &mut self,
        step: Step,
        calls: &[String],
        requests: Vec<ApprovalRequest>,
        awaits: Vec<AwaitedCall>,
        results: Vec<CodeResult>,
    ) {
        if matches!(step.state, StepState::Cancelling { .. })
            || self.now >= step.approvals_expire_at()
        {
            return self.end_suspended(step.id, calls, results);
        }
        let waits: Vec<ApprovalCall> =
            requests.iter().map(|request| request.call.clone()).collect();
        let known = &self.d.task.approvals;
        self.d.approval_requests = requests
            .into_iter()
            .filter(|request| !known.iter().any(|known| known.call == request.call))
            .collect();
        // A subtask may have ended since its parent was last reconciled, and its wake may have
        // found a script that still ran. So the task is reconciled again once its row says that it
        // waits.
        self.d.task.subtasks = None;
        self.d.task.step =
            Some(Step { state: StepState::Suspended { waits, awaits, results }, ..step });
    }

    /// Resumes suspended scripts when something that they wait for has arrived.
    pub(super) fn settle_suspended(
        &mut self,
        step: Step,
        waits: &[ApprovalCall],
        awaits: &[AwaitedCall],
    ) {
        let is_decided = |call: &ApprovalCall| {
            let mut known = self.d.task.approvals.iter().filter(|approval| approval.call == *call);
            known.any(|approval| approval.state != ApprovalState::Pending)
        };
        let running = self.d.task.subtasks.as_deref();
        let is_over =
            |call: &AwaitedCall| running.is_some_and(|running| call.is_over(running, self.now));
        if waits.iter().any(is_decided)
            || awaits.iter().any(is_over)
            || self.now >= step.approvals_expire_at()
        {
            return self.resume_step(step);
        }
        self.d.task.phase =
            if waits.is_empty() { Phase::AwaitSubtasks } else { Phase::AwaitApproval };
        let until = awaits.iter().map(|call| call.until).min();
        self.d.task.next_wake = match until {
            Some(_) if running.is_none() => Some(self.now),
            until => {
                Some(until.unwrap_or(step.approvals_expire_at()).min(step.approvals_expire_at()))
            }
        };
    }

    pub(super) fn end_suspended(
        &mut self,
        step: StepId,
        calls: &[String],
        results: Vec<CodeResult>,
    ) {
        self.d.task.step = None;
        // What it just requested is not asked any more.
        self.d.approval_requests.clear();
        self.d.effects.push(Effect::EndCode(step));
        self.append_results(
            calls,
            results,
            "cancelled while it waited; the script was not started",
        );
    }

    /// Closes approvals that need no decision any more. `before` is the step they belong to.
    pub(super) fn close_approvals(&mut self, before: Option<&Step>) {
        let Some(before) = before else { return };
        let expired = self.now >= before.approvals_expire_at();
        let after = self.d.task.step.as_ref().filter(|after| after.id == before.id);
        let is_over = |call: &ApprovalCall| match after.map(|after| &after.state) {
            Some(StepState::Suspended { waits, .. }) => {
                !waits.iter().any(|waited| waited.is_same_call(call))
            }
            Some(_) => expired,
            None => true,
        };
        let state = if expired { ApprovalState::Expired } else { ApprovalState::Cancelled };
        let reason = if expired {
            format!("not decided within {} days", APPROVAL_TIMEOUT.as_secs() / (24 * 60 * 60))
        } else if after.is_some() {
            "the script no longer asks for it".to_owned()
        } else {
            "the script has ended".to_owned()
        };
        let pending = self
            .d
            .task
            .approvals
            .iter()
            .filter(|approval| approval.state == ApprovalState::Pending);
        let closed = pending.filter(|approval| is_over(&approval.call));
        self.d.closed_approvals = closed
            .map(|approval| ClosedApproval { id: approval.id, state, reason: reason.clone() })
            .collect();
    }

    /// Resumes scripts that waited for people or subtasks. The step stays the same, because its
    /// journal is stored under the step's id.
    pub(super) fn resume_step(&mut self, step: Step) {
        let state = StepState::InFlight { deadline: self.now + CODE_TIMEOUT };
        let step = Step { round: step.round + 1, resumed: Some(self.now), state, ..step };
        self.d.task.step = Some(step.clone());
        self.d.task.subtasks = None;
        self.d.task.next_wake = Some(self.now + MIN_CHECK_INTERVAL);
        self.d.effects.push(Effect::ExecuteCode(step));
    }
}
