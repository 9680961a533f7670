//! `llm.ask`, `llm.json` and `llm.embed`: questions to models.
//!
//! They go to the proxy of the providers service, with the token from the command: no key ever
//! reaches the sandbox, and the task pays. A question costs money, so it is journaled before it is
//! sent and never retried automatically.

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

/// Time limit for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
/// Largest answer of the proxy, in bytes.
const MAX_ANSWER_BYTES: usize = 4 << 20;
/// Largest answer with vectors, in bytes: more than a hundred vectors of three thousand numbers.
const MAX_VECTOR_BYTES: usize = 8 << 20;
/// Approximate bytes of a vector's number as text: nine digits, sign, point and comma.
const BYTES_PER_NUMBER: usize = 13;
/// Longest prompt, in bytes.
const MAX_PROMPT_BYTES: usize = 1 << 20;
/// How much of an invalid answer an error shows, in characters.
const MAX_EXCERPT_CHARS: usize = 500;
/// How many faults of an answer are reported.
const MAX_FAULTS: usize = 10;

const PROMPT: Parameter = required(
    "prompt",
    Kind::Text { min_bytes: 1, max_bytes: MAX_PROMPT_BYTES },
    "The question to the model.",
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
    "System prompt of the model.",
);
const MAX_TOKENS: Parameter = optional(
    "max_tokens",
    Kind::Integer { min: 1, max: 1_000_000 },
    "the model's own limit",
    "Maximum length of the answer, in tokens.",
);

const ERRORS: [(&str, &str); 5] = [
    (
        "ModelNotAllowed",
        "when this agent's scripts may not use the model; the message lists the allowed models.",
    ),
    ("BudgetExhausted", "when the budget is exhausted; nothing was sent."),
    ("ModelUnavailable", "when the model cannot be reached now; try again later."),
    ("ModelFailed", "when the model or its vendor refuses the request."),
    ("Timeout", "when the answer takes longer than 5 minutes; it is still charged."),
];

pub(super) const ASK: Definition = Definition {
    name: "llm.ask",
    aliases: &[],
    summary: "Asks a language model and returns its answer. Costs money.",
    description: "The model sees only the prompt: no files, no conversation. For many texts, ask several questions \
     concurrently with Promise.all.",
    parameters: &[
        PROMPT,
        optional("options", Kind::Object(&[MODEL, SYSTEM, MAX_TOKENS]), "{}", "Options."),
    ],
    output: Output::Text,
    base_tool: None,
    example: "llm.ask(`Summarize in one sentence:\\n${read_file(\"README.md\")}`)",
    errors: &[
        ERRORS[0],
        ERRORS[1],
        ERRORS[2],
        ERRORS[3],
        ERRORS[4],
        ("AnswerCut", "when the answer reaches the model's own limit; details.answer has it."),
    ],
    effect: Effect::External,
    permission: Permission::Models,
    subject: model_of,
    provider: Provider::Host,
    limits: limits(ANSWER_TIMEOUT.as_secs(), 1024),
};

pub(super) const JSON: Definition = Definition {
    name: "llm.json",
    aliases: &[],
    summary: "Asks a language model for JSON that is valid against a schema, and returns the value. Costs money.",
    description: "An invalid answer is sent back once with its faults.",
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
    base_tool: None,
    example: "llm.json(\"Name three colors\", { schema: { type: \"array\", items: { type: \"string\" } } })",
    errors: &[
        ERRORS[0],
        ERRORS[1],
        ERRORS[2],
        ERRORS[3],
        ERRORS[4],
        (
            "InvalidAnswer",
            "when the second answer is invalid too; the details have it and its faults.",
        ),
    ],
    effect: Effect::External,
    permission: Permission::Models,
    subject: model_of,
    provider: Provider::Host,
    limits: limits(2 * ANSWER_TIMEOUT.as_secs(), 1024),
};

