//! JSON schemas of messages, as proto3 maps them to JSON.

use std::collections::{BTreeMap, HashSet};

use construct_proto::{
    options,
    v1::{FieldRule, field_rule::Format},
};
use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor};
use serde_json::{Map, Value, json};

use super::comments::Comments;
use crate::validate::formats;

/// Schemas of the requested messages and of the messages they contain.
pub(super) struct Schemas<'a> {
    comments: &'a Comments,
    schemas: BTreeMap<String, Value>,
    /// Full names of fields that are in a path, and so need not be in a body.
    bound_fields: HashSet<String>,
}

impl<'a> Schemas<'a> {
    pub(super) fn new(comments: &'a Comments, bound_fields: HashSet<String>) -> Self {
        Self { comments, schemas: BTreeMap::new(), bound_fields }
    }

    pub(super) fn finish(self) -> Map<String, Value> {
        self.schemas.into_iter().collect()
    }

    /// The contract's comment on a field.
    pub(super) fn description(&self, field: &FieldDescriptor) -> String {
        self.comments.for_path(field.parent_file().name(), field.path()).to_owned()
    }

    /// A reference to the schema of a message, or the schema itself for well-known types, which
    /// have JSON forms of their own.
    pub(super) fn message(&mut self, kind: &MessageDescriptor) -> Value {
        match kind.full_name() {
            "google.protobuf.Timestamp" => return json!({"type": "string", "format": "date-time"}),
            "google.protobuf.Duration" => {
                return json!({"type": "string", "pattern": "^-?[0-9]+(\\.[0-9]{1,9})?s$"});
            }
            "google.protobuf.Struct" => return json!({"type": "object"}),
            _ => {}
        }
        let name = short(kind.full_name());
        if !self.schemas.contains_key(&name) {
            // Inserted before its fields: a message may contain itself.
            self.schemas.insert(name.clone(), Value::Null);
            let mut properties = Map::new();
            for field in kind.fields() {
                properties.insert(field.json_name().to_owned(), self.described(&field));
            }
            let mut schema = json!({"type": "object"});
            super::describe(
                &mut schema,
                self.comments.for_path(kind.parent_file().name(), kind.path()),
            );
            if !properties.is_empty() {
                schema["properties"] = properties.into();
            }
            // Redacted fields are absent from responses, which have the same schema.
            let in_body = |field: &FieldDescriptor| {
                !options::is_redacted(field) && !self.bound_fields.contains(field.full_name())
            };
            require(&mut schema, kind.fields().filter(in_body));
            self.schemas.insert(name.clone(), schema);
        }
        reference(&name)
    }

    /// The schema of a field with its description.
    pub(super) fn described(&mut self, field: &FieldDescriptor) -> Value {
        let mut schema = self.field(field);
        super::describe(&mut schema, &self.description(field));
        schema
    }

    /// The schema of a field.
    pub(super) fn field(&mut self, field: &FieldDescriptor) -> Value {
        if field.is_map()
            && let Kind::Message(entry) = field.kind()
        {
            let value = self.value_schema(entry.map_entry_value_field().kind());
            return json!({"type": "object", "additionalProperties": value});
        }
        let rule = options::rule(field);
        let mut value_schema = self.value_schema(field.kind());
        constrain(&mut value_schema, field, &rule);
        if !field.is_list() {
            return value_schema;
        }
        let mut list = json!({"type": "array", "items": value_schema});
        insert_some(&mut list, "minItems", rule.min_items.filter(|least| *least > 0));
        insert_some(&mut list, "maxItems", rule.max_items);
        list
    }

    fn value_schema(&mut self, kind: Kind) -> Value {
        match kind {
            Kind::Double | Kind::Float => json!({"type": "number"}),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => {
                json!({"type": "integer", "format": "int32"})
            }
            Kind::Uint32 | Kind::Fixed32 => {
                json!({"type": "integer", "minimum": 0, "maximum": u32::MAX})
            }
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
                json!({"type": "string", "pattern": "^-?[0-9]+$"})
            }
            Kind::Uint64 | Kind::Fixed64 => json!({"type": "string", "pattern": "^[0-9]+$"}),
            Kind::Bool => json!({"type": "boolean"}),
            Kind::String => json!({"type": "string"}),
            Kind::Bytes => json!({"type": "string", "contentEncoding": "base64"}),
            Kind::Message(kind) => self.message(&kind),
            Kind::Enum(kind) => {
                let name = short(kind.full_name());
                let values: Vec<_> = kind.values().map(|value| value.name().to_owned()).collect();
                let mut schema = json!({"type": "string", "enum": values});
                super::describe(
                    &mut schema,
                    self.comments.for_path(kind.parent_file().name(), kind.path()),
                );
                self.schemas.entry(name.clone()).or_insert(schema);
                reference(&name)
            }
        }
    }
}

/// Marks required fields.
pub(super) fn require(schema: &mut Value, fields: impl Iterator<Item = FieldDescriptor>) {
    let required: Vec<_> = fields.filter(|field| options::rule(field).required).collect();
    if !required.is_empty() {
        schema["required"] = required.iter().map(FieldDescriptor::json_name).collect();
    }
}

/// Adds a field's rule to its schema, as far as JSON Schema can express it. 64-bit integers are
/// strings in JSON, which have no bounds.
fn constrain(schema: &mut Value, field: &FieldDescriptor, rule: &FieldRule) {
    match field.kind() {
        Kind::String => {
            // A string never has more characters than bytes.
            insert_some(schema, "maxLength", rule.max_chars.or(rule.max_bytes));
            insert_some(
                schema,
                "minLength",
                rule.min_chars.or(rule.min_bytes.map(|least| least.min(1))),
            );
            if let Some(pattern) = pattern(rule) {
                // An empty value counts as absent.
                let may_be_empty = !rule.required && !field.supports_presence() && !field.is_list();
                schema["pattern"] =
                    if may_be_empty { format!("^$|{pattern}") } else { pattern }.into();
            }
        }
        // Base64 writes three bytes as four characters.
        Kind::Bytes => insert_some(
            schema,
            "maxLength",
            rule.max_bytes.map(|most| u64::from(most).div_ceil(3) * 4),
        ),
        Kind::Int32 | Kind::Uint32 | Kind::Double => {
            insert_some(schema, "minimum", rule.min);
            insert_some(schema, "maximum", rule.max);
        }
        _ => {}
    }
}

/// The regular expression for a string.
fn pattern(rule: &FieldRule) -> Option<String> {
    const UUID: &str = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}";
    let name = |format| formats::pattern(format).map(str::to_owned);
    if !rule.id.is_empty() {
        return Some(format!("^{}_{UUID}$", rule.id));
    }
    if !rule.pattern.is_empty() {
        return Some(rule.pattern.clone());
    }
    match rule.reference.as_str() {
        "" => name(rule.format()),
        "secret" => Some(format!("{}|^secret_{UUID}$", name(Format::SecretName)?)),
        // An id also has the form of a name.
        _ => name(Format::Name),
    }
}

fn insert_some(schema: &mut Value, name: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        schema[name] = value.into();
    }
}

/// A name without the contract's package.
fn short(name: &str) -> String {
    name.strip_prefix("construct.v1.").unwrap_or(name).to_owned()
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}
