//! Types of tool parameters.

use serde_json::{Map, Value, json};

/// One parameter of a tool, or one option of an options object.
#[derive(Debug)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Whether it must be given.
    pub required: bool,
    /// Whether it can also be given by position, not only by name.
    pub positional: bool,
    /// The default, in words or as a literal.
    pub default: Option<&'static str>,
    /// Its description, for the model.
    pub description: &'static str,
}

/// The type of a value.
#[derive(Debug)]
pub enum Kind {
    /// A path in the workspace, at most 4096 bytes.
    Path,
    /// A path in the workspace that does not end with a slash and so cannot mean a directory.
    File,
    /// Text within these bounds.
    Text {
        /// Shortest length, in bytes.
        min_bytes: usize,
        /// Longest length, in bytes.
        max_bytes: usize,
    },
    /// A whole number within these bounds, both included.
    Integer {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
    },
    /// A number within these bounds, both included.
    Number {
        /// Smallest.
        min: f64,
        /// Largest.
        max: f64,
    },
    /// True or false.
    Boolean,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A text or a list of at most 100 texts.
    TextOrTexts {
        /// Longest text, in bytes.
        max_bytes: usize,
    },
    /// The arguments of a program: a list of texts, at most 1000.
    Arguments,
    /// Code as a text, or the arguments of a program as a list.
    CodeOrArguments {
        /// Longest code, in bytes.
        max_bytes: usize,
    },
    /// Texts by name.
    TextMap,
    /// An object with these properties.
    Object(&'static [Parameter]),
    /// A non-empty list of objects with these properties.
    Objects(&'static [Parameter]),
    /// Any JSON value.
    Any,
}

/// Longest path, in bytes.
pub(super) const MAX_PATH_BYTES: usize = 4096;

/// Maximum number of texts in a [`Kind::TextOrTexts`].
pub(super) const MAX_TEXTS: usize = 100;

/// A list of names or patterns.
pub(super) const NAMES: Kind = Kind::TextOrTexts { max_bytes: 1024 };

/// Maximum number of arguments of a program.
pub(super) const MAX_ARGUMENTS: usize = 1000;

/// The largest whole number that JavaScript represents exactly.
pub(super) const MAX_SAFE_INTEGER: u64 = (1 << 53) - 1;

pub(super) const fn required(
    name: &'static str,
    kind: Kind,
    description: &'static str,
) -> Parameter {
    Parameter { name, kind, required: true, positional: true, default: None, description }
}

pub(super) const fn optional(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    description: &'static str,
) -> Parameter {
    Parameter { name, kind, required: false, positional: true, default: Some(default), description }
}

/// A parameter that can only be given by name. It follows the positional ones.
pub(super) const fn named(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    description: &'static str,
) -> Parameter {
    Parameter { positional: false, ..optional(name, kind, default, description) }
}

impl Parameter {
    /// Its name and type, as in a TypeScript signature.
    #[must_use]
    pub fn typescript(&self) -> String {
        let mark = if self.required { "" } else { "?" };
        format!("{}{mark}: {}", self.name, self.kind.typescript())
    }

    /// Its description and default.
    pub(super) fn explanation(&self) -> String {
        let default =
            self.default.map(|default| format!(" Default: {default}.")).unwrap_or_default();
        format!("{}{default}", self.description)
    }
}

impl Kind {
    /// Whether it accepts an object, so that an object as the only argument is its value and not a
    /// set of named arguments.
    #[must_use]
    pub const fn takes_object(&self) -> bool {
        matches!(self, Self::Object(_) | Self::TextMap | Self::Any)
    }

    /// The TypeScript type.
    #[must_use]
    pub fn typescript(&self) -> String {
        match self {
            Self::Path | Self::File | Self::Text { .. } => "string".to_owned(),
            Self::Integer { .. } | Self::Number { .. } => "number".to_owned(),
            Self::Boolean => "boolean".to_owned(),
            Self::OneOf(words) => {
                words.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(" | ")
            }
            Self::TextOrTexts { .. } | Self::CodeOrArguments { .. } => {
                "string | string[]".to_owned()
            }
            Self::Arguments => "string[]".to_owned(),
            Self::TextMap => "Record<string, string>".to_owned(),
            Self::Object(properties) => object_type(properties),
            Self::Objects(properties) => format!("{}[]", object_type(properties)),
            Self::Any => "unknown".to_owned(),
        }
    }

    /// Describes the expected value, for an error message.
    #[must_use]
    pub fn requirement(&self) -> String {
        match self {
            Self::Path | Self::File => {
                format!("a non-empty string of at most {MAX_PATH_BYTES} bytes")
            }
            Self::Text { min_bytes: 0, max_bytes } => {
                format!("a string of at most {max_bytes} bytes")
            }
            Self::Text { max_bytes, .. } => {
                format!("a non-empty string of at most {max_bytes} bytes")
            }
            Self::Integer { min, max } if *max >= MAX_SAFE_INTEGER => {
                format!("a whole number of at least {min}")
            }
            Self::Integer { min, max } => format!("a whole number from {min} to {max}"),
            Self::Number { min, max } => format!("a number from {min} to {max}"),
            Self::Boolean => "true or false".to_owned(),
            Self::OneOf(_) => format!("one of {}", self.typescript().replace(" | ", ", ")),
            Self::TextOrTexts { max_bytes } => {
                format!(
                    "a string or a list of strings, at most {MAX_TEXTS} of at most {max_bytes} bytes each"
                )
            }
            Self::Arguments => {
                format!("a list of at most {MAX_ARGUMENTS} strings, one for each argument")
            }
            Self::CodeOrArguments { max_bytes } => format!(
                "code, a string of at most {max_bytes} bytes, or arguments, a list of at most {MAX_ARGUMENTS} strings"
            ),
            Self::TextMap => "an object whose values are strings".to_owned(),
            Self::Object(_) => format!("an object {}", self.typescript()),
            Self::Objects(properties) => {
                format!("a non-empty list of objects {}", object_type(properties))
            }
            Self::Any => "a value".to_owned(),
        }
    }

    /// Whether it is or contains a path in the workspace.
    pub(super) fn has_path(&self) -> bool {
        let (_, properties) = self.properties();
        matches!(self, Self::Path | Self::File)
            || properties.iter().any(|property| property.kind.has_path())
    }

    /// Its properties, and the separator between its path and a property.
    pub(super) fn properties(&self) -> (&'static str, &'static [Parameter]) {
        match self {
            Self::Object(properties) => (".", properties),
            Self::Objects(properties) => ("[].", properties),
            _ => ("", &[]),
        }
    }

    fn schema(&self) -> Value {
        let arguments =
            || json!({"type": "array", "maxItems": MAX_ARGUMENTS, "items": {"type": "string"}});
        match self {
            Self::Path => json!({"type": "string", "minLength": 1, "maxLength": MAX_PATH_BYTES}),
            Self::File => {
                json!({"type": "string", "minLength": 1, "maxLength": MAX_PATH_BYTES, "pattern": "[^/]$"})
            }
            Self::Text { min_bytes, max_bytes } => {
                json!({"type": "string", "minLength": min_bytes.min(&1), "maxLength": max_bytes})
            }
            Self::Integer { min, max } => {
                json!({"type": "integer", "minimum": min, "maximum": max})
            }
            Self::Number { min, max } => json!({"type": "number", "minimum": min, "maximum": max}),
            Self::Boolean => json!({"type": "boolean"}),
            Self::OneOf(words) => json!({"type": "string", "enum": words}),
            Self::TextOrTexts { max_bytes } => {
                let text = json!({"type": "string", "maxLength": max_bytes});
                json!({"anyOf": [text, {"type": "array", "maxItems": MAX_TEXTS, "items": text}]})
            }
            Self::Arguments => arguments(),
            Self::CodeOrArguments { max_bytes } => {
                json!({"anyOf": [{"type": "string", "maxLength": max_bytes}, arguments()]})
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

fn object_type(properties: &[Parameter]) -> String {
    let properties: Vec<String> = properties.iter().map(Parameter::typescript).collect();
    format!("{{ {} }}", properties.join("; "))
}

pub(super) fn object_schema(properties: &[Parameter]) -> Value {
    let mut schemas = Map::new();
    for parameter in properties {
        let mut schema = parameter.kind.schema();
        schema["description"] = Value::String(parameter.explanation());
        schemas.insert(parameter.name.to_owned(), schema);
    }
    let required: Vec<&str> = properties.iter().filter(|p| p.required).map(|p| p.name).collect();
    json!({"type": "object", "properties": schemas, "required": required, "additionalProperties": false})
}
