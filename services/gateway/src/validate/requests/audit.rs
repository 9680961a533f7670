//! The audit log.

use construct_domain::OrganizationId;
use construct_proto::v1::{AuditFilter, ExportAuditEntriesRequest, ListAuditEntriesRequest};
use construct_store::{self as store, Cursor};
use tonic::{Code, Status};

use crate::{
    convert, metrics,
    page::{Column, Page},
    validate::{Violations, optional_id},
};

pub(crate) fn list_audit_entries(
    organization: OrganizationId,
    request: &ListAuditEntriesRequest,
) -> Result<(Page<Cursor>, store::AuditFilter), Status> {
    let mut violations = Violations::in_request(request);
    let page = Page::read(request, organization, &[Column::CreatedAt], &mut violations);
    filter(violations, request.filter.as_ref()).map(|filter| (page, filter))
}

pub(crate) fn export_audit_entries(
    request: &ExportAuditEntriesRequest,
) -> Result<store::AuditFilter, Status> {
    filter(Violations::in_request(request), request.filter.as_ref())
}

fn filter(
    mut violations: Violations,
    requested: Option<&AuditFilter>,
) -> Result<store::AuditFilter, Status> {
    let requested = requested.cloned().unwrap_or_default();
    let code = (0..=16_u8)
        .find(|code| metrics::code_name(Code::from(i32::from(*code))) == requested.outcome);
    violations.require(requested.outcome.is_empty() || code.is_some(), "filter.outcome", || {
        "is not a gRPC code such as `OK` or `PERMISSION_DENIED`".into()
    });
    violations.finish()?;
    Ok(store::AuditFilter {
        since: requested.since.and_then(convert::to_time),
        until: requested.until.and_then(convert::to_time),
        user: optional_id(&requested.user)?,
        api_key: optional_id(&requested.api_key)?,
        method: Some(&requested.method)
            .filter(|glob| !glob.is_empty())
            .map(|glob| like_pattern(glob)),
        object: Some(requested.object).filter(|object| !object.is_empty()),
        code,
    })
}

/// Converts a glob to a `LIKE` pattern.
fn like_pattern(glob: &str) -> String {
    let mut pattern = String::new();
    for letter in glob.chars() {
        match letter {
            '*' => pattern.push('%'),
            '%' | '_' | '\\' => pattern.extend(['\\', letter]),
            other => pattern.push(other),
        }
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::tests::fields;

    #[test]
    fn audit_filter_fields_are_validated() {
        let requested = AuditFilter {
            since: Some(prost_types::Timestamp { seconds: i64::MAX, nanos: 0 }),
            user: "task_1".into(),
            api_key: "ct_secret".into(),
            method: "x".repeat(201),
            object: "a\0".into(),
            outcome: "FINE".into(),
            ..AuditFilter::default()
        };
        let request = ExportAuditEntriesRequest { filter: Some(requested) };
        let status = export_audit_entries(&request).expect_err("all is wrong");
        let expected = [
            "filter.since",
            "filter.user",
            "filter.api_key",
            "filter.method",
            "filter.object",
            "filter.outcome",
        ];
        assert_eq!(fields(&status), expected);
        let filter = AuditFilter {
            method: "*/Get_%".into(),
            outcome: "ABORTED".into(),
            ..AuditFilter::default()
        };
        let read = export_audit_entries(&ExportAuditEntriesRequest { filter: Some(filter) })
            .expect("it is fine");
        assert_eq!((read.method.as_deref(), read.code), (Some("%/Get\\_\\%"), Some(10)));
        let everything =
            export_audit_entries(&ExportAuditEntriesRequest::default()).expect("it is fine");
        assert_eq!(everything, store::AuditFilter::default());
    }
}
