//! Commands to workers. They contain everything that workers need, so that those never read
//! PostgreSQL.

use std::time::Duration;

use construct_bus::{Pool, request};
use construct_domain::{
    StepId,
    approval::ApprovalState,
    backoff,
    decide::CODE_TIMEOUT,
    message::{Attachment, CodeCall, Source, code_calls},
    task::{FailureClass, Stage, Step, StepState, Task},
};
use construct_proto::{
    mesh::v1::{self as mesh, model_invoke::Purpose},
    v1,
};
use construct_runtime::{MasterKeys, ModelToken, clock};
use construct_store::{
    Invocation, InvocationFallback, InvocationModel, InvocationProvider, LoadedTask, SealedSecret,
    Secret, StoredApproval,
};
use construct_wire::convert;
use jiff::Timestamp;

use crate::{
    command_inputs::{CommandInputs, TranscriptMessage},
    compaction, prompt,
};

/// Why a command cannot be built.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The row is missing, which foreign keys should prevent.
    #[error("the task's agent, model or provider no longer exists")]
    AgentMissing,
    /// No interpreter of the task's pool answers.
    #[error("no interpreter of the pool `{pool}` describes its tools")]
    NoCatalog {
        /// The pool.
        pool: Pool,
        /// The cause.
        source: request::Error,
    },
    /// The transcript has no scripts for the turn.
    #[error("the transcript holds no script to run")]
    NoCalls,
    /// The turn does not say what to summarize.
    #[error("the turn does not need a summary")]
    NothingToSummarize,
}

impl Error {
    /// When a retry makes sense. An interpreter that starts for the first time on a machine
    /// compiles its guest, so it gets more time than a vendor.
    pub(crate) fn retry_at(&self) -> Option<Timestamp> {
        matches!(self, Self::NoCatalog { .. }).then(|| clock::now() + Duration::from_secs(10))
    }

    pub(crate) const fn class(&self) -> FailureClass {
        match self {
            Self::AgentMissing => FailureClass::Configuration,
            Self::NoCatalog { .. } => FailureClass::Transient,
            Self::NoCalls | Self::NothingToSummarize => FailureClass::Internal,
        }
    }
}

/// Time that a token outlives its step: clocks differ.
const TOKEN_GRACE_PERIOD: Duration = Duration::from_secs(60);

/// Maximum length in characters of each message that a title is made from.
const MAX_TITLE_EXCERPT_CHARS: usize = 2000;

/// The command for the model's next answer.
pub(crate) fn build_answer(
    loaded: &LoadedTask,
    step: &Step,
    inputs: &CommandInputs,
    catalog: &mesh::ToolCatalog,
) -> Result<mesh::ModelInvoke, Error> {
    let invocation = inputs.invocation.as_ref().ok_or(Error::AgentMissing)?;
    let system = prompt::assemble(&prompt::PromptParts {
        instructions: &invocation.agent.instructions,
        workspace: &loaded.workspace,
        facts: &catalog.facts,
        declarations: &catalog.declarations,
        secrets: &inputs.secrets,
        pinned: &loaded.pinned,
    });
    let request = mesh::ModelInvoke {
        step: Some(step_ref(loaded, step)),
        purpose: Purpose::Turn.into(),
        system,
        messages: inputs.transcript().into_iter().map(chat_message).collect(),
        tools: vec![prompt::code_tool()],
        max_attempts: (backoff::MAX_ATTEMPTS + 1).saturating_sub(step.attempt).max(1),
        ..mesh::ModelInvoke::default()
    };
    Ok(with_target(request, invocation))
}

/// The command for a title, with this deadline.
pub(crate) fn build_title(
    loaded: &LoadedTask,
    step: StepId,
    until: Timestamp,
    inputs: &CommandInputs,
) -> Result<mesh::ModelInvoke, Error> {
    let invocation = inputs.invocation.as_ref().ok_or(Error::AgentMissing)?;
    let step = mesh::StepRef {
        organization_id: loaded.task.organization.to_string(),
        task_id: loaded.task.id.to_string(),
        step_id: step.to_string(),
        number: loaded.task.steps,
        deadline: Some(convert::time(until)),
        round: 0,
    };
    let request = mesh::ModelInvoke {
        step: Some(step),
        purpose: Purpose::Title.into(),
        system: prompt::TITLE.to_owned(),
        messages: vec![title_excerpt(&inputs.transcript())],
        ..mesh::ModelInvoke::default()
    };
    Ok(with_target(request, invocation))
}

