//! Conversions between stored entities and messages for clients. API keys and the values of secrets
//! are never included.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use construct_domain::{
    OrganizationId,
    approval::ApprovalState,
    budget::{Period, Scope},
    message::{self, Block, Source},
    money::{LongContext, Prices, Rates, Usage},
    policy::{Action, Rule},
    schedule::{MissedRunPolicy, Timing},
    task::{Phase, TaskError, TurnOutcome},
};
use construct_proto::v1;
use construct_store::{
    Agent, Bindings, Budget, CostRow, DescendantTotals, Fallback, Model, ModelParameters,
    ModelProvider, ModelProviderKind, PricesSource, RunOutcome, Schedule, ScheduleRun,
    ScheduleTarget, Secret, StoredApproval, StoredMessage, StoredTask, ThinkingEffort,
};
use jiff::Timestamp;

#[cfg(test)]
mod tests;

/// A time as protobuf.
pub fn time(time: Timestamp) -> prost_types::Timestamp {
    // A time before 1970 has negative seconds, but protobuf counts nanoseconds forward.
    let nanoseconds = time.as_nanosecond();
    prost_types::Timestamp {
        seconds: i64::try_from(nanoseconds.div_euclid(1_000_000_000)).unwrap_or(i64::MAX),
        nanos: i32::try_from(nanoseconds.rem_euclid(1_000_000_000)).unwrap_or(0),
    }
}

/// The metadata of an entity.
pub fn metadata(
    id: impl ToString,
    organization: OrganizationId,
    (created_at, updated_at): (Timestamp, Timestamp),
    revision: i64,
) -> Option<v1::Metadata> {
    Some(v1::Metadata {
        id: id.to_string(),
        organization_id: organization.to_string(),
        created_at: Some(time(created_at)),
        updated_at: Some(time(updated_at)),
        revision,
    })
}

/// An agent for clients.
pub fn agent(agent: &Agent) -> v1::Agent {
    v1::Agent {
        metadata: metadata(
            agent.id,
            agent.organization,
            (agent.created_at, agent.updated_at),
            agent.revision,
        ),
        spec: Some(v1::AgentSpec {
            name: agent.name.clone(),
            description: agent.description.clone(),
            instructions: agent.instructions.clone(),
            model: agent.model_name.clone(),
            max_turns: agent.max_turns,
            parameters: Some(parameters(&agent.parameters)),
            policy: agent.policy.iter().map(rule).collect(),
            compute: agent.compute.clone(),
            secrets: agent.secrets.clone(),
            script_models: agent.script_models.clone(),
            compact_at_percent: agent.compact_at,
        }),
        status: Some(v1::AgentStatus {
            model_id: agent.model.to_string(),
            task_count: agent.task_count,
        }),
    }
}

/// Sampling parameters for clients.
pub fn parameters(parameters: &ModelParameters) -> v1::ModelParameters {
    v1::ModelParameters {
        temperature: parameters.temperature,
        max_tokens: parameters.max_tokens,
        top_p: parameters.top_p,
        top_k: parameters.top_k,
        stop_sequences: parameters.stop_sequences.clone(),
        thinking: match parameters.thinking {
            None => v1::ThinkingEffort::Unspecified,
            Some(ThinkingEffort::Off) => v1::ThinkingEffort::Off,
            Some(ThinkingEffort::Low) => v1::ThinkingEffort::Low,
            Some(ThinkingEffort::Medium) => v1::ThinkingEffort::Medium,
            Some(ThinkingEffort::High) => v1::ThinkingEffort::High,
        }
        .into(),
    }
}

/// Sampling parameters from clients.
pub fn to_parameters(parameters: v1::ModelParameters) -> ModelParameters {
    let thinking = match parameters.thinking() {
        v1::ThinkingEffort::Unspecified => None,
        v1::ThinkingEffort::Off => Some(ThinkingEffort::Off),
        v1::ThinkingEffort::Low => Some(ThinkingEffort::Low),
        v1::ThinkingEffort::Medium => Some(ThinkingEffort::Medium),
        v1::ThinkingEffort::High => Some(ThinkingEffort::High),
    };
    ModelParameters {
        temperature: parameters.temperature,
        max_tokens: parameters.max_tokens,
        top_p: parameters.top_p,
        top_k: parameters.top_k,
        stop_sequences: parameters.stop_sequences,
        thinking,
    }
}

