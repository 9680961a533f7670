//! The audit trail.

use construct_domain::OrganizationId;
use construct_proto::v1::{AuditFilter, ExportAuditEntriesRequest, ListAuditEntriesRequest};
use construct_store::{self as store, Cursor};
use tonic::{Code, Status};

use crate::{
    convert, metrics,
    page::{Column, Page},
    validate::Violations,
};

/// Characters of what an entry is searched for.
const CHARS: usize = 200;

pub(crate) fn list_audit_entries(
    organization: OrganizationId,
    request: &ListAuditEntriesRequest,
) -> Result<(Page<Cursor>, store::AuditFilter), Status> {
    let mut violations = Violations::new();
    let default = AuditFilter::default();
    let wanted = request.filter.as_ref().unwrap_or(&default);
    let columns = &[Column::CreatedAt];
    let page = Page::read(
        request.page.as_ref(),
        "ListAuditEntries",
        organization,
        wanted,
        columns,
        &mut violations,
    );
    let filter = filter(wanted, &mut violations);
    violations.finish().map(|()| (page, filter))
}

pub(crate) fn export_audit_entries(
    request: &ExportAuditEntriesRequest,
) -> Result<store::AuditFilter, Status> {
    let mut violations = Violations::new();
    let filter =
        filter(request.filter.as_ref().unwrap_or(&AuditFilter::default()), &mut violations);
    violations.finish().map(|()| filter)
}

fn filter(wanted: &AuditFilter, violations: &mut Violations) -> store::AuditFilter {
    let mut time = |field: &str, time: Option<prost_types::Timestamp>| {
        let read = time.and_then(convert::to_time);
        violations.require(time.is_none() || read.is_some(), field, || "is not a time".into());
        read
    };
    let (since, until) = (time("filter.since", wanted.since), time("filter.until", wanted.until));
    for (field, text) in [("filter.method", &wanted.method), ("filter.object", &wanted.object)] {
        violations.chars(field, text, CHARS);
    }
    let user =
        if wanted.user.is_empty() { None } else { violations.id("filter.user", &wanted.user) };
    let api_key = if wanted.api_key.is_empty() {
        None
    } else {
        violations.id("filter.api_key", &wanted.api_key)
    };
    let code =
        (0..=16_u8).find(|code| metrics::name(Code::from(i32::from(*code))) == wanted.outcome);
    violations.require(wanted.outcome.is_empty() || code.is_some(), "filter.outcome", || {
        "is no code of gRPC's, as `OK` or `PERMISSION_DENIED`".into()
    });
    store::AuditFilter {
        since,
        until,
        user,
        api_key,
        method: Some(&wanted.method).filter(|glob| !glob.is_empty()).map(|glob| pattern(glob)),
        object: Some(&wanted.object).filter(|object| !object.is_empty()).cloned(),
        code,
    }
}

/// A pattern as people write it, in the words of `LIKE`.
fn pattern(glob: &str) -> String {
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
    fn every_part_of_a_filter_is_held_against_its_limits() {
        let wanted = AuditFilter {
            since: Some(prost_types::Timestamp { seconds: i64::MAX, nanos: 0 }),
            user: "task_1".into(),
            api_key: "ct_secret".into(),
            method: "x".repeat(CHARS + 1),
            object: "a\0".into(),
            outcome: "FINE".into(),
            ..AuditFilter::default()
        };
        let request = ExportAuditEntriesRequest { filter: Some(wanted) };
        let status = export_audit_entries(&request).expect_err("all is wrong");
        let expected = [
            "filter.since",
            "filter.method",
            "filter.object",
            "filter.user",
            "filter.api_key",
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