/// The command for a summary of the older part of the conversation.
pub(crate) fn build_compaction(
    loaded: &LoadedTask,
    task: &Task,
    step: &Step,
    inputs: &CommandInputs,
) -> Result<mesh::ModelInvoke, Error> {
    let Some(Stage::Compact { through, kept, .. }) = task.turn.as_ref().map(|turn| &turn.stage)
    else {
        return Err(Error::NothingToSummarize);
    };
    let invocation = inputs.invocation.as_ref().ok_or(Error::AgentMissing)?;
    let text = compaction::render(
        &inputs.older_messages(*through, kept),
        compaction::max_input_bytes(&task.context),
    );
    let request = mesh::ModelInvoke {
        step: Some(step_ref(loaded, step)),
        purpose: Purpose::Compaction.into(),
        system: prompt::COMPACTION.to_owned(),
        messages: vec![user_text(text)],
        max_attempts: (backoff::MAX_ATTEMPTS + 1).saturating_sub(step.attempt).max(1),
        ..mesh::ModelInvoke::default()
    };
    Ok(with_target(request, invocation))
}

/// Adds the provider, model and fallbacks to a request.
fn with_target(request: mesh::ModelInvoke, invocation: &Invocation) -> mesh::ModelInvoke {
    mesh::ModelInvoke {
        provider: Some(build_provider(&invocation.provider)),
        model: Some(build_target(&invocation.model)),
        fallbacks: build_routes(&invocation.fallbacks),
        hedge_after: convert::hedge_after(invocation.hedge_after_ms),
        parameters: Some(convert::parameters(&invocation.agent.parameters)),
        ..request
    }
}

/// The provider of a model.
pub(crate) fn build_provider(provider: &InvocationProvider) -> mesh::Provider {
    mesh::Provider {
        id: provider.id.to_string(),
        r#type: convert::provider_type(provider.kind).into(),
        base_url: provider.base_url.clone(),
        api_key: provider.key.as_ref().map(sealed_secret),
        script: provider.script.clone().unwrap_or_default(),
        additional_api_keys: provider.additional_keys.iter().map(sealed_secret).collect(),
        max_concurrency: provider.limits.max_concurrency,
        requests_per_minute: provider.limits.requests_per_minute,
        tokens_per_minute: provider.limits.tokens_per_minute,
    }
}

/// The model to call.
pub(crate) fn build_target(model: &InvocationModel) -> mesh::ModelTarget {
    mesh::ModelTarget {
        id: model.id.to_string(),
        vendor_model: model.vendor_model.clone(),
        context_window: model.context_window,
        max_output_tokens: model.max_output_tokens,
        prices: Some(convert::prices(&model.prices)),
        tool_calling: Some(model.tool_calling),
    }
}

/// The fallbacks of a model.
pub(crate) fn build_routes(fallbacks: &[InvocationFallback]) -> Vec<mesh::Route> {
    let orders = orders(fallbacks.iter().map(|fallback| fallback.weight));
    let route = |(fallback, order): (&InvocationFallback, u32)| mesh::Route {
        provider: Some(build_provider(&fallback.provider)),
        model: Some(build_target(&fallback.model)),
        order,
        weight: fallback.weight,
    };
    fallbacks.iter().zip(orders).map(route).collect()
}

/// The order of each fallback. Neighbors with a weight share one: one of them is drawn.
fn orders(weights: impl Iterator<Item = u32>) -> impl Iterator<Item = u32> {
    weights.scan((0, 0), |(order, before), weight| {
        if weight == 0 || *before == 0 {
            *order += 1;
        }
        *before = weight;
        Some(*order)
    })
}

