//! The OpenAPI 3.1 document, built from the contract with its options and comments.

mod comments;
mod schemas;
mod uploads;

use std::collections::HashSet;

use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor};
use serde_json::{Map, Value, json};
use tonic::codegen::http::Method as Verb;

use self::{comments::Comments, schemas::Schemas};
use super::{
    conditional, request,
    routes::{Content, Route},
    sse, success,
};

const DESCRIPTION: &str = "Construct turns a language model into a dependable worker. The same methods are served as gRPC, gRPC-Web \
                     and Connect on this port; docs/api.md shows each.\n\nBodies are proto3's JSON: fields are in lower camel case, \
                     64-bit integers are strings, bytes are base64, times are RFC 3339. Default values are omitted. Fields \
                     that are not known are refused.";

const RATE_LIMIT_DESCRIPTION: &str = "The remaining amount of each quota of the caller (`r`), and the seconds until it is full again (`t`), e.g. \
                    `\"requests_per_minute\";r=597;t=1`. Absent where nothing is limited.";
const RATE_LIMIT_POLICY_DESCRIPTION: &str = "The quotas with their limits (`q`) and windows in seconds (`w`), e.g. `\"requests_per_minute\";q=600;w=60`.";

/// Builds the document for some routes with their methods.
pub(super) fn build<'a>(
    routes: impl Iterator<Item = (&'static Route, &'a MethodDescriptor)> + Clone,
) -> Value {
    let comments = Comments::read();
    let bound = routes.clone().flat_map(|(route, method)| {
        let fields = route.fields().filter(|path| path.contains('.'));
        fields
            .filter_map(|path| Some(field_at(&method.input(), path)?.full_name().to_owned()))
            .collect::<Vec<_>>()
    });
    let mut schemas = Schemas::new(&comments, bound.collect());
    let (mut paths, mut tags, mut ids) = (Map::new(), Vec::new(), HashSet::new());
    for (route, method) in routes {
        let service = method.parent_service();
        let tag = service.name().trim_end_matches("Service").to_owned();
        if !tags.iter().any(|known: &Value| known["name"] == tag) {
            tags.push(json!({"name": tag, "description": comments.for_path(service.parent_file().name(), service.path())}));
        }
        let mut operation = operation(route, method, &comments, &mut schemas);
        operation["tags"] = json!([tag]);
        let mut id = lower_camel(method.name());
        if !ids.insert(id.clone()) {
            // The same method on another path.
            id.extend(route.fields().map(|field| format!("Of{}", upper_camel(field))));
            ids.insert(id.clone());
        }
        operation["operationId"] = id.into();
        let path = paths.entry(display_path(route.path)).or_insert_with(|| json!({}));
        path[route.verb.as_str().to_lowercase()] = operation;
    }
    uploads::add(&mut paths);
    let mut all = schemas.finish();
    all.insert("Problem".to_owned(), problem());
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Construct",
            "version": env!("CARGO_PKG_VERSION"),
            "description": DESCRIPTION,
            "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"key": []}],
        "tags": tags,
        "paths": paths,
        "components": {
            "schemas": all,
            "headers": {
                "RateLimit": {"description": RATE_LIMIT_DESCRIPTION, "schema": {"type": "string"}},
                "RateLimit-Policy": {"description": RATE_LIMIT_POLICY_DESCRIPTION, "schema": {"type": "string"}},
            },
            "responses": {"TooMuch": too_many_requests()},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key. Local mode needs none."},
            },
        },
    })
}

