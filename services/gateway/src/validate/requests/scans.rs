//! Scans of repositories.

use std::{collections::BTreeMap, sync::LazyLock};

use construct_domain::{CandidateId, OrganizationId, ScanId};
use construct_proto::v1::{
    CancelScanRequest, CandidateContent, CandidateState, CompareScansRequest,
    CreateScanConnectionRequest, CreateScanRequest, CreateToolsRequest, ListCandidatesRequest,
    ListRepositoriesRequest, ListScanConnectionsRequest, ListScansRequest, ReviewCandidateRequest,
    ScanConnectionSpec, ScanHost, ScanLimits, ScanSpec, WatchScanRequest,
    scan_connection_spec::Credential, scan_spec::Source,
};
use construct_store::Cursor;
use construct_wire::scan::CANDIDATE_SCHEMA;
use jsonschema::Validator;
use serde_json::Value;
use tonic::{Status, codegen::http::Uri};

use super::{
    entities::{API_KEY_BYTES, ORDERS, URL_BYTES},
    money::MAX_LIMIT,
    tasks::REASON_CHARS,
};
use crate::{
    page::{Column, Page},
    validate::Violations,
};

const REFERENCE_CHARS: usize = 255;
const LOCATION_CHARS: usize = 300;
const PATH_BYTES: usize = 4096;
const UPLOAD_BYTES: usize = 3 * 1024 * 1024;
const UPLOAD_NAME_CHARS: usize = 200;
const PRIVATE_KEY_BYTES: usize = 16 * 1024;
const MAX_TURNS: u32 = 200;
const TIMEOUT_SECONDS: std::ops::RangeInclusive<i64> = 60..=6 * 3600;
const CANDIDATES: usize = 200;
const CONTENT_BYTES: usize = 64 * 1024;
/// Mistakes that are told of one part of a candidate.
const TOLD: usize = 16;
/// What can be edited of a candidate. Where it stands, and the proof, stays what was checked.
const EDITABLE: [&str; 11] = [
    "name",
    "description",
    "category",
    "score",
    "score_reasons",
    "confidence",
    "inputs",
    "outputs",
    "credentials",
    "side_effects",
    "dry_run",
];
/// What each part of a candidate has to be.
static PARTS: LazyLock<BTreeMap<&str, Validator>> = LazyLock::new(|| {
    let schema: Value =
        serde_json::from_str(CANDIDATE_SCHEMA).expect("the schema is part of this program");
    let part = |name| {
        let part = &schema["properties"][name];
        (name, jsonschema::validator_for(part).expect("the schema is part of this program"))
    };
    EDITABLE.into_iter().map(part).collect()
});

