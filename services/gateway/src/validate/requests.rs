//! What requests are checked for that the contract's rules for single fields cannot say. Each check
//! begins with these rules, so that all that is wrong is told at once.

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
    create_agent, create_model_provider, model_provider_fits, update_agent, update_model_provider,
};
pub(crate) use files::{PART_BYTES, create_file, file_filter};
pub(crate) use money::create_budget;
pub(crate) use scans::{
    create_scan, create_scan_connection, path_of, review_candidate, watch_scan,
};
pub(crate) use schedules::{create_schedule, timing, update_schedule};
pub(crate) use secrets::{create_secret, secret_fits, update_secret};
pub(crate) use states::{put_state, watch_states};
pub(crate) use tasks::{
    create_message, create_task, edit_message, subscribe, update_message, update_task,
};
pub(crate) use usage::{list_usage, update_quota};

use super::Violations;
use crate::page::{Column, Page, PagePosition};

/// A request for a page of a list that can be ordered by `columns`.
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

/// A value that was read from a request, unless something is wrong with the request.
fn checked<T>(violations: Violations, value: Option<T>) -> Result<T, Status> {
    violations.finish()?;
    // What could not be read was reported.
    value.ok_or_else(|| Status::invalid_argument("a value is missing"))
}

#[cfg(test)]
mod tests;