fn operation(
    route: &Route,
    method: &MethodDescriptor,
    comments: &Comments,
    schemas: &mut Schemas<'_>,
) -> Value {
    let input = method.input();
    let description = comments.for_path(method.parent_file().name(), method.path());
    let summary = sentence_case(method.name());
    let mut operation = json!({"summary": summary});
    if !description.is_empty() {
        operation["description"] = description.into();
    }
    let mut parameters: Vec<Value> =
        route.fields().map(|path| path_parameter(&input, path, schemas)).collect();
    for (_, field) in request::parameters(&input, route) {
        let mut parameter =
            json!({"name": field.json_name(), "in": "query", "schema": schemas.field(&field)});
        describe(&mut parameter, &schemas.description(&field));
        parameters.push(parameter);
    }
    if let Some(key) = input.get_field_by_name("idempotency_key") {
        let description = "A request repeated with the same key is executed once and gets the first response again.";
        let schema = schemas.field(&key);
        parameters.push(json!({"name": "Idempotency-Key", "in": "header", "schema": schema, "description": description}));
    }
    let header = |name: &str, description: &str| json!({"name": name, "in": "header", "schema": {"type": "string"}, "description": description});
    if conditional::may_expect(&input) {
        let description = "The entity tag of a version: the request fails (412) unless the document has this version.";
        parameters.push(header("If-Match", description));
        if route.verb == Verb::PUT {
            parameters.push(header(
                "If-None-Match",
                "`*`: the request fails (412) if the document exists.",
            ));
        }
    }
    let tagged = conditional::has_version(method) && route.verb == Verb::GET;
    if tagged {
        parameters
            .push(header("If-None-Match", "Entity tags of versions that the client has (304)."));
    }
    let streams = method.is_server_streaming();
    let events = streams && sse::is_for(&method.output());
    if events {
        let description = "The id of the last event received; overrides `cursor`.";
        let schema = json!({"type": "string"});
        parameters.push(json!({"name": "Last-Event-ID", "in": "header", "schema": schema, "description": description}));
    }
    if method.name() == "DownloadFile" {
        // HTTP uses `Range` for this.
        parameters.retain(|parameter| parameter["in"] != "query");
    }
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    let (schema, example, required) = match route.body {
        Content::None => (Value::Null, "", false),
        Content::All(example) => (body_schema(&input, route, schemas), example, example != "{}"),
        Content::Field(name, example) => (
            input.get_field_by_name(name).map_or(Value::Null, |field| schemas.field(&field)),
            example,
            true,
        ),
    };
    if !schema.is_null() {
        // The examples are compiled in; a test parses each.
        let example: Value = serde_json::from_str(example).unwrap_or_default();
        let content = json!({"application/json": {"schema": schema, "example": example}});
        operation["requestBody"] = json!({"required": required, "content": content});
    }
    let status = success(route, method);
    let mut answer = json!({"description": status.canonical_reason().unwrap_or_default()});
    if events {
        let description = "Server-sent events: the data of each is such a message, its id the cursor to resume after it.";
        let schema = schemas.message(&method.output());
        answer = json!({"description": description, "content": {"text/event-stream": {"schema": schema}}});
    } else if method.name() == "DownloadFile" {
        let description = "The content of the file. Supports ranges, and conditional requests by `ETag` (the SHA-256).";
        let schema = json!({"type": "string", "format": "binary"});
        answer = json!({"description": description, "content": {"application/octet-stream": {"schema": schema}}});
    } else if streams {
        let description = "Lines, each with such a message. An incomplete last line means that the response was cut off.";
        let schema = schemas.message(&method.output());
        answer = json!({"description": description, "content": {"application/x-ndjson": {"schema": schema}}});
    } else if status.as_u16() != 204 {
        answer["content"] =
            json!({"application/json": {"schema": schemas.message(&method.output())}});
    }
    answer["headers"] = quota_headers().into();
    if conditional::has_version(method) {
        let description = "The entity tag of the version.";
        answer["headers"]["ETag"] =
            json!({"description": description, "schema": {"type": "string"}});
    }
    operation["responses"] = json!({
        status.as_str(): answer,
        "429": {"$ref": "#/components/responses/TooMuch"},
        "4XX": problem_response("The request is invalid or not allowed in the current state."),
        "default": problem_response("The request failed; a retry may succeed."),
    });
    if tagged {
        operation["responses"]["304"] = json!({"description": "The client has this version."});
    }
    if conditional::may_expect(&input) {
        operation["responses"]["412"] = problem_response("The document has another version.");
    }
    operation
}

/// The response for a known error.
fn problem_response(description: &str) -> Value {
    let problem = json!({"$ref": "#/components/schemas/Problem"});
    json!({"description": description, "content": {"application/problem+json": {"schema": problem}}})
}

