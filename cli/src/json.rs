//! Converts messages to canonical protobuf JSON by their descriptors.

use construct_proto::DESCRIPTORS;
use prost_reflect::{DynamicMessage, SerializeOptions};
use serde_json::Value;

/// Why the conversion failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Error {
    /// The contracts have no such type.
    UnknownType,
    /// The bytes are not a message of the type.
    Undecodable,
}

/// Converts a message whose full protobuf name is `name`.
pub(crate) fn message(name: &str, message: &impl prost::Message) -> Value {
    // The bytes come from an encoder: only a wrong name could fail.
    decode(name, &message.encode_to_vec()).unwrap_or(Value::Null)
}

/// Converts the encoded bytes of a message whose full protobuf name is `name`.
///
/// # Errors
/// When the type is unknown, or the bytes cannot be decoded.
pub(crate) fn decode(name: &str, bytes: &[u8]) -> Result<Value, Error> {
    let descriptor = DESCRIPTORS.get_message_by_name(name).ok_or(Error::UnknownType)?;
    let message = DynamicMessage::decode(descriptor, bytes).map_err(|_| Error::Undecodable)?;
    message
        .serialize_with_options(serde_json::value::Serializer, &SerializeOptions::new())
        .map_err(|_| Error::Undecodable)
}

#[cfg(test)]
mod tests {
    use construct_proto::v1;

    use super::*;

    #[test]
    fn json_is_canonical() {
        let task = v1::Task {
            status: Some(v1::TaskStatus {
                phase: v1::TaskPhase::AwaitInput.into(),
                event_sequence: 7,
                ..v1::TaskStatus::default()
            }),
            ..v1::Task::default()
        };
        let expected = serde_json::json!({ "status": { "phase": "TASK_PHASE_AWAIT_INPUT", "eventSequence": "7" } });
        assert_eq!(message("construct.v1.Task", &task), expected);
        assert_eq!(decode("construct.v1.Nothing", &[]), Err(Error::UnknownType));
        assert_eq!(decode("construct.v1.Task", &[0xff]), Err(Error::Undecodable));
    }
}
