//! The request of a client, independent of its protocol.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use construct_proto::{mesh::v1::model_invoke::Purpose, v1::ModelParameters};
use serde_json::Value;

use super::{refusal::Refusal, routes::Route, thinking};
use crate::{
    router::Target,
    transcript::{Media, Part, Role, Turn},
    vendor::{self, EmbedRequest, Format, Origin, Request, Tool, ToolChoice},
};

/// Tools of one request at most.
const MAX_TOOLS: usize = 256;
/// Bytes of text per token at least, for the upper estimate of a request's cost.
const BYTES_PER_TOKEN: usize = 2;
/// The most tokens that vendors count for an image.
const TOKENS_PER_IMAGE: usize = 6_000;
/// An upper bound of the tokens that vendors add to a piece of the conversation.
const TOKENS_PER_PART: usize = 50;

/// A request of a client.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ClientRequest {
    /// Empty: the first model of the token.
    pub(crate) model: String,
    /// Whether the answer is streamed.
    pub(crate) stream: bool,
    /// Whether a stream ends with the usage, where the protocol makes that optional.
    pub(crate) include_usage: bool,
    pub(crate) system: String,
    /// Not yet normalized; thinking is sealed.
    pub(crate) turns: Vec<Turn>,
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    pub(crate) one_call: bool,
    pub(crate) format: Format,
    pub(crate) parameters: ModelParameters,
}

impl ClientRequest {
    /// Adds a part to the turn of `role`.
    pub(crate) fn push_part(&mut self, role: Role, part: Part) {
        match self.turns.last_mut() {
            Some(last) if last.role == role => last.parts.push(part),
            _ => self.turns.push(Turn { role, parts: vec![part] }),
        }
    }

    /// Adds an instruction of the program to the model.
    pub(crate) fn push_instruction(&mut self, text: &str) {
        if self.turns.is_empty() {
            if !self.system.is_empty() {
                self.system.push_str("\n\n");
            }
            self.system.push_str(text);
        } else {
            // Its position in the conversation matters, and no vendor has another place for it.
            self.push_part(
                Role::User,
                Part::Text(format!("<system-notice>\n{text}\n</system-notice>")),
            );
        }
    }

    /// Checks the rules of all protocols.
    pub(crate) fn validate(self) -> Result<Self, Refusal> {
        if self.turns.iter().all(|turn| turn.parts.is_empty()) {
            return Err(Refusal::invalid(
                "the conversation is empty: at least one message is needed",
            ));
        }
        if self.tools.len() > MAX_TOOLS {
            return Err(Refusal::invalid(format!("at most {MAX_TOOLS} tools can be offered")));
        }
        if let ToolChoice::Named(name) = &self.choice
            && !self.tools.iter().any(|tool| tool.name == *name)
        {
            return Err(Refusal::invalid(format!(
                "the tool `{name}` that must be called is not among the tools"
            )));
        }
        if matches!(self.choice, ToolChoice::Any) && self.tools.is_empty() {
            return Err(Refusal::invalid("a tool must be called, but there are no tools"));
        }
        Ok(self)
    }

    /// Converts to a model call.
    pub(crate) fn into_request(
        self,
        id: &str,
        task: &str,
        route: &Route,
    ) -> Result<Request, Refusal> {
        let Target { provider, model } = &route.target;
        let tool_calling = model.tool_calling.unwrap_or(true);
        if !tool_calling && !self.tools.is_empty() {
            return Err(Refusal::invalid(format!("the model `{}` cannot call tools", self.model)));
        }
        let turns = thinking::open_turns(
            self.turns,
            &provider.id,
            vendor::accepts_plain_thinking(provider),
        );
        let request = Request {
            step_id: id.to_owned(),
            task_id: task.to_owned(),
            purpose: Purpose::Turn,
            origin: Origin::default(),
            model: String::new(),
            context_window: 0,
            tool_calling,
            max_tokens: 0,
            system: self.system,
            messages: Vec::new(),
            turns,
            tools: self.tools,
            choice: self.choice,
            one_call: self.one_call,
            format: self.format,
            parameters: self.parameters,
            embed: None,
        };
        Ok(request.for_target(provider, model))
    }
}

/// The upper estimate of a request's cost, in 10⁻¹² dollars.
pub(crate) fn estimate_cost(request: &Request, route: &Route) -> i64 {
    let tools = request
        .tools
        .iter()
        .map(|tool| tool.name.len() + tool.description.len() + tool.schema.to_string().len());
    let format = request.format.instruction().map_or(0, |words| words.len());
    let parts = request.turns.iter().flat_map(|turn| &turn.parts);
    let bytes = request.system.len()
        + tools.sum::<usize>()
        + format
        + parts.clone().map(part_bytes).sum::<usize>();
    let images =
        parts.filter(|part| matches!(part, Part::Media(media) if media.is_image())).count();
    let count = request.tools.len()
        + request.turns.iter().map(|turn| turn.parts.len() + 1).sum::<usize>()
        + 1;
    let tokens =
        bytes.div_ceil(BYTES_PER_TOKEN) + images * TOKENS_PER_IMAGE + count * TOKENS_PER_PART;
    route.upper_cost(i64::try_from(tokens).unwrap_or(i64::MAX), request.parameters.max_tokens)
}