pub(crate) fn create_scan_connection(request: &CreateScanConnectionRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    let default = ScanConnectionSpec::default();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.as_ref().unwrap_or(&default);
    violations.name("spec.name", &spec.name);
    let known = matches!(spec.host(), ScanHost::Github | ScanHost::Gitlab);
    violations.require(known, "spec.host", || "is required: `GITHUB` or `GITLAB`".into());
    violations.bytes("spec.base_url", &spec.base_url, URL_BYTES);
    if !spec.base_url.is_empty() {
        let uri: Result<Uri, _> = spec.base_url.parse();
        let plain = uri.is_ok_and(|uri| {
            uri.host().is_some()
                && uri.query().is_none()
                && matches!(uri.scheme_str(), Some("http" | "https"))
        });
        violations.require(plain && !spec.base_url.contains('@'), "spec.base_url", || {
            "must be an address like `https://github.example.com/api/v3`".into()
        });
    }
    match &spec.credential {
        None => violations
            .add("spec.token", "is required, or `app`; a public repository needs no connection"),
        // Nothing is said of the value, not even its length.
        Some(Credential::Token(token)) => {
            let fits = (1..=API_KEY_BYTES).contains(&token.len())
                && token.bytes().all(|byte| byte.is_ascii_graphic());
            violations.require(fits, "spec.token", || {
                "must have 1 to 4,096 visible ASCII characters".into()
            });
        }
        Some(Credential::App(app)) => {
            violations.require(spec.host() == ScanHost::Github, "spec.app", || {
                "is only for GitHub".into()
            });
            let id = |text: &str| {
                (1..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
            };
            violations.require(id(&app.app_id), "spec.app.app_id", || "is required".into());
            let digits = !app.installation_id.is_empty()
                && app.installation_id.len() <= 20
                && app.installation_id.bytes().all(|byte| byte.is_ascii_digit());
            violations.require(digits, "spec.app.installation_id", || "must be digits".into());
            let pem = app.private_key.len() <= PRIVATE_KEY_BYTES
                && app.private_key.contains("PRIVATE KEY");
            violations.require(pem, "spec.app.private_key", || {
                "must be a private key as PEM, at most 16 KiB".into()
            });
        }
    }
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

pub(crate) fn list_scan_connections(
    organization: OrganizationId,
    request: &ListScanConnectionsRequest,
) -> Result<Page<Cursor>, Status> {
    let mut violations = Violations::new();
    let page = Page::read(
        request.page.as_ref(),
        "ListScanConnections",
        organization,
        &(),
        &ORDERS,
        &mut violations,
    );
    violations.finish().map(|()| page)
}

pub(crate) fn list_repositories(request: &ListRepositoriesRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.reference("connection", &request.connection, "a connection");
    violations.chars("owner", &request.owner, 100);
    let plain =
        request.owner.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte));
    violations.require(plain, "owner", || "must be the name of an organization or a user".into());
    violations.range("page", request.page, 0..=10_000);
    violations.finish()
}

pub(crate) fn create_scan(request: &CreateScanRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    let default = ScanSpec::default();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.as_ref().unwrap_or(&default);
    match &spec.source {
        None => {
            violations.add("spec.github", "is required, or one of `gitlab`, `upload` and `folder`")
        }
        Some(Source::Github(location)) => {
            location_of(
                &mut violations,
                "spec.github",
                location,
                |parts| parts == 2,
                "`owner/name`",
            );
        }
        Some(Source::Gitlab(location)) => {
            location_of(
                &mut violations,
                "spec.gitlab",
                location,
                |parts| (2..=20).contains(&parts),
                "`group/project`",
            );
        }
        Some(Source::Upload(upload)) => {
            let fits = (1..=UPLOAD_BYTES).contains(&upload.archive.len());
            violations.require(fits, "spec.upload.archive", || "must have 1 byte to 3 MiB".into());
            violations.chars("spec.upload.name", &upload.name, UPLOAD_NAME_CHARS);
            violations.one_line("spec.upload.name", &upload.name);
            violations
                .require(!upload.name.is_empty(), "spec.upload.name", || "is required".into());
        }
        Some(Source::Folder(path)) => {
            violations.bytes("spec.folder", path, PATH_BYTES);
            let plain = path.starts_with('/') && path.split('/').all(|part| part != "..");
            violations
                .require(plain, "spec.folder", || "must be an absolute path without `..`".into());
        }
    }
    if !spec.connection.is_empty() {
        violations.reference("spec.connection", &spec.connection, "a connection");
        let remote = matches!(spec.source, Some(Source::Github(_) | Source::Gitlab(_)) | None);
        violations.require(remote, "spec.connection", || "is only for GitHub and GitLab".into());
    }
    violations.chars("spec.reference", &spec.reference, REFERENCE_CHARS);
    violations.one_line("spec.reference", &spec.reference);
    if !spec.model.is_empty() {
        violations.reference("spec.model", &spec.model, "a model");
    }
    violations.range("spec.budget_pico_usd", spec.budget_pico_usd, 0..=MAX_LIMIT);
    let limits: ScanLimits = spec.limits.unwrap_or_default();
    violations.range("spec.limits.max_bytes", limits.max_bytes, 0..=i64::MAX);
    violations.range("spec.limits.max_files", limits.max_files, 0..=i64::MAX);
    violations.range("spec.limits.max_turns", limits.max_turns, 0..=MAX_TURNS);
    if let Some(timeout) = limits.timeout {
        violations.range("spec.limits.timeout", timeout.seconds, TIMEOUT_SECONDS);
    }
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

/// The address of a repository, or its name on the host.
fn location_of(
    violations: &mut Violations,
    field: &str,
    location: &str,
    parts: impl Fn(usize) -> bool,
    form: &str,
) {
    violations.chars(field, location, LOCATION_CHARS);
    let fits = path_of(location).is_some_and(|(_, path)| {
        let part = |part: &str| {
            !part.is_empty()
                && part != "."
                && part != ".."
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        parts(path.split('/').count()) && path.split('/').all(part)
    });
    violations
        .require(fits, field, || format!("must be {form}, or the repository's `https://` address"));
}

/// The host of a location, where it says one, and the repository's path there.
pub(crate) fn path_of(location: &str) -> Option<(Option<String>, String)> {
    let bare = |path: &str| {
        path.trim_matches('/').strip_suffix(".git").unwrap_or(path.trim_matches('/')).to_owned()
    };
    if !location.contains("://") {
        return Some((None, bare(location)));
    }
    let uri: Uri = location.parse().ok()?;
    let host = uri
        .host()
        .filter(|_| matches!(uri.scheme_str(), Some("https" | "http")) && uri.query().is_none())?;
    let authority = uri.authority().filter(|authority| !authority.as_str().contains('@'))?;
    let host = if authority.port().is_some() { authority.as_str() } else { host };
    Some((Some(host.to_ascii_lowercase()), bare(uri.path())))
}

/// A request that only names a scan.
pub(crate) fn scan(scan: &str, idempotency_key: &str) -> Result<ScanId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("scan", scan);
    violations.idempotency_key(idempotency_key);
    checked(violations, id)
}

pub(crate) fn cancel_scan(request: &CancelScanRequest) -> Result<ScanId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("scan", &request.scan);
    violations.chars("reason", &request.reason, REASON_CHARS);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, id)
}

