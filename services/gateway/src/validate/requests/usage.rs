//! Quotas and usage.

use std::collections::HashSet;

use construct_domain::{ApiKeyId, OrganizationId};
use construct_proto::v1::{
    ListUsageRequest, QuotaLimits, UpdateQuotaRequest, UsageDimension, list_usage_request::Filter,
};
use construct_store::{Dimensions, Limits, UsageCursor};
use jiff::{SignedDuration, Timestamp, tz::TimeZone};
use tonic::Status;

use crate::{
    convert,
    page::{Column, Page},
    validate::{Violations, id, optional_id},
};

/// The default period.
const DEFAULT_PERIOD: SignedDuration = SignedDuration::from_hours(30 * 24);
/// The maximum period.
const MAX_PERIOD: SignedDuration = SignedDuration::from_hours(400 * 24);
/// Returns the organization and the limits that replace those of its tier.
pub(crate) fn update_quota(
    request: &UpdateQuotaRequest,
    has_tier: impl Fn(&str) -> bool,
) -> Result<(OrganizationId, Limits), Status> {
    let mut violations = Violations::in_request(request);
    violations.require(request.tier.is_empty() || has_tier(&request.tier), "tier", || {
        "is neither `unlimited` nor a tier of the gateway's configuration (gateway_tiers)".into()
    });
    violations.finish()?;
    Ok((id(&request.organization)?, request.overrides.as_ref().map(limits).unwrap_or_default()))
}

fn limits(limits: &QuotaLimits) -> Limits {
    Limits {
        requests_per_minute: limits.requests_per_minute,
        key_requests_per_minute: limits.key_requests_per_minute,
        tasks_per_day: limits.tasks_per_day,
        runs_per_day: limits.runs_per_day,
        tokens_per_day: limits.tokens_per_day,
        spend_per_month_pico_usd: limits.spend_per_month_pico_usd,
        storage_bytes: limits.storage_bytes,
    }
}

/// A parsed usage request.
pub(crate) struct Usage {
    pub(crate) page: Page<UsageCursor>,
    pub(crate) of: Dimensions,
    pub(crate) since: Timestamp,
    pub(crate) until: Timestamp,
    pub(crate) time_zone: String,
    pub(crate) key: Option<ApiKeyId>,
}

pub(crate) fn list_usage(
    organization: OrganizationId,
    request: &ListUsageRequest,
    now: Timestamp,
) -> Result<Usage, Status> {
    let mut violations = Violations::in_request(request);
    let default = Filter::default();
    let filter = request.filter.as_ref().unwrap_or(&default);
    let page = Page::read(request, organization, &[Column::Day], &mut violations);
    let of = dimensions(&request.dimensions, &mut violations);
    violations.require(!of.tool || filter.model.is_empty(), "filter.model", || {
        "must be empty with the dimension `TOOL`: which model made a tool call is not recorded"
            .into()
    });
    violations.require(of.tool || filter.tool.is_empty(), "filter.tool", || {
        "requires the dimension `TOOL`: model usage is not recorded by tool".into()
    });
    let (since, until) =
        (filter.since.and_then(convert::to_time), filter.until.and_then(convert::to_time));
    let until = until.unwrap_or(now);
    let since =
        since.unwrap_or_else(|| until.checked_sub(DEFAULT_PERIOD).unwrap_or(Timestamp::MIN));
    violations.require(until.duration_since(since) <= MAX_PERIOD, "filter.since", || {
        "must be at most 400 days before `until`".into()
    });
    let zone = if filter.time_zone.is_empty() { "UTC" } else { &filter.time_zone };
    let known = TimeZone::get(zone).ok().and_then(|zone| zone.iana_name().map(str::to_owned));
    violations.require(known.is_some(), "filter.time_zone", || {
        "is not an IANA time zone name like `Europe/Berlin`".into()
    });
    violations.finish()?;
    Ok(Usage {
        page,
        of,
        since,
        until,
        time_zone: known.unwrap_or_default(),
        key: optional_id(&filter.api_key)?,
    })
}