/// The same for embeddings.
pub(crate) fn estimate_embedding_cost(embed: &EmbedRequest, route: &Route) -> i64 {
    let tokens: usize =
        embed.texts.iter().map(|text| text.len().div_ceil(BYTES_PER_TOKEN) + TOKENS_PER_PART).sum();
    route.upper_embedding_cost(i64::try_from(tokens).unwrap_or(i64::MAX), embed.texts.len())
}

/// Bytes of a part, without those of images.
fn part_bytes(part: &Part) -> usize {
    match part {
        Part::Text(text) => text.len(),
        Part::Thinking { text, data } => text.len() + data.len(),
        Part::Call { id, name, arguments } => id.len() + name.len() + arguments.to_string().len(),
        Part::Result { id, name, output, .. } => id.len() + name.len() + output.len(),
        Part::Media(media) if media.is_image() => 0,
        // Base64 has four characters for three bytes.
        Part::Media(media) => media.name.len() + media.base64.len() / 4 * 3,
    }
}

/// A tool as every protocol describes one.
pub(crate) fn tool(
    name: String,
    description: Option<String>,
    schema: Option<Value>,
) -> Result<Tool, Refusal> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
    if name.is_empty() || name.len() > 128 || !name.chars().all(fits) {
        return Err(Refusal::invalid(format!("`{name}` cannot be the name of a tool")));
    }
    let schema = match schema {
        Some(schema @ Value::Object(_)) => schema,
        None | Some(Value::Null) => serde_json::json!({"type": "object", "properties": {}}),
        Some(_) => {
            return Err(Refusal::invalid(format!(
                "the parameters of the tool `{name}` are no JSON Schema"
            )));
        }
    };
    Ok(Tool { name, description: description.unwrap_or_default(), schema, argument: String::new() })
}

/// The arguments of a call, which clients send as text.
pub(crate) fn parse_arguments(text: &str) -> Result<Value, Refusal> {
    if text.trim().is_empty() {
        return Ok(serde_json::json!({}));
    }
    serde_json::from_str(text)
        .map_err(|error| Refusal::invalid(format!("the arguments of a call are not JSON: {error}")))
}

/// An image or file given as a `data:` URL.
pub(crate) fn data_url(url: &str, name: &str) -> Result<Part, Refusal> {
    let elsewhere = || {
        Refusal::invalid(
            "images and files are taken as data: URLs in base64 only: the proxy fetches nothing on behalf of its clients",
        )
    };
    let (media_type, data) =
        url.strip_prefix("data:").and_then(|rest| rest.split_once(',')).ok_or_else(elsewhere)?;
    let media_type = media_type.strip_suffix(";base64").ok_or_else(elsewhere)?;
    media(media_type, name, data)
}

/// An image or file in base64. Text becomes text.
pub(crate) fn media(media_type: &str, name: &str, base64: &str) -> Result<Part, Refusal> {
    let media_type = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let broken = |_| Refusal::invalid("an image or file is not valid base64");
    if matches!(
        &*media_type,
        "image/png" | "image/jpeg" | "image/gif" | "image/webp" | "application/pdf"
    ) {
        STANDARD.decode(base64).map_err(broken)?;
        return Ok(Part::Media(Media {
            media_type,
            name: name.to_owned(),
            base64: base64.to_owned(),
        }));
    }
    if media_type.starts_with("text/") || media_type == "application/json" {
        let bytes = STANDARD.decode(base64).map_err(broken)?;
        return Ok(text_file(name, &media_type, &String::from_utf8_lossy(&bytes)));
    }
    Err(Refusal::invalid(format!("files of the type `{media_type}` are not taken")))
}

/// A text file.
pub(crate) fn text_file(name: &str, media_type: &str, text: &str) -> Part {
    let name = name.replace('"', "'");
    Part::Text(format!("<file name=\"{name}\" type=\"{media_type}\">\n{text}\n</file>"))
}

/// Rejects a field that would change the meaning of the answer.
pub(crate) fn reject_if(set: bool, what: &str) -> Result<(), Refusal> {
    if set {
        Err(Refusal::invalid(format!("{what} is not supported by this proxy")))
    } else {
        Ok(())
    }
}

/// Whether a field of any type has a value.
pub(crate) fn is_set(field: Option<&Value>) -> bool {
    match field {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(fields)) => !fields.is_empty(),
        Some(Value::Bool(true) | Value::Number(_) | Value::String(_)) => true,
    }
}

/// Parses a body as JSON.
pub(crate) fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body)
        .map_err(|error| Refusal::invalid(format!("the request cannot be read: {error}")))
}

/// A list of texts or a single one, as most protocols allow for stop sequences.
#[derive(serde::Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub(crate) fn into_list(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(list) => list,
        }
    }
}
