//! The boundary to the model vendors: requests and answers, independent of any vendor's protocol.

use std::{borrow::Cow, sync::Arc};

use construct_domain::money::{LongContext, Prices, Rates, Usage};
use construct_proto::{
    mesh::v1::{
        self as mesh, ChatMessage, FailureClass, ModelInvoke, model_completed::StopReason,
        model_invoke::Purpose,
    },
    v1::{self, ModelParameters, ModelProviderType, ThinkingEffort, VendorModel},
};
use futures::{
    FutureExt as _,
    future::{self, BoxFuture},
    stream::{self, BoxStream, StreamExt as _},
};
use secrecy::SecretString;

use crate::{
    anthropic::Anthropic,
    bedrock::Bedrock,
    cassette, deepseek,
    failure::Failure,
    gemini::Gemini,
    http::{Endpoint, HeadroomObserver, Http},
    local::{LocalModels, LocalVendor},
    ollama::Ollama,
    openai::{self, OpenAi},
    openrouter,
    responses::Responses,
    scripted::{AttemptCounter, Scripted},
    transcript::{self, CodeTool, Part, Turn},
    xai,
};

/// The name of the code tool's argument when its schema names none.
const DEFAULT_SCRIPT_ARGUMENT: &str = "code";

/// A model vendor, ready to be called.
pub(crate) trait Vendor: Send + Sync {
    /// Calls the model once, without any retry. A stream that ends without an error carried a
    /// complete answer. Dropping the stream closes the vendor's connection.
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>>;

    /// Lists the models that the vendor offers.
    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>>;

    /// Counts the tokens that the model would read; none where the vendor cannot count, and the
    /// caller estimates.
    fn count(&self, _request: &Request) -> BoxFuture<'static, Result<Option<i64>, Failure>> {
        future::ready(Ok(None)).boxed()
    }

    /// Embeds the texts of `request.embed` once, without any retry. Returns one [`Chunk::Vector`]
    /// per text in their order, and the usage.
    fn embed(&self, _request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let words = "this kind of provider turns no texts into vectors";
        stream::once(future::ready(Err(Failure::new(FailureClass::InvalidRequest, words)))).boxed()
    }

    /// Checks whether the vendor accepts the key. Listing models is the cheapest request that
    /// nearly all vendors have.
    fn check(&self) -> BoxFuture<'static, Result<(), Failure>> {
        let models = self.models();
        async { models.await.map(drop) }.boxed()
    }
}

/// Creates vendors.
pub(crate) trait VendorFactory: Send + Sync {
    /// The vendor of `provider`, called with `key`. `observer` receives the limits that the vendor
    /// reports.
    fn open(
        &self,
        provider: &mesh::Provider,
        key: Option<SecretString>,
        observer: Option<Arc<dyn HeadroomObserver>>,
    ) -> Result<Box<dyn Vendor>, Failure>;
}

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Chunk {
    /// More text of the answer.
    Text(String),
    /// More visible thinking.
    Thinking(String),
    /// Data that the vendor wants back with the thinking before it, or at this position when there
    /// is none. Only the vendor's own module reads it. Ends the thinking.
    ThinkingData(String),
    /// A tool call begins. `slot` identifies the call within the answer; the id may be empty.
    Call { slot: u32, id: String, name: String },
    /// More arguments of a call, as JSON.
    Arguments { slot: u32, json: String },
    /// The tokens used so far, without cost. Later reports replace earlier ones.
    Usage(Usage),
    /// Why the model stopped.
    Stop(StopReason),
    /// The vendor's names of the answer and of the model; either may be empty.
    Named { id: String, model: String },
    /// The vector of the next text.
    Vector(Vec<f32>),
}

/// Texts to embed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EmbedRequest {
    pub(crate) texts: Vec<String>,
    /// The length of the vectors, where the model leaves a choice.
    pub(crate) dimensions: Option<u32>,
}