pub(super) const EMBED: Definition = Definition {
    name: "llm.embed",
    aliases: &[],
    summary: "Turns texts into vectors with an embedding model. Costs money.",
    description: "Vectors of the same model can be compared (a greater cosine means more similar texts), vectors of \
     different models cannot. Embed many texts in one call.",
    parameters: &[
        required(
            "texts",
            Kind::TextOrTexts { max_bytes: 64 << 10 },
            "The texts; none may be empty.",
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
                    "the model's default",
                    "Length of the vectors, if the model supports a choice.",
                ),
            ]),
            "Options.",
        ),
    ],
    output: Output::List(&Output::Vector),
    base_tool: None,
    example: "llm.embed([\"a cat\", \"a dog\"], { model: \"small\" })",
    errors: &ERRORS,
    effect: Effect::External,
    permission: Permission::Models,
    subject: model_of,
    provider: Provider::Host,
    limits: limits(ANSWER_TIMEOUT.as_secs(), MAX_VECTOR_BYTES >> 10),
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
pub(super) struct EmbedArguments {
    texts: Vec<String>,
    options: EmbedOptions,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EmbedOptions {
    model: String,
    dimensions: Option<u32>,
}

/// The answer of the proxy.
#[derive(Deserialize)]
struct Vectors {
    data: Vec<Vector>,
}

#[derive(Deserialize)]
struct Vector {
    /// In double precision, as in scripts, so that they are written as short as they were received.
    embedding: Vec<f64>,
}

/// The models that the scripts of one execution may ask. The default reaches none.
#[derive(Clone, Default)]
pub struct Models {
    /// The proxy's address.
    url: String,
    token: SecretString,
    names: Vec<String>,
    /// `None` if no model can be reached.
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