fn dimensions(wanted: &[i32], violations: &mut Violations) -> Dimensions {
    let mut of = Dimensions::default();
    let mut seen = HashSet::new();
    for (index, dimension) in wanted.iter().enumerate().take(16) {
        let field = format!("dimensions[{index}]");
        violations.require(seen.insert(*dimension), &field, || "is repeated".into());
        match UsageDimension::try_from(*dimension) {
            Ok(UsageDimension::Day) => of.day = true,
            Ok(UsageDimension::Agent) => of.agent = true,
            Ok(UsageDimension::Model) => of.model = true,
            Ok(UsageDimension::Tool) => of.tool = true,
            Ok(UsageDimension::Key) => of.key = true,
            Ok(UsageDimension::Unspecified) => violations.add(field, "is not a known dimension"),
            // The rules of the contract have reported it.
            Err(_) => {}
        }
    }
    violations.require(!(of.model && of.tool), "dimensions", || {
        "must not contain both `MODEL` and `TOOL`: which model made a tool call is not recorded"
            .into()
    });
    of
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::tests::fields;

    fn list(request: &ListUsageRequest) -> Result<Usage, Status> {
        list_usage(OrganizationId::LOCAL, request, Timestamp::UNIX_EPOCH + MAX_PERIOD)
    }

    #[test]
    fn usage_request_fields_are_validated() {
        let filter = Filter {
            agent: "Not A Name".into(),
            model: "m".into(),
            tool: "x".repeat(201),
            since: Some(prost_types::Timestamp { seconds: -1, nanos: 0 }),
            until: None,
            time_zone: "Mars/Olympus".into(),
            api_key: "ada".into(),
        };
        let dimensions = vec![UsageDimension::Tool.into(), UsageDimension::Tool.into(), 9, 0];
        let refused =
            list(&ListUsageRequest { page: None, filter: Some(filter), dimensions }).err();
        let mut wrong = fields(&refused.expect("all is wrong"));
        wrong.sort_unstable();
        assert_eq!(
            wrong,
            [
                "dimensions[1]",
                "dimensions[2]",
                "dimensions[3]",
                "filter.agent",
                "filter.api_key",
                "filter.model",
                "filter.since",
                "filter.time_zone",
                "filter.tool",
            ]
        );
        let both = vec![UsageDimension::Model.into(), UsageDimension::Tool.into()];
        let refused =
            list(&ListUsageRequest { dimensions: both, ..ListUsageRequest::default() }).err();
        assert_eq!(fields(&refused.expect("they don't go together")), ["dimensions"]);
        let tool = Filter { tool: "fetch".into(), ..Filter::default() };
        let refused =
            list(&ListUsageRequest { filter: Some(tool), ..ListUsageRequest::default() }).err();
        assert_eq!(fields(&refused.expect("models have none")), ["filter.tool"]);
    }

    #[test]
    fn default_period_is_30_days_of_utc() {
        let read = list(&ListUsageRequest::default()).expect("it is fine");
        assert_eq!((read.until - DEFAULT_PERIOD, read.time_zone.as_str()), (read.since, "UTC"));
        assert_eq!(read.of, Dimensions::default());
    }

    #[test]
    fn quota_update_is_validated() {
        let overrides = QuotaLimits { tasks_per_day: Some(-1), ..QuotaLimits::default() };
        let request = UpdateQuotaRequest {
            organization: "team".into(),
            tier: "paid".into(),
            overrides: Some(overrides),
            revision: -1,
            ..UpdateQuotaRequest::default()
        };
        let refused = update_quota(&request, |_| false).expect_err("all is wrong");
        assert_eq!(
            fields(&refused),
            ["organization", "overrides.tasks_per_day", "revision", "tier"]
        );
    }
}
