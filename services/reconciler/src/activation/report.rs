//! What a worker reports of a step, and what follows from it alone.

use construct_domain::{
    ModelId, OrganizationId,
    message::Block,
    money::Usage,
    task::{Outcome, Stage, StepResult, Task},
};
use construct_proto::mesh::v1 as mesh;
use construct_store::{LoadedTask, Purpose, StepUsage};

use crate::convert;

/// A worker's result, understood.
pub(super) struct Report {
    pub(super) result: StepResult,
    pub(super) usage: Usage,
    pub(super) model: Option<ModelId>,
    pub(super) number: u64,
    /// Which delivery of the command it is of.
    pub(super) delivery: u32,
    /// Tokens of input that the vendor has counted of the call that was answered.
    pub(super) counted: Option<i64>,
    /// Whose step it was; none of one that failed before a worker had it.
    pub(super) organization: Option<OrganizationId>,
}

impl Report {
    pub(super) fn read(result: mesh::StepResult) -> Result<Self, convert::Invalid> {
        let model = result.model_id.parse().ok();
        let number = result.step.as_ref().map_or(0, |step| step.number);
        let organization = result.step.as_ref().and_then(|step| step.organization_id.parse().ok());
        let delivery = result.delivery;
        let counted = match &result.outcome {
            Some(mesh::step_result::Outcome::ModelCompleted(completed)) => Some(completed.input_tokens),
            _ => None,
        };
        let (result, usage) = convert::step_result(result)?;
        Ok(Self { result, usage, model, number, delivery, counted, organization })
    }

    /// Of a step that failed before a worker had it.
    pub(super) fn of(result: StepResult, task: &Task) -> Self {
        let number = task.step.as_ref().map_or(0, |step| step.number);
        Self { result, usage: Usage::default(), model: None, number, delivery: 0, counted: None, organization: None }
    }
}

/// What the ledger is told. A call that cost nothing leaves no row.
pub(super) fn step_usage(task: Option<&Task>, report: &Report) -> Option<StepUsage> {
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
    Some(StepUsage { step: report.result.step, delivery: report.delivery, model, purpose, usage: report.usage })
}

/// The title a model made, if that is what was reported: its first line, bounded.
pub(super) fn title(loaded: &LoadedTask, report: &Report) -> Option<String> {
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
