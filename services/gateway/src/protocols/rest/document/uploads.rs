//! Uploads by tus, which are not methods of the contract, and so in no table.

use serde_json::{Map, Value, json};

use super::{problem_response, quota_headers};

/// The content type of a body.
const BODY: &str = "application/offset+octet-stream";

/// Adds the paths of uploads.
pub(super) fn add(paths: &mut Map<String, Value>) {
    let size = || {
        parameter(
            "Upload-Length",
            "The size of the file, in bytes.",
            true,
            json!({"type": "integer", "minimum": 0}),
        )
    };
    let offset = || {
        let description = "The number of bytes that the server has: where the body continues.";
        parameter("Upload-Offset", description, true, json!({"type": "integer", "minimum": 0}))
    };
    let metadata =
        "Metadata of the file: `filename`, `filetype` and `sha256`, each with its value in base64.";
    let idempotency_key = "At most 128 characters. A request repeated with the same key is executed once and gets the first response again.";
    let text = || json!({"type": "string"});
    let refused = problem_response("The file was refused; a retry will fail as well.");
    paths.insert(
        "/v1/files/uploads".to_owned(),
        json!({
            "options": operation("describeUploads", "Describe uploads", "The supported parts of tus 1.0.0.", &[], json!({
                "204": header_response("The supported extensions.", &["Tus-Version", "Tus-Extension", "Tus-Max-Size"]),
            })),
            "post": with_body(operation(
                "beginUpload",
                "Begin upload",
                "Creates a file, whose content is uploaded to `Location`; the body may have its beginning (creation-with-upload).",
                &[version(), size(), parameter("Upload-Metadata", metadata, false, text()), parameter("Idempotency-Key", idempotency_key, false, text())],
                json!({
                    "201": header_response("Created", &["Location", "Upload-Offset", "Upload-Expires"]),
                    "413": problem_response("The file is too large."),
                }),
            )),
        }),
    );
    paths.insert(
        "/v1/files/uploads/{file}".to_owned(),
        json!({
            "parameters": [{"name": "file", "in": "path", "required": true, "schema": text(), "description": "The file's id."}],
            "options": operation("describeUpload", "Describe upload", "The supported parts of tus 1.0.0.", &[], json!({
                "204": header_response("The supported extensions.", &["Tus-Version", "Tus-Extension", "Tus-Max-Size"]),
            })),
            "head": operation("getUpload", "Get upload", "The progress of an upload.", &[version()], json!({
                "200": header_response("The current progress.", &["Upload-Offset", "Upload-Length", "Upload-Expires"]),
                "422": refused,
            })),
            "patch": with_body(operation(
                "continueUpload",
                "Continue upload",
                "Continues an upload. Bytes received before the connection ends are stored; a body is read for 12 s, and the response has the new offset.",
                &[version(), offset()],
                json!({
                    "204": header_response("The new progress.", &["Upload-Offset", "Upload-Expires"]),
                    "409": problem_response("Wrong offset: continue at the `Upload-Offset` of this response."),
                    "415": problem_response("The body has another content type."),
                    "422": refused,
                }),
            )),
            "delete": operation("endUpload", "End upload", "Deletes the upload.", &[version()], json!({"204": header_response("No Content", &[])})),
        }),
    );
}

/// An operation with the responses that all of these share.
fn operation(
    id: &str,
    summary: &str,
    description: &str,
    parameters: &[Value],
    mut responses: Value,
) -> Value {
    if !parameters.is_empty() {
        responses["412"] = problem_response("The client uses another version of tus.");
    }
    responses["429"] = json!({"$ref": "#/components/responses/TooMuch"});
    responses["4XX"] =
        problem_response("The request is invalid or not allowed in the current state.");
    responses["default"] = problem_response("The request failed; a retry may succeed.");
    let mut operation = json!({"operationId": id, "tags": ["File"], "summary": summary, "description": description, "responses": responses});
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    operation
}

fn with_body(mut operation: Value) -> Value {
    let schema = json!({"type": "string", "format": "binary"});
    operation["requestBody"] = json!({"required": operation["operationId"] == "continueUpload", "content": {BODY: {"schema": schema}}});
    operation
}

fn version() -> Value {
    parameter(
        "Tus-Resumable",
        "The client's version of tus.",
        true,
        json!({"type": "string", "const": "1.0.0"}),
    )
}

fn parameter(name: &str, description: &str, required: bool, schema: Value) -> Value {
    json!({"name": name, "in": "header", "required": required, "schema": schema, "description": description})
}

/// A response with headers only.
fn header_response(description: &str, headers: &[&str]) -> Value {
    let text = |name: &str| (name.to_owned(), json!({"schema": {"type": "string"}}));
    let mut all: Map<String, Value> =
        headers.iter().copied().chain(["Tus-Resumable"]).map(text).collect();
    all.extend(quota_headers());
    json!({"description": description, "headers": all})
}
