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

/// Schemas of the messages that were asked for, and of what they are made of.
pub(super) struct Schemas<'a> {
    comments: &'a Comments,
    known: BTreeMap<String, Value>,
    /// Full names of fields of messages that stand in a path, and so need not be in a body.
    bound: HashSet<String>,
}

impl<'a> Schemas<'a> {
    pub(super) fn new(comments: &'a Comments, bound: HashSet<String>) -> Self {
        Self { comments, known: BTreeMap::new(), bound }
    }

    pub(super) fn finish(self) -> Map<String, Value> {
        self.known.into_iter().collect()
    }

    /// What the contract says about a field.
    pub(super) fn words(&self, field: &FieldDescriptor) -> String {
        self.comments.of(field.parent_file().name(), field.path()).to_owned()
    }

    /// The schema of a message: what refers to it, except for well-known ones, which JSON writes in
    /// its own ways.
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
        if !self.known.contains_key(&name) {
            // Known before its fields are looked at: a message may be within itself.
            self.known.insert(name.clone(), Value::Null);
            let mut properties = Map::new();
            for field in kind.fields() {
                properties.insert(field.json_name().to_owned(), self.described(&field));
            }
            let mut schema = json!({"type": "object"});
            super::describe(&mut schema, self.comments.of(kind.parent_file().name(), kind.path()));
            if !properties.is_empty() {
                schema["properties"] = properties.into();
            }
            // What is redacted is left out of answers, which have the same schema.
            let in_body = |field: &FieldDescriptor| {
                !options::is_redacted(field) && !self.bound.contains(field.full_name())
            };
            require(&mut schema, kind.fields().filter(in_body));
            self.known.insert(name.clone(), schema);
        }
        refer(&name)
    }

    /// The schema of a field, with what the contract says about it.
    pub(super) fn described(&mut self, field: &FieldDescriptor) -> Value {
        let mut schema = self.field(field);
        super::describe(&mut schema, &self.words(field));
        schema
    }

    /// The schema of a field.
    pub(super) fn field(&mut self, field: &FieldDescriptor) -> Value {
        if field.is_map()
            && let Kind::Message(entry) = field.kind()
        {
            let value = self.one(entry.map_entry_value_field().kind());
            return json!({"type": "object", "additionalProperties": value});
        }
        let rule = options::rule(field);
        let mut one = self.one(field.kind());
        constrain(&mut one, field, &rule);
        if !field.is_list() {
            return one;
        }
        let mut list = json!({"type": "array", "items": one});
        set(&mut list, "minItems", rule.min_items.filter(|least| *least > 0));
        set(&mut list, "maxItems", rule.max_items);
        list
    }

    fn one(&mut self, kind: Kind) -> Value {
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
                    self.comments.of(kind.parent_file().name(), kind.path()),
                );
                self.known.entry(name.clone()).or_insert(schema);
                refer(&name)
            }
        }
    }
}

/// Names the fields that must be given.
pub(super) fn require(schema: &mut Value, fields: impl Iterator<Item = FieldDescriptor>) {
    let required: Vec<_> = fields.filter(|field| options::rule(field).required).collect();
    if !required.is_empty() {
        schema["required"] = required.iter().map(FieldDescriptor::json_name).collect();
    }
}

/// Adds to the schema of a value what its field's rule says, as far as JSON Schema has words for
/// it. 64-bit integers are texts in JSON, which have no bounds.
fn constrain(schema: &mut Value, field: &FieldDescriptor, rule: &FieldRule) {
    match field.kind() {
        Kind::String => {
            // No text has more characters than bytes.
            set(schema, "maxLength", rule.max_chars.or(rule.max_bytes));
            set(schema, "minLength", rule.min_chars.or(rule.min_bytes.map(|least| least.min(1))));
            if let Some(pattern) = pattern(rule) {
                // What is empty is not given.
                let may_be_empty = !rule.required && !field.supports_presence() && !field.is_list();
                schema["pattern"] =
                    if may_be_empty { format!("^$|{pattern}") } else { pattern }.into();
            }
        }
        // In base64, three bytes are four characters.
        Kind::Bytes => {
            set(schema, "maxLength", rule.max_bytes.map(|most| u64::from(most).div_ceil(3) * 4))
        }
        Kind::Int32 | Kind::Uint32 | Kind::Double => {
            set(schema, "minimum", rule.min);
            set(schema, "maximum", rule.max);
        }
        _ => {}
    }
}

/// The regular expression that a text matches.
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
        // An id has the form of a name as well.
        _ => name(Format::Name),
    }
}

fn set(schema: &mut Value, name: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        schema[name] = value.into();
    }
}

/// A name within the contract's package.
fn short(name: &str) -> String {
    name.strip_prefix("construct.v1.").unwrap_or(name).to_owned()
}

fn refer(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}