/// The command that runs the scripts of the newest assistant message.
pub(crate) fn build_execution(
    loaded: &LoadedTask,
    task: &Task,
    step: &Step,
    inputs: &CommandInputs,
    token_keys: Option<&MasterKeys>,
) -> Result<mesh::CodeExecute, Error> {
    let Some(Stage::Code { calls: requested }) = task.turn.as_ref().map(|turn| &turn.stage) else {
        return Err(Error::NoCalls);
    };
    let transcript = inputs.transcript();
    let Some(message) = transcript.iter().rev().find(|message| message.source == Source::Assistant)
    else {
        return Err(Error::NoCalls);
    };
    let calls: Vec<&CodeCall> =
        code_calls(message.blocks).filter(|call| requested.contains(&call.id)).collect();
    if calls.is_empty() {
        return Err(Error::NoCalls);
    }
    Ok(mesh::CodeExecute {
        step: Some(step_ref(loaded, step)),
        calls: calls.into_iter().map(convert::code_call).collect(),
        workspace: loaded.workspace.clone(),
        agent_policy: loaded.agent_policy.iter().map(convert::rule).collect(),
        task_policy: loaded.policy.iter().map(convert::rule).collect(),
        decisions: inputs.approvals.iter().filter_map(approval_decision).collect(),
        compute: pool(loaded).to_string(),
        secrets: inputs.secrets.iter().map(granted_secret).collect(),
        may_have_been_sent: false,
        model_token: token_keys
            .map(|keys| model_token(keys, loaded, step, &inputs.script_models))
            .unwrap_or_default(),
        script_models: inputs.script_models.clone(),
        agent_name: loaded.agent_name.clone(),
        files: inputs.files.iter().filter_map(attached_file).collect(),
    })
}

/// The token with which scripts call models; empty when there is no model they may call. It is
/// valid as long as the step can run. Scripts that waited for approvals get a new one when they
/// resume.
fn model_token(keys: &MasterKeys, loaded: &LoadedTask, step: &Step, models: &[String]) -> String {
    if models.is_empty() {
        return String::new();
    }
    let ends = step_deadline(step).unwrap_or_else(|| clock::now() + CODE_TIMEOUT);
    let token = ModelToken {
        // The spending of one message's scripts is counted together, however often they start.
        id: step.id.to_string(),
        organization: loaded.task.organization.to_string(),
        task: loaded.task.id.to_string(),
        // It is counted for the key that created the task's work.
        key: String::new(),
        models: models.to_vec(),
        budget_pico_usd: 0,
        expires_at: ends + TOKEN_GRACE_PERIOD,
    };
    token.sign(keys).expose().to_owned()
}

fn attached_file(
    Attachment { media_type, name, file, .. }: &Attachment,
) -> Option<mesh::AttachedFile> {
    let file = file.as_ref()?;
    Some(mesh::AttachedFile {
        id: file.id.to_string(),
        name: name.clone(),
        media_type: media_type.clone(),
        sha256: file.sha256.clone(),
        size: i64::try_from(file.size).unwrap_or(i64::MAX),
    })
}

/// A sealed secret with its bindings.
fn granted_secret(secret: &Secret) -> mesh::GrantedSecret {
    mesh::GrantedSecret {
        id: secret.id.to_string(),
        name: secret.name.clone(),
        hosts: secret.bindings.hosts.clone(),
        commands: secret.bindings.commands.clone(),
        value: Some(sealed_secret(&secret.value)),
    }
}

fn sealed_secret(SealedSecret { key_id, nonce, ciphertext }: &SealedSecret) -> mesh::SealedSecret {
    mesh::SealedSecret {
        key_id: key_id.clone(),
        nonce: nonce.clone(),
        ciphertext: ciphertext.clone(),
    }
}

/// The pool that runs a task's scripts. The gateway only accepts valid pool names.
pub(crate) fn pool(loaded: &LoadedTask) -> Pool {
    Pool::new(&*loaded.compute).unwrap_or_else(|_| Pool::code_default())
}

