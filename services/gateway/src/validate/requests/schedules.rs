//! Schedules.

use construct_domain::{
    OrganizationId, TaskId,
    schedule::{InvalidTiming, Timing},
};
use construct_proto::v1::{
    CreateScheduleRequest, ListSchedulesRequest, MessagePriority, MissedRuns, ScheduleSpec,
    UpdateScheduleRequest,
};
use construct_store::Cursor;
use jiff::Timestamp;
use tonic::Status;

use super::{
    entities::ORDERS,
    tasks::{blocks, checked, timestamp, title, workspace},
};
use crate::{page::Page, validate::Violations};

/// What a new schedule says about when and for whom.
pub(crate) struct Checked {
    /// None: it is for an agent.
    pub(crate) task: Option<TaskId>,
    pub(crate) timing: Timing,
    pub(crate) next: Timestamp,
}

pub(crate) fn create_schedule(
    request: &CreateScheduleRequest,
    now: Timestamp,
) -> Result<Checked, Status> {
    let mut violations = Violations::new();
    let default = ScheduleSpec::default();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.as_ref().unwrap_or(&default);
    violations.name("spec.name", &spec.name);
    let mut task = None;
    match (spec.task.as_str(), spec.agent.as_str()) {
        ("", agent) => {
            violations.reference("spec.agent", agent, "an agent, unless there is a task")
        }
        (id, "") => task = violations.id("spec.task", id),
        (_, _) => violations.add("spec.agent", "must be empty when there is a task"),
    }
    let of_tasks = [("spec.title", &spec.title), ("spec.workspace", &spec.workspace)];
    for (field, value) in of_tasks.into_iter().filter(|_| !spec.task.is_empty()) {
        violations
            .require(value.is_empty(), field, || "is only for schedules that begin tasks".into());
    }
    blocks(&mut violations, "spec.blocks", &spec.blocks);
    let priority = MessagePriority::try_from(spec.priority);
    violations.require(priority.is_ok(), "spec.priority", || "is not a known priority".into());
    title(&mut violations, "spec.title", &spec.title);
    workspace(&mut violations, "spec.workspace", &spec.workspace);
    let missed = MissedRuns::try_from(spec.missed_runs);
    violations.require(missed.is_ok(), "spec.missed_runs", || "is not a known policy".into());
    let at = timestamp(&mut violations, "spec.at", spec.at.as_ref());
    let timing =
        read(&mut violations, "spec.", spec.at.is_some(), at, &spec.cron, &spec.time_zone, now);
    violations.idempotency_key(&request.idempotency_key);
    let (timing, next) = checked(violations, timing)?;
    Ok(Checked { task, timing, next })
}

/// What the parts of a request say about when, and the first run by that.
fn read(
    violations: &mut Violations,
    prefix: &str,
    has_time: bool,
    at: Option<Timestamp>,
    cron: &str,
    time_zone: &str,
    now: Timestamp,
) -> Option<(Timing, Timestamp)> {
    let field = |name: &str| format!("{prefix}{name}");
    let timing = match (has_time, cron) {
        (true, "") => {
            violations.require(time_zone.is_empty(), &field("time_zone"), || {
                "is only for patterns".into()
            });
            Timing::At(at?)
        }
        (true, _) => {
            violations.add(field("cron"), "must be empty when there is a time");
            return None;
        }
        (false, _) => Timing::Cron {
            pattern: cron.to_owned(),
            time_zone: if time_zone.is_empty() { "UTC" } else { time_zone }.to_owned(),
        },
    };
    match timing.next_after(now) {
        Ok(Some(next)) => return Some((timing, next)),
        Ok(None) if has_time => violations.add(field("at"), "must be in the future"),
        Ok(None) => violations.add(field("cron"), "has no run within four years"),
        Err(InvalidTiming::TimeZone(zone)) => {
            violations.add(field("time_zone"), InvalidTiming::TimeZone(zone).to_string())
        }
        Err(InvalidTiming::Pattern(why)) => violations.add(field("cron"), why),
    }
    None
}

pub(crate) fn update_schedule(request: &UpdateScheduleRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.reference("schedule", &request.schedule, "a schedule");
    if let Some(name) = &request.name {
        violations.name("name", name);
    }
    if !request.blocks.is_empty() {
        blocks(&mut violations, "blocks", &request.blocks);
    }
    let missed = MissedRuns::try_from(request.missed_runs);
    violations.require(missed.is_ok(), "missed_runs", || "is not a known policy".into());
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

/// When a schedule is due that was due by `before` and is updated.
pub(crate) fn timing(
    request: &UpdateScheduleRequest,
    before: &Timing,
    now: Timestamp,
) -> Result<(Timing, Timestamp), Status> {
    let mut violations = Violations::new();
    let at = timestamp(&mut violations, "at", request.at.as_ref());
    let (pattern, zone) = match before {
        Timing::Cron { pattern, time_zone } if request.at.is_none() => {
            (pattern.as_str(), time_zone.as_str())
        }
        Timing::Cron { .. } | Timing::At(_) => ("", ""),
    };
    let cron = request.cron.as_deref().unwrap_or(pattern);
    let zone = request.time_zone.as_deref().unwrap_or(zone);
    let timing = read(&mut violations, "", request.at.is_some(), at, cron, zone, now);
    checked(violations, timing)
}

/// A request that only names a schedule, with an idempotency key (empty for a read).
pub(crate) fn schedule(schedule: &str, idempotency_key: &str) -> Result<(), Status> {
    let mut violations = Violations::new();
    violations.reference("schedule", schedule, "a schedule");
    violations.idempotency_key(idempotency_key);
    violations.finish()
}

pub(crate) fn list_schedules(
    organization: OrganizationId,
    request: &ListSchedulesRequest,
) -> Result<(Page<Cursor>, Option<TaskId>), Status> {
    let mut violations = Violations::new();
    let filter = request.filter.clone().unwrap_or_default();
    violations.name_prefix("filter.name_prefix", &filter.name_prefix);
    let task =
        if filter.task.is_empty() { None } else { violations.id("filter.task", &filter.task) };
    let page = Page::read(
        request.page.as_ref(),
        "ListSchedules",
        organization,
        &filter,
        &ORDERS,
        &mut violations,
    );
    violations.finish().map(|()| (page, task))
}
