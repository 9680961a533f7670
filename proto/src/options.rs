//! What the contract's own options say about methods and fields.

use prost::Message;
use prost_reflect::{DynamicMessage, MethodDescriptor, Value};

use crate::{google::api::HttpRule, v1::Access};

/// Who may call a method. `None`: the contract doesn't say, and nobody may.
pub fn access(method: &MethodDescriptor) -> Option<Access> {
    message(&method.options(), "construct.v1.access")
}

/// How a method is called over HTTP.
pub fn http(method: &MethodDescriptor) -> Option<HttpRule> {
    message(&method.options(), "google.api.http")
}

/// An example of the body of a request over HTTP, as JSON.
pub fn example(method: &MethodDescriptor) -> Option<String> {
    match value(&method.options(), "construct.v1.example")? {
        Value::String(example) => Some(example),
        _ => None,
    }
}

/// Whether a call leaves an entry in the audit trail although it changes nothing.
pub fn is_audited(method: &MethodDescriptor) -> bool {
    value(&method.options(), "construct.v1.audited") == Some(Value::Bool(true))
}

/// Whether a call that is sent again does again what it did, with no key to tell.
pub fn is_not_idempotent(method: &MethodDescriptor) -> bool {
    value(&method.options(), "construct.v1.not_idempotent") == Some(Value::Bool(true))
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
