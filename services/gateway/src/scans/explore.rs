//! The exploration of a scan: an agent for each model, and a task with a budget for each scan.

use std::path::Path;

use construct_domain::{
    AgentId, BudgetId, ScanId, TaskId,
    budget::{Period, Scope},
    compute, context,
    policy::{Action, Rule},
};
use construct_proto::v1::{self, event::Payload};
use construct_store::{
    Agent, Budget, Error, Key, Model, ModelFilter, NewAgent, NewBudget, NewTask, Order, Page,
    StoredTask, Write, WriteOutcome, scan::ScanLimits,
};
use tonic::Status;
use uuid::Uuid;

use super::{partial_write, written_entity};
use crate::{api::CallerContext, convert, events, status};

/// The instructions of the agents. A message describes the scan itself.
const INSTRUCTIONS: &str = include_str!("explorer.md");
/// The prefix of the agents' names.
const AGENT_NAME_PREFIX: &str = "repository-scanner";
/// The tools that scripts of an exploration may call. Everything else is refused: an exploration
/// writes, runs, sends and fetches nothing.
const ALLOWED_TOOLS: [&str; 7] =
    ["read_file", "grep", "find_file", "list_files", "print", "tools.search", "tools.describe"];

/// The parameters of an exploration.
pub(super) struct ExplorationRequest<'a> {
    pub(super) model: &'a Model,
    pub(super) repository: &'a str,
    pub(super) budget_pico_usd: i64,
    pub(super) limits: &'a ScanLimits,
}

/// The policy of an exploration. The task has it, so that it holds when the agent is changed.
pub(super) fn policy() -> Vec<Rule> {
    let rule = |action, tools: &[&str], reason: &str| Rule {
        action,
        tools: tools.iter().map(|tool| (*tool).to_owned()).collect(),
        paths: Vec::new(),
        commands: Vec::new(),
        hosts: Vec::new(),
        methods: Vec::new(),
        agents: Vec::new(),
        reason: reason.to_owned(),
    };
    vec![
        rule(Action::Allow, &ALLOWED_TOOLS, ""),
        rule(Action::Deny, &[], "an exploration only reads"),
    ]
}

/// The model that a request names, or the only one there is.
pub(super) async fn model(context: &CallerContext, reference: &str) -> Result<Model, Status> {
    if !reference.is_empty() {
        let found = context.store().model_find(context.organization(), reference).await;
        return found.map_err(|error| status::for_reference(reference, error));
    }
    let page =
        Page { limit: 2, order: Order { key: Key::CreatedAt, descending: false }, after: None };
    let found =
        context.store().model_list(context.organization(), &ModelFilter::default(), &page).await;
    let mut found = found.map_err(status::from_store)?;
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        (None, _) => Err(Status::failed_precondition("spec.model: there is no model yet")),
        (Some(_), false) => {
            Err(Status::invalid_argument("spec.model: is required, because there are several"))
        }
    }
}

/// The task and budget of an exploration.
pub(super) struct Exploration {
    /// The scan's id, which is part of the task's workspace path.
    pub(super) scan: ScanId,
    pub(super) task: TaskId,
    budget: BudgetId,
}

