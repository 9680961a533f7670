//! Checks a run against the quotas of the schedule's organization and API key (docs/quotas.md).

use construct_domain::{ApiKeyId, OrganizationId};
use jiff::Timestamp;
use sqlx::PgConnection;

use crate::{
    CountSelection, Counts, Error, Limits, Periods, Schedule, ScheduleTarget,
    quota::{counts, key_counts},
};

/// The text of the first exhausted quota; none: the run is allowed.
pub(super) async fn exhausted_quota(
    connection: &mut PgConnection,
    schedule: &Schedule,
    now: Timestamp,
) -> Result<Option<String>, Error> {
    let organization = schedule.organization;
    let key = schedule.key.map(ApiKeyId::uuid);
    // The overrides of the organization replace the limits of its tier. A tier that no longer
    // exists is the default tier.
    let row = sqlx::query!(
        r#"SELECT coalesce(t.limits, '{}') || jsonb_strip_nulls(jsonb_build_object(
                      'tasks_per_day', q.tasks_per_day, 'runs_per_day', q.runs_per_day, 'tokens_per_day', q.tokens_per_day,
                      'spend_per_month_pico_usd', q.spend_per_month_pico_usd)) AS "organization!",
                  (SELECT k.limits FROM api_keys k WHERE k.id = $2) AS key
           FROM organizations o
           LEFT JOIN quotas q ON q.organization_id = o.id
           LEFT JOIN tiers t ON CASE
               WHEN EXISTS (SELECT FROM tiers n WHERE n.name = q.tier) THEN t.name = q.tier
               ELSE t.is_default AND o.id <> $3 AND coalesce(q.tier, '') <> 'unlimited'
           END
           WHERE o.id = $1"#,
        organization.uuid(),
        key,
        OrganizationId::LOCAL.uuid(),
    )
    .fetch_optional(&mut *connection)
    .await?;
    let Some(row) = row else { return Ok(None) };
    let periods = Periods::containing(now);
    if let Some((id, stored)) = schedule.key.zip(row.key) {
        let limits = Limits::from_column(stored)?;
        let selection = run_counts(&limits, schedule);
        if selection != CountSelection::default() {
            let done = key_counts(&mut *connection, organization, selection, &periods).await?;
            if let Some(quota) =
                first_exceeded(&limits, selection, &done.get(&id).copied().unwrap_or_default())
            {
                return Ok(Some(format!("key_{quota} of its API key is used up")));
            }
        }
    }
    let limits = Limits::from_column(row.organization)?;
    let selection = run_counts(&limits, schedule);
    if selection == CountSelection::default() {
        return Ok(None);
    }
    let done = counts(&mut *connection, organization, selection, &periods).await?;
    Ok(first_exceeded(&limits, selection, &done)
        .map(|quota| format!("{quota} of the organization is used up")))
}

/// The limited counts that a run increments.
fn run_counts(limits: &Limits, schedule: &Schedule) -> CountSelection {
    let all = CountSelection::for_limits(limits);
    CountSelection {
        tasks: all.tasks && matches!(schedule.target, ScheduleTarget::Agent(_)),
        storage: false,
        ..all
    }
}

fn first_exceeded(
    limits: &Limits,
    selection: CountSelection,
    done: &Counts,
) -> Option<&'static str> {
    let is_full = |done: i64, limit: Option<i64>| limit.is_some_and(|limit| done >= limit);
    [
        ("tasks_per_day", selection.tasks && is_full(done.tasks, limits.tasks_per_day)),
        ("runs_per_day", is_full(done.runs, limits.runs_per_day)),
        ("tokens_per_day", is_full(done.tokens, limits.tokens_per_day)),
        ("spend_per_month", is_full(done.spend_pico_usd, limits.spend_per_month_pico_usd)),
    ]
    .into_iter()
    .find_map(|(name, full)| full.then_some(name))
}