/// The response when a quota is exhausted or the gateway is too busy.
fn too_many_requests() -> Value {
    let mut response = problem_response(
        "A quota is exhausted (`quotas` says which), or too much is in use at the moment.",
    );
    let description = "Seconds after which to retry.";
    response["headers"] = quota_headers().into();
    response["headers"]["Retry-After"] =
        json!({"description": description, "schema": {"type": "integer"}});
    response
}

/// The headers of every response to a caller with quotas.
fn quota_headers() -> Map<String, Value> {
    let refer =
        |name: &str| (name.to_owned(), json!({"$ref": format!("#/components/headers/{name}")}));
    ["RateLimit", "RateLimit-Policy"].map(refer).into_iter().collect()
}

/// A path for readers: all verbs of a resource use the same parameter names, wherever the field is
/// in the request.
fn display_path(path: &str) -> String {
    let part = |part: &str| match part.strip_prefix('{') {
        Some(field) => format!("{{{}", field.rsplit('.').next().unwrap_or_default()),
        None => part.to_owned(),
    };
    path.split('/').map(part).collect::<Vec<_>>().join("/")
}

fn path_parameter(input: &MessageDescriptor, path: &str, schemas: &mut Schemas<'_>) -> Value {
    let name = path.rsplit('.').next().unwrap_or_default();
    let mut parameter =
        json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}});
    if let Some(field) = field_at(input, path) {
        parameter["schema"] = schemas.field(&field);
        describe(&mut parameter, &schemas.description(&field));
    }
    parameter
}

/// A field by its path, e.g. `spec.task`.
fn field_at(kind: &MessageDescriptor, path: &str) -> Option<FieldDescriptor> {
    match path.split_once('.') {
        None => kind.get_field_by_name(path),
        Some((name, rest)) => match kind.get_field_by_name(name)?.kind() {
            Kind::Message(inner) => field_at(&inner, rest),
            _ => None,
        },
    }
}

/// The fields of a request that are neither in its path nor in a header.
fn body_schema(input: &MessageDescriptor, route: &Route, schemas: &mut Schemas<'_>) -> Value {
    let elsewhere = |field: &FieldDescriptor| {
        field.name() == "idempotency_key" || route.fields().any(|path| path == field.name())
    };
    let mut properties = Map::new();
    for field in input.fields().filter(|field| !elsewhere(field)) {
        properties.insert(field.json_name().to_owned(), schemas.described(&field));
    }
    let mut schema = json!({"type": "object", "properties": properties});
    schemas::require(&mut schema, input.fields().filter(|field| !elsewhere(field)));
    schema
}

fn describe(value: &mut Value, description: &str) {
    if !description.is_empty() {
        value["description"] = description.into();
    }
}

fn problem() -> Value {
    let text = json!({"type": "string"});
    let list = |fields: &[&str]| {
        let properties: Map<_, _> =
            fields.iter().map(|field| ((*field).to_owned(), text.clone())).collect();
        json!({"type": "array", "items": {"type": "object", "properties": properties}})
    };
    json!({
        "description": "A problem, as RFC 9457 has it.",
        "type": "object",
        "required": ["title", "status", "code"],
        "properties": {
            "title": text,
            "status": {"type": "integer"},
            "detail": text,
            "code": {"type": "string", "description": "gRPC's code, e.g. `NOT_FOUND`."},
            "violations": list(&["field", "description"]),
            "preconditions": list(&["type", "subject", "description"]),
            "quotas": list(&["quota", "subject", "limit", "description"]),
            "resource": {"type": "object", "properties": {"type": text, "name": text}},
        },
    })
}

/// `CreateModelProvider` as `Create model provider`.
fn sentence_case(name: &str) -> String {
    let mut sentence = String::new();
    for (index, letter) in name.chars().enumerate() {
        if index > 0 && letter.is_ascii_uppercase() {
            sentence.push(' ');
            sentence.push(letter.to_ascii_lowercase());
        } else {
            sentence.push(letter);
        }
    }
    sentence
}

fn lower_camel(name: &str) -> String {
    let (first, rest) = name.split_at(1);
    first.to_lowercase() + rest
}

fn upper_camel(name: &str) -> String {
    let (first, rest) = name.split_at(1);
    first.to_uppercase() + rest
}

#[cfg(test)]
mod tests;