/// A policy rule for clients.
pub fn rule(rule: &Rule) -> v1::PolicyRule {
    let action = match rule.action {
        Action::Allow => v1::PolicyAction::Allow,
        Action::Ask => v1::PolicyAction::Ask,
        Action::Deny => v1::PolicyAction::Deny,
    };
    v1::PolicyRule {
        action: action.into(),
        tools: rule.tools.clone(),
        paths: rule.paths.clone(),
        commands: rule.commands.clone(),
        hosts: rule.hosts.clone(),
        methods: rule.methods.clone(),
        reason: rule.reason.clone(),
        agents: rule.agents.clone(),
    }
}

/// A policy rule from clients; `None` without an action.
pub fn to_rule(rule: v1::PolicyRule) -> Option<Rule> {
    let action = match rule.action() {
        v1::PolicyAction::Unspecified => return None,
        v1::PolicyAction::Allow => Action::Allow,
        v1::PolicyAction::Ask => Action::Ask,
        v1::PolicyAction::Deny => Action::Deny,
    };
    let v1::PolicyRule { action: _, tools, paths, commands, hosts, methods, reason, agents } = rule;
    Some(Rule { action, tools, paths, commands, hosts, methods, agents, reason })
}

/// An approval for clients.
pub fn approval(approval: &StoredApproval) -> v1::Approval {
    let times = (approval.created_at, approval.updated_at);
    v1::Approval {
        metadata: metadata(approval.id, approval.organization, times, approval.revision),
        spec: Some(v1::ApprovalSpec {
            task: approval.task.to_string(),
            step_id: approval.step.to_string(),
            script: approval.call.script,
            number: approval.call.number,
            tool: approval.tool.clone(),
            arguments: approval.arguments.clone(),
            arguments_size: approval.arguments_size,
            arguments_hash: approval.call.hash.clone(),
            reason: approval.reason.clone(),
        }),
        status: Some(v1::ApprovalStatus {
            state: approval_state(approval.state).into(),
            decided_by: approval.decided_by.clone(),
            comment: approval.comment.clone(),
            decided_at: approval.decided_at.map(time),
            expires_at: Some(time(approval.expires_at)),
        }),
    }
}

/// The state of an approval for clients.
pub fn approval_state(state: ApprovalState) -> v1::ApprovalState {
    match state {
        ApprovalState::Pending => v1::ApprovalState::Pending,
        ApprovalState::Approved => v1::ApprovalState::Approved,
        ApprovalState::Rejected => v1::ApprovalState::Rejected,
        ApprovalState::Expired => v1::ApprovalState::Expired,
        ApprovalState::Cancelled => v1::ApprovalState::Cancelled,
    }
}

/// The state of an approval from clients; `None` for `UNSPECIFIED`.
pub fn to_approval_state(state: v1::ApprovalState) -> Option<ApprovalState> {
    match state {
        v1::ApprovalState::Unspecified => None,
        v1::ApprovalState::Pending => Some(ApprovalState::Pending),
        v1::ApprovalState::Approved => Some(ApprovalState::Approved),
        v1::ApprovalState::Rejected => Some(ApprovalState::Rejected),
        v1::ApprovalState::Expired => Some(ApprovalState::Expired),
        v1::ApprovalState::Cancelled => Some(ApprovalState::Cancelled),
    }
}

