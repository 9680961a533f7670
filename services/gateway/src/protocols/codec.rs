//! Conversion between the formats of clients and protobuf: JSON as proto3 maps it, and gzip.

use std::io::{Read as _, Write as _};

use bytes::Bytes;
use flate2::{Compression, read::MultiGzDecoder, write::GzEncoder};
use prost_reflect::{
    DeserializeOptions, DynamicMessage, Kind, MessageDescriptor, prost::Message as _,
};
use serde_json::Value;
use tonic::{
    Code, Status,
    codegen::http::{HeaderMap, HeaderName},
};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::{server::MAX_REQUEST, status};

/// Messages below this size, in bytes, are not worth compressing.
const WORTH_COMPRESSING: usize = 1024;

/// The format of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Codec {
    Json,
    Proto,
}

impl Codec {
    /// Converts a request to protobuf.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, with the field that is wrong.
    pub(super) fn request(self, kind: &MessageDescriptor, bytes: Bytes) -> Result<Bytes, Status> {
        match self {
            Self::Proto => Ok(bytes),
            Self::Json => {
                let mut source = serde_json::Deserializer::from_slice(&bytes);
                match read(kind, &mut source) {
                    Ok(message) => {
                        source.end().map_err(|error| invalid("", &error.to_string()))?;
                        Ok(message)
                    }
                    Err(error) => {
                        let json = serde_json::from_slice(&bytes).unwrap_or_default();
                        Err(error.into_status(kind, &json))
                    }
                }
            }
        }
    }

    /// Converts a response to the client's format.
    ///
    /// # Errors
    /// `INTERNAL` when it does not match the method's type.
    pub(super) fn response(self, kind: &MessageDescriptor, bytes: Bytes) -> Result<Bytes, Status> {
        match self {
            Self::Proto => Ok(bytes),
            Self::Json => {
                let message = DynamicMessage::decode(kind.clone(), bytes)
                    .map_err(|error| status::internal("an answer cannot be read", &error))?;
                let json = serde_json::to_vec(&message).map_err(|error| {
                    status::internal("an answer cannot be written as JSON", &error)
                })?;
                Ok(json.into())
            }
        }
    }
}

/// Converts JSON to a message. Unknown fields are refused: a misspelled field would be ignored
/// silently.
///
/// # Errors
/// `INVALID_ARGUMENT`, with the field that is wrong.
pub(super) fn message(kind: &MessageDescriptor, json: &Value) -> Result<Bytes, Status> {
    read(kind, json).map_err(|error| error.into_status(kind, json))
}

/// A JSON error: the parser's message, and the path of the value.
struct JsonError {
    path: String,
    message: String,
}

fn read<'de, D>(kind: &MessageDescriptor, source: D) -> Result<Bytes, JsonError>
where
    D: serde::Deserializer<'de>,
    D::Error: std::fmt::Display,
{
    let mut track = serde_path_to_error::Track::new();
    let source = serde_path_to_error::Deserializer::new(source, &mut track);
    let options = DeserializeOptions::new().deny_unknown_fields(true);
    match DynamicMessage::deserialize_with_options(kind.clone(), source, &options) {
        Ok(message) => Ok(message.encode_to_vec().into()),
        Err(error) => Err(JsonError { path: track.path().to_string(), message: error.to_string() }),
    }
}

impl JsonError {
    fn into_status(self, kind: &MessageDescriptor, json: &Value) -> Status {
        // For a missing or unknown field the parser reports the path of the message, not of the
        // field.
        match unknown_field(kind, json) {
            Some(path) => invalid(&path, "is not a field"),
            None => invalid(&self.path, &self.message),
        }
    }
}

/// The path of a field that the contract doesn't have.
fn unknown_field(kind: &MessageDescriptor, json: &Value) -> Option<String> {
    // Well-known types have JSON forms of their own.
    if kind.parent_file().package_name() == "google.protobuf" {
        return None;
    }
    json.as_object()?.iter().find_map(|(name, value)| {
        let Some(field) =
            kind.fields().find(|field| field.name() == name || field.json_name() == name)
        else {
            return Some(name.clone());
        };
        let Kind::Message(inner) = field.kind() else { return None };
        let (place, path) = match value {
            Value::Array(values) if field.is_list() => {
                let found = |(index, value)| Some((index, unknown_field(&inner, value)?));
                values
                    .iter()
                    .enumerate()
                    .find_map(found)
                    .map(|(index, path)| (format!("{name}[{index}]"), path))?
            }
            _ if field.is_map() => return None,
            value => (name.clone(), unknown_field(&inner, value)?),
        };
        Some(format!("{place}.{path}"))
    })
}

/// The status for an invalid field.
pub(super) fn invalid(field: &str, message: &str) -> Status {
    let field = if field == "." { "" } else { field };
    let text = if field.is_empty() {
        format!("the request: {message}")
    } else {
        format!("{field}: {message}")
    };
    let details = ErrorDetails::with_bad_request_violation(field, message);
    Status::with_error_details(Code::InvalidArgument, text, details)
}

/// The compression of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Identity,
    Gzip,
}

impl Encoding {
    /// The encoding with this name in a header or parameter.
    ///
    /// # Errors
    /// `UNIMPLEMENTED` for every other one than `gzip` and `identity`.
    pub(super) fn from_name(name: &str) -> Result<Self, Status> {
        match name {
            "" | "identity" => Ok(Self::Identity),
            "gzip" => Ok(Self::Gzip),
            other => Err(Status::unimplemented(format!(
                "unknown encoding `{other}`: use gzip or identity"
            ))),
        }
    }