/// The decision of an approval that is closed.
fn approval_decision(approval: &StoredApproval) -> Option<mesh::ApprovalDecision> {
    let approved = match approval.state {
        ApprovalState::Pending => return None,
        ApprovalState::Approved => true,
        ApprovalState::Rejected | ApprovalState::Expired | ApprovalState::Cancelled => false,
    };
    Some(mesh::ApprovalDecision {
        script: approval.call.script,
        number: approval.call.number,
        arguments_hash: approval.call.hash.clone(),
        approved,
        comment: approval.comment.clone(),
        decided_by: approval.decided_by.clone(),
    })
}

fn step_ref(loaded: &LoadedTask, step: &Step) -> mesh::StepRef {
    mesh::StepRef {
        organization_id: loaded.task.organization.to_string(),
        task_id: loaded.task.id.to_string(),
        step_id: step.id.to_string(),
        number: step.number,
        deadline: step_deadline(step).map(convert::time),
        round: step.round,
    }
}

fn step_deadline(step: &Step) -> Option<Timestamp> {
    match step.state {
        StepState::InFlight { deadline } | StepState::Cancelling { deadline } => Some(deadline),
        StepState::Backoff { .. } | StepState::Suspended { .. } => None,
    }
}

fn chat_message(TranscriptMessage { source, blocks }: TranscriptMessage<'_>) -> mesh::ChatMessage {
    mesh::ChatMessage {
        source: convert::source(source).into(),
        blocks: blocks.iter().map(model_block).collect(),
    }
}

/// A block for a model, without the arguments and results of tools. Those are for people; a model
/// knows what its script returns about them.
fn model_block(block: &construct_domain::message::Block) -> v1::Block {
    let mut block = convert::block(block);
    if let Some(v1::block::Block::CodeInterpreterResult(result)) = &mut block.block {
        for used in &mut result.tool_uses {
            (used.arguments, used.result) = (String::new(), String::new());
        }
    }
    block
}

/// An excerpt of the first exchange, as one user message.
fn title_excerpt(transcript: &[TranscriptMessage<'_>]) -> mesh::ChatMessage {
    let texts = transcript.iter().take(4).flat_map(|message| {
        message.blocks.iter().filter_map(|block| match block {
            construct_domain::message::Block::Text(text) => {
                let excerpt: String = text.chars().take(MAX_TITLE_EXCERPT_CHARS).collect();
                Some(format!("{}: {excerpt}", message.source.as_str()))
            }
            _ => None,
        })
    });
    user_text(texts.collect::<Vec<_>>().join("\n\n"))
}

fn user_text(text: String) -> mesh::ChatMessage {
    mesh::ChatMessage {
        source: v1::MessageSource::User.into(),
        blocks: vec![v1::Block { block: Some(v1::block::Block::Text(v1::Text { text })) }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighboring_weights_form_one_group() {
        assert_eq!(
            orders([0, 7, 3, 0, 5, 0, 0].into_iter()).collect::<Vec<u32>>(),
            [1, 2, 2, 3, 4, 5, 6]
        );
        assert_eq!(orders([1, 2].into_iter()).collect::<Vec<u32>>(), [1, 1]);
    }

    #[test]
    fn model_sees_tool_names_without_arguments_and_results() {
        use construct_domain::message::{Block, CodeResult, ToolUse};

        let used = ToolUse {
            number: 1,
            name: "grep".into(),
            arguments: "{}".into(),
            result: "[]".into(),
            ..ToolUse::default()
        };
        let result = CodeResult {
            id: "c".into(),
            output: "3".into(),
            tool_uses: vec![used],
            ..CodeResult::default()
        };
        let blocks = [Block::CodeInterpreterResult(result)];
        let message = chat_message(TranscriptMessage { source: Source::System, blocks: &blocks });
        let Some(v1::block::Block::CodeInterpreterResult(shown)) = &message.blocks[0].block else {
            panic!("a result")
        };
        assert_eq!((shown.output.as_str(), shown.tool_uses[0].name.as_str()), ("3", "grep"));
        assert!(shown.tool_uses[0].arguments.is_empty() && shown.tool_uses[0].result.is_empty());
    }
}