/// A model for clients.
pub fn model(model: &Model) -> v1::Model {
    v1::Model {
        metadata: metadata(
            model.id,
            model.organization,
            (model.created_at, model.updated_at),
            model.revision,
        ),
        spec: Some(v1::ModelSpec {
            name: model.name.clone(),
            provider: model.provider_name.clone(),
            vendor_model: model.vendor_model.clone(),
            context_window: model.context_window,
            max_output_tokens: model.max_output_tokens,
            prices: Some(prices(&model.prices)),
            tool_calling: Some(model.tool_calling),
            fallbacks: model.fallbacks.iter().map(fallback).collect(),
            hedge_after: hedge_after(model.hedge_after_ms),
        }),
        status: Some(v1::ModelStatus {
            provider_id: model.provider.to_string(),
            prices_source: prices_source(model.prices_source).into(),
            breaker: None,
        }),
    }
}

/// The source of prices for clients.
pub fn prices_source(source: PricesSource) -> v1::PricesSource {
    match source {
        PricesSource::Given => v1::PricesSource::Given,
        PricesSource::Catalog => v1::PricesSource::Catalog,
        PricesSource::Free => v1::PricesSource::Free,
        PricesSource::Unknown => v1::PricesSource::Unknown,
    }
}

/// A budget for clients.
pub fn budget(budget: &Budget) -> v1::Budget {
    let (mut agent_id, mut task, mut token_id) = (String::new(), String::new(), String::new());
    match &budget.scope {
        Scope::Organization => {}
        Scope::Agent(agent) => agent_id = agent.to_string(),
        Scope::Task(root) => task = root.to_string(),
        Scope::Token(token) => token_id.clone_from(token),
    }
    v1::Budget {
        metadata: metadata(
            budget.id,
            budget.organization,
            (budget.created_at, budget.updated_at),
            budget.revision,
        ),
        spec: Some(v1::BudgetSpec {
            agent: budget.agent_name.clone(),
            task,
            period: period(budget.period).into(),
            limit_pico_usd: budget.limit,
            token_id,
        }),
        status: Some(v1::BudgetStatus {
            agent_id,
            spent_pico_usd: budget.spent,
            reserved_pico_usd: budget.reserved,
            since: budget.since.map(time),
        }),
    }
}

/// The period of a budget for clients.
pub fn period(period: Period) -> v1::BudgetPeriod {
    match period {
        Period::Total => v1::BudgetPeriod::Total,
        Period::Day => v1::BudgetPeriod::Day,
        Period::Month => v1::BudgetPeriod::Month,
        Period::Call => v1::BudgetPeriod::Call,
    }
}

/// The period of a budget from clients; `None` for `UNSPECIFIED`.
pub fn to_period(period: v1::BudgetPeriod) -> Option<Period> {
    match period {
        v1::BudgetPeriod::Unspecified => None,
        v1::BudgetPeriod::Total => Some(Period::Total),
        v1::BudgetPeriod::Day => Some(Period::Day),
        v1::BudgetPeriod::Month => Some(Period::Month),
        v1::BudgetPeriod::Call => Some(Period::Call),
    }
}

/// The cost of calls for clients.
pub fn cost(row: &CostRow) -> v1::Cost {
    v1::Cost {
        key: row.key.clone(),
        name: row.name.clone(),
        calls: row.calls,
        usage: Some(usage(&row.usage)),
    }
}

fn fallback(fallback: &Fallback) -> v1::ModelFallback {
    v1::ModelFallback { model: fallback.name.clone(), weight: fallback.weight }
}

/// Milliseconds as a duration; `None` for 0.
pub fn hedge_after(millis: i64) -> Option<prost_types::Duration> {
    let nanos = i32::try_from(millis % 1_000 * 1_000_000).ok()?;
    (millis > 0).then_some(prost_types::Duration { seconds: millis / 1_000, nanos })
}

/// A duration in whole milliseconds.
pub fn to_hedge_after(duration: prost_types::Duration) -> i64 {
    duration.seconds.saturating_mul(1_000).saturating_add(i64::from(duration.nanos / 1_000_000))
}

