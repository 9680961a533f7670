//! Schedules.

use construct_domain::{
    TaskId,
    schedule::{InvalidTiming, Timing},
};
use construct_proto::v1::{CreateScheduleRequest, UpdateScheduleRequest};
use jiff::Timestamp;
use tonic::Status;

use super::{checked, tasks::check_blocks};
use crate::{
    convert,
    validate::{Violations, optional_id},
};

/// The parsed target and timing of a new schedule.
pub(crate) struct NewTiming {
    /// `None`: the schedule is for an agent.
    pub(crate) task: Option<TaskId>,
    pub(crate) timing: Timing,
    pub(crate) next: Timestamp,
}

pub(crate) fn create_schedule(
    request: &CreateScheduleRequest,
    now: Timestamp,
) -> Result<NewTiming, Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    match (spec.task.as_str(), spec.agent.as_str()) {
        ("", "") => violations
            .add("spec.agent", "is required: the name or id of an agent, unless there is a task"),
        ("", _) | (_, "") => {}
        (_, _) => violations.add("spec.agent", "must be empty when there is a task"),
    }
    let task_fields = [("spec.title", &spec.title), ("spec.workspace", &spec.workspace)];
    for (field, value) in task_fields.into_iter().filter(|_| !spec.task.is_empty()) {
        violations
            .require(value.is_empty(), field, || "is only for schedules that create tasks".into());
    }
    check_blocks(&mut violations, "spec.blocks", &spec.blocks);
    let at = spec.at.and_then(convert::to_time);
    let timing = parse_timing(
        &mut violations,
        "spec.",
        spec.at.is_some(),
        at,
        &spec.cron,
        &spec.time_zone,
        now,
    );
    let (timing, next) = checked(violations, timing)?;
    Ok(NewTiming { task: optional_id(&spec.task)?, timing, next })
}

/// Parses the timing of a request, and computes the first run.
fn parse_timing(
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
        check_blocks(&mut violations, "blocks", &request.blocks);
    }
    violations.finish()
}

/// Computes the timing of an updated schedule. `before` is its timing before the update.
pub(crate) fn updated_timing(
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
    let timing = parse_timing(&mut violations, "", request.at.is_some(), at, cron, zone, now);
    checked(violations, timing)
}
