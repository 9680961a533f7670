//! Between the domain's types and the contracts.

use construct_domain::{
    StepId,
    message::{Block, CodeCall, CodeResult, Source, ToolUse},
    money::{Prices, Usage},
    task::{self, Failure, FailureClass, Outcome, Phase, StepResult, TaskError, TurnOutcome},
};
use construct_proto::{mesh::v1 as mesh, v1};
use jiff::Timestamp;

/// A message that says something no worker should say.
#[derive(Debug, thiserror::Error)]
#[error("a step result is not valid: {0}")]
pub(crate) struct Invalid(&'static str);

/// A worker's result with what it cost.
pub(crate) fn step_result(result: mesh::StepResult) -> Result<(StepResult, Usage), Invalid> {
    let step: StepId = result
        .step
        .and_then(|step| step.step_id.parse().ok())
        .ok_or(Invalid("it names no step"))?;
    let outcome = match result.outcome.ok_or(Invalid("it has no outcome"))? {
        mesh::step_result::Outcome::ModelCompleted(completed) => {
            Outcome::Model(completed.blocks.into_iter().filter_map(block_from_proto).collect())
        }
        mesh::step_result::Outcome::CodeCompleted(completed) => Outcome::Code(code_results(completed.results)),
        mesh::step_result::Outcome::Failed(failed) => Outcome::Failed(failure(failed)),
        mesh::step_result::Outcome::Cancelled(cancelled) => Outcome::Cancelled(code_results(cancelled.results)),
    };
    Ok((StepResult { step, outcome }, result.usage.map(usage_from_proto).unwrap_or_default()))
}

fn code_results(results: Vec<v1::CodeInterpreterResult>) -> Vec<CodeResult> {
    results.into_iter().map(code_result_from_proto).collect()
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
    Failure { class, message: failure.message, retry_at: failure.retry_at.and_then(timestamp_from_proto) }
}

pub(crate) fn block_from_proto(block: v1::Block) -> Option<Block> {
    Some(match block.block? {
        v1::block::Block::Text(text) => Block::Text(text.text),
        v1::block::Block::CodeInterpreterCall(call) => {
            Block::CodeInterpreterCall(CodeCall { id: call.id, code: call.code })
        }
        v1::block::Block::CodeInterpreterResult(result) => {
            Block::CodeInterpreterResult(code_result_from_proto(result))
        }
    })
}

fn code_result_from_proto(result: v1::CodeInterpreterResult) -> CodeResult {
    CodeResult {
        id: result.id,
        output: result.output,
        error: result.error,
        tool_uses: result
            .tool_uses
            .into_iter()
            .map(|tool| ToolUse {
                number: tool.number,
                name: tool.name,
                succeeded: tool.succeeded,
                duration_micros: tool.duration_micros,
            })
            .collect(),
    }
}

pub(crate) fn block_to_proto(block: &Block) -> v1::Block {
    let block = match block {
        Block::Text(text) => v1::block::Block::Text(v1::Text { text: text.clone() }),
        Block::CodeInterpreterCall(call) => v1::block::Block::CodeInterpreterCall(code_call_to_proto(call)),
        Block::CodeInterpreterResult(result) => {
            v1::block::Block::CodeInterpreterResult(v1::CodeInterpreterResult {
                id: result.id.clone(),
                output: result.output.clone(),
                error: result.error.clone(),
                tool_uses: result
                    .tool_uses
                    .iter()
                    .map(|tool| v1::ToolUse {
                        number: tool.number,
                        name: tool.name.clone(),
                        succeeded: tool.succeeded,
                        duration_micros: tool.duration_micros,
                    })
                    .collect(),
            })
        }
    };
    v1::Block { block: Some(block) }
}

pub(crate) fn code_call_to_proto(call: &CodeCall) -> v1::CodeInterpreterCall {
    v1::CodeInterpreterCall { id: call.id.clone(), code: call.code.clone() }
}

pub(crate) const fn source_to_proto(source: Source) -> v1::MessageSource {
    match source {
        Source::User => v1::MessageSource::User,
        Source::Assistant => v1::MessageSource::Assistant,
        Source::System => v1::MessageSource::System,
    }
}

pub(crate) const fn phase_to_proto(phase: Phase) -> v1::TaskPhase {
    match phase {
        Phase::AwaitInput => v1::TaskPhase::AwaitInput,
        Phase::InvokeModel => v1::TaskPhase::InvokeModel,
        Phase::ExecuteTools => v1::TaskPhase::ExecuteTools,
        Phase::Suspended => v1::TaskPhase::Suspended,
    }
}

pub(crate) const fn outcome_to_proto(outcome: TurnOutcome) -> v1::TurnOutcome {
    match outcome {
        TurnOutcome::Completed => v1::TurnOutcome::Completed,
        TurnOutcome::Failed => v1::TurnOutcome::Failed,
        TurnOutcome::Cancelled => v1::TurnOutcome::Cancelled,
        TurnOutcome::MaxTurns => v1::TurnOutcome::MaxTurns,
    }
}

pub(crate) fn error_to_proto(error: &TaskError) -> v1::TaskError {
    v1::TaskError {
        code: error.code.clone(),
        message: error.message.clone(),
        time: Some(timestamp_to_proto(error.time)),
    }
}

pub(crate) fn prices_to_proto(prices: &Prices) -> v1::Prices {
    v1::Prices {
        input: prices.input,
        output: prices.output,
        cache_read: prices.cache_read,
        cache_write: prices.cache_write,
    }
}

pub(crate) fn usage_to_proto(usage: &Usage) -> v1::Usage {
    v1::Usage {
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        cache_read_tokens: usage.cache_read_tokens,
        cache_write_tokens: usage.cache_write_tokens,
        cost_pico_usd: usage.cost_pico_usd,
    }
}

fn usage_from_proto(usage: v1::Usage) -> Usage {
    Usage {
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        cache_read_tokens: usage.cache_read_tokens,
        cache_write_tokens: usage.cache_write_tokens,
        cost_pico_usd: usage.cost_pico_usd,
    }
}

pub(crate) fn timestamp_to_proto(time: Timestamp) -> prost_types::Timestamp {
    // A timestamp before 1970 has negative seconds and, in protobuf, still nanoseconds counted forward.
    let nanoseconds = time.as_nanosecond();
    prost_types::Timestamp {
        seconds: i64::try_from(nanoseconds.div_euclid(1_000_000_000)).unwrap_or(i64::MAX),
        nanos: i32::try_from(nanoseconds.rem_euclid(1_000_000_000)).unwrap_or(0),
    }
}

fn timestamp_from_proto(time: prost_types::Timestamp) -> Option<Timestamp> {
    Timestamp::new(time.seconds, time.nanos).ok()
}

/// The deadline of the step, if it is one that has.
pub(crate) fn step_deadline(step: &task::Step) -> Option<Timestamp> {
    match step.state {
        task::StepState::InFlight { deadline } | task::StepState::Cancelling { deadline } => Some(deadline),
        task::StepState::Backoff { .. } => None,
    }
}
