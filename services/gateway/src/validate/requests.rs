//! Checks that the rules of single fields cannot express. Each check starts with those rules, so
//! that all violations are reported at once.

mod audit;
mod entities;
mod files;
mod money;
mod policies;
mod scans;
mod schedules;
mod secrets;
mod states;
mod tasks;
mod usage;

use construct_domain::OrganizationId;
use construct_proto::PagedRequest;
use tonic::Status;

pub(crate) use audit::{export_audit_entries, list_audit_entries};
pub(crate) use entities::{
    check_model_provider_update, create_agent, create_model_provider, update_agent,
    update_model_provider,
};
pub(crate) use files::{PART_BYTES, create_file, file_filter};
pub(crate) use money::create_budget;
pub(crate) use scans::{
    create_scan, create_scan_connection, repository_path, review_candidate, watch_scan,
};
pub(crate) use schedules::{create_schedule, update_schedule, updated_timing};
pub(crate) use secrets::{check_secret_update, create_secret, update_secret};
pub(crate) use states::{put_state, watch_states};
pub(crate) use tasks::{
    create_message, create_task, edit_message, subscribe, update_message, update_task,
};
pub(crate) use usage::{list_usage, update_quota};

use super::Violations;
use crate::page::{Column, Page, PagePosition};

/// Parses a request for a page of a list that can be ordered by `columns`.
///
/// # Errors
/// `INVALID_ARGUMENT`.
pub(crate) fn list<P: PagePosition>(
    organization: OrganizationId,
    request: &impl PagedRequest,
    columns: &[Column],
) -> Result<Page<P>, Status> {
    let mut violations = Violations::in_request(request);
    let page = Page::read(request, organization, columns, &mut violations);
    violations.finish().map(|()| page)
}

/// Returns a parsed value if the request has no violations.
fn checked<T>(violations: Violations, value: Option<T>) -> Result<T, Status> {
    violations.finish()?;
    // A value that could not be parsed has a violation.
    value.ok_or_else(|| Status::invalid_argument("a value is missing"))
}

#[cfg(test)]
mod tests;
