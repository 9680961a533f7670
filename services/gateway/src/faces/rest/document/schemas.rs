//! JSON schemas of messages, as proto3 maps them to JSON.

use std::collections::BTreeMap;

use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor};
use serde_json::{Map, Value, json};

use super::comments::Comments;

/// Schemas of the messages that were asked for, and of what they are made of.
pub(super) struct Schemas<'a> {
    comments: &'a Comments,
    known: BTreeMap<String, Value>,
}

impl<'a> Schemas<'a> {
    pub(super) fn new(comments: &'a Comments) -> Self {
        Self { comments, known: BTreeMap::new() }
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
        let one = self.one(field.kind());
        if field.is_list() { json!({"type": "array", "items": one}) } else { one }
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

/// A name within the contract's package.
fn short(name: &str) -> String {
    name.strip_prefix("construct.v1.").unwrap_or(name).to_owned()
}

fn refer(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}
