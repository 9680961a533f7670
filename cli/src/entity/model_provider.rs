//! `construct modelprovider`: accounts at vendors.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use construct_proto::v1::{
    ApiKeys, CheckModelProviderRequest, CreateModelProviderRequest, DeleteModelProviderRequest,
    GetModelProviderRequest, KeyCheck, ListModelProvidersRequest, ListVendorModelsRequest,
    ModelProvider, ModelProviderSpec, ModelProviderType, UpdateModelProviderRequest, VendorModel,
    list_model_providers_request::Filter,
};
use jiff::Timestamp;

use super::{ChangeArgs, WriteArgs, age, id, metadata_details, read_stdin, read_text};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, OutputArgs},
    page::{ListArgs, Page},
    text::thousands,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Type {
    /// Anthropic's Messages API.
    Anthropic,
    /// OpenAI's Chat Completions API, and compatible ones.
    Openai,
    /// OpenAI's Responses API, and compatible ones.
    OpenaiResponses,
    /// Google's Gemini API.
    Gemini,
    /// AWS Bedrock. The key is `ACCESS_KEY_ID:SECRET_ACCESS_KEY[:SESSION_TOKEN]` or a Bedrock API
    /// key; the base URL names the region: `https://bedrock-runtime.REGION.amazonaws.com`.
    Bedrock,
    Xai,
    Deepseek,
    /// Ollama's own API; needs no key.
    Ollama,
    Openrouter,
    /// Embedding models from local files of the providers service; no vendor, no key.
    Local,
    /// Answers from a script; no vendor, no key.
    Scripted,
}

