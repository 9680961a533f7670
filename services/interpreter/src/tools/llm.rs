//! `llm.ask`, `llm.json` and `llm.embed`: questions to models.
//!
//! They go to the proxy of the providers service, with the token that came with the command: no key
//! ever comes near the sandbox, and what is spent is the task's. A question costs money, so that it
//! is journaled before it is sent and never sent again by itself.

mod schema;

use std::error::Error as _;
use std::fmt;
use std::time::Duration;

use bytes::BytesMut;
use reqwest::{Response, StatusCode};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::{Value, json};

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::ToolError;
use super::kind::{Kind, Parameter, optional, required};
use super::output::Output;
use super::subject::PolicySubject;
use crate::blocking::blocking;

/// How long an answer may take.
const WALL: Duration = Duration::from_secs(300);
/// Largest answer of the proxy that is read.
const MAX_ANSWER: usize = 4 << 20;
/// Largest one with vectors: a hundred of three thousand numbers, with room to spare.
const MAX_VECTORS: usize = 8 << 20;
/// What a number of a vector takes as text, about: nine digits, sign, point and comma.
const NUMBER: usize = 13;
/// Longest prompt.
const MAX_PROMPT: usize = 1 << 20;
/// How much of an answer that does not fit is told.
const SHOWN: usize = 500;
/// How many faults of an answer are told.
const MAX_FAULTS: usize = 10;

const PROMPT: Parameter = required(
    "prompt",
    Kind::Text { min_bytes: 1, max_bytes: MAX_PROMPT },
    "What the model is asked.",
);
const MODEL: Parameter = optional(
    "model",
    Kind::Text { min_bytes: 1, max_bytes: 64 },
    "the agent's own",
    "Name of a model that this agent's scripts may use.",
);
const SYSTEM: Parameter = optional(
    "system",
    Kind::Text { min_bytes: 0, max_bytes: 256 << 10 },
    "none",
    "What the model is told about its job.",
);
const MAX_TOKENS: Parameter = optional(
    "max_tokens",
    Kind::Integer { min: 1, max: 1_000_000 },
    "the model's own bound",
    "The answer has at most so many.",
);

const ERRORS: [(&str, &str); 5] = [
    (
        "ModelNotAllowed",
        "when there is no such model for this agent's scripts; the message names those there are.",
    ),
    ("BudgetExhausted", "when there is no money left; nothing was asked."),
    ("ModelUnavailable", "when the model cannot be reached now; it can be asked again later."),
    ("ModelFailed", "when the model, or its vendor, refuses."),
    ("Timeout", "when the answer takes longer than 5 minutes; it is paid for all the same."),
];

pub(super) const ASK: Definition = Definition {
    name: "llm.ask",
    aliases: &[],
    summary: "Asks a language model and returns its answer. Costs money.",
    description: "The model sees the prompt and nothing else: no files, no conversation. For many pieces of text, ask about \
        several at the same time with Promise.all.",
    parameters: &[
        PROMPT,
        optional("options", Kind::Object(&[MODEL, SYSTEM, MAX_TOKENS]), "{}", "Options."),
    ],
    output: Output::Text,
    like: None,
    example: "llm.ask(`Summarize in one sentence:\\n${read_file(\"README.md\")}`)",
    errors: &ERRORS,
    effect: Effect::External,
    permission: Permission::Models,
    subject: model_of,
    provider: Provider::Host,
    limits: limits(WALL.as_secs(), 1024),
};

pub(super) const JSON: Definition = Definition {
    name: "llm.json",
    aliases: &[],
    summary: "Asks a language model for JSON that is valid against a schema, and returns the value. Costs money.",
    description: "An answer that is not valid is sent back once with what is wrong with it.",
    parameters: &[
        PROMPT,
        required(
            "options",
            Kind::Object(&[
                required("schema", Kind::Any, "JSON Schema of the answer, at most 64 KiB."),
                MODEL,
                SYSTEM,
                MAX_TOKENS,
            ]),
            "Options.",
        ),
    ],
    output: Output::Any,
    like: None,
    example: "llm.json(\"Name three colors\", { schema: { type: \"array\", items: { type: \"string\" } } })",
    errors: &[
        ERRORS[0],
        ERRORS[1],
        ERRORS[2],
        ERRORS[3],
        ERRORS[4],
        (
            "InvalidAnswer",
            "when the second answer is not valid either; the details have it and what is wrong.",
        ),
    ],
    effect: Effect::External,
    permission: Permission::Models,
    subject: model_of,
    provider: Provider::Host,
    limits: limits(2 * WALL.as_secs(), 1024),
};