pub(crate) fn list_scans(
    organization: OrganizationId,
    request: &ListScansRequest,
) -> Result<Page<Cursor>, Status> {
    let mut violations = Violations::new();
    let filter = request.filter.clone().unwrap_or_default();
    violations.bytes("filter.repository", &filter.repository, PATH_BYTES + 16);
    let orders = [Column::CreatedAt, Column::UpdatedAt];
    let page = Page::read(
        request.page.as_ref(),
        "ListScans",
        organization,
        &filter,
        &orders,
        &mut violations,
    );
    violations.finish().map(|()| page)
}

pub(crate) fn watch_scan(request: &WatchScanRequest) -> Result<(ScanId, i64), Status> {
    let mut violations = Violations::new();
    let id = violations.id("scan", &request.scan);
    let after = if request.cursor.is_empty() { Some(0) } else { request.cursor.parse().ok() };
    let after: Option<i64> = after.filter(|after| *after >= 0);
    violations.require(after.is_some(), "cursor", || "is the cursor of no event".into());
    checked(violations, id.zip(after))
}

pub(crate) fn list_candidates(request: &ListCandidatesRequest) -> Result<ScanId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("scan", &request.scan);
    violations.require(CandidateState::try_from(request.state).is_ok(), "state", || {
        "is not a known state".into()
    });
    checked(violations, id)
}

