//! Between what clients send and protobuf: JSON as proto3 maps it, and gzip.

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

/// Below this many bytes compression costs time and saves nothing.
const WORTH_COMPRESSING: usize = 1024;

/// How messages are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Codec {
    Json,
    Proto,
}

impl Codec {
    /// A request, as gRPC wants it.
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
                    Err(wrong) => {
                        let whole = serde_json::from_slice(&bytes).unwrap_or_default();
                        Err(wrong.named(kind, &whole))
                    }
                }
            }
        }
    }

    /// An answer, as the client wants it.
    ///
    /// # Errors
    /// `INTERNAL` when it isn't what the method says it is.
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

/// A message from JSON. Fields it doesn't have are refused: a misspelt one would be ignored in
/// silence.
///
/// # Errors
/// `INVALID_ARGUMENT`, with the field that is wrong.
pub(super) fn message(kind: &MessageDescriptor, json: &Value) -> Result<Bytes, Status> {
    read(kind, json).map_err(|wrong| wrong.named(kind, json))
}

/// What is wrong with JSON, as its reader says, and where it stood.
struct Wrong {
    path: String,
    words: String,
}

fn read<'de, D>(kind: &MessageDescriptor, source: D) -> Result<Bytes, Wrong>
where
    D: serde::Deserializer<'de>,
    D::Error: std::fmt::Display,
{
    let mut track = serde_path_to_error::Track::new();
    let source = serde_path_to_error::Deserializer::new(source, &mut track);
    let options = DeserializeOptions::new().deny_unknown_fields(true);
    match DynamicMessage::deserialize_with_options(kind.clone(), source, &options) {
        Ok(message) => Ok(message.encode_to_vec().into()),
        Err(error) => Err(Wrong { path: track.path().to_string(), words: error.to_string() }),
    }
}

impl Wrong {
    fn named(self, kind: &MessageDescriptor, json: &Value) -> Status {
        // The reader stands at the message that lacks a field when it finds that out: not at the
        // field.
        match unknown(kind, json) {
            Some(path) => invalid(&path, "is not a field"),
            None => invalid(&self.path, &self.words),
        }
    }
}

/// Where there is a field that the contract doesn't know.
fn unknown(kind: &MessageDescriptor, json: &Value) -> Option<String> {
    // JSON writes well-known types in ways of their own.
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
                let found = |(index, value)| Some((index, unknown(&inner, value)?));
                values
                    .iter()
                    .enumerate()
                    .find_map(found)
                    .map(|(index, path)| (format!("{name}[{index}]"), path))?
            }
            _ if field.is_map() => return None,
            value => (name.clone(), unknown(&inner, value)?),
        };
        Some(format!("{place}.{path}"))
    })
}

/// What is wrong with a field.
pub(super) fn invalid(field: &str, words: &str) -> Status {
    let field = if field == "." { "" } else { field };
    let message = if field.is_empty() {
        format!("the request: {words}")
    } else {
        format!("{field}: {words}")
    };
    let details = ErrorDetails::with_bad_request_violation(field, words);
    Status::with_error_details(Code::InvalidArgument, message, details)
}

/// How bytes are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Identity,
    Gzip,
}

impl Encoding {
    /// What a header, or a parameter, calls an encoding.
    ///
    /// # Errors
    /// `UNIMPLEMENTED` for every other one than `gzip` and `identity`.
    pub(super) fn named(name: &str) -> Result<Self, Status> {
        match name {
            "" | "identity" => Ok(Self::Identity),
            "gzip" => Ok(Self::Gzip),
            other => Err(Status::unimplemented(format!(
                "the encoding `{other}` is not known: use gzip or identity"
            ))),
        }
    }

    /// The encoding that a header names.
    ///
    /// # Errors
    /// `UNIMPLEMENTED` for every other one than `gzip` and `identity`.
    pub(super) fn of(headers: &HeaderMap, name: &HeaderName) -> Result<Self, Status> {
        match headers.get(name) {
            Some(value) => Self::named(value.to_str().unwrap_or("?").trim()),
            None => Ok(Self::Identity),
        }
    }

    /// The best encoding for what a client accepts.
    pub(super) fn accepted(headers: &HeaderMap, name: &HeaderName) -> Self {
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

    /// The bytes as they were before they were compressed.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for what isn't gzip, `RESOURCE_EXHAUSTED` for what gets too large: never
    /// is more unpacked than may be sent.
    pub(super) fn unpack(self, bytes: Bytes) -> Result<Bytes, Status> {
        match self {
            Self::Identity => Ok(bytes),
            Self::Gzip => {
                let mut plain = Vec::new();
                let mut source = MultiGzDecoder::new(&bytes[..]).take(MAX_REQUEST as u64 + 1);
                source.read_to_end(&mut plain).map_err(|error| {
                    Status::invalid_argument(format!("the message is no gzip: {error}"))
                })?;
                if plain.len() > MAX_REQUEST {
                    return Err(status::too_large(MAX_REQUEST));
                }
                Ok(plain.into())
            }
        }
    }

    /// Whether bytes are compressed.
    pub(super) fn packs(self, bytes: &Bytes) -> bool {
        self == Self::Gzip && bytes.len() >= WORTH_COMPRESSING
    }

    /// The bytes compressed, unless that isn't wanted or isn't worth it.
    pub(super) fn pack(self, bytes: &Bytes) -> Option<Bytes> {
        if !self.packs(bytes) {
            return None;
        }
        let mut packed = GzEncoder::new(Vec::with_capacity(bytes.len() / 2), Compression::fast());
        // Writing to memory doesn't fail; if it did, the bytes would go out as they are.
        packed.write_all(bytes).ok()?;
        packed.finish().ok().map(Bytes::from)
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
    fn a_field_that_is_wrong_is_named_with_its_place() {
        for (json, field, words) in [
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
            assert!(violation.description.contains(words), "{json}: {status:?}");
        }
    }

    #[test]
    fn a_bomb_is_refused_before_it_is_unpacked() {
        let zeros = Bytes::from(vec![0; 64 * 1024 * 1024]);
        let bomb = Encoding::Gzip.pack(&zeros).expect("it is worth it");
        assert!(bomb.len() < MAX_REQUEST);
        assert_eq!(
            Encoding::Gzip.unpack(bomb).expect_err("it is too large").code(),
            Code::ResourceExhausted
        );
    }

    #[test]
    fn what_a_client_accepts_is_understood() {
        for (value, expected) in [
            ("gzip", Encoding::Gzip),
            ("br;q=1.0, gzip;q=0.8, *;q=0.1", Encoding::Gzip),
            ("gzip;q=0", Encoding::Identity),
            ("br", Encoding::Identity),
            ("", Encoding::Identity),
        ] {
            let name = HeaderName::from_static("accept-encoding");
            let headers = HeaderMap::from_iter([(name.clone(), value.parse().expect("a value"))]);
            assert_eq!(Encoding::accepted(&headers, &name), expected, "{value}");
        }
    }

    proptest! {
        #[test]
        fn what_is_packed_is_unpacked_and_noise_is_survived(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
            let bytes = Bytes::from(bytes);
            if let Some(packed) = Encoding::Gzip.pack(&bytes) {
                prop_assert_eq!(Encoding::Gzip.unpack(packed).expect("it was packed"), bytes.clone());
            }
            _ = Encoding::Gzip.unpack(bytes.clone());
            _ = Codec::Json.request(&kind("construct.v1.CreateMessageRequest"), bytes);
        }
    }
}