pub(super) const EMBED: Definition = Definition {
    name: "llm.embed",
    aliases: &[],
    summary: "Turns texts into vectors with an embedding model. Costs money.",
    description: "Vectors of one model can be compared (the greater the cosine of two, the more alike their texts), those of different \
        models cannot. Ask about many texts in one call.",
    parameters: &[
        required(
            "texts",
            Kind::TextOrTexts { max_bytes: 64 << 10 },
            "The texts, of which none may be empty.",
        ),
        required(
            "options",
            Kind::Object(&[
                required(
                    "model",
                    Kind::Text { min_bytes: 1, max_bytes: 64 },
                    "Name of an embedding model that this agent's scripts may use.",
                ),
                optional(
                    "dimensions",
                    Kind::Integer { min: 1, max: 65_536 },
                    "the model's own number",
                    "How long the vectors are to be, where the model leaves a choice.",
                ),
            ]),
            "Options.",
        ),
    ],
    output: Output::List(&Output::Vector),
    like: None,
    example: "llm.embed([\"a cat\", \"a dog\"], { model: \"small\" })",
    errors: &ERRORS,
    effect: Effect::External,
    permission: Permission::Models,
    subject: model_of,
    provider: Provider::Host,
    limits: limits(WALL.as_secs(), MAX_VECTORS >> 10),
};