/// Creates the task and the budget of an exploration. A repeated request that got no further gets
/// the same ones, unless they were undone.
pub(super) async fn prepare(
    context: &CallerContext,
    write: &Write,
    dir: &Path,
    request: &ExplorationRequest<'_>,
) -> Result<Exploration, Status> {
    let agent = agent(context, write, request.model).await?;
    let task = || {
        let scan = ScanId::from_uuid(Uuid::now_v7());
        let new = NewTask {
            id: TaskId::from_uuid(Uuid::now_v7()),
            agent,
            workspace: dir.join(scan.to_string()).display().to_string(),
            title: title(request.repository),
            max_turns_override: u32::try_from(request.limits.max_turns).unwrap_or_default(),
            policy: policy(),
            pinned: Vec::new(),
            compute: None,
        };
        (scan, new)
    };
    let render = |task: &StoredTask| {
        let task = convert::task(task);
        events::write_output("task.created", Payload::Task(Box::new(task.clone())), &task)
    };
    let (mut task_write, mut budget_write) =
        (partial_write(write, "task"), partial_write(write, "budget"));
    let (mut scan, new) = task();
    let mut id = new.id;
    match context.store().task_create(&task_write, new, render).await.map_err(status::from_store)? {
        WriteOutcome::Repeated { response } => {
            let unreadable = || Status::internal("the task of a scan cannot be read");
            (scan, id) = earlier_ids(&response).ok_or_else(unreadable)?;
            match context.store().task_get(context.organization(), id).await {
                Ok(_) => {}
                Err(Error::NotFound { .. }) => {
                    // The first attempt was refused and undone.
                    for write in [&mut task_write, &mut budget_write] {
                        write.idempotency = None;
                    }
                    let (another, new) = task();
                    (scan, id) = (another, new.id);
                    let written = context.store().task_create(&task_write, new, render).await;
                    announce(context, &written.map_err(status::from_store)?).await;
                }
                Err(error) => return Err(status::from_store(error)),
            }
        }
        written => announce(context, &written).await,
    }
    let new = NewBudget {
        id: BudgetId::from_uuid(Uuid::now_v7()),
        scope: Scope::Task(id),
        period: Period::Total,
        limit: request.budget_pico_usd,
    };
    let render = |budget: &Budget| {
        let budget = convert::budget(budget);
        events::write_output("budget.created", Payload::Budget(budget.clone()), &budget)
    };
    let written = context
        .store()
        .budget_create(&budget_write, new, render)
        .await
        .map_err(status::from_store)?;
    announce(context, &written).await;
    let budget: v1::Budget = written_entity(written, convert::budget)?;
    let unreadable = || Status::internal("the budget of a scan cannot be read");
    let budget = budget
        .metadata
        .as_ref()
        .and_then(|metadata| metadata.id.parse().ok())
        .ok_or_else(unreadable)?;
    Ok(Exploration { scan, task: id, budget })
}

/// The scan and the task of an earlier request, from its stored answer.
fn earlier_ids(response: &[u8]) -> Option<(ScanId, TaskId)> {
    let task = <v1::Task as prost::Message>::decode(response).ok()?;
    let scan = task.spec.unwrap_or_default().workspace.rsplit('/').next()?.parse().ok()?;
    Some((scan, task.metadata?.id.parse().ok()?))
}

/// Whether a scan, by its stored answer, has this exploration. One that cannot be read may have it.
pub(super) fn has_exploration(response: &[u8], exploration: &Exploration) -> bool {
    let scan = <v1::Scan as prost::Message>::decode(response).ok();
    scan.and_then(|scan| scan.status)
        .is_none_or(|status| status.task_id == exploration.task.to_string())
}

/// Deletes the exploration of a scan that was refused. If that fails, an unused task remains.
pub(super) async fn undo(context: &CallerContext, write: &Write, exploration: &Exploration) {
    let write = Write { idempotency: None, audit: None, ..write.clone() };
    let render = |budget: &Budget| events::deletion_output("budget.deleted", budget.id);
    match context.store().budget_delete(&write, exploration.budget, render).await {
        Ok(written) => announce(context, &written).await,
        Err(error) => {
            tracing::warn!(error = status::chain(&error), "the budget of a refused scan remains")
        }
    }
    let render = |task: &StoredTask| events::deletion_output("task.deleted", task.state.id);
    match context.store().task_delete(&write, exploration.task, render).await {
        Ok(written) => announce(context, &written).await,
        Err(error) => {
            tracing::warn!(error = status::chain(&error), "the task of a refused scan remains")
        }
    }
}

fn title(repository: &str) -> String {
    format!("Scan of {repository}").chars().filter(|c| !c.is_control()).take(200).collect()
}

async fn announce<T>(context: &CallerContext, written: &WriteOutcome<T>) {
    if let WriteOutcome::Applied { event, .. } = written {
        context.backend.publisher.announce(event.as_ref(), None).await;
    }
}