pub(crate) fn review_candidate(request: &ReviewCandidateRequest) -> Result<CandidateId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("candidate", &request.candidate);
    let known = CandidateState::try_from(request.state)
        .is_ok_and(|state| state != CandidateState::HandedOver);
    violations.require(known, "state", || {
        "must be `PROPOSED`, `ACCEPTED` or `REJECTED`, or not set".into()
    });
    let edits = !request.fields.is_empty();
    violations.require(edits || request.state() != CandidateState::Unspecified, "state", || {
        "is required, or `fields` with a `content`".into()
    });
    violations.require(edits == request.content.is_some(), "fields", || {
        "must be given with `content`, and only then: which parts of it replace what is there"
            .into()
    });
    violations.require(request.fields.len() <= EDITABLE.len(), "fields", || {
        format!("must be at most {}", EDITABLE.len())
    });
    for (index, field) in request.fields.iter().enumerate().take(EDITABLE.len()) {
        violations.require(EDITABLE.contains(&field.as_str()), &format!("fields[{index}]"), || {
            format!("must be one of: {}", EDITABLE.join(", "))
        });
    }
    content(&mut violations, &request.content.clone().unwrap_or_default(), &request.fields);
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, id)
}

/// What an edit says, held against what a model has to keep to.
fn content(violations: &mut Violations, content: &CandidateContent, fields: &[String]) {
    // What is larger, or names more parts than there are, is refused for that, and not looked at.
    if prost::Message::encoded_len(content) > CONTENT_BYTES {
        return violations.add("content", "must have at most 64 KiB");
    }
    if fields.len() > EDITABLE.len() {
        return;
    }
    let Some(mut value) = construct_wire::scan::to_content(content) else {
        return violations.add("content", "cannot be read");
    };
    for output in
        value["outputs"].as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut)
    {
        // They are of the same message as inputs, and have neither.
        output.retain(|key, _| key != "required" && key != "default");
    }
    for field in fields {
        let Some(validator) = PARTS.get(field.as_str()) else { continue };
        for error in validator.iter_errors(&value[field.as_str()]).take(TOLD) {
            let place = error.instance_path().to_string().replace('/', ".");
            let words: String = error.to_string().chars().take(300).collect();
            violations.add(format!("content.{field}{place}"), words);
        }
    }
    violations.no_nul("content.description", &content.description);
}

pub(crate) fn create_tools(
    request: &CreateToolsRequest,
) -> Result<(ScanId, Vec<CandidateId>), Status> {
    let mut violations = Violations::new();
    let id = violations.id("scan", &request.scan);
    violations.require(request.candidates.len() <= CANDIDATES, "candidates", || {
        "must be at most 200".into()
    });
    let named = request.candidates.iter().take(CANDIDATES).enumerate();
    let named: Vec<_> = named
        .filter_map(|(index, text)| violations.id(&format!("candidates[{index}]"), text))
        .collect();
    violations.idempotency_key(&request.idempotency_key);
    checked(violations, id).map(|id| (id, named))
}

pub(crate) fn compare_scans(request: &CompareScansRequest) -> Result<(ScanId, ScanId), Status> {
    let mut violations = Violations::new();
    let before = violations.id("before", &request.before);
    let after = violations.id("after", &request.after);
    checked(violations, before.zip(after))
}

