//! What the contract's own options say about methods and fields.

use prost::Message;
use prost_reflect::{DynamicMessage, MethodDescriptor, Value};

use crate::v1::Access;

/// Who may call a method. `None`: the contract doesn't say, and nobody may.
pub fn access(method: &MethodDescriptor) -> Option<Access> {
    message(&method.options(), "construct.v1.access")
}

/// An option that is a message.
fn message<T: Message + Default>(options: &DynamicMessage, name: &str) -> Option<T> {
    let descriptor = options.descriptor();
    let extension = descriptor.parent_pool().get_extension_by_name(name)?;
    if !options.has_extension(&extension) {
        return None;
    }
    match options.get_extension(&extension).as_ref() {
        Value::Message(value) => value.transcode_to().ok(),
        _ => None,
    }
}
