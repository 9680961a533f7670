//! The boundary to the model vendors: what a vendor is asked, what it answers, and nothing of how.

use std::sync::Arc;

use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::{self as mesh, ChatMessage, ModelInvoke, model_completed::StopReason, model_invoke::Purpose},
    v1::{ModelParameters, ModelProviderType},
};
use futures::stream::BoxStream;
use secrecy::SecretString;

use crate::{
    anthropic::Anthropic,
    failure::Failure,
    http::{Endpoint, Http},
    openai::OpenAi,
    scripted::{Memory, Scripted},
};

/// What the code tool's argument is called when its schema names none.
const DEFAULT_ARGUMENT: &str = "code";

/// A model vendor, ready to be called.
pub(crate) trait Vendor: Send + Sync {
    /// Calls the model once, without any retry. A stream that ends without an error carried a whole answer; dropping
    /// the stream closes the vendor's connection.
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>>;
}

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Chunk {
    /// The answer's text goes on.
    Text(String),
    /// A tool call begins. `slot` tells the calls of an answer apart; the id may be empty.
    Call { slot: u32, id: String, name: String },
    /// The arguments of a call go on, as JSON.
    Arguments { slot: u32, json: String },
    /// Tokens used so far. Later reports hold; no cost.
    Usage(Usage),
    /// Why the model stopped.
    Stop(StopReason),
}

/// A model call in our own words. Vendors read from it what they can express.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) step_id: String,
    pub(crate) task_id: String,
    pub(crate) purpose: Purpose,
    /// The vendor's name of the model.
    pub(crate) model: String,
    /// Upper bound of the answer, always known.
    pub(crate) max_tokens: u32,
    pub(crate) system: String,
    pub(crate) messages: Vec<ChatMessage>,
    pub(crate) tools: Vec<Tool>,
    pub(crate) parameters: ModelParameters,
}

/// A tool the model may call. The first one is the code tool.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    pub(crate) description: String,
    /// JSON Schema of the arguments.
    pub(crate) schema: serde_json::Value,
    /// The argument that holds the script.
    pub(crate) argument: String,
}

impl Request {
    pub(crate) fn from_command(command: &ModelInvoke) -> Result<Self, Failure> {
        let step = command.step.as_ref().ok_or_else(|| Failure::internal("the command names no step"))?;
        let model = command.model.as_ref().ok_or_else(|| Failure::internal("the command names no model"))?;
        let parameters = command.parameters.clone().unwrap_or_default();
        let limit = match u32::try_from(model.max_output_tokens) {
            Ok(0) | Err(_) => 8_192,
            Ok(limit) => limit,
        };
        let tools = command.tools.iter().map(Tool::from_proto).collect::<Result<_, _>>()?;
        Ok(Self {
            step_id: step.step_id.clone(),
            task_id: step.task_id.clone(),
            purpose: command.purpose(),
            model: model.vendor_model.clone(),
            max_tokens: parameters.max_tokens.filter(|&asked| asked > 0).map_or(limit, |asked| asked.min(limit)),
            system: command.system.clone(),
            messages: command.messages.clone(),
            tools,
            parameters,
        })
    }

    /// What an estimate of the tokens read is made from, in characters.
    pub(crate) fn input_chars(&self) -> usize {
        let tools: usize = self.tools.iter().map(|tool| tool.description.len() + 200).sum();
        crate::transcript::turns(&self.messages, !self.tools.is_empty())
            .iter()
            .flat_map(|turn| &turn.parts)
            .map(|part| match part {
                crate::transcript::Part::Text(text)
                | crate::transcript::Part::Call { code: text, .. }
                | crate::transcript::Part::Result { output: text, .. } => text.len(),
            })
            .sum::<usize>()
            + self.system.len()
            + tools
    }
}

impl Tool {
    fn from_proto(tool: &mesh::ToolDefinition) -> Result<Self, Failure> {
        let schema: serde_json::Value = serde_json::from_str(&tool.input_schema).map_err(|error| {
            Failure::internal(format!("the input schema of tool `{}` is not JSON: {error}", tool.name))
        })?;
        let properties = schema.get("properties").and_then(serde_json::Value::as_object);
        let argument = properties
            .filter(|properties| !properties.contains_key(DEFAULT_ARGUMENT))
            .and_then(|properties| {
                let required = schema.get("required").and_then(|required| required.get(0)?.as_str().map(str::to_owned));
                required.or_else(|| properties.keys().next().cloned())
            })
            .unwrap_or_else(|| DEFAULT_ARGUMENT.to_owned());
        Ok(Self { name: tool.name.clone(), description: tool.description.clone(), schema, argument })
    }
}

/// Every vendor the service speaks to. Lives as long as the process, and with it the connections and what scripted
/// faults remember.
#[derive(Debug, Clone)]
pub(crate) struct Vendors {
    pub(crate) http: Http,
    pub(crate) memory: Arc<Memory>,
}

impl Vendors {
    /// The vendor of `provider`, called with `key`.
    pub(crate) fn open(
        &self,
        provider: &mesh::Provider,
        key: Option<SecretString>,
    ) -> Result<Box<dyn Vendor>, Failure> {
        Ok(match provider.r#type() {
            ModelProviderType::Anthropic => {
                let endpoint = Endpoint::parse(&provider.base_url, Anthropic::DEFAULT_BASE_URL, key)?;
                Box::new(Anthropic::new(self.http.clone(), endpoint)?)
            }
            ModelProviderType::Openai => {
                let endpoint = Endpoint::parse(&provider.base_url, OpenAi::DEFAULT_BASE_URL, key)?;
                Box::new(OpenAi::new(self.http.clone(), endpoint))
            }
            ModelProviderType::Scripted => {
                Box::new(Scripted::parse(&provider.script, provider.id.clone(), Arc::clone(&self.memory))?)
            }
            ModelProviderType::Unspecified => {
                return Err(Failure::configuration(format!(
                    "the type of provider {} is unknown to this version ({})",
                    provider.id, provider.r#type
                )));
            }
        })
    }
}