/// The agent that explores with a model, created when it is first needed. Users may change its
/// instructions.
async fn agent(context: &CallerContext, write: &Write, model: &Model) -> Result<AgentId, Status> {
    let name = agent_name(&model.name);
    let render = |agent: &Agent| {
        let agent = convert::agent(agent);
        events::write_output("agent.created", Payload::Agent(agent.clone()), &agent)
    };
    // The second attempt finds an agent that was created concurrently.
    for _ in 0..2 {
        match context.store().agent_find(context.organization(), &name).await {
            Ok(found) if found.model == model.id => return Ok(found.id),
            Ok(_) => {
                let message = format!(
                    "the agent `{name}`, which would explore with `{}`, has another model",
                    model.name
                );
                return Err(Status::failed_precondition(message));
            }
            Err(Error::NotFound { .. }) => {}
            Err(error) => return Err(status::from_store(error)),
        }
        let new = NewAgent {
            id: AgentId::from_uuid(Uuid::now_v7()),
            model: model.id,
            name: name.clone(),
            description: "Explores repositories for the scanner.".to_owned(),
            instructions: INSTRUCTIONS.to_owned(),
            max_turns: 0,
            parameters: construct_store::ModelParameters::default(),
            policy: policy(),
            compute: compute::DEFAULT.to_owned(),
            secrets: Vec::new(),
            script_models: Vec::new(),
            compact_at: context::DEFAULT_COMPACT_AT_PERCENT,
        };
        let write = Write { idempotency: None, audit: None, ..write.clone() };
        match context.store().agent_create(&write, new, render).await {
            Ok(written) => {
                announce(context, &written).await;
                return match written {
                    WriteOutcome::Applied { entity, .. } => Ok(entity.id),
                    WriteOutcome::Repeated { .. } => {
                        Err(Status::internal("an agent was created twice"))
                    }
                };
            }
            Err(Error::AlreadyExists { .. }) => {}
            Err(error) => return Err(status::from_store(error)),
        }
    }
    Err(status::unavailable("the agent of the exploration is being changed concurrently"))
}

/// At most 63 characters, like every name.
fn agent_name(model: &str) -> String {
    let max_suffix = 63 - AGENT_NAME_PREFIX.len() - 1;
    if model.len() <= max_suffix {
        return format!("{AGENT_NAME_PREFIX}.{model}");
    }
    let digest = <sha2::Sha256 as sha2::Digest>::digest(model.as_bytes());
    let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{AGENT_NAME_PREFIX}.{digest}")
}

#[cfg(test)]
mod tests {
    use construct_domain::policy::{Policy, Subject};

    use super::*;
    use crate::validate::formats::is_name;

    #[test]
    fn exploration_policy_allows_reads_only() {
        let policy = Policy::new(policy());
        let judge = |tools: &[&str]| policy.evaluate(tools, &Subject::None).action;
        for tools in [
            &["read", "read_file"][..],
            &["grep"],
            &["glob", "find", "find_file"],
            &["listdir", "list_files"],
        ] {
            assert_eq!(judge(tools), Action::Allow, "{tools:?}");
        }
        for tool in [
            "create_file",
            "edit_file",
            "delete_file",
            "execute_command",
            "fetch",
            "llm.ask",
            "llm.json",
            "llm.embed",
            "secrets.get",
            "setenv",
            "import",
            "anything.new",
        ] {
            assert_eq!(judge(&[tool]), Action::Deny, "{tool}");
        }
        let path = Subject::Path(vec!["repository/src/main.rs".to_owned()]);
        assert_eq!(policy.evaluate(&["read_file"], &path).action, Action::Allow);
        assert_eq!(policy.evaluate(&["create_file"], &path).action, Action::Deny);
    }

    #[test]
    fn agent_name_is_valid_for_every_model_name() {
        for model in ["m", &"m".repeat(44), &"m".repeat(45), &"m".repeat(63)] {
            assert!(is_name(&agent_name(model)), "{}", agent_name(model));
        }
        assert_ne!(agent_name(&"m".repeat(60)), agent_name(&"m".repeat(61)));
    }
}
