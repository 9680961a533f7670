//! What is known about a tool, and the forms it is shown in.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Map, Value, json};

/// One tool.
#[derive(Debug)]
pub struct Definition {
    /// Its name, which is the name of the global function in scripts.
    pub name: &'static str,
    /// What it does, for the model.
    pub description: &'static str,
    /// Its parameters, in positional order: required ones first.
    pub parameters: &'static [Parameter],
    /// What it returns, as a TypeScript type.
    pub returns: &'static str,
    /// A call, for the declarations and for error messages.
    pub example: &'static str,
    /// Names of the errors that are particular to it, with their meaning.
    pub errors: &'static [(&'static str, &'static str)],
    /// What a call changes.
    pub effect: Effect,
    /// Who carries it out.
    pub provider: Provider,
    /// How much a call may use.
    pub limits: Limits,
}

/// What a call changes, and so whether it may be repeated when nobody knows whether it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: repeating it is safe.
    Read,
    /// Files of the workspace.
    Write,
    /// Anything, also outside: a command or a request.
    External,
}

/// Who carries a tool out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// The toolbox.
    Host,
    /// The sandbox itself; the toolbox refuses it.
    Sandbox,
}

/// How much a call may use. What the arguments ask for is bounded by the parameters themselves.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest wall time of a call, including what its arguments ask for.
    pub wall: Duration,
    /// Largest result, in bytes of text, approximately: the tool cuts its result and says so.
    pub result_bytes: usize,
}

/// One parameter of a tool, or one option of an options object.
#[derive(Debug)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// What it may be.
    pub kind: Kind,
    /// Whether it must be given.
    pub required: bool,
    /// What holds when it is not given, in words or as a literal.
    pub default: Option<&'static str>,
    /// What it means, for the model.
    pub description: &'static str,
}

/// What a value may be.
#[derive(Debug)]
pub enum Kind {
    /// Text of a length in bytes within these bounds.
    Text {
        /// Shortest.
        min_bytes: usize,
        /// Longest.
        max_bytes: usize,
    },
    /// A whole number within these bounds, both included.
    Integer {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
    },
    /// True or false.
    Boolean,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A text or a list of texts, at most 100 of at most 1024 bytes each.
    TextOrTexts,
    /// Texts by name.
    TextMap,
    /// An object with these properties.
    Object(&'static [Parameter]),
    /// A list, not empty, of objects with these properties.
    Objects(&'static [Parameter]),
    /// Any JSON value.
    Any,
}

impl Kind {
    /// The TypeScript type.
    #[must_use]
    pub fn typescript(&self) -> String {
        match self {
            Self::Text { .. } => "string".to_owned(),
            Self::Integer { .. } => "number".to_owned(),
            Self::Boolean => "boolean".to_owned(),
            Self::OneOf(words) => words.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(" | "),
            Self::TextOrTexts => "string | string[]".to_owned(),
            Self::TextMap => "Record<string, string>".to_owned(),
            Self::Object(properties) => object_type(properties),
            Self::Objects(properties) => format!("{}[]", object_type(properties)),
            Self::Any => "unknown".to_owned(),
        }
    }

    /// What is expected, in words for an error message.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Self::Text { min_bytes: 0, max_bytes } => format!("a string of at most {max_bytes} bytes"),
            Self::Text { max_bytes, .. } => format!("a non-empty string of at most {max_bytes} bytes"),
            Self::Integer { min, max } if *max >= MAX_SAFE_INTEGER => format!("a whole number of at least {min}"),
            Self::Integer { min, max } => format!("a whole number from {min} to {max}"),
            Self::Boolean => "true or false".to_owned(),
            Self::OneOf(_) => format!("one of {}", self.typescript().replace(" | ", ", ")),
            Self::TextOrTexts => {
                format!("a string or a list of strings, at most {MAX_TEXTS} of at most {MAX_TEXT_BYTES} bytes each")
            }
            Self::TextMap => "an object whose values are strings".to_owned(),
            Self::Object(_) => format!("an object {}", self.typescript()),
            Self::Objects(properties) => format!("a non-empty list of objects {}", object_type(properties)),
            Self::Any => "a value".to_owned(),
        }
    }