/// A model call, independent of the vendor. A vendor uses what its protocol can express.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) step_id: String,
    pub(crate) task_id: String,
    pub(crate) purpose: Purpose,
    /// The called provider.
    pub(crate) origin: Origin,
    /// The vendor's name of the model.
    pub(crate) model: String,
    /// The context window in tokens.
    pub(crate) context_window: u32,
    /// Whether the model can call tools.
    pub(crate) tool_calling: bool,
    /// Upper bound of the answer in tokens, always set.
    pub(crate) max_tokens: u32,
    pub(crate) system: String,
    pub(crate) messages: Vec<ChatMessage>,
    /// The conversation of a call outside a task, in place of `messages`.
    pub(crate) turns: Vec<Turn>,
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    /// Allows at most one call per answer.
    pub(crate) one_call: bool,
    pub(crate) format: Format,
    pub(crate) parameters: ModelParameters,
    /// Texts to embed; such a request has no answer.
    pub(crate) embed: Option<EmbedRequest>,
}

/// Whether the model has to call a tool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// It must call no tool.
    Never,
    /// It must call a tool.
    Any,
    /// It must call this tool.
    Named(String),
}

/// The format of the answer's text.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) enum Format {
    #[default]
    Text,
    /// Any JSON.
    Json,
    /// JSON that is valid against a schema. `strict`: the vendor is asked to guarantee it.
    Schema { name: String, schema: serde_json::Value, strict: bool },
}

impl Format {
    /// The instruction for a model whose vendor has no setting for the format.
    pub(crate) fn instruction(&self) -> Option<String> {
        match self {
            Self::Text => None,
            Self::Json => Some(
                "Answer with one JSON value and nothing else: no words around it, no code fence."
                    .to_owned(),
            ),
            Self::Schema { schema, .. } => Some(format!(
                "Answer with one JSON value and nothing else: no words around it, no code fence. It must be valid against this \
                 JSON Schema:\n{schema}"
            )),
        }
    }
}

/// Where thinking comes from: it is sent back only there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    /// E.g. `anthropic`.
    pub(crate) vendor: String,
    /// Another account may not be able to open what this one has sealed.
    pub(crate) provider_id: String,
}

impl Origin {
    pub(crate) fn from_provider(provider: &mesh::Provider) -> Self {
        let vendor = provider
            .r#type()
            .as_str_name()
            .trim_start_matches("MODEL_PROVIDER_TYPE_")
            .to_lowercase();
        Self { vendor, provider_id: provider.id.clone() }
    }
}

/// A tool that the model may call. The first one is the code tool.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    pub(crate) description: String,
    /// JSON Schema of the arguments.
    pub(crate) schema: serde_json::Value,
    /// The argument that holds the script.
    pub(crate) argument: String,
}

/// The upper bound of an answer in tokens, when `asked` are requested.
pub(crate) fn max_answer_tokens(model: &mesh::ModelTarget, asked: Option<u32>) -> u32 {
    let limit = match u32::try_from(model.max_output_tokens) {
        Ok(0) | Err(_) => 8_192,
        Ok(limit) => limit,
    };
    asked.filter(|&asked| asked > 0).map_or(limit, |asked| asked.min(limit))
}