/// A model's prices for clients.
pub fn prices(prices: &Prices) -> v1::Prices {
    let Prices { input, output, cache_read, cache_write, thinking, request, long_context } =
        *prices;
    let long_context = long_context.map(|LongContext { above_input_tokens, rates }| {
        let Rates { input, output, cache_read, cache_write, thinking } = rates;
        v1::LongContextPrices {
            above_input_tokens,
            input,
            output,
            cache_read,
            cache_write,
            thinking,
        }
    });
    v1::Prices { input, output, cache_read, cache_write, thinking, request, long_context }
}

/// A model's prices from clients.
pub fn to_prices(prices: v1::Prices) -> Prices {
    let v1::Prices { input, output, cache_read, cache_write, thinking, request, long_context } =
        prices;
    let long_context = long_context.map(|long| {
        let v1::LongContextPrices {
            above_input_tokens,
            input,
            output,
            cache_read,
            cache_write,
            thinking,
        } = long;
        LongContext {
            above_input_tokens,
            rates: Rates { input, output, cache_read, cache_write, thinking },
        }
    });
    Prices { input, output, cache_read, cache_write, thinking, request, long_context }
}

/// A provider for clients, without its key.
pub fn model_provider(provider: &ModelProvider) -> v1::ModelProvider {
    let times = (provider.created_at, provider.updated_at);
    v1::ModelProvider {
        metadata: metadata(provider.id, provider.organization, times, provider.revision),
        spec: Some(v1::ModelProviderSpec {
            name: provider.name.clone(),
            r#type: provider_type(provider.kind).into(),
            base_url: provider.base_url.clone(),
            api_key: String::new(),
            script: provider.script.clone().unwrap_or_default(),
            additional_api_keys: Vec::new(),
            max_concurrency: provider.limits.max_concurrency,
            requests_per_minute: provider.limits.requests_per_minute,
            tokens_per_minute: provider.limits.tokens_per_minute,
        }),
        status: Some(v1::ModelProviderStatus {
            additional_api_keys: u32::try_from(provider.additional_keys.len()).unwrap_or(u32::MAX),
            api_key_set: provider.key.is_some(),
            encryption_key_id: provider
                .key
                .as_ref()
                .map(|key| key.key_id.clone())
                .unwrap_or_default(),
        }),
    }
}

/// A schedule for clients.
pub fn schedule(schedule: &Schedule) -> v1::Schedule {
    let times = (schedule.created_at, schedule.updated_at);
    let (at, cron, time_zone) = match &schedule.timing {
        Timing::At(at) => (Some(time(*at)), String::new(), String::new()),
        Timing::Cron { pattern, time_zone } => (None, pattern.clone(), time_zone.clone()),
    };
    let (task, agent) = match schedule.target {
        ScheduleTarget::Task(task) => (task.to_string(), None),
        ScheduleTarget::Agent(agent) => (String::new(), Some(agent)),
    };
    v1::Schedule {
        metadata: metadata(schedule.id, schedule.organization, times, schedule.revision),
        spec: Some(v1::ScheduleSpec {
            name: schedule.name.clone(),
            task,
            agent: schedule.agent_name.clone(),
            blocks: schedule.content.blocks.iter().map(block).collect(),
            priority: if schedule.interrupts {
                v1::MessagePriority::Interrupt
            } else {
                v1::MessagePriority::AfterTurn
            }
            .into(),
            title: schedule.title.clone(),
            workspace: schedule.workspace.clone(),
            at,
            cron,
            time_zone,
            missed_runs: match schedule.missed {
                MissedRunPolicy::Skip => v1::MissedRuns::Skip,
                MissedRunPolicy::Once => v1::MissedRuns::Once,
                MissedRunPolicy::All => v1::MissedRuns::All,
            }
            .into(),
        }),
        status: Some(v1::ScheduleStatus {
            paused: schedule.paused,
            next_run: schedule.next_run.map(time),
            last_run: schedule.last_run.map(time),
            last_error: schedule.last_error.clone().unwrap_or_default(),
            agent_id: agent.map(|agent| agent.to_string()).unwrap_or_default(),
        }),
    }
}

