//! Converts a REST request to a message: its fields come from the path, the query, headers and the
//! body.

use bytes::Bytes;
use percent_encoding::percent_decode_str;
use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor};
use serde_json::{Map, Value, json};
use tonic::{
    Status,
    codegen::http::{HeaderMap, header, request::Parts},
};

use super::{
    conditional,
    routes::{Content, Route},
};
use crate::protocols::{
    codec::{self, Encoding, invalid},
    content_type,
};

/// Messages whose fields are query parameters as if they were the request's own.
const FLATTENED: [&str; 2] = ["page", "filter"];

/// Why a request cannot be converted.
pub(super) enum RequestError {
    /// The body is not JSON.
    UnsupportedMedia,
    Status(Status),
}

impl From<Status> for RequestError {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// The request as a protobuf message.
pub(super) fn message(
    route: &Route,
    kind: &MessageDescriptor,
    head: &Parts,
    path: impl Iterator<Item = (&'static str, String)>,
    body: Bytes,
) -> Result<Bytes, RequestError> {
    let mut request = match route.body {
        Content::None => Map::new(),
        Content::All(_) => match json_body(&head.headers, body)? {
            None => Map::new(),
            Some(Value::Object(fields)) => fields,
            Some(_) => return Err(invalid("", "must be a JSON object").into()),
        },
        Content::Field(name, _) => {
            let body =
                json_body(&head.headers, body)?.ok_or_else(|| invalid("", "must have a body"))?;
            Map::from_iter([(name.to_owned(), body)])
        }
    };
    for (field, text) in path {
        let text = percent_decode_str(&text)
            .decode_utf8()
            .map_err(|_| invalid(field, "must be UTF-8"))?
            .into_owned();
        set_field(&mut request, kind, field, text.into())?;
    }
    for (name, text) in form_urlencoded::parse(head.uri.query().unwrap_or_default().as_bytes()) {
        set_parameter(&mut request, kind, route, &name, &text)?;
    }
    if let Some(key) = header_field(&head.headers, kind, "idempotency-key", "idempotency_key")? {
        set_field(&mut request, kind, "idempotency_key", key.into())?;
    }
    if let Some(version) = conditional::expected_version(&head.headers, kind)? {
        set_field(&mut request, kind, conditional::EXPECTED_FIELD, version.to_string().into())?;
    }
    // A reconnecting browser repeats its parameters, but this header has its current position.
    if let Some(cursor) = header_field(&head.headers, kind, "last-event-id", "cursor")? {
        request.insert("cursor".to_owned(), cursor.into());
    }
    Ok(codec::message(kind, &Value::Object(request))?)
}

/// The value of a header that is a field of the request.
fn header_field<'a>(
    headers: &'a HeaderMap,
    kind: &MessageDescriptor,
    header: &'static str,
    field: &str,
) -> Result<Option<&'a str>, Status> {
    match headers.get(header).filter(|value| !value.is_empty()) {
        Some(value) if kind.get_field_by_name(field).is_some() => {
            value.to_str().map(Some).map_err(|_| invalid(header, "must be text"))
        }
        _ => Ok(None),
    }
}

/// The body, if there is one.
fn json_body(headers: &HeaderMap, body: Bytes) -> Result<Option<Value>, RequestError> {
    let bytes = Encoding::from_header(headers, &header::CONTENT_ENCODING)?.decompress(body)?;
    if bytes.is_empty() {
        return Ok(None);
    }
    if content_type(headers) != "application/json" {
        return Err(RequestError::UnsupportedMedia);
    }
    Ok(Some(serde_json::from_slice(&bytes).map_err(|error| invalid("", &error.to_string()))?))
}

/// Sets a field by its path, e.g. `spec.task`. A field that is set already is refused: one of the
/// two values would be ignored.
fn set_field(
    into: &mut Map<String, Value>,
    kind: &MessageDescriptor,
    path: &str,
    value: Value,
) -> Result<(), Status> {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let field = kind.get_field_by_name(name).ok_or_else(|| invalid(path, "is not a field"))?;
    let Some(rest) = rest else {
        if into.contains_key(name) || into.contains_key(field.json_name()) {
            return Err(invalid(path, "is set in two places of the request"));
        }
        into.insert(name.to_owned(), value);
        return Ok(());
    };
    match (into.entry(name).or_insert_with(|| json!({})), field.kind()) {
        (Value::Object(inner), Kind::Message(kind)) => set_field(inner, &kind, rest, value),
        _ => Err(invalid(name, "must be a JSON object")),
    }
}

/// Sets a field from a query parameter.
fn set_parameter(
    request: &mut Map<String, Value>,
    kind: &MessageDescriptor,
    route: &Route,
    name: &str,
    text: &str,
) -> Result<(), Status> {
    // `google.api.http` names a message's field `filter.agent`.
    let (message, own) =
        name.split_once('.').map_or((None, name), |(message, own)| (Some(message), own));
    let mut parameters = parameters(kind, route);
    let (parent, field) = parameters
        .find(|(parent, field)| {
            (message.is_none() || message == *parent)
                && (field.name() == own || field.json_name() == own)
        })
        .ok_or_else(|| invalid(name, "is not a parameter of this resource"))?;
    let into = match parent {
        None => request,
        Some(parent) => match request.entry(parent).or_insert_with(|| json!({})) {
            Value::Object(inner) => inner,
            _ => return Err(invalid(parent, "must be a JSON object")),
        },
    };
    let value = match field.kind() {
        Kind::Bool => match text {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            _ => return Err(invalid(name, "must be true or false")),
        },
        // JSON accepts numbers, times and enum names as strings as well.
        _ => text.into(),
    };
    if !field.is_list() {
        if into.insert(field.name().to_owned(), value).is_some() {
            return Err(invalid(name, "is set in two places of the request"));
        }
    } else if let Value::Array(values) = into.entry(field.name()).or_insert_with(|| json!([])) {
        values.push(value);
    }
    Ok(())
}

/// The query parameters of a route: the fields that are nowhere else, with the message that
/// contains each, unless it is the request itself.
pub(super) fn parameters(
    kind: &MessageDescriptor,
    route: &Route,
) -> impl Iterator<Item = (Option<&'static str>, FieldDescriptor)> {
    let elsewhere = |field: &FieldDescriptor| match route.body {
        Content::All(_) => true,
        Content::Field(name, _) => field.name() == name || field.name() == "idempotency_key",
        Content::None => {
            field.name() == "idempotency_key" || route.fields().any(|path| path == field.name())
        }
    };
    // A field that is empty in one of two routes of a method is the resource itself, so it is not a
    // query parameter.
    let resource = |field: &FieldDescriptor| route.path == "/v1/events" && field.name() == "task";
    let mut fields = Vec::new();
    for field in kind.fields().filter(|field| !elsewhere(field) && !resource(field)) {
        let flattened = FLATTENED.into_iter().find(|name| *name == field.name());
        match (flattened, field.kind()) {
            (Some(parent), Kind::Message(inner)) => {
                fields.extend(inner.fields().map(|field| (Some(parent), field)))
            }
            _ => fields.push((None, field)),
        }
    }
    fields.into_iter()
}
