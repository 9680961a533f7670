//! Scans of repositories.

use std::{collections::BTreeMap, sync::LazyLock};

use construct_domain::{CandidateId, ScanId};
use construct_proto::v1::{
    CandidateContent, CandidateState, CreateScanConnectionRequest, CreateScanRequest,
    ReviewCandidateRequest, ScanHost, WatchScanRequest, scan_connection_spec::Credential,
    scan_spec::Source,
};
use construct_wire::scan::CANDIDATE_SCHEMA;
use jsonschema::Validator;
use serde_json::Value;
use tonic::{Status, codegen::http::Uri};

use super::checked;
use crate::validate::{Violations, id};

const CONTENT_BYTES: usize = 64 * 1024;
/// Maximum number of errors for one field of a candidate.
const MAX_FIELD_ERRORS: usize = 16;
/// The editable fields of a candidate. Its location and its proof were checked and stay.
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
/// The schema of each field of a candidate.
static FIELD_VALIDATORS: LazyLock<BTreeMap<&str, Validator>> = LazyLock::new(|| {
    let schema: Value =
        serde_json::from_str(CANDIDATE_SCHEMA).expect("the schema is part of this program");
    let part = |name| {
        let part = &schema["properties"][name];
        (name, jsonschema::validator_for(part).expect("the schema is part of this program"))
    };
    EDITABLE.into_iter().map(part).collect()
});

pub(crate) fn create_scan_connection(request: &CreateScanConnectionRequest) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    if !spec.base_url.is_empty() && !violations.concern("spec.base_url") {
        let uri: Result<Uri, _> = spec.base_url.parse();
        let is_plain = uri.is_ok_and(|uri| {
            uri.host().is_some()
                && uri.query().is_none()
                && matches!(uri.scheme_str(), Some("http" | "https"))
        });
        violations.require(is_plain && !spec.base_url.contains('@'), "spec.base_url", || {
            "must be a URL like `https://github.example.com/api/v3`".into()
        });
    }
    let is_app = matches!(spec.credential, Some(Credential::App(_)));
    violations.require(!is_app || spec.host() == ScanHost::Github, "spec.app", || {
        "is only for GitHub".into()
    });
    violations.finish()
}

pub(crate) fn create_scan(request: &CreateScanRequest) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    match &spec.source {
        Some(Source::Github(location)) => {
            check_location(
                &mut violations,
                "spec.github",
                location,
                |parts| parts == 2,
                "`owner/name`",
            );
        }
        Some(Source::Gitlab(location)) => {
            check_location(
                &mut violations,
                "spec.gitlab",
                location,
                |parts| (2..=20).contains(&parts),
                "`group/project`",
            );
        }
        Some(Source::Upload(_) | Source::Folder(_)) => {
            violations.require(spec.connection.is_empty(), "spec.connection", || {
                "is only for GitHub and GitLab".into()
            });
        }
        None => {}
    }
    violations.finish()
}

