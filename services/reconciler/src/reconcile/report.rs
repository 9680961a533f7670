//! A worker's report of a step, and what can be derived from it alone.

use construct_domain::{
    ModelId, OrganizationId, StepId,
    message::Block,
    money::Usage,
    task::{Outcome, Stage, StepResult, Task},
};
use construct_proto::mesh::v1 as mesh;
use construct_store::{LoadedTask, Purpose, StepUsage};
use uuid::Uuid;

use crate::convert;

/// A parsed result of a worker.
pub(super) struct Report {
    pub(super) result: StepResult,
    pub(super) usage: Usage,
    pub(super) model: Option<ModelId>,
    pub(super) number: u64,
    /// The id of the call in the ledger.
    pub(super) call: Uuid,
    /// Input tokens that the vendor counted for the answered call.
    pub(super) counted: Option<i64>,
    /// The step's organization; `None` for a step that failed before a worker had it.
    pub(super) organization: Option<OrganizationId>,
}

impl Report {
    pub(super) fn parse(result: mesh::StepResult) -> Result<Self, convert::InvalidResult> {
        let model = result.model_id.parse().ok();
        let number = result.step.as_ref().map_or(0, |step| step.number);
        let organization = result.step.as_ref().and_then(|step| step.organization_id.parse().ok());
        let (call_id, delivery) = (result.call_id.parse().ok(), result.delivery);
        let counted = match &result.outcome {
            Some(mesh::step_result::Outcome::ModelCompleted(completed)) => {
                Some(completed.input_tokens)
            }
            _ => None,
        };
        let (result, usage) = convert::step_result(result)?;
        let call = call_id.unwrap_or_else(|| derive_call_id(result.step, delivery));
        Ok(Self { result, usage, model, number, call, counted, organization })
    }

    /// Creates the report of a step that failed before a worker had it.
    pub(super) fn for_failure(result: StepResult, task: &Task) -> Self {
        let number = task.step.as_ref().map_or(0, |step| step.number);
        let call = result.step.uuid();
        Self {
            result,
            usage: Usage::default(),
            model: None,
            number,
            call,
            counted: None,
            organization: None,
        }
    }
}

/// Derives the id of a call when its worker, one of an earlier version, has set none: the step's
/// id, mixed with the number of a later delivery.
fn derive_call_id(step: StepId, delivery: u32) -> Uuid {
    // The low bits of a step's id are random.
    Uuid::from_u128(step.uuid().as_u128() ^ u128::from(delivery.saturating_sub(1)))
}

/// The usage to record in the ledger. A call without cost leaves no row.
pub(super) fn billable_usage(task: Option<&Task>, report: &Report) -> Option<StepUsage> {
    let sums_up = |task: &Task| {
        task.turn.as_ref().is_some_and(|turn| matches!(turn.stage, Stage::Compact { .. }))
            && task.step.as_ref().is_some_and(|step| step.id == report.result.step)
    };
    let purpose = match task {
        Some(task) if task.title_step == Some(report.result.step) => Purpose::Title,
        Some(task) if sums_up(task) => Purpose::Compaction,
        Some(_) | None => Purpose::Turn,
    };
    let model = report.model.filter(|_| !report.usage.is_zero())?;
    Some(StepUsage {
        step: report.result.step,
        call: report.call,
        model,
        purpose,
        usage: report.usage,
    })
}

/// The title that a model created, if the report contains one: its first line, truncated.
pub(super) fn parse_title(loaded: &LoadedTask, report: &Report) -> Option<String> {
    if loaded.task.title_step != Some(report.result.step) {
        return None;
    }
    let Outcome::Model(blocks, _) = &report.result.outcome else { return None };
    let text = blocks.iter().find_map(|block| match block {
        Block::Text(text) => Some(text.as_str()),
        _ => None,
    })?;
    let line = text.trim().lines().next()?.trim().trim_matches('"');
    (!line.is_empty()).then(|| line.chars().take(200).collect())
}