fn model_of(args: &Value) -> PolicySubject {
    PolicySubject::Name(args["options"]["model"].as_str().unwrap_or_default().to_owned())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    prompt: String,
    #[serde(default)]
    options: Options,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    model: Option<String>,
    system: Option<String>,
    max_tokens: Option<u32>,
    schema: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Embedded {
    texts: Vec<String>,
    options: EmbedOptions,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EmbedOptions {
    model: String,
    dimensions: Option<u32>,
}

/// What the proxy answers.
#[derive(Deserialize)]
struct Vectors {
    data: Vec<Vector>,
}

#[derive(Deserialize)]
struct Vector {
    /// In double precision, in which a script has them anyway: so they are written again as short
    /// as they came.
    embedding: Vec<f64>,
}

/// The models that the scripts of one execution may ask. The default reaches none.
#[derive(Clone, Default)]
pub struct Models {
    /// The proxy's address.
    url: String,
    token: SecretString,
    names: Vec<String>,
    /// None: nothing is reached.
    client: Option<reqwest::Client>,
}

/// Without the token.
impl fmt::Debug for Models {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Models")
            .field("url", &self.url)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Models {
    /// The proxy at `url`, reached with `token` for the models of these names.
    #[must_use]
    pub fn new(client: reqwest::Client, url: &str, token: &str, names: &[String]) -> Self {
        Self {
            url: url.trim_end_matches('/').to_owned(),
            token: token.into(),
            names: names.to_vec(),
            client: Some(client),
        }
    }

    /// The client that [`Models::new`] takes: it connects to the proxy directly and follows no
    /// redirect.
    ///
    /// # Errors
    /// When TLS cannot be set up on this host.
    pub fn client() -> Result<reqwest::Client, super::EgressError> {
        let client = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(Duration::from_secs(5))
            .tcp_nodelay(true)
            .timeout(WALL)
            .build()?;
        Ok(client)
    }

    pub(super) async fn ask(&self, arguments: Arguments) -> Result<String, ToolError> {
        let Arguments { prompt, options } = arguments;
        let messages = vec![json!({"role": "user", "content": prompt})];
        self.answer(&ASK, &options, &messages, None).await
    }

    pub(super) async fn json(&self, arguments: Arguments) -> Result<Value, ToolError> {
        let Arguments { prompt, options } = arguments;
        let wanted = options.schema.clone().unwrap_or_default();
        // Before anything is paid for.
        schema::check(&wanted)
            .map_err(|what| ToolError::invalid(format!("{}: {what}", JSON.name)))?;
        let format =
            json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}});
        let mut messages = vec![json!({"role": "user", "content": prompt})];
        let mut last = None;
        for _ in 0..2 {
            let text = self.answer(&JSON, &options, &messages, Some(&format)).await?;
            let faults = match parsed(&text) {
                Ok(value) => match validated(wanted.clone(), value).await? {
                    Ok(value) => return Ok(value),
                    Err(faults) => faults,
                },
                Err(fault) => vec![fault],
            };
            let list =
                faults.iter().map(|fault| format!("- {fault}")).collect::<Vec<_>>().join("\n");
            messages.push(json!({"role": "assistant", "content": text}));
            messages.push(json!({"role": "user", "content": format!(
                "That is not valid:\n{list}\nAnswer again with one JSON value that is valid, and nothing else."
            )}));
            last = Some((text, faults));
        }
        let (text, faults) = last.unwrap_or_default();
        let answer: String = text.chars().take(SHOWN).collect();
        let first = faults.first().cloned().unwrap_or_default();
        let message = format!(
            "{}: the model's answers were not valid against the schema, twice; the last one: {first}",
            JSON.name
        );
        Err(ToolError::new("InvalidAnswer", message)
            .with(json!({"answer": answer, "faults": faults})))
    }

    /// A vector for each text, in their order. Whoever gets them takes at most `result_bytes` of
    /// text.
    pub(super) async fn embed(
        &self,
        arguments: Embedded,
        result_bytes: usize,
    ) -> Result<Vec<Vec<f64>>, ToolError> {
        let Embedded { texts, options } = arguments;
        let (wanted, tool) = (texts.len(), &EMBED);
        let mut body = json!({"model": self.allowed(tool, Some(&options.model))?, "input": texts});
        let most = MAX_VECTORS.min(result_bytes);
        if let Some(dimensions) = options.dimensions {
            body["dimensions"] = json!(dimensions);
            // Before anything is paid for.
            let vector = NUMBER * dimensions as usize;
            if wanted.saturating_mul(vector) > most {
                let message = format!(
                    "{}: {wanted} vectors of {dimensions} numbers are more than the {most} bytes that a result may have. Ask about at most {} \
                     texts at once, or for fewer dimensions; nothing was asked.",
                    tool.name,
                    most / vector
                );
                return Err(ToolError::invalid(message));
            }
        }
        let answer = self.post(tool, "/v1/embeddings", &body, most).await?;
        let vectors: Vectors = serde_json::from_slice(&answer)
            .map_err(|_| ToolError::internal(tool.name, "the answer holds no vectors"))?;
        if vectors.data.len() != wanted {
            return Err(ToolError::internal(tool.name, "there is not one vector for each text"));
        }
        Ok(vectors.data.into_iter().map(|vector| vector.embedding).collect())
    }

    async fn answer(
        &self,
        tool: &Definition,
        options: &Options,
        messages: &[Value],
        format: Option<&Value>,
    ) -> Result<String, ToolError> {
        let model = self.allowed(tool, options.model.as_deref())?;
        let system = options.system.iter().filter(|text| !text.is_empty());
        let system = system.map(|text| json!({"role": "system", "content": text}));
        let mut body = json!({"model": model, "messages": system.chain(messages.iter().cloned()).collect::<Vec<_>>()});
        if let Some(limit) = options.max_tokens {
            body["max_completion_tokens"] = json!(limit);
        }
        if let Some(format) = format {
            body["response_format"] = format.clone();
        }
        let body = self.post(tool, "/v1/chat/completions", &body, MAX_ANSWER).await?;
        let body = parsed_answer(tool, &body)?;
        let answer = &body["choices"][0];
        match (answer["message"]["content"].as_str(), answer["finish_reason"].as_str()) {
            (_, Some("content_filter")) => Err(ToolError::new(
                "ModelFailed",
                format!("{}: the model's vendor withheld the answer.", tool.name),
            )),
            (Some(text), _) => Ok(text.to_owned()),
            (None, _) => Err(ToolError::internal(tool.name, "the answer holds no text")),
        }
    }

    /// The model to ask; without a name the agent's own.
    fn allowed<'a>(
        &'a self,
        tool: &Definition,
        name: Option<&'a str>,
    ) -> Result<&'a str, ToolError> {
        if self.client.is_none() {
            let words = format!("{}: scripts of this installation reach no models.", tool.name);
            return Err(ToolError::new("ModelNotAllowed", words));
        }
        let model = name.or(self.names.first().map(String::as_str)).unwrap_or_default();
        if self.names.iter().any(|name| name == model) {
            return Ok(model);
        }
        let names = self.names.join(", ");
        let words = format!(
            "{}: scripts of this agent may not use a model {model:?}, only: {names}.",
            tool.name
        );
        Err(ToolError::new("ModelNotAllowed", words).with(json!({"models": self.names})))
    }

    /// Asks the proxy; gives its answer, which is at most `limit` bytes long.
    async fn post(
        &self,
        tool: &Definition,
        path: &str,
        body: &Value,
        limit: usize,
    ) -> Result<BytesMut, ToolError> {
        let Some(client) = &self.client else {
            return Err(ToolError::internal(tool.name, "there is no proxy"));
        };
        let request = client
            .post(format!("{}{path}", self.url))
            .bearer_auth(self.token.expose_secret())
            .json(body);
        let response = request.send().await.map_err(|error| unreachable(tool, &error))?;
        let status = response.status();
        let body = read(tool, response, limit).await?;
        if status != StatusCode::OK {
            return Err(refused(tool, status, &parsed_answer(tool, &body)?));
        }
        Ok(body)
    }
}