    /// Creates the client for [`Models::new`]: it connects to the proxy directly and follows no
    /// redirects.
    ///
    /// # Errors
    /// When TLS cannot be set up on this host.
    pub fn client() -> Result<reqwest::Client, super::EgressError> {
        let client = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(Duration::from_secs(5))
            .tcp_nodelay(true)
            .timeout(ANSWER_TIMEOUT)
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
        let schema = options.schema.clone().unwrap_or_default();
        // Check before anything is paid for.
        schema::check(&schema)
            .map_err(|what| ToolError::invalid(format!("{}: {what}", JSON.name)))?;
        let format =
            json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
        let mut messages = vec![json!({"role": "user", "content": prompt})];
        let mut last = None;
        for _ in 0..2 {
            let text = self.answer(&JSON, &options, &messages, Some(&format)).await?;
            let faults = match parse_json(&text) {
                Ok(value) => match validate(schema.clone(), value).await? {
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
        let answer: String = text.chars().take(MAX_EXCERPT_CHARS).collect();
        let first = faults.first().cloned().unwrap_or_default();
        let message = format!(
            "{}: two answers of the model did not match the schema; the last one: {first}",
            JSON.name
        );
        Err(ToolError::new("InvalidAnswer", message)
            .with(json!({"answer": answer, "faults": faults})))
    }

    /// A vector for each text, in their order. The caller accepts at most `result_bytes` bytes of
    /// JSON.
    pub(super) async fn embed(
        &self,
        arguments: EmbedArguments,
        result_bytes: usize,
    ) -> Result<Vec<Vec<f64>>, ToolError> {
        let EmbedArguments { texts, options } = arguments;
        let (count, tool) = (texts.len(), &EMBED);
        let mut body =
            json!({"model": self.resolve_model(tool, Some(&options.model))?, "input": texts});
        let most = MAX_VECTOR_BYTES.min(result_bytes);
        if let Some(dimensions) = options.dimensions {
            body["dimensions"] = json!(dimensions);
            // Check before anything is paid for.
            let vector = BYTES_PER_NUMBER * dimensions as usize;
            if count.saturating_mul(vector) > most {
                let message = format!(
                    "{}: {count} vectors of {dimensions} numbers exceed the {most} bytes that a result may have. Embed \
                     at most {} texts at once, or use fewer dimensions; nothing was sent.",
                    tool.name,
                    most / vector
                );
                return Err(ToolError::invalid(message));
            }
        }
        let answer = self.post(tool, "/v1/embeddings", &body, most).await?;
        let vectors: Vectors = serde_json::from_slice(&answer)
            .map_err(|_| ToolError::internal(tool.name, "the answer contains no vectors"))?;
        if vectors.data.len() != count {
            return Err(ToolError::internal(
                tool.name,
                "the answer does not have one vector for each text",
            ));
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
        let model = self.resolve_model(tool, options.model.as_deref())?;
        let system = options.system.iter().filter(|text| !text.is_empty());
        let system = system.map(|text| json!({"role": "system", "content": text}));
        let mut body = json!({"model": model, "messages": system.chain(messages.iter().cloned()).collect::<Vec<_>>()});
        if let Some(limit) = options.max_tokens {
            body["max_completion_tokens"] = json!(limit);
        }
        if let Some(format) = format {
            body["response_format"] = format.clone();
        }
        let body = self.post(tool, "/v1/chat/completions", &body, MAX_ANSWER_BYTES).await?;
        let body = parse_answer(tool, &body)?;
        let answer = &body["choices"][0];
        match (answer["message"]["content"].as_str(), answer["finish_reason"].as_str()) {
            (_, Some("content_filter")) => Err(ToolError::new(
                "ModelFailed",
                format!("{}: the model's vendor filtered the answer.", tool.name),
            )),
            (Some(text), Some("length"))
                if tool.name == ASK.name && options.max_tokens.is_none() =>
            {
                let message = format!(
                    "{}: the answer reached the model's output limit. The details have the truncated answer; ask for \
                     less, or in parts.",
                    tool.name
                );
                Err(ToolError::new("AnswerCut", message).with(json!({"answer": text})))
            }
            (Some(text), _) => Ok(text.to_owned()),
            (None, _) => Err(ToolError::internal(tool.name, "the answer contains no text")),
        }
    }

    /// The model to ask: the named one, or the agent's own.
    fn resolve_model<'a>(
        &'a self,
        tool: &Definition,
        name: Option<&'a str>,
    ) -> Result<&'a str, ToolError> {
        if self.client.is_none() {
            let message =
                format!("{}: models are not available to scripts of this installation.", tool.name);
            return Err(ToolError::new("ModelNotAllowed", message));
        }
        let model = name.or(self.names.first().map(String::as_str)).unwrap_or_default();
        if self.names.iter().any(|name| name == model) {
            return Ok(model);
        }
        let names = self.names.join(", ");
        let message = format!(
            "{}: scripts of this agent may not use the model {model:?}, only: {names}.",
            tool.name
        );
        Err(ToolError::new("ModelNotAllowed", message).with(json!({"models": self.names})))
    }

    /// Sends a request to the proxy and returns its answer, which has at most `limit` bytes.
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
        let response = request.send().await.map_err(|error| transport_error(tool, &error))?;
        let status = response.status();
        let body = read(tool, response, limit).await?;
        if status != StatusCode::OK {
            return Err(proxy_error(tool, status, &parse_answer(tool, &body)?));
        }
        Ok(body)
    }
}

fn parse_answer(tool: &Definition, body: &[u8]) -> Result<Value, ToolError> {
    serde_json::from_slice(body)
        .map_err(|_| ToolError::internal(tool.name, "the answer is not JSON"))
}

async fn read(
    tool: &Definition,
    mut response: Response,
    limit: usize,
) -> Result<BytesMut, ToolError> {
    let mut body = BytesMut::new();
    while let Some(bytes) = response.chunk().await.map_err(|error| transport_error(tool, &error))? {
        body.extend_from_slice(&bytes);
        if body.len() > limit {
            let message = format!(
                "{}: the answer is larger than the limit of {limit} bytes; it was charged. Ask for less at once.",
                tool.name
            );
            return Err(ToolError::new("ModelFailed", message));
        }
    }
    Ok(body)
}

fn transport_error(tool: &Definition, error: &reqwest::Error) -> ToolError {
    let name = tool.name;
    if error.is_timeout() {
        let seconds = ANSWER_TIMEOUT.as_secs();
        return ToolError::new(
            "Timeout",
            format!("{name}: the model did not answer within {seconds} seconds."),
        );
    }
    if error.is_connect() {
        let message = format!("{name}: models cannot be reached at the moment; nothing was sent.");
        return ToolError::new("ModelUnavailable", message);
    }
    // The error's own text contains the address, which is of no use to a script.
    let why = error.source().map(|source| format!(" ({source})")).unwrap_or_default();
    ToolError::new(
        "ModelUnavailable",
        format!(
            "{name}: the connection was closed during the answer{why}; it may have been charged."
        ),
    )
}

fn proxy_error(tool: &Definition, status: StatusCode, body: &Value) -> ToolError {
    let name = match status.as_u16() {
        402 => "BudgetExhausted",
        404 => "ModelNotAllowed",
        429 | 502 | 503 => "ModelUnavailable",
        504 => "Timeout",
        _ => "ModelFailed",
    };
    let message = body["error"]["message"].as_str().unwrap_or("no reason was given");
    ToolError::new(name, format!("{}: {message}", tool.name))
}

/// Parses the JSON value of an answer, with or without a code fence.
fn parse_json(text: &str) -> Result<Value, String> {
    let text = text.trim();
    let inner = text.strip_prefix("```").and_then(|rest| rest.strip_suffix("```"));
    let inner = inner.map(|rest| rest.strip_prefix("json").unwrap_or(rest));
    serde_json::from_str(inner.unwrap_or(text)).map_err(|error| format!("it is not JSON: {error}"))
}

/// Returns the value, or its faults.
async fn validate(schema: Value, value: Value) -> Result<Result<Value, Vec<String>>, ToolError> {
    let validated = blocking(move || {
        let faults = schema::faults(&schema, &value, MAX_FAULTS);
        if faults.is_empty() { Ok(value) } else { Err(faults) }
    });
    let died = || ToolError::internal(JSON.name, "the thread that validated ended unexpectedly");
    validated.await.ok_or_else(died)
}