/// The policy for missed runs from clients; `None` for `UNSPECIFIED`.
pub fn to_missed_run_policy(missed: v1::MissedRuns) -> Option<MissedRunPolicy> {
    match missed {
        v1::MissedRuns::Unspecified => None,
        v1::MissedRuns::Skip => Some(MissedRunPolicy::Skip),
        v1::MissedRuns::Once => Some(MissedRunPolicy::Once),
        v1::MissedRuns::All => Some(MissedRunPolicy::All),
    }
}

/// A run of a schedule for clients.
pub fn schedule_run(run: &ScheduleRun) -> v1::ScheduleRun {
    v1::ScheduleRun {
        due: Some(time(run.due)),
        outcome: match run.outcome {
            RunOutcome::Sent => v1::ScheduleRunOutcome::Sent,
            RunOutcome::PassedOver => v1::ScheduleRunOutcome::Skipped,
            RunOutcome::Failed => v1::ScheduleRunOutcome::Failed,
        }
        .into(),
        time: Some(time(run.created_at)),
        task: run.task.map(|task| task.to_string()).unwrap_or_default(),
        message: run.message.map(|message| message.to_string()).unwrap_or_default(),
        error: run.error.clone().unwrap_or_default(),
    }
}

/// A secret for clients, without its value.
pub fn secret(secret: &Secret) -> v1::Secret {
    let Bindings { hosts, commands } = secret.bindings.clone();
    v1::Secret {
        metadata: metadata(
            secret.id,
            secret.organization,
            (secret.created_at, secret.updated_at),
            secret.revision,
        ),
        spec: Some(v1::SecretSpec {
            name: secret.name.clone(),
            description: secret.description.clone(),
            value: String::new(),
            bindings: Some(v1::SecretBindings { hosts, commands }),
        }),
        status: Some(v1::SecretStatus {
            encryption_key_id: secret.value.key_id.clone(),
            agent_count: secret.agent_count,
        }),
    }
}

/// The type of a provider for clients.
pub fn provider_type(kind: ModelProviderKind) -> v1::ModelProviderType {
    match kind {
        ModelProviderKind::Anthropic => v1::ModelProviderType::Anthropic,
        ModelProviderKind::Openai => v1::ModelProviderType::Openai,
        ModelProviderKind::Scripted => v1::ModelProviderType::Scripted,
        ModelProviderKind::OpenaiResponses => v1::ModelProviderType::OpenaiResponses,
        ModelProviderKind::Gemini => v1::ModelProviderType::Gemini,
        ModelProviderKind::Bedrock => v1::ModelProviderType::Bedrock,
        ModelProviderKind::Xai => v1::ModelProviderType::Xai,
        ModelProviderKind::Deepseek => v1::ModelProviderType::Deepseek,
        ModelProviderKind::Ollama => v1::ModelProviderType::Ollama,
        ModelProviderKind::Openrouter => v1::ModelProviderType::Openrouter,
        ModelProviderKind::Local => v1::ModelProviderType::Local,
    }
}

/// The type of a provider from clients; `None` for `UNSPECIFIED`.
pub fn to_provider_kind(kind: v1::ModelProviderType) -> Option<ModelProviderKind> {
    match kind {
        v1::ModelProviderType::Unspecified => None,
        v1::ModelProviderType::Anthropic => Some(ModelProviderKind::Anthropic),
        v1::ModelProviderType::Openai => Some(ModelProviderKind::Openai),
        v1::ModelProviderType::Scripted => Some(ModelProviderKind::Scripted),
        v1::ModelProviderType::OpenaiResponses => Some(ModelProviderKind::OpenaiResponses),
        v1::ModelProviderType::Gemini => Some(ModelProviderKind::Gemini),
        v1::ModelProviderType::Bedrock => Some(ModelProviderKind::Bedrock),
        v1::ModelProviderType::Xai => Some(ModelProviderKind::Xai),
        v1::ModelProviderType::Deepseek => Some(ModelProviderKind::Deepseek),
        v1::ModelProviderType::Ollama => Some(ModelProviderKind::Ollama),
        v1::ModelProviderType::Openrouter => Some(ModelProviderKind::Openrouter),
        v1::ModelProviderType::Local => Some(ModelProviderKind::Local),
    }
}