/// The prices of a model.
pub(crate) fn prices_from_proto(prices: v1::Prices) -> Prices {
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

impl Request {
    pub(crate) fn from_command(command: &ModelInvoke) -> Result<Self, Failure> {
        let step =
            command.step.as_ref().ok_or_else(|| Failure::internal("the command names no step"))?;
        let model = command
            .model
            .as_ref()
            .ok_or_else(|| Failure::internal("the command names no model"))?;
        let provider = command
            .provider
            .as_ref()
            .ok_or_else(|| Failure::internal("the command names no provider"))?;
        let request = Self {
            step_id: step.step_id.clone(),
            task_id: step.task_id.clone(),
            purpose: command.purpose(),
            origin: Origin::default(),
            context_window: 0,
            tool_calling: true,
            model: String::new(),
            max_tokens: 0,
            system: command.system.clone(),
            messages: command.messages.clone(),
            turns: Vec::new(),
            choice: ToolChoice::Auto,
            one_call: false,
            format: Format::Text,
            tools: command.tools.iter().map(Tool::from_proto).collect::<Result<_, _>>()?,
            parameters: command.parameters.clone().unwrap_or_default(),
            embed: None,
        };
        Ok(request.for_target(provider, model))
    }

    /// The same request, addressed to another model.
    #[must_use]
    pub(crate) fn for_target(self, provider: &mesh::Provider, model: &mesh::ModelTarget) -> Self {
        let mut turns = self.turns;
        // Another account may not be able to open what this one has sealed.
        if !self.origin.provider_id.is_empty() && self.origin.provider_id != provider.id {
            for turn in &mut turns {
                turn.parts.retain(|part| !matches!(part, Part::Thinking { .. }));
            }
        }
        Self {
            turns,
            origin: Origin::from_provider(provider),
            context_window: u32::try_from(model.context_window).unwrap_or(0),
            tool_calling: model.tool_calling.unwrap_or(true),
            model: model.vendor_model.clone(),
            max_tokens: max_answer_tokens(model, self.parameters.max_tokens),
            ..self
        }
    }

    /// The conversation in the form that vendors accept.
    pub(crate) fn turns(&self) -> Vec<Turn> {
        if !self.turns.is_empty() {
            return transcript::normalize_turns(self.turns.clone());
        }
        let tool =
            self.tools.first().map(|tool| CodeTool { name: &tool.name, argument: &tool.argument });
        transcript::turns_from_messages(&self.messages, tool, &self.origin)
    }

    /// The system prompt for a vendor that has no setting for the format of the answer.
    pub(crate) fn system_with_format(&self) -> Cow<'_, str> {
        match self.format.instruction() {
            None => Cow::Borrowed(&self.system),
            Some(words) if self.system.trim().is_empty() => Cow::Owned(words),
            Some(words) => Cow::Owned(format!("{}\n\n{words}", self.system)),
        }
    }

    /// How much the model should think; none: the vendor's default.
    pub(crate) fn effort(&self) -> Option<Effort> {
        match self.parameters.thinking() {
            ThinkingEffort::Unspecified => None,
            ThinkingEffort::Off => Some(Effort::Off),
            ThinkingEffort::Low => Some(Effort::Low),
            ThinkingEffort::Medium => Some(Effort::Medium),
            ThinkingEffort::High => Some(Effort::High),
        }
    }

    /// The name of the code tool, and of its argument that holds the script.
    pub(crate) fn code_call(&self) -> (&str, &str) {
        self.tools.first().map_or(("code_interpreter", DEFAULT_SCRIPT_ARGUMENT), |tool| {
            (&tool.name, &tool.argument)
        })
    }

    /// The characters from which the input tokens are estimated.
    pub(crate) fn input_chars(&self) -> usize {
        if let Some(embed) = &self.embed {
            return embed.texts.iter().map(String::len).sum();
        }
        let tools: usize = self.tools.iter().map(|tool| tool.description.len() + 200).sum();
        let parts: usize = self.turns().iter().flat_map(|turn| &turn.parts).map(Part::chars).sum();
        parts + self.system.len() + tools
    }
}

/// How much a model thinks before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    Off,
    Low,
    Medium,
    High,
}

impl Effort {
    /// The name that most vendors use.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Off => "none",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }

    /// The number of thinking tokens, for vendors that take a number.
    pub(crate) const fn budget_tokens(self) -> u32 {
        match self {
            Self::Off => 0,
            Self::Low => 2_048,
            Self::Medium => 8_192,
            Self::High => 24_576,
        }
    }
}

impl Tool {
    fn from_proto(tool: &mesh::ToolDefinition) -> Result<Self, Failure> {
        let schema: serde_json::Value =
            serde_json::from_str(&tool.input_schema).map_err(|error| {
                Failure::internal(format!(
                    "the input schema of tool `{}` is not JSON: {error}",
                    tool.name
                ))
            })?;
        let properties = schema.get("properties").and_then(serde_json::Value::as_object);
        let argument = properties
            .filter(|properties| !properties.contains_key(DEFAULT_SCRIPT_ARGUMENT))
            .and_then(|properties| {
                let required = schema
                    .get("required")
                    .and_then(|required| required.get(0)?.as_str().map(str::to_owned));
                required.or_else(|| properties.keys().next().cloned())
            })
            .unwrap_or_else(|| DEFAULT_SCRIPT_ARGUMENT.to_owned());
        Ok(Self {
            name: tool.name.clone(),
            description: tool.description.clone(),
            schema,
            argument,
        })
    }
}

