//! Parses the reports of workers.

use construct_domain::{
    StepId,
    approval::{ApprovalCall, ApprovalRequest},
    message::CodeResult,
    money::Usage,
    subtask::AwaitedCall,
    task::{Failure, FailureClass, Outcome, StepResult, StopReason},
};
use construct_proto::{
    mesh::v1::{self as mesh, model_completed::StopReason as WireStopReason},
    v1,
};
use construct_wire::convert::{to_block, to_code_result, to_time, to_usage};

/// An invalid message of a worker.
#[derive(Debug, thiserror::Error)]
#[error("a step result is not valid: {0}")]
pub(crate) struct InvalidResult(&'static str);

/// A worker's result with its cost. An outcome that is unknown, such as one of a newer worker
/// version, is a failure: if it were ignored, its step would be repeated without end, and its cost
/// never recorded.
pub(crate) fn step_result(result: mesh::StepResult) -> Result<(StepResult, Usage), InvalidResult> {
    let named = result.step.ok_or(InvalidResult("it names no step"))?;
    let step: StepId = named.step_id.parse().map_err(|_| InvalidResult("it names no step"))?;
    let outcome = outcome(result.outcome).unwrap_or_else(|invalid| {
        tracing::error!(%step, %invalid, "a worker's result is invalid; its step has failed");
        let (class, message) = (FailureClass::Internal, invalid.to_string());
        Outcome::Failed(Failure { class, message, retry_at: None, attempts: 0 })
    });
    Ok((
        StepResult { step, round: named.round, outcome },
        result.usage.map(to_usage).unwrap_or_default(),
    ))
}

fn outcome(outcome: Option<mesh::step_result::Outcome>) -> Result<Outcome, InvalidResult> {
    Ok(match outcome.ok_or(InvalidResult("it has no outcome that this version knows"))? {
        mesh::step_result::Outcome::ModelCompleted(completed) => {
            let stop = match completed.stop_reason() {
                WireStopReason::MaxTokens => StopReason::OutputLimit,
                WireStopReason::Refused => StopReason::Refused,
                WireStopReason::EndTurn
                | WireStopReason::ToolUse
                | WireStopReason::StopSequence
                | WireStopReason::Unspecified => StopReason::Complete,
            };
            Outcome::Model(completed.blocks.into_iter().filter_map(to_block).collect(), stop)
        }
        mesh::step_result::Outcome::CodeCompleted(completed) => {
            Outcome::Code(code_results(completed.results))
        }
        mesh::step_result::Outcome::Failed(failed) => Outcome::Failed(failure(failed)),
        mesh::step_result::Outcome::Cancelled(cancelled)
            if !cancelled.partial_answer.is_empty() =>
        {
            Outcome::Interrupted(
                cancelled.partial_answer.into_iter().filter_map(to_block).collect(),
            )
        }
        mesh::step_result::Outcome::Cancelled(cancelled) => {
            Outcome::Cancelled(code_results(cancelled.results))
        }
        mesh::step_result::Outcome::Suspended(suspended) => {
            if suspended.approval_requests.is_empty() && suspended.awaits.is_empty() {
                return Err(InvalidResult("it waits for nothing"));
            }
            let approval_requests =
                suspended.approval_requests.into_iter().map(approval_request).collect();
            let awaits = suspended.awaits.into_iter().map(awaited_call).collect::<Option<_>>();
            let awaits =
                awaits.ok_or(InvalidResult("it waits for what is no task, or without end"))?;
            Outcome::Suspended {
                approval_requests,
                awaits,
                results: code_results(suspended.results),
            }
        }
    })
}

fn approval_request(call: mesh::ApprovalRequest) -> ApprovalRequest {
    ApprovalRequest {
        call: ApprovalCall { script: call.script, number: call.number, hash: call.arguments_hash },
        tool: call.tool,
        arguments: call.arguments,
        arguments_size: call.arguments_size,
        reason: call.reason,
    }
}

fn awaited_call(call: mesh::AwaitedCall) -> Option<AwaitedCall> {
    let tasks = call.task_ids.iter().map(|task| task.parse().ok()).collect::<Option<_>>()?;
    let until = call.until.and_then(to_time)?;
    Some(AwaitedCall { script: call.script, number: call.number, tasks, until })
}

fn code_results(results: Vec<v1::CodeInterpreterResult>) -> Vec<CodeResult> {
    results.into_iter().map(to_code_result).collect()
}

fn failure(failure: mesh::Failure) -> Failure {
    use mesh::FailureClass as Wire;
    let class = match failure.class() {
        Wire::Transient => FailureClass::Transient,
        Wire::RateLimited => FailureClass::RateLimited,
        Wire::Overloaded => FailureClass::Overloaded,
        Wire::Authentication => FailureClass::Authentication,
        Wire::InvalidRequest => FailureClass::InvalidRequest,
        Wire::ContextTooLong => FailureClass::ContextTooLong,
        Wire::ContentRefused => FailureClass::ContentRefused,
        Wire::DeadlineExceeded => FailureClass::DeadlineExceeded,
        Wire::Configuration => FailureClass::Configuration,
        Wire::Internal | Wire::Unspecified => FailureClass::Internal,
    };
    Failure {
        class,
        message: failure.message,
        retry_at: failure.retry_at.and_then(to_time),
        attempts: failure.attempts,
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn invalid_result_is_a_failure_and_keeps_its_cost() {
        let step = StepId::from_uuid(Uuid::now_v7());
        let named = mesh::StepRef { step_id: step.to_string(), round: 3, ..Default::default() };
        let nothing = mesh::Suspended::default();
        let endless =
            mesh::Suspended { awaits: vec![mesh::AwaitedCall::default()], ..Default::default() };
        for (outcome, message) in [
            (None, "no outcome"),
            (Some(mesh::step_result::Outcome::Suspended(nothing)), "waits for nothing"),
            (Some(mesh::step_result::Outcome::Suspended(endless)), "without end"),
        ] {
            let usage = Some(v1::Usage { cost_pico_usd: 7, ..Default::default() });
            let result = mesh::StepResult {
                step: Some(named.clone()),
                outcome,
                usage,
                ..Default::default()
            };
            let (read, usage) = step_result(result).expect("it names its step");
            assert_eq!((read.step, read.round, usage.cost_pico_usd), (step, 3, 7));
            let Outcome::Failed(failure) = read.outcome else { panic!("{:?}", read.outcome) };
            assert_eq!(
                (failure.class, failure.class.is_retryable()),
                (FailureClass::Internal, false)
            );
            assert!(failure.message.contains(message), "{}", failure.message);
        }
    }
}
