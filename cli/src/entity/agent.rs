//! Agents.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use construct_proto::v1::{
    Agent, AgentScriptModels, AgentSecrets, AgentSpec, CreateAgentRequest, DeleteAgentRequest,
    GetAgentRequest, ListAgentsRequest, ModelParameters, ThinkingEffort, UpdateAgentRequest,
    list_agents_request::Filter,
};
use jiff::Timestamp;

use super::{ChangeArgs, WriteArgs, age, budget, id, metadata_details, read_text, unless_zero};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    money::{self, Limit},
    output::{Entity, OutputArgs},
    page::ListArgs,
    policy::{self, PolicyArgs},
};

#[derive(Debug, Subcommand)]
pub(crate) enum AgentCommand {
    /// Create an agent.
    Create(Create),
    /// Show an agent.
    Get {
        /// Name or id.
        agent: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List agents.
    List(List),
    /// Change the given fields of an agent.
    Update(Update),
    /// Delete an agent that no task uses.
    Delete {
        /// Name or id.
        agent: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// Lowercase letters, digits, `.`, `_` and `-`.
    name: String,
    /// Name or id of the model.
    #[arg(long)]
    model: String,
    #[arg(long, default_value = "", hide_default_value = true)]
    description: String,
    #[command(flatten)]
    instructions: Instructions,
    /// The maximum model calls per turn. Default: 50.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    max_turns: u32,
    /// Compact the conversation when it fills this percentage of the model's context. Default: 80.
    #[arg(long, value_name = "PERCENT", default_value_t = 0, hide_default_value = true)]
    compact_at: u32,
    /// The compute pool of its tasks' scripts: cpu-2 (default), cpu-4, cpu-8, or another pool of
    /// the installation.
    #[arg(long, value_name = "POOL", default_value = "", hide_default_value = true)]
    compute: String,
    #[command(flatten)]
    parameters: Parameters,
    #[command(flatten)]
    policy: PolicyArgs,
    /// A secret that its scripts may use, by name or id. Repeatable.
    #[arg(long = "secret", value_name = "SECRET")]
    secrets: Vec<String>,
    /// A spending limit in dollars, e.g. 5/day, 20/month or 100/total. Default period: month.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_limit)]
    budget: Option<Limit>,
    /// A further model that its scripts may call, by name or id. Repeatable.
    #[arg(long = "script-model", value_name = "MODEL")]
    script_models: Vec<String>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only agents that use this model.
    #[arg(long, default_value = "", hide_default_value = true)]
    model: String,
    /// Only agents whose name starts with this.
    #[arg(long, value_name = "PREFIX", default_value = "", hide_default_value = true)]
    name_prefix: String,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Update {
    /// Name or id.
    agent: String,
    /// The new name.
    #[arg(long)]
    name: Option<String>,
    /// Name or id of the new model.
    #[arg(long)]
    model: Option<String>,
    #[arg(long)]
    description: Option<String>,
    #[command(flatten)]
    instructions: Instructions,
    /// The maximum model calls per turn.
    #[arg(long, value_name = "N")]
    max_turns: Option<u32>,
    /// Compact the conversation when it fills this percentage of the model's context.
    #[arg(long, value_name = "PERCENT")]
    compact_at: Option<u32>,
    /// The compute pool of future tasks' scripts.
    #[arg(long, value_name = "POOL")]
    compute: Option<String>,
    #[command(flatten)]
    parameters: Parameters,
    #[command(flatten)]
    policy: PolicyArgs,
    /// A secret that its scripts may use; replaces the current ones. Repeatable.
    #[arg(long = "secret", value_name = "SECRET")]
    secrets: Vec<String>,
    /// Remove all secrets.
    #[arg(long, conflicts_with = "secrets")]
    no_secrets: bool,
    /// A further model that its scripts may call; replaces the current ones. Repeatable.
    #[arg(long = "script-model", value_name = "MODEL")]
    script_models: Vec<String>,
    /// Remove all further models.
    #[arg(long, conflicts_with = "script_models")]
    no_script_models: bool,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// The instructions of an agent.
#[derive(Debug, Args)]
struct Instructions {
    /// The instructions of the agent.
    #[arg(long, visible_alias = "prompt", value_name = "TEXT")]
    instructions: Option<String>,
    /// A file with the instructions; `-` is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "instructions")]
    instructions_file: Option<PathBuf>,
}

impl Instructions {
    fn read(self) -> Result<Option<String>, Failure> {
        match self.instructions_file {
            Some(file) => read_text(&file).map(Some),
            None => Ok(self.instructions),
        }
    }
}

/// Parameters of the model.
#[derive(Debug, Args)]
struct Parameters {
    /// The temperature, 0 to 2.
    #[arg(long)]
    temperature: Option<f64>,
    /// The maximum tokens of an answer.
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// Nucleus sampling, 0 to 1.
    #[arg(long)]
    top_p: Option<f64>,
    #[arg(long, value_name = "N")]
    top_k: Option<u32>,
    /// A text at which the model stops. Repeatable.
    #[arg(long = "stop", value_name = "TEXT")]
    stop_sequences: Vec<String>,
    /// How much the model thinks before it answers.
    #[arg(long, value_enum, value_name = "EFFORT")]
    thinking: Option<Thinking>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Thinking {
    /// The vendor's default.
    Default,
    /// Off, or as little as the model supports.
    Off,
    Low,
    Medium,
    High,
}

impl From<Thinking> for ThinkingEffort {
    fn from(thinking: Thinking) -> Self {
        match thinking {
            Thinking::Default => Self::Unspecified,
            Thinking::Off => Self::Off,
            Thinking::Low => Self::Low,
            Thinking::Medium => Self::Medium,
            Thinking::High => Self::High,
        }
    }
}

fn thinking_name(effort: ThinkingEffort) -> &'static str {
    match effort {
        ThinkingEffort::Unspecified => "",
        ThinkingEffort::Off => "off",
        ThinkingEffort::Low => "low",
        ThinkingEffort::Medium => "medium",
        ThinkingEffort::High => "high",
    }
}

impl Parameters {
    fn is_any_set(&self) -> bool {
        self.temperature.is_some()
            || self.max_tokens.is_some()
            || self.top_p.is_some()
            || self.top_k.is_some()
            || !self.stop_sequences.is_empty()
            || self.thinking.is_some()
    }

    /// The given parameters, with the others from `base`.
    fn merge(self, base: ModelParameters) -> ModelParameters {
        ModelParameters {
            temperature: self.temperature.or(base.temperature),
            max_tokens: self.max_tokens.or(base.max_tokens),
            top_p: self.top_p.or(base.top_p),
            top_k: self.top_k.or(base.top_k),
            stop_sequences: if self.stop_sequences.is_empty() {
                base.stop_sequences
            } else {
                self.stop_sequences
            },
            thinking: self
                .thinking
                .map_or(base.thinking, |thinking| ThinkingEffort::from(thinking).into()),
        }
    }
}

impl AgentCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => args.run(gateway).await,
            Self::Get { agent, output } => output.entity(&get(gateway, agent).await?),
            Self::List(args) => args.run(gateway).await,
            Self::Update(args) => args.run(gateway).await,
            Self::Delete { agent, write, output } => {
                let request =
                    DeleteAgentRequest { agent: agent.clone(), idempotency_key: write.key() };
                call(gateway.agents().delete_agent(request)).await?;
                output.deleted("agent", &agent)
            }
        }
    }
}

impl Create {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let parameters =
            self.parameters.is_any_set().then(|| self.parameters.merge(ModelParameters::default()));
        let spec = AgentSpec {
            name: self.name,
            description: self.description,
            instructions: self.instructions.read()?.unwrap_or_default(),
            model: self.model,
            max_turns: self.max_turns,
            compact_at_percent: self.compact_at,
            parameters,
            policy: self.policy.read()?.unwrap_or_default().rules,
            compute: self.compute,
            secrets: self.secrets,
            script_models: self.script_models,
        };
        let request = CreateAgentRequest { spec: Some(spec), idempotency_key: self.write.key() };
        let agent = call(gateway.agents().create_agent(request)).await?;
        budget::create(gateway, budget::Owner::Agent(&id(agent.metadata.as_ref())), self.budget)
            .await?;
        self.output.entity(&agent)
    }
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let filter = Filter { model: self.model, name_prefix: self.name_prefix };
        let listed = self
            .list
            .collect(|page| {
                let request = ListAgentsRequest { page: Some(page), filter: Some(filter.clone()) };
                async move {
                    let response = call(gateway.agents().list_agents(request)).await?;
                    Ok((response.agents, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

impl Update {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let mut revision = self.change.revision;
        let mut parameters = None;
        if self.parameters.is_any_set() {
            // The API replaces all parameters: the others come from the current agent.
            let current = get(gateway, self.agent.clone()).await?;
            if revision == 0 {
                revision = current.metadata.as_ref().map_or(0, |metadata| metadata.revision);
            }
            parameters = Some(
                self.parameters
                    .merge(current.spec.and_then(|spec| spec.parameters).unwrap_or_default()),
            );
        }
        let request = UpdateAgentRequest {
            agent: self.agent,
            name: self.name,
            description: self.description,
            instructions: self.instructions.read()?,
            model: self.model,
            max_turns: self.max_turns,
            compact_at_percent: self.compact_at,
            parameters,
            policy: self.policy.read()?,
            compute: self.compute,
            secrets: (self.no_secrets || !self.secrets.is_empty())
                .then_some(AgentSecrets { secrets: self.secrets }),
            script_models: (self.no_script_models || !self.script_models.is_empty())
                .then_some(AgentScriptModels { script_models: self.script_models }),
            revision,
            idempotency_key: self.change.write.key(),
        };
        self.output.entity(&call(gateway.agents().update_agent(request)).await?)
    }
}

async fn get(gateway: &Gateway, agent: String) -> Result<Agent, Failure> {
    call(gateway.agents().get_agent(GetAgentRequest { agent })).await
}

impl Entity for Agent {
    const NAME: &'static str = "construct.v1.Agent";
    const PLURAL: &'static str = "agents";
    const COLUMNS: &'static [&'static str] = &["NAME", "MODEL", "TASKS", "AGE", "DESCRIPTION"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        let tasks = self.status.as_ref().map_or(0, |status| status.task_count);
        vec![
            spec.name,
            spec.model,
            tasks.to_string(),
            age(self.metadata.as_ref(), now),
            spec.description,
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let parameters = spec.parameters.unwrap_or_default();
        let tasks = self.status.as_ref().map_or(0, |status| status.task_count);
        let thinking = thinking_name(parameters.thinking()).to_owned();
        let text = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
        let mut details = vec![
            ("name", spec.name),
            ("id", id(self.metadata.as_ref())),
            ("model", spec.model),
            ("description", spec.description),
            ("max turns", unless_zero(spec.max_turns)),
            ("compact at", format!("{} %", spec.compact_at_percent)),
            ("compute", spec.compute),
            ("temperature", text(parameters.temperature)),
            ("max tokens", unless_zero(parameters.max_tokens.unwrap_or(0))),
            ("top p", text(parameters.top_p)),
            ("top k", unless_zero(parameters.top_k.unwrap_or(0))),
            (
                "stop",
                parameters
                    .stop_sequences
                    .iter()
                    .map(|stop| format!("{stop:?}"))
                    .collect::<Vec<_>>()
                    .join(", "),
            ),
            ("thinking", thinking),
            ("tasks", tasks.to_string()),
            ("policy", policy::describe(&spec.policy)),
            ("secrets", spec.secrets.join(", ")),
            ("script models", spec.script_models.join(", ")),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details.push(("instructions", spec.instructions));
        details
    }
}