/// All vendors. Lives as long as the process, and with it the connections and the counters of
/// scripted faults.
#[derive(Debug, Clone)]
pub(crate) struct Vendors {
    pub(crate) http: Http,
    pub(crate) scripted_attempts: Arc<AttemptCounter>,
    pub(crate) local: LocalModels,
}

/// The address of a provider; empty where it has none, or must be configured.
pub(crate) fn base_url(provider: &mesh::Provider) -> &str {
    if !provider.base_url.is_empty() {
        return &provider.base_url;
    }
    match provider.r#type() {
        ModelProviderType::Anthropic => Anthropic::DEFAULT_BASE_URL,
        ModelProviderType::Openai | ModelProviderType::OpenaiResponses => OpenAi::DEFAULT_BASE_URL,
        ModelProviderType::Gemini => Gemini::DEFAULT_BASE_URL,
        ModelProviderType::Xai => xai::DEFAULT_BASE_URL,
        ModelProviderType::Deepseek => deepseek::DEFAULT_BASE_URL,
        ModelProviderType::Ollama => Ollama::DEFAULT_BASE_URL,
        ModelProviderType::Openrouter => openrouter::DEFAULT_BASE_URL,
        ModelProviderType::Bedrock
        | ModelProviderType::Scripted
        | ModelProviderType::Local
        | ModelProviderType::Unspecified => "",
    }
}

/// Whether the vendor accepts thinking back as plain text, without a proof.
pub(crate) fn accepts_plain_thinking(provider: &mesh::Provider) -> bool {
    // `Openai` stands for compatible servers; OpenAI itself wants no thinking back.
    matches!(
        provider.r#type(),
        ModelProviderType::Deepseek | ModelProviderType::Openai | ModelProviderType::Ollama
    )
}

/// Whether the vendor reports the cost of a call.
pub(crate) fn reports_cost(provider: &mesh::Provider) -> bool {
    provider.r#type() == ModelProviderType::Openrouter
}

impl VendorFactory for Vendors {
    fn open(
        &self,
        provider: &mesh::Provider,
        key: Option<SecretString>,
        observer: Option<Arc<dyn HeadroomObserver>>,
    ) -> Result<Box<dyn Vendor>, Failure> {
        let secret = key.clone();
        let endpoint = || Endpoint::parse(base_url(provider), key);
        let http = self.http.with_observer(observer);
        let vendor: Box<dyn Vendor> = match provider.r#type() {
            ModelProviderType::Anthropic => Box::new(Anthropic::new(http, endpoint()?)?),
            ModelProviderType::Openai => {
                let endpoint = endpoint()?;
                let flavor = openai::flavor(&endpoint);
                Box::new(OpenAi::new(http, endpoint, flavor))
            }
            ModelProviderType::OpenaiResponses => Box::new(Responses::new(http, endpoint()?)),
            ModelProviderType::Gemini => Box::new(Gemini::new(http, endpoint()?)?),
            ModelProviderType::Bedrock => Box::new(Bedrock::new(http, endpoint()?)?),
            ModelProviderType::Xai => Box::new(OpenAi::new(http, endpoint()?, &xai::FLAVOR)),
            ModelProviderType::Deepseek => {
                Box::new(OpenAi::new(http, endpoint()?, &deepseek::FLAVOR))
            }
            ModelProviderType::Ollama => Box::new(Ollama::new(http, endpoint()?)),
            ModelProviderType::Openrouter => {
                Box::new(OpenAi::new(http, endpoint()?, &openrouter::FLAVOR))
            }
            // A recording of a recording is of no use.
            ModelProviderType::Scripted => {
                let attempts = Arc::clone(&self.scripted_attempts);
                return Ok(Box::new(Scripted::parse(
                    &provider.script,
                    provider.id.clone(),
                    attempts,
                )?));
            }
            // A recording of deterministic output is of no use.
            ModelProviderType::Local => return Ok(Box::new(LocalVendor(self.local.clone()))),
            ModelProviderType::Unspecified => {
                return Err(Failure::configuration(format!(
                    "the type of provider {} is unknown to this version ({})",
                    provider.id, provider.r#type
                )));
            }
        };
        Ok(cassette::wrap(vendor, self.http.recorder(), secret))
    }
}