/// A task for clients.
pub fn task(task: &StoredTask) -> v1::Task {
    let state = &task.state;
    let desired = if state.suspend { v1::TaskPhase::Suspended } else { v1::TaskPhase::Unspecified };
    v1::Task {
        metadata: metadata(
            state.id,
            state.organization,
            (task.created_at, task.updated_at),
            task.revision,
        ),
        spec: Some(v1::TaskSpec {
            agent: task.agent_name.clone(),
            workspace: task.workspace.clone(),
            title: task.title.clone(),
            max_turns: task.max_turns_override,
            policy: task.policy.iter().map(rule).collect(),
            compute: task.compute.clone(),
            pinned: task.pinned.clone(),
        }),
        status: Some(v1::TaskStatus {
            agent_id: state.agent.to_string(),
            phase: task.phase().map_or(v1::TaskPhase::Unspecified, phase).into(),
            desired_phase: desired.into(),
            phase_since: Some(time(task.phase_since)),
            usage: Some(usage(&task.usage)),
            tool_uses: task.tool_uses.iter().map(|(tool, uses)| (tool.clone(), *uses)).collect(),
            message_count: state.last_position,
            queued_count: task.queued_count,
            last_outcome: state.last_outcome.map_or(v1::TurnOutcome::Unspecified, outcome).into(),
            last_error: state.last_error.as_ref().map(error),
            turns_used: state.turn.as_ref().map_or(0, |turn| turn.calls),
            event_sequence: task.event_sequence,
            forked_from: task.forked_from.map(|(task, message)| v1::ForkOrigin {
                task: task.to_string(),
                message: message.to_string(),
            }),
            context_tokens: state.context.tokens,
            context_limit: state.context.input_limit,
            compacted_through: state.context.through,
            parent: task.ancestors.last().map(ToString::to_string).unwrap_or_default(),
            depth: u32::try_from(task.ancestors.len()).unwrap_or(u32::MAX),
            subtasks: task.subtasks.iter().map(ToString::to_string).collect(),
            subtask_totals: None,
        }),
    }
}

/// The totals of a task's descendants for clients.
pub fn descendant_totals(totals: &DescendantTotals) -> v1::SubtaskTotals {
    v1::SubtaskTotals {
        count: totals.count,
        active: totals.at_work,
        cost_pico_usd: totals.cost_pico_usd,
    }
}

/// The phase of a task for clients.
pub fn phase(phase: Phase) -> v1::TaskPhase {
    match phase {
        Phase::AwaitInput => v1::TaskPhase::AwaitInput,
        Phase::InvokeModel => v1::TaskPhase::InvokeModel,
        Phase::ExecuteTools => v1::TaskPhase::ExecuteTools,
        Phase::AwaitApproval => v1::TaskPhase::AwaitApproval,
        Phase::AwaitSubtasks => v1::TaskPhase::AwaitSubtasks,
        Phase::Suspended => v1::TaskPhase::Suspended,
    }
}

/// The phase of a task from clients; `None` for `UNSPECIFIED`.
pub fn to_phase(phase: v1::TaskPhase) -> Option<Phase> {
    match phase {
        v1::TaskPhase::Unspecified => None,
        v1::TaskPhase::AwaitInput => Some(Phase::AwaitInput),
        v1::TaskPhase::InvokeModel => Some(Phase::InvokeModel),
        v1::TaskPhase::ExecuteTools => Some(Phase::ExecuteTools),
        v1::TaskPhase::Suspended => Some(Phase::Suspended),
        v1::TaskPhase::AwaitApproval => Some(Phase::AwaitApproval),
        v1::TaskPhase::AwaitSubtasks => Some(Phase::AwaitSubtasks),
    }
}