/// Checks the URL or the name of a repository.
fn check_location(
    violations: &mut Violations,
    field: &str,
    location: &str,
    parts: impl Fn(usize) -> bool,
    form: &str,
) {
    if violations.concern(field) {
        return;
    }
    let fits = repository_path(location).is_some_and(|(_, path)| {
        let part = |part: &str| {
            !part.is_empty()
                && part != "."
                && part != ".."
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        parts(path.split('/').count()) && path.split('/').all(part)
    });
    violations.require(fits, field, || {
        format!("must be {form}, or the `https://` URL of the repository")
    });
}

/// Returns the host of a location, if it has one, and the path of the repository.
pub(crate) fn repository_path(location: &str) -> Option<(Option<String>, String)> {
    let trimmed_path = |path: &str| {
        path.trim_matches('/').strip_suffix(".git").unwrap_or(path.trim_matches('/')).to_owned()
    };
    if !location.contains("://") {
        return Some((None, trimmed_path(location)));
    }
    let uri: Uri = location.parse().ok()?;
    let host = uri
        .host()
        .filter(|_| matches!(uri.scheme_str(), Some("https" | "http")) && uri.query().is_none())?;
    let authority = uri.authority().filter(|authority| !authority.as_str().contains('@'))?;
    let host = if authority.port().is_some() { authority.as_str() } else { host };
    Some((Some(host.to_ascii_lowercase()), trimmed_path(uri.path())))
}

pub(crate) fn watch_scan(request: &WatchScanRequest) -> Result<(ScanId, i64), Status> {
    let mut violations = Violations::in_request(request);
    let after = if request.cursor.is_empty() { Some(0) } else { request.cursor.parse().ok() };
    let after: Option<i64> = after.filter(|after| *after >= 0);
    violations.require(after.is_some(), "cursor", || "is not the cursor of an event".into());
    // The rules of single fields come first: their violations name the fields.
    let after = checked(violations, after)?;
    Ok((id(&request.scan)?, after))
}

pub(crate) fn review_candidate(request: &ReviewCandidateRequest) -> Result<CandidateId, Status> {
    let mut violations = Violations::in_request(request);
    violations.require(request.state() != CandidateState::HandedOver, "state", || {
        "must be `PROPOSED`, `ACCEPTED` or `REJECTED`, or not set".into()
    });
    let edits = !request.fields.is_empty();
    violations.require(edits || request.state() != CandidateState::Unspecified, "state", || {
        "is required, or `fields` with a `content`".into()
    });
    violations.require(edits == request.content.is_some(), "fields", || {
        "must be set with `content`, and only then: the fields of it to replace".into()
    });
    violations.require(request.fields.len() <= EDITABLE.len(), "fields", || {
        format!("must be at most {}", EDITABLE.len())
    });
    for (index, field) in request.fields.iter().enumerate().take(EDITABLE.len()) {
        violations.require(EDITABLE.contains(&field.as_str()), &format!("fields[{index}]"), || {
            format!("must be one of: {}", EDITABLE.join(", "))
        });
    }
    check_content(&mut violations, &request.content.clone().unwrap_or_default(), &request.fields);
    violations.finish()?;
    id(&request.candidate)
}

/// Checks an edit against the schema of the model's answer.
fn check_content(violations: &mut Violations, content: &CandidateContent, fields: &[String]) {
    // Content that is too large or names too many fields is refused without further checks.
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
        // Outputs have the same message type as inputs, but not these fields.
        output.retain(|key, _| key != "required" && key != "default");
    }
    for field in fields {
        let Some(validator) = FIELD_VALIDATORS.get(field.as_str()) else { continue };
        for error in validator.iter_errors(&value[field.as_str()]).take(MAX_FIELD_ERRORS) {
            let place = error.instance_path().to_string().replace('/', ".");
            let description: String = error.to_string().chars().take(300).collect();
            violations.add(format!("content.{field}{place}"), description);
        }
    }
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::{CandidateCredential, CandidateField, CandidateSideEffect, ScanSpec};

    use super::*;
    use crate::validate::tests::fields;

    fn check_source(source: Source) -> Result<(), Vec<String>> {
        let spec = ScanSpec { source: Some(source), ..ScanSpec::default() };
        let request = CreateScanRequest { spec: Some(spec), ..CreateScanRequest::default() };
        create_scan(&request).map_err(|status| fields(&status))
    }

    #[test]
    fn repository_is_named_by_path_or_url() {
        for (location, path) in [
            ("octocat/hello", (None, "octocat/hello")),
            ("https://github.com/octocat/hello.git", (Some("github.com"), "octocat/hello")),
            ("https://GitHub.example.com:8443/a/b/", (Some("github.example.com:8443"), "a/b")),
        ] {
            let (host, found) = repository_path(location).expect("it is one");
            assert_eq!((host.as_deref(), found.as_str()), path, "{location}");
            assert_eq!(check_source(Source::Github(location.to_owned())), Ok(()), "{location}");
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
            assert!(check_source(Source::Github(location.to_owned())).is_err(), "{location}");
        }
        assert_eq!(check_source(Source::Gitlab("group/sub/project".to_owned())), Ok(()));
        assert!(check_source(Source::Folder("relative".to_owned())).is_err());
        assert!(check_source(Source::Folder("/a/../b".to_owned())).is_err());
    }

    #[test]
    fn edit_follows_the_schema_of_the_model() {
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
    fn entry_point_and_evidence_cannot_be_edited() {
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
        // Nor behind others.
        let mut hidden = vec!["name"; EDITABLE.len()];
        hidden.push("evidence");
        assert!(review_candidate(&request(&hidden)).is_err());
        for field in ["evidence", "entry_point", "id", ""] {
            let status = review_candidate(&request(&[field])).expect_err("it is refused");
            assert_eq!(fields(&status), ["fields[0]"], "{field}");
        }
    }
}
