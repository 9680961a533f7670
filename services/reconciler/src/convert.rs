//! What workers report, understood.

use construct_domain::{
    StepId,
    approval::{Asked, AskedCall},
    message::CodeResult,
    money::Usage,
    subtask::AwaitedCall,
    task::{Failure, FailureClass, Outcome, StepResult, Stop},
};
use construct_proto::{
    mesh::v1::{self as mesh, model_completed::StopReason},
    v1,
};
use construct_wire::convert::{to_block, to_code_result, to_time, to_usage};

/// A message that says something no worker should say.
#[derive(Debug, thiserror::Error)]
#[error("a step result is not valid: {0}")]
pub(crate) struct Invalid(&'static str);

/// A worker's result with what it cost.
pub(crate) fn step_result(result: mesh::StepResult) -> Result<(StepResult, Usage), Invalid> {
    let named = result.step.ok_or(Invalid("it names no step"))?;
    let step: StepId = named.step_id.parse().map_err(|_| Invalid("it names no step"))?;
    let outcome = match result.outcome.ok_or(Invalid("it has no outcome"))? {
        mesh::step_result::Outcome::ModelCompleted(completed) => {
            let stop = match completed.stop_reason() {
                StopReason::MaxTokens => Stop::Cut,
                StopReason::Refused => Stop::Refused,
                StopReason::EndTurn | StopReason::ToolUse | StopReason::StopSequence | StopReason::Unspecified => {
                    Stop::Done
                }
            };
            Outcome::Model(completed.blocks.into_iter().filter_map(to_block).collect(), stop)
        }
        mesh::step_result::Outcome::CodeCompleted(completed) => Outcome::Code(code_results(completed.results)),
        mesh::step_result::Outcome::Failed(failed) => Outcome::Failed(failure(failed)),
        mesh::step_result::Outcome::Cancelled(cancelled) if !cancelled.said.is_empty() => {
            Outcome::Stopped(cancelled.said.into_iter().filter_map(to_block).collect())
        }
        mesh::step_result::Outcome::Cancelled(cancelled) => Outcome::Cancelled(code_results(cancelled.results)),
        mesh::step_result::Outcome::Parked(parked) => {
            if parked.calls.is_empty() && parked.awaits.is_empty() {
                return Err(Invalid("it waits for nothing"));
            }
            let asked = parked.calls.into_iter().map(asked).collect();
            let awaits = parked.awaits.into_iter().map(awaited).collect::<Option<_>>();
            let awaits = awaits.ok_or(Invalid("it waits for what is no task, or without end"))?;
            Outcome::Parked { asked, awaits, results: code_results(parked.results) }
        }
    };
    Ok((StepResult { step, round: named.round, outcome }, result.usage.map(to_usage).unwrap_or_default()))
}

fn asked(call: mesh::AskedCall) -> Asked {
    Asked {
        call: AskedCall { script: call.script, number: call.number, hash: call.arguments_hash },
        tool: call.tool,
        arguments: call.arguments,
        arguments_size: call.arguments_size,
        reason: call.reason,
    }
}

fn awaited(call: mesh::AwaitedCall) -> Option<AwaitedCall> {
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
    Failure { class, message: failure.message, retry_at: failure.retry_at.and_then(to_time), tries: failure.tries }
}