impl From<Type> for ModelProviderType {
    fn from(kind: Type) -> Self {
        match kind {
            Type::Anthropic => Self::Anthropic,
            Type::Openai => Self::Openai,
            Type::OpenaiResponses => Self::OpenaiResponses,
            Type::Gemini => Self::Gemini,
            Type::Bedrock => Self::Bedrock,
            Type::Xai => Self::Xai,
            Type::Deepseek => Self::Deepseek,
            Type::Ollama => Self::Ollama,
            Type::Openrouter => Self::Openrouter,
            Type::Local => Self::Local,
            Type::Scripted => Self::Scripted,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelProviderCommand {
    /// Create a model provider.
    Create(Create),
    /// Show a model provider.
    Get {
        /// Name or id.
        provider: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List model providers.
    List(List),
    /// Change the given fields of a model provider.
    Update(Update),
    /// Check the keys at the vendor.
    Check {
        /// Name or id.
        provider: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List the models that the vendor offers.
    Models {
        /// Name or id.
        provider: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Delete a model provider that no model uses.
    Delete {
        /// Name or id.
        provider: String,
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
    #[arg(long = "type", value_enum)]
    kind: Type,
    #[command(flatten)]
    fields: Fields,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only model providers of this type.
    #[arg(long = "type", value_enum)]
    kind: Option<Type>,
    /// Only model providers whose name starts with this.
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
    provider: String,
    /// The new name.
    #[arg(long)]
    name: Option<String>,
    /// Remove all additional API keys.
    #[arg(long, conflicts_with = "additional_key_env")]
    no_additional_api_keys: bool,
    #[command(flatten)]
    fields: Fields,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// There is no argument for a key: every process of the machine can read command lines.
#[derive(Debug, Args)]
struct Fields {
    /// The vendor's address. Default: the public one.
    #[arg(long, value_name = "URL")]
    base_url: Option<String>,
    /// The environment variable that holds the API key.
    #[arg(long, value_name = "VARIABLE", conflicts_with = "api_key_stdin")]
    api_key_env: Option<String>,
    /// Read the API key from standard input.
    #[arg(long)]
    api_key_stdin: bool,
    /// The script of a scripted provider (JSON); `-` is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "api_key_stdin")]
    script_file: Option<PathBuf>,
    /// An environment variable with an additional API key. Repeatable. Calls are spread over all
    /// keys, and retried with the next one when a key is refused.
    #[arg(long = "additional-api-key-env", value_name = "VARIABLE")]
    additional_key_env: Vec<String>,
    /// The maximum concurrent calls per key; 0: no limit.
    #[arg(long, value_name = "CALLS")]
    max_concurrency: Option<i64>,
    /// The maximum calls per minute and key; 0: no limit.
    #[arg(long, value_name = "CALLS")]
    requests_per_minute: Option<i64>,
    /// The maximum input and output tokens per minute and key; 0: no limit.
    #[arg(long, value_name = "TOKENS")]
    tokens_per_minute: Option<i64>,
}

impl Fields {
    fn api_key(&self) -> Result<Option<String>, Failure> {
        let key = match &self.api_key_env {
            Some(variable) => read_variable(variable)?,
            None if self.api_key_stdin => read_stdin()?,
            None => return Ok(None),
        };
        match key.trim() {
            "" => Err(Failure::usage("the API key is empty")),
            key => Ok(Some(key.to_owned())),
        }
    }

    fn additional_keys(&self) -> Result<Vec<String>, Failure> {
        self.additional_key_env
            .iter()
            .map(|variable| match read_variable(variable)?.trim() {
                "" => Err(Failure::usage(format!("the API key in {variable} is empty"))),
                key => Ok(key.to_owned()),
            })
            .collect()
    }

    fn script(&self) -> Result<Option<String>, Failure> {
        self.script_file.as_deref().map(read_text).transpose()
    }
}

fn read_variable(variable: &str) -> Result<String, Failure> {
    std::env::var(variable).map_err(|_| {
        Failure::usage(format!("the environment variable {variable} is not set, or not UTF-8"))
    })
}

impl ModelProviderCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => args.run(gateway).await,
            Self::Get { provider, output } => {
                let request = GetModelProviderRequest { model_provider: provider };
                output.entity(&call(gateway.model_providers().get_model_provider(request)).await?)
            }
            Self::List(args) => args.run(gateway).await,
            Self::Update(args) => args.run(gateway).await,
            Self::Check { provider, output } => {
                let request = CheckModelProviderRequest { model_provider: provider.clone() };
                let check = call(gateway.model_providers().check_model_provider(request)).await?;
                let refused = check.keys.iter().filter(|key| !key.accepted).count();
                output.list(&Page { items: check.keys, next_page_token: String::new() })?;
                if refused > 0 {
                    return Err(Failure::failed(format!("{refused} unusable keys of {provider}")));
                }
                Ok(())
            }
            Self::Models { provider, output } => {
                let request = ListVendorModelsRequest { model_provider: provider };
                let models =
                    call(gateway.model_providers().list_vendor_models(request)).await?.models;
                output.list(&Page { items: models, next_page_token: String::new() })
            }
            Self::Delete { provider, write, output } => {
                let request = DeleteModelProviderRequest {
                    model_provider: provider.clone(),
                    idempotency_key: write.key(),
                };
                call(gateway.model_providers().delete_model_provider(request)).await?;
                output.deleted("model provider", &provider)
            }
        }
    }
}

impl Create {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let spec = ModelProviderSpec {
            name: self.name,
            r#type: ModelProviderType::from(self.kind).into(),
            api_key: self.fields.api_key()?.unwrap_or_default(),
            script: self.fields.script()?.unwrap_or_default(),
            additional_api_keys: self.fields.additional_keys()?,
            max_concurrency: self.fields.max_concurrency.unwrap_or(0),
            requests_per_minute: self.fields.requests_per_minute.unwrap_or(0),
            tokens_per_minute: self.fields.tokens_per_minute.unwrap_or(0),
            base_url: self.fields.base_url.unwrap_or_default(),
        };
        let request =
            CreateModelProviderRequest { spec: Some(spec), idempotency_key: self.write.key() };
        self.output.entity(&call(gateway.model_providers().create_model_provider(request)).await?)
    }
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let kind = self.kind.map_or(ModelProviderType::Unspecified, ModelProviderType::from);
        let filter = Filter { r#type: kind.into(), name_prefix: self.name_prefix };
        let listed = self
            .list
            .collect(|page| {
                let request =
                    ListModelProvidersRequest { page: Some(page), filter: Some(filter.clone()) };
                async move {
                    let response =
                        call(gateway.model_providers().list_model_providers(request)).await?;
                    Ok((response.model_providers, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

impl Update {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let keys = self.fields.additional_keys()?;
        let replaced = self.no_additional_api_keys || !keys.is_empty();
        let request = UpdateModelProviderRequest {
            additional_api_keys: replaced.then_some(ApiKeys { keys }),
            max_concurrency: self.fields.max_concurrency,
            requests_per_minute: self.fields.requests_per_minute,
            tokens_per_minute: self.fields.tokens_per_minute,
            model_provider: self.provider,
            name: self.name,
            api_key: self.fields.api_key()?,
            script: self.fields.script()?,
            base_url: self.fields.base_url,
            revision: self.change.revision,
            idempotency_key: self.change.write.key(),
        };
        self.output.entity(&call(gateway.model_providers().update_model_provider(request)).await?)
    }
}

pub(super) fn type_name(kind: ModelProviderType) -> &'static str {
    match kind {
        ModelProviderType::Anthropic => "anthropic",
        ModelProviderType::Openai => "openai",
        ModelProviderType::OpenaiResponses => "openai-responses",
        ModelProviderType::Gemini => "gemini",
        ModelProviderType::Bedrock => "bedrock",
        ModelProviderType::Xai => "xai",
        ModelProviderType::Deepseek => "deepseek",
        ModelProviderType::Ollama => "ollama",
        ModelProviderType::Openrouter => "openrouter",
        ModelProviderType::Local => "local",
        ModelProviderType::Scripted => "scripted",
        ModelProviderType::Unspecified => "unknown",
    }
}

impl Entity for ModelProvider {
    const NAME: &'static str = "construct.v1.ModelProvider";
    const PLURAL: &'static str = "modelProviders";
    const COLUMNS: &'static [&'static str] = &["NAME", "TYPE", "KEY", "BASE URL", "AGE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        let kind = type_name(spec.r#type()).to_owned();
        let key = self.status.as_ref().is_some_and(|status| status.api_key_set);
        let key = if key { "set" } else { "none" }.to_owned();
        vec![spec.name, kind, key, spec.base_url, age(self.metadata.as_ref(), now)]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let kind = type_name(spec.r#type()).to_owned();
        let status = self.status.clone().unwrap_or_default();
        let key = match (status.api_key_set, status.encryption_key_id) {
            (true, by) => format!("set, encrypted with {by}"),
            (false, _) => "none".to_owned(),
        };
        let key = match status.additional_api_keys {
            0 => key,
            additional => format!("{key}, and {additional} more"),
        };
        let limits: Vec<String> = [
            (spec.max_concurrency, "calls at a time"),
            (spec.requests_per_minute, "calls a minute"),
            (spec.tokens_per_minute, "tokens a minute"),
        ]
        .into_iter()
        .filter(|(limit, _)| *limit > 0)
        .map(|(limit, unit)| format!("{} {unit}", thousands(limit)))
        .collect();
        let script = if spec.script.is_empty() {
            String::new()
        } else {
            format!("{} bytes", spec.script.len())
        };
        let mut details = vec![
            ("name", spec.name),
            ("id", id(self.metadata.as_ref())),
            ("type", kind),
            ("base url", spec.base_url),
            ("api key", key),
            ("script", script),
        ];
        if !limits.is_empty() {
            details.push(("limits of a key", limits.join(", ")));
        }
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}

impl Entity for KeyCheck {
    const NAME: &'static str = "construct.v1.KeyCheck";
    const PLURAL: &'static str = "keys";
    const COLUMNS: &'static [&'static str] = &["KEY", "ACCEPTED", "REASON"];

    fn row(&self, _now: Timestamp) -> Vec<String> {
        let number = if self.number == 0 { "none".to_owned() } else { self.number.to_string() };
        let accepted = if self.accepted { "yes" } else { "no" }.to_owned();
        vec![number, accepted, self.error.clone()]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        ["key", "accepted", "reason"].into_iter().zip(self.row(now)).collect()
    }
}

impl Entity for VendorModel {
    const NAME: &'static str = "construct.v1.VendorModel";
    const PLURAL: &'static str = "models";
    const COLUMNS: &'static [&'static str] = &["VENDOR MODEL", "NAME", "CONTEXT", "MAX OUTPUT"];

    fn row(&self, _now: Timestamp) -> Vec<String> {
        let tokens = |tokens: i64| if tokens == 0 { String::new() } else { thousands(tokens) };
        vec![
            self.name.clone(),
            self.display_name.clone(),
            tokens(self.context_window),
            tokens(self.max_output_tokens),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        ["vendor model", "name", "context window", "max output"]
            .into_iter()
            .zip(self.row(now))
            .collect()
    }
}
