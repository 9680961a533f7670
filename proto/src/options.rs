//! Reads the contract's own options of methods and fields.

use prost::Message;
use prost_reflect::{
    DynamicMessage, FieldDescriptor, MethodDescriptor, OneofDescriptor, ReflectMessage as _, Value,
};

use crate::{
    google::api::HttpRule,
    v1::{Access, FieldRule},
};

/// Who may call a method. `None`: the option is missing, and nobody may call it.
pub fn access(method: &MethodDescriptor) -> Option<Access> {
    message(&method.options(), "construct.v1.access")
}

/// The HTTP mapping of a method.
pub fn http(method: &MethodDescriptor) -> Option<HttpRule> {
    message(&method.options(), "google.api.http")
}

/// An example of an HTTP request body, as JSON.
pub fn example(method: &MethodDescriptor) -> Option<String> {
    match value(&method.options(), "construct.v1.example")? {
        Value::String(example) => Some(example),
        _ => None,
    }
}

/// Whether calls of a read-only method have an audit entry.
pub fn is_audited(method: &MethodDescriptor) -> bool {
    value(&method.options(), "construct.v1.audited") == Some(Value::Bool(true))
}

/// Whether a repeated call has a second effect, because there is no idempotency key.
pub fn is_not_idempotent(method: &MethodDescriptor) -> bool {
    value(&method.options(), "construct.v1.not_idempotent") == Some(Value::Bool(true))
}

/// The values that a field of a request accepts.
pub fn rule(field: &FieldDescriptor) -> FieldRule {
    message(&field.options(), "construct.v1.rule").unwrap_or_default()
}

/// Whether one of the oneof's fields must be set.
pub fn is_one_required(oneof: &OneofDescriptor) -> bool {
    value(&oneof.options(), "construct.v1.one_required") == Some(Value::Bool(true))
}

/// Whether the value of a field must not be printed: the standard option `debug_redact`.
pub fn is_redacted(field: &FieldDescriptor) -> bool {
    field
        .options()
        .get_field_by_name("debug_redact")
        .is_some_and(|value| value.as_bool() == Some(true))
}

/// An option that is a message.
fn message<T: Message + Default>(options: &DynamicMessage, name: &str) -> Option<T> {
    match value(options, name)? {
        Value::Message(value) => value.transcode_to().ok(),
        _ => None,
    }
}

/// An option, if it is set.
fn value(options: &DynamicMessage, name: &str) -> Option<Value> {
    let extension = options.descriptor().parent_pool().get_extension_by_name(name)?;
    options.has_extension(&extension).then(|| options.get_extension(&extension).into_owned())
}