/// The outcome of a turn for clients.
pub fn outcome(outcome: TurnOutcome) -> v1::TurnOutcome {
    match outcome {
        TurnOutcome::Completed => v1::TurnOutcome::Completed,
        TurnOutcome::Failed => v1::TurnOutcome::Failed,
        TurnOutcome::Cancelled => v1::TurnOutcome::Cancelled,
        TurnOutcome::MaxTurns => v1::TurnOutcome::MaxTurns,
        TurnOutcome::Interrupted => v1::TurnOutcome::Interrupted,
    }
}

/// An error of a task for clients.
pub fn error(error: &TaskError) -> v1::TaskError {
    v1::TaskError {
        code: error.code.clone(),
        message: error.message.clone(),
        time: Some(time(error.time)),
    }
}

/// The usage of a call for clients.
pub fn usage(usage: &Usage) -> v1::Usage {
    v1::Usage {
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        cache_read_tokens: usage.cache_read_tokens,
        cache_write_tokens: usage.cache_write_tokens,
        cost_pico_usd: usage.cost_pico_usd,
        thinking_tokens: usage.thinking_tokens,
    }
}

/// The usage of a call from clients.
pub fn to_usage(usage: v1::Usage) -> Usage {
    Usage {
        input_tokens: usage.input_tokens,
        output_tokens: usage.output_tokens,
        cache_read_tokens: usage.cache_read_tokens,
        cache_write_tokens: usage.cache_write_tokens,
        thinking_tokens: usage.thinking_tokens,
        cost_pico_usd: usage.cost_pico_usd,
    }
}

/// A message for clients.
pub fn message(message: &StoredMessage) -> v1::Message {
    let times = (message.created_at, message.updated_at);
    v1::Message {
        metadata: metadata(message.id, message.organization, times, message.revision),
        spec: Some(v1::MessageSpec {
            task: message.task.to_string(),
            blocks: message.content.blocks.iter().map(block).collect(),
            priority: match message.source {
                Source::User if message.interrupts => v1::MessagePriority::Interrupt,
                Source::User => v1::MessagePriority::AfterTurn,
                Source::Assistant | Source::System => v1::MessagePriority::Unspecified,
            }
            .into(),
        }),
        status: Some(v1::MessageStatus {
            source: source(message.source).into(),
            position: message.position.unwrap_or(0),
            processed_at: message.processed_at.map(time),
            usage: (message.source == Source::Assistant).then(|| usage(&message.usage)),
            agent_id: message.agent.map(|agent| agent.to_string()).unwrap_or_default(),
            error: message.error.clone().unwrap_or_default(),
            superseded_at: message.superseded_at.map(time),
            replaces: message.replaces.map(|message| message.to_string()).unwrap_or_default(),
        }),
    }
}

/// The source of a message for clients.
pub fn source(source: Source) -> v1::MessageSource {
    match source {
        Source::User => v1::MessageSource::User,
        Source::Assistant => v1::MessageSource::Assistant,
        Source::System => v1::MessageSource::System,
    }
}

/// The source of a message from clients; `None` for `UNSPECIFIED`.
pub fn to_source(source: v1::MessageSource) -> Option<Source> {
    match source {
        v1::MessageSource::Unspecified => None,
        v1::MessageSource::User => Some(Source::User),
        v1::MessageSource::Assistant => Some(Source::Assistant),
        v1::MessageSource::System => Some(Source::System),
    }
}

