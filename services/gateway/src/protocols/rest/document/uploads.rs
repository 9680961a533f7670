//! Uploads by tus, which are no methods of the contract, and so in no table.

use serde_json::{Map, Value, json};

use super::{known_problem, quota_headers};

/// What a body is said to be.
const BODY: &str = "application/offset+octet-stream";

/// Adds where uploads begin and go on.
pub(super) fn add(paths: &mut Map<String, Value>) {
    let size = || {
        parameter(
            "Upload-Length",
            "How many bytes the file has.",
            true,
            json!({"type": "integer", "minimum": 0}),
        )
    };
    let offset = || {
        let words = "How many bytes of the file are there already: where the body goes on.";
        parameter("Upload-Offset", words, true, json!({"type": "integer", "minimum": 0}))
    };
    let about = "What the file is called and is: `filename`, `filetype` and `sha256`, each with its value in base64.";
    let key = "At most 128 characters. A request that is sent again with its key is done once, and answered as at first.";
    let text = || json!({"type": "string"});
    let gone = known_problem("The file was refused: it is of no use to try again.");
    paths.insert(
        "/v1/files/uploads".to_owned(),
        json!({
            "options": operation("describeUploads", "Describe uploads", "What of tus 1.0.0 is spoken here.", &[], json!({
                "204": told("What there is.", &["Tus-Version", "Tus-Extension", "Tus-Max-Size"]),
            })),
            "post": with_body(operation(
                "beginUpload",
                "Begin upload",
                "Creates a file, whose content follows at `Location`; the first of it may stand in the body (creation-with-upload).",
                &[version(), size(), parameter("Upload-Metadata", about, false, text()), parameter("Idempotency-Key", key, false, text())],
                json!({
                    "201": told("Created", &["Location", "Upload-Offset", "Upload-Expires"]),
                    "413": known_problem("The file is larger than one may be."),
                }),
            )),
        }),
    );
    paths.insert(
        "/v1/files/uploads/{file}".to_owned(),
        json!({
            "parameters": [{"name": "file", "in": "path", "required": true, "schema": text(), "description": "The file's id."}],
            "options": operation("describeUpload", "Describe upload", "What of tus 1.0.0 is spoken here.", &[], json!({
                "204": told("What there is.", &["Tus-Version", "Tus-Extension", "Tus-Max-Size"]),
            })),
            "head": operation("getUpload", "Get upload", "How far an upload is.", &[version()], json!({
                "200": told("How far it is.", &["Upload-Offset", "Upload-Length", "Upload-Expires"]),
                "422": gone,
            })),
            "patch": with_body(operation(
                "continueUpload",
                "Continue upload",
                "Goes on with an upload. What comes before the connection ends is kept; a body is read for 12 s, and the answer says how far it came.",
                &[version(), offset()],
                json!({
                    "204": told("How far it is now.", &["Upload-Offset", "Upload-Expires"]),
                    "409": known_problem("The upload goes on elsewhere: at the `Upload-Offset` of this answer."),
                    "415": known_problem("The body is said to be something else."),
                    "422": gone,
                }),
            )),
            "delete": operation("endUpload", "End upload", "Removes what was uploaded.", &[version()], json!({"204": told("No Content", &[])})),
        }),
    );
}

/// An operation with what every one of these may be answered.
fn operation(
    id: &str,
    summary: &str,
    words: &str,
    parameters: &[Value],
    mut responses: Value,
) -> Value {
    if !parameters.is_empty() {
        responses["412"] = known_problem("The client speaks another version of tus.");
    }
    responses["429"] = json!({"$ref": "#/components/responses/TooMuch"});
    responses["4XX"] = known_problem("The request cannot be done as it is.");
    responses["default"] = known_problem("The request could not be done at the moment.");
    let mut operation = json!({"operationId": id, "tags": ["File"], "summary": summary, "description": words, "responses": responses});
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
        "The version that the client speaks.",
        true,
        json!({"type": "string", "const": "1.0.0"}),
    )
}

fn parameter(name: &str, words: &str, required: bool, schema: Value) -> Value {
    json!({"name": name, "in": "header", "required": required, "schema": schema, "description": words})
}

/// An answer that says everything in its headers.
fn told(words: &str, headers: &[&str]) -> Value {
    let text = |name: &str| (name.to_owned(), json!({"schema": {"type": "string"}}));
    let mut all: Map<String, Value> =
        headers.iter().copied().chain(["Tus-Resumable"]).map(text).collect();
    all.extend(quota_headers());
    json!({"description": words, "headers": all})
}
