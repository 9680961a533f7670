//! Result types of tools.

use serde_json::{Map, Value, json};

/// The type of a result. Both the TypeScript type and the JSON schema come from it.
#[derive(Debug)]
pub enum Output {
    /// Nothing.
    Nothing,
    /// Text.
    Text,
    /// A whole number, not negative.
    Integer,
    /// A number, not negative.
    Number,
    /// Numbers of either sign, of any count.
    Vector,
    /// True or false.
    Boolean,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// This, or null.
    Nullable(&'static Output),
    /// One of these, or a list of them.
    OneOrMore(&'static Output),
    /// A list of these.
    List(&'static Output),
    /// Texts by name.
    TextMap,
    /// An object with these properties.
    Object(&'static [Field]),
    /// Any JSON value.
    Any,
}

/// One property of a result.
#[derive(Debug)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub output: Output,
    /// Whether it can be absent.
    pub optional: bool,
    /// Its description.
    pub description: &'static str,
}

pub(super) const fn field(name: &'static str, output: Output, description: &'static str) -> Field {
    Field { name, output, optional: false, description }
}

pub(super) const fn optional_field(
    name: &'static str,
    output: Output,
    description: &'static str,
) -> Field {
    Field { name, output, optional: true, description }
}

impl Output {
    /// The TypeScript type.
    #[must_use]
    pub fn typescript(&self) -> String {
        match self {
            Self::Nothing => "void".to_owned(),
            Self::Text => "string".to_owned(),
            Self::Integer | Self::Number => "number".to_owned(),
            Self::Vector => "number[]".to_owned(),
            Self::Boolean => "boolean".to_owned(),
            Self::OneOf(words) => {
                words.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(" | ")
            }
            Self::Nullable(output) => format!("{} | null", output.typescript()),
            Self::OneOrMore(output) => {
                let one = output.typescript();
                format!("{one} | ({one})[]")
            }
            Self::List(output) => match output {
                Self::OneOf(_) | Self::Nullable(_) => format!("({})[]", output.typescript()),
                _ => format!("{}[]", output.typescript()),
            },
            Self::TextMap => "Record<string, string>".to_owned(),
            Self::Object(fields) => {
                let fields: Vec<String> = fields.iter().map(Field::typescript).collect();
                format!("{{ {} }}", fields.join("; "))
            }
            Self::Any => "unknown".to_owned(),
        }
    }

    /// The JSON schema.
    #[must_use]
    pub fn schema(&self) -> Value {
        match self {
            Self::Nothing => json!({"type": "null"}),
            Self::Text => json!({"type": "string"}),
            Self::Integer => json!({"type": "integer", "minimum": 0}),
            Self::Number => json!({"type": "number", "minimum": 0}),
            Self::Vector => json!({"type": "array", "items": {"type": "number"}}),
            Self::Boolean => json!({"type": "boolean"}),
            Self::OneOf(words) => json!({"type": "string", "enum": words}),
            Self::Nullable(output) => json!({"anyOf": [output.schema(), {"type": "null"}]}),
            Self::OneOrMore(output) => {
                let one = output.schema();
                json!({"anyOf": [one, {"type": "array", "items": one}]})
            }
            Self::List(output) => json!({"type": "array", "items": output.schema()}),
            Self::TextMap => json!({"type": "object", "additionalProperties": {"type": "string"}}),
            Self::Object(fields) => {
                let mut properties = Map::new();
                for field in *fields {
                    let mut schema = field.output.schema();
                    schema["description"] = field.description.into();
                    properties.insert(field.name.to_owned(), schema);
                }
                let required: Vec<&str> =
                    fields.iter().filter(|f| !f.optional).map(|f| f.name).collect();
                json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
            }
            Self::Any => json!({}),
        }
    }

    /// Its fields, and the separator between its path and a field.
    pub(super) fn fields(&self) -> (String, &'static [Field]) {
        match self {
            Self::Object(fields) => (".".to_owned(), fields),
            Self::Nullable(output) | Self::OneOrMore(output) => output.fields(),
            Self::List(output) => {
                let (below, fields) = output.fields();
                (format!("[]{below}"), fields)
            }
            _ => (String::new(), &[]),
        }
    }
}

impl Field {
    fn typescript(&self) -> String {
        let mark = if self.optional { "?" } else { "" };
        format!("{}{mark}: {}", self.name, self.output.typescript())
    }
}