/// A block of a message for clients.
pub fn block(block: &Block) -> v1::Block {
    use v1::block::Block as Proto;
    let block = match block {
        Block::Text(text) => Proto::Text(v1::Text { text: text.clone() }),
        Block::CodeInterpreterCall(call) => Proto::CodeInterpreterCall(code_call(call)),
        Block::CodeInterpreterResult(result) => {
            Proto::CodeInterpreterResult(v1::CodeInterpreterResult {
                id: result.id.clone(),
                output: result.output.clone(),
                error: result.error.clone(),
                tool_uses: result.tool_uses.iter().map(tool_use).collect(),
            })
        }
        Block::Thinking(thinking) => Proto::Thinking(v1::Thinking {
            text: thinking.text.clone(),
            vendor: thinking.vendor.clone(),
            provider_id: thinking.provider_id.clone(),
            data: thinking.data.clone(),
        }),
        Block::Attachment(attachment) => Proto::Attachment(v1::Attachment {
            media_type: attachment.media_type.clone(),
            name: attachment.name.clone(),
            // Only `to_attachment` writes it.
            data: BASE64.decode(&attachment.data).unwrap_or_default(),
            file: attachment.file.as_ref().map(|file| file.id.to_string()).unwrap_or_default(),
            sha256: attachment.file.as_ref().map(|file| file.sha256.clone()).unwrap_or_default(),
            size: attachment
                .file
                .as_ref()
                .map_or(0, |file| i64::try_from(file.size).unwrap_or(i64::MAX)),
        }),
    };
    v1::Block { block: Some(block) }
}

/// A script for clients.
pub fn code_call(call: &message::CodeCall) -> v1::CodeInterpreterCall {
    v1::CodeInterpreterCall { id: call.id.clone(), code: call.code.clone() }
}

/// A block from clients; `None` without content, which validation rejects.
pub fn to_block(block: v1::Block) -> Option<Block> {
    use v1::block::Block as Proto;
    Some(match block.block? {
        Proto::Text(text) => Block::Text(text.text),
        Proto::CodeInterpreterCall(call) => {
            Block::CodeInterpreterCall(message::CodeCall { id: call.id, code: call.code })
        }
        Proto::CodeInterpreterResult(result) => {
            Block::CodeInterpreterResult(to_code_result(result))
        }
        Proto::Thinking(thinking) => Block::Thinking(message::Thinking {
            text: thinking.text,
            vendor: thinking.vendor,
            provider_id: thinking.provider_id,
            data: thinking.data,
        }),
        Proto::Attachment(attachment) => Block::Attachment(to_attachment(attachment)),
    })
}

fn to_attachment(attachment: v1::Attachment) -> message::Attachment {
    let v1::Attachment { media_type, name, data, file, sha256, size } = attachment;
    let file = file.parse().ok().map(|id| message::AttachedFile {
        id,
        sha256,
        size: u64::try_from(size).unwrap_or(0),
    });
    message::Attachment { media_type, name, data: BASE64.encode(&data), file }
}

/// The result of a script from clients.
pub fn to_code_result(result: v1::CodeInterpreterResult) -> message::CodeResult {
    let tool_use = |used: v1::ToolUse| message::ToolUse {
        number: used.number,
        name: used.name,
        succeeded: used.succeeded,
        duration_micros: used.duration_micros,
        arguments: used.arguments,
        result: used.result,
    };
    message::CodeResult {
        id: result.id,
        output: result.output,
        error: result.error,
        tool_uses: result.tool_uses.into_iter().map(tool_use).collect(),
    }
}

fn tool_use(used: &message::ToolUse) -> v1::ToolUse {
    v1::ToolUse {
        number: used.number,
        name: used.name.clone(),
        succeeded: used.succeeded,
        duration_micros: used.duration_micros,
        arguments: used.arguments.clone(),
        result: used.result.clone(),
    }
}

/// The content of a user's message: only text and attachments, as validation has ensured. The type
/// of each file must be known.
pub fn to_content(blocks: Vec<v1::Block>) -> message::Content {
    let blocks = blocks.into_iter().filter_map(|block| match block.block {
        Some(v1::block::Block::Text(text)) => Some(Block::Text(text.text)),
        Some(v1::block::Block::Attachment(attachment)) => {
            Some(Block::Attachment(to_attachment(attachment)))
        }
        _ => None,
    });
    message::Content { blocks: blocks.collect() }
}

/// A time from protobuf; `None` when it is beyond the year 9999.
pub fn to_time(time: prost_types::Timestamp) -> Option<Timestamp> {
    Timestamp::new(time.seconds, time.nanos).ok()
}