fn checked<T>(violations: Violations, value: Option<T>) -> Result<T, Status> {
    super::tasks::checked(violations, value)
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::{CandidateCredential, CandidateField, CandidateSideEffect};

    use super::*;
    use crate::validate::tests::fields;

    fn of(source: Source) -> Result<(), Vec<String>> {
        let spec = ScanSpec { source: Some(source), ..ScanSpec::default() };
        let request = CreateScanRequest { spec: Some(spec), ..CreateScanRequest::default() };
        create_scan(&request).map_err(|status| fields(&status))
    }

    #[test]
    fn a_repository_is_named_by_its_path_or_its_address() {
        for (location, path) in [
            ("octocat/hello", (None, "octocat/hello")),
            ("https://github.com/octocat/hello.git", (Some("github.com"), "octocat/hello")),
            ("https://GitHub.example.com:8443/a/b/", (Some("github.example.com:8443"), "a/b")),
        ] {
            let (host, found) = path_of(location).expect("it is one");
            assert_eq!((host.as_deref(), found.as_str()), path, "{location}");
            assert_eq!(of(Source::Github(location.to_owned())), Ok(()), "{location}");
        }
        for location in [
            "",
            "octocat",
            "a/b/c",
            "../b",
            "a/..",
            "a b/c",
            "https://token@github.com/a/b",
            "https://github.com/a/b?x=1",
            "file:///etc/passwd",
            "git@github.com:a/b",
            "a/b\0",
        ] {
            assert!(of(Source::Github(location.to_owned())).is_err(), "{location}");
        }
        assert_eq!(of(Source::Gitlab("group/sub/project".to_owned())), Ok(()));
        assert!(of(Source::Folder("relative".to_owned())).is_err());
        assert!(of(Source::Folder("/a/../b".to_owned())).is_err());
    }

    #[test]
    fn an_edit_keeps_to_what_a_model_has_to_keep_to() {
        let edit = |field: &str, content: CandidateContent| {
            let request = ReviewCandidateRequest {
                candidate: format!("candidate_{}", uuid::Uuid::nil()),
                content: Some(content),
                fields: vec![field.to_owned()],
                ..ReviewCandidateRequest::default()
            };
            review_candidate(&request).map(|_| ()).map_err(|status| fields(&status))
        };
        let nothing = CandidateContent::default;
        for field in [
            "name",
            "description",
            "category",
            "score_reasons",
            "outputs",
            "side_effects",
            "dry_run",
        ] {
            let told = edit(field, nothing()).expect_err(field);
            assert!(told[0].starts_with(&format!("content.{field}")), "{field}: {told:?}");
        }
        for field in ["inputs", "credentials", "score", "confidence"] {
            assert_eq!(edit(field, nothing()), Ok(()), "{field}");
        }
        let output = CandidateField {
            name: "report".into(),
            r#type: "file".into(),
            ..CandidateField::default()
        };
        assert_eq!(
            edit("outputs", CandidateContent { outputs: vec![output], ..nothing() }),
            Ok(())
        );
        let secret = CandidateCredential { name: "ghp_ value".into(), purpose: "to read".into() };
        let told = edit("credentials", CandidateContent { credentials: vec![secret], ..nothing() });
        assert_eq!(told, Err(vec!["content.credentials.0.name".to_owned()]));
        let effect = CandidateSideEffect { kind: "x".into(), description: String::new() };
        let told =
            edit("side_effects", CandidateContent { side_effects: vec![effect], ..nothing() });
        assert_eq!(told, Err(vec!["content.side_effects.0.kind".to_owned()]));
        assert!(edit("score", CandidateContent { score: 101, ..nothing() }).is_err());
        assert!(
            edit("confidence", CandidateContent { confidence: f64::NAN, ..nothing() }).is_err()
        );
        let many = vec![CandidateField::default(); 100_000];
        assert_eq!(
            edit("inputs", CandidateContent { inputs: many, ..nothing() }),
            Err(vec!["content".to_owned()])
        );
    }

    #[test]
    fn of_a_candidate_the_places_and_the_proof_cannot_be_edited() {
        let request = |fields: &[&str]| ReviewCandidateRequest {
            candidate: format!("candidate_{}", uuid::Uuid::nil()),
            content: Some(CandidateContent {
                name: "a-tool".into(),
                ..CandidateContent::default()
            }),
            fields: fields.iter().map(|field| (*field).to_owned()).collect(),
            ..ReviewCandidateRequest::default()
        };
        assert!(review_candidate(&request(&["name"])).is_ok());
        // Not behind others, either.
        let mut hidden = vec!["name"; EDITABLE.len()];
        hidden.push("evidence");
        assert!(review_candidate(&request(&hidden)).is_err());
        for field in ["evidence", "entry_point", "id", ""] {
            let status = review_candidate(&request(&[field])).expect_err("it is refused");
            assert_eq!(fields(&status), ["fields[0]"], "{field}");
        }
    }
}