    /// The encoding that a header names.
    ///
    /// # Errors
    /// `UNIMPLEMENTED` for every other one than `gzip` and `identity`.
    pub(super) fn from_header(headers: &HeaderMap, name: &HeaderName) -> Result<Self, Status> {
        match headers.get(name) {
            Some(value) => Self::from_name(value.to_str().unwrap_or("?").trim()),
            None => Ok(Self::Identity),
        }
    }

    /// The best encoding that the client accepts.
    pub(super) fn accepted_by(headers: &HeaderMap, name: &HeaderName) -> Self {
        let gzip =
            headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).any(|value| {
                value.split(',').any(|each| {
                    let mut parts = each.split(';').map(str::trim);
                    let (name, quality) =
                        (parts.next(), parts.find_map(|part| part.strip_prefix("q=")));
                    let refused = quality.is_some_and(|quality| quality.parse() == Ok(0.0_f32));
                    matches!(name, Some("gzip" | "*")) && !refused
                })
            });
        if gzip { Self::Gzip } else { Self::Identity }
    }

    /// Decompresses a message.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for invalid gzip; `RESOURCE_EXHAUSTED` for a message larger than the
    /// limit. Never decompresses more than the limit.
    pub(super) fn decompress(self, bytes: Bytes) -> Result<Bytes, Status> {
        match self {
            Self::Identity => Ok(bytes),
            Self::Gzip => {
                let mut plain = Vec::new();
                let mut source = MultiGzDecoder::new(&bytes[..]).take(MAX_REQUEST as u64 + 1);
                source.read_to_end(&mut plain).map_err(|error| {
                    Status::invalid_argument(format!("the message is not gzip: {error}"))
                })?;
                if plain.len() > MAX_REQUEST {
                    return Err(status::too_large(MAX_REQUEST));
                }
                Ok(plain.into())
            }
        }
    }

    /// Whether a message of this size is compressed.
    pub(super) fn compresses(self, bytes: &Bytes) -> bool {
        self == Self::Gzip && bytes.len() >= WORTH_COMPRESSING
    }

    /// The compressed bytes; `None` when the encoding is `identity` or compression isn't
    /// worthwhile.
    pub(super) fn compress(self, bytes: &Bytes) -> Option<Bytes> {
        if !self.compresses(bytes) {
            return None;
        }
        let mut compressed =
            GzEncoder::new(Vec::with_capacity(bytes.len() / 2), Compression::fast());
        // Writing to memory doesn't fail. If it did, the bytes would be sent uncompressed.
        compressed.write_all(bytes).ok()?;
        compressed.finish().ok().map(Bytes::from)
    }
}

#[cfg(test)]
mod tests {
    use construct_proto::DESCRIPTORS;
    use proptest::prelude::*;

    use super::*;

    fn kind(name: &str) -> MessageDescriptor {
        DESCRIPTORS.get_message_by_name(name).expect("it is in the contract")
    }

    #[test]
    fn invalid_field_is_reported_with_its_path() {
        for (json, field, message) in [
            (r#"{"spec":{"agent":"a","titel":"x"}}"#, "spec.titel", "not a field"),
            (r#"{"spec":{"policy":[{},{"verb":"x"}]}}"#, "spec.policy[1].verb", "not a field"),
            (r#"{"spec":{"maxTurns":-1}}"#, "spec.maxTurns", ""),
            (r#"{"spec":{"title":7}}"#, "spec.title", "string"),
            (r#"{"spec":{}}x"#, "", "trailing"),
            ("", "", "EOF"),
        ] {
            let status = Codec::Json
                .request(
                    &kind("construct.v1.CreateTaskRequest"),
                    Bytes::from_static(json.as_bytes()),
                )
                .expect_err(json);
            assert_eq!(status.code(), Code::InvalidArgument);
            let details = status.get_error_details();
            let violation = &details.bad_request().expect("it has violations").field_violations[0];
            assert_eq!(violation.field, field, "{json}: {status:?}");
            assert!(violation.description.contains(message), "{json}: {status:?}");
        }
    }

    #[test]
    fn decompression_bomb_is_refused() {
        let zeros = Bytes::from(vec![0; 64 * 1024 * 1024]);
        let bomb = Encoding::Gzip.compress(&zeros).expect("it is worth it");
        assert!(bomb.len() < MAX_REQUEST);
        assert_eq!(
            Encoding::Gzip.decompress(bomb).expect_err("it is too large").code(),
            Code::ResourceExhausted
        );
    }

    #[test]
    fn accepted_encoding_is_negotiated() {
        for (value, expected) in [
            ("gzip", Encoding::Gzip),
            ("br;q=1.0, gzip;q=0.8, *;q=0.1", Encoding::Gzip),
            ("gzip;q=0", Encoding::Identity),
            ("br", Encoding::Identity),
            ("", Encoding::Identity),
        ] {
            let name = HeaderName::from_static("accept-encoding");
            let headers = HeaderMap::from_iter([(name.clone(), value.parse().expect("a value"))]);
            assert_eq!(Encoding::accepted_by(&headers, &name), expected, "{value}");
        }
    }

    proptest! {
        #[test]
        fn compressed_bytes_round_trip_and_noise_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
            let bytes = Bytes::from(bytes);
            if let Some(compressed) = Encoding::Gzip.compress(&bytes) {
                prop_assert_eq!(Encoding::Gzip.decompress(compressed).expect("it was packed"), bytes.clone());
            }
            _ = Encoding::Gzip.decompress(bytes.clone());
            _ = Codec::Json.request(&kind("construct.v1.CreateMessageRequest"), bytes);
        }
    }
}
