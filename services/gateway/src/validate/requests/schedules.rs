//! Schedules.

use construct_domain::{
    TaskId,
    schedule::{InvalidTiming, Timing},
};
use construct_proto::v1::{CreateScheduleRequest, UpdateScheduleRequest};
use jiff::Timestamp;
use tonic::Status;

use super::{checked, tasks::blocks};
use crate::{
    convert,
    validate::{Violations, optional_id},
};

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
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    match (spec.task.as_str(), spec.agent.as_str()) {
        ("", "") => violations
            .add("spec.agent", "is required: the name or id of an agent, unless there is a task"),
        ("", _) | (_, "") => {}
        (_, _) => violations.add("spec.agent", "must be empty when there is a task"),
    }
    let of_tasks = [("spec.title", &spec.title), ("spec.workspace", &spec.workspace)];
    for (field, value) in of_tasks.into_iter().filter(|_| !spec.task.is_empty()) {
        violations
            .require(value.is_empty(), field, || "is only for schedules that begin tasks".into());
    }
    blocks(&mut violations, "spec.blocks", &spec.blocks);
    let at = spec.at.and_then(convert::to_time);
    let timing =
        read(&mut violations, "spec.", spec.at.is_some(), at, &spec.cron, &spec.time_zone, now);
    let (timing, next) = checked(violations, timing)?;
    Ok(Checked { task: optional_id(&spec.task)?, timing, next })
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
    let mut violations = Violations::in_request(request);
    if !request.blocks.is_empty() {
        blocks(&mut violations, "blocks", &request.blocks);
    }
    violations.finish()
}

/// When a schedule is due that was due by `before` and is updated.
pub(crate) fn timing(
    request: &UpdateScheduleRequest,
    before: &Timing,
    now: Timestamp,
) -> Result<(Timing, Timestamp), Status> {
    let mut violations = Violations::new();
    let at = request.at.and_then(convert::to_time);
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