fn parsed_answer(tool: &Definition, body: &[u8]) -> Result<Value, ToolError> {
    serde_json::from_slice(body)
        .map_err(|_| ToolError::internal(tool.name, "the answer is not JSON"))
}

async fn read(
    tool: &Definition,
    mut response: Response,
    limit: usize,
) -> Result<BytesMut, ToolError> {
    let mut body = BytesMut::new();
    while let Some(bytes) = response.chunk().await.map_err(|error| unreachable(tool, &error))? {
        body.extend_from_slice(&bytes);
        if body.len() > limit {
            let words = format!(
                "{}: the answer is larger than the {limit} bytes that are taken; it was paid for. Ask for less at once.",
                tool.name
            );
            return Err(ToolError::new("ModelFailed", words));
        }
    }
    Ok(body)
}

fn unreachable(tool: &Definition, error: &reqwest::Error) -> ToolError {
    let name = tool.name;
    if error.is_timeout() {
        let seconds = WALL.as_secs();
        return ToolError::new(
            "Timeout",
            format!("{name}: the model did not answer within {seconds} seconds."),
        );
    }
    if error.is_connect() {
        let words = format!("{name}: models cannot be reached at the moment; nothing was asked.");
        return ToolError::new("ModelUnavailable", words);
    }
    // The error's own text names the address, which is of no use to a script.
    let why = error.source().map(|source| format!(" ({source})")).unwrap_or_default();
    ToolError::new(
        "ModelUnavailable",
        format!("{name}: the answer broke off{why}; it may have been paid for."),
    )
}

fn refused(tool: &Definition, status: StatusCode, body: &Value) -> ToolError {
    let name = match status.as_u16() {
        402 => "BudgetExhausted",
        404 => "ModelNotAllowed",
        429 | 502 | 503 => "ModelUnavailable",
        504 => "Timeout",
        _ => "ModelFailed",
    };
    let words = body["error"]["message"].as_str().unwrap_or("no reason was given");
    ToolError::new(name, format!("{}: {words}", tool.name))
}

/// The value in an answer; models like to fence it.
fn parsed(text: &str) -> Result<Value, String> {
    let text = text.trim();
    let inner = text.strip_prefix("```").and_then(|rest| rest.strip_suffix("```"));
    let inner = inner.map(|rest| rest.strip_prefix("json").unwrap_or(rest));
    serde_json::from_str(inner.unwrap_or(text)).map_err(|error| format!("it is not JSON: {error}"))
}

/// The value, or what is wrong with it.
async fn validated(wanted: Value, value: Value) -> Result<Result<Value, Vec<String>>, ToolError> {
    let validated = blocking(move || {
        let faults = schema::faults(&wanted, &value, MAX_FAULTS);
        if faults.is_empty() { Ok(value) } else { Err(faults) }
    });
    let died = || ToolError::internal(JSON.name, "the thread that validated ended unexpectedly");
    validated.await.ok_or_else(died)
}