    fn schema(&self) -> Value {
        match self {
            Self::Text { min_bytes, max_bytes } => {
                json!({"type": "string", "minLength": min_bytes.min(&1), "maxLength": max_bytes})
            }
            Self::Integer { min, max } => json!({"type": "integer", "minimum": min, "maximum": max}),
            Self::Boolean => json!({"type": "boolean"}),
            Self::OneOf(words) => json!({"type": "string", "enum": words}),
            Self::TextOrTexts => {
                let text = json!({"type": "string", "maxLength": MAX_TEXT_BYTES});
                json!({"anyOf": [text, {"type": "array", "maxItems": MAX_TEXTS, "items": text}]})
            }
            Self::TextMap => json!({"type": "object", "additionalProperties": {"type": "string"}}),
            Self::Object(properties) => object_schema(properties),
            Self::Objects(properties) => {
                json!({"type": "array", "minItems": 1, "items": object_schema(properties)})
            }
            Self::Any => json!({}),
        }
    }
}

/// Most texts in a [`Kind::TextOrTexts`].
pub(super) const MAX_TEXTS: usize = 100;

/// Longest text in a [`Kind::TextOrTexts`], in bytes.
pub(super) const MAX_TEXT_BYTES: usize = 1024;

/// The largest whole number that JavaScript represents exactly.
pub(super) const MAX_SAFE_INTEGER: u64 = (1 << 53) - 1;

fn object_type(properties: &[Parameter]) -> String {
    let properties: Vec<String> = properties.iter().map(parameter_type).collect();
    format!("{{ {} }}", properties.join("; "))
}

fn parameter_type(parameter: &Parameter) -> String {
    let mark = if parameter.required { "" } else { "?" };
    format!("{}{mark}: {}", parameter.name, parameter.kind.typescript())
}

fn object_schema(properties: &[Parameter]) -> Value {
    let mut schemas = Map::new();
    for parameter in properties {
        let mut schema = parameter.kind.schema();
        let mut description = parameter.description.to_owned();
        if let Some(default) = parameter.default {
            let _ = write!(description, " Default: {default}.");
        }
        schema["description"] = Value::String(description);
        schemas.insert(parameter.name.to_owned(), schema);
    }
    let required: Vec<&str> = properties.iter().filter(|p| p.required).map(|p| p.name).collect();
    json!({"type": "object", "properties": schemas, "required": required, "additionalProperties": false})
}

impl Definition {
    /// Its TypeScript signature without documentation, for example `read_file(path: string): string`.
    #[must_use]
    pub fn signature(&self) -> String {
        let parameters: Vec<String> = self.parameters.iter().map(parameter_type).collect();
        format!("{}({}): {}", self.name, parameters.join(", "), self.returns)
    }

    /// Its TypeScript declaration with a doc comment.
    #[must_use]
    pub fn declaration(&self) -> String {
        let mut text = String::from("/**\n");
        for line in self.description.lines() {
            let _ = writeln!(text, " * {line}");
        }
        for parameter in self.parameters {
            document(&mut text, "", parameter);
        }
        for (name, meaning) in self.errors {
            let _ = writeln!(text, " * @throws {name} {meaning}");
        }
        let _ = writeln!(text, " * @example {}", self.example);
        let _ = write!(text, " */\ndeclare function {};\n", self.signature());
        text
    }

    /// The JSON schema of its arguments by name.
    #[must_use]
    pub fn input_schema(&self) -> Value {
        object_schema(self.parameters)
    }
}

fn document(text: &mut String, prefix: &str, parameter: &Parameter) {
    let path = format!("{prefix}{}", parameter.name);
    let default = parameter.default.map(|default| format!(" Default: {default}.")).unwrap_or_default();
    let _ = writeln!(text, " * @param {path} {}{default}", parameter.description);
    match parameter.kind {
        Kind::Object(properties) => properties.iter().for_each(|p| document(text, &format!("{path}."), p)),
        Kind::Objects(properties) => properties.iter().for_each(|p| document(text, &format!("{path}[]."), p)),
        _ => {}
    }
}
